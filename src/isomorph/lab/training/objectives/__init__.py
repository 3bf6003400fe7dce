"""Training objectives: losses, as timm's loss modules (`timm.task`), and the metrics that go with them."""
