"""Base classes for ViTs whose blocks take more than the tokens: they run one by one and pass attention maps along.

`DenseHeadViT` also classifies every patch, for token labelling and MixToken (Jiang et al., 2021, LV-ViT).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers import resample_abs_pos_embed, to_2tuple
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.grid import GridSize
from isomorph.models.base import (
    ForeignCheckpoints,
    check_whole_patches,
    parameters_without_decay,
    recompute,
    require_images,
)
from isomorph.spec import ImageSize

# Both read sizes, so torch.fx must call them rather than trace into them.
torch.fx.wrap("require_images")
torch.fx.wrap("resample_abs_pos_embed")


class AnySizeViT(ForeignCheckpoints, VisionTransformer):
    """timm's VisionTransformer for images of any size, empty batches and foreign checkpoints; torch.fx traces it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"dynamic_img_size": True, **kwargs})

    def no_weight_decay(self) -> set[str]:
        """Name the parameters without weight decay: timm's, and those of layers, such as positions and gates."""
        return super().no_weight_decay() | parameters_without_decay(self)

    def prefix_tokens(self) -> list[Tensor]:
        """Return the tokens in front of the patches. Shape: -> (1, n, C) each"""
        tokens = (self.cls_token, getattr(self, "dist_token", None), self.reg_token)
        return [token for token in tokens if token is not None]

    def _pos_embed(self, x: Tensor) -> Tensor:
        prefix = [token.expand(x.shape[0], -1, -1) for token in self.prefix_tokens()]
        positions = self.pos_embed
        if self.dynamic_img_size:
            if positions is not None:
                positions = resample_abs_pos_embed(
                    positions,
                    [x.shape[1], x.shape[2]],
                    self.patch_embed.grid_size,
                    num_prefix_tokens=0 if self.no_embed_class else self.num_prefix_tokens,
                )
            x = x.flatten(1, 2)
        if positions is not None and self.no_embed_class:
            x = positions + x  # laid out as the positions are
        # else channels stay outermost in every block
        x = torch.cat([*prefix, x], dim=1) if prefix else x.contiguous()
        if positions is None:
            return x
        return self.pos_drop(x if self.no_embed_class else x + positions)


class BlockwiseViT(AnySizeViT):
    """timm's VisionTransformer for images of any size, whose blocks pass attention maps to the next with the tokens.

    The state is the attention maps of earlier blocks, None at first. Each block is called with the tokens and the maps
    and returns both; subclasses override `run_block` for blocks that are called otherwise.

    Shape: x (B, in_chans, height, width) -> (B, num_classes), multiples of the patch (`dynamic_img_pad=True`: any)
    Raises: UserError for another image size, an attention mask, or an argument in `unsupported`.
    """

    # Arguments of VisionTransformer that the blocks do not have.
    unsupported: tuple[str, ...] = ("patch_drop_rate", "attn_layer")

    def __init__(self, **kwargs: Any) -> None:
        for name in self.unsupported:
            if kwargs.get(name):
                raise UserError(f"{name} is not supported by {type(self).__name__}; leave it out")
        super().__init__(**{**kwargs, "dynamic_img_size": True})

    def embed(
        self,
        x: Tensor,
        rearrange: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, GridSize]:
        """Return the first block's tokens and the grid size; `rearrange` is applied before positions are added.

        Shape: x (B, in_chans, height, width) -> (B, N, C), (H, W)
        """
        x = require_images(x, self.patch_embed.patch_size, self.patch_embed.dynamic_img_pad)
        x = self.patch_embed(x)  # (B, H, W, C)
        if rearrange is not None:
            x = rearrange(x)
        return self.norm_pre(self._pos_embed(x)), (x.shape[1], x.shape[2])

    def run_block(
        self,
        i: int,
        x: Tensor,
        maps: Any,
        grid_size: GridSize,
    ) -> tuple[Tensor, Any]:
        """Run block i; return the tokens and the maps for the next block. Shape: x (B, N, C) -> (B, N, C)"""
        return self.call_block(i, x, maps)

    def call_block(self, i: int, *arguments: Any) -> Any:
        """Call block i, and compute it again in the backward pass if gradient checkpointing is on."""
        block = self.blocks[i]
        if self.grad_checkpointing:
            return recompute(block, *arguments)
        return block(*arguments)

    def forward_features(
        self,
        x: Tensor,
        rearrange: Callable[[Tensor], Tensor] | None = None,
        maps: list[Any] | None = None,
    ) -> Tensor:
        """Return the tokens after the last norm; the maps that blocks pass on are appended to the list `maps`.

        Shape: x (B, in_chans, height, width) -> (B, N, C)
        """
        x, grid_size = self.embed(x, rearrange)
        block_maps = None
        for i in range(len(self.blocks)):
            x, block_maps = self.run_block(i, x, block_maps, grid_size)
            if maps is not None:
                maps.append(block_maps)
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
        attn_mask: None = None,
    ) -> Any:
        """Return the final tokens and those after chosen blocks. Raises: UserError for a mask or another format."""
        if attn_mask is not None:
            raise UserError(
                f"attn_mask is not supported by {type(self).__name__}; leave it at None",
            )
        if output_fmt not in ("NCHW", "NLC"):
            raise UserError(f"output_fmt {output_fmt!r} is not available; use 'NCHW' or 'NLC'")
        take, last = feature_take_indices(len(self.blocks), indices)
        x, (H, W) = self.embed(x)
        maps = None
        outputs: list[Any] = []
        count = last + 1 if stop_early else len(self.blocks)
        for i in range(count):
            x, maps = self.run_block(i, x, maps, (H, W))
            if i in take:
                y = self.norm(x) if norm else x
                prefix_tokens = y.shape[1] - H * W
                prefix, patches = y.split([prefix_tokens, H * W], dim=1)
                if output_fmt == "NCHW":
                    patches = (
                        patches.transpose(1, 2).unflatten(2, (H, W)).contiguous()
                    )  # (B, C, H, W)
                outputs.append((patches, prefix) if return_prefix_tokens else patches)
        return outputs if intermediates_only else (self.norm(x), outputs)

    def set_input_size(
        self,
        img_size: int | ImageSize | None = None,
        patch_size: int | ImageSize | None = None,
    ) -> None:
        """Resize the position embedding (and the patch filters) permanently, which saves resizing at each call."""
        embed = self.patch_embed
        size = to_2tuple(img_size or embed.img_size)
        patch = to_2tuple(patch_size or embed.patch_size)
        check_whole_patches(size, patch, padded=embed.dynamic_img_pad)
        super().set_input_size(size, patch)
        self.update_grid()

    def update_grid(self) -> None:
        """Tell timm's feature extraction the patch size, and layers that need it the grid of patches."""
        for info in self.feature_info:
            info["reduction"] = self.patch_embed.feat_ratio()
        for module in self.blocks.modules():
            if hasattr(module, "grid_size"):
                module.grid_size = self.patch_embed.grid_size


class Box(NamedTuple):
    """A rectangle of the grid of patches: rows top to bottom and columns left to right, the ends excluded."""

    top: int
    bottom: int
    left: int
    right: int

    def mask(self, grid_size: GridSize, device: torch.device | None = None) -> Tensor:
        """Return a mask that is True for the patches inside. Shape: -> (H, W)"""
        inside = torch.zeros(grid_size, dtype=torch.bool, device=device)
        inside[self.top : self.bottom, self.left : self.right] = True
        return inside


def swap_patches(box: Box, patches: Tensor) -> Tensor:
    """Replace the patches inside the box with those of the partner image (the batch reversed). Shape: (B, H, W, C)"""
    inside = box.mask((patches.shape[1], patches.shape[2]), patches.device)
    return torch.where(inside[..., None], patches.flip(0), patches)


class DenseHeadViT(BlockwiseViT):
    """A ViT that with `dense_head` also classifies every patch: logits = class token's + .5 max over patches.

    `shares_maps` is True if every block passes attention maps to the next, its own or those that it received.

    Shape: x (B, in_chans, height, width) -> (B, num_classes); with `tokens` (B, num_classes), (B, H W, num_classes)
    Source: Refiner code, after LV-ViT
    Raises: UserError for `tokens=True` when the model was created without `dense_head`.
    """

    shares_maps = False

    def __init__(self, dense_head: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense_head = dense_head
        self.aux_head = self.build_aux_head(self.num_classes)

    def build_aux_head(self, num_classes: int) -> nn.Linear | None:
        """Return a new classifier of patches, or None without `dense_head`."""
        if not self.dense_head or not num_classes:
            return None
        head = nn.Linear(self.embed_dim, num_classes).to(self.patch_embed.proj.weight)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        return head

    def forward(
        self,
        x: Tensor,
        tokens: bool = False,
        box: Box | None = None,
        return_maps: bool = False,
    ) -> Any:
        """Return the logits; with `tokens` those of the pooled tokens and those of every patch.

        With `box` the patches inside it are swapped between images (MixToken); `return_maps` adds the list of maps.
        """
        # `is True` and isinstance, as torch.fx passes proxies for all arguments when it traces
        maps: list[Any] | None = [] if return_maps is True else None
        swap = partial(swap_patches, box) if isinstance(box, Box) else None
        features = self.forward_features(x, swap, maps)
        if tokens is not True:
            logits: Any = self.forward_head(features)
        elif self.aux_head is None:
            raise UserError("the model has no head for patches; create it with dense_head=True")
        else:
            patches = features[:, self.num_prefix_tokens :]
            logits = (super().forward_head(features), self.aux_head(patches))
        return logits if maps is None else (logits, maps)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Shape: x (B, N, C) -> (B, num_classes), or (B, C) before the head"""
        logits = super().forward_head(x, pre_logits)
        if pre_logits or self.aux_head is None:
            return logits
        patches = x[:, self.num_prefix_tokens :]
        return logits + 0.5 * self.aux_head(patches).amax(1)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier, and that of the patches if there is one."""
        super().reset_classifier(num_classes, global_pool)
        self.aux_head = self.build_aux_head(num_classes)
