"""Gated positional self-attention on feature maps (T-CNN): a convolution whose taps can move and attend by content.

    A_h = (1 - sigma(gate_h)) softmax(q_h k_h^T / sqrt(hd)) + sigma(gate_h) softmax(-locality_h |delta - centre_h|^2)

The layer is computed as a convolution over soft columns. For each query and tap, im2col gathers the value under the
tap; here A_h V gathers a weighted mean of the values in the same layout, and the same filter is applied to it.

Letters: B batch, C channels, H W key grid, Hq Wq query grid, nh heads (one per tap), hd head width, Nq queries.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module, to_2tuple
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from isomorph.layers.gated_mix import gated_mix
from isomorph.layers.grid import axis_offsets, conv_output_size, window_centres
from isomorph.layers.positional_attention import attend_shared_values, centred_axis_attention, geometry_dtype, kronecker

MAX_DENSE_PAIRS = 512 * 512
"""Most query-key pairs for which the mixed map is formed. Above, and for sizes that an export leaves open, no map is
formed (measured by benchmarks/gpsa.py)."""

SOFTPLUS_BETA = 5.0
"""Sharpness of the softplus that keeps localities positive (T-CNN, footnote 1, where its sign is a misprint)."""


def _inverse_softplus(value: float) -> float:
    """Return the raw parameter whose softplus (beta 5) is `value`."""
    return value + math.log(-math.expm1(-SOFTPLUS_BETA * value)) / SOFTPLUS_BETA


def _group_rows_by_head(weight: Tensor, num_heads: int) -> Tensor:
    """Assign the rows of a projection to heads in turn, padding heads that get one row fewer with zeros.

    9 heads do not divide 512 channels: row r goes to head r mod 9, so every row is used and each head gets 56 or 57
    rows. A zero row does not change any inner product.

    Shape: weight (C, C_in) -> (nh ceil(C / nh), C_in), grouped by head
    """
    head_width = -(-weight.shape[0] // num_heads)
    rows = F.pad(weight, (0, 0, 0, num_heads * head_width - weight.shape[0]))
    return rows.view(head_width, num_heads, -1).transpose(0, 1).flatten(0, 1)  # (nh hd, C_in)


class _SoftColumns(torch.autograd.Function):
    """Compute values @ maps^T with the gradient of the maps in the layout of the maps.

    Plain autograd would return a transposed gradient, and every pass over it (softmax, gates, sum over the batch) would
    be strided: this makes a training step of the layer about 1.2x faster at 8 x 8 x 64.

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
    """Self-attention that starts as a given k x k convolution and can learn to attend globally (T-CNN).

    Each of the k*k heads stands for one tap of the convolution and has that tap's filter:

        y = sum_h A_h V weight_h + bias,    V = W_val x

    With closed gates (gate high) and high localities, A_h selects the pixel under tap h, and the layer is the
    convolution. Training can lower the gates and localities, so that heads attend further away and by content. Keys are
    zero-padded as the input of the convolution is: padding receives attention and contributes zeros.

    Gating parameters, per head: `gate` (sigmoid: the share of position attention), `locality` (its sharpness, positive
    through softplus of `raw_locality`), `centre` (row, column). W_qry, W_key and W_val are C x C; the rows of the first
    two are assigned to heads in turn, as k*k rarely divides C.

    Shape: x (B, C, H, W) -> (B, C_out, Hq, Wq), sizes as nn.Conv2d
    Source: T-CNN eq. 4-7; differs: 1/sqrt(hd) on the content scores, and the sign of the footnote's softplus corrected
    Raises: ValueError for an even or non-positive kernel size, or a feature map smaller than the window.

    Example:
        >>> layer = iso.layers.GPSA2d(8, 16, kernel_size=3, padding=1)
        >>> layer(torch.randn(2, 8, 6, 6)).shape
        torch.Size([2, 16, 6, 6])
        >>> layer.set_gating(locality=30.0, gate=20.0)  # so local that it is a convolution
        >>> layer.to_conv()
        Conv2d(8, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
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
            raise ValueError(f"kernel_size {kernel_size} has no centre; use an odd number above 0")
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
        """Centre every head on its tap, set the values to the identity (T-CNN eq. 4, 6), and set locality and gate.

        The defaults are the paper's, 1 and 1.
        """
        self.centre.copy_(window_centres((self.kernel_size, self.kernel_size)))
        nn.init.eye_(self.value.weight)
        self.set_gating(locality, gate)

    @torch.no_grad()
    def set_gating(self, locality: float | None = None, gate: float | None = None) -> None:
        """Set the locality and the gate of every head; None leaves a parameter unchanged.

        Raises: ValueError if the locality is not above 0 and finite.
        """
        if locality is not None:
            if not 0 < locality < math.inf:
                raise ValueError(f"locality {locality} must be above 0 and finite")
            self.raw_locality.fill_(_inverse_softplus(locality))
        if gate is not None:
            self.gate.fill_(gate)

    @property
    def locality(self) -> Tensor:
        """Sharpness of each head's position attention; 1 / locality is the head's span (T-CNN Fig. 4B).

        Shape: -> (nh,)
        """
        return F.softplus(self.raw_locality.to(geometry_dtype(self.raw_locality)), beta=SOFTPLUS_BETA)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that weight decay would pull to 0: centres to the middle tap, gates to one half."""
        return {"centre", "raw_locality", "gate"}

    def query_grid(self, H: int, W: int) -> tuple[int, int]:
        """Return the height and width of the output for an H x W input."""
        sizes = zip((H, W), self.stride, self.padding, strict=True)
        Hq, Wq = (conv_output_size(n, self.kernel_size, stride, padding) for n, stride, padding in sizes)
        return Hq, Wq

    def axis_maps(self, H: int, W: int) -> tuple[Tensor, Tensor]:
        """Return the position attention maps along rows and along columns, over the zero-padded keys.

        Shape: -> (nh, Hq, H + 2 pad), (nh, Wq, W + 2 pad)
        """
        dtype, device = geometry_dtype(self.centre), self.centre.device
        centres = self.centre.to(dtype).unbind(1)
        maps = []
        for axis, (queries, keys) in enumerate(zip(self.query_grid(H, W), (H, W), strict=True)):
            padded = keys + 2 * self.padding[axis]
            offsets = axis_offsets(queries, padded, self.kernel_size // 2, self.stride[axis], device, dtype)
            maps.append(centred_axis_attention(offsets, centres[axis], self.locality))
        return maps[0], maps[1]

    def forward(self, x: Tensor) -> Tensor:
        H, W = x.shape[-2:]
        Hq, Wq = self.query_grid(H, W)
        dense = statically_known_true(Hq * Wq * H * W <= MAX_DENSE_PAIRS)
        gather_columns = self.soft_columns_dense if dense else self.soft_columns_by_axis
        columns = gather_columns(x)  # (B, C nh, Nq)
        taps = self.weight.flatten(1)[:, :, None]  # (C_out, C nh, 1)
        return F.conv1d(columns, taps, self.bias).unflatten(-1, (Hq, Wq))

    def unpadded_axis_maps(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the axis maps without the padded keys, whose values are zero. Shape: -> (nh, Hq, H), (nh, Wq, W)"""
        H, W = x.shape[-2:]
        rows, columns = self.axis_maps(H, W)
        ph, pw = self.padding
        return rows[..., ph : ph + H].to(dtype), columns[..., pw : pw + W].to(dtype)

    def queries_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return a query per window and a key per position of x, followed by one zero key for all of the padding.

        Shape: x (B, C, H, W) -> (B, nh, Nq, hd), (B, nh, H W + 1, hd)
        """
        tokens = x.flatten(2).transpose(1, 2)  # (B, H W, C)
        centres = self.query_positions(x).flatten(2).transpose(1, 2)  # (B, Nq, C)
        q = F.linear(centres, _group_rows_by_head(self.query.weight, self.num_heads))
        k = F.linear(tokens, _group_rows_by_head(self.key.weight, self.num_heads))
        q, k = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k))
        return q, F.pad(k, (0, 0, 0, 1))

    def query_positions(self, x: Tensor) -> Tensor:
        """Return the features of x at the middle of every window. Shape: x (B, C, H, W) -> (B, C, Hq, Wq)"""
        middle = self.kernel_size // 2
        (sh, sw), (ph, pw) = self.stride, (padding - middle for padding in self.padding)
        if (ph, pw) != (0, 0):  # negative padding crops
            x = F.pad(x, (pw, pw, ph, ph))
        return x[:, :, ::sh, ::sw].contiguous()

    def padding_score(self, like: Tensor, H: int, W: int) -> Tensor:
        """Return the score added to each key: 0, and log(number of padded keys) for the one key that represents them.

        Shape: -> (H W + 1,)
        """
        padded = (H + 2 * self.padding[0]) * (W + 2 * self.padding[1]) - H * W
        last = torch.full((1,), padded, dtype=geometry_dtype(like), device=like.device).log()  # log 0 is -inf
        return F.pad(last.to(like.dtype), (H * W, 0))

    def soft_columns_dense(self, x: Tensor) -> Tensor:
        """Return the soft columns as one product of the mixed map of all heads with the values that they share.

        Shape: x (B, C, H, W) -> (B, C nh, Nq)
        """
        q, k = self.queries_keys(x)
        B, _, Nq, hd = q.shape
        scores = (q * hd**-0.5) @ k.transpose(-2, -1)  # (B, nh, Nq, H W + 1)
        scores = scores.add_(self.padding_score(scores, *x.shape[-2:]))
        content = torch.softmax(scores, dim=-1)[..., :-1]
        mixed = gated_mix(content, kronecker(*self.unpadded_axis_maps(x, content.dtype)), self.gate)
        values = self.value.weight @ x.flatten(2)  # (B, C, H W)
        columns = _SoftColumns.apply(values, mixed.flatten(1, 2).to(values.dtype))  # (B, C, nh Nq)
        return columns.view(B, values.shape[1] * self.num_heads, Nq)

    def soft_columns_by_axis(self, x: Tensor) -> Tensor:
        """Return the soft columns without forming a map: fused content attention, and position attention axis by axis.

        Shape: x (B, C, H, W) -> (B, C nh, Nq)
        """
        q, k = self.queries_keys(x)
        B, nh, Nq, hd = q.shape
        values = self.value(x.flatten(2).transpose(1, 2))  # (B, H W, C)
        shared = F.pad(values, (0, 0, 0, 1))[:, None].expand(B, nh, -1, -1)  # (B, nh, H W + 1, C)
        if x.device.type == "cpu" and hd < self.in_channels:  # its fused kernel needs q, k and v of one width
            q, k = (F.pad(t, (0, self.in_channels - hd)) for t in (q, k))
        bias = self.padding_score(q, *x.shape[-2:]).expand(1, 1, Nq, -1)
        content = F.scaled_dot_product_attention(q, k, shared, attn_mask=bias, scale=hd**-0.5)
        position = attend_shared_values(*self.unpadded_axis_maps(x, values.dtype), values)  # (B, nh, Nq, C)
        mixed = gated_mix(content, position, self.gate)
        return mixed.permute(0, 3, 1, 2).flatten(1, 2)  # (B, C nh, Nq)

    def queries_padded_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return a query per window and a key per position of the padded grid.

        Shape: x (B, C, H, W) -> (B, nh, Nq, hd), (B, nh, (H + 2 pad) (W + 2 pad), hd)
        """
        ph, pw = self.padding
        q, k = self.queries_keys(x)
        keys = k[:, :, :-1].unflatten(2, x.shape[-2:])  # (B, nh, H, W, hd)
        return q, F.pad(keys, (0, 0, pw, pw, ph, ph)).flatten(2, 3)

    def attention(self, x: Tensor) -> Tensor:
        """Return the attention map over the zero-padded keys; it is formed only here, and every row sums to 1.

        Shape: x (B, C, H, W) -> (B, nh, Nq, (H + 2 pad) (W + 2 pad))
        """
        q, keys = self.queries_padded_keys(x)
        content = torch.softmax(q @ keys.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1)
        return gated_mix(content, kronecker(*self.axis_maps(*x.shape[-2:])).to(content.dtype), self.gate)

    @torch.no_grad()
    def to_conv(self, atol: float = 1e-3) -> nn.Conv2d:
        """Return the convolution that this layer equals: tap h is weight_h W_val.

        Raises: ValueError with the measured deviation (largest |difference| on standard normal input, relative to the
        largest |output|) if it is above `atol`: the layer attends by content, or heads have left their taps.
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
                f"this GPSA2d is no longer a convolution: the relative deviation is {deviation:.2g}, above {atol:g}; "
                "keep it as attention, or call set_gating with a higher gate and locality"
            )
        conv.requires_grad_(self.weight.requires_grad)
        return conv.train(self.training)

    def deviation_from(self, conv: nn.Conv2d) -> float:
        """Return the largest |difference| to `conv`, relative to the largest |output| of `conv`.

        Both run in float64 on standard normal input.
        """
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
