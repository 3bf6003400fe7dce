"""Feature pyramids for detection: from the last map of a plain network, or from the stages of a hierarchical one."""

from collections.abc import Sequence

import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation, FeaturePyramidNetwork


class SimpleFeaturePyramid(nn.Module):
    """Maps at 4, 2, 1 and 1/2 times the resolution of a single map, and one at 1/4 (ViTDet).

    The map is enlarged by transposed convolutions or pooled, and each result passes a 1 x 1 and a 3 x 3 convolution
    with LayerNorm over the channels. The coarsest map is the one before it, subsampled.

    Shape: x (B, in_channels, H, W), both even -> five of (B, out_channels, 4 H, 4 W) to (B, out_channels, H / 4, W / 4)
    Source: ViTDet (Li et al., 2022), section 3
    """

    def __init__(self, in_channels: int, out_channels: int = 256) -> None:
        super().__init__()
        half, quarter = in_channels // 2, in_channels // 4
        enlarged = nn.Sequential(
            nn.ConvTranspose2d(in_channels, half, 2, 2),
            LayerNorm2d(half),
            nn.GELU(),
            nn.ConvTranspose2d(half, quarter, 2, 2),
        )
        resize = [enlarged, nn.ConvTranspose2d(in_channels, half, 2, 2), nn.Identity(), nn.MaxPool2d(2)]
        widths = [quarter, half, in_channels, in_channels]
        self.levels = nn.ModuleList(
            nn.Sequential(step, _conv(width, out_channels, 1), _conv(out_channels, out_channels, 3))
            for step, width in zip(resize, widths, strict=True)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = [level(x) for level in self.levels]
        return [*maps, F.max_pool2d(maps[-1], 1, 2)]


class StagePyramid(nn.Module):
    """Feature pyramid network over the stages of a hierarchical network, and one more map at half the resolution.

    Shape: n of (B, in_channels[i], H_i, W_i) -> n + 1 of (B, out_channels, H_i, W_i)
    Source: FPN (Lin et al., 2017), torchvision's, with LayerNorm over the channels after each convolution
    """

    def __init__(self, in_channels: Sequence[int], out_channels: int = 256) -> None:
        super().__init__()
        self.network = FeaturePyramidNetwork(list(in_channels), out_channels, norm_layer=LayerNorm2d)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        merged = list(self.network({str(i): x for i, x in enumerate(maps)}).values())
        return [*merged, F.max_pool2d(merged[-1], 1, 2)]


def _conv(in_channels: int, out_channels: int, kernel_size: int) -> Conv2dNormActivation:
    """Return a convolution without bias, and LayerNorm over its channels."""
    return Conv2dNormActivation(
        in_channels, out_channels, kernel_size, norm_layer=LayerNorm2d, activation_layer=None, bias=False
    )
