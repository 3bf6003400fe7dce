"""The layers of pyramids that are computed together, and their tensors joined into one.

Letters: G groups of channels, C channels of a token, N pyramids, R rows of a matrix.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.layers.modes import constant

# A linear layer, or a convolution.
LinearLayer = nn.Linear | nn.Conv2d


class Unit(NamedTuple):
    """A linear layer of a branch and the BatchNorm that normalises its outputs."""

    linear: LinearLayer
    norm: _BatchNorm


class Chains(NamedTuple):
    """The layers of a pyramid: units of every branch, last layers, skip, what rectifies, the factor of the sum."""

    units: list[list[Unit]]
    last_layers: list[LinearLayer]
    skip: LinearLayer | None
    rectifier: _BatchNorm | None
    scale: float


class ChainSizes(NamedTuple):
    """What pyramids that are computed together have in common."""

    pyramids: int
    # Pyramids that a BatchNorm rectifies, the first ones.
    rectified: int
    # Rows of the sums of the others, 0 if none is rectified.
    unrectified: int
    groups: int
    # Channels of a token.
    reads: int
    # Channels after the first, second, ... units of a branch.
    widths: tuple[int, ...]
    out: int
    branches: int
    # Whether branches end with a linear layer; otherwise they are one unit each.
    last: bool
    skip: bool
    # Factor of the sum of the branches.
    scale: float
    # Further factor of the pyramids that are not rectified, where others are.
    unrectified_scale: float
    eps: float
    # Chains that reach each level.
    chains: tuple[int, ...]
    # Branches whose last layer reads each level.
    branches_ended: tuple[int, ...]
    # Rows that are normalised at each level, the rectified sums last.
    rows: tuple[int, ...]


def equal_values(size: int, value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a vector of equal values. Shape: -> (size,)"""
    return torch.full((size,), value, dtype=dtype, device=device)


def join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along axis 1; a single tensor is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def join_maps(maps: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return affine maps of one input as one. Shape: of (G, out, C), (G, out) -> (G, all out, C), (G, all out)"""
    return join([weight for weight, _ in maps]), join([bias for _, bias in maps])


def _join_tensors(
    sizes: ChainSizes,
    tensors: Sequence[Tensor],
    like: Tensor,
    levels: Sequence[Tensor],
) -> Tensor:
    """Return all tensors of pyramids as one row for each group, those of `levels` after the first weights."""
    first = sizes.chains[0]
    norms = sum(sizes.chains) + sizes.rectified
    parts = [*tensors[:first], *levels, *tensors[first:-norms]]
    # by a variance of 0 and a scale that makes up for it, all sums are scaled at once
    if sizes.unrectified:
        scale = sizes.unrectified_scale * sizes.eps**0.5
        parts.append(
            constant(equal_values, like, sizes.groups * sizes.unrectified, scale, like.dtype)
        )
    parts += tensors[-norms:]
    if sizes.groups > 1:
        rows = [part.reshape(sizes.groups, -1) for part in parts]
        return torch.cat(rows, 1).to(like.dtype)
    flat = [part if part.ndim == 1 else part.reshape(-1) for part in parts]
    return torch.cat(flat).unsqueeze(0).to(like.dtype)


class _Cursor:
    """Takes one view after another from joined tensors."""

    def __init__(self, row: Tensor) -> None:
        self.row = row
        self.position = 0

    def take(self, *shape: int) -> Tensor:
        """Return the next numbers as a view of this shape."""
        start = self.position
        self.position += math.prod(shape)
        return self.row[:, start : self.position].view(self.row.shape[0], *shape)


class ChainTensors:
    """Views of all tensors of pyramids, which one operation joins; with `levels`, the rows of the deeper levels too.

    Shape: z (G, R, C); matrices (G, chains, rows, columns); vectors (G, chains, rows) or (G, R)
    """

    def __init__(
        self,
        sizes: ChainSizes,
        tensors: Sequence[Tensor],
        like: Tensor,
        levels: Sequence[Tensor] | None = None,
    ) -> None:
        N = sizes.pyramids
        C = sizes.reads
        out = sizes.out
        skips = N * out if sizes.skip else 0
        rows = sizes.rows[0] if levels is None else sum(sizes.rows)
        units = list(zip(sizes.chains, sizes.widths, strict=True))
        cursor = _Cursor(_join_tensors(sizes, tensors, like, levels or ()))

        self.sizes = sizes
        self.zeros = constant(
            equal_values, like, sizes.groups * (sum(sizes.rows) + N * out), 0.0, like.dtype
        )
        self.z = cursor.take(rows, C)
        self.skip = cursor.take(skips, C)
        # the matrices that multiply the mean
        self.read = cursor.row[:, : cursor.position].view(sizes.groups, -1, C)
        self.inner = []
        for (_, before), unit in pairwise(units):
            self.inner.append(cursor.take(*unit, before))
        self.last_layers = []
        for num_branches, width in zip(sizes.branches_ended, sizes.widths, strict=True):
            self.last_layers.append([cursor.take(N, out, width) for _ in range(num_branches)])

        self.read_biases = cursor.take(sizes.rows[0] + skips)
        self.inner_biases = [cursor.take(*unit) for unit in units[1:]]
        self.last_biases = cursor.take(sum(sizes.branches_ended), N * out)
        self.scales = cursor.take(sum(sizes.rows) + sizes.unrectified)
        self.shifts = [cursor.take(*unit) for unit in units]
        self.rectified_shift = cursor.take(sizes.rectified * out)

    def take_zeros(self, *shape: int) -> Tensor:
        """Return zeros of a shape, which must not be written to."""
        return self.zeros[: math.prod(shape)].view(shape)

    def branch(self, number: int) -> slice:
        """Return the chains of a branch, of those that reach a level: one of each pyramid."""
        N = self.sizes.pyramids
        return slice(number * N, (number + 1) * N)

    def deeper(self, level: int) -> slice:
        """Return the chains that go on to the next level, of those that reach this one."""
        return slice(self.sizes.branches_ended[level] * self.sizes.pyramids, None)
