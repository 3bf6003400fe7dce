"""Position attention in closed form: one softmax along rows, one along columns, and their product.

A position score that is quadratic in the offset, a dx^2 + b dx + a dy^2 + c dy, is the sum of a row part and a column
part, so softmax(scores) = rows (x) columns exactly. Applied axis by axis it costs O(N (H + W)) work and
O(H^2 + W^2) memory instead of O(N^2); multiplied out (the Kronecker product) it is one matrix product, which is
faster on very small grids. Neither depends on the image, so only the values have a batch axis.

Content and position are mixed with few saved tensors, y_h = w_h content_h + (rows_h (x) columns_h) values_h, where w is
1 - sigma(gate) and the rows contain sigma(gate). Plain autograd would store four more tensors of the size of x: the
values in product layout, intermediate products, the position output, and the arguments of the mix. None is needed: the
gradient of the gate needs <dy, P v> = <P^T dy, v>, and P^T dy is the gradient of the values; the intermediate products
are recomputed with one small product.

Letters: nh heads, Hq Wq query grid, H W key grid, hd head width, C channels.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


def geometry_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype for offsets and their softmax, float32 at least: squared offsets are inexact in bfloat16."""
    return torch.promote_types(parameter.dtype, torch.float32)


def is_autocast_on(x: Tensor) -> bool:
    """True if matrix products with x are computed in the dtype of autocast."""
    device = x.device.type
    return device != "meta" and torch.is_autocast_enabled(device)  # autocast does not know the meta device


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which matrix products with x are computed: that of autocast where it is on, else of x."""
    return torch.get_autocast_dtype(x.device.type) if is_autocast_on(x) else x.dtype


def centred_axis_attention(offsets: Tensor, centre: Tensor, locality: Tensor) -> Tensor:
    """Return attention along one axis that peaks at `centre`: softmax(-locality (offset - centre)^2).

    Shape: offsets (Nq, Nk), centre (nh,), locality (nh,) -> (nh, Nq, Nk)
    Source: T-CNN eq. 4 (the constant locality * centre^2 cancels in the softmax)
    """
    squared = (offsets - centre[:, None, None]).square()
    return torch.softmax(-locality[:, None, None] * squared, dim=-1)


def quadratic_axis_scores(offsets: Tensor, linear: Tensor, square: Tensor) -> Tensor:
    """Return the scores of quadratic_axis_attention. Shape: offsets (Nq, Nk), linear, square (nh,) -> (nh, Nq, Nk)"""
    return linear[:, None, None] * offsets + square[:, None, None] * offsets.square()


def quadratic_axis_attention(offsets: Tensor, linear: Tensor, square: Tensor) -> Tensor:
    """Return attention along one axis with any quadratic score: softmax(linear offset + square offset^2).

    Shape: offsets (Nq, Nk), linear (nh,), square (nh,) -> (nh, Nq, Nk)
    Source: ConViT eq. 4 with r = (dx, dy, dx^2 + dy^2)
    """
    return torch.softmax(quadratic_axis_scores(offsets, linear, square), dim=-1)


def kronecker(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the full attention map of two axis maps, their Kronecker product.

    Shape: rows (nh, Hq, H), columns (nh, Wq, W) -> (nh, Hq Wq, H W)
    """
    grid = rows[:, :, None, :, None] * columns[:, None, :, None, :]  # (nh, Hq, Wq, H, W)
    return grid.flatten(3).flatten(1, 2)  # (nh, Hq Wq, H W)


def to_head_grid(tokens: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Arrange tokens for matrix products along either axis of their grid, with all images in one product.

    Shape: tokens (B, H W, nh, hd) -> (nh, H, W, B, hd)
    """
    return tokens.unflatten(1, grid_size).permute(3, 1, 2, 0, 4).contiguous()


def from_head_grid(grid: Tensor) -> Tensor:
    """Undo `to_head_grid`. Shape: grid (nh, H, W, B, hd) -> (B, H W, nh, hd)"""
    return grid.flatten(1, 2).permute(2, 1, 0, 3)


def attend_rows(rows: Tensor, grid: Tensor) -> Tensor:
    """Apply attention maps along the rows of a grid.

    Shape: rows (nh, Hq, H), grid (nh, H, W, B, hd) -> (nh, Hq, W, B, hd)
    """
    return torch.bmm(rows, grid.flatten(2)).unflatten(2, grid.shape[2:])


def _matrix_per_row(x: Tensor) -> Tensor:
    """Return one matrix for each row of each head. Shape: x (nh, H, n, m) -> (nh H, n, m)

    The detour over a single axis is for exports with open sizes: torch can prove that this shape fits, but not
    `flatten`.
    """
    nh, H, n, m = x.shape
    return x.contiguous().flatten().view(nh * H, n * m).unflatten(1, (n, m))


def attend_columns(columns: Tensor, grid: Tensor) -> Tensor:
    """Apply attention maps along the columns of a grid.

    Shape: columns (nh, Wq, W), grid (nh, H, W, B, hd) -> (nh, H, Wq, B, hd)
    """
    nh, H = grid.shape[:2]
    out = torch.bmm(
        _matrix_per_row(columns[:, None].expand(-1, H, -1, -1)), _matrix_per_row(grid.flatten(3))
    )  # (nh H, Wq, B hd)
    return out.unflatten(0, (nh, H)).unflatten(-1, grid.shape[3:])


def attend_by_axis(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """Apply position attention to values that differ by head, one axis after the other.

    Shape: rows (nh, Hq, H), columns (nh, Wq, W), values (B, H W, nh, hd) -> (B, Hq Wq, nh, hd)
    """
    grid = to_head_grid(values, (rows.shape[2], columns.shape[2]))
    return from_head_grid(attend_columns(columns, attend_rows(rows, grid)))


def attend_dense(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """Apply position attention to values that differ by head, through the Kronecker product.

    Shape: rows (nh, Hq, H), columns (nh, Wq, W), values (B, H W, nh, hd) -> (B, Hq Wq, nh, hd)
    """
    B, N, nh, hd = values.shape
    flat = values.permute(2, 1, 0, 3).reshape(nh, N, B * hd)
    out = torch.bmm(kronecker(rows, columns), flat)  # (nh, Hq Wq, B hd)
    return out.view(nh, out.shape[1], B, hd).permute(2, 1, 0, 3)  # (B, Hq Wq, nh, hd)


def attend_shared_values(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """Apply the position attention of every head to the same values, one axis after the other.

    Shape: rows (nh, Hq, H), columns (nh, Wq, W), values (B, H W, C) -> (B, nh, Hq Wq, C)
    """
    grid = values.unflatten(1, (rows.shape[2], columns.shape[2])).permute(1, 2, 0, 3).contiguous()  # (H, W, B, C)
    each_head = grid.expand(rows.shape[0], -1, -1, -1, -1)  # (nh, H, W, B, C)
    out = attend_columns(columns, attend_rows(rows, each_head))  # (nh, Hq, Wq, B, C)
    return out.permute(3, 0, 1, 2, 4).flatten(2, 3)


MAX_DENSE_TOKENS = 32
"""Most tokens for which the position map is multiplied out. Above, and for sizes that an export leaves open, it is
applied axis by axis, which is faster there (measured by benchmarks/gpsa.py)."""


class _GatedMixByAxis(torch.autograd.Function):
    """Compute content_weight content + (rows (x) columns) values, in the layout of the values.

    Shape: content, values (B, H W, nh, hd), rows (nh, H, H), columns (nh, W, W), content_weight (nh,) -> as content
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(content: Tensor, values: Tensor, rows: Tensor, columns: Tensor, content_weight: Tensor) -> Tensor:
        return (content * content_weight[:, None]).add_(_attend(rows, columns, values))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        content, values, rows, columns, content_weight = ctx.saved_tensors
        trained = any(ctx.needs_input_grad[2:])  # otherwise position parameters and gates are frozen
        d_position = _position_gradients(grad, values, rows, columns, trained)
        d_weight = (grad * content).sum((0, 1, 3)) if trained else None
        return grad * content_weight[:, None], *d_position, d_weight


class _AttendPositions(torch.autograd.Function):
    """Compute (rows (x) columns) values, in the layout of the values, keeping only the arguments.

    Shape: values (B, H W, nh, hd), rows (nh, H, H), columns (nh, W, W) -> as values
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return _attend(rows, columns, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, rows, columns = ctx.saved_tensors
        return _position_gradients(grad, values, rows, columns, any(ctx.needs_input_grad[1:]))


def _attend(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """Apply position attention in the form that is faster for this number of tokens."""
    attend = attend_dense if statically_known_true(values.shape[1] <= MAX_DENSE_TOKENS) else attend_by_axis
    return attend(rows, columns, values)


def _position_gradients(
    grad: Tensor, values: Tensor, rows: Tensor, columns: Tensor, trained: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the values, and of the axis maps if they are trained.

    Shape: grad, values (B, H W, nh, hd), rows (nh, H, H), columns (nh, W, W) -> as values, rows, columns
    """
    grid_size = (rows.shape[1], columns.shape[1])
    dy = to_head_grid(grad, grid_size)  # (nh, H, W, B, hd)
    halfway = attend_columns(columns.transpose(1, 2), dy)
    d_values = from_head_grid(attend_rows(rows.transpose(1, 2), halfway))
    if not trained:
        return d_values, None, None
    v = to_head_grid(values, grid_size)  # (nh, H, W, B, hd)
    d_rows = torch.bmm(halfway.flatten(2), v.flatten(2).transpose(1, 2))  # (nh, H, H)
    return d_values, d_rows, _axis_gradient(dy, attend_rows(rows, v))


def _axis_gradient(grad: Tensor, grid: Tensor) -> Tensor:
    """Sum the outer products along a row over rows, images and width.

    Shape: grad (nh, H, Wq, B, hd), grid (nh, H, W, B, hd) -> (nh, Wq, W)
    """
    left, right = (t.flatten(3).flatten(0, 1) for t in (grad, grid))  # (nh H, W, B hd)
    return torch.bmm(left, right.transpose(1, 2)).unflatten(0, grad.shape[:2]).sum(1)


def gated_mix(content: Tensor, position: Tensor, gate: Tensor) -> Tensor:
    """Return (1 - sigma(gate)) content + sigma(gate) position, exact for gates far from 0.

    Shape: content (..., nh, Nq, n), position (nh, Nq, n) or as content, gate (nh,) -> as content
    """
    gate = gate[:, None, None].to(content.dtype)
    return torch.addcmul(position * torch.sigmoid(gate), content, torch.sigmoid(-gate))


def gated_mix_by_axis(content: Tensor, values: Tensor, rows: Tensor, columns: Tensor, gate: Tensor) -> Tensor:
    """Return (1 - sigma(gate)) content + sigma(gate) (rows (x) columns) values, exact for gates far from 0.

    Shape: content, values (B, H W, nh, hd), rows (nh, H, H), columns (nh, W, W), gate (nh,) -> (B, H W, nh, hd)
    """
    gate = gate.to(rows.dtype)
    gated = rows * torch.sigmoid(gate)[:, None, None]
    return _GatedMixByAxis.apply(content, values, *(t.to(values.dtype) for t in (gated, columns, torch.sigmoid(-gate))))


def attend_positions(values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return (rows (x) columns) values. Shape: values (B, H W, nh, hd), rows (nh, H, H), columns (nh, W, W)"""
    return _AttendPositions.apply(values, rows.to(values.dtype), columns.to(values.dtype))
