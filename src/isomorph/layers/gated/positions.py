"""Position attention in closed form: one softmax along rows, one along columns, and their product.

A position score that is quadratic in the offset, a dx^2 + b dx + a dy^2 + c dy, is the sum of a row part and a column
part, so softmax(scores) = rows (x) columns exactly. Applied axis by axis it costs O(N (H + W)) work and
O(H^2 + W^2) memory instead of O(N^2). It does not depend on the image, so only the values have a batch axis.

Content and position are mixed with few saved tensors, y_h = (1 - s_h) content_h + s_h (rows_h (x) columns_h) values_h,
with s = sigma(gate). Plain autograd would store four more tensors of the size of x: the values in product layout,
intermediate products, the position output, and the arguments of the mix. None is needed: the gradient of the gate
follows from that of the rows, and the intermediate products are recomputed with one small product.

Letters: nh heads, Hq Wq query grid, H W key grid, hd head width, C channels, p prefix tokens.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isomorph.layers.grid import GridSize, axis_offsets
from isomorph.layers.modes import (
    Gradients,
    KeepsInEval,
    SavesInputs,
    at_least_float32,
    constant,
    is_eager,
    on_cpu,
)


def is_autocast_on(x: Tensor) -> bool:
    """True if autocast is enabled on a tensor's device."""
    device = x.device.type
    # autocast does not know the meta device
    return device != "meta" and torch.is_autocast_enabled(device)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which matrix products with x are computed; autocast leaves float64 as it is."""
    if x.dtype == torch.float64 or not is_autocast_on(x):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def centred_axis_attention(offsets: Tensor, centre: Tensor, locality: Tensor) -> Tensor:
    """Return softmax(-locality (offset - centre)^2) along one axis: T-CNN eq. 4, less what cancels in the softmax.

    Shape: offsets (Nq, Nk), centre (nh,), locality (nh,) -> (nh, Nq, Nk)
    """
    squared = (offsets - centre[:, None, None]).square()
    scores = -locality[:, None, None] * squared
    return scores.softmax(-1)


def _signs(device: torch.device) -> Tensor:
    return torch.tensor([[1.0], [-1.0]], device=device)


def mix_weights(gate: Tensor) -> Tensor:
    """Return sigma(gate) and 1 - sigma(gate), exact for gates far from 0. Shape: gate (nh,) -> (2, nh)"""
    return torch.sigmoid(gate * constant(_signs, gate))


def window_centres(window: GridSize) -> Tensor:
    """Return the offsets (row, column) of taps, row by row; half steps for an even side. Shape: -> (height width, 2)"""
    rows, columns = (torch.arange(size, dtype=torch.float32) - (size - 1) / 2 for size in window)
    return torch.cartesian_prod(rows, columns)  # (height width, 2)


class Axis(NamedTuple):
    """Queries and keys along an axis: their numbers, where the first query is among the keys, and the queries' step."""

    queries: int
    keys: int
    start: float
    stride: float

    def offsets(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return key - query of every pair. Shape: -> (queries keys,)"""
        return axis_offsets(*self, device, dtype).flatten()


def image_axis(queries: int, keys: int) -> Axis:
    """Return an axis of two grids on the same image: the middles of the areas that they stand for are compared."""
    return Axis(queries, keys, (keys / queries - 1) / 2, keys / queries)


def _features(
    axes: tuple[Axis, Axis],
    of_taps: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return (dx, dy, dx^2 + dy^2), of taps (2 dy, 2 dx, -dx^2 - dy^2). Shape: -> (Hq H + Wq W, 3)"""
    dy = axes[0].offsets(dtype, device)
    dx = axes[1].offsets(dtype, device)
    rows = torch.stack([0 * dy, dy, dy.square()], 1)
    columns = torch.stack([dx, 0 * dx, dx.square()], 1)
    features = torch.cat([rows, columns])
    if of_taps:
        factors = torch.tensor([2, 2, -1], device=device)
        features = features[:, [1, 0, 2]] * factors
    return features


def axis_scores(
    position: Tensor,
    axes: Iterable[Axis],
    of_taps: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the position scores v_pos . (dx, dy, dx^2 + dy^2) by axis: ConViT eq. 4; those of taps: T-CNN eq. 4.

    The `position` of taps is (locality centre, locality); locality |centre|^2 is left out, as it cancels in the
    softmax. Shape: position (nh, 3) -> (nh, Hq, H), (nh, Wq, W)
    """
    rows, columns = axes
    features = constant(_features, position, (rows, columns), of_taps, at_least_float32(position))
    # not a product of matrices, which may be in low precision
    scores = (position.unsqueeze(1) * features).sum(-1)
    by_row, by_column = scores.split(
        [rows.queries * rows.keys, columns.queries * columns.keys], dim=1
    )
    by_row = by_row.unflatten(1, (rows.queries, rows.keys))
    by_column = by_column.unflatten(1, (columns.queries, columns.keys))
    return by_row, by_column


def axis_attention(
    position: Tensor,
    axes: Iterable[Axis],
    of_taps: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the softmax of `axis_scores` along rows and along columns. Shape: -> (nh, Hq, H), (nh, Wq, W)"""
    rows, columns = axis_scores(position, axes, of_taps)
    return rows.softmax(-1), columns.softmax(-1)


def without_subnormals(maps: Tensor) -> Tensor:
    """On a CPU, clear entries so near 0 that a product with them takes several times as long."""
    # float16's smallest numbers count
    if maps.dtype == torch.float16 or not on_cpu(maps) or not is_eager():
        return maps
    return F.threshold(maps, torch.finfo(maps.dtype).tiny ** 0.5, 0.0)


def kronecker(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the full attention map. Shape: rows (nh, Hq, H), columns (nh, Wq, W) -> (nh, Hq Wq, H W)"""
    return _by_position(rows[:, :, None, :, None] * columns[:, None, :, None])


def outer_sum(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the scores of all pairs. Shape: rows (nh, Hq, H), columns (nh, Wq, W) -> (nh, Hq Wq, H W)"""
    return _by_position(rows[:, :, None, :, None] + columns[:, None, :, None])


def _by_position(grid: Tensor) -> Tensor:
    """Shape: (nh, Hq, Wq, H, W) -> (nh, Hq Wq, H W)"""
    return grid.flatten(3).flatten(1, 2)


def to_head_grid(tokens: Tensor, grid_size: GridSize) -> Tensor:
    """Lay out tokens for products along either axis. Shape: (B, H W, nh, hd) -> (nh, H, W, B, hd)"""
    return tokens.unflatten(1, grid_size).permute(3, 1, 2, 0, 4).contiguous()


def from_head_grid(grid: Tensor) -> Tensor:
    """Undo `to_head_grid`. Shape: grid (nh, H, W, B, hd) -> (B, H W, nh, hd)"""
    return grid.permute(3, 1, 2, 0, 4).flatten(1, 2)


def attend_rows(rows: Tensor, grid: Tensor) -> Tensor:
    """Apply maps along the rows of a grid. Shape: rows (nh, Hq, H), grid (nh, H, W, B, hd) -> (nh, Hq, W, B, hd)"""
    return torch.bmm(rows, grid.flatten(2)).unflatten(2, grid.shape[2:])


def _matrix_per_row(x: Tensor) -> Tensor:
    """Shape: x (nh, H, n, m) -> (nh H, n, m), by a detour over one axis, which exports with open sizes can prove."""
    nh, H, n, m = x.shape
    flat = x.contiguous().flatten().view(nh * H, n * m)
    return flat.unflatten(1, (n, m))


def attend_columns(columns: Tensor, grid: Tensor) -> Tensor:
    """Apply maps along columns. Shape: columns (nh, Wq, W), grid (nh, H, W, B, hd) -> (nh, H, Wq, B, hd)"""
    nh, H = grid.shape[:2]
    lines = _matrix_per_row(columns[:, None].expand(-1, H, -1, -1))  # (nh H, Wq, W)
    out = torch.bmm(lines, _matrix_per_row(grid.flatten(3)))  # (nh H, Wq, B hd)
    return out.unflatten(0, (nh, H)).unflatten(-1, grid.shape[3:])


def attend_by_axis(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """Shape: rows (nh, Hq, H), columns (nh, Wq, W), values (B, H W, nh, hd) -> (B, Hq Wq, nh, hd)"""
    grid = to_head_grid(values, (rows.shape[2], columns.shape[2]))
    return from_head_grid(attend_columns(columns, attend_rows(rows, grid)))


def gate_gradient(rows: Tensor, d_rows: Tensor, by_content: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of the gates of (1 - s) content + s position, with s = sigma(gate).

    It is s (1 - s) (dy . position - dy . content), where rows . d_rows is s dy . position.

    Shape: rows, d_rows (nh, H, H), by_content dy . content (nh,), weights s and 1 - s (2, nh) -> (nh,)
    """
    share, content_share = weights
    by_position = (rows * d_rows).sum((1, 2))
    return torch.addcmul(by_position, share, by_content, value=-1) * content_share


class MixPositions(SavesInputs):
    """Mix content with (rows (x) columns) values by their weights; prefix tokens keep their content.

    `weights` follow from the gate, whose derivative is returned as a whole; second ones pass through them. Shape:
    content, values (B, p + H W, nh, hd), rows (nh, H, H), columns (nh, W, W), gate (nh,), weights (2, nh) -> as content
    """

    @staticmethod
    def forward(
        content: Tensor,
        values: Tensor,
        rows: Tensor,
        columns: Tensor,
        gate: Tensor,
        weights: Tensor,
        p: int,
    ) -> Tensor:
        position = attend_by_axis(rows, columns, values[:, p:])
        mixed = torch.lerp(content[:, p:], position, weights[0, :, None])
        return torch.cat([content[:, :p], mixed], dim=1) if p else mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        content, values, rows, columns, _, weights = ctx.saved_tensors
        (p,) = ctx.options
        share, content_share = weights
        dy = grad[:, p:]
        scaled = rows * share[:, None, None]
        dy_grid = to_head_grid(dy, (rows.shape[1], columns.shape[1]))
        halfway = attend_columns(columns.mT, dy_grid)  # (nh, H, W, B, hd)
        d_values = from_head_grid(attend_rows(scaled.mT, halfway))
        d_content = dy * content_share[:, None]
        if p:
            d_content = torch.cat([grad[:, :p], d_content], dim=1)
            d_values = F.pad(d_values, (0, 0, 0, 0, p, 0))
        trained = ctx.needs_input_grad[2:5]
        if not any(trained):  # position parameters and gates are frozen
            return d_content, d_values, None, None, None, None, None

        v_grid = to_head_grid(values[:, p:], (rows.shape[2], columns.shape[2]))
        d_scaled = torch.bmm(halfway.flatten(2), v_grid.flatten(2).mT)  # (nh, H, H)
        d_rows = d_scaled * share[:, None, None]
        lines = dy_grid.flatten(3).flatten(0, 1)  # (nh H, W, B hd)
        attended_rows = attend_rows(scaled, v_grid).flatten(3).flatten(0, 1)  # (nh H, W, B hd)
        by_row = torch.bmm(lines, attended_rows.mT).unflatten(0, dy_grid.shape[:2])  # (nh, H, W, W)
        d_columns = by_row.sum(1)
        by_content = (dy * content[:, p:]).sum((0, 1, 3))
        d_gate = gate_gradient(rows, d_rows, by_content, weights)
        return d_content, d_values, d_rows, d_columns, d_gate, None, None


def gated_mix(content: Tensor, position: Tensor, gate: Tensor) -> Tensor:
    """Return (1 - sigma(gate)) content + sigma(gate) position. Shape: (..., nh, Nq, n), (nh, Nq, n), (nh,)"""
    share, content_share = mix_weights(gate).to(content.dtype)[:, :, None, None]
    return torch.addcmul(position * share, content, content_share)


class PositionHeads(KeepsInEval):
    """Base of layers whose heads attend by position; where they attend by content too, they have a `gate`."""

    num_heads: int

    @property
    def position_share(self) -> Tensor:
        """Share of position attention in every head: sigmoid(gate), 1 without gates. Shape: -> (nh,)"""
        gate = self._parameters.get("gate")
        if gate is None:
            return next(self.parameters()).new_ones(self.num_heads)
        return torch.sigmoid(gate)

    @torch.no_grad()
    def set_gating(self, locality: float | None = None, gate: float | None = None) -> None:
        """Set what is given of every head, if it has it. Raises: ValueError for a locality not above 0 and finite."""
        if locality is not None:
            if not 0 < locality < math.inf:
                raise ValueError(f"locality {locality} must be above 0 and finite")
            self._set_locality(locality)
        gates = self._parameters.get("gate")
        if gate is not None and gates is not None:
            gates.fill_(gate)

    def _set_locality(self, locality: float) -> None:
        raise NotImplementedError
