"""Attention that prefers, or is limited to, windows of the token grid: by a mask, or computed in the windows alone.

Prefix tokens (class, registers) attend to all tokens, and all tokens to them. The last window of a row or column is
smaller where the window does not divide the grid; nothing is padded.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isomorph.layers.grid import GridSize

# Fused attention of queries, keys, values and a mask.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Windows(NamedTuple):
    """Windows of `side` x `side` positions on a grid (H, W), after `prefix` tokens."""

    grid: GridSize
    side: int
    prefix: int = 0

    @property
    def largest(self) -> GridSize:
        return min(self.side, self.grid[0]), min(self.side, self.grid[1])

    def log_share(self, share: Tensor, like: Tensor) -> Tensor:
        """Return log m: m = 1 within windows, from and to prefix tokens, else the share. Shape: () -> (N, N)"""
        rows, columns = (torch.arange(n, device=like.device) // self.side for n in self.grid)
        window = (rows[:, None] * self.grid[1] + columns).flatten()  # (H W,)
        outside = share.to(like.device, torch.float32).log().to(like.dtype)
        log_m = torch.where(window[:, None] == window, torch.zeros_like(outside), outside)
        return F.pad(log_m, (self.prefix, 0, self.prefix, 0))

    def rectangles(self) -> list["_Rectangle"]:
        """Return the parts of the grid in which all windows have one size: at most four."""
        axes: list[list[tuple[int, int, int]]] = []
        for n in self.grid:
            rest = n % self.side
            spans = [(0, n - rest, self.side), (n - rest, n, rest)]
            axes.append([span for span in spans if span[1] > span[0]])
        return [_Rectangle(*rows, *columns) for rows, columns in itertools.product(*axes)]


class _Rectangle(NamedTuple):
    """Windows of height x width positions that fill the rows `top` to `bottom` and the columns `left` to `right`."""

    top: int
    bottom: int
    height: int
    left: int
    right: int
    width: int

    def cut(self, x: Tensor) -> Tensor:
        """Shape: tokens on the grid (B, nh, H, W, d) -> by window (B, windows, nh, height width, d)"""
        x = x[:, :, self.top : self.bottom, self.left : self.right]
        x = x.unflatten(3, (-1, self.width)).unflatten(2, (-1, self.height))  # (B, nh, rows, height, columns, width, d)
        return x.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """Undo `cut`."""
        x = x.unflatten(3, (self.height, self.width)).unflatten(1, ((self.bottom - self.top) // self.height, -1))
        return x.permute(0, 3, 1, 4, 2, 5, 6).flatten(4, 5).flatten(2, 3)


def _as_bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Shape: -> (B or 1, nh or 1, N, N), or None"""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
    mask = mask[(None,) * (4 - mask.ndim)]
    return mask.expand(-1, -1, q.shape[2], -1) if mask.shape[2] == 1 else mask


def attend_with_share(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, windows: Windows, share: Tensor
) -> Tensor:
    """Return attention with log m added to its scores. Shape: q, k, v (B, nh, N, hd), share () -> (B, nh, N, hd)"""
    log_m, bias = windows.log_share(share, q), _as_bias(mask, q)
    return attend(q, k, v, log_m if bias is None else log_m + bias)


def attend_in_windows(attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, windows: Windows) -> Tensor:
    """Return what `attend_with_share` returns with share 0, at a cost linear in the number of windows.

    The mask is for all pairs, or, where it is the same in all windows, for the pairs of the largest window.
    """
    (_, W), _, prefix = windows
    bias, parts = _as_bias(mask, q), []
    for rectangle in windows.rectangles():
        q_, k_, v_ = (rectangle.cut(x[:, :, prefix:].unflatten(2, windows.grid)) for x in (q, k, v))
        local = None if bias is None else _bias_in(rectangle, windows, bias, q.shape[0])
        parts.append(rectangle.join(_attend_in_each(attend, q_, k_, v_, k[:, :, :prefix], v[:, :, :prefix], local)))
    columns = 1 if parts[0].shape[3] == W else 2
    rows = [torch.cat(parts[i : i + columns], 3) for i in range(0, len(parts), columns)]
    out = torch.cat(rows, 2).flatten(2, 3)
    if not prefix:
        return out
    of_prefix = None if bias is None else _prefix_rows(bias, prefix, k.shape[2])
    return torch.cat([attend(q[:, :, :prefix], k, v, of_prefix), out], 2)


def attend_in_padded_windows(attend: Attend, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
    """Return what `attend_in_windows` returns, with windows of one size: a graph for grids of any size.

    Positions below and right of the grid are copies of its last ones, and no query attends to them.
    """
    (H, W), side, prefix = windows
    rows, columns = (torch.arange((n + side - 1) // side * side, device=q.device) for n in (H, W))
    whole = _Rectangle(0, rows.shape[0], side, 0, columns.shape[0], side)
    y, x = rows.clamp(max=H - 1)[:, None], columns.clamp(max=W - 1)
    q_, k_, v_ = (whole.cut(each[:, :, prefix:].unflatten(2, (H, W))[:, :, y, x]) for each in (q, k, v))
    inside = whole.cut(((rows < H)[:, None] & (columns < W))[None, None, ..., None])  # (1, windows, 1, s, 1)
    seen = F.pad(inside.mT, (prefix, 0), value=True).expand(q.shape[0], -1, -1, -1, -1).flatten(0, 1)
    out = whole.join(_attend_in_each(attend, q_, k_, v_, k[:, :, :prefix], v[:, :, :prefix], seen))
    y, x = (torch.arange(n, device=q.device) for n in (H, W))  # a slice would ask whether it takes all
    out = out[:, :, y[:, None], x].flatten(2, 3)
    return torch.cat([attend(q[:, :, :prefix], k, v, None), out], 2) if prefix else out


def _attend_in_each(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, first_k: Tensor, first_v: Tensor, mask: Tensor | None
) -> Tensor:
    """Return attention in each window to its own tokens and to the first ones, those of the prefix.

    Shape: q, k, v (B, windows, nh, s, hd), first (B, nh, prefix, hd), mask (B windows or 1, nh or 1, s or 1,
        prefix + s) or None -> (B, windows, nh, s, hd)
    """
    count = q.shape[1]
    if first_k.shape[2]:
        first = (x[:, None].expand(-1, count, -1, -1, -1) for x in (first_k, first_v))
        k, v = (torch.cat(each, 3) for each in zip(first, (k, v), strict=True))
    return attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask).unflatten(0, (-1, count))


def _bias_in(rectangle: _Rectangle, windows: Windows, bias: Tensor, images: int) -> Tensor:
    """Return the bias in each window, and to prefix tokens.

    Shape: bias (B or 1, nh or 1, N, N) -> (B windows or 1, nh or 1, height width, prefix + height width)
    """
    (H, W), _, prefix = windows
    whole = bias.shape[3] == prefix + H * W
    height, width = windows.grid if whole else windows.largest
    tokens = torch.arange(height * width, device=bias.device).view(1, 1, height, width, 1)
    if whole:
        tokens = rectangle.cut(tokens)[0, :, 0, :, 0]  # (windows, s)
    else:
        tokens = tokens[0, 0, : rectangle.height, : rectangle.width].reshape(1, -1)
    first = torch.arange(prefix, device=bias.device).expand(len(tokens), -1)
    keys = torch.cat([first, tokens + prefix], 1)
    blocks = bias[:, :, (tokens + prefix)[:, :, None], keys[:, None]].transpose(1, 2)  # (B, windows, nh, s, prefix + s)
    return blocks.expand(images, -1, -1, -1, -1).flatten(0, 1) if whole else blocks[:, 0]


def _prefix_rows(bias: Tensor, prefix: int, keys: int) -> Tensor:
    """Return the bias of the prefix queries; that of one window is the same for all positions."""
    rows = bias[:, :, :prefix]
    if rows.shape[3] == keys:
        return rows
    return torch.cat([rows[..., :prefix], rows[..., prefix : prefix + 1].expand(-1, -1, -1, keys - prefix)], 3)


@torch.no_grad()
def limit_bias(relative: Any, windows: Windows) -> None:
    """Limit a relative bias of timm (`RelPosBias`, `RelPosMlp`) to the pairs of one window, in place."""
    index, (H, W), (h, w) = relative.relative_position_index, windows.grid, windows.largest
    tokens = round(len(index) ** 0.5)
    prefix = tokens - H * W  # of the table; an MLP has none
    positions = prefix + torch.arange(H * W, device=index.device).view(H, W)[:h, :w].flatten()
    kept = torch.cat([torch.arange(prefix, device=index.device), positions])
    index = index.view(tokens, tokens)[kept][:, kept].flatten()
    if hasattr(relative, "rel_coords_log"):  # an MLP computes the bias of each offset
        relative.rel_coords_log = relative.rel_coords_log[H - h : H + h - 1, W - w : W + w - 1]
        index = (index // (2 * W - 1) - (H - h)) * (2 * w - 1) + index % (2 * W - 1) - (W - w)
    relative.relative_position_index, relative.bias_shape = index, (len(kept), len(kept), relative.bias_shape[2])
