"""A convolution trained as a pyramid whose branches begin with it: patch embeddings, 1x1 and k x k convolutions."""

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.moments import Moments, Window, full_precision, measure, product_dtype, within_range
from isomorph.layers.pyramid import Pyramid, Rectify


class PyramidConv2d(Pyramid):
    """A convolution as a pyramid of branches that fuses to one nn.Conv2d.

    y = Rectify(Conv(x) + sum_n f_n(x)), f_n of Conv + BatchNorm, further 1x1 Conv + BatchNorm units, a last 1x1 Conv.
    A convolution is a linear layer on the patches it reads, and is trained in closed form as such. With `groups` every
    layer has them, so that a depthwise convolution fuses to a depthwise one.

    The first unit is as wide as the input, or as the rank of the map (min(C k k, out)) where that is more: the patch
    embedding of an image does not squeeze 768 numbers through 3.

    Shape: x (B, C, H, W) -> (B, out, H', W')
    Source: TDRL eq. 8 and appendix A.3, A.4; differs: computed in closed form, exactly
    Raises: UserError for an unknown layout or rectification, or an input of another shape; ValueError when training on
    a single patch.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 1,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        layout: str = "P-W2S",
        rectify: Rectify = "rescale",
        affine: bool = True,
        rescale_by: float | None = None,
    ) -> None:
        self.window = Window(to_2tuple(kernel_size), to_2tuple(stride), to_2tuple(padding), to_2tuple(dilation), groups)
        taps = self.window.kernel_size[0] * self.window.kernel_size[1]
        reads, gives = in_channels // groups, out_channels // groups
        first = max(reads, min(reads * taps, gives)) * groups
        super().__init__(in_channels, out_channels, first, layout, rectify, affine, rescale_by)
        # under nn.Conv2d's names too: networks read them
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride, self.padding, self.dilation, self.groups = self.window

    def make_linear(self, in_features: int, out_features: int, reads_input: bool) -> nn.Conv2d:
        kernel_size, stride, padding, dilation, groups = self.window
        if reads_input:
            return nn.Conv2d(in_features, out_features, kernel_size, stride, padding, dilation, groups)
        return nn.Conv2d(in_features, out_features, 1, groups=groups)

    def make_norm(self, features: int, affine: bool) -> nn.BatchNorm2d:
        return nn.BatchNorm2d(features, affine=affine)

    def origin(self) -> Tensor:
        weight = next(self.parameters())
        groups, taps = self.window.groups, self.window.kernel_size[0] * self.window.kernel_size[1]
        reads = self.in_features // groups * taps
        shape = (reads,) if groups == 1 else (groups, reads)
        return weight.new_zeros(shape, dtype=torch.promote_types(weight.dtype, torch.float32))

    def as_filters(self, weight: Tensor) -> Tensor:
        """Shape: (out, C k k) or (G, out / G, C k k / G) -> (out, C / G, k, k)"""
        return weight.reshape(self.out_features, self.in_features // self.window.groups, *self.window.kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.in_features:
            raise UserError(f"the pyramid reads (B, {self.in_features}, H, W), the input has shape {tuple(x.shape)}")
        moments: Moments | None = None
        if self.needs_moments:
            moments = measure(x, self.window, self.group)
            x = moments.source
        with full_precision(x.device):
            weight, bias = self.collapse(moments)
        dtype = product_dtype(x)
        return F.conv2d(x, within_range(self.as_filters(weight), dtype), bias.flatten().to(dtype), *self.window[1:])

    @torch.no_grad()
    def fuse(self) -> nn.Conv2d:
        """The same function as one nn.Conv2d, computed in float64. Raises: UserError in train mode."""
        weight, bias = self.collapse_exactly()
        conv = self.make_linear(self.in_features, self.out_features, reads_input=True).to(next(self.parameters()))
        conv.weight.copy_(self.as_filters(weight))
        conv.bias.copy_(bias.flatten())  # type: ignore[union-attr]
        return conv

    def extra_repr(self) -> str:
        kernel_size, stride, padding, dilation, groups = self.window
        window = f"kernel_size={kernel_size}, stride={stride}, padding={padding}, dilation={dilation}, groups={groups}"
        return f"{super().extra_repr()}, {window}"
