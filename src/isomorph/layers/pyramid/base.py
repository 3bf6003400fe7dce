"""Base of the pyramid layers: parallel branches of different depth that equal one affine map."""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import UserError
from isomorph.layers.eval_mode import KeepsInEval
from isomorph.layers.pyramid.batchnorm import fold, normalise, uses_batch_statistics, weight_matrix
from isomorph.layers.pyramid.closed_form import Chains
from isomorph.layers.pyramid.moments import Moments, disable_autocast
from isomorph.layers.pyramid.tokens import Window

Rectify = Literal["batchnorm", "rescale", "none"]

MAX_UNITS = 32
"""Most branches of a layout, and most units of a branch; TDRL uses up to 8."""

_LINEAR = {nn.Linear, nn.Conv2d}
_NORMS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm}


def is_altered(module: nn.Module) -> bool:
    """True if calling a module would run a user's hook or a forward set on the instance."""
    state = module.__dict__
    hooked = state["_forward_hooks"] or state["_forward_pre_hooks"]
    return bool(hooked or state["_backward_hooks"] or state["_backward_pre_hooks"] or "forward" in state)


@dataclass(frozen=True)
class Layout:
    """The branches of a pyramid: (Linear + BatchNorm) units in each, with or without a skip and a last Linear."""

    depths: tuple[int, ...]
    skip: bool
    last: bool = True

    @classmethod
    def parse(cls, name: str) -> "Layout":
        """Parse the name of a layout.

        P-W2S: pyramid of 2 branches with a skip; P-W2: without; R-D2W1S: 1 branch of depth 2 with a skip; R-D2W1:
        without; naive-W8: 8 branches of Linear + BatchNorm.

        Raises: UserError for any other name.
        """
        given = name if isinstance(name, str) else ""
        found = re.fullmatch(r"(?:(P)|R-D([0-9]{1,2})|(naive))-?W([0-9]{1,2})(S?)", given)
        width, depth = (int(found[4]), int(found[2] or 1)) if found else (0, 0)
        if found and 0 < width <= MAX_UNITS and 0 < depth <= MAX_UNITS and not (found[3] and found[5]):
            depths = tuple(range(1, width + 1)) if found[1] else (depth,) * width
            return cls(depths, skip=bool(found[5]), last=not found[3])
        shown = repr(name[:40]) if isinstance(name, str) else f"of type {type(name).__name__}"
        raise UserError(
            f"layout {shown} is unknown; write P-W2S, P-W2, R-D2W1S, R-D2W1 or naive-W8 (numbers from 1 to {MAX_UNITS})"
        )

    def widths(self, first: int, out_features: int, depth: int) -> list[int]:
        """Return the output width of each linear layer of a branch.

        The paper does not give the widths; this rule reproduces both of its parameter counts.
        """
        if not self.last:
            return [out_features] * depth
        return [first, *[max(first, out_features)] * (depth - 1), out_features]


@register_notrace_module
class Pyramid(KeepsInEval):
    """Parallel branches over one input, summed and rectified: the base of the linear and the convolutional pyramid.

    Subclasses define how to create a linear layer and a BatchNorm.
    """

    replaces_bias = True
    """False for the pyramid of a layer without a bias, whose fused bias a BatchNorm after it can take."""
    window: Window | None = None
    """The window of a convolution."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        first: int,
        layout: str,
        rectify: Rectify,
        affine: bool,
        rescale_by: float | None,
    ) -> None:
        super().__init__()
        if rectify not in ("batchnorm", "rescale", "none"):
            raise UserError(f"rectify {rectify!r} is unknown; choose 'batchnorm', 'rescale' or 'none'")
        if rescale_by is not None and not rescale_by > 0:
            raise UserError(f"rescale_by {rescale_by} must be above 0, as the sum is divided by its square root")
        form = Layout.parse(layout)
        self.in_features, self.out_features, self.layout, self.rectify = in_features, out_features, layout, rectify
        self.rescale_by = rescale_by or float(len(form.depths))
        self.branches = nn.ModuleList(self.make_branch(form, depth, first, affine) for depth in form.depths)
        self.skip = self.make_linear(in_features, out_features, reads_input=True) if form.skip else None
        self.norm = self.make_norm(out_features, affine) if rectify == "batchnorm" else None

    def make_linear(self, in_features: int, out_features: int, reads_input: bool) -> nn.Linear | nn.Conv2d:
        """Return a new linear layer; `reads_input` if it is the first of its branch."""
        raise NotImplementedError

    def make_norm(self, features: int, affine: bool) -> _BatchNorm:
        """Return a new BatchNorm."""
        raise NotImplementedError

    def make_branch(self, form: Layout, depth: int, first: int, affine: bool) -> nn.Sequential:
        """Return `depth` x (Linear + BatchNorm), followed by a Linear except in the naive layout."""
        layers: list[nn.Module] = []
        width = self.in_features
        for number, after in enumerate(form.widths(first, self.out_features, depth)):
            layers.append(self.make_linear(width, after, reads_input=number == 0))
            if number < depth:
                layers.append(self.make_norm(after, affine))
            width = after
        return nn.Sequential(*layers)

    @property
    def chains(self) -> list[list[nn.Module]]:
        """The layers of each term of the sum: of every branch, and of the skip if there is one."""
        chains: list[Any] = [list(branch._modules.values()) for branch in self.branches._modules.values()]
        return chains if self.skip is None else [*chains, [self.skip]]

    def own_tensors(self) -> list[Tensor]:
        """Return all parameters and buffers."""
        layers = [layer for chain in self.chains for layer in chain] + ([] if self.norm is None else [self.norm])
        held = (t for layer in layers for t in (*layer._parameters.values(), *layer._buffers.values()))
        return [t for t in held if t is not None]

    @property
    def scale_free_layers(self) -> list[nn.Module]:
        """The layers that a BatchNorm follows: the scale of each row of their weight has no effect."""
        pairs = (pair for layers in self.chains for pair in pairwise(layers))
        return [layer for layer, after in pairs if isinstance(after, _BatchNorm)]

    @property
    def output_scale(self) -> float:
        """The factor that multiplies the sum."""
        return self.rescale_by**-0.5 if self.rectify == "rescale" else 1.0

    @property
    def needs_moments(self) -> bool:
        """True if any BatchNorm in the pyramid normalises by the batch."""
        return any(map(uses_batch_statistics, self.modules()))

    def parts(self) -> tuple[Literal["batch", "running", "branches"], Chains | None]:
        """Return how the pyramid is computed, and its layers if that is in closed form from moments of the batch.

        "running": every BatchNorm has running statistics in eval mode. "branches": the layers run one after the other,
        as some are not plain (LoRA, hooks, parametrizations), or BatchNorms differ in mode or eps.
        """
        norm: Any = self.norm
        terms: list[Any] = self.chains
        linear = [layer for chain in terms for layer in chain[::2]]
        norms = [layer for chain in terms for layer in chain[1::2]] + ([] if norm is None else [norm])
        plain = all(type(layer) in _LINEAR and not is_altered(layer) for layer in linear)
        plain = plain and all(type(layer) in _NORMS and not is_altered(layer) for layer in norms)
        if not plain or any(map(is_altered, self.branches._modules.values())):
            return "branches", None
        modes = {norm.training or norm._buffers["running_mean"] is None for norm in norms}
        if len(modes) > 1:
            return "branches", None
        if modes == {False}:
            return "running", None
        if len({norm.eps for norm in norms}) > 1:
            return "branches", None
        skip = terms.pop()[0] if self.skip is not None else None
        ends = len(terms[0]) % 2
        units = [[(*_tensors(a), b) for a, b in zip(chain[::2], chain[1::2], strict=False)] for chain in terms]
        lasts = [_tensors(chain[-1]) for chain in terms] if ends else []
        return "batch", Chains(units, lasts, skip and _tensors(skip), norm, self.output_scale)

    def run_branches(self, x: Tensor) -> Tensor:
        """Run every branch on all tokens, as the paper does. Shape: x (M, C) or (B, C, H, W)"""
        terms = [branch(x) for branch in self.branches] + ([] if self.skip is None else [self.skip(x)])
        total = sum(terms[1:], terms[0])
        return self.norm(total) if self.norm is not None else total * self.output_scale

    def fold(self, rectified: bool = True) -> tuple[Tensor, Tensor]:
        """Return the pyramid as one affine map, with running statistics; the sum alone if it is not to be rectified.

        Shape: -> (G, out, C), (G, out)
        Source: TDRL eq. 6 and 7, Fig. 1 (c)
        """
        with disable_autocast(next(self.parameters()).device):
            weights, biases = zip(*map(fold, self.chains), strict=True)
            weight, bias = (sum(each[1:], each[0]) * self.output_scale for each in (weights, biases))
            return normalise(self.norm, weight, bias) if rectified and self.norm is not None else (weight, bias)

    def norm_inputs(self, moments: Moments) -> Iterator[tuple[_BatchNorm, Tensor, Tensor]]:
        """Yield each BatchNorm with the mean and variance of its input in eval mode. Shape: (G, out), (G, out)"""
        found: list[tuple[Any, tuple[Tensor, Tensor]]] = [
            (layer, fold(chain[:i]))
            for chain in self.chains
            for i, layer in enumerate(chain)
            if isinstance(layer, _BatchNorm)
        ]
        for norm, (weight, bias) in [*found, *([(self.norm, self.fold(False))] if self.norm else [])]:
            mean = bias + (weight @ moments.mean.unsqueeze(-1)).squeeze(-1)
            yield norm, mean, (weight @ moments.covariance * weight).sum(-1).clamp(min=0)

    @property
    def weight(self) -> Tensor:
        """The weight of the layer that `fuse` returns, with running statistics; networks read its dtype and device."""
        return self.fold()[0].view(self.fused_shape).to(next(self.parameters()).dtype)

    @property
    def bias(self) -> Tensor:
        """The bias of the layer that `fuse` returns, with running statistics."""
        return self.fold()[1].flatten().to(next(self.parameters()).dtype)

    @property
    def fused_shape(self) -> tuple[int, ...]:
        """The shape of the weight of the layer that `fuse` returns."""
        if self.window is None:
            return self.out_features, self.in_features
        return self.out_features, self.in_features // self.window.groups, *self.window.kernel_size

    @torch.no_grad()
    def fuse(self) -> Any:
        """Return one plain layer that computes the same function, fused in float64.

        Raises: UserError in train mode, or if a layer inside is not plain.
        """
        if self.training or self.needs_moments:
            raise UserError(
                "fuse needs eval mode, because BatchNorm depends on the batch in train mode; call .eval() first"
            )
        if self.parts()[0] == "branches":
            raise UserError(
                "a layer inside the pyramid has hooks, a parametrization or an adapter, which fuse cannot merge; merge "
                "or remove them first"
            )
        weight, bias = copy.deepcopy(self).double().fold()
        fused = self.make_linear(self.in_features, self.out_features, reads_input=True).to(next(self.parameters()))
        set_affine(fused, weight, bias)
        return fused

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, layout={self.layout!r}, rectify={self.rectify!r}"


def _tensors(layer: Any) -> tuple[Tensor, Tensor | None]:
    return layer._parameters["weight"], layer._parameters["bias"]


@torch.no_grad()
def init_random(pyramid: Pyramid) -> None:
    """Initialise a pyramid for training from scratch: linear layers Xavier-uniform with zero biases, BatchNorms reset.

    Filters of a convolution are viewed as a matrix, as MAE views the patch embedding.

    Source: MAE, whose code TDRL trains with; the paper itself does not say
    """
    for layer in pyramid.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight.view(len(layer.weight), -1))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, _BatchNorm):
            layer.reset_parameters()


@torch.no_grad()
def init_from_affine(pyramid: Pyramid, weight: Tensor, bias: Tensor) -> None:
    """Initialise a pyramid so that it computes y = weight x + bias in eval mode and its branches can be trained.

    With a skip, the skip computes the map and the last layer of every branch is zero, so train mode gives the same
    output. Without a skip, the branches share the map. A BatchNorm on the path (on queries and keys, or in the naive
    layout) is the identity for white inputs, such as the output of a LayerNorm. In train mode it normalises by the
    actual batch, so recalibrate it on data first.

    Shape: weight (out, C), bias (out,), with a leading group axis where there are groups
    """
    init_random(pyramid)
    groups = 1 if pyramid.window is None else pyramid.window.groups
    weight, bias = weight.reshape(groups, -1, weight.shape[-1]), bias.reshape(groups, -1)
    weight, bias = weight / pyramid.output_scale, bias / pyramid.output_scale
    if pyramid.skip is not None:
        set_affine(pyramid.skip, weight, bias)
        for branch in pyramid.branches:
            nn.init.zeros_(branch[-1].weight)  # type: ignore[index]
    else:
        _distribute_map(pyramid, weight, bias)
    if pyramid.norm is not None:
        _make_identity(pyramid.norm, weight, bias)


def set_affine(layer: nn.Linear | nn.Conv2d, weight: Tensor, bias: Tensor) -> None:
    """Set the weight and bias of a layer. Shape: weight (G, out, C), bias (G, out)"""
    layer.weight.copy_(weight.reshape(layer.weight.shape))
    assert layer.bias is not None
    layer.bias.copy_(bias.flatten())


def _make_identity(norm: _BatchNorm, weight: Tensor, bias: Tensor) -> None:
    """Set a BatchNorm to the identity on weight x + bias: statistics of white inputs x, undone by its own weights.

    Raises: UserError for a BatchNorm without weights or running statistics.
    """
    if norm.weight is None or norm.running_mean is None or norm.running_var is None:
        raise UserError(
            "a BatchNorm without weights or running statistics cannot be made the identity; use affine=True"
        )
    norm.running_mean.copy_(bias.flatten())
    norm.running_var.copy_(weight.square().sum(-1).flatten())
    norm.weight.copy_((norm.running_var + norm.eps).sqrt())
    norm.bias.copy_(norm.running_mean)


def _distribute_map(pyramid: Pyramid, weight: Tensor, bias: Tensor) -> None:
    """Initialise branches without a skip so that they sum to the map, and no two of them are equal."""
    branches: list[list[Any]] = [list(branch) for branch in pyramid.branches]  # type: ignore[call-overload]
    parts = len(branches)
    if isinstance(branches[0][-1], _BatchNorm):
        noise = torch.randn(parts, *weight.shape).to(weight) * weight.square().mean().sqrt()
        for (linear, norm), extra in zip(branches, noise - noise.mean(0), strict=True):
            set_affine(linear, weight / parts + extra, bias / parts)
            _make_identity(norm, weight / parts + extra, bias / parts)
        return
    # (G, C, C), first the rows that span those of the map
    basis = torch.linalg.svd(weight.double(), full_matrices=True).Vh
    for *inner, last in branches:
        for layer in inner:
            _init_orthogonal(layer)
        width = weight_matrix(inner[0]).shape[-2]
        rotation = torch.linalg.qr(weight_matrix(inner[0]).double()[..., :width]).Q  # (G, width, width)
        set_affine(inner[0], rotation @ basis[..., :width, :], bias.new_zeros(rotation.shape[:-1]))
        chain, inner_bias = fold(inner)
        outer = weight.double() / parts @ torch.linalg.pinv(chain.double())
        set_affine(last, outer, bias / parts - (outer @ inner_bias.double().unsqueeze(-1)).squeeze(-1))


def _init_orthogonal(layer: nn.Module) -> None:
    """Initialise a linear layer with orthonormal rows or columns in each group; other layers are unchanged."""
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        return
    for group in layer.weight.view(getattr(layer, "groups", 1), -1, *layer.weight.shape[1:]):
        nn.init.orthogonal_(group)
