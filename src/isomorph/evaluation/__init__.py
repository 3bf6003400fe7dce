"""Accuracy and cost of models: metrics, ImageNet's test suites, multiply-accumulates, memory and speed."""

from isomorph.evaluation.accuracy import PredictionCounts, evaluate
from isomorph.evaluation.cost import cost_table, count_macs, count_parameters, peak_bytes, saved_bytes
from isomorph.evaluation.input_sizes import evaluation_config, fit_to_size, training_config
from isomorph.evaluation.model_data import Sweep
from isomorph.evaluation.speed import Speed, measure_speeds, throughput
from isomorph.evaluation.suites import SUITES, evaluate_suites, open_suites

__all__ = [
    "SUITES",
    "PredictionCounts",
    "Speed",
    "Sweep",
    "cost_table",
    "count_macs",
    "count_parameters",
    "evaluate",
    "evaluate_suites",
    "evaluation_config",
    "fit_to_size",
    "measure_speeds",
    "open_suites",
    "peak_bytes",
    "saved_bytes",
    "throughput",
    "training_config",
]


def __dir__() -> list[str]:
    return sorted(__all__)
