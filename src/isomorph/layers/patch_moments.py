"""Mean and covariance of 3 x 3 patches, without forming the patches: from products of a map with its shifted self.

Two taps a and b of a patch read x[p + a] and x[p + b]. Their product, summed over all positions p, depends on the taps
by the lag b - a alone, but for what the border cuts off. Patches have 81 pairs of taps, and 25 lags; those of lag -d
are the transposes of those of lag d. So a convolution's weight gradient with a 3 x 5 kernel gives all sums:

    T[d] = sum_u y[u] y[u + d]^T,    y = x - m inside the map, 0 outside
    S[a, b] = T[b - a] - (positions outside the map, from which both taps read inside it: first, last row and column)

x = y + m 1, with 1 the indicator of the map, adds what follows from sums of y over the batch.

Letters: L = H W positions, G groups of c channels, C = G c.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from isomorph.layers.tokens import Window

REACH = 2
"""Largest lag between two of three taps."""


def reads_neighbours(window: Window) -> bool:
    """True for a 3 x 3 convolution that keeps the size of its map."""
    return window[:4] == ((3, 3), (1, 1), (1, 1), (1, 1))


def measure_patches(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the 3 x 3 patches of all positions, in float32 at least.

    Shape: x (B, C, H, W) -> (9 C,), (9 C, 9 C), or (G, 9 c), (G, 9 c, 9 c) with groups
    """
    summed = x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))  # (C, H, W)
    batch, positions = max(x.shape[0], 1), summed[0].numel()
    shift = (summed.mean((1, 2), keepdim=True) / batch).detach()  # any constant is exact; the mean keeps digits
    second = _sum_products(x, shift, groups) / (batch * positions)  # (G, c, 9, c, 9)
    inside = F.unfold(torch.ones_like(summed[:1]), 3, padding=1)  # (9, L)
    sums = F.unfold(summed / batch - shift, 3, padding=1).view(groups, -1, *inside.shape)  # (G, c, 9, L)
    m, shares, means = shift.view(groups, -1), inside.mean(1), sums.mean(-1)  # (G, c), (9,), (G, c, 9)
    ones = inside @ inside.mT / positions - shares.outer(shares)  # (9, 9)
    cross = (sums @ inside.mT / positions - means.unsqueeze(-1) * shares).permute(0, 3, 1, 2)  # (G, 9, c, 9)
    cross = m[:, :, None, None, None] * cross.unsqueeze(1)  # (G, c, 9, c, 9): of the indicator with y
    constant = (m.unsqueeze(2) * m.unsqueeze(1))[:, :, None, :, None] * ones.unsqueeze(1)
    own = second - means[..., None, None] * means[:, None, None]  # (G, c, 9, c, 9): of y with y
    covariance = own + cross + cross.permute(0, 3, 4, 1, 2) + constant
    mean = means + m.unsqueeze(-1) * shares
    width = mean[0].numel()
    rest = () if groups == 1 else (groups,)
    return mean.reshape(*rest, width), covariance.reshape(*rest, width, width)


def _sum_products(x: Tensor, shift: Tensor, groups: int) -> Tensor:
    """Return the sum over all patches of y y^T. Shape: x (B, C, H, W), shift (C, 1, 1) -> (G, c, 9, c, 9)"""
    half = LaggedProducts.apply(x, shift, groups)  # (G, c, c, 3, 5)
    lags = torch.cat([half[..., 1:, :].transpose(1, 2).flip(-2, -1), half], -2)  # (G, c, c, 5, 5)
    taps = torch.arange(3, device=x.device)
    lag = taps - taps.unsqueeze(1) + REACH  # (3, 3): from tap a to tap b
    index = lag[:, None, :, None] * 5 + lag[:, None, :]  # (ay, ax, by, bx)
    products = lags.flatten(-2)[..., index].permute(0, 1, 3, 4, 2, 5, 6).contiguous()  # (G, c, ay, ax, c, by, bx)
    for tap, at in ((0, -1), (2, 0)):
        products[:, :, tap, :, :, tap] -= StripProducts.apply(x[:, :, at], shift, groups, 1)
        products[:, :, :, tap, :, :, tap] -= StripProducts.apply(x[..., at], shift, groups, 2)
    return products.flatten(5).flatten(2, 3)


def _centre(x: Tensor, shift: Tensor) -> Tensor:
    return x.to(shift.dtype) - shift.view(-1, *[1] * (x.ndim - 2))


class LaggedProducts(torch.autograd.Function):
    """T[d] = sum_u y[u] y[u + d]^T for rows below and at u, and columns on both sides; saves only x.

    dT[d] reaches y[u] from y[u + d], and y[u + d] from y[u]: both together are a convolution with a 5 x 5 kernel.

    Shape: x (B, C, H, W), shift (C, 1, 1) -> (G, c, c, 3, 5)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, shift: Tensor, groups: int) -> Tensor:
        y = _centre(x, shift)
        around = F.pad(y, (REACH, REACH, 0, REACH))
        size = (x.shape[1], x.shape[1] // groups, REACH + 1, 2 * REACH + 1)
        return conv2d_weight(around, size, y, groups=groups).unflatten(0, (groups, -1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        x, shift, ctx.groups = inputs
        ctx.save_for_backward(x, shift)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, shift = ctx.saved_tensors
        below = F.pad(grad, (0, 0, REACH, 0))  # (G, c, c, 5, 5)
        kernel = (below + below.transpose(1, 2).flip(-2, -1)).flatten(0, 1)
        return F.conv2d(_centre(x, shift), kernel, padding=REACH, groups=ctx.groups).to(x.dtype), None, None


class StripProducts(torch.autograd.Function):
    """The sum of y y^T over the patches of three taps along a row or column of the map; saves only x.

    `outside` is the number of zeros at each end: 1 for patches centred on the strip, 2 for all that read from it.

    Shape: x (B, C, n), shift (C, 1, 1) -> (G, c, 3, c, 3)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, shift: Tensor, groups: int, outside: int) -> Tensor:
        tokens = _strip_tokens(_centre(x, shift), groups, outside)
        return (tokens.mT @ tokens).unflatten(-1, (-1, 3)).unflatten(1, (-1, 3))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int, int], output: Tensor) -> None:
        x, shift, ctx.groups, ctx.outside = inputs
        ctx.save_for_backward(x, shift)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, shift = ctx.saved_tensors
        slope = grad.flatten(3).flatten(1, 2)
        d_tokens = _strip_tokens(_centre(x, shift), ctx.groups, ctx.outside) @ (slope + slope.mT)  # (G, B n', 3 c)
        batch, channels, length = x.shape
        sizes = (ctx.groups, batch, length + 2 * ctx.outside - 2, channels // ctx.groups, 3)
        d_taps = d_tokens.view(sizes).permute(1, 0, 3, 4, 2)  # (B, G, c, 3, n')
        d_taps = d_taps.flatten(1, 2)  # (B, C, 3, n')
        d_padded = sum(F.pad(d_taps[:, :, tap], (tap, 2 - tap)) for tap in range(3))
        return d_padded[..., ctx.outside : -ctx.outside].to(x.dtype), None, None, None  # type: ignore[index]


def _strip_tokens(y: Tensor, groups: int, outside: int) -> Tensor:
    """Return three neighbours along a strip, at each place. Shape: (B, C, n) -> (G, B n', 3 c)"""
    taps = F.pad(y, (outside, outside)).unfold(-1, 3, 1).unflatten(1, (groups, -1))  # (B, G, c, n', 3)
    return taps.permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)
