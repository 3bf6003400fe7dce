"""ImageNet-C and CIFAR-C: the cells, what a model is shown, results and scores."""

from isomorph.suites.robustness.run import robustness

__all__ = ["robustness"]
