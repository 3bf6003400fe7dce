"""A training run: its state, steps and epochs, monitoring, logs, and the checks before it starts."""
