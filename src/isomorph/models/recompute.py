"""Gradient checkpointing of blocks, without counting a batch twice in their BatchNorms."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def recompute(block: nn.Module, *arguments: Any) -> Any:
    """Return the output of a block, whose activations are computed again in the backward pass instead of stored.

    The second forward pass leaves the running statistics of BatchNorms as they are, except in a compiled model.
    """
    if torch.compiler.is_compiling():  # which takes no contexts of Python
        return checkpoint(block, *arguments, use_reentrant=False)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _keep_statistics(block)

    return checkpoint(block, *arguments, use_reentrant=False, context_fn=contexts)


@contextmanager
def _keep_statistics(module: nn.Module) -> Iterator[None]:
    """Keep BatchNorms in train mode from updating their running statistics within the block.

    They run the same operators, as checkpointing compares what both passes save.
    """
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.num_batches_tracked is not None]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, norm.num_batches_tracked.clone()  # type: ignore[union-attr]
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches
