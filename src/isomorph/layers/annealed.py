"""Layers of VanillaNet: pairs of linear layers that become one while they train, and a ReLU that sees neighbours."""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import UserError
from isomorph.layers.affine_chain import collapse_chain, matrix

EPS = 1e-6
"""Of every BatchNorm, as published with VanillaNet."""


class AnnealedReLU(nn.Module):
    """A ReLU that becomes the identity while a network trains: max(x, slope x), slope 0 a ReLU, slope 1 the identity.

    `iso.Anneal`, or `anneal` in a recipe, carries the slope from 0 to 1; it is saved with the weights.

    Shape: x (*) -> (*)
    Source: VanillaNet (Chen et al., 2023) eq. 1, (1 - slope) ReLU(x) + slope x
    Raises: UserError for a slope below 0 or above 1.
    """

    slope: Tensor

    def __init__(self, slope: float = 0.0) -> None:
        super().__init__()
        self.start = slope
        self.register_buffer("slope", torch.zeros(1))
        self.set_slope(slope)

    def set_slope(self, slope: float) -> None:
        """Sets the slope. Raises: UserError when it is not between 0 and 1."""
        if not 0 <= slope <= 1:
            raise UserError(f"slope {slope} must be between 0, a ReLU, and 1, the identity")
        self.slope.fill_(slope)

    @property
    def is_identity(self) -> bool:
        """Whether the slope is 1; on the meta device, which has no values, whether it was created so."""
        return (self.start if self.slope.is_meta else self.slope.item()) == 1

    def forward(self, x: Tensor) -> Tensor:
        return F.prelu(x, self.slope.to(x.dtype))


class AnnealedPair(nn.Sequential):
    """Two linear layers with BatchNorm and an annealed ReLU between them: two layers to train, one to run.

    second(act(norm1(first(x)))), then a BatchNorm where `last_norm` says so. Both layers are nn.Conv2d, the second 1x1,
    or both nn.Linear. Once the ReLU is the identity `fuse` gives one layer; before, both layers without BatchNorm.

    Source: VanillaNet (Chen et al., 2023) section 2.2, the deep training strategy
    """

    def __init__(
        self, first: nn.Conv2d | nn.Linear, second: nn.Conv2d | nn.Linear, last_norm: bool = True, slope: float = 0.0
    ) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict(first=first, norm1=_norm_after(first))
        layers |= dict(act=AnnealedReLU(slope), second=second)
        super().__init__(layers | (dict(norm2=_norm_after(second)) if last_norm else {}))

    @torch.no_grad()
    def fuse(self) -> nn.Module:
        """The same function in eval mode, computed in float64. Raises: UserError in train mode."""
        _require_eval(self)
        children = dict(self.named_children())
        act = children.pop("act")
        assert isinstance(act, AnnealedReLU)
        layers = list(children.values())
        if act.is_identity:
            return _merge(layers)
        parts: OrderedDict[str, nn.Module] = OrderedDict(first=_merge(layers[:2]), act=copy.deepcopy(act))
        return nn.Sequential(parts | dict(second=_merge(layers[2:]))).eval()


class SeriesActivation(nn.Sequential):
    """A ReLU that sees its neighbours: BatchNorm of a depthwise convolution of ReLU(x), (2 n + 1) x (2 n + 1) taps.

    Shape: x (B, C, H, W) -> (B, C, H, W)
    Source: VanillaNet (Chen et al., 2023) eq. 6; differs: no bias within the ReLU, as published
    """

    def __init__(self, channels: int, n: int = 3) -> None:
        conv = nn.Conv2d(channels, channels, 2 * n + 1, padding=n, groups=channels, bias=False)
        super().__init__(OrderedDict(act=nn.ReLU(), conv=conv, norm=_norm_after(conv)))

    @torch.no_grad()
    def fuse(self) -> nn.Sequential:
        """The same function in eval mode, BatchNorm within the convolution. Raises: UserError in train mode."""
        _require_eval(self)
        children = dict(self.named_children())
        fused: OrderedDict[str, nn.Module] = OrderedDict(act=nn.ReLU())
        fused["conv"] = _merge([children["conv"], children["norm"]])
        return nn.Sequential(fused).eval()


def _norm_after(layer: nn.Conv2d | nn.Linear) -> _BatchNorm:
    """The BatchNorm of what a layer gives."""
    if isinstance(layer, nn.Linear):
        return nn.BatchNorm1d(layer.out_features, eps=EPS)
    return nn.BatchNorm2d(layer.out_channels, eps=EPS)


def _require_eval(module: nn.Module) -> None:
    """Raises: UserError when a BatchNorm of the module would normalise by the batch."""
    if any(part.training for part in module.modules()):
        raise UserError("fuse needs eval mode: in train mode the map depends on the batch; call .eval() first")


def _merge(layers: Sequence[nn.Module]) -> nn.Conv2d | nn.Linear:
    """Linear layers and BatchNorms in a row as the one layer that they are, with a bias; convolutions after the first
    are 1x1."""
    dtype = next(layers[0].parameters()).dtype
    chain: list[Any] = [copy.deepcopy(layer).double() for layer in layers]
    first, last = chain[0], [layer for layer in chain if not isinstance(layer, _BatchNorm)][-1]
    weight = matrix(first)  # (out, C k k), or (G, out / G, C k k / G)
    weight, bias = collapse_chain(chain, None, weight.new_zeros(*weight.shape[:-2], weight.shape[-1]))
    with torch.device(weight.device):
        merged: Any
        if isinstance(first, nn.Linear):
            merged = nn.Linear(first.in_features, last.out_features)
        else:
            window = (first.kernel_size, first.stride, first.padding, first.dilation, first.groups)
            merged = nn.Conv2d(first.in_channels, last.out_channels, *window)
    merged.weight = nn.Parameter(weight.reshape(merged.weight.shape).to(dtype))
    merged.bias = nn.Parameter(bias.flatten().to(dtype))
    return merged.eval()
