"""Change the form of a vision model, keep its function.

>>> import timm, isomorph as iso
>>> cnn = timm.create_model("cifar_resnet20")
>>> tcnn = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.*.conv?")
"""

import sys

from isomorph.import_path import is_command_line, is_starting_isomorph, remove_working_folder

if is_starting_isomorph(sys.argv, sys.orig_argv):
    remove_working_folder()

if is_command_line(sys.argv, sys.orig_argv):
    from isomorph.interrupt import exit_on_interrupt

    exit_on_interrupt()

from typing import TYPE_CHECKING

from isomorph.lazy_imports import lazy_attributes

__version__ = "0.1.0"

if TYPE_CHECKING:
    from isomorph import analysis, data, deployment, layers, models, report, suites, surgery, training
    from isomorph.analysis import attention_maps, cka, gates, nonlocality
    from isomorph.checkpoints import load, load_weights, save
    from isomorph.deployment import push, save_for_hub
    from isomorph.deployment.export import export
    from isomorph.deployment.quantize import quantize
    from isomorph.errors import UserError
    from isomorph.evaluation import cost_table
    from isomorph.memory import keep_freed_memory
    from isomorph.recipes import load_recipe
    from isomorph.surgery import (
        Anneal,
        AttentionToGPSA,
        AttentionToRefined,
        AttentionToRelative,
        BranchesToConv,
        ConvToGPSA,
        LinearToPyramid,
        Rule,
        edits,
        fuse,
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
else:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "isomorph.analysis": ("attention_maps", "cka", "gates", "nonlocality"),
            "isomorph.checkpoints": ("load", "load_weights", "save"),
            "isomorph.deployment": ("export", "push", "quantize", "save_for_hub"),
            "isomorph.errors": ("UserError",),
            "isomorph.evaluation": ("cost_table",),
            "isomorph.memory": ("keep_freed_memory",),
            "isomorph.recipes": ("load_recipe",),
            "isomorph.tasks.evaluate": ("evaluate",),
            "isomorph.tasks.robustness": ("robustness",),
            "isomorph.surgery": (
                *(
                    "Anneal",
                    "AttentionToGPSA",
                    "AttentionToRefined",
                    "AttentionToRelative",
                    "BranchesToConv",
                    "ConvToGPSA",
                ),
                *("LinearToPyramid", "Rule"),
                *("edits", "fuse", "prune", "recalibrate", "recast", "revert", "targets", "unstride"),
                "verify",
            ),
            "isomorph.training": ("Recipe", "train"),
        },
        subpackages=(
            *("analysis", "checkpoints", "data", "deployment", "evaluation", "layers", "models", "recipes"),
            *("report", "suites", "surgery", "training"),
        ),
    )

__all__ = [
    "Anneal",
    "AttentionToGPSA",
    "AttentionToRefined",
    "AttentionToRelative",
    "BranchesToConv",
    "ConvToGPSA",
    "LinearToPyramid",
    "Recipe",
    "Rule",
    "UserError",
    "analysis",
    "attention_maps",
    "cka",
    "cost_table",
    "data",
    "deployment",
    "edits",
    "evaluate",
    "export",
    "fuse",
    "gates",
    "keep_freed_memory",
    "layers",
    "load",
    "load_recipe",
    "load_weights",
    "models",
    "nonlocality",
    "prune",
    "push",
    "quantize",
    "recalibrate",
    "recast",
    "report",
    "revert",
    "robustness",
    "save",
    "save_for_hub",
    "suites",
    "surgery",
    "targets",
    "train",
    "training",
    "unstride",
    "verify",
]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__


def prepare() -> None:
    """Add isomorph's models to timm's registry, and the rules of installed packages to isomorph's.

    The command line calls this when it has parsed its arguments; elsewhere `import isomorph` does.

    Raises: ImportError if torchvision does not work with this torch.
    """
    from isomorph.doctor import torchvision_problem

    if problem := torchvision_problem():
        raise ImportError(problem)
    import isomorph.models  # noqa: F401 (registers them)
    from isomorph.surgery.rules.registry import register_installed_rules

    register_installed_rules()


if not is_command_line(sys.argv, sys.orig_argv):
    prepare()
