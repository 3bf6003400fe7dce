"""A base class for networks of stages, each with its own resolution, and the features after each."""

from collections.abc import Callable
from typing import Any

import torch
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from isomorph.models.recompute import recompute


class StagedNet(nn.Module):
    """A network that applies its `levels` to the image one after another, then `forward_head`.

    Shape: x (B, in_chans, height, width) -> (B, num_classes)
    """

    grad_checkpointing = False

    def levels(self) -> list[Callable[[Tensor], Tensor]]:
        """Return the functions from each feature map (first the image) to the next."""
        raise NotImplementedError

    def run_stage(self, stage: nn.Module, x: Tensor) -> Tensor:
        """Run the blocks of a stage, recomputing them in the backward pass if gradient checkpointing is on."""
        if self.grad_checkpointing and not torch.jit.is_scripting():
            for block in stage.children():
                x = recompute(block, x)
            return x
        return stage(x)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last feature map. Shape: x (B, in_chans, height, width) -> (B, C, H, W)"""
        for level in self.levels():
            x = level(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits, or the pooled features with `pre_logits`. Shape: x (B, C, H, W) -> (B, num_classes)"""
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
        """Return the last feature map and those of chosen levels, as timm's models do.

        `norm` has no effect, as there is no norm after the last level.

        Raises: ValueError for another format.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt {output_fmt!r} is not available; use 'NCHW'")
        levels = self.levels()
        take, last = feature_take_indices(len(levels), indices)
        intermediates = []
        for i, level in enumerate(levels[: last + 1] if stop_early else levels):
            x = level(x)
            intermediates += [x] if i in take else []
        return intermediates if intermediates_only else (x, intermediates)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass instead of storing their activations."""
        self.grad_checkpointing = enable
