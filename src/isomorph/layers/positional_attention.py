"""Position attention in closed form: one softmax along rows, one along columns, and their product.

A position score that is quadratic in the offset, a dx^2 + b dx + a dy^2 + c dy, is the sum of a row part and a column
part, so softmax(scores) = rows (x) columns exactly. Applied axis by axis it costs O(N (H + W)) work and
O(H^2 + W^2) memory instead of O(N^2); multiplied out (the Kronecker product) it is one matrix product, which is
faster on very small grids. Neither depends on the image, so only the values have a batch axis.

Letters: nh heads, Hq Wq query grid, H W key grid, hd head width, C channels.
"""

import torch
from torch import Tensor


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
