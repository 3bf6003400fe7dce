"""Prune gated attention: replace layers whose gates have all closed, or all opened, by simpler layers."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from isomorph.errors import UserError
from isomorph.layers import GPSA
from isomorph.layers.gated.tap_heads import TapHeads
from isomorph.surgery.modules import outermost_modules
from isomorph.surgery.recast import apply_rules, check_finite, check_model
from isomorph.surgery.rule import Rule, check_choice, check_number, copy_model
from isomorph.surgery.rules.window import WindowAttention
from isomorph.surgery.site import Site, Where, check_each_glob, describe_where, matches_where

# Bounds of the share of a head's attention that may be left out; at a half, every head is closed or open.
TOLERANCE = (0.0, 0.5)

# Largest difference of outputs that `verify` accepts by default, whatever the tolerance.
LARGEST_ATOL = 0.1

# Layers of which parts can be removed.
PRUNABLE = (TapHeads, GPSA, WindowAttention)

# Method by which a layer becomes each of the simpler forms, where it can.
_METHODS = {
    "position": "to_positional",
    "convolution": "tap_convolution",
    "attention": "to_attention",
    "windows": "to_windows",
}


@dataclass(frozen=True)
class Prune(Rule):
    """Rule that replaces a gated attention layer by a simpler one; `prune` chooses the form.

    Raises: UserError for an unknown form or a tolerance out of range; from `build`, for a layer without that form.

    >>> layer = iso.ConvToGPSA().build(iso.surgery.Site(torch.nn.Conv2d(4, 4, 3, padding=1)))
    >>> type(iso.surgery.Prune("position").build(iso.surgery.Site(layer))).__name__
    'PositionalConv2d'
    """

    atol = LARGEST_ATOL

    becomes: Literal["position", "convolution", "attention", "windows"]
    """What is left: attention by position alone, a convolution, plain attention, or attention in windows alone."""

    tolerance: float = 0.01
    """Share of a head's attention that is left out, at most."""

    def __post_init__(self) -> None:
        check_choice("becomes", self.becomes, _METHODS)
        check_number("tolerance", self.tolerance, TOLERANCE)

    @property
    def accepted_difference(self) -> float:
        """Largest difference that `verify` accepts by default: what heads leave out adds up, windows are exact."""
        return (
            1e-5 if self.becomes == "windows" else min(max(1e-4, 10 * self.tolerance), LARGEST_ATOL)
        )

    def reason(self, site: Site) -> str | None:
        module = site.module
        if not isinstance(module, PRUNABLE):
            return f"{type(module).__name__} has no gated heads; GPSA and GPSA2d have"
        if not hasattr(module, _METHODS[self.becomes]):
            return f"{type(module).__name__} does not become {self.becomes!r}"
        return None

    def build(self, site: Site) -> nn.Module:
        self.check(site)
        if hasattr(site.module, "around"):  # a block is inserted after it
            return site.module.around(self)
        method = getattr(site.module, _METHODS[self.becomes])
        try:
            if self.becomes == "attention":
                return method(math.inf)
            return method()
        except UserError:
            raise
        except ValueError as error:  # a projection is not a linear layer
            raise UserError(str(error)) from None


def _select_prunable(model: nn.Module, where: Where) -> dict[str, Any]:
    """Return the prunable layers that `where` selects, by name. Raises: UserError if there are none."""
    prunable = outermost_modules(check_model(model), lambda module: isinstance(module, PRUNABLE))
    if not prunable:
        raise UserError(
            "the model has no gated attention layer (GPSA, GPSA2d) to prune; recast it first"
        )
    selected = {}
    for name, layer in prunable.items():
        if matches_where(where, name, layer):
            selected[name] = layer
    if not selected:
        raise UserError(
            f"{describe_where(where)} selects no gated attention layer; there are {', '.join(prunable)}"
        )
    check_each_glob(where, prunable, what="gated attention layer")
    return selected


def prunable_layers(
    model: nn.Module, tolerance: float = 0.01, where: Where = "*"
) -> dict[str, str]:
    """Return what `prune` would make of each layer that it changes: "position", "convolution" or "attention".

    Raises: UserError for a tolerance out of range, or if `where` selects no gated attention layer; NotFinite if
        weights of one are not.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> iso.surgery.prunable_layers(iso.recast(cnn, iso.ConvToGPSA(locality=5.0), where="layer3.0.conv1"))
    {'layer3.0.conv1': 'position'}
    """
    check_number("tolerance", tolerance, TOLERANCE)
    form_of = {}
    for name, layer in _select_prunable(model, where).items():
        check_finite(layer, name)
        if isinstance(layer, WindowAttention):
            left_out = {"windows": float(layer.share > 0 or layer.pruned)}
        else:
            share = layer.position_share.detach().double()
            left_out = {"position": (1 - share).max().item(), "attention": share.max().item()}
        if isinstance(layer, TapHeads):
            left_out["convolution"] = max(left_out["position"], layer.off_tap_share().max().item())
        for form in ("windows", "convolution", "position", "attention"):  # the simplest first
            if hasattr(layer, _METHODS[form]) and left_out.get(form, 1.0) <= tolerance:
                form_of[name] = form
                break
    return form_of


def _nothing_to_prune(layers: list[Any], tolerance: float) -> str:
    windows = [layer for layer in layers if isinstance(layer, WindowAttention)]
    if len(windows) < len(layers):
        closed = f"no layer has closed or opened all of its heads within tolerance {tolerance:g}"
        return f"{closed}; train on, or give a larger one"
    if all(layer.pruned for layer in windows):
        return "these layers compute windows alone already"
    share = max(layer.share.item() for layer in windows)
    advice = (
        "iso.Anneal, or anneal.epochs of `isomorph train`, moves it to 0 in fine-tuning; apply it to an average (EMA) "
        "too"
    )
    return f"the share of attention outside of the windows is {share:g}; {advice}"


def prune(model: nn.Module, tolerance: float = 0.01, where: Where = "*") -> nn.Module:
    """Return a copy of the model without the parts of gated attention that whole layers no longer use.

    A head loses at most the share `tolerance` of its attention:

    - a layer whose gates are all closed (position share of at least 1 - tolerance) loses its queries and keys. It
      attends by position alone (`PositionalConv2d`, `PositionalAttention`), at a cost linear in the number of
      positions. Class and register tokens have no position and attend by content still;
    - a layer on feature maps of which all heads attend to single taps becomes a convolution;
    - a recast attention layer of which all gates are open (position share of at most tolerance) becomes timm's
      Attention;
    - attention with windows (AttentionToWindow) whose share is 0 computes the windows alone: exactly.

    Compare with `verify(model, pruned, images)`, whose default is `10 * tolerance` here, and at most 0.1.
    `prunable_layers` lists what is removed.

    Raises: UserError for a tolerance out of range, if `where` selects no gated attention layer, or if none has closed
        or opened as a whole.

    >>> cnn = timm.create_model("cifar_resnet20").eval()
    >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(locality=5.0), where="layer3.0.conv?")  # soft taps, closed gates
    >>> pruned = iso.prune(tcnn)
    >>> type(pruned.layer3[0].conv1).__name__
    'PositionalConv2d'
    >>> iso.verify(tcnn, pruned, torch.randn(1, 3, 32, 32)).passed
    True
    """
    forms = prunable_layers(model, tolerance, where)
    if not forms:
        raise UserError(
            f"nothing to prune: {_nothing_to_prune(list(_select_prunable(model, where).values()), tolerance)}"
        )
    rules = {name: Prune(form, tolerance) for name, form in forms.items()}  # type: ignore[arg-type]
    return apply_rules(copy_model(model), rules)
