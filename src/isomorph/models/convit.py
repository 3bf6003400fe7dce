"""ConViT: a ViT whose first blocks use gated positional self-attention (GPSA), initialised as convolutions.

It is timm's VisionTransformer with three changes: the first `local_up_to_layer` blocks use `GPSA`, the class token is
added after the last of these blocks, and the absolute position embedding, which only patches have, is optional. Image
size can change from call to call. `checkpoint_filter_fn` converts checkpoints of the authors and of timm's convit_*.
"""

from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import Block
from torch import Tensor

from isomorph.layers import GPSA, PSA
from isomorph.layers.token_heads import TokenHeads
from isomorph.layers.weight_decay import parameters_without_decay
from isomorph.models.blockwise import BlockwiseViT
from isomorph.models.convit_arguments import check_arguments, check_local_attention
from isomorph.models.convit_checkpoints import checkpoint_filter_fn, has_public_layout
from isomorph.models.convit_checkpoints import public_state_dict as public_state_dict
from isomorph.models.foreign_checkpoints import ForeignCheckpoints
from isomorph.models.vit_cfg import build_vit, vit_cfg

LOCAL_ATTENTION: dict[str, type[GPSA] | type[PSA]] = {"gpsa": GPSA, "psa": PSA}
"""Attention layers for the first blocks: two softmaxes and a gate (gpsa, eq. 7), or one softmax (psa, eq. 4)."""


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
        bias, drop = kwargs.get("qkv_bias", False), kwargs.get("proj_drop", 0.0)
        attention = LOCAL_ATTENTION[local_attention](dim, num_heads, qkv_bias=bias, proj_drop=drop)
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
        check_local_attention(local_attention, gate, tuple(LOCAL_ATTENTION))
        check_arguments(local_up_to_layer, locality_strength, gate, kwargs)
        local: dict[str, Any] = dict(locality_strength=locality_strength, gate=gate, local_init=local_init)
        local["local_attention"] = local_attention

        def block(depth: int, **arguments: Any) -> Block:
            return LocalBlock(**local, **arguments) if depth < local_up_to_layer else Block(**arguments)

        fixed: dict[str, Any] = dict(no_embed_class=True, block_fn=block)
        super().__init__(**{"qkv_bias": False, **kwargs, **fixed}, pos_embed="learn" if use_pos_embed else "none")
        self.local_up_to_layer = local_up_to_layer
        self.update_grid()

    def is_foreign(self, state: dict[str, Tensor]) -> bool:
        return has_public_layout(state)

    def convert_foreign(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return checkpoint_filter_fn(state, self)

    def no_weight_decay(self) -> set[str]:
        """Name the parameters without weight decay: timm's, and positions and gates, for which 0 is not neutral."""
        return super().no_weight_decay() | parameters_without_decay(self)

    def add_positions(self, x: Tensor) -> Tensor:
        """Add the absolute position embedding; the class token is added later. Shape: (B, H, W, C) -> (B, H W, C)"""
        return self.pos_drop(x.flatten(1, 2) + self.resize_positions(x.shape[1], x.shape[2]))

    def initial_state(self, grid_size: tuple[int, int]) -> tuple[int, int]:
        """Return the grid size, which is passed from block to block."""
        return grid_size

    def run_block(self, i: int, x: Tensor, grid_size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """Run block i; add the class token before the first plain one. Shape: x (B, N, C) -> (B, N or N + 1, C)"""
        if i == self.local_up_to_layer and self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        arguments = (x, grid_size) if i < self.local_up_to_layer else (x,)
        return self.call_block(i, *arguments), grid_size

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

    def update_grid(self) -> None:
        super().update_grid()
        for module in self.modules():
            if isinstance(module, TokenHeads | PSA):
                module.grid_size = self.patch_embed.grid_size


VARIANTS = {"convit_ti": (4, 48), "convit_s": (9, 48), "convit_b": (16, 48)}
VARIANTS |= {"convit_ti_plus": (4, 64), "convit_s_plus": (9, 64), "convit_b_plus": (16, 64)}
"""Number of heads and channels per head of every variant (ConViT Table 1)."""

TIMM_NAMES = {"convit_ti": "convit_tiny", "convit_s": "convit_small", "convit_b": "convit_base"}
"""timm's names of the variants with published weights, which the `_plus` variants do not have."""


def _convit_cfg(name: str) -> dict[str, Any]:
    """Return the pretrained_cfg of a variant."""
    weights = {"hf_hub_id": f"timm/{TIMM_NAMES[name]}.fb_in1k", "license": "apache-2.0"} if name in TIMM_NAMES else {}
    return vit_cfg(**weights)


default_cfgs = generate_default_cfgs({f"{n}.fb_in1k" if n in TIMM_NAMES else n: _convit_cfg(n) for n in VARIANTS})


def _create_convit(variant: str, pretrained: bool, **kwargs: Any) -> ConViT:
    """Build a variant with timm's `build_model_with_cfg`."""
    heads, head_width = VARIANTS[variant]
    arguments = {"num_heads": heads, "embed_dim": heads * head_width, **kwargs}
    return build_vit(ConViT, variant, pretrained, checkpoint_filter_fn, arguments)


@register_model
def convit_ti(pretrained: bool = False, **kwargs: Any) -> ConViT:
    """ConViT-Ti: 5.7M parameters, 73.1 top-1 (ConViT Table 1)."""
    return _create_convit("convit_ti", pretrained, **kwargs)


@register_model
def convit_s(pretrained: bool = False, **kwargs: Any) -> ConViT:
    """ConViT-S: 27.8M parameters, 81.3 top-1 (ConViT Table 1)."""
    return _create_convit("convit_s", pretrained, **kwargs)


@register_model
def convit_b(pretrained: bool = False, **kwargs: Any) -> ConViT:
    """ConViT-B: 86.5M parameters, 82.4 top-1 (ConViT Table 1)."""
    return _create_convit("convit_b", pretrained, **kwargs)


@register_model
def convit_ti_plus(pretrained: bool = False, **kwargs: Any) -> ConViT:
    """ConViT-Ti+: 10.0M parameters, 76.7 top-1 (ConViT Table 1)."""
    return _create_convit("convit_ti_plus", pretrained, **kwargs)


@register_model
def convit_s_plus(pretrained: bool = False, **kwargs: Any) -> ConViT:
    """ConViT-S+: 49.0M parameters, 82.2 top-1 (ConViT Table 1)."""
    return _create_convit("convit_s_plus", pretrained, **kwargs)


@register_model
def convit_b_plus(pretrained: bool = False, **kwargs: Any) -> ConViT:
    """ConViT-B+: 153.1M parameters, 82.5 top-1 (ConViT Table 1)."""
    return _create_convit("convit_b_plus", pretrained, **kwargs)
