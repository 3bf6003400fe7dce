"""(model, loader) -> numbers."""

from isomorph.evaluation.accuracy import count_predictions, evaluate, for_each_batch
from isomorph.evaluation.cost import MacCount, count_branches, count_macs, count_parameters, count_pass, measure_cost
from isomorph.evaluation.cost_tables import cost_table, static_cost
from isomorph.evaluation.input_sizes import (
    evaluation_config,
    fit_to_size,
    input_channels,
    input_size_problem,
    training_config,
)
from isomorph.evaluation.peak_memory import PeakMeter, peak_bytes
from isomorph.evaluation.prediction_counts import MultiLabelCounts, PredictionCounts, sum_counts
from isomorph.evaluation.saved_memory import saved_bytes
from isomorph.evaluation.speed import Speed, measure_speeds, throughput

__all__ = [
    "MacCount",
    "PeakMeter",
    "MultiLabelCounts",
    "Speed",
    "PredictionCounts",
    "sum_counts",
    "for_each_batch",
    "fit_to_size",
    "input_channels",
    "cost_table",
    "count_branches",
    "count_macs",
    "count_parameters",
    "count_pass",
    "evaluate",
    "evaluation_config",
    "static_cost",
    "measure_cost",
    "peak_bytes",
    "input_size_problem",
    "saved_bytes",
    "measure_speeds",
    "count_predictions",
    "throughput",
    "training_config",
]
