"""BatchNorm statistics of the model as it is now, on the data it will see: before fusing, after averaging weights."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import UserError
from isomorph.layers.mode import eval_mode


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterable[Any], keep_function: bool = False) -> nn.Module:
    """A copy of the model whose BatchNorms have the statistics of these batches, averaged over them.

    For weights that are averages themselves, and for a model that was pre-trained on masked images: running statistics
    are then not its own. All else stays in eval mode. `keep_function` takes the change up in the weights of BatchNorm:
    eval mode computes what it computed, and train mode comes near to it, for pyramids born with the same function.

    `batches`: tensors, or (images, labels), as a loader gives them.

    Raises: UserError without a BatchNorm that keeps statistics, without a batch, or, to keep the function, where a
    BatchNorm has no weights.
    """
    model = copy.deepcopy(model)
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        raise UserError("the model has no BatchNorm statistics to recalibrate")
    if keep_function and any(norm.weight is None for norm in norms):
        raise UserError(
            "a BatchNorm without weights cannot take up the change of its statistics; leave keep_function off"
        )
    before = [(norm.running_mean.clone(), norm.running_var.clone(), norm.momentum) for norm in norms]  # type: ignore[union-attr]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    seen = 0
    with eval_mode(model):
        for norm in norms:
            norm.training = True
        for batch in batches:
            model(batch if isinstance(batch, Tensor) else batch[0])
            seen += 1
    if not seen:
        raise UserError("recalibrate needs at least one batch")
    for norm, (mean, variance, momentum) in zip(norms, before, strict=True):
        norm.momentum = momentum
        if keep_function:
            take_up(norm, mean, variance)
    return model


def take_up(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Gives a BatchNorm the weights with which its new statistics scale and shift as these old ones did."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    slope = norm.weight * torch.rsqrt(variance + norm.eps)
    norm.bias.add_(slope * (norm.running_mean - mean))
    norm.weight.copy_(slope * (norm.running_var + norm.eps).sqrt())
