"""Gated attention on tokens and on feature maps (ConViT, T-CNN)."""
