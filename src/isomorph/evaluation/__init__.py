"""(model, loader) -> numbers."""

from isomorph.evaluation.accuracy import answer, evaluate, tally
from isomorph.evaluation.cost import count_macs, count_parameters, measure_cost, throughput
from isomorph.evaluation.sizes import at_size, evaluation_config
from isomorph.evaluation.tally import SetTally, Tally, added

__all__ = [
    "SetTally",
    "Tally",
    "added",
    "answer",
    "at_size",
    "count_macs",
    "count_parameters",
    "evaluate",
    "evaluation_config",
    "measure_cost",
    "tally",
    "throughput",
]
