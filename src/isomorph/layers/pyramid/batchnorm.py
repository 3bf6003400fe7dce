"""What BatchNorm does to an affine map in eval mode, and the running statistics that it keeps in train mode."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.layers.modes import is_eager
from isomorph.layers.pyramid.moments import Moments

NEEDS_EVAL = "fuse needs eval mode, because BatchNorm depends on the batch in train mode; call .eval() first"


@torch.no_grad()
def update_statistics(
    norms: Sequence[_BatchNorm], means: Sequence[Tensor], variances: Tensor, moments: Moments
) -> None:
    """Update running statistics as torch's BatchNorm does. Shape: (G, chains, h) of each level, (G, rows)"""
    if is_eager() and torch._C._current_graph_task_id() != -1:  # a checkpoint's second forward pass
        return
    total, groups = moments.total, len(variances)
    unbiased = variances * (total / ((total - 1).clamp(min=1) if isinstance(total, Tensor) else max(total - 1, 1)))
    rows = [norm.num_features // groups for norm in norms]
    each_mean = (mean.reshape(-1) for level in means for mean in level.unbind(1))
    each_variance = (part.reshape(-1) for part in unbiased.split([*rows, unbiased.shape[1] - sum(rows)], 1))
    counts: list[Tensor] = []
    changes: dict[float, list[tuple[Tensor, Tensor]]] = {}
    for norm, *values in zip(norms, each_mean, each_variance, strict=False):
        if norm.running_mean is not None and norm.track_running_stats:
            counts += [] if norm.num_batches_tracked is None else [norm.num_batches_tracked]
            pairs = zip((norm.running_mean, norm.running_var), values, strict=True)
            changes.setdefault(norm.momentum, []).extend((old, new.to(old.dtype)) for old, new in pairs)  # type: ignore
    if counts:
        torch._foreach_add_(counts, 1)
    for momentum, changed in changes.items():
        if isinstance(total, Tensor) or total:  # torch's BatchNorm counts an empty batch, no more
            torch._foreach_lerp_([old for old, _ in changed], [new for _, new in changed], momentum)


def fold(layers: Sequence[nn.Module]) -> tuple[Tensor, Tensor]:
    """Return linear layers and BatchNorms with running statistics as one map. Shape: -> (G, out, C), (G, out)"""
    weight: Any = None
    bias: Any = None
    for layer in layers:
        if isinstance(layer, _BatchNorm):
            weight, bias = normalise(layer, weight, bias)
            continue
        matrix, own = weight_matrix(layer), cast(Tensor | None, layer.bias)  # type: ignore[arg-type]
        own = matrix.new_zeros(matrix.shape[:-1]) if own is None else own.view(matrix.shape[:-1]).to(matrix.dtype)
        bias = own if weight is None else own + (matrix @ bias.unsqueeze(-1)).squeeze(-1)
        weight = matrix if weight is None else matrix @ weight
    return weight, bias


def normalise(norm: _BatchNorm, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Apply a BatchNorm with its running statistics to the outputs of an affine map. Shape: (G, out, C), (G, out)"""
    given: tuple[Any, ...] = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    shaped: list[Any] = [None if t is None else t.view(bias.shape).to(weight.dtype) for t in given]
    mean, variance, gamma, beta = shaped
    scale = torch.rsqrt(variance + norm.eps)
    scale = scale if gamma is None else scale * gamma
    bias = (bias - mean) * scale
    return weight * scale.unsqueeze(-1), bias if beta is None else bias + beta


def weight_matrix(layer: nn.Linear | nn.Conv2d) -> Tensor:
    """Return a weight as one matrix per group, in float32 at least. Shape: -> (G, out, C)"""
    weight = layer.weight.flatten(1).unflatten(0, (getattr(layer, "groups", 1), -1))
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def uses_batch_statistics(norm: nn.Module) -> bool:
    """True if a module is a BatchNorm that normalises by the batch: in train mode, or without running statistics."""
    return isinstance(norm, _BatchNorm) and (norm.training or norm.running_mean is None)
