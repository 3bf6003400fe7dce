"""A linear layer trained as a pyramid of Linear + BatchNorm branches, run as one linear layer on the tokens.

    y = Rectify(Linear(x) + sum_n f_n(x)),    f_n = n x (Linear + BatchNorm), Linear

The tokens pass through one linear layer in training too: given the mean and covariance of the batch the whole pyramid
is one affine map (layers/affine_chain.py), with the same output, gradients and running statistics.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.affine_chain import matrix, times
from isomorph.layers.moments import Moments, full_precision, measure, product_dtype, within_range
from isomorph.layers.pyramid import Pyramid, Rectify


class PyramidLinear(Pyramid):
    """A linear layer with far more weights to train than to run: a pyramid of branches that fuses to one nn.Linear.

    y = Rectify(Linear(x) + sum_n f_n(x)), f_n of as many Linear + BatchNorm units as `layout` says, then a Linear.

    `layout`: P-WNS, P-WN, R-DLWNS, R-DLWN or naive-WN. `rectify`: batchnorm on the sum (queries and keys), rescale by
    1 / sqrt(`rescale_by`), which is by default N, or none. `affine`: whether BatchNorm has weights. To BatchNorm, every
    axis but the last is batch.

    Shape: x (*, C) -> (*, out)
    Source: TDRL eq. 6 and 7; differs: computed in closed form, exactly
    Raises: UserError for an unknown layout or rectification, or an input of another width; ValueError when training on
    a single token.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        layout: str = "P-W2S",
        rectify: Rectify = "rescale",
        affine: bool = True,
        rescale_by: float | None = None,
    ) -> None:
        super().__init__(in_features, out_features, in_features, layout, rectify, affine, rescale_by)

    def make_linear(self, in_features: int, out_features: int, reads_input: bool) -> nn.Linear:
        return nn.Linear(in_features, out_features)

    def make_norm(self, features: int, affine: bool) -> nn.BatchNorm1d:
        return nn.BatchNorm1d(features, affine=affine)

    def origin(self) -> Tensor:
        weight = next(self.parameters())
        return weight.new_zeros(self.in_features, dtype=torch.promote_types(weight.dtype, torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return _run_together([self], x)

    @torch.no_grad()
    def fuse(self) -> nn.Linear:
        """The same function as one nn.Linear, computed in float64. Raises: UserError in train mode."""
        weight, bias = self.collapse_exactly()
        linear = nn.Linear(self.in_features, self.out_features).to(next(self.parameters()))
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
        return linear


@register_notrace_module
class JointPyramid(nn.Module):
    """Pyramids that read the same input, as one layer: moments measured once, one linear layer on the tokens.

    y = [pyramid_1(x), pyramid_2(x), ...], the queries, keys and values of a joint qkv projection for example. Parts
    that stay plain are nn.Linear: with pyramids for the values alone, [Linear, Linear, PyramidLinear].

    Shape: x (*, C) -> (*, sum of out)
    Raises: UserError when the parts read different widths.
    """

    def __init__(self, pyramids: Sequence[PyramidLinear | nn.Linear]) -> None:
        super().__init__()
        widths = {part.in_features for part in pyramids}
        if len(widths) != 1:
            raise UserError(f"joint pyramids must read one width, these read {sorted(widths)}")
        self.pyramids = nn.ModuleList(pyramids)

    def forward(self, x: Tensor) -> Tensor:
        return _run_together(list(self.pyramids), x)  # type: ignore[arg-type]

    @torch.no_grad()
    def fuse(self) -> nn.Linear:
        """The same function as one nn.Linear, outputs in order. Raises: UserError in train mode."""
        fused: list[Any] = [part.fuse() if isinstance(part, PyramidLinear) else part for part in self.pyramids]
        joint = nn.Linear(fused[0].in_features, sum(linear.out_features for linear in fused)).to(fused[0].weight)
        joint.weight.copy_(torch.cat([linear.weight for linear in fused]))
        zeros = joint.bias.new_zeros(joint.out_features)
        biases = [zeros[: part.out_features] if part.bias is None else part.bias for part in fused]
        joint.bias.copy_(torch.cat(biases))
        return joint


def _run_together(parts: list[PyramidLinear | nn.Linear], x: Tensor) -> Tensor:
    """Pyramids and linear layers over one input: moments once, each part as an affine map, one linear layer.

    Shape: x (*, C) -> (*, sum of out)
    """
    width = parts[0].in_features
    if x.shape[-1] != width:
        raise UserError(f"the pyramid reads {width} features, the input has shape {tuple(x.shape)}")
    pyramids = [part for part in parts if isinstance(part, PyramidLinear)]
    moments: Moments | None = None
    if any(pyramid.needs_moments for pyramid in pyramids):
        moments = measure(x, group=pyramids[0].group)
        x = moments.source
    with full_precision(x.device):
        weights, biases = zip(*(_affine_map(part, moments) for part in parts), strict=True)
        weight, bias = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (weights, biases))
    dtype = product_dtype(x)
    return F.linear(x, within_range(weight, dtype), bias.to(dtype))


def _affine_map(part: PyramidLinear | nn.Linear, moments: Moments | None) -> tuple[Tensor, Tensor]:
    """A part as A and c of A x + c, x the input, or the input less its mean where moments are given.

    Shape: -> (out, C), (out,)
    """
    if isinstance(part, PyramidLinear):
        return part.collapse(moments)
    weight = matrix(part)
    centre = weight.new_zeros(part.out_features) if moments is None else times(weight, moments.mean)
    return weight, centre if part.bias is None else centre + part.bias
