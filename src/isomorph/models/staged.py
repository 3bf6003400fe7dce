"""A base class for networks of stages; gradient checkpointing of blocks, and parameters without weight decay."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def recompute(block: nn.Module, *arguments: Any) -> Any:
    """Return a block's output, and compute its activations again in the backward pass instead of storing them.

    That pass leaves the running statistics of BatchNorms as they are, except in a compiled model.
    """
    if torch.compiler.is_compiling():  # which takes no contexts of Python
        return checkpoint(block, *arguments, use_reentrant=False)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _keep_statistics(block)

    return checkpoint(block, *arguments, use_reentrant=False, context_fn=contexts)


@contextmanager
def _keep_statistics(module: nn.Module) -> Iterator[None]:
    """Keep BatchNorms from updating their statistics; they run the same operators, which checkpointing compares."""
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.num_batches_tracked is not None]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, norm.num_batches_tracked.clone()  # type: ignore[union-attr]
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches


def parameters_without_decay(model: nn.Module) -> set[str]:
    """Return the full names of the parameters that layers of the model exempt by a `no_weight_decay()` method."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if module is not model and callable(getattr(module, "no_weight_decay", None))
        for name in module.no_weight_decay()
    }


class StagedNet(nn.Module):
    """A network that applies its `levels` to the image one after another, then pools and classifies.

    The levels are `embed` and the `stages`; `head_name` is the attribute with the classifier.

    Shape: x (B, in_chans, height, width) -> (B, num_classes)
    """

    grad_checkpointing = False
    head_name = "head"
    stages: Any
    global_pool: Any
    drop_rate: float

    def embed(self, x: Tensor) -> Tensor:
        """Return the first feature map of images. Shape: x (B, in_chans, height, width) -> (B, C, H, W)"""
        raise NotImplementedError

    def levels(self) -> list[Callable[[Tensor], Tensor]]:
        """Return the functions from each feature map (first the image) to the next."""
        return [self.embed, *(partial(self.run_stage, stage) for stage in self.stages)]

    def run_stage(self, stage: nn.Module, x: Tensor) -> Tensor:
        """Run the blocks of a stage, recomputing them in the backward pass if gradient checkpointing is on."""
        if self.grad_checkpointing:
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
        x = F.dropout(self.global_pool(x), self.drop_rate, self.training)
        return x if pre_logits else getattr(self, self.head_name)(x)

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
        """Return the last feature map and those of chosen levels, as timm's models do; `norm` has no effect.

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

    def keep_stages(self, count: int) -> None:
        self.stages = self.stages[:count]

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after the last index and, with `prune_head`, the classifier; return the indices."""
        take, last = feature_take_indices(len(self.levels()), indices)
        self.keep_stages(last)
        if prune_head:
            self.reset_classifier(0, "")  # type: ignore[operator]
        return take

    def get_classifier(self) -> nn.Module:
        return getattr(self, self.head_name)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay besides biases and norms: those of attention."""
        return parameters_without_decay(self)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass instead of storing their activations."""
        self.grad_checkpointing = enable
