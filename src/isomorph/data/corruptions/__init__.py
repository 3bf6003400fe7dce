"""Image corruptions of ImageNet-C: their functions, cache and corrupted data sets."""
