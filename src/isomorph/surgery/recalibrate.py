"""Measure the BatchNorm statistics of a model on given data, for its function as it is or after averaging weights."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import UserError
from isomorph.layers import JointPyramid
from isomorph.layers.pyramid.base import Pyramid
from isomorph.layers.pyramid.moments import measure_moments
from isomorph.operations import ModuleCall, observing
from isomorph.surgery.calls import Inputs, batches_of, run_model, to_model
from isomorph.surgery.modules import outermost_modules
from isomorph.surgery.rule import copy_model


@torch.no_grad()
def recalibrate(
    model: nn.Module, batches: Inputs | Iterable[Any], keep_function: bool = True
) -> nn.Module:
    """Return a copy of the model whose BatchNorms have the statistics of these batches, averaged over the batches.

    Weights and biases of BatchNorm change so that eval mode computes the same function with the new statistics. Train
    mode then nearly does too, for fine-tuning or quantisation-aware training: of pyramids with `init="same-function"`,
    and of norms that `ConvToConvNorm` gave to a fused network. Everything else runs in eval mode.

    Args:
        model: a model with BatchNorm.
        batches: a list or loader of images (B, C, H, W), or of pairs (images, labels), or of dictionaries of a model's
            inputs by name; or one batch.
        keep_function: False to leave weights and biases of BatchNorm, for models whose running statistics are not those
            of their weights: averaged weights, or pre-training on masked images.

    Raises: UserError if the model has no BatchNorm with statistics, if there is no batch or one with a single value per
        channel, or, with keep_function, if a BatchNorm has no weights.

    >>> cnn = timm.create_model("cifar_resnet20").eval()
    >>> new = iso.recalibrate(cnn, [torch.randn(8, 3, 32, 32) for _ in range(2)])
    >>> bool((new.bn1.running_mean == cnn.bn1.running_mean).all())
    False
    """
    new = copy_model(model)
    model = copy_model(new)  # is called, which may leave traces
    norms = _norms(model)
    if not norms:
        raise UserError("the model has no BatchNorm statistics to recalibrate")
    if keep_function and any(norm.weight is None for norm in norms):
        raise UserError(
            "a BatchNorm without weights (affine=False) cannot keep the function; give keep_function=False"
        )
    model.eval()
    measuring: AbstractContextManager[None] = nullcontext()
    if keep_function:
        measuring = _measure_inputs(model)
    else:
        _renew_statistics(norms)
    with measuring:
        for inputs in batches_of(batches, of_loader=True):
            run_model(model, to_model(inputs, model))
    for norm, measured in zip(_norms(new), norms, strict=True):
        if keep_function or not _is_as_reset(measured):
            norm.load_state_dict(measured.state_dict())
    return new


def _is_as_reset(norm: Any) -> bool:
    """True for a BatchNorm of whose inputs nothing was measured, such as one that runs in train mode alone."""
    return not norm.running_mean.any() and bool((norm.running_var == 1).all())


def _norms(model: nn.Module) -> list[_BatchNorm]:
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def _renew_statistics(norms: list[_BatchNorm]) -> None:
    """Put every BatchNorm in train mode, where it gets the mean of its statistics over all batches to come."""
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.training = True


@contextmanager
def _measure_inputs(model: nn.Module) -> Iterator[None]:
    """Context at whose end BatchNorms get the statistics of their inputs; as functions stay, one pass will do."""
    moments_of: dict[_BatchNorm, list[tuple[Tensor, Tensor]]] = {}

    def measure(call: ModuleCall) -> None:
        for norm, mean, variance in _norm_inputs(call.module, call.input):
            moments_of.setdefault(norm, []).append((mean.flatten(), variance.flatten()))

    layers = outermost_modules(
        model, lambda module: isinstance(module, Pyramid | JointPyramid | _BatchNorm)
    )
    with observing(model, before=measure, names=layers):
        yield
    for norm, pairs in moments_of.items():
        means, variances = (torch.stack(parts).mean(0) for parts in zip(*pairs, strict=True))
        _set_statistics(norm, means, variances)


def _norm_inputs(module: nn.Module, x: Tensor) -> Iterator[tuple[_BatchNorm, Tensor, Tensor]]:
    """Yield the BatchNorms of a layer with the mean and variance of their inputs. Raises: ValueError for one value."""
    if isinstance(module, _BatchNorm):
        channels = x.movedim(1, -1).flatten(0, -2) if x.ndim > 2 else x
        if len(channels) == 1:
            shape = list(x.shape)
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {shape}"
            )
        yield module, channels.mean(0), channels.var(0)
        return
    parts = module.pyramids if isinstance(module, JointPyramid) else [module]
    moments = measure_moments(x, getattr(module, "window", None))
    for pyramid in (part for part in parts if isinstance(part, Pyramid)):
        for norm, mean, variance in pyramid.norm_inputs(moments):
            yield norm, mean, variance * (moments.total / (moments.total - 1))


def _set_statistics(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Set running statistics; weight and bias change so that the function of eval mode stays."""
    if norm.running_mean is None or norm.running_var is None:
        return
    slope = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    norm.bias.add_(slope * (mean - norm.running_mean))
    norm.weight.copy_(slope * (variance + norm.eps).sqrt())
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)
