"""Gated positional self-attention on maps (T-CNN): a convolution whose taps may wander and look at content.

    A_h = (1 - sigma(gate_h)) softmax(q_h k_h^T / sqrt(d)) + sigma(gate_h) softmax(-locality_h |delta - centre_h|^2)

The layer is a convolution through soft columns: im2col gathers, for each query and tap, the value under the tap;
here A_h V gathers it softly, in the same layout, and the same filter is applied to it.
Letters: B batch, C channels, H W key grid, nh heads (taps), hd head width, Nq queries.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module, to_2tuple
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from isomorph.layers.grid import axis_offsets, output_size, window_centres
from isomorph.layers.mix import mix
from isomorph.layers.position import attend_shared, geometry_dtype, kronecker, peaked_axis

DENSE_PAIRS = 512 * 512
"""The mixed map is formed up to this many query-key pairs; above, and for sizes that an export leaves open, no map is
ever held (benchmarks/gpsa.py)."""

SOFTPLUS_BETA = 5.0
"""Sharpness of the softplus that keeps localities positive (T-CNN, footnote 1; its sign there is a misprint)."""


def _inverse_softplus(value: float) -> float:
    """The raw parameter whose softplus (beta 5) is `value`."""
    return value + math.log(-math.expm1(-SOFTPLUS_BETA * value)) / SOFTPLUS_BETA


def _deal_rows(weight: Tensor, num_heads: int) -> Tensor:
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

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, maps: Tensor) -> Tensor:
        return torch.bmm(values, maps.transpose(1, 2))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        values, maps = ctx.saved_tensors
        return torch.bmm(grad, maps), torch.bmm(grad.transpose(1, 2), values)


@register_notrace_module
class GPSA2d(nn.Module):
    """Gated positional self-attention on maps: a k x k convolution whose k*k taps may wander and look at content.

    y = sum_h A_h V weight_h + bias, V = W_val x, one head and one tap of `weight` for each place in the window.
    It is a convolution through soft columns: with gates closed and localities high, A_h picks tap h and
    `A_h V` is exactly the column that im2col would gather. Keys are zero-padded as the convolution's input is: the
    padding draws attention and gives nothing.

    Per head it learns `centre` (row, column), `locality` through softplus, and `gate`. W_qry, W_key and W_val are
    C x C; rows of the first two are dealt to heads in turn (see `_deal_rows`).

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
        self.centre.copy_(window_centres((self.kernel_size, self.kernel_size)))
        nn.init.eye_(self.value.weight)
        self.set_dials(locality, gate)

    @torch.no_grad()
    def set_dials(self, locality: float | None = None, gate: float | None = None) -> None:
        """Sets the locality and the gate of every head; None leaves one as it is."""
        if locality is not None:
            if not 0 < locality < math.inf:
                raise ValueError(f"locality {locality} must be above 0 and finite")
            self.raw_locality.fill_(_inverse_softplus(locality))
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
        dense = statically_known_true(Hq * Wq * H * W <= DENSE_PAIRS)
        soften = self.columns_dense if dense else self.columns_by_axis
        columns = soften(x)  # (B, C nh, Nq)
        taps = self.weight.flatten(1)[:, :, None]  # (C_out, C nh, 1)
        return F.conv1d(columns, taps, self.bias).unflatten(-1, (Hq, Wq))

    def inner_axis_maps(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Axis maps for x without the padding, whose values are zero. Shape: -> (nh, Hq, H), (nh, Wq, W)"""
        H, W = x.shape[-2:]
        rows, columns = self.axis_maps(H, W)
        ph, pw = self.padding
        return rows[..., ph : ph + H].to(dtype), columns[..., pw : pw + W].to(dtype)

    def queries_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries where the window stands, keys on the map and one zero key that stands for all the padding.

        Shape: x (B, C, H, W) -> (B, nh, Nq, hd), (B, nh, H W + 1, hd)
        """
        tokens = x.flatten(2).transpose(1, 2)  # (B, H W, C)
        standing = self.standing(x).flatten(2).transpose(1, 2)  # (B, Nq, C)
        q = F.linear(standing, _deal_rows(self.query.weight, self.num_heads))
        k = F.linear(tokens, _deal_rows(self.key.weight, self.num_heads))
        q, k = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k))
        return q, F.pad(k, (0, 0, 0, 1))

    def standing(self, x: Tensor) -> Tensor:
        """The map under the middle of every window. Shape: x (B, C, H, W) -> (B, C, Hq, Wq)"""
        middle = self.kernel_size // 2
        (sh, sw), (ph, pw) = self.stride, (padding - middle for padding in self.padding)
        if (ph, pw) != (0, 0):  # below 0: cut off
            x = F.pad(x, (pw, pw, ph, ph))
        return x[:, :, ::sh, ::sw].contiguous()

    def padding_score(self, like: Tensor, H: int, W: int) -> Tensor:
        """Score added to each key: 0, and log(how many padded keys there are) for the one that stands for them.

        Shape: -> (H W + 1,)
        """
        padded = (H + 2 * self.padding[0]) * (W + 2 * self.padding[1]) - H * W
        last = torch.full((1,), padded, dtype=geometry_dtype(like), device=like.device).log()  # log 0 is -inf
        return F.pad(last.to(like.dtype), (H * W, 0))

    def columns_dense(self, x: Tensor) -> Tensor:
        """Soft columns through the mixed map: one product of all heads with the values they share.

        Shape: x (B, C, H, W) -> (B, C nh, Nq)
        """
        q, k = self.queries_keys(x)
        B, _, Nq, hd = q.shape
        scores = (q * hd**-0.5) @ k.transpose(-2, -1)  # (B, nh, Nq, H W + 1)
        scores = scores.add_(self.padding_score(scores, *x.shape[-2:]))
        content = torch.softmax(scores, dim=-1)[..., :-1]
        mixed = mix(content, kronecker(*self.inner_axis_maps(x, content.dtype)), self.gate)
        values = self.value.weight @ x.flatten(2)  # (B, C, H W)
        columns = SoftColumns.apply(values, mixed.flatten(1, 2).to(values.dtype))  # (B, C, nh Nq)
        return columns.view(B, values.shape[1] * self.num_heads, Nq)

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
        position = attend_shared(*self.inner_axis_maps(x, values.dtype), values)  # (B, nh, Nq, C)
        mixed = mix(content, position, self.gate)
        return mixed.permute(0, 3, 1, 2).flatten(1, 2)  # (B, C nh, Nq)

    def queries_padded_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries where the window stands, and a key at each position of the padded grid.

        Shape: x (B, C, H, W) -> (B, nh, Nq, hd), (B, nh, (H + 2 pad) (W + 2 pad), hd)
        """
        ph, pw = self.padding
        q, k = self.queries_keys(x)
        keys = k[:, :, :-1].unflatten(2, x.shape[-2:])  # (B, nh, H, W, hd)
        return q, F.pad(keys, (0, 0, pw, pw, ph, ph)).flatten(2, 3)

    def attention(self, x: Tensor) -> Tensor:
        """The map over the zero-padded keys, formed on request; every row sums to 1.

        Shape: x (B, C, H, W) -> (B, nh, Nq, (H + 2 pad) (W + 2 pad))
        """
        q, keys = self.queries_padded_keys(x)
        content = torch.softmax(q @ keys.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1)
        return mix(content, kronecker(*self.axis_maps(*x.shape[-2:])).to(content.dtype), self.gate)

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
        conv.requires_grad_(self.weight.requires_grad)
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
