"""(model, loader) -> numbers."""

from isomorph.evaluation.accuracy import answer, evaluate, tally
from isomorph.evaluation.cost import Macs, count_branches, count_macs, count_parameters, count_pass, measure_cost
from isomorph.evaluation.memory import saved_bytes
from isomorph.evaluation.peak import PeakMeter, peak_bytes
from isomorph.evaluation.sizes import at_size, channels, evaluation_config, refusal, training_config
from isomorph.evaluation.speed import Speed, speeds, throughput
from isomorph.evaluation.sweep import cost_table, fixed_cost
from isomorph.evaluation.tally import SetTally, Tally, added

__all__ = [
    "Macs",
    "PeakMeter",
    "SetTally",
    "Speed",
    "Tally",
    "added",
    "answer",
    "at_size",
    "channels",
    "cost_table",
    "count_branches",
    "count_macs",
    "count_parameters",
    "count_pass",
    "evaluate",
    "evaluation_config",
    "fixed_cost",
    "measure_cost",
    "peak_bytes",
    "refusal",
    "saved_bytes",
    "speeds",
    "tally",
    "throughput",
    "training_config",
]
