"""Formats of labelled images, one file each: folders, tar files, Hugging Face data sets, built-in data sets."""
