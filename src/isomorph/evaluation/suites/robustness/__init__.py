"""ImageNet-C and CIFAR-C: the cells, what a model is shown, results and scores."""

from isomorph.evaluation.suites.robustness.run import measure_classifier

__all__ = ["measure_classifier"]
