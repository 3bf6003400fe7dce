"""Change the form of a vision model, keep its function.

>>> import timm, isomorph as iso
>>> cnn = timm.create_model("cifar_resnet20")
>>> tcnn = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.*.conv?")
"""

import sys

from isomorph.import_path import leave_working_folder, starts_isomorph

if starts_isomorph(sys.argv, sys.orig_argv):
    leave_working_folder()

from isomorph.doctor import torchvision_problem

if problem := torchvision_problem():
    raise ImportError(problem)

from isomorph import models, suites
from isomorph.analysis import (
    attention_entropy,
    attention_maps,
    branch_similarity,
    centres,
    cka,
    covariance_cka,
    dials_along,
    effective_rank,
    feature_evolution,
    gates,
    head_similarity,
    linear_cka,
    logit_stats,
    looks,
    map_similarity,
    nonlocality,
    spans,
)
from isomorph.checkpoints import load, load_weights, save
from isomorph.data import eval_loader, open_source
from isomorph.errors import UserError
from isomorph.evaluation import cost_rows, evaluate
from isomorph.layers import (
    GPSA,
    PSA,
    GPSA2d,
    JointPyramid,
    LocalAttention,
    MBConv,
    PostRelativeAttention,
    PyramidConv2d,
    PyramidLinear,
    RefinedAttention,
    Refiner,
    RelativeAttention,
    ViTGPSA,
)
from isomorph.recipes import load_recipe
from isomorph.suites.robustness import robustness
from isomorph.surgery import (
    Anneal,
    AttentionToGPSA,
    AttentionToRefined,
    ConvToGPSA,
    Edit,
    LinearToPyramid,
    Report,
    Rule,
    compare,
    edits,
    fuse,
    notes,
    recalibrate,
    recast,
    revert,
    targets,
    unstride,
    verify,
)
from isomorph.training import Recipe, dials_of_run, train

__version__ = "0.1.0"

__all__ = [
    "GPSA",
    "PSA",
    "Anneal",
    "AttentionToGPSA",
    "AttentionToRefined",
    "ConvToGPSA",
    "Edit",
    "GPSA2d",
    "JointPyramid",
    "LinearToPyramid",
    "LocalAttention",
    "MBConv",
    "PostRelativeAttention",
    "PyramidConv2d",
    "PyramidLinear",
    "Recipe",
    "RefinedAttention",
    "Refiner",
    "RelativeAttention",
    "Report",
    "Rule",
    "UserError",
    "ViTGPSA",
    "attention_entropy",
    "attention_maps",
    "branch_similarity",
    "centres",
    "cka",
    "compare",
    "cost_rows",
    "covariance_cka",
    "dials_along",
    "dials_of_run",
    "edits",
    "effective_rank",
    "eval_loader",
    "evaluate",
    "feature_evolution",
    "fuse",
    "gates",
    "head_similarity",
    "linear_cka",
    "load",
    "load_recipe",
    "load_weights",
    "logit_stats",
    "looks",
    "map_similarity",
    "models",
    "nonlocality",
    "notes",
    "open_source",
    "recalibrate",
    "recast",
    "revert",
    "robustness",
    "save",
    "spans",
    "suites",
    "targets",
    "train",
    "unstride",
    "verify",
]
