"""Gated positional self-attention on tokens (ConViT): attention born as a convolution, free to leave.

    A_h = (1 - sigma(gate_h)) softmax(q_h k_h^T / sqrt(d)) + sigma(gate_h) softmax(v_pos_h . r)

The re-normalisation printed in ConViT eq. 7 divides a convex mix of two softmaxes by 1, so it is left out. How this
differs from the released layer: the positional half is computed once per grid, never per image, and in closed form
(`position.py`, `mix.py`); the content half is `scaled_dot_product_attention`; grids are rectangles.
Letters: B batch, N tokens, C channels, nh heads, hd head width, p prefix tokens.
"""

import math

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from isomorph.layers.grid import axis_offsets, square_window, window_centres
from isomorph.layers.mix import mix, mix_by_place
from isomorph.layers.position import geometry_dtype, kronecker, quadratic_axis


@register_notrace_module
class GPSA(nn.Module):
    """Gated positional self-attention on tokens: each head mixes looking by content with looking by place.

    y = proj(lerp(softmax(q k^T / sqrt(hd)) v, softmax(v_pos . (dx, dy, dx^2 + dy^2)) v, sigma(gate)))

    `position` holds v_pos; at birth head h looks at tap h of a sqrt(nh) x sqrt(nh) window with strength `locality`,
    as a convolution does. `grid_size` (H, W) places the tokens; pass another one to `forward` at any call.
    `prefix_tokens` lead the sequence and have no place (class token, registers): they look by content only, whatever
    the gates, and are looked at by content only.

    Shape: x (B, N, C) -> (B, N, C) with N = prefix_tokens + H W
    Source: ConViT eq. 5 and 7; differs: 1/sqrt(hd) as in its code, taps row-major, any rectangle, prefix tokens.
    Raises: ValueError when nh is not a square, does not divide C, or N is not prefix_tokens + H W.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid_size: tuple[int, int] = (14, 14),
        qkv_bias: bool = False,
        prefix_tokens: int = 0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide {dim} channels; choose a divisor")
        self.num_heads = num_heads
        self.grid_size = grid_size
        self.prefix_tokens = prefix_tokens
        self.qk = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.position = nn.Parameter(torch.empty(num_heads, 3))
        self.gate = nn.Parameter(torch.empty(num_heads))
        self.reset_attention()

    def taps(self) -> Tensor:
        """Where the heads look at birth, (row, column) steps from the query. Shape: -> (nh, 2)"""
        return window_centres(square_window(self.num_heads))

    @torch.no_grad()
    def reset_attention(self, locality: float = 1.0, gate: float = 1.0) -> None:
        """Puts every head on its tap with the given dials, and the values to the identity (ConViT eq. 5)."""
        nn.init.eye_(self.v.weight)
        self.place(self.taps(), locality)
        self.set_dials(gate=gate)

    @torch.no_grad()
    def place(self, centre: Tensor, locality: float) -> None:
        """Centres every head on an offset (row, column). Shape: centre (nh, 2)"""
        row, column = centre.unbind(1)
        self.position.copy_(locality * torch.stack([2 * column, 2 * row, -torch.ones_like(row)], dim=1))

    def set_dials(self, locality: float | None = None, gate: float | None = None) -> None:
        """Sets the locality and the gate of every head; None leaves one as it is.

        Centres stay; a head that has lost its centre (locality not positive) goes back to its tap.
        """
        if locality is not None:
            if not 0 < locality < math.inf:
                raise ValueError(f"locality {locality} must be above 0 and finite")
            centre = self.centre.detach()
            self.place(torch.where(centre.isfinite(), centre, self.taps().to(centre)), locality)
        if gate is not None:
            nn.init.constant_(self.gate, gate)

    @property
    def locality(self) -> Tensor:
        """Strength of each head's pull to its centre; not positive where a head has lost its centre. Shape: -> (nh,)"""
        return -self.position[:, 2]

    @property
    def centre(self) -> Tensor:
        """Offset (row, column) that each head's position looks at most; NaN where it has none. Shape: -> (nh, 2)"""
        locality = self.locality[:, None]
        return torch.where(locality > 0, self.position[:, [1, 0]] / (2 * locality), math.nan)

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

    def queries_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shape: x (B, N, C) -> two of (B, nh, N, hd)"""
        q, k = self.qk(x).chunk(2, dim=-1)
        return self.split_heads(q).transpose(1, 2), self.split_heads(k).transpose(1, 2)

    def forward(self, x: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
        rows, columns = self.axis_maps(self.check_grid(x, grid_size))
        q, k = self.queries_keys(x)
        v, p = self.split_heads(self.v(x)), self.prefix_tokens  # (B, N, nh, hd)
        content = F.scaled_dot_product_attention(q, k, v.transpose(1, 2)).transpose(1, 2)  # (B, N, nh, hd)
        mixed = mix_by_place(content[:, p:], v[:, p:], rows, columns, self.gate)
        if p:
            mixed = torch.cat([content[:, :p], mixed], dim=1)
        return self.proj_drop(self.proj(mixed.flatten(2)))

    def attention(self, x: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
        """The map that `forward` applies, formed on request.

        Shape: x (B, N, C) -> (B, nh, N, N)
        """
        grid_size = self.check_grid(x, grid_size)
        q, k = self.queries_keys(x)
        content = torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1)
        p = self.prefix_tokens
        position = F.pad(kronecker(*self.axis_maps(grid_size)), (p, 0)).to(content.dtype)  # (nh, H W, N)
        return torch.cat([content[:, :, :p], mix(content[:, :, p:], position, self.gate)], dim=2)

    def check_grid(self, x: Tensor, grid_size: tuple[int, int] | None) -> tuple[int, int]:
        H, W = grid_size or self.grid_size
        if x.shape[1] != self.prefix_tokens + H * W:
            prefix = f" after {self.prefix_tokens} prefix tokens" if self.prefix_tokens else ""
            raise ValueError(
                f"{x.shape[1]} tokens do not fill the {H} x {W} grid{prefix}; pass grid_size=(height, width)"
            )
        return H, W

    def extra_repr(self) -> str:
        prefix = f", prefix_tokens={self.prefix_tokens}" if self.prefix_tokens else ""
        return f"num_heads={self.num_heads}, grid_size={self.grid_size}{prefix}"
