"""Surgery: model in, new model out, function kept."""

import dataclasses
from typing import Any

from isomorph.errors import UserError
from isomorph.surgery.anneal import Anneal, annealed_layers, gpsa_layers
from isomorph.surgery.compiled import notes
from isomorph.surgery.fuse import Fuse, fuse, fusible
from isomorph.surgery.recalibrate import recalibrate
from isomorph.surgery.recast import Edit, Rule, edits, edits_since, recast, replay, revert, targets
from isomorph.surgery.rules.gated import GATED_RULES, AttentionToGPSA, ConvToGPSA
from isomorph.surgery.rules.pyramid import LinearToPyramid
from isomorph.surgery.rules.refined import AttentionToRefined
from isomorph.surgery.unstride import Unstride, unstride
from isomorph.surgery.verify import NotEqual, VerifyReport, compare_outputs, verify

RULES: dict[str, type[Rule]] = {
    **GATED_RULES,
    **{rule.__name__: rule for rule in (AttentionToRefined, LinearToPyramid, Fuse, Unstride)},
}
"""Rules by name, as checkpoints and recipes store them."""


def build_rule(name: str, **fields: Any) -> Rule:
    """A rule by name with the fields that are not None.

    Raises: UserError for a field that the rule does not have, or a value it does not take.
    """
    kind = RULES[name]
    given = {field: value for field, value in fields.items() if value is not None}
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for field in given:
        if field not in known:
            raise UserError(f"{name} has no {field}; it has {', '.join(known)}")
    return kind(**given)


__all__ = [
    "GATED_RULES",
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
    "annealed_layers",
    "build_rule",
    "compare_outputs",
    "edits",
    "edits_since",
    "fuse",
    "fusible",
    "gpsa_layers",
    "notes",
    "recalibrate",
    "recast",
    "replay",
    "revert",
    "targets",
    "unstride",
    "verify",
]
