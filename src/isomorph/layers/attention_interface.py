"""Attention of transformers' models with its map as a tensor, for edits of the map.

The attention layers of transformers pass queries, keys and values to a function that their configuration names
(`attn_implementation`). An edited layer has a configuration of its own that names `edited_attention`; the model's
configuration stays, so its masks and its other layers are as before.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from isomorph.layers.attention_base import map_chunk_size
from isomorph.layers.chunked import has_inner_hooks, is_eager, is_functorch_tensor, run_in_chunks
from isomorph.layers.map_edit import RUNNING, MapCall, masked_softmax

INTERFACE_NAME = "isomorph"
"""The name of `edited_attention` among transformers' implementations of attention."""


def register_interface() -> None:
    """Register `edited_attention` with transformers, if it is not registered yet."""
    from transformers import AttentionInterface

    AttentionInterface.register(INTERFACE_NAME, edited_attention)


def use_interface(layer: Any, config: Any) -> None:
    """Give a layer a copy of the configuration that names `edited_attention`."""
    layer.config = copy.copy(config)  # a shallow copy: the configurations inside belong to the model
    layer.config._attn_implementation_internal = INTERFACE_NAME


def _as_mask(mask: Any) -> Tensor | None:
    """Return the mask of a call in a form that broadcasts to the map: True for allowed, or added to the scores.

    Shape: mask (B, Nk) or (B, 1, Nq, Nk) -> (B, 1, Nq, Nk)
    Raises: ValueError for a mask that is not a tensor, such as that of flex_attention.
    """
    if mask is not None and not isinstance(mask, Tensor):
        given = f"the attention mask is a {type(mask).__name__}"
        raise ValueError(f'{given}, and an edited map needs a tensor; call model.set_attn_implementation("sdpa")')
    if mask is not None and mask.ndim == 2:  # that of flash attention
        mask = mask.bool()[:, None, None].expand(-1, -1, mask.shape[1], -1)
    return mask


def _merge_queries(mask: Tensor | None) -> Tensor | None:
    """Return a mask that is the same for every query, as that of padding, expanded along the queries; others unchanged.

    `RefinedMap` refines under such a mask several times as fast. The values are compared once for each mask, which all
    layers of a model share; not under a compiler or torch.func, where values are not known.

    Shape: (B, h, Nq, Nk) -> the same
    """
    if mask is None or mask.ndim != 4 or mask.stride(-2) == 0:
        return mask
    if not is_eager() or mask.is_meta or is_functorch_tensor(mask):
        return mask
    merged = mask[:, :, :1].expand_as(mask)
    if mask.is_inference():  # it counts no versions
        return merged if torch.equal(mask, merged) else mask
    version, same = getattr(mask, "isomorph_padding", (-1, False))
    if version != mask._version:
        same = torch.equal(mask, merged)
        mask.isomorph_padding = (mask._version, same)  # type: ignore[attr-defined]
    return merged if same else mask


def _match_heads(x: Tensor, heads: int) -> Tensor:
    """Return keys or values repeated for every head, where several heads share them."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def edited_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the values weighed by the edited map, and the map if the layer was in eager mode before the edit.

    The map passes through `module.attn_drop`, with its own dropout, so that the argument `dropout` is not used. On a
    CPU some sequences are processed at a time, unless the map is returned.

    Shape: query (B, nh, Nq, hd), key and value (B, nh, Nk, hd), attention_mask (B, Nk) or (B, 1, Nq, Nk)
    -> (B, Nq, nh, hd) and (B, nh, Nq, Nk)
    Raises: ValueError for causal attention, a mask that is not a tensor, or scores that are capped or have sinks.
    """
    if is_causal:
        raise ValueError("is_causal is not supported: an edited map mixes queries and cannot be causal")
    if changed := [name for name in ("softcap", "s_aux") if more.get(name) is not None]:
        raise ValueError(f"{type(module).__name__} passes {changed[0]}, which an edited map does not support")
    call = getattr(RUNNING, "call", None) or MapCall()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    key, value = (_match_heads(x, query.shape[1]) for x in (key, value))

    def maps_of(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        RUNNING.call = call._replace(mask=mask)
        scores = (q * scale) @ k.mT
        scores = scores if position_bias is None else scores + position_bias
        return module.attn_drop(masked_softmax(scores, mask))  # (B, nh, Nq, Nk)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return maps_of(q, k, mask) @ v  # (B, nh, Nq, hd)

    mask = _merge_queries(_as_mask(attention_mask))
    if module.original.config._attn_implementation == "eager":
        maps = maps_of(query, key, mask)
        return (maps @ value).transpose(1, 2).contiguous(), maps
    whole = has_inner_hooks(module.attn_drop) or any(True for _ in module.attn_drop.buffers())
    whole = whole or position_bias is not None
    size = query.shape[0] if whole else map_chunk_size(query)
    if mask is not None and mask.shape[0] != query.shape[0]:
        mask = mask.expand(query.shape[0], -1, -1, -1)
    return run_in_chunks(attend, size, query, key, value, mask).transpose(1, 2).contiguous(), None
