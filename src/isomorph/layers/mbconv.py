"""The convolutional half of CoAtNet: pre-activation inverted bottlenecks with squeeze and excitation, and the stem."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d, DropPath, LayerNorm2d, LayerNormAct2d, SqueezeExcite
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.utils.fusion import fuse_conv_bn_eval

from isomorph.layers.affine_chain import uses_batch
from isomorph.layers.chunked import (
    by_images,
    images_within,
    in_eager_mode,
    watched,
)

CACHED_BYTES = 8 * 2**20
"""The widest map of the images that a block takes at a time in evaluation: more than this is fetched page by page."""


def activation(width: int) -> nn.Module:
    """What folding leaves of a norm with its activation."""
    return nn.GELU()


def _sees_the_batch(module: nn.Module) -> bool:
    """Whether a norm inside looks at the whole batch, or a hook would see it come in parts."""
    return watched(module) or any(map(uses_batch, module.modules()))


def _some_at_a_time(module: nn.Module, function: Callable[[Tensor], Tensor], first: nn.Conv2d, x: Tensor) -> Tensor:
    """function(x) in parts where that is faster and nothing tells: in evaluation on a CPU, with no hook inside.

    `first` is the convolution whose map is the largest. Shape: x (B, C, H, W) -> (B, ...)
    """
    traced = isinstance(x, Proxy) or not in_eager_mode()
    if traced or x.device.type != "cpu" or torch.is_grad_enabled() or _sees_the_batch(module):
        return function(x)
    numbers = first.out_channels * math.prod(x.shape[-2:]) // math.prod(first.stride)
    return by_images(function, images_within(CACHED_BYTES, numbers, x), x)


class MaxPool(nn.Module):
    """Maximum of every 2 x 2 places, at the rim of those there are: as many places as a stride of 2 leaves.

    Shape: x (B, C, H, W) -> (B, C, ceil(H / 2), ceil(W / 2))
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():  # the same, and torch proves its size where an export leaves the map's open
            return F.max_pool2d(F.pad(x, (0, 1, 0, 1), mode="replicate"), 2)
        return F.max_pool2d(x, 2, ceil_mode=True)


def pool(stride: int) -> nn.Module:
    """Halves a map, or leaves it."""
    return MaxPool() if stride == 2 else nn.Identity()


def shortcut(dim: int, dim_out: int, stride: int) -> nn.Module:
    """Proj(Pool(x)), as much of it as the shapes need. Shape: (B, dim, H, W) -> (B, dim_out, H / stride, W / stride)

    Source: CoAtNet eq. 4 and 5
    """
    return pool(stride) if dim == dim_out else nn.Sequential(pool(stride), nn.Conv2d(dim, dim_out, 1))


class InvertedBottleneck(nn.Module):
    """Widen, look around, weigh the channels, narrow; a subclass says in which norm.

    y = shortcut(x) + project(SE(norm2(depthwise(norm1(expand(norm(x)))))))        (norm1 and norm2 end in GELU)

    It is `expand_ratio` times `dim_out` wide, its squeeze and excitation `se_ratio` times. `stride_on`: "expand" halves
    in the first 1x1 convolution (the paper's choice), "depthwise" in the 3x3 (Table 9: slower, better in small models).

    Shape: x (B, dim, H, W) -> (B, dim_out, ceil(H / stride), ceil(W / stride))
    Source: CoAtNet A.1, eq. 5, Table 3; the width of the SE is the one that gives the published sizes
    Raises: ValueError for a stride but 1 and 2, a ratio that is not positive, or an unknown place of the stride.
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
            given = f"stride {stride}, expand_ratio {expand_ratio:g}, se_ratio {se_ratio:g}"
            raise ValueError(f"{given}: the stride must be 1 or 2, the ratios above 0")
        dim_out = dim_out or dim
        width = int(expand_ratio * dim_out)
        first, second = (stride, 1) if stride_on == "expand" else (1, stride)
        self.norm = self.norm_layer(dim)
        self.expand = nn.Conv2d(dim, width, 1, first, bias=False)
        self.norm1 = self.norm_act_layer(width)
        self.depthwise = nn.Conv2d(width, width, 3, second, 1, groups=width, bias=False)
        self.norm2 = self.norm_act_layer(width)
        self.se = SqueezeExcite(width, rd_channels=max(1, int(se_ratio * dim_out)), act_layer=nn.GELU)
        self.project = nn.Conv2d(width, dim_out, 1)
        self.drop_path = DropPath(drop_path)
        self.shortcut = shortcut(dim, dim_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        return _some_at_a_time(self, self.block, self.expand, x)

    def block(self, x: Tensor) -> Tensor:
        """The formula. Shape: as `forward`"""
        y = self.norm1(self.expand(self.norm(x)))  # (B, width, H, W)
        y = self.norm2(self.depthwise(y))
        return self.shortcut(x) + self.drop_path(self.project(self.se(y)))


class FusedMBConv(InvertedBottleneck):
    """The block without norms, for inference: what `MBConv.fuse` gives.

    Formula, shapes and source are InvertedBottleneck's.
    """

    norm_layer = nn.Identity
    norm_act_layer = staticmethod(activation)


class MBConv(InvertedBottleneck):
    """The block with BatchNorm, which folds into the convolutions.

    Formula, shapes and source are InvertedBottleneck's.
    """

    norm_layer = nn.BatchNorm2d
    norm_act_layer = staticmethod(partial(BatchNormAct2d, act_layer=nn.GELU))

    @torch.no_grad()
    def fuse(self) -> InvertedBottleneck:
        """The block in eval mode, its norms folded in float64: three passes over maps fewer.

        What was recast inside is fused first; where it still is no convolution then, the norms stay.
        """
        twin: Any = _fuse_inside(copy.deepcopy(self).double().eval())
        if not folds(twin.expand, twin.depthwise):
            return twin.to(self.norm.weight.dtype)
        fused = FusedMBConv(1)  # every part is replaced
        fused.expand = _fold_after(_fold_before(twin.norm, twin.expand), twin.norm1)
        fused.depthwise = _fold_after(twin.depthwise, twin.norm2)
        for name in ("se", "project", "drop_path", "shortcut"):
            setattr(fused, name, getattr(twin, name))
        return fused.to(self.norm.weight.dtype).eval()


class LayerNormMBConv(InvertedBottleneck):
    """The block with LayerNorm over the channels of every place (CoAtNet Table 8).

    Formula, shapes and source are InvertedBottleneck's.
    """

    norm_layer = LayerNorm2d
    norm_act_layer = staticmethod(partial(LayerNormAct2d, act_layer=nn.GELU))


def _fuse_inside(module: nn.Module) -> nn.Module:
    """Replaces whatever has a fused form inside a module in eval mode by it."""
    for name, child in module.named_children():
        fuse = getattr(child, "fuse", None)
        setattr(module, name, fuse() if callable(fuse) else _fuse_inside(child))
    return module.eval()


def folds(*layers: nn.Module) -> bool:
    """Whether a norm beside these layers folds into them: they are convolutions, not attention in their place."""
    return all(isinstance(layer, nn.Conv2d) for layer in layers)


def _fold_after(conv: nn.Conv2d, norm: Any) -> nn.Conv2d:
    """A convolution that gives what the norm after it gives; as trainable as it was, its bias too."""
    folded = fuse_conv_bn_eval(conv, norm)
    folded.bias.requires_grad_(conv.weight.requires_grad)  # type: ignore[union-attr]
    return folded


def _fold_before(norm: Any, conv: nn.Conv2d) -> nn.Conv2d:
    """A 1x1 convolution that reads what the norm before it reads: W (s x + t) = (W s) x + W t."""
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)  # (C,)
    shift = norm.bias - norm.running_mean * scale
    folded = copy.deepcopy(conv)
    bias = (conv.weight.flatten(1) @ shift) + (0 if conv.bias is None else conv.bias)
    learns = conv.weight.requires_grad
    folded.weight = nn.Parameter(conv.weight * scale[:, None, None], learns)
    folded.bias = nn.Parameter(bias, learns)
    return folded


class Stem(nn.Module):
    """Two 3x3 convolutions, the first strided: what an image becomes before the first stage.

    y = conv2(norm(conv1(x)))        (the norm, which a subclass chooses, ends in GELU)

    Shape: x (B, in_chans, H, W) -> (B, dim, ceil(H / stride), ceil(W / stride))
    Source: CoAtNet Table 3, S0
    """

    norm_act_layer: ClassVar[Any]

    def __init__(self, in_chans: int, dim: int, stride: int = 2) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, dim, 3, stride, 1, bias=False)
        self.norm = self.norm_act_layer(dim)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return _some_at_a_time(self, self.block, self.conv1, x)

    def block(self, x: Tensor) -> Tensor:
        """The formula. Shape: as `forward`"""
        return self.conv2(self.norm(self.conv1(x)))


class FusedStem(Stem):
    """The stem without its norm, for inference."""

    norm_act_layer = staticmethod(activation)


class BatchNormStem(Stem):
    """The stem with BatchNorm, which folds."""

    norm_act_layer = MBConv.norm_act_layer

    @torch.no_grad()
    def fuse(self) -> Stem:
        """The stem in eval mode, its norm folded in float64, what was recast inside fused first."""
        twin: Any = _fuse_inside(copy.deepcopy(self).double().eval())
        if not folds(twin.conv1):
            return twin.to(self.norm.weight.dtype)
        fused = FusedStem(1, 1)  # every part is replaced
        fused.conv1, fused.conv2 = _fold_after(twin.conv1, twin.norm), twin.conv2
        return fused.to(self.norm.weight.dtype).eval()


class LayerNormStem(Stem):
    """The stem with LayerNorm over the channels of every place."""

    norm_act_layer = LayerNormMBConv.norm_act_layer
