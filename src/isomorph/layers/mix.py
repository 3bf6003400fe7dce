"""Content and position mixed for one copy of the values: what the backward pass needs is what the layer holds anyway.

    y_h = keep_h content_h + (rows_h (x) columns_h) values_h          (the gate is already in rows_h)

Plain autograd would keep four more arrays of the size of x: the values in product layout, half-way products, the
positional output, and the mix's arguments. None is needed: the gate's gradient needs <dy, P v> = <P^T dy, v>, and
P^T dy is what the values' gradient is; half-way products are one small product away.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from isomorph.layers.position import along_columns, along_rows, as_tokens, attend_by_axis, attend_dense, by_head

DENSE_TOKENS = 32
"""The positional map is multiplied out up to this many tokens; above, axis by axis is faster (benchmarks/gpsa.py), and
so it is done for sizes that an export leaves open."""


class MixByPlace(torch.autograd.Function):
    """keep content + (rows (x) columns) values, in the layout of the values.

    Shape: content, values (B, H W, nh, hd), rows (nh, H, H), columns (nh, W, W), keep (nh,) -> (B, H W, nh, hd)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(content: Tensor, values: Tensor, rows: Tensor, columns: Tensor, keep: Tensor) -> Tensor:
        attend = attend_dense if statically_known_true(values.shape[1] <= DENSE_TOKENS) else attend_by_axis
        return (content * keep[:, None]).add_(attend(rows, columns, values))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        content, values, rows, columns, keep = ctx.saved_tensors
        grid_size = (rows.shape[1], columns.shape[1])
        dy = by_head(grad, grid_size)  # (nh, H, W, B, hd)
        halfway = along_columns(columns.transpose(1, 2), dy)
        d_values = as_tokens(along_rows(rows.transpose(1, 2), halfway))
        if not any(ctx.needs_input_grad[2:]):  # frozen places and gates
            return grad * keep[:, None], d_values, None, None, None
        v = by_head(values, grid_size)  # (nh, H, W, B, hd)
        d_rows = torch.bmm(halfway.flatten(2), v.flatten(2).transpose(1, 2))  # (nh, H, H)
        d_columns = _axis_gradient(dy, along_rows(rows, v))
        return grad * keep[:, None], d_values, d_rows, d_columns, (grad * content).sum((0, 1, 3))


def _axis_gradient(grad: Tensor, grid: Tensor) -> Tensor:
    """Sum over rows, images and width of the outer products along a row.

    Shape: grad (nh, H, Wq, B, hd), grid (nh, H, W, B, hd) -> (nh, Wq, W)
    """
    left, right = (t.flatten(3).flatten(0, 1) for t in (grad, grid))  # (nh H, W, B hd)
    return torch.bmm(left, right.transpose(1, 2)).unflatten(0, grad.shape[:2]).sum(1)


def mix(content: Tensor, position: Tensor, gate: Tensor) -> Tensor:
    """(1 - sigma(gate)) content + sigma(gate) position of whole maps, exact for gates far from 0.

    Shape: content (..., nh, Nq, n), position (nh, Nq, n) or as content, gate (nh,) -> as content
    """
    gate = gate[:, None, None].to(content.dtype)
    return torch.addcmul(position * torch.sigmoid(gate), content, torch.sigmoid(-gate))


def mix_by_place(content: Tensor, values: Tensor, rows: Tensor, columns: Tensor, gate: Tensor) -> Tensor:
    """(1 - sigma(gate)) content + sigma(gate) (rows (x) columns) values, exact for gates far from 0.

    Shape: content, values (B, H W, nh, hd), rows (nh, H, H), columns (nh, W, W), gate (nh,) -> (B, H W, nh, hd)
    """
    gate = gate.to(rows.dtype)
    gated = rows * torch.sigmoid(gate)[:, None, None]
    return MixByPlace.apply(content, values, *(t.to(values.dtype) for t in (gated, columns, torch.sigmoid(-gate))))
