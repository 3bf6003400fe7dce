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
    from isomorph import analysis, data, deployment, evaluation, layers, models, report, surgery, training
    from isomorph.analysis import attention_maps, cka, gates, nonlocality
    from isomorph.checkpoints.model import load_weights, save
    from isomorph.checkpoints.open import load
    from isomorph.deployment import push, save_for_hub
    from isomorph.deployment.export import export
    from isomorph.deployment.quantize import quantize
    from isomorph.errors import UserError
    from isomorph.evaluation import cost_table
    from isomorph.process import keep_freed_memory
    from isomorph.recipes import load_recipe
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
        revert,
        targets,
        unstride,
        verify,
    )
    from isomorph.tasks.evaluate import evaluate
    from isomorph.tasks.robustness import robustness
    from isomorph.training import Recipe, train
# Public names by the module that defines them, which is imported when the first of them is used (PEP 562).
_HOMES = {
    "analysis": "attention_maps cka gates nonlocality",
    "checkpoints.open": "load",
    "checkpoints.model": "load_weights save",
    "deployment": "export push quantize save_for_hub",
    "errors": "UserError",
    "evaluation": "cost_table",
    "process": "keep_freed_memory",
    "recipes": "load_recipe",
    "surgery": "Anneal AttentionToGPSA AttentionToLinears AttentionToRefined AttentionToRelative "
    "AttentionToWindow ConvToConvNorm ConvToGPSA LinearToPyramid Rule absorb edits fuse insert port_weights prune "
    "recalibrate recast revert targets unstride verify",
    "tasks.evaluate": "evaluate",
    "tasks.robustness": "robustness",
    "training": "Recipe train",
}
__all__ = ["analysis", "data", "deployment", "evaluation", "layers", "models", "report", "surgery", "training"]
_SUBPACKAGES = (*__all__, "checkpoints", "recipes")
__all__ += [
    "Anneal",
    "AttentionToGPSA",
    "AttentionToLinears",
    "AttentionToRefined",
    "AttentionToRelative",
    "AttentionToWindow",
]
__all__ += ["ConvToConvNorm", "ConvToGPSA"]
__all__ += ["LinearToPyramid", "Recipe", "Rule", "UserError", "absorb", "attention_maps", "cka", "cost_table", "edits"]
__all__ += ["evaluate", "export", "fuse", "gates", "insert", "keep_freed_memory", "load", "load_recipe", "load_weights"]
__all__ += ["nonlocality", "port_weights", "prune", "push", "quantize", "recalibrate", "recast", "revert", "robustness"]
__all__ += ["save", "save_for_hub", "targets", "train", "unstride", "verify"]


if not TYPE_CHECKING:  # a type checker would take any name for a public one

    def __getattr__(name: str) -> Any:
        home = next((module for module, names in _HOMES.items() if name in names.split()), None)
        if home:
            value = getattr(import_module(f"isomorph.{home}"), name)
        elif name in _SUBPACKAGES:
            value = import_module(f"isomorph.{name}")
        else:
            hint = "".join(f"; did you mean {close}?" for close in get_close_matches(name, __all__, n=1))
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
