"""Mean and covariance of patches that overlap, without forming the patches.

Those of 3 x 3 patches come from products of a map with its shifted self; `depthwise_moments.py` is for one channel.

Two taps a and b of a patch read x[p + a] and x[p + b]. Their product, summed over all positions p, depends on the taps
by the lag b - a alone, but for what the border cuts off. Patches have 81 pairs of taps, and 25 lags; those of lag -d
are the transposes of those of lag d. So a convolution's weight gradient with a 3 x 5 kernel gives all sums:

    T[d] = sum_u y[u] y[u + d]^T,    y = x - m inside the map, 0 outside
    S[a, b] = T[b - a] - (positions outside the map, from which both taps read inside it: first, last row and column)

A patch of x is that of y plus M i: i tells which taps are inside the map, and M has a value of m for each tap. So

    Cov(x) = S - mean(y) mean(y)^T + M Cov(i, y) + Cov(y, i) M^T + M Cov(i) M^T

where Cov(i, y) follows from the sum of y over the batch.

Letters: L positions, n taps of a patch, G groups of c channels, C = G c.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from isomorph.layers.depthwise_moments import BORDERS, DepthwiseProducts, keeps_size
from isomorph.layers.tokens import Window, unfold
from isomorph.layers.weight_products import VARIANCE_FLOOR_ULPS

REACH = 2
"""Largest lag between two of three taps."""


def has_patch_moments(window: Window, channels: int) -> bool:
    """True for a convolution whose moments `measure_patches` computes."""
    return keeps_size(window) or (window.overlaps and window.groups == channels and window.dilation == (1, 1))


def measure_patches(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the patches of all positions, in float32 at least.

    Shape: x (B, C, H, W) -> (n c,), (n c, n c) for n taps, or (G, n c), (G, n c, n c) with groups
    """
    summed = x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))  # (C, H, W)
    batch, groups = max(x.shape[0], 1), window.groups
    shift = (summed.mean((1, 2), keepdim=True) / batch).detach()  # any constant is exact; the mean keeps digits
    second = DepthwiseProducts if groups == x.shape[1] else PatchProducts
    inside = unfold(torch.ones_like(summed[:1]), window)  # (n, L)
    taps, positions = inside.shape
    products = second.apply(x, shift, window) / (batch * positions)  # (G, n c, n c)
    shares = inside.mean(1)
    patches = unfold(summed / batch - shift, window).view(groups, -1, positions)  # (G, n c, L)
    means = patches.mean(-1)
    with_inside = patches @ inside.mT / positions - means.unsqueeze(-1) * shares  # Cov(y, i): (G, n c, n)
    inside_own = inside @ inside.mT / positions - shares.outer(shares)  # Cov(i): (n, n)
    levels = (shift.view(groups, -1, 1, 1) * torch.eye(taps, device=x.device)).flatten(1, 2)  # M: (G, n c, n)
    tilted = (with_inside + levels @ inside_own / 2) @ levels.mT
    covariance = products - means.unsqueeze(2) * means.unsqueeze(1) + tilted + tilted.mT
    mean = means + levels @ shares
    own = covariance.diagonal(dim1=-2, dim2=-1)  # the products of one tap may come from those of another
    least = own.detach().unflatten(-1, (-1, taps)).amax(-1).repeat_interleave(taps, -1)
    own += (least * VARIANCE_FLOOR_ULPS * torch.finfo(own.dtype).eps - own).clamp(min=0)
    return (mean, covariance) if groups > 1 else (mean[0], covariance[0])


class PatchProducts(torch.autograd.Function):
    """The sum of p p^T over the 3 x 3 patches p of y, the map less a level for each channel; saves only x.

    dT[d] reaches y[u] from y[u + d], and y[u + d] from y[u]: both together are a convolution with a 5 x 5 kernel.

    Shape: x (B, C, H, W), level (C, 1, 1) -> (G, 9 c, 9 c)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, level: Tensor, window: Window) -> Tensor:
        y, groups = x.to(level.dtype) - level, window.groups
        around = F.pad(y, (REACH, REACH, 0, REACH))
        size = (x.shape[1], x.shape[1] // groups, REACH + 1, 2 * REACH + 1)
        half = conv2d_weight(around, size, y, groups=groups).unflatten(0, (groups, -1))  # (G, c, c, 3, 5)
        lags = torch.cat([half[..., 1:, :].transpose(1, 2).flip(-2, -1), half], -2)  # T: (G, c, c, 5, 5)
        pairs = lags.unfold(-2, 3, 1).unfold(-2, 3, 1).flip(3, 4)  # T[b - a]: (G, c, c, ay, ax, by, bx)
        products = pairs.permute(0, 1, 3, 4, 2, 5, 6).contiguous()  # (G, c, ay, ax, c, by, bx)
        for tap, at in BORDERS:
            for own, strip, outside in (
                (products[:, :, tap, :, :, tap], y[:, :, at], 1),
                (products[:, :, :, tap, :, :, tap], y[..., at], 2),
            ):
                tokens = _strip_tokens(strip, groups, outside)
                own -= (tokens.mT @ tokens).view(own.shape)
        return products.flatten(4).flatten(1, 3)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Window], output: Tensor) -> None:
        x, level, window = inputs
        ctx.groups = window.groups
        ctx.save_for_backward(x, level)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, level = ctx.saved_tensors
        y, groups = x.to(level.dtype) - level, ctx.groups
        grad = grad.unflatten(2, (-1, 3, 3)).unflatten(1, (-1, 3, 3))  # (G, c, ay, ax, c, by, bx)
        d_lags = sum(
            F.pad(grad[:, :, ay, ax], (2 - ax, ax, 2 - ay, ay)) for ay in range(3) for ax in range(3)
        )  # (G, c, c, 5, 5)
        kernel = (d_lags + d_lags.transpose(1, 2).flip(-2, -1)).flatten(0, 1)  # type: ignore[union-attr]
        d_y = F.conv2d(y, kernel, padding=REACH, groups=groups)
        for tap, at in BORDERS:
            d_y[:, :, at] -= _strip_gradient(y[:, :, at], grad[:, :, tap, :, :, tap], groups, 1)
            d_y[..., at] -= _strip_gradient(y[..., at], grad[:, :, :, tap, :, :, tap], groups, 2)
        return d_y.to(x.dtype), None, None


def _strip_tokens(y: Tensor, groups: int, outside: int) -> Tensor:
    """Return three neighbours along a row or column of the map, at each place.

    `outside` is the number of zeros at each end: 1 for patches centred on the strip, 2 for all that read from it.

    Shape: (B, C, n) -> (G, B n', 3 c)
    """
    taps = F.pad(y, (outside, outside)).unfold(-1, 3, 1).unflatten(1, (groups, -1))  # (B, G, c, n', 3)
    return taps.permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)


def _strip_gradient(y: Tensor, grad: Tensor, groups: int, outside: int) -> Tensor:
    """Return the gradient of a strip from that of its products. Shape: (B, C, n), (G, c, 3, c, 3) -> (B, C, n)"""
    slope = grad.flatten(3).flatten(1, 2)
    d_tokens = _strip_tokens(y, groups, outside) @ (slope + slope.mT)  # (G, B n', 3 c)
    batch, channels, length = y.shape
    sizes = (groups, batch, length + 2 * outside - 2, channels // groups, 3)
    d_taps = d_tokens.view(sizes).permute(1, 0, 3, 4, 2).flatten(1, 2)  # (B, C, 3, n')
    d_padded = sum(F.pad(d_taps[:, :, tap], (tap, 2 - tap)) for tap in range(3))
    return d_padded[..., outside:-outside]  # type: ignore[index]
