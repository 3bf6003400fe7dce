"""Mix content and position attention with few saved tensors: backward needs only what the layer stores anyway.

    y_h = w_h content_h + (rows_h (x) columns_h) values_h          (w = 1 - sigma(gate); rows contain sigma(gate))

Plain autograd would store four more tensors of the size of x: the values in product layout, intermediate products, the
position output, and the arguments of the mix. None is needed: the gradient of the gate needs <dy, P v> = <P^T dy, v>,
and P^T dy is the gradient of the values; the intermediate products are recomputed with one small product.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from isomorph.layers.positional_attention import (
    attend_by_axis,
    attend_columns,
    attend_dense,
    attend_rows,
    from_head_grid,
    to_head_grid,
)

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
