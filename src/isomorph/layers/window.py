"""Attention that prefers, or is limited to, windows of the token grid: by a mask, or computed in the windows alone.

Prefix tokens (class, registers) attend to all tokens, and all tokens to them. The last window of a row or column is
smaller where the window does not divide the grid; nothing is padded.

Letters: B images, nh heads, N tokens (prefix tokens, then the H x W of the grid), s tokens of a window, d features.
"""

from collections.abc import Callable, Sequence
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


class _Span(NamedTuple):
    """Where windows of one size begin and end along an axis."""

    start: int
    stop: int
    size: int


def _spans(length: int, side: int) -> list[_Span]:
    """Return the windows of an axis, and the smaller one at its end where the side does not divide it."""
    full = length - length % side
    spans = [_Span(0, full, side), _Span(full, length, length % side)]
    return [span for span in spans if span.stop > span.start]


class _Rectangle(NamedTuple):
    """Windows of one size that fill a part of the grid."""

    rows: _Span
    columns: _Span

    def cut(self, x: Tensor) -> Tensor:
        """Shape: tokens on the grid (B, nh, H, W, d) -> by window (B, windows, nh, s, d)"""
        rows = slice(self.rows.start, self.rows.stop)
        columns = slice(self.columns.start, self.columns.stop)
        x = x[:, :, rows, columns].unflatten(3, (-1, self.columns.size))
        x = x.unflatten(2, (-1, self.rows.size))  # (B, nh, rows, height, columns, width, d)
        x = x.permute(0, 2, 4, 1, 3, 5, 6)
        return x.flatten(4, 5).flatten(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """Undo `cut`."""
        rows = (self.rows.stop - self.rows.start) // self.rows.size
        x = x.unflatten(3, (self.rows.size, self.columns.size))
        x = x.unflatten(1, (rows, -1))  # (B, rows, columns, nh, height, width, d)
        x = x.permute(0, 3, 1, 4, 2, 5, 6)
        return x.flatten(4, 5).flatten(2, 3)

    def attend(
        self,
        attend: Attend,
        maps: Sequence[Tensor],
        first: Sequence[Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        """Return attention in each window to its own tokens and to the first ones, those of the prefix.

        Shape: maps of queries, keys and values (B, nh, H, W, hd), first keys and values (B, nh, prefix, hd), mask
            (B windows or 1, nh or 1, s or 1, prefix + s) or None -> (B, nh, rows, columns, hd)
        """
        q, k, v = map(self.cut, maps)
        count = q.shape[1]
        first_k, first_v = (x[:, None].expand(-1, count, -1, -1, -1) for x in first)
        if first_k.shape[3]:
            k = torch.cat([first_k, k], 3)
            v = torch.cat([first_v, v], 3)
        y = attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask)
        return self.join(y.unflatten(0, (-1, count)))


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
    first = (k[:, :, :prefix], v[:, :, :prefix])
    H, W = windows.grid
    rows_of_outputs = []
    for rows in _spans(H, windows.side):
        parts = []
        for columns in _spans(W, windows.side):
            rectangle = _Rectangle(rows, columns)
            local = None if bias is None else _bias_in(rectangle, windows, bias, q.shape[0])
            parts.append(rectangle.attend(attend, maps, first, local))
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
    padded_map = _Rectangle(_Span(0, rows.shape[0], side), _Span(0, columns.shape[0], side))

    y = rows.clamp(max=H - 1)[:, None]
    x = columns.clamp(max=W - 1)
    maps = [tensor[:, :, prefix:].unflatten(2, (H, W))[:, :, y, x] for tensor in (q, k, v)]

    on_grid = (rows < H)[:, None] & (columns < W)
    inside = padded_map.cut(on_grid[None, None, ..., None])  # (1, windows, 1, s, 1)
    attended = F.pad(inside.mT, (prefix, 0), value=True)
    attended = attended.expand(q.shape[0], -1, -1, -1, -1).flatten(0, 1)

    first = (k[:, :, :prefix], v[:, :, :prefix])
    out = padded_map.attend(attend, maps, first, attended)
    y = torch.arange(H, device=q.device)  # a slice would ask whether it takes all
    x = torch.arange(W, device=q.device)
    out = out[:, :, y[:, None], x].flatten(2, 3)
    if not prefix:
        return out
    return torch.cat([attend(q[:, :, :prefix], k, v, None), out], 2)


def _rounded_up(length: int, side: int) -> int:
    return (length + side - 1) // side * side


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
        h = rectangle.rows.size
        w = rectangle.columns.size
        positions = positions[0, 0, :h, :w].reshape(1, -1)
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
