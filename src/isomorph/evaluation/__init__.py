"""(model, loader) -> numbers."""

from isomorph.evaluation.accuracy import evaluate
from isomorph.evaluation.cost import count_macs, count_parameters, measure_cost, throughput

__all__ = ["count_macs", "count_parameters", "evaluate", "measure_cost", "throughput"]
