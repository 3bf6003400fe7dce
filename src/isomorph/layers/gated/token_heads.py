"""Heads of attention on tokens that lie on a grid: their parameters of position, their gates and the grid of a call.

Letters: B batch, N tokens, H W grid, nh heads, hd head width.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.layers.gated.positions import (
    PositionHeads,
    axis_attention,
    image_axis,
    kronecker,
    mix_weights,
    window_centres,
    without_subnormals,
)
from isomorph.layers.grid import GridSize, OnTokenGrid, no_mask, squarest_window


class TokenPositions(PositionHeads):
    """Base of the layers whose heads attend by position (ConViT eq. 4, 5 and 7).

    `position` holds v_pos, from which `locality` and `centre` are read; where there is content, there is a `gate`.
    """

    position: nn.Parameter

    def tap_offsets(self) -> Tensor:
        """Return the initial centre of every head, in (row, column) steps from the query. Shape: -> (nh, 2)"""
        return window_centres(squarest_window(self.num_heads))

    @torch.no_grad()
    def _set_position(self, centre: Tensor, locality: float) -> None:
        """Centre every head on an offset (row, column). Shape: centre (nh, 2)"""
        row, column = centre.unbind(1)
        unit = torch.stack([2 * column, 2 * row, -torch.ones_like(row)], dim=1)
        self.position.copy_(locality * unit)

    @property
    def locality(self) -> Tensor:
        """Sharpness of each head's position attention; not positive where a head has no centre. Shape: -> (nh,)"""
        return -self.position[:, 2]

    @property
    def centre(self) -> Tensor:
        """Offset (row, column) where each head's position attention peaks; NaN without a peak. Shape: -> (nh, 2)"""
        locality = self.locality[:, None]
        peak = self.position[:, [1, 0]] / (2 * locality)
        return torch.where(locality > 0, peak, math.nan)

    def axis_maps(self, grid_size: GridSize) -> tuple[Tensor, Tensor]:
        """Return softmax(v_pos . r) along rows and along columns. Shape: -> (nh, H, H), (nh, W, W)"""
        return axis_attention(self.position, map(image_axis, grid_size, grid_size))

    def positions(self, grid_size: GridSize, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the axis maps, and the weights of the mix, if any."""
        rows, columns = self.axis_maps(grid_size)
        maps = (without_subnormals(rows).to(dtype), without_subnormals(columns).to(dtype))
        gate = self._parameters.get("gate")
        return maps if gate is None else (*maps, mix_weights(gate).to(dtype))

    def _set_locality(self, locality: float) -> None:
        """Set the locality of every head; one without a peak is centred on its initial tap."""
        centre = self.centre
        taps = self.tap_offsets().to(centre)
        self._set_position(torch.where(centre.isfinite(), centre, taps), locality)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that weight decay would pull to 0, and with them the centres and localities."""
        return {"position", "gate"} & set(self._parameters)


class TokenHeads(OnTokenGrid, TokenPositions):
    """Base of attention on tokens of a grid, after `prefix_tokens`. Raises: ValueError unless heads divide C."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid_size: GridSize = (14, 14),
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
        self.position = nn.Parameter(torch.empty(num_heads, 3))
        self._add_content(dim, qkv_bias)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        self.reset_attention()

    def _add_content(self, dim: int, qkv_bias: bool) -> None:
        self.qk = nn.Linear(dim, 2 * dim, bias=qkv_bias)

    @torch.no_grad()
    def reset_attention(self, locality: float = 1.0, gate: float = 1.0) -> None:
        """Centre every head on its tap, set locality and gate, and set the values to the identity (ConViT eq. 5)."""
        nn.init.eye_(self.v.weight)
        self._set_position(self.tap_offsets(), locality)
        self.set_gating(gate=gate)

    def queries_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shape: x (B, N, C) -> two of (B, nh, N, hd)"""
        q, k = self.qk(x).chunk(2, dim=-1)
        q = self.q_norm(self.split_heads(q).transpose(1, 2))
        k = self.k_norm(self.split_heads(k).transpose(1, 2))
        return q, k

    def split_heads(self, x: Tensor) -> Tensor:
        """Shape: (B, N, nh hd) -> (B, N, nh, hd)"""
        return x.unflatten(-1, (self.num_heads, -1))

    def position_map(self, grid_size: GridSize, dtype: torch.dtype) -> Tensor:
        """Return position attention as a map, 0 to prefix tokens. Shape: -> (nh, H W, p + H W)"""
        grid = kronecker(*self.axis_maps(grid_size))
        return F.pad(grid, (self.prefix_tokens, 0)).to(dtype)

    def extra_repr(self) -> str:
        prefix = f", prefix_tokens={self.prefix_tokens}" if self.prefix_tokens else ""
        return f"num_heads={self.num_heads}, grid_size={self.grid_size}{prefix}"


class ViTCall(TokenHeads):
    """Mixin for calls as timm's Attention has them. Raises: ValueError for a mask."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        grid_size: GridSize | None = None,
    ) -> Tensor:
        no_mask(self, attn_mask, is_causal)
        return super().forward(x, grid_size)

    def attention(self, x: Tensor, *_: Any, grid_size: GridSize | None = None, **__: Any) -> Tensor:
        """Return the attention map that `forward` applies. Shape: x (B, N, C) -> (B, nh, N, N)"""
        return super().attention(x, grid_size)  # type: ignore[misc]

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, prefix_tokens={self.prefix_tokens}"
