"""A run: its state, its steps and epochs, monitoring, logs and checks before it starts."""
