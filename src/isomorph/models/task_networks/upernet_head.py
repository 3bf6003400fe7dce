"""The parts of UPerNet after its backbone: a neck for plain ViTs, the head that joins feature maps, an auxiliary head.

The head is that of the papers: segmentation-models-pytorch has another one (docs/decisions/014).

Letters: B batch, K classes, C_i channels and H_i W_i size of feature map i, finest first.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import ConvNormAct
from torch import Tensor, nn


class PlainNeck(nn.Module):
    """Turn four feature maps of a plain ViT, all of one resolution, into maps of 4, 2, 1 and 1/2 times the resolution.

    The first two are enlarged by transposed convolutions, the last is pooled.

    Shape: four of (B, C, H, W) -> (B, C, 4 H, 4 W), (B, C, 2 H, 2 W), (B, C, H, W), (B, C, H/2, W/2, rounded up)
    Source: BEiT (Bao et al., 2022), as published; differs: odd sizes are rounded up when they are halved
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        enlarge = [nn.ConvTranspose2d(channels, channels, 2, 2) for _ in range(3)]
        self.scales = nn.ModuleList(
            [
                nn.Sequential(enlarge[0], nn.BatchNorm2d(channels), nn.GELU(), enlarge[1]),
                enlarge[2],
                nn.Identity(),
                nn.MaxPool2d(2, 2, ceil_mode=True),
            ]
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        return [scale(x) for scale, x in zip(self.scales, maps, strict=True)]


def pooling_matrix(cells: int, size: int, like: Tensor) -> Tensor:
    """Return the matrix that averages `size` values in `cells` ranges: cell i covers floor(i size / cells) to
    ceil((i + 1) size / cells), as torch's adaptive pooling.

    It is computed from the size, so that an exported network takes any size. Shape: -> (cells, size)
    """
    cell = torch.arange(cells, device=like.device)[:, None]
    position = torch.arange(size, device=like.device)[None]
    start, stop = cell * size // cells, ((cell + 1) * size + cells - 1) // cells  # (cells, 1)
    inside = (position >= start) & (position < stop)
    return inside.to(like.dtype) / (stop - start).to(like.dtype)


def average_cells(x: Tensor, cells: int) -> Tensor:
    """Average a feature map in cells x cells rectangles. Shape: (B, C, H, W) -> (B, C, cells, cells)"""
    rows, columns = (pooling_matrix(cells, size, x) for size in x.shape[-2:])
    return rows @ x @ columns.mT


def resize_map(x: Tensor, size: Sequence[int]) -> Tensor:
    """Resize a map by bilinear interpolation. Shape: (B, C, H, W) -> (B, C, *size)"""
    return F.interpolate(x, (size[0], size[1]), mode="bilinear", align_corners=False)


def _init_convolutions(module: nn.Module) -> None:
    """Initialise convolutions for ReLU (He et al., 2015), and classifiers with std .01."""
    for part in module.modules():
        if isinstance(part, ConvNormAct):
            nn.init.kaiming_normal_(part.conv.weight, mode="fan_out", nonlinearity="relu")
    nn.init.normal_(module.classifier.weight, std=0.01)  # type: ignore[union-attr, arg-type]
    nn.init.zeros_(module.classifier.bias)  # type: ignore[union-attr, arg-type]


class UPerHead(nn.Module):
    """Classify every position from feature maps of several resolutions.

    The coarsest map is joined with its averages over 1, 4, 9 and 36 rectangles, which tell a position about the whole
    image. From there maps are added from coarse to fine, and all of them together are classified at the resolution of
    the finest.

    Shape: maps (B, C_i, H_i, W_i), finest first -> (B, num_classes, H_0, W_0)
    Source: UPerNet (Xiao et al., 2018) Fig. 4, with the pyramid pooling of PSPNet (Zhao et al., 2017)
    """

    def __init__(
        self,
        channels: Sequence[int],
        width: int,
        num_classes: int,
        pool_sizes: Sequence[int] = (1, 2, 3, 6),
        drop_rate: float = 0.1,
    ) -> None:
        super().__init__()
        *finer, coarsest = channels
        self.pool_sizes = tuple(pool_sizes)
        self.pooled = nn.ModuleList(ConvNormAct(coarsest, width) for _ in self.pool_sizes)
        self.context = ConvNormAct(coarsest + len(self.pool_sizes) * width, width, 3)
        self.lateral = nn.ModuleList(ConvNormAct(each, width) for each in finer)
        self.smooth = nn.ModuleList(ConvNormAct(width, width, 3) for _ in finer)
        self.join = ConvNormAct(len(channels) * width, width, 3)
        self.drop = nn.Dropout2d(drop_rate)
        self.classifier = nn.Conv2d(width, num_classes, 1)
        _init_convolutions(self)

    def add_context(self, x: Tensor) -> Tensor:
        """Join a map with its averages over rectangles. Shape: (B, C, H, W) -> (B, width, H, W)"""
        averages = [conv(average_cells(x, cells)) for conv, cells in zip(self.pooled, self.pool_sizes, strict=True)]
        return self.context(torch.cat([x, *(resize_map(each, x.shape[-2:]) for each in averages)], dim=1))

    def features(self, maps: Sequence[Tensor]) -> Tensor:
        """Return what the classifier reads. Shape: (B, C_i, H_i, W_i) each -> (B, width, H_0, W_0)"""
        added = [self.add_context(maps[-1])]  # coarse to fine
        for lateral, x in zip(reversed(self.lateral), reversed(maps[:-1]), strict=True):
            added.append(lateral(x) + resize_map(added[-1], x.shape[-2:]))
        smoothed = [conv(x) for conv, x in zip(self.smooth, reversed(added[1:]), strict=True)] + added[:1]
        return self.join(torch.cat([resize_map(x, maps[0].shape[-2:]) for x in smoothed], dim=1))

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        return self.classifier(self.drop(self.features(maps)))


class FCNHead(nn.Module):
    """Classify every position of one feature map by a 3 x 3 convolution: the auxiliary head, used in training only.

    Shape: (B, C, H, W) -> (B, num_classes, H, W)
    Source: FCN (Long et al., 2015), as published with UPerNet
    """

    def __init__(self, channels: int, width: int, num_classes: int, drop_rate: float = 0.1) -> None:
        super().__init__()
        self.conv = ConvNormAct(channels, width, 3)
        self.drop = nn.Dropout2d(drop_rate)
        self.classifier = nn.Conv2d(width, num_classes, 1)
        _init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.drop(self.conv(x)))
