"""Base classes for ViTs whose blocks take more than the tokens: they run one by one and pass attention maps along.

`DenseHeadViT` also classifies every patch, for token labelling and MixToken (Jiang et al., 2021, LV-ViT).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers import resample_abs_pos_embed
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.models.staged import recompute
from isomorph.models.variants import check_heads, check_whole_patches, parse_size, require_images

# Both read sizes, so torch.fx must call them rather than trace into them; timm wraps them in its own modules only.
torch.fx.wrap("require_images")
torch.fx.wrap("resample_abs_pos_embed")


class BlockwiseViT(VisionTransformer):
    """timm's VisionTransformer for images of any size, whose blocks pass attention maps to the next with the tokens.

    The state is the attention maps of earlier blocks, None at first. Each block is called with the tokens and the maps
    and returns both; subclasses override `run_block` for blocks that are called otherwise.

    Shape: x (B, in_chans, height, width) -> (B, num_classes), multiples of the patch (`dynamic_img_pad=True`: any)
    Raises: UserError for another image size, an attention mask, a number of heads that does not divide embed_dim, or
    patch_drop_rate.
    """

    def __init__(self, **kwargs: Any) -> None:
        check_heads(kwargs.get("num_heads", 12), kwargs.get("embed_dim", 768))
        if kwargs.get("patch_drop_rate"):
            raise UserError(
                "patch_drop_rate is not supported: the blocks need the whole grid of patches; leave it at 0"
            )
        super().__init__(**{**kwargs, "dynamic_img_size": True})

    def add_positions(self, x: Tensor) -> Tensor:
        """Add the position embedding and put the prefix tokens in front. Shape: x (B, H, W, C) -> (B, N, C)"""
        positions = self.resize_positions(x.shape[1], x.shape[2])
        tokens = (self.cls_token, self.reg_token)
        prefix = [token.expand(x.shape[0], -1, -1) for token in tokens if token is not None]
        x = x.flatten(1, 2)  # (B, H W, C)
        if self.no_embed_class:
            x = torch.cat([*prefix, x + positions], dim=1)
        else:
            x = torch.cat([*prefix, x], dim=1) + positions
        return self.pos_drop(x)

    def resize_positions(self, H: int, W: int) -> Any:
        """Return the position embedding for an H x W grid of patches, 0 if there is none. Shape: -> (1, N, C)"""
        if self.pos_embed is None:
            return 0
        prefix = 0 if self.no_embed_class else self.num_prefix_tokens
        old = self.patch_embed.grid_size
        return resample_abs_pos_embed(self.pos_embed, [H, W], old, num_prefix_tokens=prefix)

    def embed(self, x: Tensor, rearrange: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, tuple[int, int]]:
        """Return the tokens that the first block reads, and the size of the grid of patches.

        `rearrange` is applied to the patches before positions are added.

        Shape: x (B, in_chans, height, width) -> (B, N, C), (H, W)
        """
        x = require_images(x, self.patch_embed.patch_size, self.patch_embed.dynamic_img_pad)
        x = self.patch_embed(x)  # (B, H, W, C)
        x = rearrange(x) if rearrange else x
        return self.norm_pre(self.add_positions(x)), (x.shape[1], x.shape[2])

    def run_block(self, i: int, x: Tensor, maps: Any, grid_size: tuple[int, int]) -> tuple[Tensor, Any]:
        """Run block i; return the tokens and the maps for the next block. Shape: x (B, N, C) -> (B, N, C)"""
        return self.call_block(i, x, maps)

    def call_block(self, i: int, *arguments: Any) -> Any:
        """Call block i, recomputing it in the backward pass if gradient checkpointing is on."""
        block = self.blocks[i]
        return recompute(block, *arguments) if self.grad_checkpointing else block(*arguments)

    def forward_features(
        self, x: Tensor, rearrange: Callable[[Tensor], Tensor] | None = None, maps: list[Any] | None = None
    ) -> Tensor:
        """Return the tokens after the last block and norm.

        The attention maps that each block passes to the next are appended to the list `maps`.

        Shape: x (B, in_chans, height, width) -> (B, N, C)
        """
        x, grid_size = self.embed(x, rearrange)
        passed = None
        for i in range(len(self.blocks)):
            x, passed = self.run_block(i, x, passed, grid_size)
            if maps is not None:
                maps.append(passed)
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
        """Return the final tokens and the tokens after chosen blocks, as timm's VisionTransformer does.

        With `return_prefix_tokens` each is paired with the prefix tokens after the same block.

        Raises: UserError for an attention mask; ValueError for an unknown format.
        """
        if attn_mask is not None:
            raise UserError(f"attn_mask is not supported by {type(self).__name__}; leave it at None")
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt {output_fmt!r} is not available; use 'NCHW' or 'NLC'")
        take, last = feature_take_indices(len(self.blocks), indices)
        x, (H, W) = self.embed(x)
        maps = None
        intermediates: list[Tensor] = []
        prefixes: list[Tensor] = []
        for i in range(last + 1 if stop_early else len(self.blocks)):
            x, maps = self.run_block(i, x, maps, (H, W))
            if i in take:
                y = self.norm(x) if norm else x
                prefix, patches = y.split([y.shape[1] - H * W, H * W], dim=1)
                if output_fmt == "NCHW":
                    patches = patches.transpose(1, 2).unflatten(2, (H, W)).contiguous()  # (B, C, H, W)
                intermediates.append(patches)
                prefixes.append(prefix)
        if output_dict:
            outputs: dict[str, Any] = {"image_intermediates": intermediates}
            outputs |= {"image_intermediates_prefix": prefixes} if return_prefix_tokens else {}
            return outputs if intermediates_only else outputs | {"image_features": self.norm(x)}
        chosen = list(zip(intermediates, prefixes, strict=True)) if return_prefix_tokens else intermediates
        return chosen if intermediates_only else (self.norm(x), chosen)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Resize the position embedding (and the patch filters) permanently, which saves resizing at each call."""
        embed = self.patch_embed
        size = parse_size(img_size=embed.img_size if img_size is None else img_size)
        patch = parse_size(patch_size=embed.patch_size if patch_size is None else patch_size)
        check_whole_patches(size, patch, padded=embed.dynamic_img_pad)
        super().set_input_size(img_size and size, patch_size and patch)
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

    def mask(self, grid_size: tuple[int, int], device: torch.device | None = None) -> Tensor:
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
        """Return a new classifier for the patches; None without `dense_head` or classes."""
        if not self.dense_head or not num_classes:
            return None
        head = nn.Linear(self.embed_dim, num_classes).to(self.patch_embed.proj.weight)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        return head

    def forward(self, x: Tensor, tokens: bool = False, box: Box | None = None, return_maps: bool = False) -> Any:
        """Return the logits; with `tokens` those of the pooled tokens and those of every patch.

        With `box` the patches inside it are swapped between images (MixToken). With `return_maps` a list of the
        attention maps that each block passed to the next comes second: (B, nh, N, N) each if the model `shares_maps`.
        """
        # `is True` and isinstance, as torch.fx passes proxies for all arguments when it traces
        maps: list[Any] | None = [] if return_maps is True else None
        features = self.forward_features(x, partial(swap_patches, box) if isinstance(box, Box) else None, maps)
        if tokens is True and self.aux_head is None:
            raise UserError("the model has no head for patches; create it with dense_head=True")
        if self.aux_head is not None and tokens is True:
            logits: Any = super().forward_head(features), self.aux_head(features[:, self.num_prefix_tokens :])
        else:
            logits = self.forward_head(features)
        return logits if maps is None else (logits, maps)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Shape: x (B, N, C) -> (B, num_classes), or (B, C) before the head"""
        logits = super().forward_head(x, pre_logits)
        if pre_logits or self.aux_head is None:
            return logits
        return logits + 0.5 * self.aux_head(x[:, self.num_prefix_tokens :]).amax(1)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        super().reset_classifier(num_classes, global_pool)
        self.aux_head = self.build_aux_head(num_classes)
