"""A convolution that ends in a BatchNorm, for fine-tuning a network whose norms were merged."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from isomorph.errors import UserError
from isomorph.layers.grid import batched
from isomorph.layers.pyramid.batchnorm import NEEDS_EVAL


class ConvNorm(nn.Conv2d):
    """A convolution that ends in a BatchNorm, which starts as the identity: mean 0, variance 1, weight sqrt(1 + eps).

    y = norm(conv(x))

    It has the attributes and the names of the convolution that it is made from, and the norm as a part `norm`, which
    has its bias. `fuse` merges the norm; `iso.recalibrate` gives it the statistics of data and keeps the function.

    Shape: as nn.Conv2d
    Raises: UserError from `fuse` in train mode.

    Example:
        >>> conv, x = torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 8, 8)
        >>> layer = iso.layers.ConvNorm.from_conv(conv).eval()
        >>> bool((layer(x) - conv(x)).abs().max() < 1e-5), type(layer.fuse()).__name__
        (True, 'Conv2d')
    """

    norm: nn.BatchNorm2d

    @staticmethod
    def from_conv(conv: Any, eps: float = 1e-5) -> "ConvNorm":
        """Return a convolution with a norm that is the identity; it is copied."""
        new = copy.deepcopy(conv)
        norm = nn.BatchNorm2d(
            conv.out_channels, eps, device=conv.weight.device, dtype=conv.weight.dtype
        )
        with torch.no_grad():
            norm.weight.fill_((1 + eps) ** 0.5)
            if conv.bias is not None:
                norm.bias.copy_(conv.bias)
        new.__class__ = ConvNorm
        new.bias = None
        new.norm = norm.requires_grad_(conv.weight.requires_grad).train(conv.training)
        return new

    @batched
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))

    def fuse(self) -> nn.Conv2d:
        """Return the convolution with the norm's running statistics merged into it, computed in float64."""
        if self.training or self.norm.training:
            raise UserError(NEEDS_EVAL)
        conv: Any = copy.deepcopy(self).double()
        conv.__class__ = nn.Conv2d
        norm = conv._modules.pop("norm")
        weight = next(self.parameters())
        return fuse_conv_bn_eval(conv, norm).to(weight.dtype).requires_grad_(weight.requires_grad)
