"""ImageNet-C and CIFAR-C: what a model is shown, its cells (a corruption at a severity), their results and scores."""
