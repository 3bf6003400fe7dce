"""Tasks other than image classification: each brings data, loss, metrics and pictures to the one training loop."""
