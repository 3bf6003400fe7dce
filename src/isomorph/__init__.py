"""Change the form of a vision model, keep its function.

>>> import timm, isomorph as iso
>>> cnn = timm.create_model("cifar_resnet20")
>>> tcnn = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.*.conv?")
"""

import sys

from isomorph.import_path import is_starting_isomorph, remove_working_folder

if is_starting_isomorph(sys.argv, sys.orig_argv):
    remove_working_folder()

from isomorph.doctor import torchvision_problem

if problem := torchvision_problem():
    raise ImportError(problem)

from isomorph import analysis, data, layers, models, report, suites, surgery, training
from isomorph.analysis import attention_maps, cka, gates, nonlocality
from isomorph.checkpoints import load, load_weights, save
from isomorph.errors import UserError
from isomorph.evaluation import cost_table, evaluate
from isomorph.recipes import load_recipe
from isomorph.suites.robustness import robustness
from isomorph.surgery import (
    Anneal,
    AttentionToGPSA,
    AttentionToRefined,
    ConvToGPSA,
    LinearToPyramid,
    Rule,
    edits,
    fuse,
    recalibrate,
    recast,
    revert,
    targets,
    unstride,
    verify,
)
from isomorph.surgery.rules.registry import register_installed_rules
from isomorph.training import Recipe, train

register_installed_rules()

__version__ = "0.1.0"

__all__ = [
    "Anneal",
    "AttentionToGPSA",
    "AttentionToRefined",
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
    "edits",
    "evaluate",
    "fuse",
    "gates",
    "layers",
    "load",
    "load_recipe",
    "load_weights",
    "models",
    "nonlocality",
    "recalibrate",
    "recast",
    "report",
    "revert",
    "robustness",
    "save",
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
