"""Attention that prefers, or is limited to, windows of the token grid: by a mask, or computed in the windows alone.

Prefix tokens (class, registers) attend to all tokens, and all tokens to them. The last window of a row or column is
smaller where the window does not divide the grid; nothing is padded.

Letters: B images, nh heads, N tokens (prefix tokens, then the H x W of the grid), s tokens of a window, d features.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isomorph.layers.grid import GridSize

# Fused attention of queries, keys, values and a mask.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class TokenWindows(NamedTuple):
    """Windows of `side` x `side` positions on a grid (H, W), after `prefix` tokens."""

    grid: GridSize
    side: int
    prefix: int = 0

    @property
    def largest(self) -> GridSize:
        H, W = self.grid
        return min(self.side, H), min(self.side, W)

    def log_share(self, share: Tensor, like: Tensor) -> Tensor:
        """Return log m: m = 1 within windows, from and to prefix tokens, else the share. Shape: () -> (N, N)"""
        H, W = self.grid
        window_rows = torch.arange(H, device=like.device) // self.side
        window_columns = torch.arange(W, device=like.device) // self.side
        window = (window_rows[:, None] * W + window_columns).flatten()  # (H W,)
        in_one_window = window[:, None] == window  # (H W, H W)
        outside = share.to(like.device, torch.float32).log().to(like.dtype)
        log_m = torch.where(in_one_window, torch.zeros_like(outside), outside)
        return F.pad(log_m, (self.prefix, 0, self.prefix, 0))

    def rectangle_rows(self) -> list[list["_Rectangle"]]:
        """Return rows of rectangles, in each of which all windows have one size.

        A grid that the side does not divide has smaller windows at its right and lower border: [[full, right],
        [lower, corner]].
        """
        H, W = self.grid
        rows = []
        for top, bottom, window_height in _spans(H, self.side):
            row = [
                _Rectangle(top, bottom, window_height, left, right, window_width)
                for left, right, window_width in _spans(W, self.side)
            ]
            rows.append(row)
        return rows


def _spans(length: int, side: int) -> list[tuple[int, int, int]]:
    """Return where windows of one size begin and end along an axis, and their size."""
    remainder = length % side
    spans = [(0, length - remainder, side), (length - remainder, length, remainder)]
    return [(start, stop, size) for start, stop, size in spans if stop > start]


class _Rectangle(NamedTuple):
    """Windows of one size that fill the rows `top` to `bottom` and the columns `left` to `right`, without the last."""

    top: int
    bottom: int
    window_height: int
    left: int
    right: int
    window_width: int

    def cut(self, x: Tensor) -> Tensor:
        """Shape: tokens on the grid (B, nh, H, W, d) -> by window (B, windows, nh, s, d)"""
        x = x[:, :, self.top : self.bottom, self.left : self.right]
        x = x.unflatten(3, (-1, self.window_width))
        x = x.unflatten(2, (-1, self.window_height))  # (B, nh, rows, height, columns, width, d)
        x = x.permute(0, 2, 4, 1, 3, 5, 6)
        return x.flatten(4, 5).flatten(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """Undo `cut`."""
        rows = (self.bottom - self.top) // self.window_height
        x = x.unflatten(3, (self.window_height, self.window_width))
        x = x.unflatten(1, (rows, -1))  # (B, rows, columns, nh, height, width, d)
        x = x.permute(0, 3, 1, 4, 2, 5, 6)
        return x.flatten(4, 5).flatten(2, 3)


def attend_with_share(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    windows: TokenWindows,
    share: Tensor,
) -> Tensor:
    """Return attention with log m added to its scores. Shape: q, k, v (B, nh, N, hd), share () -> (B, nh, N, hd)"""
    scores = windows.log_share(share, q)
    bias = _as_bias(mask, q)
    if bias is not None:
        scores = scores + bias
    return attend(q, k, v, scores)


def attend_in_windows(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, windows: TokenWindows
) -> Tensor:
    """Return what `attend_with_share` returns with share 0, at a cost linear in the number of windows.

    The mask is for all pairs, or, where it is the same in all windows, for the pairs of the largest window.
    """
    prefix = windows.prefix
    bias = _as_bias(mask, q)
    maps = [x[:, :, prefix:].unflatten(2, windows.grid) for x in (q, k, v)]
    first_k = k[:, :, :prefix]
    first_v = v[:, :, :prefix]
    rows_of_outputs = []
    for rectangles in windows.rectangle_rows():
        parts = []
        for rectangle in rectangles:
            q_, k_, v_ = [rectangle.cut(tokens) for tokens in maps]
            local = None if bias is None else _bias_in(rectangle, windows, bias, q.shape[0])
            y = _attend_in_each(attend, q_, k_, v_, first_k, first_v, local)
            parts.append(rectangle.join(y))
        rows_of_outputs.append(torch.cat(parts, 3))
    out = torch.cat(rows_of_outputs, 2).flatten(2, 3)
    if not prefix:
        return out
    of_prefix = None if bias is None else _prefix_rows(bias, prefix, k.shape[2])
    return torch.cat([attend(q[:, :, :prefix], k, v, of_prefix), out], 2)


def attend_in_padded_windows(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, windows: TokenWindows
) -> Tensor:
    """Return what `attend_in_windows` returns, with windows of one size: a graph for grids of any size.

    Positions below and right of the grid are copies of its last ones, and no query attends to them.
    """
    side = windows.side
    prefix = windows.prefix
    H, W = windows.grid
    rows = torch.arange(_rounded_up(H, side), device=q.device)
    columns = torch.arange(_rounded_up(W, side), device=q.device)
    padded_map = _Rectangle(0, rows.shape[0], side, 0, columns.shape[0], side)

    y = rows.clamp(max=H - 1)[:, None]
    x = columns.clamp(max=W - 1)
    maps = [tensor[:, :, prefix:].unflatten(2, (H, W))[:, :, y, x] for tensor in (q, k, v)]
    q_, k_, v_ = [padded_map.cut(tensor) for tensor in maps]

    on_grid = (rows < H)[:, None] & (columns < W)
    inside = padded_map.cut(on_grid[None, None, ..., None])  # (1, windows, 1, s, 1)
    attended = F.pad(inside.mT, (prefix, 0), value=True)
    attended = attended.expand(q.shape[0], -1, -1, -1, -1).flatten(0, 1)

    out = padded_map.join(
        _attend_in_each(attend, q_, k_, v_, k[:, :, :prefix], v[:, :, :prefix], attended)
    )
    y = torch.arange(H, device=q.device)  # a slice would ask whether it takes all
    x = torch.arange(W, device=q.device)
    out = out[:, :, y[:, None], x].flatten(2, 3)
    if not prefix:
        return out
    return torch.cat([attend(q[:, :, :prefix], k, v, None), out], 2)


def _rounded_up(length: int, side: int) -> int:
    return (length + side - 1) // side * side


def _attend_in_each(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_k: Tensor,
    first_v: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Return attention in each window to its own tokens and to the first ones, those of the prefix.

    Shape: q, k, v (B, windows, nh, s, hd), first (B, nh, prefix, hd), mask (B windows or 1, nh or 1, s or 1,
        prefix + s) or None -> (B, windows, nh, s, hd)
    """
    count = q.shape[1]
    if first_k.shape[2]:
        k = torch.cat([first_k[:, None].expand(-1, count, -1, -1, -1), k], 3)
        v = torch.cat([first_v[:, None].expand(-1, count, -1, -1, -1), v], 3)
    y = attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask)
    return y.unflatten(0, (-1, count))


def _as_bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return what a mask adds to scores. Shape: up to four axes -> (B or 1, nh or 1, N, N)"""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
        mask = zeros.masked_fill(~mask, -torch.inf)
    while mask.ndim < 4:
        mask = mask[None]
    if mask.shape[2] == 1:
        mask = mask.expand(-1, -1, q.shape[2], -1)
    return mask


def _bias_in(rectangle: _Rectangle, windows: TokenWindows, bias: Tensor, images: int) -> Tensor:
    """Return the bias in each window, and to prefix tokens.

    Shape: bias (B or 1, nh or 1, N, N) -> (B windows or 1, nh or 1, s, prefix + s)
    """
    prefix = windows.prefix
    H, W = windows.grid
    is_of_all_pairs = bias.shape[3] == prefix + H * W
    height, width = windows.grid if is_of_all_pairs else windows.largest
    positions = torch.arange(height * width, device=bias.device).view(1, 1, height, width, 1)
    if is_of_all_pairs:
        positions = rectangle.cut(positions)[0, :, 0, :, 0]  # (windows, s)
    else:
        positions = positions[0, 0, : rectangle.window_height, : rectangle.window_width].reshape(
            1, -1
        )
    queries = positions + prefix
    first = torch.arange(prefix, device=bias.device).expand(len(positions), -1)
    keys = torch.cat([first, queries], 1)
    blocks = bias[:, :, queries[:, :, None], keys[:, None]]  # (B, nh, windows, s, prefix + s)
    if not is_of_all_pairs:
        return blocks[:, :, 0]
    return blocks.transpose(1, 2).expand(images, -1, -1, -1, -1).flatten(0, 1)


def _prefix_rows(bias: Tensor, prefix: int, keys: int) -> Tensor:
    """Return the bias of the prefix queries; that of one window is the same for all positions."""
    rows = bias[:, :, :prefix]
    if rows.shape[3] == keys:
        return rows
    to_prefix = rows[..., :prefix]
    to_positions = rows[..., prefix : prefix + 1].expand(-1, -1, -1, keys - prefix)
    return torch.cat([to_prefix, to_positions], 3)


@torch.no_grad()
def limit_bias(relative: Any, windows: TokenWindows) -> None:
    """Limit a relative bias of timm (`RelPosBias`, `RelPosMlp`) to the pairs of one window, in place."""
    index = relative.relative_position_index
    H, W = windows.grid
    h, w = windows.largest
    tokens = round(len(index) ** 0.5)
    prefix = tokens - H * W  # of the table; an MLP has none
    positions = torch.arange(H * W, device=index.device).view(H, W)[:h, :w].flatten()
    positions_kept = torch.cat([torch.arange(prefix, device=index.device), prefix + positions])
    index = index.view(tokens, tokens)[positions_kept][:, positions_kept].flatten()
    if hasattr(relative, "rel_coords_log"):  # an MLP computes the bias of each offset
        relative.rel_coords_log = relative.rel_coords_log[H - h : H + h - 1, W - w : W + w - 1]
        down = index // (2 * W - 1) - (H - h)
        right = index % (2 * W - 1) - (W - w)
        index = down * (2 * w - 1) + right
    relative.relative_position_index = index
    relative.bias_shape = (len(positions_kept), len(positions_kept), relative.bias_shape[2])
