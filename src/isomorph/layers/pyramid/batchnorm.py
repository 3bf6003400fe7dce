"""What BatchNorm does to an affine map in eval mode, and the running statistics that it keeps in train mode."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.layers.modes import is_eager, upcast
from isomorph.layers.pyramid.moments import check_count

NEEDS_EVAL = (
    "fuse needs eval mode, because BatchNorm depends on the batch in train mode; call .eval() first"
)


@torch.no_grad()
def update_statistics(
    norms: Sequence[_BatchNorm], means: Sequence[Tensor], variances: Tensor, total: int | Tensor
) -> None:
    """Update running statistics as torch's BatchNorm does after `total` tokens.

    Shape: means (G, chains, h) of each level, variances (G, rows)
    """
    if is_eager() and torch._C._current_graph_task_id() != -1:  # a checkpoint's second forward pass
        return
    if isinstance(total, Tensor):  # of all processes
        unbiased = variances * (total / (total - 1).clamp(min=1))
    else:
        unbiased = variances * (total / max(total - 1, 1))
    by_norm: list[Tensor] = []
    for level in means:
        by_norm += level.unbind(1)  # (G, h)
    counts: list[Tensor] = []
    changes: dict[Any, list[tuple[Any, Tensor]]] = {}
    rows = [norm.num_features // len(variances) for norm in norms]
    rows.append(variances.shape[1] - sum(rows))  # of sums that are not rectified
    for norm, mean, variance in zip(norms, by_norm, unbiased.split(rows, 1), strict=False):
        if norm.running_mean is None or not norm.track_running_stats:
            continue
        if norm.num_batches_tracked is not None:
            counts.append(norm.num_batches_tracked)
        changed = changes.setdefault(norm.momentum, [])
        changed.append((norm.running_mean, mean.reshape(-1)))
        changed.append((norm.running_var, variance.reshape(-1)))
    if counts:
        torch._foreach_add_(counts, 1)
    if not isinstance(total, Tensor) and not total:
        return  # torch's BatchNorm counts an empty batch, no more
    for momentum, changed in changes.items():
        running = [old for old, _ in changed]
        batch = [new.to(old.dtype) for old, new in changed]
        torch._foreach_lerp_(running, batch, momentum)


def apply_matrix(matrix: Tensor, vector: Tensor) -> Tensor:
    """Shape: (G, out, C), (G, C) -> (G, out)"""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def linear_batch_norm(x: Tensor, layer: nn.Linear, norm: _BatchNorm) -> Tensor:
    """Return a linear layer and its BatchNorm in train mode, run on tokens: they normalise the outputs as torch does.

    A bias before a BatchNorm has no effect; its gradient is zero, as in the closed form.

    Shape: x (M, C) -> (M, out)
    """
    check_count(len(x), x.shape)
    outputs = F.linear(x, layer.weight)
    shift: Tensor | None = norm.bias
    if layer.bias is not None:
        without_effect = 0 * layer.bias
        shift = without_effect if shift is None else shift + without_effect
    y, mean, inverse_deviation = torch.native_batch_norm(
        outputs, norm.weight, shift, None, None, True, 0.0, norm.eps
    )
    variance = inverse_deviation.detach() ** -2 - norm.eps
    if layer.bias is not None:
        mean = mean.detach() + layer.bias.detach()
    update_statistics([norm], [mean.view(1, 1, -1)], variance.view(1, -1), len(x))
    return y


def fold(layers: Sequence[nn.Module]) -> tuple[Tensor, Tensor]:
    """Return linear layers and BatchNorms with running statistics as one map. Shape: -> (G, out, C), (G, out)

    The first may be a BatchNorm if what reads it has no groups.
    """
    weight: Any = None
    bias: Any = None
    for layer in layers:
        if isinstance(layer, _BatchNorm):
            if weight is None:
                weight = torch.eye(layer.num_features).unsqueeze(0).to(layer.running_mean)
                bias = torch.zeros_like(weight[..., 0])
            weight, bias = normalise(layer, weight, bias)
            continue
        matrix = weight_matrix(layer)  # type: ignore[arg-type]
        shape = matrix.shape[:-1]
        layer_bias = matrix.new_zeros(shape)
        if layer.bias is not None:
            layer_bias = layer.bias.view(shape).to(matrix.dtype)  # type: ignore[operator]
        if weight is None:
            weight = matrix
            bias = layer_bias
        else:
            bias = layer_bias + apply_matrix(matrix, bias)
            weight = matrix @ weight
    return weight, bias


def fold_into(layers: Sequence[nn.Module], like: Any) -> Any:
    """Return a copy of a linear layer or convolution that computes a chain of layers as `fold` does, with a bias."""
    weight, bias = fold(layers)
    merged = copy.deepcopy(like)
    trainable = like.weight.requires_grad
    merged.weight = nn.Parameter(weight.reshape(-1, *like.weight.shape[1:]), trainable)
    merged.bias = nn.Parameter(bias.flatten(), trainable)
    width = "out_features" if isinstance(merged, nn.Linear) else "out_channels"
    setattr(merged, width, bias.numel())
    return merged


def normalise(norm: _BatchNorm, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Apply a BatchNorm with its running statistics to the outputs of an affine map. Shape: (G, out, C), (G, out)"""

    def shaped(tensor: Any) -> Tensor:
        return tensor.view(bias.shape).to(weight.dtype)

    scale = torch.rsqrt(shaped(norm.running_var) + norm.eps)
    if norm.weight is not None:
        scale = scale * shaped(norm.weight)
    shift = (bias - shaped(norm.running_mean)) * scale
    if norm.bias is not None:
        shift = shift + shaped(norm.bias)
    return weight * scale.unsqueeze(-1), shift


def weight_matrix(layer: nn.Linear | nn.Conv2d) -> Tensor:
    """Return a weight as one matrix per group, in float32 at least. Shape: -> (G, out, C)"""
    groups = getattr(layer, "groups", 1)
    return upcast(layer.weight.flatten(1).unflatten(0, (groups, -1)))


def uses_batch_statistics(norm: nn.Module) -> bool:
    """True if a module is a BatchNorm that normalises by the batch: in train mode, or without running statistics."""
    return isinstance(norm, _BatchNorm) and (norm.training or norm.running_mean is None)
