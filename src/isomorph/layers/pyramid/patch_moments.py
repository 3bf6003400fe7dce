"""Mean and covariance of patches that overlap, without forming the patches.

Those of 3 x 3 patches come from products of a map with its shifted self.

Two taps a and b of a patch read x[p + a] and x[p + b]. Their product, summed over all positions p, depends on the taps
by the lag b - a alone, but for what the border cuts off. Patches have 81 pairs of taps, and 25 lags; those of lag -d
are the transposes of those of lag d. So a convolution's weight gradient with a 3 x 5 kernel gives all sums:

    T[d] = sum_u y[u] y[u + d]^T,    y = x - m inside the map, 0 outside
    S[a, b] = T[b - a] - (positions outside the map, from which both taps read inside it: first, last row and column)

A patch of x is that of y plus M i: i tells which taps are inside the map, and M has a value of m for each tap. So

    Cov(x) = S - mean(y) mean(y)^T + M Cov(i, y) + Cov(y, i) M^T + M Cov(i) M^T

where Cov(i, y) follows from the sum of y over the batch.

**Depthwise convolutions.** An output row of a channel reads one row of the map for each row of the kernel. R_a are the
rows that kernel row a reads, for all images and output rows. With stride s, two taps (a, i) and (b, j) have the sum of
products

    S[(a, i), (b, j)] = sum_c M_ab[s c + i, s c + j],    M_ab = R_a^T R_b

over the output columns c, along a diagonal. M_(a+s)(b+s) is M_ab, except for the first and the last output row.

Letters: k kernel height and width, H' output rows, P columns of the padded map, or of a part of it; L positions, n taps
of a patch, G groups of c channels, C = G c.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from isomorph.layers.pyramid.tokens import RIDGE_ULPS, Window, saves_work

TILE = 16
"""Output columns that are computed together: their product of rows has few entries off the diagonals that are read."""
BORDERS = (0, -1), (2, 0)
"""A tap of three and the row or column that it reads from a position outside the map."""


def keeps_size(window: Window) -> bool:
    """True for a 3 x 3 convolution that keeps the size of its map."""
    return window[:4] == ((3, 3), (1, 1), (1, 1), (1, 1))


class DepthwiseProducts(torch.autograd.Function):
    """The sum of p p^T over the patches p of y, the map less a level for each channel; saves only x.

    Shape: x (B, C, H, W), level (C, 1, 1) -> (C, k k, k k)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, level: Tensor, window: Window) -> Tensor:
        rows = _rows_read(x.to(level.dtype) - level, window)
        sums: Any = 0
        for columns, taps in _tiles(x, window):
            joint = _multiply_rows([each[..., columns] for each in rows], window.stride[0], len(x))
            parts = [torch.stack([_diagonal(joint, i, j).sum(-1) for j in taps], -1) for i in taps]
            sums = sums + torch.stack(parts, 2)  # (C, a, i, b, j)
        return sums.flatten(3).flatten(1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Window], output: Tensor) -> None:
        x, level, ctx.window = inputs
        ctx.save_for_backward(x, level)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, level = ctx.saved_tensors
        y, size = x.to(level.dtype) - level, ctx.window.kernel_size
        slope = (grad + grad.mT).unflatten(2, size).unflatten(1, size)  # (C, a, i, b, j)
        d_y = _convolve_slope(y, slope) if keeps_size(ctx.window) else _apply_slope(y, slope, ctx.window)
        return d_y.to(x.dtype), None, None


def _rows_read(y: Tensor, window: Window) -> list[Tensor]:
    """Return the rows of the padded map that each kernel row reads, those of one output row together.

    Shape: (B, C, H, W) -> k times (C, H' B, P)
    """
    (high, wide), down = window.padding, window.stride[0]
    rows = F.pad(y.permute(1, 2, 0, 3), (wide, wide, 0, 0, high, high)).contiguous()  # (C, H + 2 padding, B, P)
    count = window.output_size(y)[0]
    return [rows[:, a : a + (count - 1) * down + 1 : down].flatten(1, 2) for a in range(window.kernel_size[0])]


def _tiles(y: Tensor, window: Window) -> Iterator[tuple[slice, list[slice]]]:
    """Yield parts of the padded map's columns that hold what a few output columns read.

    Yield with each part the slices of it that the kernel's columns read.
    """
    width, across, count = window.kernel_size[1], window.stride[1], window.output_size(y)[1]
    for start in range(0, count, TILE):
        first, span = start * across, (min(TILE, count - start) - 1) * across
        yield slice(first, first + span + width), [slice(i, i + span + 1, across) for i in range(width)]


def _multiply_rows(rows: Sequence[Tensor], down: int, batch: int) -> Tensor:
    """Return the products M_ab of all pairs of rows. Shape: k times (C, H' B, P) -> (C, k, k, P, P)"""
    height, first, last = len(rows), slice(0, batch), slice(-batch, None)  # of the output rows
    products: dict[tuple[int, int], Tensor] = {}
    for a in range(height):
        for b in range(a, height):
            if a < down:
                products[a, b] = rows[a].mT @ rows[b]
                continue
            leaving = rows[a - down][:, first].mT @ rows[b - down][:, first]
            entering = rows[a][:, last].mT @ rows[b][:, last]
            products[a, b] = products[a - down, b - down] - leaving + entering
    pairs = [[products[a, b] if a <= b else products[b, a].mT for b in range(height)] for a in range(height)]
    return torch.stack([torch.stack(row, 1) for row in pairs], 1)


def _diagonal(matrix: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return the entries on the diagonal of a part of matrices, as a view. Shape: (*, P, P) -> (*, n)"""
    return matrix[..., rows, columns].diagonal(dim1=-2, dim2=-1)


def _apply_slope(y: Tensor, slope: Tensor, window: Window) -> Tensor:
    """Return the gradient of the map: slope p for every patch p, added at the positions that p reads.

    Shape: y (B, C, H, W), slope (C, k, k, k, k) -> as y
    """
    (height, _), (high, wide), down = window.kernel_size, window.padding, window.stride[0]
    rows, count = _rows_read(y, window), window.output_size(y)[0]
    d_padded: Any = None
    for columns, taps in _tiles(y, window):
        part = torch.cat([each[..., columns] for each in rows], -1)  # (C, H' B, k P)
        size = part.shape[-1] // height
        bands = slope.new_zeros(len(slope), height, height, size, size)
        for i, read in enumerate(taps):
            for j, other in enumerate(taps):
                _diagonal(bands, read, other).add_(slope[:, :, i, :, j].unsqueeze(-1))
        d_part = part @ bands.transpose(2, 3).flatten(3).flatten(1, 2)
        d_part = d_part.unflatten(2, (height, size)).unflatten(1, (count, len(y)))  # (C, H', B, k, P)
        if d_padded is None:  # from a product: under vmap it has a sample axis if any factor has one
            d_padded = d_part.new_zeros(y.shape[1], y.shape[2] + 2 * high, len(y), y.shape[3] + 2 * wide)
        for a in range(height):
            d_padded[:, a : a + (count - 1) * down + 1 : down, :, columns] += d_part[:, :, :, a]
    return d_padded[:, high : high + y.shape[2], :, wide : wide + y.shape[3]].permute(2, 0, 1, 3)


def _convolve_slope(y: Tensor, slope: Tensor) -> Tensor:
    """Return the gradient of the map for a 3 x 3 convolution that keeps the size of its map.

    The sum over patches at all positions, outside the map too, is a convolution with a 5 x 5 kernel. Those outside are
    subtracted: rows and columns with their ends, so that corners, which are in both, are added again.
    """
    channels = y.shape[1]
    d_y = F.conv2d(y, _sum_lags(_sum_lags(slope.transpose(2, 3))).unsqueeze(1), padding=2, groups=channels)
    for tap, at in BORDERS:
        along_row, along_column = (
            _sum_lags(taps).unsqueeze(1) for taps in (slope[:, tap, :, tap], slope[:, :, tap, :, tap])
        )
        d_y[:, :, at] -= F.conv1d(y[:, :, at], along_row, padding=2, groups=channels)
        d_y[..., at] -= F.conv1d(y[..., at], along_column, padding=2, groups=channels)
        for corner, column in BORDERS:
            d_y[:, :, at, column] += y[:, :, at, column] * slope[:, tap, corner, tap, corner]
    return d_y


def _sum_lags(pairs: Tensor) -> Tensor:
    """Sum pairs of three taps by their lag, from -2 to 2. Shape: (C, 3, 3, *) -> (C, *, 5)"""
    return torch.stack([pairs.diagonal(lag, 1, 2).sum(-1) for lag in range(-2, 3)], -1)


REACH = 2
"""Largest lag between two of three taps."""


def has_patch_moments(window: Window, x: Tensor) -> bool:
    """True for a convolution whose moments `measure_patches` computes: depthwise ones where arithmetic takes the time.

    Their products of rows are many small operations, for which a GPU pays more than for the patches.
    """
    if window.groups < x.shape[1]:
        return keeps_size(window)
    return saves_work(x) and (keeps_size(window) or (window.overlaps and window.dilation == (1, 1)))


def measure_patches(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the patches of all positions, in float32 at least.

    Shape: x (B, C, H, W) -> (n c,), (n c, n c) for n taps, or (G, n c), (G, n c, n c) with groups
    """
    summed = x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))  # (C, H, W)
    batch, groups = max(x.shape[0], 1), window.groups
    shift = (summed.mean((1, 2), keepdim=True) / batch).detach()  # any constant is exact; the mean keeps digits
    second = DepthwiseProducts if groups == x.shape[1] else PatchProducts
    inside = window.unfold(torch.ones_like(summed[:1]))  # (n, L)
    taps, positions = inside.shape
    products = second.apply(x, shift, window) / (batch * positions)  # (G, n c, n c)
    shares = inside.mean(1)
    patches = window.unfold(summed / batch - shift).view(groups, -1, positions)  # (G, n c, L)
    means = patches.mean(-1)
    with_inside = patches @ inside.mT / positions - means.unsqueeze(-1) * shares  # Cov(y, i): (G, n c, n)
    inside_own = inside @ inside.mT / positions - shares.outer(shares)  # Cov(i): (n, n)
    levels = (shift.view(groups, -1, 1, 1) * torch.eye(taps, device=x.device)).flatten(1, 2)  # M: (G, n c, n)
    tilted = (with_inside + levels @ inside_own / 2) @ levels.mT
    covariance = products - means.unsqueeze(2) * means.unsqueeze(1) + tilted + tilted.mT
    mean = means + levels @ shares
    own = covariance.diagonal(dim1=-2, dim2=-1)  # the products of one tap may come from those of another
    unit = RIDGE_ULPS * torch.finfo(own.dtype).eps
    own += (own.detach().unflatten(-1, (-1, taps)).amax(-1).repeat_interleave(taps, -1) * unit - own).clamp(min=0)
    own *= 1 + unit
    return mean, covariance


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
