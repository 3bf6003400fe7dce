"""ViT with a second head that classifies every patch, for token labelling and MixToken (Jiang et al. 2021, LV-ViT)."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.models.blockwise import BlockwiseViT


def classifier_names(dense_head: bool) -> str | tuple[str, str]:
    """Return the names of the classifiers for `pretrained_cfg`."""
    return ("head", "aux_head") if dense_head else "head"


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
        logits = self.token_logits(features) if tokens is True else self.forward_head(features)
        return logits if maps is None else (logits, maps)

    def token_logits(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the pooled tokens and of every patch.

        Shape: (B, N, C) -> (B, num_classes), (B, H W, num_classes)
        """
        if self.aux_head is None:
            raise UserError("the model has no head for patches; create it with dense_head=True")
        return super().forward_head(features), self.aux_head(features[:, self.num_prefix_tokens :])

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Shape: x (B, N, C) -> (B, num_classes), or (B, C) before the head"""
        logits = super().forward_head(x, pre_logits)
        if pre_logits or self.aux_head is None:
            return logits
        return logits + 0.5 * self.aux_head(x[:, self.num_prefix_tokens :]).amax(1)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        super().reset_classifier(num_classes, global_pool)
        self.aux_head = self.build_aux_head(num_classes)
