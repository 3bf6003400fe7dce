"""Accuracy and cost of models: metrics, ImageNet's test suites, multiply-accumulates, memory and speed."""

from isomorph.analysis.cost import cost_table, count_macs, count_parameters, peak_bytes, saved_bytes
from isomorph.analysis.speed import Speed, measure_speeds, throughput
from isomorph.lab.evaluation.accuracy import PredictionCounts, evaluate
from isomorph.lab.evaluation.model_data import Sweep
from isomorph.lab.evaluation.suites import SUITES, evaluate_suites, open_suites
from isomorph.models.input_sizes import evaluation_config, fit_to_size, training_config

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
