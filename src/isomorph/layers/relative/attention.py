"""Relative attention (CoAtNet): global attention with one learnt scalar per head and offset between positions.

The scalars are added before the softmax (the paper's choice) or after it (the other half of eq. 3), where they act as a
global depthwise convolution with one kernel for all channels of a head. Inputs are feature maps (B, H, W, C) of any
rectangular size; the table of scalars is resized to it.

Letters: B batch, H W grid, N = H W, C channels, nh heads, hd head width, P table.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, register_notrace_module, trunc_normal_
from torch import Tensor, nn

from isomorph.layers.attention_base import (
    AttentionBase,
    attend_with_bias,
    factory_kwargs,
    plain_attention,
    softmax_map,
    trains_bias,
)
from isomorph.layers.grid import (
    GridSize,
    OnTokenGrid,
    axis_offsets,
    known_true,
    no_mask,
    require_map,
)
from isomorph.layers.modes import KeepsInEval, constant, upcast


def resize_table(table: Tensor, grid_size: GridSize) -> Tensor:
    """Resize the table by bilinear interpolation in float32 at least; offset 0 stays in the middle (CoAtNet A.1).

    Shape: table (nh, 2 H - 1, 2 W - 1) -> (nh, 2 H' - 1, 2 W' - 1)
    """
    _, height, width = table.shape
    size = [2 * n - 1 for n in grid_size]
    # sizes that an export leaves open are not known to be equal, and are interpolated
    if known_true(height == size[0]) and known_true(width == size[1]):
        return table
    # which, unlike [None], lets go of the GIL: torch could wait for itself in two threads
    exact = upcast(table).unsqueeze(0)
    resized = F.interpolate(exact, size, mode="bilinear", align_corners=False)
    return resized[0].to(table.dtype)


def offset_entries(size: int, device: torch.device) -> Tensor:
    """Return the entry of a table of offsets along an axis for every query and key. Shape: -> (size, size)"""
    return size - 1 - axis_offsets(size, size, device=device, dtype=torch.long)


def _entries(grid_size: GridSize, prefix: int, device: torch.device) -> Tensor:
    """Return the entry of the flat table for every query and key. Shape: -> (p + N, p + N)

    In front are three: from a prefix token to a position, from a position to a prefix token, between prefix tokens.
    """
    H, W = grid_size
    rows = offset_entries(H, device) * (2 * W - 1)
    columns = offset_entries(W, device)
    entries = rows[:, None, :, None] + columns[:, None]  # (H, W, H, W)
    entries = entries.view(H * W, H * W)
    if prefix:
        entries = F.pad(entries + 3, (0, 0, prefix, 0), value=0)
        entries = F.pad(entries, (prefix, 0), value=1)
        entries[:prefix, :prefix] = 2
    return entries


def expand_table(
    table: Tensor,
    grid_size: GridSize,
    prefix: int = 0,
    scalars: Tensor | None = None,
) -> Tensor:
    """Return P[i - i', j - j'] for every query (i, j) and key (i', j'); from and to prefix tokens 0, or `scalars`.

    Shape: table (nh, 2 H - 1, 2 W - 1), scalars (3, nh) -> (nh, p + N, p + N)
    Source of the scalars: BEiT (Bao et al., 2022), as published
    """
    flat = table.flatten(1)
    if prefix and scalars is not None:
        flat = torch.cat([scalars.mT.to(flat.dtype), flat], 1)
    elif prefix:
        flat = F.pad(flat, (3, 0))
    entries = constant(_entries, table, grid_size, prefix)
    return flat.index_select(1, entries.flatten()).unflatten(1, entries.shape)


@register_notrace_module
class RelativeAttention(AttentionBase, KeepsInEval):
    """Self-attention on feature maps that knows how far apart positions are, and accepts any image size (CoAtNet).

    Each head adds a learnt scalar for the offset between two positions to their attention score:

        y = proj(softmax(q k^T / sqrt(hd) + P[i - i', j - j']) v)

    `relative_bias` is P, one table per head, created for `grid_size` and resized to other feature maps at any call. The
    other arguments are those of timm's Attention. In eval mode without gradients the N x N bias is kept until the table
    or the size of the input changes (writes to the table through `.data` are not seen; `eval()` drops it).

    Shape: x (B, H, W, C) -> (B, H, W, C)
    Source: CoAtNet eq. 3 (pre), A.1; differs: the initialisation N(0, .02) of P and its exemption from weight decay are
    not in the paper
    Raises: ValueError for heads that do not divide the channels, an empty grid, or tokens instead of a feature map.

    Example:
        >>> layer = iso.layers.RelativeAttention(dim=64, num_heads=4, grid_size=(7, 7))
        >>> layer(torch.randn(2, 7, 7, 64)).shape
        torch.Size([2, 7, 7, 64])
        >>> layer(torch.randn(2, 9, 5, 64)).shape  # the table is resized
        torch.Size([2, 9, 5, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        grid_size: GridSize = (14, 14),
        **kwargs: Any,
    ) -> None:
        if num_heads < 1 or (dim % num_heads and not kwargs.get("attn_head_dim")):
            raise ValueError(
                f"{num_heads} heads do not divide {dim} channels; choose a divisor, or give attn_head_dim",
            )
        if len(grid_size) != 2 or min(grid_size) < 1:
            raise ValueError(f"grid_size {grid_size} must be (height, width), both at least 1")
        super().__init__(dim, num_heads, **kwargs)
        H, W = grid_size
        self.grid_size = grid_size
        table = torch.empty(num_heads, 2 * H - 1, 2 * W - 1, **factory_kwargs(kwargs))
        self.relative_bias = nn.Parameter(table)
        self.reset_bias()

    def reset_bias(self) -> None:
        """Draw the table from N(0, 0.02) again."""
        trunc_normal_(self.relative_bias, std=0.02)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that weight decay would make equal."""
        return {name for name, _ in self.named_parameters(recurse=False)}

    @property
    def table_grid(self) -> GridSize:
        """Height and width of the grid that the table is made for."""
        _, rows, columns = self.relative_bias.shape
        return (rows + 1) // 2, (columns + 1) // 2

    @torch.no_grad()
    def set_grid_size(self, grid_size: GridSize) -> None:
        """Resize the table to another grid permanently."""
        table = resize_table(self.relative_bias, grid_size)
        self.relative_bias = nn.Parameter(table.clone(), self.relative_bias.requires_grad)
        self.grid_size = grid_size

    def position_bias(self, grid_size: GridSize, dtype: torch.dtype) -> Tensor:
        """Return P for every pair of positions, which eval mode keeps. Shape: -> (nh, N, N)"""
        return self.cached(
            tuple(self.parameters(recurse=False)), self.expand_bias, grid_size, dtype
        )

    def expand_bias(self, grid_size: GridSize, dtype: torch.dtype) -> Tensor:
        """Return P for every pair of positions of a grid, in a dtype. Shape: -> (nh, N, N)"""
        return expand_table(resize_table(self.relative_bias, grid_size), grid_size).to(dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid_size: GridSize) -> Tensor:
        """Return softmax(q k^T / sqrt(hd) + P) v. Shape: q, k, v (B, nh, N, hd) -> (B, nh, N, hd)"""
        bias = self.position_bias(grid_size, q.dtype)
        return attend_with_bias(bias, self.drop_probability, self.scale, q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        require_map(x)
        grid_size = (x.shape[1], x.shape[2])
        return self.mix_tokens(x.flatten(1, 2), grid_size).unflatten(1, grid_size)

    def mix_tokens(self, x: Tensor, grid_size: GridSize) -> Tensor:
        """Return what `forward` computes of the tokens of a grid. Shape: x (B, N, C) -> (B, N, C)"""
        q, k, v = self.queries_keys_values(x, contiguous=trains_bias(self.relative_bias))
        return self.project_output(self.attend(q, k, v, grid_size), x)

    def token_scores(self, x: Tensor, grid_size: GridSize) -> tuple[Tensor, Tensor, Any]:
        """Return the scaled queries, the keys and P. Shape: x (B, N, C) -> two of (B, nh, N, hd), (nh, N, N)"""
        q, k, _v = self.queries_keys_values(x)
        return q * self.scale, k, self.position_bias(grid_size, q.dtype)

    def content_scores(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Any]:
        """Return the scaled queries, the keys and P. Shape: x (B, H, W, C) -> two of (B, nh, N, hd), (nh, N, N)"""
        return self.token_scores(x.flatten(1, 2), (x.shape[1], x.shape[2]))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, grid_size={self.grid_size}"


class PostRelativeAttention(RelativeAttention):
    """Relative attention that adds the learnt scalars after the softmax: attention plus a global convolution.

    y = proj((softmax(q k^T / sqrt(hd)) + P[i - i', j - j']) v)

    Arguments, table and cache are those of `RelativeAttention`.

    Shape: x (B, H, W, C) -> (B, H, W, C)
    Source: CoAtNet eq. 3 (post), which the paper does not use; differs: as RelativeAttention
    Raises: as RelativeAttention.

    Example:
        >>> layer = iso.layers.PostRelativeAttention(dim=64, num_heads=4, grid_size=(7, 7))
        >>> layer(torch.randn(2, 7, 7, 64)).shape
        torch.Size([2, 7, 7, 64])
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid_size: GridSize) -> Tensor:
        """Return (softmax(q k^T / sqrt(hd)) + P) v. Shape: q, k, v (B, nh, N, hd) -> (B, nh, N, hd)"""
        content = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.drop_probability, scale=self.scale
        )
        return content + convolve_values(self.position_bias(grid_size, q.dtype), v)

    def content_scores(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        """Return the scaled queries and the keys; P is added after the softmax. Shape: as RelativeAttention"""
        q, k, _bias = super().content_scores(x)
        return q, k, None

    def attention(self, x: Tensor) -> Tensor:
        """Return the attention map that `forward` applies. Shape: x (B, H, W, C) -> (B, nh, N, N)"""
        q, k, bias = super().content_scores(x)
        return softmax_map(q, k) + bias


def convolve_values(bias: Tensor, v: Tensor) -> Tensor:
    """Return sum_j w_(i - j) v_j. Shape: bias (nh, N, N), v (B, nh, N, hd) -> (B, nh, N, hd)"""
    B, nh, N, hd = v.shape
    side_by_side = v.permute(1, 2, 0, 3).reshape(nh, N, B * hd)
    convolved = torch.bmm(bias, side_by_side)
    return convolved.view(nh, N, B, hd).permute(2, 0, 1, 3)


@register_notrace_module
class ViTRelativeAttention(OnTokenGrid, RelativeAttention):
    """Relative attention on the tokens of a ViT, which can learn how far apart positions are (CoAtNet).

        y = proj(softmax(q k^T / sqrt(hd) + P[i - i', j - j']) v)

    The table P starts at zero, where the layer is plain attention. `grid_size` (H, W) is the grid of the tokens after
    the `prefix_tokens`, whose scores get no bias; the table is created for it and resized to other grids. Pass another
    grid to `forward` at any call. With `prefix_bias` scores from and to prefix tokens get a bias too, as in BEiT: three
    scalars per head, for a prefix token that attends to a position, a position that attends to a prefix token, and a
    prefix token that attends to one. The other arguments are those of timm's Attention.

    Shape: x (B, N, C) -> (B, N, C) with N = prefix_tokens + H W
    Source: CoAtNet eq. 3 (pre); differs: tokens, prefix tokens, and a table that starts at zero
    Raises: ValueError as `RelativeAttention`, for a mask, or if the tokens do not fill the grid.

    Example:
        >>> layer = iso.layers.ViTRelativeAttention(dim=48, num_heads=6, grid_size=(4, 5), prefix_tokens=1)
        >>> layer(torch.randn(2, 21, 48)).shape
        torch.Size([2, 21, 48])
        >>> layer(torch.randn(2, 13, 48), grid_size=(3, 4)).shape  # the table is resized
        torch.Size([2, 13, 48])
        >>> type(layer.to_attention()).__name__  # while the table is zero
        'Attention'
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        grid_size: GridSize = (14, 14),
        prefix_tokens: int = 0,
        prefix_bias: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, grid_size, **kwargs)
        self.prefix_tokens = prefix_tokens
        self.prefix_bias = None
        if prefix_bias and prefix_tokens:
            self.prefix_bias = nn.Parameter(self.relative_bias.new_zeros(3, num_heads))

    def reset_bias(self) -> None:
        """Set all scalars to zero, where the layer is plain attention."""
        for parameter in self.parameters(recurse=False):
            nn.init.zeros_(parameter)

    def expand_bias(self, grid_size: GridSize, dtype: torch.dtype) -> Tensor:
        """Return P for all tokens, those of the prefix first. Shape: -> (nh, N, N)"""
        table = resize_table(self.relative_bias, grid_size)
        return expand_table(table, grid_size, self.prefix_tokens, self.prefix_bias).to(dtype)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        grid_size: GridSize | None = None,
    ) -> Tensor:
        no_mask(self, attn_mask, is_causal)
        return self.mix_tokens(x, self.check_grid(x, grid_size))

    def content_scores(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        grid_size: GridSize | None = None,
    ) -> tuple[Tensor, Tensor, Any]:
        """Return the scaled queries, the keys and P. Shape: x (B, N, C) -> two of (B, nh, N, hd), (nh, N, N)"""
        no_mask(self, attn_mask, is_causal)
        return self.token_scores(x, self.check_grid(x, grid_size))

    def extra_repr(self) -> str:  # without the grid, which is that of the last image
        return f"num_heads={self.num_heads}, prefix_tokens={self.prefix_tokens}"

    @torch.no_grad()
    def to_attention(self, atol: float = 1e-3) -> Attention:
        """Return the plain attention that this layer equals. Raises: ValueError unless the bias is zero."""
        return plain_attention(self, self.num_tokens, atol, "keep it, or call reset_bias()")
