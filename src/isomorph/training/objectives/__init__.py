"""Training objectives: losses, as timm tasks, and the metrics that go with them."""
