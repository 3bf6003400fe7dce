"""Pyramids of linear layers and convolutions, computed as one layer in training too (TDRL)."""
