"""Gated positional self-attention on tokens (ConViT): attention born as a convolution, free to leave.

    A_h = (1 - sigma(gate_h)) softmax(q_h k_h^T / sqrt(d)) + sigma(gate_h) softmax(v_pos_h . r)

The re-normalisation printed in ConViT eq. 7 divides a convex mix of two softmaxes by 1, so it is left out. How this
differs from the released layer: the positional half is computed once per grid, never per image, and in closed form
(`position.py`); the content half is `scaled_dot_product_attention`; grids are rectangles.
Letters: B batch, N tokens, C channels, nh heads, hd head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.layers.grid import axis_offsets, window_centres
from isomorph.layers.position import attend_by_axis, attend_dense, geometry_dtype, kronecker, quadratic_axis

DENSE_TOKENS = 32
"""The positional map is multiplied out up to this many tokens; above, axis by axis is faster (benchmarks/gpsa.py)."""


class GPSA(nn.Module):
    """Gated positional self-attention on tokens: each head mixes looking by content with looking by place.

    y = proj(lerp(softmax(q k^T / sqrt(hd)) v, softmax(v_pos . (dx, dy, dx^2 + dy^2)) v, sigma(gate)))

    `position` holds v_pos; at birth head h looks at tap h of a sqrt(nh) x sqrt(nh) window with strength `locality`,
    as a convolution does. `grid_size` (H, W) places the tokens; pass another one to `forward` at any call.

    Shape: x (B, N, C) -> (B, N, C) with N = H W
    Source: ConViT eq. 5 and 7; differs: 1/sqrt(hd) as in its code, taps row-major, any rectangle.
    Raises: ValueError when nh is not a square, does not divide C, or N is not H W.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid_size: tuple[int, int] = (14, 14),
        qkv_bias: bool = False,
        locality: float = 1.0,
        gate: float = 1.0,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide {dim} channels; choose a divisor")
        self.num_heads = num_heads
        self.grid_size = grid_size
        self.qk = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.position = nn.Parameter(torch.empty(num_heads, 3))
        self.gate = nn.Parameter(torch.empty(num_heads))
        self.reset_attention(locality, gate)

    @torch.no_grad()
    def reset_attention(self, locality: float, gate: float) -> None:
        """Puts every head on its tap with the given dials, and the values to the identity (ConViT eq. 5)."""
        row, column = window_centres(self.num_heads).unbind(1)
        self.position.copy_(locality * torch.stack([2 * column, 2 * row, -torch.ones_like(row)], dim=1))
        self.gate.fill_(gate)
        nn.init.eye_(self.v.weight)

    def no_weight_decay(self) -> set[str]:
        """Decay would pull the centres and strengths to 0."""
        return {"position", "gate"}

    def axis_maps(self, grid_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Positional attention along rows and columns.

        Shape: -> (nh, H, H), (nh, W, W)
        """
        H, W = grid_size
        dtype, device = geometry_dtype(self.position), self.position.device
        along_x, along_y, square = self.position.to(dtype).unbind(1)
        rows = quadratic_axis(axis_offsets(H, H, device=device, dtype=dtype), along_y, square)
        columns = quadratic_axis(axis_offsets(W, W, device=device, dtype=dtype), along_x, square)
        return rows, columns

    def split_heads(self, x: Tensor) -> Tensor:
        """Shape: (B, N, nh hd) -> (B, N, nh, hd)"""
        return x.unflatten(-1, (self.num_heads, -1))

    def forward(self, x: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
        H, W = self.check_grid(x, grid_size)
        q, k = self.qk(x).chunk(2, dim=-1)
        q, k, v = map(self.split_heads, (q, k, self.v(x)))  # (B, N, nh, hd)
        content = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        rows, columns = (axis.to(v.dtype) for axis in self.axis_maps((H, W)))
        position = (attend_dense if H * W <= DENSE_TOKENS else attend_by_axis)(rows, columns, v)
        gate = torch.sigmoid(self.gate)[:, None].to(v.dtype)
        mixed = torch.lerp(content.transpose(1, 2), position, gate)  # (B, N, nh, hd)
        return self.proj(mixed.flatten(2))

    def attention(self, x: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
        """The map that `forward` applies, formed on request.

        Shape: x (B, N, C) -> (B, nh, N, N)
        """
        grid_size = self.check_grid(x, grid_size)
        q, k = (self.split_heads(t).transpose(1, 2) for t in self.qk(x).chunk(2, dim=-1))  # (B, nh, N, hd)
        content = torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1)
        position = kronecker(*self.axis_maps(grid_size)).to(content.dtype)
        return torch.lerp(content, position, torch.sigmoid(self.gate)[:, None, None].to(content.dtype))

    def check_grid(self, x: Tensor, grid_size: tuple[int, int] | None) -> tuple[int, int]:
        H, W = grid_size or self.grid_size
        if x.shape[1] != H * W:
            raise ValueError(f"{x.shape[1]} tokens do not fill the {H} x {W} grid; pass grid_size=(height, width)")
        return H, W

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, grid_size={self.grid_size}"
