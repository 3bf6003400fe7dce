"""Labelled images by index, one file a format: folders, tar files, Hugging Face data sets, built-in sets."""
