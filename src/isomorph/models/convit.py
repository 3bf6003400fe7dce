"""ConViT: a ViT whose first blocks use gated positional self-attention (GPSA), initialised as convolutions.

It is timm's VisionTransformer with three changes: the first `local_up_to_layer` blocks use `GPSA`, the class token is
added after the last of these blocks, and the absolute position embedding, which only patches have, is optional. Image
size can change from call to call. `checkpoint_filter_fn` converts checkpoints of the authors and of timm's convit_*.
"""

import math
from functools import partial
from typing import Any

import torch
from timm.layers import Attention, resample_abs_pos_embed, trunc_normal_
from timm.models import generate_default_cfgs, vision_transformer
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import GPSA, PSA
from isomorph.models.blockwise import BlockwiseViT
from isomorph.models.staged import parameters_without_decay
from isomorph.models.variants import (
    ForeignCheckpoints,
    Variant,
    build_variant,
    check_heads,
    check_whole_patches,
    image_cfg,
    parse_size,
    register_variants,
    unwrap_state_dict,
)

LOCAL_ATTENTION: dict[str, type[GPSA] | type[PSA]] = {"gpsa": GPSA, "psa": PSA}
"""Attention layers for the first blocks: two softmaxes and a gate (gpsa, eq. 7), or one softmax (psa, eq. 4)."""

PUBLIC_PARAMETER_NAMES = {"gate": "gating_param", "position": "pos_proj.weight"}
"""isomorph's and the public names of GPSA parameters; `pos_proj.bias`, constant along the softmax, has no effect."""

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


class LocalBlock(Block):
    """A ViT block with GPSA or PSA as its attention; `forward` also takes the grid size.

    Shape: x (B, H W, C) -> (B, H W, C)
    Source: ConViT Fig. 4 and eq. 5; `local_init=False` is the random initialisation of Table 3 (c, d, g)
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        locality_strength: float = 1.0,
        gate: float = 1.0,
        local_init: bool = True,
        local_attention: str = "gpsa",
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        given = {name: kwargs[name] for name in ("qkv_bias", "proj_drop") if name in kwargs}
        attention = LOCAL_ATTENTION[local_attention](dim, num_heads, **given)
        self.attn = attention.to(device=kwargs.get("device"), dtype=kwargs.get("dtype"))
        self.locality_strength, self.gate, self.local_init = locality_strength, gate, local_init
        if not local_init:
            self.attn.v.reset_parameters()
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise positions, values and gates; timm calls this after it has initialised the linear layers."""
        if self.local_init:
            self.attn.reset_attention(self.locality_strength)
        else:
            trunc_normal_(self.attn.position, std=0.02)
        if isinstance(self.attn, GPSA):
            self.attn.set_gating(gate=self.gate)

    reset_parameters = init_weights

    def forward(self, x: Tensor, grid_size: tuple[int, int]) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), grid_size)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


def _check_local_blocks(local_attention: str, locality_strength: float, gate: float) -> None:
    """Raise UserError for an unknown attention, a gate with psa, or a value that is out of range."""
    if local_attention not in LOCAL_ATTENTION:
        raise UserError(f"local_attention {local_attention!r} is unknown; use {' or '.join(LOCAL_ATTENTION)}")
    if local_attention == "psa" and gate != 1.0:
        raise UserError(f"gate {gate} is not available with local_attention psa, which has no gates; leave gate out")
    if not 0 < locality_strength < math.inf:
        raise UserError(f"locality_strength {locality_strength} must be above 0 and finite")
    if not isinstance(gate, int | float) or not math.isfinite(gate):
        raise UserError(f"gate {gate!r} must be a finite number (lambda, before the sigmoid)")


def _check_arguments(local_up_to_layer: int, kwargs: dict[str, Any]) -> None:
    """Raise UserError for an argument of VisionTransformer that is out of range or not supported."""
    for name, instead in REPLACED_ARGUMENTS.items():
        if name in kwargs:
            raise UserError(f"{name} is not an argument of a ConViT; {instead}")
    size, patch = parse_size(img_size=kwargs.get("img_size", 224)), parse_size(patch_size=kwargs.get("patch_size", 16))
    if kwargs.get("dynamic_img_pad"):
        size = (size[0] - size[0] % patch[0], size[1] - size[1] % patch[1])
    check_whole_patches(size, patch, padded=False)
    depth, heads, dim = kwargs.get("depth", 12), kwargs.get("num_heads", 12), kwargs.get("embed_dim", 768)
    check_heads(heads, dim)
    if not isinstance(local_up_to_layer, int) or not 0 <= local_up_to_layer <= depth:
        raise UserError(f"local_up_to_layer {local_up_to_layer} must be from 0 to {depth}, the number of blocks")
    if local_up_to_layer and round(heads**0.5) ** 2 != heads:
        raise UserError(f"num_heads {heads} is not a square number, which a ConViT needs; use 1, 4, 9, 16, ...")
    if local_up_to_layer == depth and kwargs.get("class_token", True):
        raise UserError(
            f"local_up_to_layer {depth} of {depth} leaves no block for the class token; "
            "lower it, or set class_token=False and global_pool='avg'"
        )
    for name, allowed in FIXED_ARGUMENTS.items():
        if kwargs.get(name, allowed) != allowed:
            raise UserError(f"{name}={kwargs[name]} is not available in a ConViT; leave it at {allowed!r}")


def _has_public_layout(state: dict[str, Any]) -> bool:
    """Return True if a checkpoint has the layout of the authors and of timm's convit_*."""
    return any(name.endswith(".attn.pos_proj.weight") for name in state)


class ConViT(ForeignCheckpoints, BlockwiseViT):
    """Vision transformer whose first attention layers are initialised as convolutions, with timm's interface.

    The first `local_up_to_layer` blocks use GPSA (0: a plain ViT), or PSA, with one softmax and no gates, if
    `local_attention` is "psa". `locality_strength` and `gate` (lambda, before the sigmoid) are initial values;
    `local_init=False` initialises centres and values randomly. Other arguments are those of VisionTransformer.

    Shape: x (B, in_chans, height, width) -> (B, num_classes); height and width are multiples of the patch size, or any
    with `dynamic_img_pad=True`
    Source: ConViT section 3; differs: images of any size and aspect ratio; no weight decay on positions and gates
    Raises: UserError if num_heads is not a square number, or for an argument that GPSA does not support.
    """

    def __init__(
        self,
        local_up_to_layer: int = 10,
        locality_strength: float = 1.0,
        gate: float = 1.0,
        local_init: bool = True,
        use_pos_embed: bool = True,
        local_attention: str = "gpsa",
        **kwargs: Any,
    ) -> None:
        _check_local_blocks(local_attention, locality_strength, gate)
        _check_arguments(local_up_to_layer, kwargs)
        local = (locality_strength, gate, local_init, local_attention)

        def block(depth: int, dim: int, num_heads: int, **arguments: Any) -> Block:
            if depth >= local_up_to_layer:
                return Block(dim, num_heads, **arguments)
            return LocalBlock(dim, num_heads, *local, **arguments)

        fixed: dict[str, Any] = dict(no_embed_class=True, block_fn=block)
        super().__init__(**{"qkv_bias": False, **kwargs, **fixed}, pos_embed="learn" if use_pos_embed else "none")
        self.local_up_to_layer = local_up_to_layer
        self.update_grid()

    def is_foreign(self, state: dict[str, Tensor]) -> bool:
        return _has_public_layout(state)

    def no_weight_decay(self) -> set[str]:
        """Name the parameters without weight decay: timm's, and positions and gates, for which 0 is not neutral."""
        return super().no_weight_decay() | parameters_without_decay(self)

    def add_positions(self, x: Tensor) -> Tensor:
        """Add the absolute position embedding; the class token is added later. Shape: (B, H, W, C) -> (B, H W, C)"""
        return self.pos_drop(x.flatten(1, 2) + self.resize_positions(x.shape[1], x.shape[2]))

    def run_block(self, i: int, x: Tensor, maps: None, grid_size: tuple[int, int]) -> tuple[Tensor, None]:
        """Run block i; add the class token before the first plain one. Shape: x (B, N, C) -> (B, N or N + 1, C)"""
        if i == self.local_up_to_layer and self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        arguments = (x, grid_size) if i < self.local_up_to_layer else (x,)
        return self.call_block(i, *arguments), None

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the blocks after the last index, and a class token that no other block uses; return the indices."""
        take_indices = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        if len(self.blocks) <= self.local_up_to_layer:
            self.cls_token, self.num_prefix_tokens, self.has_class_token = None, 0, False
            if self.global_pool == "token":
                self.reset_classifier(0, "")
        return take_indices


def checkpoint_filter_fn(state_dict: dict[str, Any], model: Any) -> dict[str, Any]:
    """Convert a checkpoint of the authors, timm's convit_* or isomorph, resizing its position embedding.

    A checkpoint holds the number of its patches, not their grid: a public one with a square number is taken to be
    square; any other is taken to have the model's grid if the numbers agree.

    Raises: UserError if the checkpoint is not a ConViT's, has GPSA in other blocks, or its grid is unknown.
    """
    state_dict = unwrap_state_dict(state_dict)
    if "patch_embed.proj.weight" not in state_dict:
        raise UserError("the checkpoint is not a ConViT's: it has no patch_embed.proj.weight")
    state = {}
    for name, tensor in state_dict.items():
        stem, _, last = name.partition(".attn.")
        own = next((own for own, public in PUBLIC_PARAMETER_NAMES.items() if public == last), last)
        if last != "pos_proj.bias":
            state[f"{stem}.attn.{own}" if last else name] = tensor
    _require_same_gpsa_blocks(state, model)
    given = state.pop("pos_embed", None)
    state = vision_transformer.checkpoint_filter_fn(state, model)  # a patch of another size is resized
    if given is not None and model.pos_embed is not None:
        grid_size = model.patch_embed.grid_size
        state["pos_embed"] = _resize_positions(given, model.pos_embed, grid_size, _has_public_layout(state_dict))
    return state


def _resize_positions(given: Tensor, own: Tensor, grid_size: tuple[int, int], square: bool) -> Tensor:
    """Resize a position embedding to the grid. Shape: given (1, N, C) -> (1, H W, C)"""
    patches = given.shape[1]
    side = round(patches**0.5)
    if patches == own.shape[1] and not (square and side**2 == patches):
        return given
    if side**2 != patches:
        raise UserError(
            f"the checkpoint has {patches} patches, not a square number, so their grid is unknown; "
            "load it into a model with its img_size, then call set_input_size"
        )
    return resample_abs_pos_embed(given, list(grid_size), [side, side], num_prefix_tokens=0)


def _require_same_gpsa_blocks(state: dict[str, Any], model: nn.Module) -> None:
    """Raises: UserError if the checkpoint does not have GPSA in the same blocks as the model."""
    theirs, own = ([n for n in names if n.endswith(".attn.gate")] for names in (state, model.state_dict()))
    if set(theirs) != set(own):
        raise UserError(
            f"the checkpoint has GPSA in {len(theirs)} blocks, which are not the model's {len(own)}; "
            "create the model with another local_up_to_layer, or give a ConViT's checkpoint"
        )


def public_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's weights in the layout of the authors and timm, to load with their code.

    Raises: UserError if the model is not a ConViT, or has local_attention psa.
    """
    if not hasattr(model, "local_up_to_layer"):
        raise UserError(f"{type(model).__name__} is not a ConViT and has no public layout")
    if any(isinstance(module, PSA) for module in model.modules()):
        raise UserError("a ConViT with local_attention psa has no public layout, as public ConViTs all have gates")
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        stem, _, last = name.partition(".attn.")
        state[f"{stem}.attn.{PUBLIC_PARAMETER_NAMES.get(last, last)}" if last else name] = tensor
        if last == "position":
            state[f"{stem}.attn.pos_proj.bias"] = tensor.new_zeros(len(tensor))
    return state


VARIANTS = {
    "convit_ti": Variant(dict(num_heads=4, embed_dim=192), "5.7M parameters, 73.1 top-1"),
    "convit_s": Variant(dict(num_heads=9, embed_dim=432), "27.8M parameters, 81.3 top-1"),
    "convit_b": Variant(dict(num_heads=16, embed_dim=768), "86.5M parameters, 82.4 top-1"),
    "convit_ti_plus": Variant(dict(num_heads=4, embed_dim=256), "10.0M parameters, 76.7 top-1"),
    "convit_s_plus": Variant(dict(num_heads=9, embed_dim=576), "49.0M parameters, 82.2 top-1"),
    "convit_b_plus": Variant(dict(num_heads=16, embed_dim=1024), "153.1M parameters, 82.5 top-1"),
}
"""ConViT Table 1: 48 channels per head, and 64 in the `_plus` variants."""

TIMM_NAMES = {"convit_ti": "convit_tiny", "convit_s": "convit_small", "convit_b": "convit_base"}
"""timm's names of the variants with published weights, which the `_plus` variants do not have."""

default_cfgs = generate_default_cfgs(
    {f"{own}.fb_in1k": image_cfg(hf_hub_id=f"timm/{n}.fb_in1k", license="apache-2.0") for own, n in TIMM_NAMES.items()}
    | {name: image_cfg() for name in VARIANTS if name not in TIMM_NAMES}
)
register_variants(__name__, partial(build_variant, ConViT), VARIANTS)
