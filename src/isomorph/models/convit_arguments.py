"""Check the arguments of a ConViT before it is built."""

import math
from typing import Any

from timm.layers import Attention

from isomorph.errors import UserError
from isomorph.models.vit_cfg import check_heads, check_whole_patches, parse_sizes

REPLACED_ARGUMENTS = {
    "pos_embed": "set use_pos_embed instead",
    "no_embed_class": "its position embedding is on patches only",
    "dynamic_img_size": "it takes images of any size",
    "block_fn": "set local_up_to_layer and local_attention instead",
}
"""Arguments of VisionTransformer that a ConViT does not have, and why or what to set instead."""

FIXED_ARGUMENTS: dict[str, Any] = {"attn_drop_rate": 0.0, "patch_drop_rate": 0.0, "reg_tokens": 0, "qk_norm": False}
FIXED_ARGUMENTS |= {"scale_attn_norm": False, "proj_bias": True, "attn_layer": Attention}
"""Arguments of VisionTransformer that GPSA does not support, with the one value that they may have."""


def check_local_attention(local_attention: str, gate: float, known: tuple[str, ...]) -> None:
    """Check local_attention and gate. Raises: UserError for an unknown attention, or a gate with psa."""
    if local_attention not in known:
        raise UserError(f"local_attention {local_attention!r} is unknown; use {' or '.join(known)}")
    if local_attention == "psa" and gate != 1.0:
        raise UserError(f"gate {gate} is not available with local_attention psa, which has no gates; leave gate out")


def check_arguments(local_up_to_layer: int, locality_strength: float, gate: float, kwargs: dict[str, Any]) -> None:
    """Check the other arguments. Raises: UserError for one that is out of range or not supported."""
    size, patch = parse_sizes(kwargs.get("img_size", 224), kwargs.get("patch_size", 16))
    if kwargs.get("dynamic_img_pad") and min(patch) > 0:
        size = (size[0] - size[0] % patch[0], size[1] - size[1] % patch[1])
    check_whole_patches(size, patch, padded=False)
    depth, heads, dim = kwargs.get("depth", 12), kwargs.get("num_heads", 12), kwargs.get("embed_dim", 768)
    for name, instead in REPLACED_ARGUMENTS.items():
        if name in kwargs:
            raise UserError(f"{name} is not an argument of a ConViT; {instead}")
    check_heads(heads, dim)
    if not isinstance(local_up_to_layer, int) or not 0 <= local_up_to_layer <= depth:
        raise UserError(f"local_up_to_layer {local_up_to_layer} must be from 0 to {depth}, the number of blocks")
    if local_up_to_layer and round(heads**0.5) ** 2 != heads:
        raise UserError(f"num_heads {heads} is not a square number, which GPSA needs; use 1, 4, 9, 16, ...")
    if not 0 < locality_strength < math.inf:
        raise UserError(f"locality_strength {locality_strength} must be above 0 and finite")
    if not isinstance(gate, int | float) or not math.isfinite(gate):
        raise UserError(f"gate {gate!r} must be a finite number (lambda, before the sigmoid)")
    if local_up_to_layer == depth and kwargs.get("class_token", True):
        raise UserError(
            f"local_up_to_layer {depth} of {depth} leaves no block for the class token; "
            "lower it, or set class_token=False and global_pool='avg'"
        )
    for name, allowed in FIXED_ARGUMENTS.items():
        if kwargs.get(name, allowed) != allowed:
            raise UserError(f"{name}={kwargs[name]} is not available in a ConViT; leave it at {allowed!r}")
