"""BatchNorm statistics of the model as it is now, on the data it will see: before fusing, after averaging weights."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import UserError
from isomorph.layers import JointPyramid
from isomorph.layers.eval_mode import eval_mode
from isomorph.layers.moments import measure_moments
from isomorph.layers.pyramid import Pyramid
from isomorph.surgery.compiled import copy_model
from isomorph.surgery.recast import outermost_modules


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
    model = copy_model(model)
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        raise UserError("the model has no BatchNorm statistics to recalibrate")
    if keep_function and any(norm.weight is None for norm in norms):
        raise UserError(
            "a BatchNorm without weights cannot take up a change of its statistics; leave keep_function off"
        )
    if isinstance(batches, Tensor):
        raise UserError("recalibrate takes several batches: give [images], or a loader")
    images = (batch if isinstance(batch, Tensor) else batch[0] for batch in batches)
    with eval_mode(model):
        seen = (
            _recompute_keeping_function(model, images)
            if keep_function
            else _recompute_running_statistics(model, norms, images)
        )
    if not seen:
        raise UserError("recalibrate needs at least one batch")
    return model


def _recompute_running_statistics(model: nn.Module, norms: list[_BatchNorm], images: Iterable[Tensor]) -> int:
    """Statistics from nothing, every BatchNorm in train mode: each sees what those before it make in training."""
    momenta, seen = [norm.momentum for norm in norms], 0
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum, norm.training = None, True
    for batch in images:
        model(batch)
        seen += 1
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return seen


def _recompute_keeping_function(model: nn.Module, images: Iterable[Tensor]) -> int:
    """Statistics of what every BatchNorm receives in eval mode, in one pass: the function stays, so do its inputs."""
    found: dict[_BatchNorm, list[tuple[Tensor, Tensor]]] = {}

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        for norm, mean, variance in _norm_inputs(module, args[0]):
            found.setdefault(norm, []).append((mean.flatten(), variance.flatten()))

    layers = outermost_modules(model, lambda module: isinstance(module, Pyramid | JointPyramid | _BatchNorm))
    handles, seen = [module.register_forward_pre_hook(hook) for module in layers.values()], 0
    try:
        for batch in images:
            model(batch)
            seen += 1
    finally:
        for handle in handles:
            handle.remove()
    for norm, pairs in found.items():
        means, variances = (torch.stack(parts).mean(0) for parts in zip(*pairs, strict=True))
        _set_statistics(norm, means, variances)
    return seen


def _norm_inputs(module: nn.Module, x: Tensor) -> Iterator[tuple[_BatchNorm, Tensor, Tensor]]:
    """The BatchNorms of a layer with mean and unbiased variance of what each receives when the layer reads x."""
    if isinstance(module, _BatchNorm):
        channels = x.movedim(1, -1).flatten(0, -2) if x.ndim > 2 else x
        yield module, channels.mean(0), channels.var(0)
        return
    parts = module.pyramids if isinstance(module, JointPyramid) else [module]
    moments = measure_moments(x, getattr(module, "window", None))
    for pyramid in (part for part in parts if isinstance(part, Pyramid)):
        for norm, mean, variance in pyramid.norm_inputs(moments):
            yield norm, mean, variance * (moments.total / (moments.total - 1))


def _set_statistics(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Gives a BatchNorm new statistics, and the weights with which they scale and shift as the old ones did."""
    if norm.running_mean is None or norm.running_var is None:
        return
    slope = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    norm.bias.add_(slope * (mean - norm.running_mean))
    norm.weight.copy_(slope * (variance + norm.eps).sqrt())
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)
