"""Positional self-attention on tokens (ConViT eq. 4): content and position in one softmax, the ablation of GPSA.

    A_h = softmax(q_h k_h^T / sqrt(d) + v_pos_h . r)

The larger of the two terms decides alone where a head attends; GPSA (`gpsa.py`) sums two softmaxes instead, so that a
gate can weigh them. Letters: B batch, N tokens, C channels, nh heads, hd head width.
"""

import math

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from isomorph.layers.grid import axis_offsets, square_window, window_centres
from isomorph.layers.position import geometry_dtype


def _quadratic_bias(position: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """v_pos . (dx, dy, dx^2 + dy^2) for every query and key: the sum of a part along rows and one along columns.

    Shape: position (nh, 3) -> (nh, H W, H W)
    """
    dtype, device = geometry_dtype(position), position.device
    along_x, along_y, square = position.to(dtype)[:, :, None, None].unbind(1)  # (nh, 1, 1) each
    dy, dx = (axis_offsets(size, size, device=device, dtype=dtype) for size in grid_size)
    rows, columns = along_y * dy + square * dy.square(), along_x * dx + square * dx.square()
    bias = rows[:, :, None, :, None] + columns[:, None, :, None, :]  # (nh, H, W, H, W)
    return bias.flatten(3).flatten(1, 2)  # (nh, H W, H W)


@register_notrace_module
class PSA(nn.Module):
    """Positional self-attention on tokens: each head adds scores of content and of position in one softmax.

    y = proj(softmax(q k^T / sqrt(hd) + v_pos . (dx, dy, dx^2 + dy^2)) v)

    Parameters, arguments and initialisation are those of GPSA without gates and prefix tokens: `position` holds v_pos,
    and head h starts on tap h of a sqrt(nh) x sqrt(nh) window with strength `locality`. `grid_size` (H, W) is that of
    the tokens; pass another one to `forward` at any call.

    Shape: x (B, N, C) -> (B, N, C) with N = H W
    Source: ConViT eq. 4 and 5; differs: 1/sqrt(hd) as in GPSA; W_qry and W_key keep their usual initialisation, since
    at 0 the gradient of each is 0 and they would stay there; taps row-major, any rectangle.
    Raises: ValueError when nh is not a square, does not divide C, or N is not H W.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid_size: tuple[int, int] = (14, 14),
        qkv_bias: bool = False,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide {dim} channels; choose a divisor")
        self.num_heads = num_heads
        self.grid_size = grid_size
        self.qk = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.position = nn.Parameter(torch.empty(num_heads, 3))
        self.reset_attention()

    @torch.no_grad()
    def reset_attention(self, locality: float = 1.0) -> None:
        """Puts every head on its tap with the given locality, and the values to the identity (ConViT eq. 5)."""
        nn.init.eye_(self.v.weight)
        row, column = window_centres(square_window(self.num_heads)).unbind(1)
        self.position.copy_(locality * torch.stack([2 * column, 2 * row, -torch.ones_like(row)], dim=1))

    @property
    def locality(self) -> Tensor:
        """Strength of each head's pull to its centre; not positive where a head has lost its centre. Shape: -> (nh,)"""
        return -self.position[:, 2]

    @property
    def centre(self) -> Tensor:
        """Offset (row, column) whose score of position is highest; NaN where there is none. Shape: -> (nh, 2)"""
        locality = self.locality[:, None]
        return torch.where(locality > 0, self.position[:, [1, 0]] / (2 * locality), math.nan)

    def no_weight_decay(self) -> set[str]:
        """Decay would pull the centres and strengths to 0."""
        return {"position"}

    def queries_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shape: x (B, N, C) -> two of (B, nh, N, hd)"""
        q, k = self.qk(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k

    def bias(self, x: Tensor, grid_size: tuple[int, int] | None) -> Tensor:
        """Scores of position, the same for all images. Shape: x (B, N, C) -> (1, nh, N, N)"""
        return _quadratic_bias(self.position, self.check_grid(x, grid_size))[None]

    def forward(self, x: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
        bias = self.bias(x, grid_size)
        q, k = self.queries_keys(x)
        v = self.v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, nh, N, hd)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))  # (B, nh, N, hd)
        return self.proj_drop(self.proj(mixed.transpose(1, 2).flatten(2)))

    def attention(self, x: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
        """The map that `forward` applies, formed on request.

        Shape: x (B, N, C) -> (B, nh, N, N)
        """
        bias = self.bias(x, grid_size)
        q, k = self.queries_keys(x)
        return torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + bias.to(q.dtype), dim=-1)

    def check_grid(self, x: Tensor, grid_size: tuple[int, int] | None) -> tuple[int, int]:
        H, W = grid_size or self.grid_size
        if x.shape[1] != H * W:
            raise ValueError(f"{x.shape[1]} tokens do not fill the {H} x {W} grid; pass grid_size=(height, width)")
        return H, W

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, grid_size={self.grid_size}"
