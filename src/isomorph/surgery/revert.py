"""Convert recast layers back to their original form."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from isomorph.errors import UserError
from isomorph.surgery.fuse import Fuse
from isomorph.surgery.modules import list_names
from isomorph.surgery.plain_layers import first_altered_part
from isomorph.surgery.recast import (
    Ties,
    attach,
    check_model,
    float32_on,
    kept_random_state,
    parents_of,
    replace_module,
)
from isomorph.surgery.rule import Edit, Rule, add_notes, copy_model, edits, update_record
from isomorph.surgery.site import Site, Where, check_each_glob, describe_where, matches_where

# Methods by which a recast layer converts back to its original form, if it still computes the same function.
_REVERT_METHODS = ("to_original", "to_conv", "to_attention")


def _reverted(layer: nn.Module, atol: float) -> nn.Module:
    """Return a layer in its original form, the block inserted after it removed first."""
    method = _revert_method(layer)
    while method is not None:  # an inserted block first, then what is before it
        layer = method(atol)
        method = _revert_method(layer)
    return layer


def _revert_method(layer: nn.Module) -> Callable[[float], nn.Module] | None:
    for name in _REVERT_METHODS:
        method = getattr(layer, name, None)
        if callable(method):
            return method
    return None


@dataclass(frozen=True)
class Revert(Rule):
    """Rule that converts a recast layer back to its original form; `revert` checks that its function stays.

    Recorded where that form is not the class of the model's own layer: a plain convolution after one with standardised
    weights or TensorFlow's SAME padding.

    Raises: UserError from `build` if the module has no original form.

    >>> layer = iso.ConvToGPSA().build(iso.surgery.Site(torch.nn.Conv2d(4, 4, 3, padding=1)))
    >>> type(iso.surgery.Revert().build(iso.surgery.Site(layer))).__name__
    'Conv2d'
    """

    atol = 1e-3

    def reason(self, site: Site) -> str | None:
        if _revert_method(site.module):
            return None
        return f"{type(site.module).__name__} has no original form"

    def build(self, site: Site) -> nn.Module:
        self.check(site)
        return _reverted(site.module, math.inf)


def revert(model: nn.Module, where: Where = "*", atol: float = 1e-3) -> nn.Module:
    """Return a copy of the model with the selected recast layers converted back to their original form.

    Gated attention whose gates are still closed becomes a convolution (`GPSA2d.to_conv`), refined or gated attention of
    a ViT becomes plain attention (`to_attention`), if each computes the same function within `atol`. Their edits are
    removed from `edits(model)`, or followed by `Revert` where the model's own layer was another kind of convolution.
    Pyramids are converted by `fuse` instead.

    Raises: UserError if `where` selects no such layer, or if a layer does not compute the same function any more, with
        its name and the deviation.

    >>> tcnn = iso.recast(timm.create_model("cifar_resnet20"), iso.ConvToGPSA(init="exact"), where="layer3.*.conv?")
    >>> type(iso.revert(tcnn).layer3[0].conv1).__name__
    'Conv2d'
    """
    check_model(model)
    model = copy_model(model)
    ties = Ties(model)
    layers = _layers_to_revert(model, where)
    reverted = {
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if module in layers.values()
    }
    parents = parents_of(model)
    # inner ones first
    for name, layer in sorted(layers.items(), key=lambda item: -item[0].count(".")):
        original = _original_of(name, layer, atol, alone=len(layers) == 1)
        model = replace_module(model, name, layer, original, parents)
    add_notes(model, *ties.restore(model))
    converted = {
        name for name, layer in layers.items() if not getattr(layer, "replaces_plain", True)
    }
    lost_names = _names_inside(model, reverted)
    remaining = _without(edits(model), reverted - converted, lost_names)
    if converted:
        remaining.append(Edit(Revert(), tuple(name for name in layers if name in converted)))
    attach(model)  # the edits before: their rules remove the connections of what is reverted
    update_record(model, edits=tuple(edit for edit in remaining if edit.names))
    return model


def _layers_to_revert(model: nn.Module, where: Where) -> dict[str, nn.Module]:
    """Return the selected layers that have an original form. Raises: UserError if there are none."""
    possible = {name: module for name, module in model.named_modules() if _revert_method(module)}
    layers = {
        name: module for name, module in possible.items() if matches_where(where, name, module)
    }
    if layers:
        check_each_glob(where, possible, what="layer that can be reverted")
        return layers
    hint = "for pyramids use fuse"
    if any(possible):
        hint = f"layers that can be: {list_names(list(possible))}"
    raise UserError(f"{describe_where(where)} selects no layer that can be reverted; {hint}")


def _original_of(name: str, layer: nn.Module, atol: float, alone: bool) -> nn.Module:
    """Return the original form of a layer. Raises: UserError if it computes something else now."""
    try:
        with float32_on(layer), kept_random_state(layer):
            return _reverted(layer, atol)
    except ValueError as error:
        others = "" if alone else "; to revert only the other layers, select them with `where`"
        raise UserError(f"{name or 'the model'}: {error}{others}") from None
    except (RuntimeError, TypeError, KeyError):  # torch's errors for weights that cannot be merged
        reason = first_altered_part(layer)
        if reason is None:
            raise
        raise UserError(f"{name or 'the model'} cannot be reverted: {reason}") from None


def _names_inside(model: nn.Module, reverted: set[str]) -> set[str]:
    """Return the names of edits inside reverted layers that cannot be applied again.

    The model no longer has the module, or it was fused, and the rule cannot rebuild the layer that the original form
    has in its place.
    """
    beginnings = tuple(f"{name}." for name in reverted)
    rules_of: dict[str, list[Rule]] = {}
    for edit in edits(model):
        for name in edit.names:
            if name.startswith(beginnings):
                rules_of.setdefault(name, []).append(edit.rule)
    root = Site(model)
    names = set()
    for name, (first, *others) in rules_of.items():
        site = root.find(name)
        is_fused = bool(others) and isinstance(others[-1], Fuse)
        if site is None or (is_fused and first.reason(site) is not None):
            names.add(name)
    return names


def _without(edits: Sequence[Edit], reverted: set[str], lost: set[str]) -> list[Edit]:
    """Return the edits without lost names and without those reverted now; edits before an earlier Revert stay."""
    remaining: list[Edit] = []
    for edit in reversed(edits):
        if isinstance(edit.rule, Revert):
            reverted = reverted.difference(edit.names)
            lost = lost.difference(edit.names)
        undone = reverted | lost if edit.rule.is_reverted else lost
        remaining.append(Edit(edit.rule, tuple(name for name in edit.names if name not in undone)))
    return remaining[::-1]
