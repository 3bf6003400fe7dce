"""What every pyramid is: branches of different depth over one input, summed and rectified, one affine map in all."""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import UserError
from isomorph.layers.affine_chain import collapse_chain, normalise, times, uses_batch
from isomorph.layers.moments import Moments, row_variance

Rectify = Literal["batchnorm", "rescale", "none"]

LARGEST = 32
"""Branches, and units in a branch, that a layout may have; TDRL goes to 8."""


@dataclass(frozen=True)
class Layout:
    """Branches of a pyramid: (Linear + BatchNorm) units in each, a skip Linear or none, a last Linear or none."""

    depths: tuple[int, ...]
    skip: bool
    last: bool = True

    @classmethod
    def parse(cls, name: str) -> "Layout":
        """P-W2S (pyramid of 2, skip), P-W2, R-D2W1S (1 branch of depth 2, skip), R-D2W1, naive-W8 (8 Linear + norm).

        Raises: UserError for any other name.
        """
        given = name if isinstance(name, str) else type(name).__name__
        found = re.fullmatch(r"(?:(P)|R-D([0-9]{1,2})|(naive))-?W([0-9]{1,2})(S?)", given)
        width, depth = (int(found[4]), int(found[2] or 1)) if found else (0, 0)
        if found and 0 < width <= LARGEST and 0 < depth <= LARGEST and not (found[3] and found[5]):
            depths = tuple(range(1, width + 1)) if found[1] else (depth,) * width
            return cls(depths, skip=bool(found[5]), last=not found[3])
        raise UserError(
            f"layout {given[:40]!r} is unknown; write P-W2S, P-W2, R-D2W1S, R-D2W1 or naive-W8 (numbers from 1 to "
            f"{LARGEST})"
        )

    def widths(self, first: int, out_features: int, depth: int) -> list[int]:
        """Features after each linear layer of a branch: the rule that gives both published counts."""
        if not self.last:
            return [out_features] * depth
        return [first, *[max(first, out_features)] * (depth - 1), out_features]


@register_notrace_module
class Pyramid(nn.Module):
    """Branches over one input, summed and rectified: the base of its linear and its convolutional form.

    A subclass says how a linear layer and a BatchNorm are made, and how tokens are read off its input.
    """

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
            raise UserError(f"rescale_by {rescale_by} must be above 0: the sum is divided by its square root")
        form = Layout.parse(layout)
        self.in_features, self.out_features, self.layout, self.rectify = in_features, out_features, layout, rectify
        self.rescale_by = rescale_by or float(len(form.depths))
        self.branches = nn.ModuleList(self.make_branch(form, depth, first, affine) for depth in form.depths)
        self.skip = self.make_linear(in_features, out_features, reads_input=True) if form.skip else None
        self.norm = self.make_norm(out_features, affine) if rectify == "batchnorm" else None

    def make_linear(self, in_features: int, out_features: int, reads_input: bool) -> nn.Linear | nn.Conv2d:
        raise NotImplementedError

    def make_norm(self, features: int, affine: bool) -> _BatchNorm:
        raise NotImplementedError

    def make_branch(self, form: Layout, depth: int, first: int, affine: bool) -> nn.Sequential:
        """depth x (Linear + BatchNorm), then Linear (not in the naive layout)."""
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
        """The layers of all that is summed: the branches, and the skip where there is one."""
        branches: list[list[nn.Module]] = [list(branch) for branch in self.branches]  # type: ignore[call-overload]
        return branches if self.skip is None else [*branches, [self.skip]]

    @property
    def factor(self) -> float:
        """What the sum is multiplied with."""
        return self.rescale_by**-0.5 if self.rectify == "rescale" else 1.0

    @property
    def needs_moments(self) -> bool:
        """Whether any BatchNorm in it normalises by the batch."""
        return any(map(uses_batch, self.modules()))

    @property
    def group(self) -> Any:
        """The processes that share statistics: those of SyncBatchNorm, where `convert_sync_batchnorm` has put it."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None
        norms = (m for m in self.modules() if isinstance(m, nn.SyncBatchNorm))
        return next((norm.process_group or torch.distributed.group.WORLD for norm in norms), None)

    def gather(self, moments: Moments | None) -> tuple[Tensor, Tensor]:
        """The sum of the branches before BatchNorm rectifies it, as A and c. Shape: -> (G, out, C), (G, out)"""
        start = self.origin() if moments is None else moments.mean
        weights, centres = zip(*(collapse_chain(layers, moments, start) for layers in self.chains), strict=True)
        weight = sum(weights[1:], weights[0]) * self.factor
        # one by one, or biases would share the memory of their gradients
        return weight, sum(c * self.factor for c in centres)

    def norm_inputs(self, moments: Moments) -> Iterator[tuple[_BatchNorm, Tensor, Tensor]]:
        """Each BatchNorm, in eval mode, with mean and variance of what it receives. Shape: (G, out), (G, out)"""
        for layers in self.chains:
            for i, layer in enumerate(layers):
                if isinstance(layer, _BatchNorm):
                    weight, centre = collapse_chain(layers[:i], moments, moments.mean)
                    yield layer, centre, row_variance(weight, moments.covariance)
        if self.norm is not None:
            weight, centre = self.gather(moments)
            yield self.norm, centre, row_variance(weight, moments.covariance)

    def collapse(self, moments: Moments | None) -> tuple[Tensor, Tensor]:
        """The pyramid on a batch with these moments (None: in eval mode) as one affine map of their source.

        Shape: -> (out, C), (out,), with a leading group axis where there are groups
        Source: TDRL eq. 6 and 7, Fig. 1 (c); differs: in training too
        """
        weight, centre = self.gather(moments)
        if self.norm is not None:
            scale, centre = normalise(self.norm, weight, centre, moments)
            weight = weight * scale.unsqueeze(-1)
        offset = None if moments is None else moments.offset
        return weight, centre if offset is None else centre - times(weight, offset)

    @torch.no_grad()
    def collapse_exactly(self) -> tuple[Tensor, Tensor]:
        """Weight and bias in eval mode, computed in float64. Raises: UserError in train mode."""
        if self.training or self.needs_moments:
            raise UserError("fuse needs eval mode: in train mode the map depends on the batch; call .eval() first")
        return copy.deepcopy(self).double().collapse(None)

    def origin(self) -> Tensor:
        """No mean. Shape: -> (C,), or (G, C)"""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, layout={self.layout!r}, rectify={self.rectify!r}"
