"""Change the form of a model and keep its function: recast, verify, fuse, prune and revert."""

from collections import ChainMap

from isomorph.surgery.absorb import Absorb, absorb
from isomorph.surgery.anneal import Anneal
from isomorph.surgery.collapse import Collapse
from isomorph.surgery.fuse import Fuse, fuse, fuse_with_report, fusible_modules
from isomorph.surgery.fuse_report import FuseReport
from isomorph.surgery.insert import Insert, insert, register_block
from isomorph.surgery.merge import Merge
from isomorph.surgery.port.port import port_weights
from isomorph.surgery.port.report import NotPorted, PortReport
from isomorph.surgery.prune import Prune, prunable_layers, prune
from isomorph.surgery.recalibrate import recalibrate
from isomorph.surgery.recast import Acceptance, acceptance, apply_edit, recast, targets
from isomorph.surgery.reparameterize import Reparameterize
from isomorph.surgery.resize import ResizeReport, resize_patches
from isomorph.surgery.revert import Revert, revert
from isomorph.surgery.rule import (
    RULES,
    Edit,
    Rule,
    build_rule,
    edits,
    edits_since,
    notes,
    register_rule,
)
from isomorph.surgery.rules.gated import ConvToGPSA
from isomorph.surgery.rules.gated_attention import AttentionToGPSA
from isomorph.surgery.rules.linears import AttentionToLinears
from isomorph.surgery.rules.norms import ConvToConvNorm
from isomorph.surgery.rules.pyramid import LinearToPyramid
from isomorph.surgery.rules.refined import AttentionToRefined
from isomorph.surgery.rules.relative import AttentionToRelative
from isomorph.surgery.rules.window import AttentionToWindow
from isomorph.surgery.site import Site
from isomorph.surgery.unstride import Unstride, unstride
from isomorph.surgery.verify import compare_outputs, verify
from isomorph.surgery.verify_report import NotEqual, VerifyReport

# Rules by name, as checkpoints store them: those registered, and those of `fuse`, `insert`, `prune` and the like.
EDIT_RULES: ChainMap[str, type[Rule]] = ChainMap(
    RULES,
    {
        "Absorb": Absorb,
        "Collapse": Collapse,
        "Fuse": Fuse,
        "Insert": Insert,
        "Merge": Merge,
        "Prune": Prune,
        "Reparameterize": Reparameterize,
        "Revert": Revert,
        "Unstride": Unstride,
    },
)

__all__ = [
    "RULES",
    "Absorb",
    "Acceptance",
    "Anneal",
    "AttentionToGPSA",
    "AttentionToLinears",
    "AttentionToRefined",
    "AttentionToRelative",
    "AttentionToWindow",
    "Collapse",
    "ConvToConvNorm",
    "ConvToGPSA",
    "Edit",
    "Fuse",
    "FuseReport",
    "Insert",
    "LinearToPyramid",
    "Merge",
    "NotEqual",
    "NotPorted",
    "PortReport",
    "Prune",
    "Reparameterize",
    "ResizeReport",
    "Revert",
    "Rule",
    "Site",
    "Unstride",
    "VerifyReport",
    "absorb",
    "acceptance",
    "apply_edit",
    "build_rule",
    "compare_outputs",
    "edits",
    "edits_since",
    "fuse",
    "fuse_with_report",
    "fusible_modules",
    "insert",
    "notes",
    "port_weights",
    "prunable_layers",
    "prune",
    "recalibrate",
    "recast",
    "register_block",
    "register_rule",
    "resize_patches",
    "revert",
    "targets",
    "unstride",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
