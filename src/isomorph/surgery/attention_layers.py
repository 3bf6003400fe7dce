"""Attention layers of any library: which modules they are, and the few facts that no operation tells.

A class is attention if its forward computes a softmax and a matrix product, or `scaled_dot_product_attention`, or
leaves both to transformers' attention interface. Where a map is among its operations is found when it runs.
"""

import dis
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from isomorph.layers.grid import GridSize, fit_grid, grid_positions
from isomorph.layers.unfused_multihead import (
    UnfusedMultiheadAttention,
    allowed_by_masks,
    multihead_reason,
)
from isomorph.operations import MapLayout
from isomorph.surgery.altered import cached_by_class

# Attributes of layers, and of the configurations of transformers, for the number of heads.
_HEADS = ("num_heads", "heads", "n_heads", "num_attention_heads")
# Arguments in which layers receive their mask.
_MASKS = ("attn_mask", "mask", "attention_mask")
# Fields of the configurations of vision models.
_IMAGE_FIELDS = ("image_size", "patch_size", "num_channels")
# Implementations of attention of transformers whose operations can be seen.
_SEEN = ("sdpa", "eager")
_PRODUCTS = {"@", "matmul", "bmm", "einsum"}


def _mask_argument(_: nn.Module, arguments: dict[str, Any]) -> Any:
    """Return the mask among the arguments of a call, or None."""
    for name in _MASKS:
        if arguments.get(name) is not None:
            return arguments[name]
    return None


def mask_unit_order(count: int, units: GridSize) -> Tensor:
    """Return the positions of `count` tokens in each mask unit of Hiera, in the order of its tokens.

    The positions in a unit are numbered with four digits of two bits each, the finest first; the unit comes last.

    Shape: -> (count units, 2)
    Raises: ValueError if the units are not halved on both sides by every pooling.
    """
    levels = round(math.log(count, 4))
    if 4**levels != count:
        raise ValueError(f"mask units of {count} tokens are not squares whose side is a power of 2")
    positions = grid_positions(units) * 2**levels
    for level in reversed(range(levels)):
        positions = (grid_positions((2, 2))[:, None] * 2**level + positions).flatten(0, 1)
    return positions


def mask_unit_positions(
    layer: Any, shapes: Sequence[GridSize], queries: int, keys: int
) -> tuple[Tensor, Tensor]:
    """Return the positions of the tokens of Hiera's attention, in one mask unit or in all of the image."""
    in_unit = layer.window_size
    pooled = math.isqrt(layer.q_stride)
    units = (1, 1) if layer.use_mask_unit_attn else fit_grid(queries // in_unit, shapes)[0]
    # a query is the maximum of pooled^2 tokens
    positions = mask_unit_order(in_unit, units) * pooled + (pooled - 1) / 2
    return positions, mask_unit_order(keys // math.prod(units), units)


def row_mean_positions(
    layer: Any, shapes: Sequence[GridSize], queries: int, keys: int
) -> tuple[Tensor, Tensor]:
    """Return the positions of the tokens of Next-ViT's attention, whose keys are means of tokens in a row."""
    positions = grid_positions(fit_grid(queries, shapes)[0]) / layer.sr_ratio
    return positions, positions[: keys * layer.N_ratio].unflatten(0, (keys, -1)).mean(1)


def halo_positions(
    layer: Any, _: Sequence[GridSize], queries: int, keys: int
) -> tuple[Tensor, Tensor]:
    """Return the positions of the tokens of HaloNet's attention, where windows of keys are larger than of queries."""
    block = math.isqrt(queries)
    window = math.isqrt(keys)
    return grid_positions((block, block)) * layer.block_stride, grid_positions(
        (window, window)
    ) - layer.halo_size


class AttentionFacts(NamedTuple):
    """What no operation tells about a class of attention.

    `no_map`: why it has no map over positions. `layout` and `heads` of its maps, where they are not the usual ones.
    `square`: the tokens are a square window. `plain`: only its plain form has one map. `form`: a subclass that computes
    the same from the same attributes by operations that can be seen. `mask`: from the layer and the arguments of a
    call, by name. `reason`: why its map cannot be edited. `grid_reason` and `query_reason`: why its keys, or its
    queries, have no positions on a grid. `positions`: the (row, column) of queries and of keys that are not in the
    order of a grid, in steps of the keys, from the layer, the sizes that its tokens may cover, and their numbers.
    """

    no_map: str | None = None
    layout: Callable[[Any], MapLayout | None] = lambda _: None
    heads: Callable[[Any], int] | None = None
    square: bool = False
    plain: bool = False
    form: type[nn.Module] | None = None
    mask: Callable[[Any, dict[str, Any]], Any] = _mask_argument
    reason: Callable[[Any], str | None] = lambda _: None
    grid_reason: Callable[[Any], str | None] = lambda _: None
    query_reason: str | None = None
    positions: Callable[[Any, Sequence[GridSize], int, int], tuple[Tensor, Tensor]] | None = None
    interface: bool = False


def _interface_reason(layer: Any) -> str | None:
    """Return why the map of attention that transformers' interface computes cannot be edited, or None."""
    name = type(layer).__name__
    config: Any = getattr(layer, "config", None)
    if not hasattr(config, "_attn_implementation"):
        return f"{name} has no config that says how its attention is computed"
    if _first_of((layer, config), ("is_causal", "is_decoder"), bool):
        return f"{name} is causal: an edited map mixes neighbouring queries, so that a token would see later ones"
    if config._attn_implementation not in _SEEN:
        implementation = f"{name} uses {config._attn_implementation}"
        return f'{implementation}, whose operations cannot be seen; call model.set_attn_implementation("sdpa") first'
    if "Cross" in name:
        return f"{name} attends to other tokens than those of its queries"
    if not any(hasattr(layer, field) or hasattr(config, field) for field in _HEADS):
        return f"{name} does not say how many heads it has"
    return None


def _first_of(owners: Sequence[Any], names: Sequence[str], accepts: Callable[[Any], bool]) -> Any:
    """Return the first attribute of an owner under one of these names that is accepted, or None."""
    for owner in owners:
        for name in names:
            value = getattr(owner, name, None)
            if accepts(value):
                return value
    return None


def _words_reason(layer: Any) -> str | None:
    config = getattr(layer, "config", None)
    has_image = any(hasattr(config, name) for name in _IMAGE_FIELDS)
    return None if has_image else "its tokens are words in a row, which is not a grid"


_CHANNELS = AttentionFacts("attends between channels, so it has no map over tokens")
_KEYS_ALONE = AttentionFacts(
    "takes the softmax of its keys alone, so it has no map from queries to keys"
)
_POOLS = AttentionFacts("pools tokens with weights that do not depend on a query")
_ONE_QUERY = AttentionFacts(query_reason="only its class token is a query, and has no position")
_SHIFTED = AttentionFacts(
    reason=lambda _: "its shifted windows hide their mask; recast timm's Swin, which has one"
)
_DIFFERENCE = AttentionFacts(heads=lambda layer: 2 * layer.num_heads, plain=True)
_INTERFACE = AttentionFacts(reason=_interface_reason, grid_reason=_words_reason, interface=True)

# Attention of a class that is in no table.
NOTHING_KNOWN = AttentionFacts()

# Classes that are not like most, by their full name; None for one that is not attention, though it looks like it.
FACTS: dict[str, AttentionFacts | None] = {
    "isomorph.layers.unfused_multihead.MultiheadLinears": AttentionFacts(mask=allowed_by_masks),
    "timm.layers.attention2d.MultiQueryAttention2d": AttentionFacts(
        layout=lambda x: "queries" if x.einsum else "heads"
    ),
    "timm.layers.attention2d.MultiQueryAttentionV2": AttentionFacts(layout=lambda _: "queries"),
    "timm.layers.diff_attention.DiffAttention": _DIFFERENCE,
    "timm.layers.global_context.GlobalContext": _POOLS,
    "timm.layers.halo_attn.HaloAttn": AttentionFacts(
        layout=lambda _: "joint",
        grid_reason=lambda _: "its windows of keys reach beyond those of its queries",
        positions=halo_positions,
    ),
    "timm.layers.lambda_layer.LambdaLayer": _KEYS_ALONE,
    "timm.layers.non_local_attn.BilinearAttnTransform": _POOLS,
    "timm.models.cait.ClassAttn": _ONE_QUERY,
    "timm.models.coat.FactorAttnConvRelPosEnc": _KEYS_ALONE,
    "timm.models.crossvit.CrossAttention": _ONE_QUERY,
    "timm.models.csatv2.SpatialTransformerBlock": AttentionFacts(
        "compares images, so it has no map over tokens"
    ),
    "timm.models.davit.ChannelAttention": _CHANNELS,
    "timm.models.davit.ChannelAttentionV2": _CHANNELS,
    "timm.models.edgenext.CrossCovarianceAttn": _CHANNELS,
    "timm.models.efficientvim.HSMSSD": None,
    "timm.models.efficientvit_mit.LiteMLA": AttentionFacts(
        "is linear, so it has no map from queries to keys"
    ),
    "timm.models.efficientvit_msra.CascadedGroupAttention": AttentionFacts(heads=lambda _: 1),
    "timm.models.hiera.MaskUnitAttention": AttentionFacts(
        layout=lambda _: "heads",
        grid_reason=lambda _: (
            "its tokens are in the order of its mask units, which has no rows and columns"
        ),
        positions=mask_unit_positions,
    ),
    "timm.models.iformer.SHMA": AttentionFacts(heads=lambda _: 1),
    "timm.models.mobilevit.LinearSelfAttention": _KEYS_ALONE,
    "timm.models.nest.Attention": AttentionFacts(layout=lambda _: "heads", square=True),
    "timm.models.nextvit.EfficientAttention": AttentionFacts(
        grid_reason=lambda layer: (
            None if layer.sr is None else "its keys are means of tokens in a row, without a grid"
        ),
        positions=row_mean_positions,
    ),
    "timm.models.swiftformer.EfficientAdditiveAttention": _KEYS_ALONE,
    "timm.models.tiny_vit.Attention": AttentionFacts(square=True),
    "timm.models.vision_transformer.DiffParallelScalingBlock": _DIFFERENCE,
    "timm.models.volo.ClassAttention": _ONE_QUERY,
    "timm.models.volo.OutlookAttention": AttentionFacts(
        reason=lambda _: (
            "OutlookAttention mixes the neighbours of each position, with no queries and keys"
        )
    ),
    "timm.models.xcit.XCA": _CHANNELS,
    "torch.nn.modules.activation.MultiheadAttention": AttentionFacts(
        form=UnfusedMultiheadAttention, mask=allowed_by_masks, reason=multihead_reason
    ),
    "torchvision.models.maxvit.RelativePositionalMultiHeadAttention": AttentionFacts(square=True),
    "torchvision.models.swin_transformer.ShiftedWindowAttention": _SHIFTED,
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": _SHIFTED,
}


def names_of(layer: nn.Module) -> list[str]:
    """Return the full names of the layer's class and its base classes."""
    return [_full_name(kind) for kind in type(layer).__mro__]


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _functions_of(kind: type) -> Iterator[Any]:
    """Yield the forward of a class, and the methods and functions of its module that it uses."""
    stack: list[Any] = [getattr(kind, "forward", None)]
    visited = set()
    while stack:
        function = inspect.unwrap(stack.pop())
        code = getattr(function, "__code__", None)
        if code is None or code in visited:
            continue
        visited.add(code)
        yield function
        for name in code.co_names:
            if inspect.isfunction(inspect.getattr_static(kind, name, None)):
                stack.append(getattr(kind, name))
            other = function.__globals__.get(name)
            if inspect.isfunction(other) and other.__module__ == function.__module__:
                stack.append(other)


@cached_by_class
def _names_used(kind: type) -> set[str]:
    """Return the names that the forward of a class uses, "@" if it multiplies matrices by the operator."""
    names: set[str] = set()
    for function in _functions_of(kind):
        names.update(function.__code__.co_names)
        names |= {"@"} & {step.argrepr for step in dis.get_instructions(function)}
    return names


@cached_by_class
def attention_facts(kind: type) -> AttentionFacts | None:
    """Return what is known about a class of attention, or None for another class and for isomorph's own layers."""
    if kind.__module__.startswith("isomorph.") and _full_name(kind) not in FACTS:
        return None
    rows = {base: FACTS[_full_name(base)] for base in kind.__mro__ if _full_name(base) in FACTS}
    for row in rows.values():
        if row and row.no_map:
            return row
    for base in kind.__mro__:
        if base in rows:
            return rows[base]
        if "forward" in vars(base):  # it computes something else than its base classes
            break
    names = _names_used(kind)
    if "get_interface" in names:
        return _INTERFACE
    attends = "scaled_dot_product_attention" in names or ("softmax" in names and names & _PRODUCTS)
    return NOTHING_KNOWN if attends else None


@cached_by_class
def calls_fused_attention(kind: type) -> bool:
    """Return whether layers of a class of attention call `scaled_dot_product_attention`, in a form of theirs."""
    facts = attention_facts(kind)
    names = _names_used(facts.form if facts and facts.form else kind)
    return bool(names & {"scaled_dot_product_attention", "get_interface"})


def facts_of(layer: Any) -> AttentionFacts | None:
    """Return what is known about the class of an attention layer, with an edited map or without."""
    return getattr(type(layer), "facts", None) or attention_facts(type(layer))


def heads_of(layer: Any, facts: AttentionFacts | None) -> int:
    """Return the number of heads of an attention layer, 1 if it does not say."""
    if facts and facts.heads:
        return facts.heads(layer)
    owners = (layer, getattr(layer, "config", None))
    return _first_of(owners, _HEADS, lambda heads: isinstance(heads, int)) or 1


def gating_reason(layer: nn.Module) -> str | None:
    """Return why a layer cannot attend by position, or None; a class token alone is in the middle of the image."""
    facts = facts_of(layer)
    return None if facts is None or facts.positions else facts.grid_reason(layer)


def position_reason(layer: nn.Module) -> str | None:
    """Return why the queries or keys of a layer have no positions on a grid, or None if they do."""
    facts = facts_of(layer)
    return facts and (facts.grid_reason(layer) or facts.query_reason)
