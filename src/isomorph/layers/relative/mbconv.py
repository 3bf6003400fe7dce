"""Convolution blocks of CoAtNet: pre-activation inverted bottlenecks with squeeze-and-excitation, and the stem."""

import copy
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d, DropPath, LayerNorm2d, LayerNormAct2d, SqueezeExcite
from torch import Tensor, nn

from isomorph.layers.pyramid.batchnorm import fold_into


class MaxPool(nn.Module):
    """Pool 2 x 2 windows, also at odd sizes. Shape: x (B, C, H, W) -> (B, C, ceil(H / 2), ceil(W / 2))"""

    def forward(self, x: Tensor) -> Tensor:
        # the same values; torch can derive this output size if the export leaves sizes open
        if torch.compiler.is_exporting():
            return F.max_pool2d(F.pad(x, (0, 1, 0, 1), mode="replicate"), 2)
        return F.max_pool2d(x, 2, ceil_mode=True)


def make_pool(stride: int) -> nn.Module:
    """Return pooling to half the size for stride 2, the identity for stride 1."""
    return MaxPool() if stride == 2 else nn.Identity()


def make_shortcut(dim: int, dim_out: int, stride: int) -> nn.Module:
    """Return Proj(Pool(x)), without the parts that the shapes do not require: CoAtNet eq. 4 and 5."""
    pool = make_pool(stride)
    return pool if dim == dim_out else nn.Sequential(pool, nn.Conv2d(dim, dim_out, 1))


class InvertedBottleneck(nn.Module):
    """Base of `MBConv` and `LayerNormMBConv`; itself what `MBConv.fuse` returns: without norm, then GELUs.

    Shape: x (B, dim, H, W) -> (B, dim_out, ceil(H / stride), ceil(W / stride))
    Source: CoAtNet A.1, eq. 5, Table 3
    """

    norm_layer: ClassVar[Any]
    norm_act_layer: ClassVar[Any]

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        stride: int = 1,
        expand_ratio: float = 4.0,
        se_ratio: float = 0.25,
        stride_on: str = "expand",
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        if stride_on not in ("expand", "depthwise"):
            raise ValueError(f"stride_on {stride_on!r} is unknown; choose 'expand' or 'depthwise'")
        if stride not in (1, 2) or expand_ratio <= 0 or se_ratio <= 0:
            arguments = f"stride {stride}, expand_ratio {expand_ratio:g}, se_ratio {se_ratio:g}"
            raise ValueError(
                f"{arguments}: stride must be 1 or 2, expand_ratio and se_ratio above 0"
            )
        dim_out = dim_out or dim
        width = int(expand_ratio * dim_out)
        first, second = (stride, 1) if stride_on == "expand" else (1, stride)
        self.norm = self.norm_layer(dim)
        self.expand = nn.Conv2d(dim, width, 1, first, bias=False)
        self.norm1 = self.norm_act_layer(width)
        self.depthwise = nn.Conv2d(width, width, 3, second, 1, groups=width, bias=False)
        self.norm2 = self.norm_act_layer(width)
        self.se = SqueezeExcite(
            width, rd_channels=max(1, int(se_ratio * dim_out)), act_layer=nn.GELU
        )
        self.project = nn.Conv2d(width, dim_out, 1)
        self.drop_path = DropPath(drop_path)
        self.shortcut = make_shortcut(dim, dim_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.expand(self.norm(x)))  # (B, width, H, W)
        y = self.norm2(self.depthwise(y))
        return self.shortcut(x) + self.drop_path(self.project(self.se(y)))


class MBConv(InvertedBottleneck):
    """The convolution block of CoAtNet, MobileNet's inverted bottleneck with BatchNorm before each convolution.

    It mixes neighbouring positions cheaply, with a depthwise convolution, and reweights channels by what the whole
    feature map contains (squeeze-and-excitation, SE):

        y = shortcut(x) + project(SE(norm2(depthwise(norm1(expand(norm(x)))))))        (norm1 and norm2 end in GELU)

    `expand_ratio` and `se_ratio` are the widths of the block and of the SE relative to `dim_out`. `stride_on`: "expand"
    puts the stride on the first 1x1 convolution (the paper's choice), "depthwise" on the 3x3 convolution (Table 9).

    Shape: x (B, dim, H, W) -> (B, dim_out, ceil(H / stride), ceil(W / stride))
    Source: CoAtNet A.1, eq. 5, Table 3; the width of the SE is chosen to give the published model sizes
    Raises: ValueError for a stride other than 1 and 2, a ratio that is not positive, or an unknown `stride_on`.

    Example:
        >>> block = iso.layers.MBConv(dim=16, dim_out=32, stride=2)
        >>> block(torch.randn(2, 16, 9, 9)).shape
        torch.Size([2, 32, 5, 5])
        >>> fused = block.eval().fuse()  # for inference: BatchNorm folded into the convolutions
        >>> isinstance(fused.norm1, torch.nn.GELU)
        True
    """

    norm_layer = nn.BatchNorm2d
    norm_act_layer = staticmethod(partial(BatchNormAct2d, act_layer=nn.GELU))

    @torch.no_grad()
    def fuse(self) -> InvertedBottleneck:
        """Return the block in eval mode with its norms folded in float64, which saves three passes over feature maps.

        Recast layers inside are fused first; the norms stay where that gives no convolution.
        """
        block: Any = _fuse_inside(copy.deepcopy(self).double())
        if isinstance(block.expand, nn.Conv2d) and isinstance(block.depthwise, nn.Conv2d):
            block.expand = fold_into([block.norm, block.expand, block.norm1], like=block.expand)
            block.depthwise = fold_into([block.depthwise, block.norm2], like=block.depthwise)
            block.norm = nn.Identity()
            block.norm1 = nn.GELU()
            block.norm2 = nn.GELU()
            block.__class__ = InvertedBottleneck
        return block.to(self.norm.weight.dtype)


class LayerNormMBConv(InvertedBottleneck):
    """The convolution block of CoAtNet with LayerNorm over the channels of every position instead of BatchNorm.

    Formula, arguments, shapes and errors as `MBConv`. It has no batch statistics, so its output does not depend on the
    other images of a batch; it cannot be fused.

    Source: CoAtNet Table 8

    Example:
        >>> block = iso.layers.LayerNormMBConv(dim=16, dim_out=32, stride=2)
        >>> block(torch.randn(2, 16, 8, 8)).shape
        torch.Size([2, 32, 4, 4])
    """

    norm_layer = LayerNorm2d
    norm_act_layer = staticmethod(partial(LayerNormAct2d, act_layer=nn.GELU))


def _fuse_inside(module: nn.Module) -> nn.Module:
    """Fuse the outermost layers inside a module that have a method `fuse`, in place."""
    for name, child in module.named_children():
        fuse = getattr(child, "fuse", None)
        setattr(module, name, fuse() if callable(fuse) else _fuse_inside(child))
    return module.eval()


class Stem(nn.Module):
    """y = conv2(norm(conv1(x))), of 3x3 convolutions, the first strided; the norm ends in GELU: CoAtNet Table 3, S0.

    Shape: x (B, in_chans, H, W) -> (B, dim, ceil(H / stride), ceil(W / stride))
    """

    norm_act_layer: ClassVar[Any]

    def __init__(self, in_chans: int, dim: int, stride: int = 2) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, dim, 3, stride, 1, bias=False)
        self.norm = self.norm_act_layer(dim)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.norm(self.conv1(x)))


class BatchNormStem(Stem):
    """The stem with BatchNorm, which `fuse` folds into the first convolution."""

    norm_act_layer = staticmethod(MBConv.norm_act_layer)

    @torch.no_grad()
    def fuse(self) -> Stem:
        """Return the stem in eval mode with its norm folded in float64."""
        stem: Any = _fuse_inside(copy.deepcopy(self).double())
        if isinstance(stem.conv1, nn.Conv2d):
            stem.conv1 = fold_into([stem.conv1, stem.norm], like=stem.conv1)
            stem.norm = nn.GELU()
            stem.__class__ = Stem
        return stem.to(self.norm.weight.dtype)


class LayerNormStem(Stem):
    """The stem with LayerNorm over the channels of every position."""

    norm_act_layer = staticmethod(LayerNormMBConv.norm_act_layer)
