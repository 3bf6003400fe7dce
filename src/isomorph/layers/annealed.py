"""Layers of VanillaNet: layer pairs that merge into one during training, and a ReLU with a local convolution."""

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import UserError
from isomorph.layers.pyramid.batchnorm import NEEDS_EVAL, fold_into

# `eps` of every BatchNorm, from the published code of VanillaNet.
BATCHNORM_EPS = 1e-6


class AnnealedReLU(nn.Module):
    """A ReLU that turns into the identity during training, so that the linear layers around it can be merged.

    y = max(x, slope x) with slope 0 for a ReLU and slope 1 for the identity. `iso.Anneal`, or `anneal` in a recipe,
    raises the slope from 0 to 1 over the first epochs. The slope is a buffer and is saved with the weights.

    Shape: x (*) -> (*)
    Source: VanillaNet (Chen et al., 2023) eq. 1, (1 - slope) ReLU(x) + slope x
    Raises: UserError if the slope is not between 0 and 1.

    Example:
        >>> act = iso.layers.AnnealedReLU()
        >>> act(torch.tensor([-2.0, 3.0])).tolist()
        [-0.0, 3.0]
        >>> act.set_slope(0.5)
        >>> act(torch.tensor([-2.0, 3.0])).tolist()
        [-1.0, 3.0]
    """

    slope: Tensor

    def __init__(self, slope: float = 0.0) -> None:
        super().__init__()
        self.initial_slope = slope
        self.register_buffer("slope", torch.zeros(1))
        self.set_slope(slope)

    def set_slope(self, slope: float) -> None:
        """Set the slope. Raises: UserError if it is not between 0 and 1."""
        if not 0 <= slope <= 1:
            raise UserError(f"slope {slope} must be between 0 (a ReLU) and 1 (the identity)")
        self.slope.fill_(slope)

    @property
    def is_identity(self) -> bool:
        """True if the slope is 1; on the meta device, which has no values, if the layer was created with slope 1."""
        slope = self.initial_slope if self.slope.is_meta else self.slope.item()
        return slope == 1

    def forward(self, x: Tensor) -> Tensor:
        return F.prelu(x, self.slope.to(x.dtype))


class AnnealedPair(nn.Sequential):
    """Two linear layers during training that fuse into one for inference, with BatchNorm and an annealed ReLU between.

    y = norm2(second(act(norm1(first(x))))), without norm2 if `last_norm` is False. Both layers are nn.Conv2d, the
    second with a 1x1 kernel, or both are nn.Linear. Once the ReLU has become the identity, `fuse` returns a single
    layer; before that it returns both layers with their BatchNorms folded in.

    Shape: as first, then second
    Source: VanillaNet (Chen et al., 2023) section 2.2, the deep training strategy
    Raises: UserError for a second convolution that is more than a linear layer on each pixel.

    Example:
        >>> conv = torch.nn.Conv2d(3, 8, kernel_size=3, padding=1)
        >>> pair = iso.layers.AnnealedPair(conv, torch.nn.Conv2d(8, 16, kernel_size=1))
        >>> pair.act.set_slope(1.0)  # what iso.Anneal does during training
        >>> pair.eval().fuse()
        Conv2d(3, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """

    def __init__(
        self,
        first: nn.Conv2d | nn.Linear,
        second: nn.Conv2d | nn.Linear,
        last_norm: bool = True,
        slope: float = 0.0,
    ) -> None:
        if isinstance(second, nn.Conv2d) and not is_pointwise(second):
            raise UserError(
                f"the second convolution, {second}, needs a 1x1 kernel, stride 1 and no padding or groups",
            )
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            first=first, norm1=_batchnorm_for(first), act=AnnealedReLU(slope), second=second
        )
        if last_norm:
            layers["norm2"] = _batchnorm_for(second)
        super().__init__(layers)

    @torch.no_grad()
    def fuse(self) -> nn.Module:
        """Return a module that computes the same in eval mode, fused in float64. Raises: UserError in train mode.

        What its layers were recast as is fused first; a second layer that is not linear stays a layer of its own.
        """
        layers: dict[str, Any] = {}
        for name, layer in self.named_children():
            fuse = getattr(layer, "fuse", None)
            layers[name] = fuse() if callable(fuse) else layer
        act = layers.pop("act")
        is_linear = isinstance(layers["second"], nn.Conv2d | nn.Linear)
        if act.is_identity and is_linear:
            layers["first"] = _without_groups(layers["first"])
            return _merge(layers.values())
        linear = list(layers.values())
        fused = OrderedDict(
            first=_merge(linear[:2]), act=copy.deepcopy(act), second=_merge(linear[2:])
        )
        return nn.Sequential(fused).eval()


def _without_groups(layer: Any) -> Any:
    """Return a convolution with groups as one without: its filters are 0 for the channels of other groups."""
    groups = getattr(layer, "groups", 1)
    if groups == 1 or not isinstance(layer, nn.Conv2d):
        return layer
    dense = copy.deepcopy(layer)
    by_group = layer.weight.unflatten(0, (groups, -1))  # (G, out / G, in / G, k, k)
    weight = by_group.new_zeros(*by_group.shape[:2], groups, *by_group.shape[2:])
    for group, filters in enumerate(by_group):
        weight[group, :, group] = filters
    weight = weight.flatten(2, 3).flatten(0, 1)  # (out, in, k, k)
    dense.weight = nn.Parameter(weight, layer.weight.requires_grad)
    dense.groups = 1
    return dense


class SeriesActivation(nn.Sequential):
    """An activation that also mixes neighbouring positions: BatchNorm(depthwise_conv(ReLU(x))).

    It gives a network with few layers more non-linearity per layer. The depthwise convolution has (2 n + 1) x (2 n + 1)
    taps.

    Shape: x (B, C, H, W) -> (B, C, H, W)
    Source: VanillaNet (Chen et al., 2023) eq. 6; differs: no bias within the ReLU, as in the published code

    Example:
        >>> act = iso.layers.SeriesActivation(channels=8, n=1)
        >>> act(torch.randn(2, 8, 6, 6)).shape
        torch.Size([2, 8, 6, 6])
        >>> act.eval().fuse().conv.kernel_size
        (3, 3)
    """

    def __init__(self, channels: int, n: int = 3) -> None:
        conv = nn.Conv2d(channels, channels, 2 * n + 1, padding=n, groups=channels, bias=False)
        super().__init__(OrderedDict(act=nn.ReLU(), conv=conv, norm=_batchnorm_for(conv)))

    @torch.no_grad()
    def fuse(self) -> nn.Sequential:
        """Return the same with BatchNorm folded into the convolution. Raises: UserError in train mode."""
        act, *linear = self
        return nn.Sequential(OrderedDict(act=copy.deepcopy(act), conv=_merge(linear))).eval()


def is_pointwise(conv: nn.Conv2d) -> bool:
    """True for a 1x1 convolution of every pixel, without groups."""
    plain = conv.padding in ((0, 0), "valid", "same")
    return conv.kernel_size == (1, 1) and conv.stride == (1, 1) and conv.groups == 1 and plain


def _batchnorm_for(layer: nn.Conv2d | nn.Linear) -> _BatchNorm:
    if isinstance(layer, nn.Linear):
        return nn.BatchNorm1d(layer.out_features, eps=BATCHNORM_EPS)
    return nn.BatchNorm2d(layer.out_channels, eps=BATCHNORM_EPS)


def _merge(layers: Iterable[nn.Module]) -> nn.Conv2d | nn.Linear:
    """Merge linear layers and BatchNorms into one layer with a bias. Raises: UserError in train mode."""
    chain: list[Any] = [copy.deepcopy(layer).double() for layer in layers]
    if any(part.training for layer in chain for part in layer.modules()):
        raise UserError(NEEDS_EVAL)
    return fold_into(chain, like=chain[0]).to(next(iter(layers)).weight.dtype)
