"""Statistics that several processes share, as after torch's `convert_sync_batchnorm`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sync_group(module: nn.Module) -> Any:
    """Return the processes that share the statistics of a module's BatchNorms, or None."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    norms = (m for m in module.modules() if isinstance(m, nn.SyncBatchNorm))
    return next((norm.process_group or dist.group.WORLD for norm in norms), None)


def all_reduce(group: Any, *tensors: Tensor) -> None:
    """Sum tensors over the processes of a group, in place; None stands for this process alone."""
    if group is not None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)


def check_first_derivatives(group: Any) -> None:
    """Raise RuntimeError if processes share statistics and the backward pass runs with create_graph=True."""
    if group is not None and torch.is_grad_enabled():
        raise RuntimeError(
            "statistics shared by several processes have no second derivatives; do not use create_graph=True"
        )
