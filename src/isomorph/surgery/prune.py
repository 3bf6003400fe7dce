"""Prune gated attention: remove queries and keys of closed heads, and the positions of open ones."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from isomorph.errors import UserError
from isomorph.layers.prune_heads import (
    HEAD_FORMS,
    MAP_LAYERS,
    TOKEN_LAYERS,
    closed_heads,
    current_heads,
    prune_heads,
)
from isomorph.surgery.compiled import copy_model, unwrap_compiled
from isomorph.surgery.field_checks import check_number
from isomorph.surgery.recast import Edit, check_model, replay
from isomorph.surgery.rules.explained_rule import ExplainedRule
from isomorph.surgery.where import Where, describe_where, matches_where, outermost_modules

TOLERANCE = (0.0, 0.5)
"""Bounds of the share of a head's attention that may be left out; at a half, every head is closed or open."""

LARGEST_ATOL = 0.1
"""Largest difference of outputs that `verify` accepts by default, whatever the tolerance."""


@dataclass(frozen=True)
class PruneHeads(ExplainedRule):
    """Rule that removes what the heads of a gated attention layer do not use; `prune` chooses the heads.

    Raises: UserError for a tolerance out of range; from `build`, for a layer without gated heads, or letters that do
        not fit its heads.

    Example:
        >>> layer = iso.ConvToGPSA().build(torch.nn.Conv2d(4, 4, 3, padding=1))
        >>> type(iso.surgery.PruneHeads("ppppppppb").build(layer)).__name__
        'PrunedGPSA2d'
    """

    heads: str
    """A letter for every head: p position only, c content only, b both, t on a tap (all heads: a convolution)."""

    tolerance: float = 0.01
    """Share of a head's attention that is left out, at most."""

    def __post_init__(self) -> None:
        check_number("tolerance", self.tolerance, TOLERANCE)

    @property
    def atol(self) -> float:
        """Largest difference that `verify` accepts by default: what heads and layers leave out adds up."""
        return min(max(1e-4, 10 * self.tolerance), LARGEST_ATOL)

    def rejection_reason(self, module: nn.Module) -> str | None:
        """Return why the module cannot be pruned, or None if it can."""
        kind = next((kind for kind in (*MAP_LAYERS, *TOKEN_LAYERS) if isinstance(module, kind)), None)
        if kind is None:
            return f"{type(module).__name__} has no gated heads; GPSA and GPSA2d have"
        return None

    def build(self, module: nn.Module) -> nn.Module:
        """Return the layer without what its heads do not use.

        Raises: UserError with the reason if it cannot be pruned.
        """
        self.check_accepted(module)
        try:
            return prune_heads(module, self.heads)
        except ValueError as error:
            raise UserError(f"PruneHeads cannot recast this module: {error}") from None


class Head(NamedTuple):
    """A head of a gated attention layer: its share of position attention, and what pruning makes of it.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(locality=5.0), where="layer3.0.conv1")
        >>> head = iso.surgery.prunable_heads(tcnn)[0]
        >>> head.layer, head.number, head.was, head.becomes
        ('layer3.0.conv1', 0, 'position and content', 'position only')
    """

    layer: str
    number: int
    position_share: float
    was: str
    becomes: str


def _gated_layers(model: nn.Module, where: Where) -> dict[str, nn.Module]:
    """Return the layers whose heads can be pruned, by name.

    Raises: UserError if `where` selects none.
    """
    check_model(model)
    found = outermost_modules(unwrap_compiled(model), lambda module: isinstance(module, MAP_LAYERS + TOKEN_LAYERS))
    layers = {name: layer for name, layer in found.items() if matches_where(where, name, layer)}
    if not found:
        raise UserError("the model has no gated attention layer (GPSA, GPSA2d) to prune; recast it first")
    if not layers:
        raise UserError(f"{describe_where(where)} selects no gated attention layer; there are {', '.join(found)}")
    return layers


def _pruned_letters(layers: dict[str, nn.Module], tolerance: float) -> dict[str, str]:
    """Return the letters of the heads of every layer that pruning changes.

    Raises: UserError for a tolerance out of range.
    """
    check_number("tolerance", tolerance, TOLERANCE)
    letters = {name: closed_heads(layer, tolerance) for name, layer in layers.items()}
    return {name: heads for name, heads in letters.items() if heads != current_heads(layers[name])}


def prunable_heads(model: nn.Module, tolerance: float = 0.01, where: Where = "*") -> list[Head]:
    """Return the heads that `prune` would change, with what each attends by before and after.

    Raises: UserError for a tolerance out of range, or if `where` selects no gated attention layer.

    Example:
        >>> vit = timm.create_model("convit_ti", img_size=32, depth=2, local_up_to_layer=1)
        >>> iso.surgery.prunable_heads(vit)  # the gates of a new ConViT are between position and content
        []
    """
    layers = _gated_layers(model, where)
    found = []
    for name, heads in _pruned_letters(layers, tolerance).items():
        layer: nn.Module = layers[name]
        shares = layer.position_share.tolist()  # type: ignore[operator]
        for number, (share, old, new) in enumerate(zip(shares, current_heads(layer), heads, strict=True)):
            if old != new:
                found.append(Head(name, number, share, HEAD_FORMS[old], HEAD_FORMS[new]))
    return found


def prune(model: nn.Module, tolerance: float = 0.01, where: Where = "*") -> nn.Module:
    """Return a copy of the model without the parts of gated attention that its heads no longer use.

    A head loses at most the share `tolerance` of its attention:

    - a head whose gate is closed (position share of at least 1 - tolerance) loses its queries and keys. It attends by
      position only, at a cost linear in the number of tokens. Class and register tokens have no position and attend by
      content still;
    - a head whose gate is open (position share of at most tolerance) loses its position;
    - a layer on feature maps of which all heads attend to single taps becomes a convolution, and a recast attention
      layer of which all heads are open becomes timm's Attention.

    The new layers train, save, load and export like any other; pruning again after training removes more. Compare with
    `verify(model, pruned, images)`, whose default is `10 * tolerance` here, and at most 0.1. `prunable_heads` lists
    what is removed.

    Raises: UserError for a tolerance out of range, if `where` selects no gated attention layer, or if no head is closed
        or open.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20").eval()
        >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(locality=5.0), where="layer3.0.conv?")  # soft taps, closed gates
        >>> pruned = iso.prune(tcnn)
        >>> type(pruned.layer3[0].conv1).__name__
        'PositionalConv2d'
        >>> iso.verify(tcnn, pruned, torch.randn(1, 3, 32, 32)).passed
        True
    """
    layers = _gated_layers(model, where)
    letters = _pruned_letters(layers, tolerance)
    if not letters:
        raise UserError(_nothing_to_prune(layers, tolerance))
    pruned = copy_model(model)
    for heads in dict.fromkeys(letters.values()):
        names = tuple(name for name, own in letters.items() if own == heads)
        rule: Any = PruneHeads(heads, tolerance)  # its atol depends on the tolerance, which the protocol does not know
        pruned = replay(pruned, Edit(rule, names))
    return pruned


class _Nearest(NamedTuple):
    """What comes nearest to being pruned: the tolerance that it would need, and what is in the way, in words."""

    needed: float
    reason: str


def _nothing_to_prune(layers: dict[str, nn.Module], tolerance: float) -> str:
    """Return the message that no head is closed or open, with what comes nearest to it."""
    nearest = [found for name, layer in layers.items() if (found := _nearest_to_prune(name, layer, tolerance))]
    if not nearest:
        return f"nothing to prune: no head has a gate left, and no layer is on its taps within tolerance {tolerance:g}"
    needed, reason = min(nearest)
    advice = f", or give a tolerance of at least {_round_up(needed):g}" if needed < TOLERANCE[1] else ""
    return f"nothing to prune: {reason}: train on{advice}"


def _nearest_to_prune(name: str, layer: nn.Module, tolerance: float) -> _Nearest | None:
    """Return the head of a layer that is nearest to being pruned, or None if no head has a gate."""
    shares, name = layer.position_share.tolist(), name or "the model"  # type: ignore[operator]
    gated = [
        (min(s, 1 - s), s, n) for n, (s, own) in enumerate(zip(shares, current_heads(layer), strict=True)) if own == "b"
    ]
    if not gated:
        return None
    needed, share, number = min(gated)
    reason = (
        f"no head of {name} has a share of position attention within {tolerance:g} of 0 or 1; the nearest is "
        f"{share:.5g} (head {number})"
    )
    return _Nearest(needed, reason)


def _round_up(value: float) -> float:
    """Return the next number with two digits."""
    digits = 1 - math.floor(math.log10(value)) if value > 0 else 0
    return math.ceil(value * 10**digits) / 10**digits
