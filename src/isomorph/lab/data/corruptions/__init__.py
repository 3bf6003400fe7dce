"""The image corruptions of ImageNet-C, corrupted data sets and their cache."""
