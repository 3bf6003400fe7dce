"""ConViT: a ViT whose first blocks are gated positional self-attention, convolutional at birth, free to leave.

timm's VisionTransformer with three changes: the first `local_up_to_layer` blocks attend with `GPSA`, the class token
joins after the last of them, and the absolute position embedding, on patches only, may be left out. Every image size is
taken at every call. Checkpoints of the authors and of timm's convit_* load through `checkpoint_filter_fn`.
"""

from typing import Any

import torch
from timm.layers import resample_abs_pos_embed, trunc_normal_
from timm.models import checkpoint, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor

from isomorph.errors import UserError
from isomorph.layers import GPSA
from isomorph.layers.decay import undecayed
from isomorph.models.convit_arguments import as_sizes, refuse_arguments, refuse_size
from isomorph.models.convit_checkpoints import checkpoint_filter_fn
from isomorph.models.convit_checkpoints import public_state_dict as public_state_dict
from isomorph.models.vit_cfg import build_vit, vit_cfg


class LocalBlock(Block):
    """A ViT block whose attention is GPSA; it has to be told the grid.

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
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        bias, drop = kwargs.get("qkv_bias", False), kwargs.get("proj_drop", 0.0)
        attention = GPSA(dim, num_heads, qkv_bias=bias, proj_drop=drop)
        self.attn = attention.to(device=kwargs.get("device"), dtype=kwargs.get("dtype"))
        self.dials, self.local_init = (locality_strength, gate), local_init
        if not local_init:
            self.attn.v.reset_parameters()
        self.init_weights()

    def init_weights(self) -> None:
        """Places and gates as at birth; timm calls it once the linear layers are drawn."""
        locality, gate = self.dials
        if self.local_init:
            self.attn.reset_attention(locality, gate)
        else:
            trunc_normal_(self.attn.position, std=0.02)
            self.attn.set_dials(gate=gate)

    reset_parameters = init_weights

    def forward(self, x: Tensor, grid_size: tuple[int, int]) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), grid_size)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class ConViT(VisionTransformer):
    """Vision transformer that starts as a convolutional network and may stop being one, a full timm citizen.

    `local_up_to_layer` blocks with GPSA lead (0: a plain ViT). `locality_strength` and `gate` (lambda, before the
    sigmoid) are theirs at birth, `local_init=False` leaves centres and values random. Other arguments are
    VisionTransformer's.

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
        **kwargs: Any,
    ) -> None:
        refuse_arguments(local_up_to_layer, locality_strength, gate, kwargs)
        local: dict[str, Any] = dict(locality_strength=locality_strength, gate=gate, local_init=local_init)

        def block(depth: int, **arguments: Any) -> Block:
            return LocalBlock(**local, **arguments) if depth < local_up_to_layer else Block(**arguments)

        fixed: dict[str, Any] = dict(no_embed_class=True, dynamic_img_size=True, block_fn=block)
        super().__init__(**{"qkv_bias": False, **kwargs, **fixed}, pos_embed="learn" if use_pos_embed else "none")
        self.local_up_to_layer = local_up_to_layer
        update_reductions(self)

    def no_weight_decay(self) -> set[str]:
        """timm's, and places and gates: decay would pull them to 0, which is another function."""
        return super().no_weight_decay() | undecayed(self)

    def embed(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Patches with their absolute positions, and their grid.

        Shape: x (B, in_chans, height, width) -> (B, H W, C), (H, W)
        """
        if x.ndim != 4:
            raise UserError(f"images come as (B, in_chans, height, width), not with shape {tuple(x.shape)}")
        refuse_size(tuple(x.shape[-2:]), self.patch_embed.patch_size, self.patch_embed.dynamic_img_pad)
        x = self.patch_embed(x)  # (B, H, W, C)
        H, W = x.shape[1:3]
        x = x.flatten(1, 2)  # (B, H W, C)
        if self.pos_embed is not None:
            x = x + resample_abs_pos_embed(self.pos_embed, [H, W], self.patch_embed.grid_size, num_prefix_tokens=0)
        return self.norm_pre(self.pos_drop(x)), (H, W)

    def run_block(self, i: int, x: Tensor, grid_size: tuple[int, int]) -> Tensor:
        """Block i; before the first plain one the class token joins. Shape: x (B, N, C) -> (B, N or N + 1, C)"""
        block = self.blocks[i]
        if i == self.local_up_to_layer and self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        arguments = (x, grid_size) if i < self.local_up_to_layer else (x,)
        return checkpoint(block, *arguments) if self.grad_checkpointing else block(*arguments)

    def forward_features(self, x: Tensor) -> Tensor:
        """Shape: x (B, in_chans, height, width) -> (B, 1 + H W, C)"""
        x, grid_size = self.embed(x)
        for i in range(len(self.blocks)):
            x = self.run_block(i, x, grid_size)
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: None = None,
    ) -> Any:
        """The final tokens and those after chosen blocks, as timm's VisionTransformer gives them.

        `return_prefix_tokens` pairs each with its class token, which has length 0 where it has not joined yet.

        Raises: UserError for a mask, which GPSA has none of; ValueError for an unknown format.
        """
        if attn_mask is not None:
            raise UserError("a ConViT takes no attention mask: its positions look everywhere")
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt {output_fmt!r} is not available; use 'NCHW' or 'NLC'")
        take, last = feature_take_indices(len(self.blocks), indices)
        x, (H, W) = self.embed(x)
        taken: list[Tensor] = []
        prefixes: list[Tensor] = []
        for i in range(last + 1 if stop_early else len(self.blocks)):
            x = self.run_block(i, x, (H, W))
            if i in take:
                y = self.norm(x) if norm else x
                prefix, patches = y.split([y.shape[1] - H * W, H * W], dim=1)
                if output_fmt == "NCHW":
                    patches = patches.transpose(1, 2).unflatten(2, (H, W)).contiguous()  # (B, C, H, W)
                taken.append(patches)
                prefixes.append(prefix)
        if output_dict:
            found: dict[str, Any] = {"image_intermediates": taken}
            found |= {"image_intermediates_prefix": prefixes} if return_prefix_tokens else {}
            return found if intermediates_only else found | {"image_features": self.norm(x)}
        pairs = list(zip(taken, prefixes, strict=True)) if return_prefix_tokens else taken
        return pairs if intermediates_only else (self.norm(x), pairs)

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

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Resizes the position embedding (and the patch filters) for good; other sizes are resized at each call."""
        if isinstance(img_size, int):
            img_size = (img_size, img_size)
        if isinstance(patch_size, int):
            patch_size = (patch_size, patch_size)
        embed = self.patch_embed
        refuse_size(*as_sizes(img_size or embed.img_size, patch_size or embed.patch_size), padded=embed.dynamic_img_pad)
        super().set_input_size(img_size, patch_size)
        update_reductions(self)


def update_reductions(model: Any) -> None:
    """Blocks tell timm's feature extraction their patch size, and GPSA layers the grid they are made for."""
    for info in model.feature_info:
        info["reduction"] = model.patch_embed.feat_ratio()
    for module in model.modules():
        if isinstance(module, GPSA):
            module.grid_size = model.patch_embed.grid_size


VARIANTS = {"convit_ti": (4, 48), "convit_s": (9, 48), "convit_b": (16, 48)}
VARIANTS |= {"convit_ti_plus": (4, 64), "convit_s_plus": (9, 64), "convit_b_plus": (16, 64)}
"""Heads and width of a head (ConViT Table 1)."""

HUB = {"convit_ti": "convit_tiny", "convit_s": "convit_small", "convit_b": "convit_base"}
"""Where timm keeps the authors' weights; the larger heads have none."""


def convit_cfg(name: str) -> dict[str, Any]:
    """The pretrained entry of a variant."""
    weights = {"hf_hub_id": f"timm/{HUB[name]}.fb_in1k", "license": "apache-2.0"} if name in HUB else {}
    return vit_cfg(**weights)


default_cfgs = generate_default_cfgs({f"{n}.fb_in1k" if n in HUB else n: convit_cfg(n) for n in VARIANTS})


def create_convit(variant: str, pretrained: bool, **kwargs: Any) -> ConViT:
    """Builds a variant through timm."""
    heads, width = VARIANTS[variant]
    arguments = {"num_heads": heads, "embed_dim": heads * width, **kwargs}
    return build_vit(ConViT, variant, pretrained, checkpoint_filter_fn, arguments)


@register_model
def convit_ti(pretrained: bool = False, **kwargs: Any) -> ConViT:
    """ConViT-Ti: 5.7M parameters, 73.1 top-1 (ConViT Table 1)."""
    return create_convit("convit_ti", pretrained, **kwargs)


@register_model
def convit_s(pretrained: bool = False, **kwargs: Any) -> ConViT:
    """ConViT-S: 27.8M parameters, 81.3 top-1 (ConViT Table 1)."""
    return create_convit("convit_s", pretrained, **kwargs)


@register_model
def convit_b(pretrained: bool = False, **kwargs: Any) -> ConViT:
    """ConViT-B: 86.5M parameters, 82.4 top-1 (ConViT Table 1)."""
    return create_convit("convit_b", pretrained, **kwargs)


@register_model
def convit_ti_plus(pretrained: bool = False, **kwargs: Any) -> ConViT:
    """ConViT-Ti+: 10.0M parameters, 76.7 top-1 (ConViT Table 1)."""
    return create_convit("convit_ti_plus", pretrained, **kwargs)


@register_model
def convit_s_plus(pretrained: bool = False, **kwargs: Any) -> ConViT:
    """ConViT-S+: 49.0M parameters, 82.2 top-1 (ConViT Table 1)."""
    return create_convit("convit_s_plus", pretrained, **kwargs)


@register_model
def convit_b_plus(pretrained: bool = False, **kwargs: Any) -> ConViT:
    """ConViT-B+: 153.1M parameters, 82.5 top-1 (ConViT Table 1)."""
    return create_convit("convit_b_plus", pretrained, **kwargs)
