"""Base of the pyramid layers: parallel branches of different depth that equal one affine map."""

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import UserError
from isomorph.layers.pyramid.affine_chain import (
    Affine,
    apply_batchnorms,
    collapse_chain,
    collapse_chains,
    matvec,
    uses_batch_statistics,
    weight_matrix,
)
from isomorph.layers.pyramid.moments import Moments
from isomorph.layers.pyramid.weight_products import row_variances

Rectify = Literal["batchnorm", "rescale", "none"]

MAX_UNITS = 32
"""Most branches of a layout, and most units of a branch; TDRL uses up to 8."""


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
class Pyramid(nn.Module):
    """Parallel branches over one input, summed and rectified: the base of the linear and the convolutional pyramid.

    Subclasses define how to create a linear layer and a BatchNorm, and how to read tokens from the input.
    """

    replaces_bias = True
    """False for the pyramid of a layer without a bias, whose fused bias a BatchNorm after it can take."""

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
        branches: list[list[nn.Module]] = [list(branch) for branch in self.branches]  # type: ignore[call-overload]
        return branches if self.skip is None else [*branches, [self.skip]]

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

    def norm_inputs(self, moments: Moments) -> Iterator[tuple[_BatchNorm, Tensor, Tensor]]:
        """Yield each BatchNorm, in eval mode, with the mean and variance of its input. Shape: (G, out), (G, out)"""
        for layers in self.chains:
            for i, layer in enumerate(layers):
                if isinstance(layer, _BatchNorm):
                    weight, bias = collapse_chain(layers[:i], moments, moments.mean)
                    yield layer, bias, row_variances([weight], moments.covariance)
        if self.norm is not None:
            weight, _, bias = sum_branches([self], moments)[0]
            yield self.norm, bias, row_variances([weight], moments.covariance)

    def collapse(self, moments: Moments | None) -> tuple[Tensor, Tensor]:
        """Collapse the pyramid into one affine map of `moments.source`, or of x if `moments` is None (eval mode).

        Shape: -> (out, C), (out,), with a leading group axis where there are groups
        Source: TDRL eq. 6 and 7, Fig. 1 (c); differs: also in train mode
        """
        return collapse_pyramids([self], moments)[0]

    @property
    def weight(self) -> Tensor:
        """The weight of the layer that `fuse` returns, with running statistics; networks read its dtype and device."""
        return self.as_filters(self.collapse(None)[0]).to(next(self.parameters()).dtype)

    @property
    def bias(self) -> Tensor:
        """The bias of the layer that `fuse` returns, with running statistics."""
        return self.collapse(None)[1].flatten().to(next(self.parameters()).dtype)

    def as_filters(self, weight: Tensor) -> Tensor:
        """Reshape a matrix into the weight of the layer that `fuse` returns. Shape: (out, C) -> the same"""
        return weight

    @torch.no_grad()
    def collapse_in_float64(self) -> tuple[Tensor, Tensor]:
        """Return weight and bias in eval mode, computed in float64. Raises: UserError in train mode."""
        if self.training or self.needs_moments:
            raise UserError(
                "fuse needs eval mode, because BatchNorm depends on the batch in train mode; call .eval() first"
            )
        return copy.deepcopy(self).double().collapse(None)

    def zero_mean(self) -> Tensor:
        """Return a mean of zeros for the input. Shape: -> (C,), or (G, C)"""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, layout={self.layout!r}, rectify={self.rectify!r}"


def sum_branches(pyramids: Sequence[Pyramid], moments: Moments | None) -> list[Affine]:
    """Return the sum of the branches of pyramids that read one input, before BatchNorm rectifies it."""
    start = pyramids[0].zero_mean() if moments is None else moments.mean
    chains = [pyramid.chains for pyramid in pyramids]
    maps = iter(collapse_chains([layers for each in chains for layers in each], moments, start))
    sums = []
    for pyramid, own in zip(pyramids, chains, strict=True):
        weights, biases = zip(*(next(maps).scaled() for _ in own), strict=True)
        scale = pyramid.output_scale
        # a product for each bias: otherwise their gradients would share memory
        sums.append(Affine(sum(weights[1:], weights[0]) * scale, None, sum(c * scale for c in biases)))
    return sums


def collapse_centred(pyramids: Sequence[Pyramid], moments: Moments | None) -> list[Affine]:
    """Collapse pyramids that read one input into maps of the centred input, without a scale of their own."""
    maps = dict(enumerate(sum_branches(pyramids, moments)))
    norms = {index: pyramid.norm for index, pyramid in enumerate(pyramids) if pyramid.norm is not None}
    if norms:
        normed = apply_batchnorms(list(norms.values()), [maps[index] for index in norms], moments)
        maps |= dict(zip(norms, normed, strict=True))
    pairs = [maps[index].scaled() for index in range(len(pyramids))]
    return [Affine(weight, None, bias) for weight, bias in pairs]


def collapse_pyramids(pyramids: Sequence[Pyramid], moments: Moments | None) -> list[tuple[Tensor, Tensor]]:
    """Collapse pyramids that read one input; see `Pyramid.collapse`."""
    offset = None if moments is None else moments.offset
    maps = collapse_centred(pyramids, moments)
    return [(weight, bias if offset is None else bias - matvec(weight, offset)) for weight, _, bias in maps]


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
    weight, bias = weight / pyramid.output_scale, bias / pyramid.output_scale
    if pyramid.skip is not None:
        _set_affine(pyramid.skip, weight, bias)
        for branch in pyramid.branches:
            nn.init.zeros_(branch[-1].weight)  # type: ignore[index]
    else:
        _distribute_map(pyramid, weight, bias)
    if pyramid.norm is not None:
        _make_identity(pyramid.norm, weight, bias)


def _set_affine(layer: nn.Linear | nn.Conv2d, weight: Tensor, bias: Tensor) -> None:
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
            _set_affine(linear, weight / parts + extra, bias / parts)
            _make_identity(norm, weight / parts + extra, bias / parts)
        return
    # (G, C, C), first the rows that span those of the map
    basis = torch.linalg.svd(weight.double(), full_matrices=True).Vh
    for *inner, last in branches:
        for layer in inner:
            _init_orthogonal(layer)
        width = weight_matrix(inner[0]).shape[-2]
        rotation = torch.linalg.qr(weight_matrix(inner[0]).double()[..., :width]).Q  # (G, width, width)
        _set_affine(inner[0], rotation @ basis[..., :width, :], bias.new_zeros(rotation.shape[:-1]))
        for layer in inner:
            layer.eval()
        chain, inner_bias = collapse_chain(inner, None, weight.new_zeros(weight.shape[:-2] + weight.shape[-1:]))
        outer = weight.double() / parts @ torch.linalg.pinv(chain.double())
        _set_affine(last, outer, bias / parts - matvec(outer, inner_bias.double()))
        for layer in inner:
            layer.train(pyramid.training)


def _init_orthogonal(layer: nn.Module) -> None:
    """Initialise a linear layer with orthonormal rows or columns in each group; other layers are unchanged."""
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        return
    for group in layer.weight.view(getattr(layer, "groups", 1), -1, *layer.weight.shape[1:]):
        nn.init.orthogonal_(group)
