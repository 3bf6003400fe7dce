"""A network of stages, each with a map of its own resolution: the walk through them, and the features on the way."""

from collections.abc import Callable
from typing import Any

import torch
from timm.models import checkpoint_seq
from timm.models._features import feature_take_indices
from torch import Tensor, nn


class StagedNet(nn.Module):
    """A network that says its `levels`, from the image on, and what `forward_head` makes of the last.

    Shape: x (B, in_chans, height, width) -> (B, num_classes)
    """

    grad_checkpointing = False

    def levels(self) -> list[Callable[[Tensor], Tensor]]:
        """Each from the map before (the first from the image) to a map that is a feature."""
        raise NotImplementedError

    def run_stage(self, stage: nn.Module, x: Tensor) -> Tensor:
        """The blocks of a stage, keeping only what enters each where gradient checkpointing is on."""
        if self.grad_checkpointing and not torch.jit.is_scripting():
            return checkpoint_seq(stage, x)
        return stage(x)

    def forward_features(self, x: Tensor) -> Tensor:
        """Shape: x (B, in_chans, height, width) -> (B, C, H, W), the last map"""
        for level in self.levels():
            x = level(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """The last map and those of chosen levels, as timm's models give them; there is no norm of maps to apply.

        Raises: ValueError for another format.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt {output_fmt!r} is not available; use 'NCHW'")
        levels = self.levels()
        take, last = feature_take_indices(len(levels), indices)
        taken = []
        for i, level in enumerate(levels[: last + 1] if stop_early else levels):
            x = level(x)
            taken += [x] if i in take else []
        return taken if intermediates_only else (x, taken)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable
