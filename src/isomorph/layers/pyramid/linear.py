"""A linear layer trained as a pyramid of Linear + BatchNorm branches, and computed as one linear layer.

    y = Rectify(Linear(x) + sum_n f_n(x)),    f_n = n x (Linear + BatchNorm), Linear

The tokens pass through one linear layer in training too (`closed_form.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.eval_mode import KeepsInEval
from isomorph.layers.pyramid.base import Pyramid, Rectify, is_altered, set_affine
from isomorph.layers.pyramid.batchnorm import weight_matrix
from isomorph.layers.pyramid.closed_form import collapse
from isomorph.layers.pyramid.moments import autocast_dtype, cast_clamped, disable_autocast, measure_moments, sync_group


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

    Where layers inside are not plain (adapters, hooks, parametrizations), or some BatchNorms are in train mode and
    others in eval mode, the layers run one after the other, as in `BranchedLinear`.

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

    def forward(self, x: Tensor) -> Tensor:
        return _apply_jointly(self, [self], x)

    fuse = Pyramid.fuse


class BranchedLinear(PyramidLinear):
    """A `PyramidLinear` that runs every branch on all tokens, as the paper does: the same function and state.

    Shape: x (*, C) -> (*, out)
    Source: TDRL eq. 6 and 7

    Example:
        >>> branched = iso.layers.BranchedLinear(8, 8)
        >>> branched.load_state_dict(iso.layers.PyramidLinear(8, 8).state_dict())
        <All keys matched successfully>
    """

    def forward(self, x: Tensor) -> Tensor:
        return _run_branches(self, x)

    fuse = Pyramid.fuse


@register_notrace_module
class JointPyramid(KeepsInEval):
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
        return _join_biases(self.pyramids)

    def forward(self, x: Tensor) -> Tensor:
        return _apply_jointly(self, list(self.pyramids._modules.values()), x)

    @torch.no_grad()
    def fuse(self) -> nn.Linear:
        """Return one nn.Linear with the outputs in order. Raises: UserError in train mode."""
        fused: list[Any] = [part.fuse() if isinstance(part, PyramidLinear) else part for part in self.pyramids]
        joint = nn.Linear(fused[0].in_features, sum(linear.out_features for linear in fused)).to(fused[0].weight)
        set_affine(joint, torch.cat([linear.weight for linear in fused]), _join_biases(fused))
        return joint


def _join_biases(parts: Any) -> Tensor:
    """Return the biases of linear layers in order, zeros for a layer without."""
    zeros = (part.weight.new_zeros(part.out_features) for part in parts)
    return torch.cat([zero if part.bias is None else part.bias for part, zero in zip(parts, zeros, strict=True)])


def _run_branches(part: PyramidLinear, x: Tensor) -> Tensor:
    return part.run_branches(x.flatten(0, -2)).view(*x.shape[:-1], part.out_features)


def _apply_jointly(layer: Any, parts: list[Any], x: Tensor) -> Tensor:
    """Apply pyramids and linear layers to one input as one linear layer, or one by one if they cannot be.

    Shape: x (*, C) -> (*, sum of out)
    """
    width = parts[0].in_features
    if x.shape[-1] != width:
        raise UserError(f"the input has shape {tuple(x.shape)}; the pyramid needs {width} features in the last axis")
    forms = [part.parts() if isinstance(part, PyramidLinear) else ("linear", None) for part in parts]
    kinds = {kind for kind, _ in forms if kind != "linear"}
    apart = len(parts) > 1 and any(type(p) not in (PyramidLinear, nn.Linear) or is_altered(p) for p in parts)
    if apart or len(kinds) > 1 or "branches" in kinds:
        return _run_branches(parts[0], x) if len(parts) == 1 else torch.cat([part(x) for part in parts], -1)
    if "batch" not in kinds:
        read = (t for p in parts for t in (p.own_tensors() if isinstance(p, Pyramid) else p._parameters.values()))

        def folded(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            weight, bias = _fold_jointly(parts)
            return cast_clamped(weight, dtype), bias.to(dtype)

        return F.linear(x, *layer.keep(tuple(t for t in read if t is not None), folded, autocast_dtype(x)))
    moments = measure_moments(x, None, sync_group(layer))
    with disable_autocast(x.device):
        weight, bias = collapse([chains for _, chains in forms if chains is not None], moments)
        weight, bias = weight.squeeze(0), bias.squeeze(0)
        if len(kinds) < len({kind for kind, _ in forms}):  # some parts are linear
            sizes = [part.out_features for part in parts if type(part) is PyramidLinear]
            maps, mean = zip(weight.split(sizes), bias.split(sizes), strict=True), moments.mean[0]
            pairs = [next(maps) if isinstance(part, Pyramid) else _linear_map(part, mean) for part in parts]
            weight, bias = (torch.cat(each) for each in zip(*pairs, strict=True))
        dtype = moments.source.dtype
        return F.linear(moments.source, cast_clamped(weight, dtype), bias.to(dtype))


def _fold_jointly(parts: Sequence[PyramidLinear | nn.Linear]) -> tuple[Tensor, Tensor]:
    """Return parts in eval mode as one linear layer. Shape: -> (out, C), (out,)"""
    pairs = [part.fold() if isinstance(part, PyramidLinear) else _linear_map(part) for part in parts]
    weights, biases = zip(*((weight.flatten(0, -2), bias.flatten()) for weight, bias in pairs), strict=True)
    return torch.cat(weights), torch.cat(biases)


def _linear_map(part: nn.Linear, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return a linear layer as A and c of A x + c, of x less a constant mean. Shape: -> (out, C), (out,)"""
    weight = weight_matrix(part)[0]
    if mean is None:
        return weight, weight.new_zeros(len(weight)) if part.bias is None else part.bias.to(weight.dtype)
    bias = weight.mv(mean.detach())
    return weight, bias if part.bias is None else bias + part.bias
