"""Change the form of a model and keep its function: recast, verify, fuse and revert."""

from collections import ChainMap

from isomorph.surgery.anneal import Anneal
from isomorph.surgery.fuse import Fuse, fuse, fusible_modules
from isomorph.surgery.notes import notes
from isomorph.surgery.recalibrate import recalibrate
from isomorph.surgery.recast import Edit, Rule, edits, edits_since, recast, replay, targets
from isomorph.surgery.revert import revert
from isomorph.surgery.rules.gated import AttentionToGPSA, ConvToGPSA
from isomorph.surgery.rules.pyramid import LinearToPyramid
from isomorph.surgery.rules.refined import AttentionToRefined
from isomorph.surgery.rules.registry import RULES, build_rule, register_rule
from isomorph.surgery.unstride import Unstride, unstride
from isomorph.surgery.verify import NotEqual, VerifyReport, compare_outputs, verify

EDIT_RULES = ChainMap(RULES, {"Fuse": Fuse, "Unstride": Unstride})
"""Rules by name, as checkpoints store them: the registered ones, and those of `fuse` and `unstride`."""

__all__ = [
    "RULES",
    "Anneal",
    "AttentionToGPSA",
    "AttentionToRefined",
    "ConvToGPSA",
    "Edit",
    "Fuse",
    "LinearToPyramid",
    "NotEqual",
    "Rule",
    "Unstride",
    "VerifyReport",
    "build_rule",
    "compare_outputs",
    "edits",
    "edits_since",
    "fuse",
    "fusible_modules",
    "notes",
    "recalibrate",
    "recast",
    "register_rule",
    "replay",
    "revert",
    "targets",
    "unstride",
    "verify",
]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
