"""A second head that classifies every token, for token labelling and MixToken (Jiang et al. 2021, LV-ViT)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isomorph.models.blockwise import BlockwiseViT


class Box(NamedTuple):
    """A rectangle of the grid of patches: rows top to bottom, columns left to right, ends excluded."""

    top: int
    bottom: int
    left: int
    right: int

    def mask(self, grid_size: tuple[int, int], device: torch.device | None = None) -> Tensor:
        """Which patches lie inside. Shape: -> (H, W)"""
        inside = torch.zeros(grid_size, dtype=torch.bool, device=device)
        inside[self.top : self.bottom, self.left : self.right] = True
        return inside


class DenseHeadViT(BlockwiseViT):
    """A ViT that, with `dense_head`, classifies every patch too: logits = class token's + .5 max over patches'.

    Source: Refiner code, after LV-ViT
    """

    def __init__(self, dense_head: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.aux_head = nn.Linear(self.embed_dim, self.num_classes) if dense_head and self.num_classes else None
        self.dense_head = dense_head
        if self.aux_head is not None:
            nn.init.trunc_normal_(self.aux_head.weight, std=0.02)
            nn.init.zeros_(self.aux_head.bias)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Shape: x (B, N, C) -> (B, num_classes), or (B, C) before the head"""
        logits = super().forward_head(x, pre_logits)
        if pre_logits or self.aux_head is None:
            return logits
        return logits + 0.5 * self.aux_head(x[:, self.num_prefix_tokens :]).amax(1)

    def forward_tokens(self, x: Tensor, box: Box | None = None) -> tuple[Tensor, Tensor]:
        """Logits of the class token and of every patch; inside the box each image has the patches of another.

        The patches of the batch in reverse order: MixToken.

        Shape: x (B, in_chans, height, width) -> (B, num_classes), (B, H W, num_classes)
        """
        self.box = box
        try:
            features = self.forward_features(x)
        finally:
            self.box = None
        assert self.aux_head is not None
        return super().forward_head(features), self.aux_head(features[:, self.num_prefix_tokens :])

    box: Box | None = None

    def place_patches(self, x: Tensor) -> Tensor:
        """Shape: x (B, H, W, C) -> (B, N, C)"""
        if self.box is not None:
            inside = self.box.mask((x.shape[1], x.shape[2]), x.device)
            x = torch.where(inside[..., None], x.flip(0), x)
        return super().place_patches(x)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        super().reset_classifier(num_classes, global_pool)
        self.aux_head = None
        if self.dense_head and num_classes:
            self.aux_head = nn.Linear(self.embed_dim, num_classes).to(self.cls_token)
