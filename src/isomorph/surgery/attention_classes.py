"""Classes of attention: where each forms its map, in which layout, and which have no map over positions.

A class that passes its map through a submodule `attn_drop` after the softmax, as most of timm's do, is not listed.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.map_grid import GridSize
from isomorph.layers.map_layouts import MapLayout
from isomorph.layers.unfused_multihead import UnfusedMultiheadAttention, allowed_by_masks, multihead_reason
from isomorph.surgery.interface_layers import interface_grid_reason, interface_heads, interface_reason
from isomorph.surgery.token_places import halo_places, mask_unit_places, row_mean_places

T = TypeVar("T")
PLACE = "attn_drop"
"""Name of the submodule through which most classes pass their attention map."""

_CHANNELS = "attends between channels, so it has no map over tokens"
_KEYS_ALONE = "takes the softmax of its keys alone, so it has no map from queries to keys"
_POOLS = "pools tokens with weights that do not depend on a query"

NO_MAP_REASONS = {
    "timm.models.xcit.XCA": _CHANNELS,
    "timm.models.edgenext.CrossCovarianceAttn": _CHANNELS,
    "timm.models.davit.ChannelAttention": _CHANNELS,
    "timm.models.davit.ChannelAttentionV2": _CHANNELS,
    "timm.models.coat.FactorAttnConvRelPosEnc": _KEYS_ALONE,
    "timm.layers.lambda_layer.LambdaLayer": _KEYS_ALONE,
    "timm.models.mobilevit.LinearSelfAttention": _KEYS_ALONE,
    "timm.models.swiftformer.EfficientAdditiveAttention": _KEYS_ALONE,
    "timm.layers.global_context.GlobalContext": _POOLS,
    "timm.layers.non_local_attn.BilinearAttnTransform": _POOLS,
    "timm.models.csatv2.SpatialTransformerBlock": "compares the images of a batch, so it has no map over tokens",
    "timm.models.efficientvit_mit.LiteMLA": "is linear attention, which has no map from queries to keys",
}
"""Layers of timm that are called attention but have no map from queries to keys, with the reason."""


def _own_mask(given: dict[str, Any]) -> Any:
    """Return the mask among the arguments of a call, by name, or None."""
    return next((given[name] for name in ("attn_mask", "mask") if given.get(name) is not None), None)


class AttentionForm(NamedTuple):
    """How a class of attention forms its map, and what an edit of the map needs of it.

    `place` is the submodule that receives the map; None adds one after every softmax over keys in the source of the
    class. `form` is a subclass whose forward calls `attn_drop` with the map, for a class that does not. `interface`:
    the class leaves its map to transformers' attention interface. `square`: the tokens are a square window. `mask`
    finds the mask among the arguments of a call, `reason` says why the map of a layer cannot be edited, `grid_reason`
    why its keys and `query_reason` why its queries have no positions on a grid. `places` finds the places of tokens
    that are not in the order of a grid.
    """

    place: str | None = PLACE
    form: type[nn.Module] | None = None
    heads: Callable[[Any], int] = lambda layer: getattr(layer, "num_heads", 1)
    layout: MapLayout | Callable[[Any], MapLayout] = "heads"
    square: bool = False
    mask: Callable[[dict[str, Any]], Any] = _own_mask
    reason: Callable[[Any], str | None] = lambda _: None
    grid_reason: str | Callable[[Any], str | None] | None = None
    query_reason: str | None = None
    places: Callable[[Any, Sequence[GridSize], int, int], tuple[Tensor, Tensor]] | None = None
    interface: bool = False

    @property
    def adds_place(self) -> bool:
        """True if a layer has no submodule that receives its map, so that an edit adds one."""
        return self.place is None or self.form is not None or self.interface

    def layout_of(self, layer: nn.Module) -> MapLayout:
        """Return the layout of the maps of a layer."""
        return self.layout(layer) if callable(self.layout) else self.layout


_SOFTMAX = AttentionForm(place=None)
_INTERFACE = AttentionForm(
    heads=interface_heads,
    mask=lambda _: None,
    reason=interface_reason,
    grid_reason=interface_grid_reason,
    interface=True,
)
"""Attention of transformers: the interface is called with the mask."""
_ONE_QUERY = AttentionForm(query_reason="only its class token is a query, and has no position")

ATTENTION_FORMS: dict[str, AttentionForm] = {
    "timm.layers.attention2d.MultiQueryAttention2d": AttentionForm(
        layout=lambda layer: "queries" if layer.einsum else "heads"
    ),
    "timm.layers.attention2d.MultiQueryAttentionV2": AttentionForm(layout="queries"),
    "timm.layers.bottleneck_attn.BottleneckAttn": AttentionForm(place=None, layout="joint"),
    "timm.layers.diff_attention.DiffAttention": AttentionForm(heads=lambda layer: 2 * layer.num_heads),
    "timm.layers.halo_attn.HaloAttn": AttentionForm(
        place=None,
        layout="joint",
        grid_reason="its windows of keys reach beyond those of its queries",
        places=halo_places,
    ),
    "timm.models.cait.ClassAttn": _ONE_QUERY,
    "timm.models.convit.GPSA": AttentionForm(),
    "timm.models.cpubone.ConvAttention": _SOFTMAX,
    "timm.models.crossvit.CrossAttention": _ONE_QUERY,
    "timm.models.davit.WindowAttention": _SOFTMAX,
    "timm.models.efficientformer.Attention": _SOFTMAX,
    "timm.models.efficientformer_v2.Attention2d": _SOFTMAX,
    "timm.models.efficientformer_v2.Attention2dDownsample": _SOFTMAX,
    "timm.models.efficientvit_msra.CascadedGroupAttention": AttentionForm(place=None, heads=lambda _: 1),
    "timm.models.hiera.MaskUnitAttention": AttentionForm(
        place=None,
        heads=lambda layer: layer.heads,
        grid_reason="its tokens are in the order of its mask units, which has no rows and columns",
        places=mask_unit_places,
    ),
    "timm.models.hieradet_sam2.MultiScaleAttention": _SOFTMAX,
    "timm.models.iformer.SHMA": AttentionForm(heads=lambda _: 1),
    "timm.models.levit.Attention": _SOFTMAX,
    "timm.models.levit.AttentionDownsample": _SOFTMAX,
    "timm.models.lowformer.ConvAttention": _SOFTMAX,
    "timm.models.mvitv2.MultiScaleAttention": _SOFTMAX,
    "timm.models.mvitv2.MultiScaleAttentionPoolFirst": _SOFTMAX,
    "timm.models.nest.Attention": AttentionForm(square=True),
    "timm.models.nextvit.EfficientAttention": AttentionForm(
        grid_reason=lambda layer: None if layer.sr is None else "its keys are means of tokens in a row, without a grid",
        places=row_mean_places,
    ),
    "timm.models.shvit.SHSA": AttentionForm(place=None, heads=lambda _: 1),
    "timm.models.tiny_vit.Attention": AttentionForm(place=None, square=True),
    "timm.models.twins.LocallyGroupedAttn": AttentionForm(layout="windows"),
    "timm.models.vision_transformer.DiffParallelScalingBlock": AttentionForm(heads=lambda layer: 2 * layer.num_heads),
    "timm.models.vision_transformer_sam.Attention": AttentionForm(layout="joint"),
    "timm.models.volo.ClassAttention": _ONE_QUERY,
    "timm.models.volo.OutlookAttention": AttentionForm(
        reason=lambda _: "OutlookAttention mixes the neighbours of each position, with no queries and keys"
    ),
    "torch.nn.modules.activation.MultiheadAttention": AttentionForm(
        form=UnfusedMultiheadAttention, mask=allowed_by_masks, reason=multihead_reason
    ),
}
"""Classes that differ from the usual pattern, by their full name."""


def full_name(kind: type) -> str:
    """Return the name of a class with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def names_of(layer: nn.Module) -> list[str]:
    """Return the full names of the layer's class and its base classes."""
    return [full_name(kind) for kind in type(layer).__mro__]


def no_map_reason(layer: nn.Module) -> str | None:
    """Return why a layer has no attention map, or None."""
    return next((NO_MAP_REASONS[name] for name in names_of(layer) if name in NO_MAP_REASONS), None)


def register_attention(
    kind: type[nn.Module],
    *,
    place: str | None = None,
    form: type[nn.Module] | None = None,
    heads: Callable[[Any], int] | None = None,
    layout: MapLayout = "heads",
) -> type[nn.Module]:
    """Register a class of attention of your own, so that AttentionToRefined and AttentionToGPSA can edit its map.

    A class whose forward passes the map after the softmax through a submodule `attn_drop`, and that has `num_heads`,
    needs no registration. Without `place` and `form`, an edit is inserted after every softmax over keys in the source
    of the class's forward.

    Args:
        kind: the class.
        place: name of the submodule that receives the map after the softmax.
        form: a subclass that computes the same from the same attributes, and whose forward calls `self.attn_drop` with
            the map; for a class that never forms its map, such as `nn.MultiheadAttention`.
        heads: a function from a layer to its number of heads; by default `layer.num_heads`, or 1.
        layout: what follows the batch axis of the map: "heads" for (B, nh, Nq, Nk), or "queries" for (B, Nq, nh, Nk).

    Raises: UserError if the class is not a module class, `form` is not a subclass of it, or no softmax is found.

    Example:
        >>> class Attend(torch.nn.Module):
        ...     def forward(self, x):
        ...         return torch.softmax(x @ x.mT, dim=-1) @ x
        >>> iso.surgery.register_attention(Attend, place="drop").__name__
        'Attend'
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise UserError(f"{kind!r} is not a class of modules; give the class of the attention layer")
    if form is not None and not (isinstance(form, type) and issubclass(form, kind)):
        raise UserError(f"form={form!r} is not a subclass of {kind.__name__}; derive it from the class")
    if place is None and form is None and not softmax_calls(kind):
        raise UserError(f"no softmax over keys is in the source of {kind.__name__}.forward; give place or form")
    given = {} if heads is None else {"heads": heads}
    place = PLACE if form else place
    ATTENTION_FORMS[full_name(kind)] = AttentionForm(place=place, form=form, layout=layout, **given)  # type: ignore[arg-type]
    attention_form.cache_clear()  # type: ignore[attr-defined]
    return kind


def cached_by_class(function: Callable[[type], T]) -> Callable[[type], T]:
    """Decorate a function of a class so that it is computed once for each."""
    return cache(function)


@cached_by_class
def forward_source(kind: type) -> ast.Module | None:
    """Return the source of the forward of a class, parsed, or None if it is not available."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))  # type: ignore[attr-defined]
    except (OSError, TypeError, SyntaxError, AttributeError):
        return None


def is_softmax_over_keys(node: ast.AST) -> bool:
    """True for the call of a softmax over the last axis: `x.softmax(-1)`, `softmax(x, dim=-1)`, `self.softmax(x)`."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "softmax"):
        return False
    owner = node.func.value
    if isinstance(owner, ast.Name) and owner.id == "self":
        return True
    given = [word.value for word in node.keywords if word.arg == "dim"] + node.args
    return any(ast.unparse(value) in ("-1", "2", "3") for value in given)


def softmax_calls(kind: type) -> int:
    """Return the number of softmaxes over keys in the source of the forward of a class."""
    source = forward_source(kind)
    return sum(map(is_softmax_over_keys, ast.walk(source))) if source else 0


@cached_by_class
def _follows_pattern(kind: type) -> bool:
    """True if the forward of a class passes a softmax over keys through `self.attn_drop`."""
    source = forward_source(kind)
    calls = [ast.unparse(node.func) for node in ast.walk(source) if isinstance(node, ast.Call)] if source else []
    return f"self.{PLACE}" in calls and bool(softmax_calls(kind))


@cached_by_class
def _calls_interface(kind: type) -> bool:
    """True if the forward of a class passes queries, keys and values to transformers' attention interface."""
    source = forward_source(kind)
    calls = [node.func for node in ast.walk(source) if isinstance(node, ast.Call)] if source else []
    return any(isinstance(call, ast.Attribute) and call.attr == "get_interface" for call in calls)


@cached_by_class
def attention_form(kind: type) -> AttentionForm | None:
    """Return how a class of attention forms its map, or None if it is not known, or has no map."""
    if any(full_name(base) in NO_MAP_REASONS for base in kind.__mro__):
        return None
    for base in kind.__mro__:
        if form := ATTENTION_FORMS.get(full_name(base)):
            return form
        if "forward" in vars(base):
            break
    if _calls_interface(kind):
        return _INTERFACE
    return AttentionForm() if _follows_pattern(kind) else None


def gating_reason(layer: nn.Module) -> str | None:
    """Return why position attention is not defined between the queries and keys of a layer, or None if it is.

    A class token that is the only query is in the middle of the image.
    """
    form = attention_form(type(layer))
    return None if form is None or form.places else position_reason(layer, queries=False)


def position_reason(layer: nn.Module, queries: bool = True) -> str | None:
    """Return why the keys of a layer, and by default its queries, have no positions on a grid, or None if they do."""
    form = attention_form(type(layer))
    assert form is not None
    reason = form.grid_reason(layer) if callable(form.grid_reason) else form.grid_reason
    return reason or (form.query_reason if queries else None)
