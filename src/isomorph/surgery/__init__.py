"""Surgery: model in, new model out, function kept."""

from isomorph.surgery.anneal import Anneal, gpsa_layers
from isomorph.surgery.fuse import fuse
from isomorph.surgery.pyramids import LinearToPyramid
from isomorph.surgery.recast import Edit, Rule, edits, edits_since, recast, replay, revert, targets
from isomorph.surgery.rules import GATED_RULES, AttentionToGPSA, ConvToGPSA
from isomorph.surgery.unstride import Unstride, unstride
from isomorph.surgery.verify import NotEqual, Report, compare, verify

RULES: dict[str, type[Rule]] = {**GATED_RULES, "LinearToPyramid": LinearToPyramid, "Unstride": Unstride}
"""Rules by name, as checkpoints and recipes store them."""

__all__ = [
    "GATED_RULES",
    "RULES",
    "Anneal",
    "AttentionToGPSA",
    "ConvToGPSA",
    "Edit",
    "LinearToPyramid",
    "NotEqual",
    "Report",
    "Rule",
    "Unstride",
    "compare",
    "edits",
    "edits_since",
    "fuse",
    "gpsa_layers",
    "recast",
    "replay",
    "revert",
    "targets",
    "unstride",
    "verify",
]
