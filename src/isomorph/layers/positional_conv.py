"""A convolution whose taps wander and soften: attention by position alone, linear in the number of positions."""

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from isomorph.layers.positional_attention import compute_dtype
from isomorph.layers.tap_heads import PositionHeads


@register_notrace_module
class PositionalConv2d(PositionHeads):
    """A convolution whose taps can move and widen: self-attention by position alone, with a filter for each head.

        y = sum_h P_h x weight_h + bias,    P_h = softmax(-locality_h |delta - centre_h|^2)

    It is `GPSA2d` with all gates at 1 and without its values, which the filters contain. P_h is separable in rows and
    columns, and the same for every image: no map is formed, and cost is linear in the number of positions. With high
    localities it is a convolution, at the cost of one. Arguments as in `GPSA2d`; with `groups` equal to the number of
    channels, it is a depthwise convolution with soft taps.

    Shape: x (B, C, H, W) -> (B, C_out, Hq, Wq), sizes as nn.Conv2d
    Source: T-CNN eq. 4 without its content attention
    Raises: ValueError for an even or non-positive kernel size, groups that do not divide the channels, or a feature map
        smaller than the window.

    Example:
        >>> layer = iso.layers.PositionalConv2d(8, 16, kernel_size=3, padding=1)
        >>> layer(torch.randn(2, 8, 6, 6)).shape
        torch.Size([2, 16, 6, 6])
        >>> layer.set_gating(locality=30.0)  # so local that it is a convolution
        >>> layer.to_conv()
        Conv2d(8, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        bias: bool = True,
        groups: int = 1,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias, groups)
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        self.centre_on_taps()
        self.set_gating(locality=1.0)

    @property
    def position_share(self) -> Tensor:
        """Share of position attention in every head: 1. Shape: -> (nh,)"""
        return torch.ones_like(self.raw_locality)

    def forward(self, x: Tensor) -> Tensor:
        self.check_map(x)
        return self.with_bias(self.position_taps(x.to(compute_dtype(x))))

    def attention(self, x: Tensor, query: int | None = None) -> Tensor:
        """Return the attention map over the zero-padded keys, the same for every image, or the row of one query.

        Shape: x (B, C, H, W) -> (B, nh, Nq, (H + 2 pad) (W + 2 pad))
        """
        return self.position_attention(x, query).to(x.dtype).expand(x.shape[0], -1, -1, -1)
