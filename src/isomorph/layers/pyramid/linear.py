"""A linear layer trained as a pyramid of Linear + BatchNorm branches, and computed as one linear layer.

    y = Rectify(Linear(x) + sum_n f_n(x)),    f_n = n x (Linear + BatchNorm), Linear

The tokens pass through one linear layer in training too (`closed_form.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.pyramid.base import Parallel, Pyramid


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
    others in eval mode, or with `form="branches"`, every layer runs on all tokens, one after the other, as the paper
    trains: the same function and state.

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


class JointPyramid(Parallel):
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
                f"the parts of a JointPyramid have input widths {sorted(widths)}; give parts of one width",
            )
        (self.in_features,) = widths
        self.pyramids = nn.ModuleList(pyramids)

    @property
    def parts(self) -> list[Any]:
        """The pyramids and linear layers, in order."""
        return list(self.pyramids._modules.values())

    def run_branches(self, x: Tensor) -> Tensor:
        """Run the parts one after the other. Shape: as `forward`"""
        return torch.cat([part(x) for part in self.parts], -1)
