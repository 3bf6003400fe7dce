"""Relative attention (CoAtNet): global attention to which one learnt scalar per head and offset is added.

Before the softmax (the paper's choice) or after it (eq. 3, the other half), the table w acts as a global depthwise
convolution with one kernel for all channels of a head. Maps are images here, (B, H, W, C): the grid is their shape,
so any rectangle goes in at any call, and the table is resized to it.

Letters: B batch, H W grid, N = H W, C channels, nh heads, hd head width.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module, trunc_normal_
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.attention.flex_attention import flex_attention

from isomorph.layers.chunked import by_images, in_eager_mode, transformed
from isomorph.layers.grid import axis_offsets
from isomorph.layers.headed_attention import HeadedAttention, images_at_once, placement

FLEX_TOKENS = 512
"""From so many tokens on, compiled inference on a GPU reads the table itself (FlexAttention), not an N x N bias."""


def resize_table(table: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """The table for another grid, by bilinear interpolation, in float32 at least; offset 0 stays in the middle.

    Shape: table (nh, 2 H - 1, 2 W - 1) -> (nh, 2 H' - 1, 2 W' - 1)
    Source: CoAtNet A.1, for larger grids; smaller ones are treated alike
    """
    size = [2 * n - 1 for n in grid_size]
    # an export leaves sizes open: it interpolates
    if all(statically_known_true(have == want) for have, want in zip(table.shape[1:], size, strict=True)):
        return table
    exact = table.to(torch.promote_types(table.dtype, torch.float32))
    return F.interpolate(exact[None], size, mode="bilinear", align_corners=False)[0].to(table.dtype)


def spread(table: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """The entry P[i - i', j - j'] of every query (i, j) and key (i', j').

    Shape: table (nh, 2 H - 1, 2 W - 1) -> (nh, N, N)
    """
    H, W = grid_size
    rows, columns = (n - 1 - axis_offsets(n, n, device=table.device, dtype=torch.long) for n in grid_size)
    places = rows[:, None, :, None] * (2 * W - 1) + columns[None, :, None, :]  # (H, W, H, W)
    return table.flatten(1).index_select(1, places.flatten()).view(-1, H * W, H * W)


def attend(bias: Tensor, drop: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(hd) + bias) v.

    Where a CPU is to give the bias a gradient the map is formed, some images at a time: torch's kernel would form it
    for all at once. It takes four axes for its fast path, images first.

    Shape: bias (nh, N, N), q, k, v (B, nh, N, hd) -> (B, nh, N, hd)
    """
    learns = in_eager_mode() and q.device.type == "cpu" and torch.is_grad_enabled() and bias.requires_grad
    if not learns and not transformed(bias):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None], dropout_p=drop)

    def weigh(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = (q * q.shape[-1] ** -0.5) @ k.mT  # (B, nh, N, N)
        # in place where it may be: a map of its own for the sum would be fetched page by page
        logits = logits + bias if transformed(bias) else logits.add_(bias)
        maps = logits.softmax(-1)
        return (F.dropout(maps, drop) if drop else maps) @ v

    return by_images(weigh, images_at_once(q), q, k, v)


def flexes(tokens: int, drop: float) -> bool:
    """Whether this call is compiled inference, not an export, of a map that is large enough for FlexAttention."""
    compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return compiled and tokens >= FLEX_TOKENS and not drop and not torch.is_grad_enabled()


def attend_flex(table: Tensor, grid_size: tuple[int, int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same from the table, no N x N bias being formed: FlexAttention, fast where it is compiled for a GPU.

    Shape: table (nh, 2 H - 1, 2 W - 1), q, k, v (B, nh, N, hd) -> (B, nh, N, hd)
    """
    H, W = grid_size

    def place(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + table[head, query // W - key // W + H - 1, query % W - key % W + W - 1]

    return flex_attention(q, k, v, score_mod=place)


class KeptBias(NamedTuple):
    """A bias, and all that it was made from: on a CPU a copy of the table, elsewhere the table itself."""

    key: tuple[Any, ...]
    table: Tensor
    bias: Tensor

    def holds(self, key: tuple[Any, ...], table: Tensor) -> bool:
        """Whether it is the bias still. On a CPU a look at the whole table costs next to nothing."""
        if self.key != key:
            return False
        return torch.equal(self.table, table) if table.device.type == "cpu" else self.table is table


def version_of(table: Tensor) -> tuple[int, int]:
    """Changes with the storage, and with every write that autograd can see."""
    return table.data_ptr(), 0 if table.is_inference() else table._version


def _stream_of(table: Tensor) -> int:
    """The queue of a GPU that this call computes in: what one queue makes, another may read too early."""
    return torch.cuda.current_stream(table.device).cuda_stream if table.is_cuda else 0


def _may_keep(table: Tensor) -> bool:
    """Whether this call's bias is one for the next: no gradient, compiler or transform of functions looks on."""
    return in_eager_mode() and not transformed(table) and not (torch.is_grad_enabled() and table.requires_grad)


@register_notrace_module
class RelativeAttention(HeadedAttention):
    """Global attention of the places of a map that weighs content and offset together.

    y = proj(softmax(q k^T / sqrt(hd) + P[i - i', j - j']) v)

    `relative_bias` holds P, one table a head, made for `grid_size` and resized for other maps at any call. In eval mode
    without gradients the N x N bias is kept between calls until the table changes (by any hand on a CPU, by a write
    that autograd sees elsewhere), or the size, dtype or device of what comes; `train()` and `eval()` free it. Other
    arguments are timm's Attention's.

    Shape: x (B, H, W, C) -> (B, H, W, C)
    Source: CoAtNet eq. 3 (pre), A.1; differs: the table's birth, N(0, .02), and no decay are not in the paper
    Raises: ValueError for heads that do not divide the channels, a grid of no place, or tokens in place of a map.
    """

    def __init__(self, dim: int, num_heads: int = 8, grid_size: tuple[int, int] = (14, 14), **kwargs: Any) -> None:
        if num_heads < 1 or (dim % num_heads and not kwargs.get("attn_head_dim")):
            raise ValueError(f"{num_heads} heads do not divide {dim} channels; choose a divisor, or attn_head_dim")
        if len(grid_size) != 2 or min(grid_size) < 1:
            raise ValueError(f"grid_size {grid_size} must be (height, width), both at least 1")
        super().__init__(dim, num_heads, **kwargs)
        H, W = grid_size
        self.relative_bias = nn.Parameter(torch.empty(num_heads, 2 * H - 1, 2 * W - 1, **placement(kwargs)))
        self.kept: KeptBias | None = None
        self.reset_bias()

    def reset_bias(self) -> None:
        trunc_normal_(self.relative_bias, std=0.02)

    def no_weight_decay(self) -> set[str]:
        """Decay would pull every offset to the same."""
        return {"relative_bias"}

    @property
    def grid_size(self) -> tuple[int, int]:
        """The grid that the table is made for."""
        _, rows, columns = self.relative_bias.shape
        return (rows + 1) // 2, (columns + 1) // 2

    @torch.no_grad()
    def set_grid_size(self, grid_size: tuple[int, int]) -> None:
        """Makes the table one for another grid, for good."""
        table = resize_table(self.relative_bias, grid_size)
        self.relative_bias = nn.Parameter(table.clone(), self.relative_bias.requires_grad)
        self.kept = None

    def table(self, grid_size: tuple[int, int]) -> Tensor:
        """P for a grid. Shape: -> (nh, 2 H - 1, 2 W - 1)"""
        return resize_table(self.relative_bias, grid_size)

    def bias(self, grid_size: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """P for every pair of places, kept where it may be. Shape: -> (nh, N, N)"""
        own = self.relative_bias
        if self.training or not _may_keep(own):
            return spread(self.table(grid_size), grid_size).to(dtype)
        on_cpu = own.device.type == "cpu"
        version = None if on_cpu else version_of(own)
        key = (grid_size, dtype, own.dtype, own.device, torch.is_inference_mode_enabled(), version, _stream_of(own))
        kept = self.kept  # read once: another thread may replace it at any time
        if kept is None or not kept.holds(key, own):
            fresh = spread(self.table(grid_size), grid_size).to(dtype).detach()
            kept = KeptBias(key, own.detach().clone() if on_cpu else own, fresh)
            self.kept = kept
        return kept.bias

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, grid_size: tuple[int, int]) -> Tensor:
        """Shape: q, k, v (B, nh, N, hd) -> (B, nh, N, hd)"""
        drop = self.attn_drop.p if self.training else 0.0
        if q.is_cuda and flexes(q.shape[2], drop):
            return attend_flex(self.table(grid_size), grid_size, q, k, v)
        return attend(self.bias(grid_size, q.dtype), drop, q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4:
            raise ValueError(f"maps come as (B, H, W, C), not with shape {tuple(x.shape)}")
        grid_size = (x.shape[1], x.shape[2])
        tokens = x.flatten(1, 2)  # (B, N, C)
        mixed = self.weigh(*self.heads(tokens), grid_size)
        return self.finish(mixed, tokens).unflatten(1, grid_size)

    def attention(self, x: Tensor) -> Tensor:
        """The map that `forward` applies. Shape: x (B, H, W, C) -> (B, nh, N, N)"""
        q, k, _ = self.heads(x.flatten(1, 2))
        return ((q * self.scale) @ k.mT + self.bias((x.shape[1], x.shape[2]), q.dtype)).softmax(-1)

    def train(self, mode: bool = True) -> "RelativeAttention":
        self.kept = None
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles without what can be computed."""
        return self.__dict__ | {"kept": None}

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, grid_size={self.grid_size}"


class PostRelativeAttention(RelativeAttention):
    """Relative attention with the offsets weighed after the softmax: attention plus a global convolution.

    y = proj((softmax(q k^T / sqrt(hd)) + P[i - i', j - j']) v)

    Shape: x (B, H, W, C) -> (B, H, W, C)
    Source: CoAtNet eq. 3 (post), which the paper does not use; differs: as RelativeAttention
    """

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, grid_size: tuple[int, int]) -> Tensor:
        drop = self.attn_drop.p if self.training else 0.0
        content = F.scaled_dot_product_attention(q, k, v, dropout_p=drop)
        return content + convolve(self.bias(grid_size, q.dtype), v)

    def attention(self, x: Tensor) -> Tensor:
        """The map that `forward` applies; its rows do not sum to 1. Shape: x (B, H, W, C) -> (B, nh, N, N)"""
        q, k, _ = self.heads(x.flatten(1, 2))
        return ((q * self.scale) @ k.mT).softmax(-1) + self.bias((x.shape[1], x.shape[2]), q.dtype)


def convolve(bias: Tensor, v: Tensor) -> Tensor:
    """sum_j w_(i - j) v_j for all images in one product a head. Shape: (nh, N, N), (B, nh, N, hd) -> (B, nh, N, hd)"""
    B, nh, N, hd = v.shape
    side_by_side = v.permute(1, 2, 0, 3).reshape(nh, N, B * hd)
    return torch.bmm(bias, side_by_side).view(nh, N, B, hd).permute(2, 0, 1, 3)
