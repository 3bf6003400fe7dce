"""A linear layer trained as a pyramid of Linear + BatchNorm branches, and computed as one linear layer.

    y = Rectify(Linear(x) + sum_n f_n(x)),    f_n = n x (Linear + BatchNorm), Linear

The tokens pass through one linear layer in training too: given the mean and covariance of the batch, the whole pyramid
is one affine map (`affine_chain.py`) with the same output, gradients and running statistics.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.pyramid.affine_chain import matvec, weight_matrix
from isomorph.layers.pyramid.base import Pyramid, Rectify, collapse_pyramids
from isomorph.layers.pyramid.moments import (
    Moments,
    autocast_dtype,
    cast_clamped,
    disable_autocast,
    measure_moments,
    sync_group,
)


class PyramidLinear(Pyramid):
    """A linear layer with extra branches during training, which fuse to one nn.Linear for inference.

    The extra parameters and BatchNorms make training easier; the trained model costs the same as one with a plain
    linear layer.

        y = Rectify(Linear(x) + sum_n f_n(x)),    f_n = (Linear + BatchNorm) units, then a Linear

    `layout` names the branches: P-WNS is a pyramid of N branches of depth 1 to N with a skip Linear, P-WN the same
    without the skip, R-DLWNS and R-DLWN have N branches of depth L, naive-WN has N branches of one unit without a last
    Linear. `rectify` keeps the scale of the sum: "batchnorm" (for queries and keys), "rescale" by 1 /
    sqrt(`rescale_by`), by default N, or "none". `affine`: whether the BatchNorms have weights. BatchNorm treats every
    axis but the last as batch.

    Shape: x (*, C) -> (*, out)
    Source: TDRL eq. 6 and 7; differs: computed in closed form, exactly
    Raises: UserError for an unknown layout or rectification, or an input of another width; ValueError when training on
    a single token.

    Example:
        >>> layer = iso.layers.PyramidLinear(64, 128, layout="P-W2S")
        >>> x = torch.randn(2, 10, 64)
        >>> layer(x).shape  # in train mode this updates the BatchNorm statistics
        torch.Size([2, 10, 128])
        >>> linear = layer.eval().fuse()
        >>> linear
        Linear(in_features=64, out_features=128, bias=True)
        >>> torch.allclose(linear(x), layer(x), atol=1e-4)
        True
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

    def zero_mean(self) -> Tensor:
        """Return a mean of zeros for the input. Shape: -> (C,)"""
        weight = next(self.parameters())
        return weight.new_zeros(self.in_features, dtype=torch.promote_types(weight.dtype, torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return _apply_jointly([self], x)

    @torch.no_grad()
    def fuse(self) -> nn.Linear:
        """Return one nn.Linear that computes the same function, fused in float64. Raises: UserError in train mode."""
        weight, bias = self.collapse_in_float64()
        linear = nn.Linear(self.in_features, self.out_features).to(next(self.parameters()))
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
        return linear


@register_notrace_module
class JointPyramid(nn.Module):
    """Several pyramids that read the same input, run as one layer: the joint qkv projection of attention, for example.

    y = [pyramid_1(x), pyramid_2(x), ...], concatenated. The moments of the batch are measured once and the tokens pass
    through one linear layer, which is faster than separate pyramids. Parts may be plain nn.Linear layers: with a
    pyramid for the values only, [Linear, Linear, PyramidLinear].

    Shape: x (*, C) -> (*, sum of out)
    Raises: UserError if the parts have different input widths.

    Example:
        >>> qkv = iso.layers.JointPyramid([iso.layers.PyramidLinear(64, 64) for _ in range(3)])
        >>> qkv(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 192])
        >>> qkv.eval().fuse()
        Linear(in_features=64, out_features=192, bias=True)
    """

    def __init__(self, pyramids: Sequence[PyramidLinear | nn.Linear]) -> None:
        super().__init__()
        widths = {part.in_features for part in pyramids}
        if len(widths) != 1:
            raise UserError(
                f"the parts of a JointPyramid have the input widths {sorted(widths)}; give parts of one width"
            )
        self.pyramids = nn.ModuleList(pyramids)

    @property
    def weight(self) -> Tensor:
        """The weight of the layer that `fuse` returns, with running statistics; networks read its dtype and device."""
        return torch.cat([part.weight for part in self.pyramids])  # type: ignore[misc]

    @property
    def bias(self) -> Tensor:
        """The bias of the layer that `fuse` returns, with running statistics."""
        return _join_biases(list(self.pyramids))

    def forward(self, x: Tensor) -> Tensor:
        return _apply_jointly(list(self.pyramids), x)  # type: ignore[arg-type]

    @torch.no_grad()
    def fuse(self) -> nn.Linear:
        """Return one nn.Linear with the outputs in order. Raises: UserError in train mode."""
        fused: list[Any] = [part.fuse() if isinstance(part, PyramidLinear) else part for part in self.pyramids]
        joint = nn.Linear(fused[0].in_features, sum(linear.out_features for linear in fused)).to(fused[0].weight)
        joint.weight.copy_(torch.cat([linear.weight for linear in fused]))
        joint.bias.copy_(_join_biases(fused))
        return joint


def _join_biases(parts: Sequence[Any]) -> Tensor:
    """Return the biases of linear layers in order, zeros for a layer without."""
    zeros = (part.weight.new_zeros(part.out_features) for part in parts)
    return torch.cat([zero if part.bias is None else part.bias for part, zero in zip(parts, zeros, strict=True)])


def _apply_jointly(parts: list[PyramidLinear | nn.Linear], x: Tensor) -> Tensor:
    """Apply pyramids and linear layers to one input as one linear layer, measuring the moments once.

    Shape: x (*, C) -> (*, sum of out)
    """
    width = parts[0].in_features
    if x.shape[-1] != width:
        raise UserError(f"the input has shape {tuple(x.shape)}; the pyramid needs {width} features in the last axis")
    pyramids = [part for part in parts if isinstance(part, PyramidLinear)]
    moments: Moments | None = None
    if any(pyramid.needs_moments for pyramid in pyramids):
        moments = measure_moments(x, None, sync_group(pyramids[0]))
        x = moments.source
    with disable_autocast(x.device):
        maps = iter(collapse_pyramids(pyramids, moments) if pyramids else ())
        pairs = [next(maps) if isinstance(part, PyramidLinear) else _linear_map(part, moments) for part in parts]
        weight, bias = pairs[0] if len(parts) == 1 else (torch.cat(each) for each in zip(*pairs, strict=True))
    dtype = autocast_dtype(x)
    return F.linear(x, cast_clamped(weight, dtype), bias.to(dtype))


def _linear_map(part: nn.Linear, moments: Moments | None) -> tuple[Tensor, Tensor]:
    """Return a linear layer as A and c of A x + c, where the mean is subtracted from x if the moments are so.

    Shape: -> (out, C), (out,)
    """
    weight = weight_matrix(part)
    centred = moments is not None and moments.offset is None
    bias = matvec(weight, moments.mean) if centred else weight.new_zeros(part.out_features)  # type: ignore[union-attr]
    return weight, bias if part.bias is None else bias + part.bias
