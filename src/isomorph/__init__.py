"""Change the form of a vision model, keep its function.

>>> import timm, isomorph as iso
>>> cnn = timm.create_model("cifar_resnet20")
>>> tcnn = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.*.conv?")
"""

import sys
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from isomorph import analysis, deployment, layers, models, surgery
    from isomorph.analysis import attention_maps, cka, gates, nonlocality
    from isomorph.analysis.cost import cost_table
    from isomorph.checkpoints.model import load_weights, save
    from isomorph.checkpoints.open import load
    from isomorph.deployment import push, save_for_hub
    from isomorph.deployment.export import export
    from isomorph.deployment.quantize import quantize
    from isomorph.errors import UserError
    from isomorph.lab import data, evaluation, report, training
    from isomorph.lab.recipes import load_recipe
    from isomorph.lab.tasks.evaluate import evaluate
    from isomorph.lab.tasks.robustness import robustness
    from isomorph.lab.training import Recipe, train
    from isomorph.process import keep_freed_memory
    from isomorph.surgery import (
        Anneal,
        AttentionToGPSA,
        AttentionToLinears,
        AttentionToRefined,
        AttentionToRelative,
        AttentionToWindow,
        ConvToConvNorm,
        ConvToGPSA,
        LinearToPyramid,
        Rule,
        absorb,
        edits,
        fuse,
        insert,
        port_weights,
        prune,
        recalibrate,
        recast,
        resize_patches,
        revert,
        targets,
        unstride,
        verify,
    )
_PACKAGES = ("analysis", "checkpoints", "deployment", "layers", "models", "surgery")
_LAB_PACKAGES = ("data", "evaluation", "recipes", "report", "training")
# Public names by the module that defines them, which is imported when the first of them is used (PEP 562).
_NAMES = {
    "analysis": "attention_maps cka gates nonlocality",
    "analysis.cost": "cost_table",
    "checkpoints.open": "load",
    "checkpoints.model": "load_weights save",
    "deployment": "export push quantize save_for_hub",
    "errors": "UserError",
    "process": "keep_freed_memory",
    "surgery": "Anneal AttentionToGPSA AttentionToLinears AttentionToRefined AttentionToRelative "
    "AttentionToWindow ConvToConvNorm ConvToGPSA LinearToPyramid Rule absorb edits fuse insert port_weights prune "
    "recalibrate recast resize_patches revert targets unstride verify",
    "lab.recipes": "load_recipe",
    "lab.tasks.evaluate": "evaluate",
    "lab.tasks.robustness": "robustness",
    "lab.training": "Recipe train",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = [
    "Anneal",
    "AttentionToGPSA",
    "AttentionToLinears",
    "AttentionToRefined",
    "AttentionToRelative",
    "AttentionToWindow",
    "ConvToConvNorm",
    "ConvToGPSA",
    "LinearToPyramid",
    "Recipe",
    "Rule",
    "UserError",
    "absorb",
    "analysis",
    "attention_maps",
    "cka",
    "cost_table",
    "data",
    "deployment",
    "edits",
    "evaluate",
    "evaluation",
    "export",
    "fuse",
    "gates",
    "insert",
    "keep_freed_memory",
    "layers",
    "load",
    "load_recipe",
    "load_weights",
    "models",
    "nonlocality",
    "port_weights",
    "prune",
    "push",
    "quantize",
    "recalibrate",
    "recast",
    "report",
    "resize_patches",
    "revert",
    "robustness",
    "save",
    "save_for_hub",
    "surgery",
    "targets",
    "train",
    "training",
    "unstride",
    "verify",
]


if not TYPE_CHECKING:  # a type checker would take any name for a public one

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            value = getattr(import_module(f"isomorph.{_HOMES[name]}"), name)
        elif name in _PACKAGES:
            value = import_module(f"isomorph.{name}")
        elif name in _LAB_PACKAGES:
            value = import_module(f"isomorph.lab.{name}")
        else:
            close = get_close_matches(name, __all__, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise AttributeError(f"module 'isomorph' has no attribute {name!r}{hint}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__


def prepare() -> None:
    """Add isomorph's models to timm's registry, as `import isomorph` does; the command line calls this itself."""
    import isomorph.models  # noqa: F401 (registers them)


if "isomorph_command" not in sys.modules:  # the installed command, which imports torch later
    prepare()
