"""(model, loader) -> numbers."""

from isomorph.evaluation.accuracy import classification_metrics, evaluate, logits_and_labels
from isomorph.evaluation.cost import count_macs, count_parameters, measure_cost
from isomorph.evaluation.memory import peak_bytes, saved_bytes
from isomorph.evaluation.speed import Speed, speeds, throughput
from isomorph.evaluation.sweep import at_size, cost_rows

__all__ = [
    "Speed",
    "at_size",
    "classification_metrics",
    "cost_rows",
    "count_macs",
    "count_parameters",
    "evaluate",
    "logits_and_labels",
    "measure_cost",
    "peak_bytes",
    "saved_bytes",
    "speeds",
    "throughput",
]
