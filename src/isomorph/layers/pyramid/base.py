"""Base of the pyramid layers: parallel branches of different depth that equal one affine map.

A convolution is a linear layer on the patches that it reads: patches are its tokens, everything else is the same.
"""

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import UserError
from isomorph.layers.modes import KeepsInEval, disable_autocast, in_functorch, on_cpu
from isomorph.layers.patches import Window
from isomorph.layers.pyramid.batchnorm import (
    NEEDS_EVAL,
    apply_matrix,
    fold,
    linear_batch_norm,
    normalise,
    uses_batch_statistics,
)
from isomorph.layers.pyramid.chains import Chains, Unit, join_maps
from isomorph.layers.pyramid.closed_form import collapse
from isomorph.layers.pyramid.moments import (
    Moments,
    autocast_dtype,
    cast_clamped,
    measure_moments,
    sync_group,
)

Rectify = Literal["batchnorm", "rescale", "none"]
TrainingForm = Literal["closed", "branches"]

# Most branches of a layout, and most units of a branch; TDRL uses up to 8.
MAX_UNITS = 32


def is_altered(module: nn.Module) -> bool:
    """True if calling a module would run a user's hook or a forward set on the instance."""
    state = module.__dict__
    hooked = state["_forward_hooks"] or state["_forward_pre_hooks"]
    return bool(
        hooked or state["_backward_hooks"] or state["_backward_pre_hooks"] or "forward" in state
    )


@dataclass(frozen=True)
class BranchLayout:
    """The branches of a pyramid: (Linear + BatchNorm) units in each, with or without a skip and a last Linear."""

    depths: tuple[int, ...]
    skip: bool
    last: bool = True

    @classmethod
    def parse(cls, name: str) -> "BranchLayout":
        """Parse P-W2S: pyramid of 2 branches and a skip; P-W2; R-D2W1S: 1 branch of depth 2, a skip; R-D2W1; naive-W8.

        Raises: UserError for any other name.
        """
        text = name if isinstance(name, str) else ""
        match = re.fullmatch(r"(?:(P)|R-D([0-9]{1,2})|(naive))-?W([0-9]{1,2})(S?)", text)
        if match is not None:
            pyramid, depth, naive, width, skip = match.groups()
            width = int(width)
            depth = int(depth or 1)
            if 0 < width <= MAX_UNITS and 0 < depth <= MAX_UNITS and not (naive and skip):
                depths = tuple(range(1, width + 1)) if pyramid else (depth,) * width
                return cls(depths, skip=bool(skip), last=not naive)
        described = f"of type {type(name).__name__}"
        if isinstance(name, str):
            described = repr(name[:40])
        raise UserError(
            f"layout {described} is unknown; write P-W2S, P-W2, R-D2W1S, R-D2W1 or naive-W8 "
            f"(numbers from 1 to {MAX_UNITS})"
        )


def apply_map(x: Tensor, weight: Tensor, bias: Tensor, window: Window | None) -> Tensor:
    """Apply a matrix to tokens, or to patches as the filters of a convolution, in autocast's dtype.

    Shape: weight (G, out, C), bias (G, out); x (*, C) -> (*, out), or (B, C, H, W) -> (B, out, H', W')
    """
    dtype = autocast_dtype(x)
    weight = cast_clamped(weight.flatten(0, 1), dtype)
    bias = bias.flatten().to(dtype)
    if window is None:
        return F.linear(x, weight, bias)
    filters = weight.unflatten(1, (-1, *window.kernel_size))
    return F.conv2d(x, filters, bias, window.stride, window.padding, window.dilation, window.groups)


@register_notrace_module
class Parallel(KeepsInEval):
    """Pyramids and linear layers that read one input, computed as one layer: the base of pyramids and of joint ones."""

    in_features: int
    # The window of a convolution.
    window: Window | None = None

    @property
    def parts(self) -> list[Any]:
        """The pyramids and linear layers."""
        raise NotImplementedError

    @property
    def has_altered_parts(self) -> bool:
        """True if a part inside has hooks or a forward of another class."""
        return any(part is not self and _computes_otherwise(part) for part in self.parts)

    def run_branches(self, x: Tensor) -> Tensor:
        """Run every branch on all tokens, as the paper does."""
        raise NotImplementedError

    def make_linear(
        self,
        in_features: int,
        out_features: int,
        reads_input: bool = True,
    ) -> nn.Linear | nn.Conv2d:
        """Return a new linear layer or convolution; `reads_input` if it is the first of its branch."""
        if self.window is None:
            return nn.Linear(in_features, out_features)
        kernel_size, stride, padding, dilation, groups = self.window
        if reads_input:
            return nn.Conv2d(
                in_features, out_features, kernel_size, stride, padding, dilation, groups
            )
        return nn.Conv2d(in_features, out_features, 1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        if self.window is not None and x.ndim == 3:
            return self.forward(x[None])[0]
        self._check_input(x)
        parts = self.parts
        if self.has_altered_parts:
            return self.run_branches(x)
        forms = [part.form_now() for part in parts if isinstance(part, Pyramid)]
        if all(form == "running" for form in forms):
            weight, bias = self.cached(self._sources(), self.fold_parts, autocast_dtype(x))
            return apply_map(x, weight, bias, self.window)
        chains = [form for form in forms if isinstance(form, Chains)]
        if len(chains) < len(forms):
            return self.run_branches(x)
        if isinstance(self, Pyramid) and self.costs_less_by_outputs(x):
            return self.normalise_outputs(x)
        moments = measure_moments(x, self.window, sync_group(self))
        with disable_autocast(x.device):
            weight, bias = self._collapse_parts(chains, moments)
        return apply_map(moments.source, weight, bias, self.window)

    def _check_input(self, x: Tensor) -> None:
        if self.window is None:
            fits = x.shape[-1] == self.in_features
            expected = f"(*, {self.in_features})"
        else:
            fits = x.ndim == 4 and x.shape[1] == self.in_features
            expected = f"(B, {self.in_features}, H, W)"
        if not fits:
            raise UserError(f"the input has shape {tuple(x.shape)}; a pyramid needs {expected}")

    def _sources(self) -> tuple[Tensor, ...]:
        """Return all parameters and buffers, tied ones each time."""
        tensors: list[Tensor | None] = []
        for module in self.modules():
            tensors += module._parameters.values()
            tensors += module._buffers.values()
        return tuple(tensor for tensor in tensors if tensor is not None)

    def _collapse_parts(self, chains: list[Chains], moments: Moments) -> tuple[Tensor, Tensor]:
        """Return the parts as one map of `moments.source`. Shape: -> (G, out, C), (G, out)"""
        weight, bias = collapse(chains, moments)
        if len(chains) == len(self.parts):
            return weight, bias
        maps = []
        start = 0
        for part in self.parts:
            if isinstance(part, Pyramid):
                stop = start + part.out_features
                maps.append((weight[:, start:stop], bias[:, start:stop]))
                start = stop
            else:
                maps.append(_at_mean(part, moments))
        return join_maps(maps)

    def fold_parts(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return the parts in eval mode as one affine map. Shape: -> (G, out, C), (G, out)"""
        weight, bias = join_maps(
            [part.fold() if isinstance(part, Pyramid) else fold([part]) for part in self.parts]
        )
        if dtype is None:
            return weight, bias
        return cast_clamped(weight, dtype), bias.to(dtype)

    @property
    def weight(self) -> Tensor:
        """The weight of the layer that `fuse` returns, with running statistics; networks read its dtype and device."""
        weight, _ = self.fold_parts()
        weight = weight.flatten(0, 1).to(next(self.parameters()).dtype)
        return (
            weight if self.window is None else weight.unflatten(1, (-1, *self.window.kernel_size))
        )

    @property
    def bias(self) -> Tensor:
        """The bias of the layer that `fuse` returns, with running statistics."""
        _, bias = self.fold_parts()
        return bias.flatten().to(next(self.parameters()).dtype)

    @torch.no_grad()
    def fuse(self) -> Any:
        """Return one plain layer, fused in float64. Raises: UserError in train mode, or if a part is not plain."""
        if self.training or any(map(uses_batch_statistics, self.modules())):
            raise UserError(NEEDS_EVAL)
        if self.has_altered_parts or not all(
            part.is_plain for part in self.parts if isinstance(part, Pyramid)
        ):
            raise UserError(
                "a layer inside the pyramid has hooks, a parametrization or an adapter, which fuse cannot merge; "
                "merge or remove them first"
            )
        weight, bias = copy.deepcopy(self).double().fold_parts()
        fused = self.make_linear(self.in_features, bias.numel()).to(next(self.parameters()))
        set_affine(fused, weight, bias)
        return fused.eval()


def _computes_otherwise(part: nn.Module) -> bool:
    expected = Parallel.forward if isinstance(part, Pyramid) else nn.Linear.forward
    return is_altered(part) or type(part).forward is not expected


def _at_mean(linear: nn.Linear, moments: Moments) -> tuple[Tensor, Tensor]:
    """Return a linear layer as a map of its input less the mean. Shape: -> (1, out, C), (1, out)"""
    weight, bias = fold([linear])
    return weight, bias + apply_matrix(weight, moments.mean.detach())


def set_affine(layer: nn.Linear | nn.Conv2d, weight: Tensor, bias: Tensor) -> None:
    """Shape: weight (G, out, C), bias (G, out)"""
    layer.weight.copy_(weight.reshape(layer.weight.shape))
    assert layer.bias is not None
    layer.bias.copy_(bias.flatten())


class Pyramid(Parallel):
    """Parallel branches over one input, summed and rectified: the base of the linear and the convolutional pyramid."""

    # False for the pyramid of a layer without a bias, whose fused bias a BatchNorm after it can
    # take.
    replaces_bias = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        layout: str = "P-W2S",
        rectify: Rectify = "rescale",
        affine: bool = True,
        rescale_by: float | None = None,
        form: TrainingForm = "closed",
    ) -> None:
        super().__init__()
        if rectify not in ("batchnorm", "rescale", "none"):
            raise UserError(
                f"rectify {rectify!r} is unknown; choose 'batchnorm', 'rescale' or 'none'",
            )
        if rescale_by is not None and not rescale_by > 0:
            raise UserError(
                f"rescale_by {rescale_by} must be above 0, as the sum is divided by its square root",
            )
        branches = BranchLayout.parse(layout)
        self.in_features = in_features
        self.out_features = out_features
        self.layout = layout
        self.rectify = rectify
        self.rescale_by = rescale_by or float(len(branches.depths))
        self.form = form
        self.branches = nn.ModuleList(
            self._make_branch(branches, depth, affine) for depth in branches.depths
        )
        self.skip = self.make_linear(in_features, out_features) if branches.skip else None
        self.norm = self._make_norm(out_features, affine) if rectify == "batchnorm" else None
        # A linear layer and its BatchNorm, and nothing else.
        self.is_one_unit = branches == BranchLayout((1,), skip=False, last=False) and not self.norm

    @property
    def parts(self) -> list[Any]:
        """The pyramid itself, its only part."""
        return [self]

    def _make_norm(self, features: int, affine: bool) -> _BatchNorm:
        if self.window is None:
            return nn.BatchNorm1d(features, affine=affine)
        return nn.BatchNorm2d(features, affine=affine)

    def _make_branch(self, layout: BranchLayout, depth: int, affine: bool) -> nn.Sequential:
        """Return `depth` units and a last layer; the widths give both parameter counts of the paper."""
        out = self.out_features
        widths = [out] * depth
        if layout.last:
            taps = 1 if self.window is None else math.prod(self.window.kernel_size)
            first = max(self.in_features, min(self.in_features * taps, out))
            widths = [first, *[max(first, out)] * (depth - 1), out]
        layers: list[nn.Module] = []
        for number, (before, after) in enumerate(pairwise([self.in_features, *widths])):
            layers.append(self.make_linear(before, after, reads_input=number == 0))
            if number < depth:
                layers.append(self._make_norm(after, affine))
        return nn.Sequential(*layers)

    @property
    def chains(self) -> list[list[nn.Module]]:
        """The layers of each term of the sum: of every branch, and of the skip if there is one."""
        chains: list[Any] = [
            list(branch._modules.values()) for branch in self.branches._modules.values()
        ]
        if self.skip is not None:
            chains.append([self.skip])
        return chains

    @property
    def norms(self) -> list[Any]:
        """The BatchNorms of all branches, and the one that rectifies if there is one."""
        norms: list[Any] = []
        for chain in self.chains:
            norms += chain[1::2]
        if self.norm is not None:
            norms.append(self.norm)
        return norms

    @property
    def scale_free_layers(self) -> list[nn.Module]:
        """The layers that a BatchNorm follows: the scale of each row of their weight has no effect."""
        layers = []
        for chain in self.chains:
            for layer, after in pairwise(chain):
                if isinstance(after, _BatchNorm):
                    layers.append(layer)
        return layers

    @property
    def output_scale(self) -> float:
        """Factor of the sum of the branches, 1 unless they are rescaled."""
        return self.rescale_by**-0.5 if self.rectify == "rescale" else 1.0

    @property
    def is_plain(self) -> bool:
        """False if some layers inside are not plain (adapters, hooks, parametrizations)."""
        linear: list[nn.Module] = []
        for chain in self.chains:
            linear += chain[::2]
        norms = self.norms
        if any(type(layer) not in (nn.Linear, nn.Conv2d) for layer in linear):
            return False
        if any(
            type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm) for norm in norms
        ):
            return False
        return not any(map(is_altered, (*linear, *norms, *self.branches._modules.values())))

    def form_now(self) -> Chains | Literal["running", "branches"]:
        """Return how the pyramid is computed: its layers for the closed form from moments of the batch, or its name.

        "running": every BatchNorm has running statistics in eval mode. "branches": one layer after the other, as some
        are not plain, BatchNorms differ in mode or eps or take a cumulative average, or torch.func transforms the call.
        """
        norms = self.norms
        if self.form == "branches" or not self.is_plain:
            return "branches"
        by_batch = {uses_batch_statistics(norm) for norm in norms}
        if by_batch == {False}:
            return "running"
        if len(by_batch) > 1 or len({norm.eps for norm in norms}) > 1 or in_functorch():
            return "branches"
        if any(norm.momentum is None and norm.track_running_stats for norm in norms):
            return "branches"
        units = []
        last_layers = []
        for branch in self.branches._modules.values():
            chain: list[Any] = list(branch._modules.values())
            pairs = zip(chain[::2], chain[1::2], strict=False)
            units.append([Unit(layer, norm) for layer, norm in pairs])
            if len(chain) % 2:
                last_layers.append(chain[-1])
        return Chains(units, last_layers, self.skip, self.norm, self.output_scale)

    def run_branches(self, x: Tensor) -> Tensor:
        """Run every branch on all tokens, and rectify their sum. Shape: as `forward`"""
        tokens = x
        if self.window is None:
            tokens = x.reshape(-1, x.shape[-1])
        terms = [branch(tokens) for branch in self.branches]
        if self.skip is not None:
            terms.append(self.skip(tokens))
        total = sum(terms[1:], terms[0])
        y = total * self.output_scale if self.norm is None else self.norm(total)
        if self.window is not None:
            return y
        return y.reshape(*x.shape[:-1], self.out_features)

    def costs_less_by_outputs(self, x: Tensor) -> bool:
        """True on a CPU for one unit alone that does not widen its input.

        The moments of C channels cost C^2 per token, the statistics of the outputs a few operations for each of them.
        """
        if not self.is_one_unit or self.window is not None or not on_cpu(x):
            return False
        if x.numel() == 0:  # which torch's kernel for statistics does not take
            return False
        return self.out_features <= self.in_features and sync_group(self) is None

    def normalise_outputs(self, x: Tensor) -> Tensor:
        """Compute one unit from the statistics of its outputs, which are kept for the backward pass."""
        layer: Any
        norm: Any
        layer, norm = self.chains[0]
        y = linear_batch_norm(x.reshape(-1, x.shape[-1]), layer, norm)
        if self.output_scale != 1:
            y = y * self.output_scale
        return y.view(*x.shape[:-1], self.out_features)

    def fold(self, rectified: bool = True) -> tuple[Tensor, Tensor]:
        """Return the pyramid, or its sum, as one affine map, with running statistics: TDRL eq. 6 and 7, Fig. 1 (c).

        Shape: -> (G, out, C), (G, out)
        """
        with disable_autocast(next(self.parameters()).device):
            (weight, bias), *others = [fold(chain) for chain in self.chains]
            for own_weight, own_bias in others:
                weight = weight + own_weight
                bias = bias + own_bias
            weight = weight * self.output_scale
            bias = bias * self.output_scale
            if rectified and self.norm is not None:
                return normalise(self.norm, weight, bias)
            return weight, bias

    def norm_inputs(self, moments: Moments) -> Iterator[tuple[_BatchNorm, Tensor, Tensor]]:
        """Yield each BatchNorm with the mean and variance of its input in eval mode. Shape: (G, out), (G, out)"""
        inputs: list[tuple[_BatchNorm, tuple[Tensor, Tensor]]] = []
        for chain in self.chains:
            for number, layer in enumerate(chain):
                if isinstance(layer, _BatchNorm):
                    inputs.append((layer, fold(chain[:number])))
        if self.norm is not None:
            inputs.append((self.norm, self.fold(rectified=False)))
        for norm, (weight, bias) in inputs:
            mean = bias + apply_matrix(weight, moments.mean)
            variance = (weight @ moments.covariance * weight).sum(-1)
            yield norm, mean, variance.clamp(min=0)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, layout={self.layout!r}, rectify={self.rectify!r}"
