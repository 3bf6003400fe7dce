"""Attention with relative positions, and the convolution blocks of CoAtNet."""
