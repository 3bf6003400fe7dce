"""A convolution trained as a pyramid of branches, and computed as one convolution on the patches that it reads."""

from typing import Any

from timm.layers import to_2tuple
from torch import Tensor, nn

from isomorph.layers.grid import Sides
from isomorph.layers.modes import disable_autocast
from isomorph.layers.patches import Window
from isomorph.layers.pyramid.base import Pyramid, Rectify, TrainingForm, apply_map, is_altered
from isomorph.layers.pyramid.batchnorm import uses_batch_statistics
from isomorph.layers.pyramid.chains import Chains
from isomorph.layers.pyramid.closed_form import collapse
from isomorph.layers.pyramid.moments import measure_moments, sync_group


class PyramidConv2d(Pyramid):
    """A convolution with extra branches during training, which fuse to one nn.Conv2d for inference.

    The extra parameters and BatchNorms make training easier; the trained model costs the same as one with a plain
    convolution.

        y = Rectify(Conv(x) + sum_n f_n(x))

    Branch f_n is Conv + BatchNorm, further 1x1 Conv + BatchNorm units, and a last 1x1 Conv. A convolution is a linear
    layer on the patches that it reads, so further arguments and training in closed form are those of `PyramidLinear`,
    with patches as tokens. With `groups`, every layer of a branch is grouped, so that a depthwise convolution fuses to
    a depthwise one.

    The first unit is as wide as the input, or as the rank of the map (min(C k k, out)) if that is larger: a patch
    embedding of 768 input values per patch is not squeezed through 3 channels.

    Layers that are not plain run one after the other, as in `PyramidLinear`.

    Shape: x (B, C, H, W) -> (B, out, H', W'), sizes as nn.Conv2d
    Source: TDRL eq. 8 and appendix A.3, A.4; differs: computed in closed form, exactly
    Raises: UserError for an unknown layout or rectification, or an input of another shape; ValueError when training on
    a single patch.

    Example:
        >>> layer = iso.layers.PyramidConv2d(8, 16, kernel_size=3, padding=1)
        >>> layer(torch.randn(2, 8, 6, 6)).shape
        torch.Size([2, 16, 6, 6])
        >>> layer.eval().fuse()
        Conv2d(8, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """

    window: Window

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sides = 1,
        stride: Sides = 1,
        padding: Sides = 0,
        dilation: Sides = 1,
        groups: int = 1,
        layout: str = "P-W2S",
        rectify: Rectify = "rescale",
        affine: bool = True,
        rescale_by: float | None = None,
        form: TrainingForm = "closed",
    ) -> None:
        # before super().__init__, which makes the branches: each reads this window
        self.window = Window(
            to_2tuple(kernel_size),
            to_2tuple(stride),
            to_2tuple(padding),
            to_2tuple(dilation),
            groups,
        )
        super().__init__(in_channels, out_channels, layout, rectify, affine, rescale_by, form)
        # also under the names of nn.Conv2d, which networks read
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size, self.stride, self.padding, self.dilation, self.groups = self.window

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        for name, value in self.window._asdict().items():
            parts.append(f"{name}={value}")
        return ", ".join(parts)


def convolve_normalised(x: Tensor, branches: nn.Module) -> Tensor | None:
    """Return the sum of pyramids `conv` with a BatchNorm `bn` as one convolution; None if it is not one now."""
    pyramids: list[PyramidConv2d] = []
    chains: list[Chains] = []
    eps = set()
    for branch in branches.children():
        conv = getattr(branch, "conv", None)
        norm: Any = getattr(branch, "bn", None)
        if (
            type(conv) is not PyramidConv2d
            or conv.norm is not None
            or not _normalises_by_batch(norm)
        ):
            return None
        if is_altered(branch) or any(map(is_altered, branch.children())):
            return None
        form = conv.form_now()
        if not isinstance(form, Chains):
            return None
        pyramids.append(conv)
        chains.append(form._replace(rectifier=norm))
        eps |= {form.units[0][0].norm.eps, norm.eps}
    window = pyramids[0].window
    if len(eps) > 1 or any(conv.window != window for conv in pyramids):
        return None
    moments = measure_moments(x, window, sync_group(branches))
    with disable_autocast(x.device):
        weight, bias = collapse(chains, moments)
        weight = weight.unflatten(1, (len(chains), -1)).sum(1)
        bias = bias.unflatten(1, (len(chains), -1)).sum(1)
    return apply_map(moments.source, weight, bias, window)


def _normalises_by_batch(norm: Any) -> bool:
    """True for a BatchNorm of torch or timm in train mode that does not take a cumulative average."""
    if not uses_batch_statistics(norm) or norm.momentum is None:
        return False
    return type(norm).__module__.startswith(("torch.", "timm."))
