"""What makes no ConViT, refused in a line before anything is built or run."""

import math
from typing import Any

from timm.layers import Attention

from isomorph.errors import UserError
from isomorph.models.vit_cfg import check_heads, check_image_size, parse_sizes

REPLACED_ARGUMENTS = {
    "pos_embed": "use_pos_embed says whether there is one",
    "no_embed_class": "its position embedding is on patches only",
    "dynamic_img_size": "it takes every size at every call",
    "block_fn": "local_up_to_layer says which blocks have GPSA",
}
"""Arguments of VisionTransformer that a ConViT answers itself."""

FIXED_ARGUMENTS: dict[str, Any] = {"attn_drop_rate": 0.0, "patch_drop_rate": 0.0, "reg_tokens": 0, "qk_norm": False}
FIXED_ARGUMENTS |= {"scale_attn_norm": False, "proj_bias": True, "attn_layer": Attention}
"""Arguments of VisionTransformer that would need a map, a full grid or another attention than GPSA has."""


def check_local_attention(local_attention: str, gate: float, known: tuple[str, ...]) -> None:
    """Raises: UserError for an attention that there is not, or a gate for one that has none."""
    if local_attention not in known:
        raise UserError(f"local_attention {local_attention!r} is unknown; use {' or '.join(known)}")
    if local_attention == "psa" and gate != 1.0:
        raise UserError(f"gate {gate} is of local_attention gpsa; psa has one softmax and no gates: leave gate out")


def check_arguments(local_up_to_layer: int, locality_strength: float, gate: float, kwargs: dict[str, Any]) -> None:
    """Raises: UserError for arguments that make no ConViT, before anything is built."""
    size, patch = parse_sizes(kwargs.get("img_size", 224), kwargs.get("patch_size", 16))
    if kwargs.get("dynamic_img_pad") and min(patch) > 0:
        size = (size[0] - size[0] % patch[0], size[1] - size[1] % patch[1])
    check_image_size(size, patch, padded=False)
    depth, heads, dim = kwargs.get("depth", 12), kwargs.get("num_heads", 12), kwargs.get("embed_dim", 768)
    for name, instead in REPLACED_ARGUMENTS.items():
        if name in kwargs:
            raise UserError(f"{name} is no argument of a ConViT; {instead}")
    check_heads(heads, dim)
    if not isinstance(local_up_to_layer, int) or not 0 <= local_up_to_layer <= depth:
        raise UserError(f"local_up_to_layer {local_up_to_layer} is not between 0 and the {depth} blocks there are")
    if local_up_to_layer and round(heads**0.5) ** 2 != heads:
        raise UserError(f"num_heads {heads} is no square, so GPSA heads form no window; use 1, 4, 9, 16, ...")
    if not 0 < locality_strength < math.inf:
        raise UserError(f"locality_strength {locality_strength} must be above 0 and finite")
    if not isinstance(gate, int | float) or not math.isfinite(gate):
        raise UserError(f"gate {gate!r} must be a finite number, lambda before the sigmoid")
    if local_up_to_layer == depth and kwargs.get("class_token", True):
        raise UserError(
            f"{depth} GPSA blocks of {depth} leave none for the class token; "
            "lower local_up_to_layer, or set class_token=False and global_pool='avg'"
        )
    for name, allowed in FIXED_ARGUMENTS.items():
        if kwargs.get(name, allowed) != allowed:
            raise UserError(f"{name}={kwargs[name]} is not available in a ConViT, only {allowed!r} is")
