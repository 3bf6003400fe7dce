"""Gated positional self-attention on feature maps (T-CNN): a convolution whose taps can move and attend by content.

    A_h = (1 - sigma(gate_h)) softmax(q_h k_h^T / sqrt(hd)) + sigma(gate_h) softmax(-locality_h |delta - centre_h|^2)

The layer is computed as a convolution over soft columns. For each query and tap, im2col gathers the value under the
tap; here A_h V gathers a weighted mean of the values in the same layout, and the same filter is applied to it.

Keys are padded with zeros as the input of a convolution is. All padded keys are equal, so one key stands for them, with
the logarithm of their number as its score.

Letters: B batch, C channels, H W key grid, Hq Wq query grid, nh heads (one per tap), hd head width, Nq queries.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from isomorph.layers.eager import on_cpu
from isomorph.layers.gated.positions import attend_shared_values, compute_dtype, gated_mix, geometry_dtype, kronecker
from isomorph.layers.gated.tap_heads import PositionalConv2d, TapHeads

MAX_DENSE_PAIRS = 512 * 512
"""Most query-key pairs for which the map is formed. Above, and for sizes that an export leaves open, no map is formed
(measured by benchmarks/gpsa.py)."""


def forms_map(queries: int, keys: int) -> bool:
    """True if a map of this many queries and keys is known to be small enough to be formed."""
    return statically_known_true(queries * keys <= MAX_DENSE_PAIRS)


def group_rows_by_head(weight: Tensor, num_heads: int) -> Tensor:
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
class GPSA2d(TapHeads):
    """Self-attention that starts as a given k x k convolution and can learn to attend globally (T-CNN).

    Each of the k*k heads stands for one tap of the convolution and has that tap's filter:

        y = sum_h A_h V weight_h + bias,    V = W_val x

    With closed gates (gate high) and high localities, A_h selects the pixel under tap h, and the layer is the
    convolution. Training can lower the gates and localities, so that heads attend further away and by content. Keys are
    zero-padded as the input of the convolution is: padding receives attention and contributes zeros.

    With `groups`, the filters are those of a grouped or depthwise convolution. All groups share the heads' attention,
    and the filters contain the values.

    Gating parameters, per head: `gate` (sigmoid: the share of position attention), `locality` (its sharpness, positive
    through softplus of `raw_locality`), `centre` (row, column). W_qry, W_key and W_val are C x C; the rows of the first
    two are assigned to heads in turn, as k*k rarely divides C.

    Shape: x (B, C, H, W) -> (B, C_out, Hq, Wq), sizes as nn.Conv2d
    Source: T-CNN eq. 4-7; differs: 1/sqrt(hd) on the content scores, and the sign of the footnote's softplus corrected
    Raises: ValueError for an even or non-positive kernel size, groups that do not divide the channels, or a feature map
        smaller than the window.

    Example:
        >>> layer = iso.layers.GPSA2d(8, 16, kernel_size=3, padding=1)
        >>> layer(torch.randn(2, 8, 6, 6)).shape
        torch.Size([2, 16, 6, 6])
        >>> layer.set_gating(locality=30.0, gate=20.0)  # so local that it is a convolution
        >>> layer.to_conv()
        Conv2d(8, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """

    def _add_content(self) -> None:
        C = self.in_channels
        self.query = nn.Linear(C, C, bias=False)
        self.key = nn.Linear(C, C, bias=False)
        self.value = nn.Linear(C, C, bias=False) if self.groups == 1 else None
        self.gate = nn.Parameter(torch.empty(self.num_heads))

    @torch.no_grad()
    def reset_attention(self, locality: float = 1.0, gate: float = 1.0) -> None:
        """Centre every head on its tap, set the values to the identity (T-CNN eq. 4, 6), and set locality and gate.

        The defaults are the paper's, 1 and 1.
        """
        super().reset_attention(locality, gate)
        if self.value is not None:
            nn.init.eye_(self.value.weight)

    @property
    def position_share(self) -> Tensor:
        """Share of position attention in every head: sigmoid(gate). Shape: -> (nh,)"""
        return torch.sigmoid(self.gate)

    def forward(self, x: Tensor) -> Tensor:
        H, W = self.check_map(x)
        Hq, Wq = self.query_grid(H, W)
        gather_columns = self.soft_columns_dense if forms_map(Hq * Wq, H * W) else self.soft_columns_by_axis
        return self.apply_filters(gather_columns(x), H, W)

    def queries_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return a query per window and a key per position of x, followed by one zero key for all of the padding.

        Shape: x (B, C, H, W) -> (B, nh, Nq, hd), (B, nh, H W + 1, hd)
        """
        tokens = x.flatten(2).transpose(1, 2)  # (B, H W, C)
        centres = self.query_positions(x).flatten(2).transpose(1, 2)  # (B, Nq, C)
        q = F.linear(centres, group_rows_by_head(self.query.weight, self.num_heads))
        k = F.linear(tokens, group_rows_by_head(self.key.weight, self.num_heads))
        q, k = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k))
        return q, F.pad(k, (0, 0, 0, 1))

    def padding_score(self, like: Tensor, H: int, W: int) -> Tensor:
        """Return the score added to each key: 0, and log(number of padded keys) for the one key that represents them.

        Shape: -> (H W + 1,)
        """
        padded = (H + 2 * self.padding[0]) * (W + 2 * self.padding[1]) - H * W
        last = torch.full((1,), padded, dtype=geometry_dtype(like), device=like.device).log()  # log 0 is -inf
        return F.pad(last.to(like.dtype), (H * W, 0))

    def map_values(self, x: Tensor) -> Tensor:
        """Return the values of every position, W_val x. Shape: x (B, C, H, W) -> (B, C, H W)"""
        return x.flatten(2).to(compute_dtype(x)) if self.value is None else self.value.weight @ x.flatten(2)

    def soft_columns_dense(self, x: Tensor) -> Tensor:
        """Return the soft columns as one product of the mixed map of all heads with the values that they share.

        Shape: x (B, C, H, W) -> (B, C nh, Nq)
        """
        q, k = self.queries_keys(x)
        scores = (q * q.shape[-1] ** -0.5) @ k.mT  # (B, nh, Nq, H W + 1)
        content = torch.softmax(scores.add_(self.padding_score(scores, *x.shape[-2:])), dim=-1)[..., :-1]
        mixed = gated_mix(content, kronecker(*self.unpadded_axis_maps(x, content.dtype)), self.gate)
        values = self.map_values(x)  # (B, C, H W)
        columns = _SoftColumns.apply(values, mixed.flatten(1, 2).to(values.dtype))  # (B, C, nh Nq)
        return columns.view(x.shape[0], self.in_channels * self.num_heads, mixed.shape[2])

    def soft_columns_by_axis(self, x: Tensor) -> Tensor:
        """Return the soft columns without forming a map: fused content attention, and position attention axis by axis.

        Shape: x (B, C, H, W) -> (B, C nh, Nq)
        """
        values = self.map_values(x).transpose(1, 2)  # (B, H W, C)
        q, k = self.queries_keys(x)
        B, nh, Nq, hd = q.shape
        shared = F.pad(values, (0, 0, 0, 1))[:, None].expand(B, nh, -1, -1)  # (B, nh, H W + 1, C)
        if on_cpu(x) and hd < self.in_channels:  # its fused kernel needs q, k and v of one width
            q, k = (F.pad(t, (0, self.in_channels - hd)) for t in (q, k))
        bias = self.padding_score(q, *x.shape[-2:]).expand(1, 1, Nq, -1)
        content = F.scaled_dot_product_attention(q, k, shared, attn_mask=bias, scale=hd**-0.5)  # (B, nh, Nq, C)
        position = attend_shared_values(*self.unpadded_axis_maps(x, values.dtype), values)  # (B, nh, Nq, C)
        mixed = gated_mix(content, position, self.gate)
        return mixed.permute(0, 3, 1, 2).flatten(1, 2)  # (B, C nh, Nq)

    def folded_filters(self) -> Tensor:
        """Return the filter of every head times the values, weight_h W_val, in float64.

        Shape: -> (C_out, C / groups, nh)
        """
        filters = super().folded_filters()
        return filters if self.value is None else torch.einsum("och,cd->odh", filters, self.value.weight.double())

    def content_scores(self, x: Tensor, query: int | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the queries, divided by sqrt(hd), the keys of the padded grid, and a score added to each key, or None.

        With `query`, an index among the Nq queries, only this one.

        Shape: x (B, C, H, W) -> (B, nh, Nq, hd), (B, nh, (H + 2 pad) (W + 2 pad), hd), (Nq, keys)
        """
        ph, pw = self.padding
        q, k = self.queries_keys(x)
        q = q if query is None else q[:, :, query : query + 1]
        keys = k[:, :, :-1].unflatten(2, x.shape[-2:])  # (B, nh, H, W, hd)
        return q * q.shape[-1] ** -0.5, F.pad(keys, (0, 0, pw, pw, ph, ph)).flatten(2, 3), None

    def content_attention(self, x: Tensor, query: int | None = None) -> Tensor:
        """Return the map of content attention over the zero-padded keys, or the row of one query. Rows sum to 1.

        Shape: x (B, C, H, W) -> (B, nh, Nq, (H + 2 pad) (W + 2 pad))
        """
        self.check_map(x, query)
        q, keys, bias = self.content_scores(x, query)
        return torch.softmax(q @ keys.mT if bias is None else q @ keys.mT + bias, dim=-1)

    def attention(self, x: Tensor, query: int | None = None) -> Tensor:
        """Return the attention map over the zero-padded keys; it is formed only here, and every row sums to 1.

        With `query`, an index among the Nq queries, the row of this query alone.

        Shape: x (B, C, H, W) -> (B, nh, Nq, (H + 2 pad) (W + 2 pad))
        """
        content = self.content_attention(x, query)
        return gated_mix(content, self.position_attention(x, query).to(content.dtype), self.gate)

    @torch.no_grad()
    def to_positional(self) -> PositionalConv2d:
        """Return the layer with all gates at 1: without queries and keys, and with the values in the filters."""
        size = (self.in_channels, self.out_channels, self.kernel_size, self.stride, self.padding)
        layer = PositionalConv2d(*size, self.bias is not None, self.groups).to(self.weight)
        layer.weight.copy_(self.folded_filters().view_as(layer.weight))
        for name in ("bias", "centre", "raw_locality"):
            if (own := getattr(self, name)) is not None:
                getattr(layer, name).copy_(own)
        return layer.train(self.training)
