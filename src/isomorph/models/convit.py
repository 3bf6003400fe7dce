"""ConViT: a ViT whose first blocks are gated positional self-attention, convolutional at birth, free to leave.

timm's VisionTransformer with three changes: the first `local_up_to_layer` blocks attend with `GPSA`, the class token
joins after the last of them, and the absolute position embedding, on patches only, may be left out. Every image size is
taken at every call. Checkpoints of the authors and of timm's convit_* load through `checkpoint_filter_fn`.
"""

from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import Block
from torch import Tensor

from isomorph.layers import GPSA, PSA
from isomorph.layers.weight_decay import parameters_without_decay
from isomorph.models.blockwise import BlockwiseViT
from isomorph.models.convit_arguments import check_arguments, check_local_attention
from isomorph.models.convit_checkpoints import checkpoint_filter_fn, has_public_layout
from isomorph.models.convit_checkpoints import public_state_dict as public_state_dict
from isomorph.models.foreign_checkpoints import ForeignCheckpoints
from isomorph.models.vit_cfg import build_vit, vit_cfg

LOCAL_ATTENTION: dict[str, type[GPSA] | type[PSA]] = {"gpsa": GPSA, "psa": PSA}
"""What the first blocks may attend with: two softmaxes and a gate (eq. 7), or one softmax (eq. 4)."""


class LocalBlock(Block):
    """A ViT block whose attention is GPSA or PSA; it has to be told the grid.

    Shape: x (B, H W, C) -> (B, H W, C)
    Source: ConViT Fig. 4 and eq. 5; `local_init` False is the random start of Table 3 (c, d, g)
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
        """Initialises positions, values and gates; timm calls it once the linear layers are drawn."""
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
    """Vision transformer that starts as a convolutional network and may stop being one, a full timm citizen.

    `local_up_to_layer` blocks with GPSA lead (0: a plain ViT), or with PSA (`local_attention="psa"`, one softmax and no
    gates). `locality_strength` and `gate` (lambda, before the sigmoid) are theirs at initialisation, `local_init=False`
    leaves centres and values random. Other arguments are VisionTransformer's.

    Shape: x (B, in_chans, height, width) -> (B, num_classes), multiples of the patch (`dynamic_img_pad=True`: any)
    Source: ConViT section 3; differs: rectangles, any size per call; GPSA exempt from weight decay
    Raises: UserError for a head count that is no square, or an argument that GPSA cannot honour.
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
        """timm's, and places and gates: decay would pull them to 0, which is another function."""
        return super().no_weight_decay() | parameters_without_decay(self)

    def place_patches(self, x: Tensor) -> Tensor:
        """Patches with their absolute positions. Shape: x (B, H, W, C) -> (B, H W, C)"""
        return self.pos_drop(x.flatten(1, 2) + self.resized_positions(x.shape[1], x.shape[2]))

    def start(self, grid_size: tuple[int, int]) -> tuple[int, int]:
        """Every block is told the grid."""
        return grid_size

    def run_block(self, i: int, x: Tensor, grid_size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """Block i; before the first plain one the class token joins. Shape: x (B, N, C) -> (B, N or N + 1, C)"""
        if i == self.local_up_to_layer and self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        arguments = (x, grid_size) if i < self.local_up_to_layer else (x,)
        return self.call_block(i, *arguments), grid_size

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops the blocks after the last one wanted, with a class token that would not join any more."""
        kept = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        if len(self.blocks) <= self.local_up_to_layer:
            self.cls_token, self.num_prefix_tokens, self.has_class_token = None, 0, False
            if self.global_pool == "token":
                self.reset_classifier(0, "")
        return kept

    def update_grid(self) -> None:
        super().update_grid()
        for module in self.modules():
            if isinstance(module, GPSA | PSA):
                module.grid_size = self.patch_embed.grid_size


VARIANTS = {"convit_ti": (4, 48), "convit_s": (9, 48), "convit_b": (16, 48)}
VARIANTS |= {"convit_ti_plus": (4, 64), "convit_s_plus": (9, 64), "convit_b_plus": (16, 64)}
"""Heads and width of a head (ConViT Table 1)."""

TIMM_NAMES = {"convit_ti": "convit_tiny", "convit_s": "convit_small", "convit_b": "convit_base"}
"""Where timm keeps the authors' weights; the larger heads have none."""


def _convit_cfg(name: str) -> dict[str, Any]:
    """The pretrained entry of a variant."""
    weights = {"hf_hub_id": f"timm/{TIMM_NAMES[name]}.fb_in1k", "license": "apache-2.0"} if name in TIMM_NAMES else {}
    return vit_cfg(**weights)


default_cfgs = generate_default_cfgs({f"{n}.fb_in1k" if n in TIMM_NAMES else n: _convit_cfg(n) for n in VARIANTS})


def _create_convit(variant: str, pretrained: bool, **kwargs: Any) -> ConViT:
    """Builds a variant through timm."""
    heads, width = VARIANTS[variant]
    arguments = {"num_heads": heads, "embed_dim": heads * width, **kwargs}
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
