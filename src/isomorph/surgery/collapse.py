"""Modules of which one layer is left once their branches are merged: the layer takes their place.

Without it the code of such a module still adds the 0 of every merged branch, which costs as much as an activation.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isomorph.layers.modes import noise
from isomorph.operations import Flow, TensorVersion
from isomorph.surgery.affine import Group, Whole, carrier_of, names_in
from isomorph.surgery.affine_values import AffineValues, only_value
from isomorph.surgery.layer_calls import ARITHMETIC
from isomorph.surgery.modules import lies_within, parent_name
from isomorph.surgery.plain_layers import describe_attachments
from isomorph.surgery.rule import Rule
from isomorph.surgery.site import Site


@dataclass(frozen=True)
class Collapse(Rule):
    """Rule that puts parts of a module in its place, one after the other: a layer, and what follows it.

    `parts` are names of modules inside it. `fuse` finds where the module computes nothing else.

    >>> unit = torch.nn.ModuleDict({"conv": torch.nn.Conv2d(3, 4, 1), "act": torch.nn.ReLU()})
    >>> iso.surgery.Collapse(("conv",)).build(iso.surgery.Site(unit))
    Conv2d(3, 4, kernel_size=(1, 1), stride=(1, 1))
    """

    parts: tuple[str, ...]

    atol = 1e-4
    is_reverted = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))

    def reason(self, site: Site) -> str | None:
        inside = dict(site.module.named_modules())
        missing = [part for part in self.parts if part not in inside]
        return f"it has no module {missing[0]}" if missing else None

    def build(self, site: Site) -> nn.Module:
        self.check(site)
        modules = [site.module.get_submodule(part) for part in self.parts]
        if len(modules) == 1:
            return modules[0]
        names = [part.rpartition(".")[2] for part in self.parts]
        if len(set(names)) < len(names):
            return nn.Sequential(*modules)
        return nn.Sequential(OrderedDict(zip(names, modules, strict=True)))


def find_whole(values: AffineValues, value: TensorVersion) -> Group | None:
    """Return the outermost module with arithmetic of its own that computes a value of one layer, then its children."""
    affine = values.affine_of[value]
    carrier = carrier_of(affine.summands)
    if carrier is None or carrier.layer is None or affine.steps:
        return None
    whole = None
    name = parent_name(carrier.layer)
    while name:  # the model itself is not replaced
        children = _children_after(values.model, values.flow, name, value)
        gets_source = only_value(values.flow.inputs[name]) == affine.source
        has_arithmetic = any(item.name in ARITHMETIC for item in values.operations_of[name])
        if children is not None and gets_source and has_arithmetic:
            parts = (carrier.layer.removeprefix(f"{name}."), *children)
            stay = {f"{name}.{part}" for part in parts}
            whole = Whole(name, parts, frozenset(stay | names_in(affine)))
        name = parent_name(name)
    if whole is None:
        return None
    # the source, where the module's own code adds it
    skips = tuple(item for item in affine.summands if item.layer is None and item.stays)
    return Group(
        "whole",
        carriers=(carrier.layer,),
        windows=(carrier.window,),
        changes=(),
        summands=skips,
        # more modules go than stay: their sum is written into the layer first
        needs_sum=len(whole.modules) > len(whole.parts),
        whole=whole,
    )


def _children_after(
    model: nn.Module, flow: Flow, name: str, value: TensorVersion
) -> list[str] | None:
    """Return the children of a module that lead in turn from a value to its output, or None."""
    children: list[str] = []
    while only_value(flow.outputs[name]) != value:
        following: tuple[str, TensorVersion] | None = None
        for child, _ in model.get_submodule(name).named_children():
            path = f"{name}.{child}"
            after = only_value(flow.outputs[path])
            is_next = only_value(flow.inputs[path]) == value and child not in children
            if is_next and after is not None and after != value:
                following = child, after
        if following is None:
            return None
        child, value = following
        children.append(child)
    return children


def can_collapse(model: nn.Module, whole: Whole) -> bool:
    """Return True if everything inside a module is merged or stays, or gives what it gets in train mode too."""
    for path, inner in model.get_submodule(whole.name).named_modules(prefix=whole.name):
        if describe_attachments(inner):
            return False
        if lies_within(path, whole.modules):
            continue
        if inner._parameters or inner._buffers:
            return False
        if not inner._modules and not _acts_alike_in_both_modes(inner):
            return False
    return True


@torch.no_grad()
def _acts_alike_in_both_modes(module: nn.Module) -> bool:
    """Return True for a layer without parameters and buffers that gives the same in train and eval mode."""
    x = noise(32, 32, 8, 8).float()
    outputs: list[Any] = []
    for mode in (True, False):
        layer = copy.copy(module)
        layer.__dict__["training"] = mode
        with torch.random.fork_rng(devices=[]):
            try:
                outputs.append(layer(x.clone()))
            except Exception:  # of a layer that reads something else than a map
                return False
    first, second = outputs
    return isinstance(first, torch.Tensor) and torch.equal(first, second)
