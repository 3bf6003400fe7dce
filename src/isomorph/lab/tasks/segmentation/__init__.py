"""Semantic segmentation: a class for every pixel of an image."""
