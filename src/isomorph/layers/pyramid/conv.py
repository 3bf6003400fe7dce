"""A convolution trained as a pyramid of branches, and computed as one convolution on the patches that it reads."""

from typing import Any

from timm.layers import to_2tuple
from torch import Tensor, nn

from isomorph.layers.modes import disable_autocast
from isomorph.layers.patches import Window
from isomorph.layers.pyramid.base import Computed, Pyramid, Rectify, apply_map, is_altered
from isomorph.layers.pyramid.batchnorm import uses_batch_statistics
from isomorph.layers.pyramid.closed_form import Chains, collapse
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
        kernel_size: int | tuple[int, int] = 1,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        layout: str = "P-W2S",
        rectify: Rectify = "rescale",
        affine: bool = True,
        rescale_by: float | None = None,
        form: Computed = "closed",
    ) -> None:
        self.window = Window(to_2tuple(kernel_size), to_2tuple(stride), to_2tuple(padding), to_2tuple(dilation), groups)
        super().__init__(in_channels, out_channels, layout, rectify, affine, rescale_by, form)
        # also under the names of nn.Conv2d, which networks read
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride, self.padding, self.dilation, self.groups = self.window

    def extra_repr(self) -> str:
        window = ", ".join(f"{name}={value}" for name, value in self.window._asdict().items())
        return f"{super().extra_repr()}, {window}"


def convolve_normalised(x: Tensor, branches: nn.Module) -> Tensor | None:
    """Return the sum of pyramids `conv` with a BatchNorm `bn` as one convolution; None if it is not one now."""
    units: list[Any] = [(getattr(branch, "conv", None), getattr(branch, "bn", None)) for branch in branches.children()]
    parts = (each for branch in branches.children() for each in (branch, *branch.children()))
    plain = all(type(conv) is PyramidConv2d and conv.norm is None and uses_batch_statistics(bn) for conv, bn in units)
    known = (type(bn).__module__.startswith(("torch.", "timm.")) and bn.momentum is not None for _, bn in units)
    if not (plain and all(known)) or any(map(is_altered, parts)):
        return None
    forms = [(conv.form_now(), norm) for conv, norm in units]
    chains = [form._replace(rectifier=norm) for form, norm in forms if isinstance(form, Chains)]
    eps = {norm.eps for form in chains for norm in (form.units[0][0].norm, form.rectifier) if norm is not None}
    if len(chains) < len(units) or len(eps) > 1 or len({conv.window for conv, _ in units}) > 1:
        return None
    moments = measure_moments(x, units[0][0].window, sync_group(branches))
    with disable_autocast(x.device):
        weight, bias = (each.unflatten(1, (len(chains), -1)).sum(1) for each in collapse(chains, moments))
    return apply_map(moments.source, weight, bias, units[0][0].window)
