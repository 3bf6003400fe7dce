"""Checkpoints of models and snapshots of training runs."""
