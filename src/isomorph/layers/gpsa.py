"""Gated positional self-attention: attention that can be a convolution, and can leave it.

    A_h = (1 - sigma(gate_h)) softmax(q_h k_h^T / sqrt(d)) + sigma(gate_h) softmax(position scores_h)

`GPSA` is ConViT's token form, `GPSA2d` the map form of T-CNN that stands where a convolution stood. The
re-normalisation printed in ConViT eq. 7 divides a convex mix of two softmaxes by 1, so it is left out.

How this differs from the released ConViT layer: the positional half is computed once per grid, never per image,
and in closed form (`position.py`); the content half is `scaled_dot_product_attention`; grids are rectangles.
Letters: B batch, N tokens, C channels, nh heads, hd head width, Nq queries, Nk keys.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from isomorph.layers.grid import axis_offsets, output_size, window_centres
from isomorph.layers.position import (
    attend_by_axis,
    attend_dense,
    attend_shared,
    kronecker,
    peaked_axis,
    quadratic_axis,
)

DENSE_TOKENS = 32
"""GPSA multiplies the positional map out up to this many tokens; above, axis by axis is faster (benchmarks/gpsa.py)."""

DENSE_PAIRS = 512 * 512
"""GPSA2d forms the mixed map up to this many query-key pairs; above, it never holds a map (benchmarks/gpsa.py)."""

SOFTPLUS_BETA = 5.0
"""Sharpness of the softplus that keeps localities positive (T-CNN, footnote 1; its sign there is a misprint)."""


def geometry_dtype(parameter: Tensor) -> torch.dtype:
    """Offsets and their softmax are computed in float32 at least: squared offsets are inexact in bfloat16."""
    return torch.promote_types(parameter.dtype, torch.float32)


def inverse_softplus(value: float) -> float:
    """The raw parameter whose softplus (beta 5) is `value`."""
    return value + math.log(-math.expm1(-SOFTPLUS_BETA * value)) / SOFTPLUS_BETA


def deal_rows(weight: Tensor, num_heads: int) -> Tensor:
    """Deals the rows of a projection to heads in turn, and gives heads that miss a row a zero one.

    9 heads do not divide 512 channels: row r goes to head r mod 9, so every row is used, every head gets 56 or 57,
    and a zero row changes no inner product.

    Shape: weight (C, C_in) -> (nh ceil(C / nh), C_in), grouped by head
    """
    head_width = -(-weight.shape[0] // num_heads)
    rows = F.pad(weight, (0, 0, 0, num_heads * head_width - weight.shape[0]))
    return rows.view(head_width, num_heads, -1).transpose(0, 1).flatten(0, 1)  # (nh hd, C_in)


class SoftColumns(torch.autograd.Function):
    """values @ maps^T with the maps' gradient in the maps' own layout.

    Plain autograd would hand back a transposed gradient, and every pass over it (softmax, gates, batch sum) would
    stride: a training step of the layer is about 1.2x faster so at 8 x 8 x 64.

    Shape: values (B, C, Nk), maps (B, M, Nk) -> (B, C, M)
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, maps: Tensor) -> Tensor:
        ctx.save_for_backward(values, maps)
        return torch.bmm(values, maps.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        values, maps = ctx.saved_tensors
        return torch.bmm(grad, maps), torch.bmm(grad.transpose(1, 2), values)


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
        """Puts every head on its tap with the given strength and gate, and the values to the identity (ConViT eq. 5)."""
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


class GPSA2d(nn.Module):
    """Gated positional self-attention on maps: a k x k convolution whose k*k taps may wander and look at content.

    y = sum_h A_h V weight_h + bias, V = W_val x, one head and one tap of `weight` for each place in the window.
    It is a convolution through soft columns: with gates closed and localities high, A_h picks tap h and
    `A_h V` is exactly the column that im2col would gather. Keys are zero-padded as the convolution's input is: the
    padding draws attention and gives nothing.

    Per head it learns `centre` (row, column), `locality` through softplus, and `gate`. W_qry, W_key and W_val are
    C x C; rows of the first two are dealt to heads in turn (see `deal_rows`).

    Shape: x (B, C, H, W) -> (B, C_out, Hq, Wq), sizes as nn.Conv2d
    Source: T-CNN eq. 4-7; differs: 1/sqrt(hd) on the content scores, the footnote's softplus sign mended.
    Raises: ValueError for an even or non-positive kernel, a non-positive locality, or a map smaller than the window.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size {kernel_size} has no centre; use an odd size")
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, kernel_size
        self.stride: tuple[int, int] = to_2tuple(stride)
        self.padding: tuple[int, int] = to_2tuple(padding)
        self.num_heads = kernel_size**2
        self.query = nn.Linear(in_channels, in_channels, bias=False)
        self.key = nn.Linear(in_channels, in_channels, bias=False)
        self.value = nn.Linear(in_channels, in_channels, bias=False)
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, kernel_size, kernel_size))
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        self.centre = nn.Parameter(torch.empty(self.num_heads, 2))
        self.raw_locality = nn.Parameter(torch.empty(self.num_heads))
        self.gate = nn.Parameter(torch.empty(self.num_heads))
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        self.reset_attention()

    @torch.no_grad()
    def reset_attention(self, locality: float = 1.0, gate: float = 1.0) -> None:
        """Puts every head on its tap, the values to the identity (T-CNN eq. 4, 6) and the dials to the paper's 1, 1."""
        self.centre.copy_(window_centres(self.num_heads))
        nn.init.eye_(self.value.weight)
        self.set_dials(locality, gate)

    @torch.no_grad()
    def set_dials(self, locality: float | None = None, gate: float | None = None) -> None:
        """Sets the locality and the gate of every head; None leaves one as it is."""
        if locality is not None:
            if not locality > 0:
                raise ValueError(f"locality {locality} must be above 0")
            self.raw_locality.fill_(inverse_softplus(locality))
        if gate is not None:
            self.gate.fill_(gate)

    @property
    def locality(self) -> Tensor:
        """Strength of each head's pull to its centre; 1 / locality is its span (T-CNN Fig. 4B).

        Shape: -> (nh,)
        """
        return F.softplus(self.raw_locality.to(geometry_dtype(self.raw_locality)), beta=SOFTPLUS_BETA)

    def no_weight_decay(self) -> set[str]:
        """Decay would pull the centres to the middle tap and the dials to 0."""
        return {"centre", "raw_locality", "gate"}

    def query_grid(self, H: int, W: int) -> tuple[int, int]:
        """Size of the output map for an H x W input."""
        sizes = zip((H, W), self.stride, self.padding, strict=True)
        Hq, Wq = (output_size(n, self.kernel_size, stride, padding) for n, stride, padding in sizes)
        return Hq, Wq

    def axis_maps(self, H: int, W: int) -> tuple[Tensor, Tensor]:
        """Positional attention along rows and columns, over the zero-padded keys.

        Shape: -> (nh, Hq, H + 2 pad), (nh, Wq, W + 2 pad)
        """
        dtype, device = geometry_dtype(self.centre), self.centre.device
        centres = self.centre.to(dtype).unbind(1)
        maps = []
        for axis, (queries, keys) in enumerate(zip(self.query_grid(H, W), (H, W), strict=True)):
            padded = keys + 2 * self.padding[axis]
            offsets = axis_offsets(queries, padded, self.kernel_size // 2, self.stride[axis], device, dtype)
            maps.append(peaked_axis(offsets, centres[axis], self.locality))
        return maps[0], maps[1]

    def forward(self, x: Tensor) -> Tensor:
        H, W = x.shape[-2:]
        Hq, Wq = self.query_grid(H, W)
        soften = self.columns_dense if Hq * Wq * H * W <= DENSE_PAIRS else self.columns_by_axis
        columns = soften(x)  # (B, C nh, Nq)
        taps = self.weight.flatten(1)[:, :, None]  # (C_out, C nh, 1)
        return F.conv1d(columns, taps, self.bias).unflatten(-1, (Hq, Wq))

    def inner_axis_maps(self, H: int, W: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Axis maps without the padding, whose values are zero. Shape: -> (nh, Hq, H), (nh, Wq, W)"""
        rows, columns = self.axis_maps(H, W)
        ph, pw = self.padding
        return rows[..., ph : ph + H].to(dtype), columns[..., pw : pw + W].to(dtype)

    def queries_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries where the window stands, keys on the map and one zero key that stands for all the padding.

        Shape: x (B, C, H, W) -> (B, nh, Nq, hd), (B, nh, H W + 1, hd)
        """
        tokens = x.flatten(2).transpose(1, 2)  # (B, H W, C)
        standing = self.standing(x).flatten(2).transpose(1, 2)  # (B, Nq, C)
        q = F.linear(standing, deal_rows(self.query.weight, self.num_heads))
        k = F.linear(tokens, deal_rows(self.key.weight, self.num_heads))
        q, k = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k))
        return q, F.pad(k, (0, 0, 0, 1))

    def standing(self, x: Tensor) -> Tensor:
        """The map under the middle of every window. Shape: x (B, C, H, W) -> (B, C, Hq, Wq)"""
        (sh, sw), (ph, pw), middle = self.stride, self.padding, self.kernel_size // 2
        Hq, Wq = self.query_grid(*x.shape[-2:])
        if (sh, sw) == (1, 1) and (ph, pw) == (middle, middle):
            return x
        ends = (middle + (Wq - 1) * sw + 1, middle + (Hq - 1) * sh + 1)
        return F.pad(x, (pw, pw, ph, ph))[:, :, middle : ends[1] : sh, middle : ends[0] : sw]

    def padding_score(self, like: Tensor, H: int, W: int) -> Tensor:
        """Score added to each key: 0, and log(how many padded keys there are) for the one that stands for them.

        Shape: -> (H W + 1,)
        """
        padded = (H + 2 * self.padding[0]) * (W + 2 * self.padding[1]) - H * W
        score = like.new_zeros(H * W + 1)
        score[-1] = math.log(padded) if padded else -math.inf
        return score

    def columns_dense(self, x: Tensor) -> Tensor:
        """Soft columns through the mixed map: one product of all heads with the values they share.

        Shape: x (B, C, H, W) -> (B, C nh, Nq)
        """
        q, k = self.queries_keys(x)
        B, nh, Nq, hd = q.shape
        scores = (q * hd**-0.5) @ k.transpose(-2, -1)  # (B, nh, Nq, H W + 1)
        scores = scores.add_(self.padding_score(scores, *x.shape[-2:]))
        content = torch.softmax(scores, dim=-1)[..., :-1]
        mixed = self.mix(content, kronecker(*self.inner_axis_maps(*x.shape[-2:], content.dtype)))
        values = self.value.weight @ x.flatten(2)  # (B, C, H W)
        return SoftColumns.apply(values, mixed.flatten(1, 2).to(values.dtype)).view(B, -1, Nq)

    def columns_by_axis(self, x: Tensor) -> Tensor:
        """Soft columns without any query-by-key map: fused content attention, positions axis by axis.

        Shape: x (B, C, H, W) -> (B, C nh, Nq)
        """
        q, k = self.queries_keys(x)
        B, nh, Nq, hd = q.shape
        values = self.value(x.flatten(2).transpose(1, 2))  # (B, H W, C)
        shared = F.pad(values, (0, 0, 0, 1))[:, None].expand(B, nh, -1, -1)  # (B, nh, H W + 1, C)
        if x.device.type == "cpu" and hd < self.in_channels:  # its fused kernel wants q, k and v of one width
            q, k = (F.pad(t, (0, self.in_channels - hd)) for t in (q, k))
        bias = self.padding_score(q, *x.shape[-2:]).expand(1, 1, Nq, -1)
        content = F.scaled_dot_product_attention(q, k, shared, attn_mask=bias, scale=hd**-0.5)
        position = attend_shared(*self.inner_axis_maps(*x.shape[-2:], values.dtype), values)  # (B, nh, Nq, C)
        mixed = self.mix(content, position)
        return mixed.permute(0, 3, 1, 2).flatten(1, 2)  # (B, C nh, Nq)

    def mix(self, content: Tensor, position: Tensor) -> Tensor:
        """(1 - sigma(gate)) content + sigma(gate) position, exact for gates far from 0. Shape: (..., nh, Nq, n)"""
        gate = self.gate[:, None, None].to(content.dtype)
        return torch.addcmul(position * torch.sigmoid(gate), content, torch.sigmoid(-gate))

    def attention(self, x: Tensor) -> Tensor:
        """The map over the zero-padded keys, formed on request; every row sums to 1.

        Shape: x (B, C, H, W) -> (B, nh, Nq, (H + 2 pad) (W + 2 pad))
        """
        ph, pw = self.padding
        q, k = self.queries_keys(x)
        keys = k[:, :, :-1].unflatten(2, x.shape[-2:])  # (B, nh, H, W, hd)
        keys = F.pad(keys, (0, 0, pw, pw, ph, ph)).flatten(2, 3)
        content = torch.softmax(q @ keys.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1)
        return self.mix(content, kronecker(*self.axis_maps(*x.shape[-2:])).to(content.dtype))

    @torch.no_grad()
    def to_conv(self, atol: float = 1e-3) -> nn.Conv2d:
        """The convolution that this layer still is: tap h is weight_h W_val.

        Raises: ValueError naming the measured deviation (largest |difference| on a standard normal map, relative to
        the largest output) when it is above `atol`: the gates are open, or heads have left their taps.
        """
        conv = nn.Conv2d(
            self.in_channels,
            self.out_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            bias=self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        conv.weight.copy_(torch.einsum("ocij,cd->odij", self.weight.double(), self.value.weight.double()))
        if self.bias is not None and conv.bias is not None:
            conv.bias.copy_(self.bias)
        deviation = self.deviation_from(conv)
        if not deviation <= atol:
            raise ValueError(
                f"this GPSA2d is no longer a convolution: it deviates by {deviation:.2g} (relative), above {atol:g}; "
                "close the gates and raise the localities (set_dials), or keep it as attention"
            )
        return conv.train(self.training)

    def deviation_from(self, conv: nn.Conv2d) -> float:
        """Largest |difference| to `conv` on one standard normal map, relative to its largest |output|, in float64."""
        side = 4 * self.kernel_size + 3
        probe = torch.randn(1, self.in_channels, side, side + 2, generator=torch.Generator().manual_seed(0))
        probe = probe.to(self.weight.device, torch.float64)
        expected, actual = (
            torch.func.functional_call(module, {name: p.double() for name, p in module.named_parameters()}, (probe,))
            for module in (conv, self)
        )
        return ((actual - expected).abs().max() / expected.abs().max()).item()

    def extra_repr(self) -> str:
        size = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        return f"{size}, stride={self.stride}, padding={self.padding}, bias={self.bias is not None}"
