"""(model, loader) -> numbers."""

from isomorph.evaluation.accuracy import classification_metrics, evaluate, logits_and_labels
from isomorph.evaluation.cost import count_macs, count_parameters, measure_cost, throughput

__all__ = [
    "classification_metrics",
    "count_macs",
    "count_parameters",
    "evaluate",
    "logits_and_labels",
    "measure_cost",
    "throughput",
]
