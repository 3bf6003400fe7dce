"""A second head that classifies every patch, for token labelling and MixToken (Jiang et al. 2021, LV-ViT)."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.models.blockwise import BlockwiseViT


def classifier_names(dense_head: bool) -> str | tuple[str, str]:
    """The classifiers that a `pretrained_cfg` names: those that there are."""
    return ("head", "aux_head") if dense_head else "head"


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


def swap_patches(box: Box, patches: Tensor) -> Tensor:
    """Inside the box, every image has the patches of its partner, the batch in reverse. Shape: (B, H, W, C)"""
    inside = box.mask((patches.shape[1], patches.shape[2]), patches.device)
    return torch.where(inside[..., None], patches.flip(0), patches)


class DenseHeadViT(BlockwiseViT):
    """A ViT that, with `dense_head`, classifies every patch too: logits = class token's + .5 max over patches'.

    `hands_maps_on` says whether every block hands attention maps to the next, its own or those that it was given.

    Shape: x (B, in_chans, height, width) -> (B, num_classes); with `tokens` (B, num_classes), (B, H W, num_classes)
    Source: Refiner code, after LV-ViT
    Raises: UserError for patches' logits of a model without their head.
    """

    hands_maps_on = False

    def __init__(self, dense_head: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense_head = dense_head
        self.aux_head = self.build_aux_head(self.num_classes)

    def build_aux_head(self, num_classes: int) -> nn.Linear | None:
        if not self.dense_head or not num_classes:
            return None
        head = nn.Linear(self.embed_dim, num_classes).to(self.patch_embed.proj.weight)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        return head

    def forward(self, x: Tensor, tokens: bool = False, box: Box | None = None, hand_out: bool = False) -> Any:
        """Logits; with `tokens` those of the pooled tokens and of every patch, the box's mixed (MixToken).

        With `hand_out` also what every block handed to the next: in a network that `hands_maps_on`, (B, H, N, N) each.
        """
        # torch.fx calls it with stand-ins for all arguments, which are neither True nor a Box
        handed_on: list[Any] | None = [] if hand_out is True else None
        features = self.forward_features(x, partial(swap_patches, box) if isinstance(box, Box) else None, handed_on)
        found = self.token_logits(features) if tokens is True else self.forward_head(features)
        return found if handed_on is None else (found, handed_on)

    def token_logits(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the pooled tokens and of every patch.

        Shape: (B, N, C) -> (B, num_classes), (B, H W, num_classes)
        """
        if self.aux_head is None:
            raise UserError("the model has no head for its patches; create it with dense_head=True")
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
