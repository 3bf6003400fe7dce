"""Which heads of a gated attention layer are closed or open, and the same layer without what they do not use.

A head is described by a letter: b (both), p (position only), c (content only), or t (position, on a single tap).
"""

import copy
from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor, nn

from isomorph.layers.content_heads import ContentConv2d, ContentHeads, group_rows_by_head
from isomorph.layers.gpsa import GPSA
from isomorph.layers.gpsa2d import GPSA2d
from isomorph.layers.positional_conv import PositionalConv2d
from isomorph.layers.pruned_gpsa import LETTERS, PrunedGPSA, PrunedViTGPSA
from isomorph.layers.pruned_gpsa2d import PrunedGPSA2d, part_class
from isomorph.layers.tap_heads import PositionHeads, TapHeads, nearest_taps
from isomorph.layers.vit_gpsa import ViTGPSA

MAP_LAYERS = (GPSA2d, PrunedGPSA2d, PositionalConv2d, ContentConv2d)
"""Layers on feature maps whose heads can be pruned."""

MapLayer = GPSA2d | PrunedGPSA2d | PositionalConv2d | ContentConv2d

TOKEN_LAYERS = (GPSA, PrunedGPSA)
"""Layers on tokens whose heads can be pruned."""

HEAD_FORMS = {
    "b": "position and content",
    "p": "position only",
    "c": "content only",
    "t": "one tap of a convolution",
}
"""What a head of each letter attends by."""

_NEIGHBOURS = torch.arange(-64.0, 65.0, dtype=torch.float64)
"""Offsets from the nearest position over which the attention of a head on a line is summed."""


def current_heads(layer: nn.Module) -> str:
    """Return the letter of every head of a layer as it is."""
    if isinstance(layer, PrunedGPSA2d | PrunedGPSA):
        return layer.heads
    letter = "p" if isinstance(layer, PositionalConv2d) else "c" if isinstance(layer, ContentConv2d) else "b"
    return letter * layer.num_heads  # type: ignore[operator]


@torch.no_grad()
def closed_heads(layer: nn.Module, tolerance: float) -> str:
    """Return the letter of every head when at most `tolerance` of its attention is left out.

    All heads of a layer on feature maps are on taps, or none.
    """
    shares = layer.position_share.double().tolist()  # type: ignore[operator]
    heads = "".join("p" if 1 - s <= tolerance else "c" if s <= tolerance else "b" for s in shares)
    if isinstance(layer, GPSA2d | PositionalConv2d | PrunedGPSA2d) and set(heads) == {"p"}:
        return "t" * len(heads) if bool((off_tap_share(layer) <= tolerance).all()) else heads
    return heads


@torch.no_grad()
def off_tap_share(layer: MapLayer) -> Tensor:
    """Return the share of each head's position attention that is not on the tap nearest to its centre. Shape: -> (nh,)

    It is 1 for a head whose centre has left the window.
    """
    tensors, size = map_head_tensors(layer), layer.kernel_size
    centre, locality = tensors["centre"].double(), _locality(tensors["raw_locality"])
    tap = nearest_taps(centre, size) - size // 2  # (nh, 2)
    distance = tap[..., None] + _NEIGHBOURS.to(centre.device) - centre[..., None]  # (nh, 2, 129)
    share = torch.softmax(-locality[:, None, None] * distance.square(), dim=-1)[..., len(_NEIGHBOURS) // 2].prod(1)
    inside = (tap == centre.round()).all(1)
    return torch.where(inside, 1 - share, torch.ones_like(share))


def _locality(raw: Tensor) -> Tensor:
    """Return localities in float64. Shape: (nh,)"""
    return nn.functional.softplus(raw.double(), beta=5.0)


def prune_heads(layer: nn.Module, heads: str) -> nn.Module:
    """Return a layer without the queries and keys of heads p, and without the position of heads c.

    The values of a layer on feature maps become part of its filters. With heads t it is a convolution, and a layer of a
    ViT whose heads are all c is timm's Attention.

    Raises: ValueError if there is not one letter for each head, or the letters do not fit the layer.
    """
    if not isinstance(layer, MAP_LAYERS + TOKEN_LAYERS):
        raise ValueError(f"{type(layer).__name__} has no gated heads; prune GPSA or GPSA2d")
    now = current_heads(layer)
    fitting = (
        set(heads) == {"t"} if "t" in heads else all(old in (new, "b") for new, old in zip(heads, now, strict=False))
    )
    if len(heads) != len(now) or set(heads) - set(HEAD_FORMS) or not fitting:
        raise ValueError(f"heads {heads!r} do not fit the {len(now)} heads of this layer, {now!r}")
    build = _prune_map_layer if isinstance(layer, MAP_LAYERS) else _prune_token_layer
    return build(layer, heads).train(layer.training)  # type: ignore[arg-type]


@torch.no_grad()
def map_head_tensors(layer: MapLayer) -> dict[str, Tensor]:
    """Return the parameters of a layer on feature maps by head, the values part of the filters.

    Shape: filters (nh, C_out, C), query and key (nh, hd, C), centre (nh, 2), raw_locality and gate (nh,)
    """
    if not isinstance(layer, PrunedGPSA2d):
        return _part_tensors(layer)
    found: dict[str, Tensor] = {}
    for letter, part in layer.parts().items():
        index = torch.tensor([h for h, own in enumerate(layer.heads) if own == letter], device=part.weight.device)
        for name, tensor in _part_tensors(part).items():
            whole = found.get(name, tensor.new_zeros(len(layer.heads), *tensor.shape[1:]))
            found[name] = whole.index_copy(0, index, tensor)
    return found


def _part_tensors(part: TapHeads) -> dict[str, Tensor]:
    """Return the parameters of heads of one kind, by head."""
    folded = part.folded_filters() if isinstance(part, PositionHeads) else part.weight.flatten(2).double()
    found = {"filters": folded.permute(2, 0, 1)}
    if isinstance(part, PositionHeads):
        found |= {"centre": part.centre, "raw_locality": part.raw_locality}
    if isinstance(part, ContentHeads):
        rows = {name: group_rows_by_head(getattr(part, name).weight, part.num_heads) for name in ("query", "key")}
        found |= {name: weight.unflatten(0, (part.num_heads, -1)) for name, weight in rows.items()}
    return found | ({"gate": part.gate} if isinstance(part, GPSA2d) else {})


@torch.no_grad()
def _prune_map_layer(layer: MapLayer, heads: str) -> nn.Module:
    """Return the layer with these heads: a convolution, one of the parts of PrunedGPSA2d, or several."""
    tensors, first = map_head_tensors(layer), _layers_of_heads(layer)[0]
    size = (first.in_channels, first.out_channels, first.kernel_size, first.stride, first.padding)
    bias = next((part.bias for part in _layers_of_heads(layer) if part.bias is not None), None)
    content: dict[str, Any] = {}
    for part in _layers_of_heads(layer):
        content |= part.content_options if isinstance(part, ContentHeads) else {}
    kinds = "".join(dict.fromkeys("p" if letter == "t" else letter for letter in heads))
    whole: nn.Module
    if len(kinds) == 1:
        whole = part_class(kinds, content)(*size, bias=bias is not None, groups=first.groups)
        parts = {kinds: whole}
    else:
        whole = PrunedGPSA2d(heads, *size, bias is not None, first.groups, **content)
        parts = whole.parts()
    whole.to(first.weight.device, first.weight.dtype)
    for letter, part in parts.items():
        _load_part(part, tensors, [h for h, own in enumerate(heads) if own in (letter, "t")])
        if bias is not None and part.bias is not None:
            part.bias.copy_(bias)
    return whole.tap_convolution() if "t" in heads else whole  # type: ignore[operator]


def _layers_of_heads(layer: MapLayer) -> list[TapHeads]:
    """Return the layers that hold the heads: the parts of a pruned layer, or the layer itself."""
    return list(layer.parts().values()) if isinstance(layer, PrunedGPSA2d) else [layer]


def _load_part(part: nn.Module, tensors: dict[str, Tensor], chosen: list[int]) -> None:
    """Copy the parameters of the chosen heads into a layer that has these heads only."""
    own = dict(part.named_parameters())
    index = torch.tensor(chosen, device=tensors["filters"].device)
    for name, tensor in tensors.items():
        rows = tensor.index_select(0, index)
        if name == "filters":
            own["weight"].copy_(rows.permute(1, 2, 0).reshape(own["weight"].shape))
        elif name in ("query", "key") and f"{name}.weight" in own:
            turns = rows.transpose(0, 1).flatten(0, 1)  # (hd nh, C): row r belongs to head r mod nh
            own[f"{name}.weight"].copy_(turns[: own[f"{name}.weight"].shape[0]])
        elif name in own:
            own[name].copy_(rows)


@torch.no_grad()
def token_head_tensors(layer: GPSA | PrunedGPSA) -> dict[str, Tensor]:
    """Return the parameters of a layer on tokens by head; those that a head does not have are 0.

    Shape: weights of q, k, v (nh, hd, C), their biases (nh, hd), position (nh, 3), gate (nh,)
    """
    nh = layer.num_heads
    order = layer.sorted_heads if isinstance(layer, PrunedGPSA) else list(range(nh))
    placed = [h for h in order if current_heads(layer)[h] != "c"]
    with_content = [h for h in order if current_heads(layer)[h] != "p"]
    by_prefix = [h for h in order if current_heads(layer)[h] == "p"]
    found: dict[str, Tensor] = {}

    def put(name: str, tensor: Tensor, heads: list[int]) -> None:
        rows = tensor if name in ("position", "gate") else tensor.unflatten(0, (len(heads), -1))
        whole = found.get(name, rows.new_zeros(nh, *rows.shape[1:]))
        found[name] = whole.index_copy(0, torch.tensor(heads, dtype=torch.long, device=rows.device), rows)

    for projection, heads in ((layer.qk, with_content), (getattr(layer, "prefix_qk", None), by_prefix)):
        for kind, tensor in projection.named_parameters() if projection is not None else ():
            for name, half in zip("qk", tensor.chunk(2), strict=True):
                put(f"{name}.{kind}", half, heads)
    for kind, tensor in layer.v.named_parameters():
        put(f"v.{kind}", tensor, order)
    put("position", layer.position, placed)
    put("gate", layer.gate, [h for h in with_content if h in placed])
    return found


@torch.no_grad()
def _prune_token_layer(layer: GPSA | PrunedGPSA, heads: str) -> nn.Module:
    """Return the layer with these heads; timm's Attention for a layer of a ViT with content attention only."""
    tensors, in_vit = token_head_tensors(layer), isinstance(layer, ViTGPSA | PrunedViTGPSA)
    dim, bias = layer.v.in_features, layer.v.bias is not None
    if in_vit and set(heads) == {"c"}:
        plain = Attention(dim, len(heads), qkv_bias=bias).to(layer.v.weight.device, layer.v.weight.dtype)
        for kind, tensor in plain.qkv.named_parameters():
            tensor.copy_(torch.cat([tensors[f"{name}.{kind}"].flatten(0, 1) for name in "qkv"]))
        return _with_parts_of(layer, plain)
    kind_of_layer = PrunedViTGPSA if in_vit else PrunedGPSA
    pruned = kind_of_layer(heads, dim, layer.grid_size, bias, layer.prefix_tokens)
    pruned.to(layer.v.weight.device, layer.v.weight.dtype)
    chosen = {
        letter: [h for h in pruned.sorted_heads if heads[h] in letter] for letter in ("p", "bc", "pb", "b", "pbc")
    }

    def take(name: str, letters: str) -> Tensor:
        return tensors[name].index_select(
            0, torch.tensor(chosen[letters], dtype=torch.long, device=tensors[name].device)
        )

    for projection, letters in ((pruned.qk, "bc"), (pruned.prefix_qk, "p")):
        for kind, tensor in projection.named_parameters() if projection is not None else ():
            tensor.copy_(torch.cat([take(f"{name}.{kind}", letters).flatten(0, 1) for name in "qk"]))
    for kind, tensor in pruned.v.named_parameters():
        tensor.copy_(take(f"v.{kind}", LETTERS).flatten(0, 1))
    pruned.position.copy_(take("position", "pb"))
    pruned.gate.copy_(take("gate", "b"))
    return _with_parts_of(layer, pruned)


def _with_parts_of(layer: nn.Module, other: nn.Module) -> nn.Module:
    """Copy the parts that pruning does not change from one layer to another, and return it."""
    for name in ("proj", "proj_drop", "q_norm", "k_norm"):
        if hasattr(layer, name):
            setattr(other, name, copy.deepcopy(getattr(layer, name)))
    return other
