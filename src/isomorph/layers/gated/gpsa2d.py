"""Gated positional self-attention on feature maps (T-CNN): a convolution whose taps can move and attend by content.

    A_h = (1 - sigma(gate_h)) softmax(q_h k_h^T / sqrt(hd)) + sigma(gate_h) softmax(-locality_h |delta - centre_h|^2)

The layer is computed as a convolution over soft patches. For each query and tap, im2col gathers the value under the
tap; here A_h V gathers a weighted mean of the values in the same layout, and the same filter is applied to it.

Keys are padded with zeros as the input of a convolution is. All padded keys are equal, so one key stands for them, with
the logarithm of their number as its score.

Letters: B batch, C channels, H W key grid, Hq Wq query grid, nh heads (one per tap), hd head width, Nq queries.
"""

import math
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from isomorph.layers.attention_base import scaled, softmax_map
from isomorph.layers.gated.positions import (
    Axis,
    compute_dtype,
    gate_gradient,
    gated_mix,
    kronecker,
    mix_weights,
)
from isomorph.layers.gated.tap_heads import PositionalConv2d, TapHeads
from isomorph.layers.grid import GridSize, axis_offsets, batched, known_true
from isomorph.layers.modes import Gradients, SavesInputs, constant, on_cpu


def _grouped_rows(channels: int, num_heads: int, values: int, device: torch.device) -> Tensor:
    """Return the rows of W_qry, W_key, W_val and one of zeros, stacked, such that those of a head are neighbours.

    Row r goes to head r mod nh; shorter heads get the row of zeros. Shape: -> (2 nh ceil(C / nh) + values,)
    """
    width = -(-channels // num_heads)
    rows = (
        torch.arange(width * num_heads, device=device).view(width, num_heads).t().flatten()
    )  # (nh hd,)
    zero = 2 * channels + values
    q = torch.where(rows < channels, rows, zero)
    k = torch.where(rows < channels, rows + channels, zero)
    return torch.cat([q, k, torch.arange(2 * channels, zero, device=device)])


class KeyWindows(NamedTuple):
    """The keys of a padded map, and the window of them around every query, or None for the whole map."""

    rows: Axis
    columns: Axis
    size: GridSize | None

    @property
    def keys(self) -> GridSize:
        """Height and width of the padded map."""
        return self.rows.keys, self.columns.keys

    def mask(self, device: torch.device, query: int | None = None) -> Tensor:
        """Return True for keys in the window of every query, or of one. Shape: -> (Hq, Wq, H, W) or (1, 1, H, W)"""
        if self.size is None:
            return torch.ones(1, 1, *self.keys, dtype=torch.bool, device=device)
        height, width = self.size
        rows = axis_offsets(*self.rows, device).abs() <= height // 2
        columns = axis_offsets(*self.columns, device).abs() <= width // 2
        if query is not None:
            row, column = divmod(query, self.columns.queries)
            rows = rows[row, None]
            columns = columns[column, None]
        return rows[:, None, :, None] & columns[None, :, None, :]


def _key_scores(
    windows: KeyWindows,
    padding: GridSize,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return 0 for keys in the window of a query and -inf for others.

    The last column stands for all keys in the window that are padding: the log of their number.

    Shape: -> (Nq, H W + 1), or (1, H W + 1) without a window
    """
    height, width = windows.keys
    ph, pw = padding
    mask = windows.mask(device)
    unpadded = mask[:, :, ph : height - ph, pw : width - pw]
    real_keys = unpadded.flatten(2).flatten(0, 1)  # (Nq, H W)
    all_keys = mask.sum((2, 3)).flatten()  # (Nq,)
    padded_keys = all_keys[:, None] - real_keys.sum(1, keepdim=True)  # (Nq, 1)
    counts = torch.cat([real_keys, padded_keys], 1).to(torch.promote_types(dtype, torch.float32))
    return counts.log().to(dtype)  # of a real key log 1 = 0 in the window, log 0 = -inf elsewhere


class _SoftPatches(SavesInputs):
    """Compute values @ maps^T, maps = (1 - s) content + s (rows (x) columns), and form the maps again to go back.

    The derivative by the gate is returned as a whole: `weights`, from which it is computed, get none of their own, but
    second derivatives pass through them.

    Shape: values (B, C, N), content (B, nh, Nq, N), rows (nh, Hq, H), columns (nh, Wq, W), gate (nh,), weights (2, nh)
        -> (B, C, nh Nq)
    """

    @staticmethod
    def forward(
        values: Tensor,
        content: Tensor,
        rows: Tensor,
        columns: Tensor,
        gate: Tensor,
        weights: Tensor,
    ) -> Tensor:
        share, content_share = weights[:, :, None, None]
        maps = torch.addcmul(kronecker(rows * share, columns), content, content_share)
        return torch.bmm(values, maps.flatten(1, 2).mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        values, content, rows, columns, _, weights = ctx.saved_tensors
        share, content_share = weights[:, :, None, None]
        scaled = rows * share
        maps = torch.addcmul(kronecker(scaled, columns), content, content_share)
        d_values = torch.bmm(grad, maps.flatten(1, 2))
        d_maps = torch.bmm(grad.mT, values).view_as(content)
        d_content = d_maps * content_share
        trained = ctx.needs_input_grad[2:5]
        if not any(trained):  # position parameters and gates are frozen
            return d_values, d_content, None, None, None, None

        d_grid = d_maps.sum(0).unflatten(2, (rows.shape[2], -1))
        d_grid = d_grid.unflatten(1, (rows.shape[1], -1))  # (nh, Hq, Wq, H, W)
        d_scaled = (d_grid * columns[:, None, :, None]).sum((2, 4))
        d_rows = d_scaled * share
        d_columns = (d_grid * scaled[:, :, None, :, None]).sum((1, 3))
        by_content = (d_maps * content).sum((0, 2, 3))
        d_gate = gate_gradient(rows, d_rows, by_content, weights)
        return d_values, d_content, d_rows, d_columns, d_gate, None


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

    # Height and width of the window of keys around a query that content attention reads; None reads
    # the whole map.
    content_window: GridSize | None = None

    # Most query-key pairs for which the map is formed (measured by benchmarks/gpsa.py). Above, and
    # for sizes that an export leaves open, no map is formed.
    max_dense_pairs: ClassVar[int] = 512 * 512

    def _add_content(self) -> None:
        C = self.in_channels
        self.query = nn.Linear(C, C, bias=False)
        self.key = nn.Linear(C, C, bias=False)
        self.value = nn.Linear(C, C, bias=False) if self.groups == 1 else None
        self.gate = nn.Parameter(torch.empty(self.num_heads))

    @torch.no_grad()
    def reset_attention(self, locality: float = 1.0, gate: float = 1.0) -> None:
        """Centre every head on its tap, set the values to the identity (T-CNN eq. 4, 6), locality and gate."""
        super().reset_attention(locality, gate)
        if self.value is not None:
            nn.init.eye_(self.value.weight)

    @batched
    def forward(self, x: Tensor) -> Tensor:
        H, W = self.check_map(x)
        queries = math.prod(self.query_grid(H, W))
        pairs = queries * H * W
        if known_true(pairs <= self.max_dense_pairs):
            q, k, v = self.queries_keys_values(x)
            return self.apply_filters(self.soft_patches(q, k, v, H, W), H, W)
        return self.without_maps(x, H, W)

    def without_maps(self, x: Tensor, H: int, W: int) -> Tensor:
        """Return the layer's output without forming maps: a sum of position and one of content."""
        q, k, v = self.queries_keys_values(x)
        position = self.position_taps(v.unflatten(2, (H, W)), self.position_share)
        content = self.content_taps(q, k, v, H, W)
        return position + content

    def apply_filters(self, patches: Tensor, H: int, W: int, share: Tensor | None = None) -> Tensor:
        """Apply each head's filter, and the bias. Shape: patches (B, C nh, Nq), share (nh,) -> (B, C_out, Hq, Wq)"""
        filters = self.filters(share).flatten(1)[:, :, None]  # (C_out, C nh / groups, 1)
        y = F.conv1d(patches, filters, self.bias, groups=self.groups)
        return y.unflatten(-1, self.query_grid(H, W))

    def joint_weight(self) -> Tensor:
        """Return W_qry and W_key with rows by head, and W_val, as one convolution. Shape: -> (rows, C, 1)"""
        weights = self.projections()
        values = 0 if self.value is None else self.in_channels
        rows = constant(_grouped_rows, weights[0], self.in_channels, self.num_heads, values)
        stacked = F.pad(torch.cat(weights), (0, 0, 0, 1))  # with a row of zeros
        return stacked.index_select(0, rows)[:, :, None]

    def projections(self) -> tuple[Tensor, ...]:
        """Return W_qry, W_key, and W_val if there is one."""
        if self.value is None:
            return self.query.weight, self.key.weight
        return self.query.weight, self.key.weight, self.value.weight

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Shape: x (B, C, H, W) -> q (B, nh, hd, Nq), k (B, nh, hd, H W), v (B, C, H W)"""
        weight = self.cached(self.projections(), self.joint_weight)
        tokens = x.flatten(2)
        heads = (self.num_heads, self.head_width)
        width = self.num_heads * self.head_width
        values = len(weight) - 2 * width
        if self.queries_every_position:
            q, k, v = F.conv1d(tokens, weight).split([width, width, values], dim=1)
        else:
            q = F.conv1d(self.query_positions(x).flatten(2), weight[:width])
            k, v = F.conv1d(tokens, weight[width:]).split([width, values], dim=1)
        if self.value is None:
            v = tokens.to(compute_dtype(x))
        return q.unflatten(1, heads), k.unflatten(1, heads), v

    def positions(self, H: int, W: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the axis maps of an H x W map without padded keys, and the weights of the mix."""
        return *self.axis_positions(H, W, dtype), mix_weights(self.gate).to(dtype)

    def key_scores(self, H: int, W: int, like: Tensor) -> Tensor:
        """Return `_key_scores` of an H x W map. Shape: -> (Nq, H W + 1), or (1, H W + 1) without a window"""
        return constant(_key_scores, like, self.windows(H, W), self.padding, like.dtype)

    def windows(self, H: int, W: int) -> KeyWindows:
        """Return the windows of all queries of an H x W map."""
        return KeyWindows(*self.axes(H, W), self.content_window)

    def soft_patches(self, q: Tensor, k: Tensor, values: Tensor, H: int, W: int) -> Tensor:
        """Shape: q (B, nh, hd, Nq), k (B, nh, hd, H W), values (B, C, H W) -> mixed map times values (B, C nh, Nq)"""
        B, nh, hd, Nq = q.shape
        q = (q * hd**-0.5).flatten(0, 1)  # (B nh, hd, Nq)
        k = F.pad(k, (0, 1)).flatten(0, 1)  # (B nh, hd, H W + 1), with one key for all padded ones
        scores = torch.baddbmm(self.key_scores(H, W, q), q.mT, k)
        content = scores.softmax(-1).unflatten(0, (B, nh))[..., :-1]  # (B, nh, Nq, H W)
        parameters = (self.centre, self.raw_locality, self.gate)
        rows, columns, weights = self.cached(parameters, self.positions, H, W, values.dtype)
        patches = _SoftPatches.apply(
            values, content.to(values.dtype), rows, columns, self.gate, weights
        )
        return patches.view(B, self.in_channels * nh, Nq)

    def content_taps(self, q: Tensor, k: Tensor, values: Tensor, H: int, W: int) -> Tensor:
        """Return the sum over heads of content attention times values times filter, without forming maps.

        Shape: q (B, nh, hd, Nq), k (B, nh, hd, H W), values (B, C, H W) -> (B, C_out, Hq, Wq)
        """
        B, nh, hd, Nq = q.shape
        shared = F.pad(values.mT, (0, 0, 0, 1))  # (B, H W + 1, C), 0 for padded keys
        shared = shared[:, None].expand(B, nh, -1, -1)
        # the fused kernel of a CPU needs q, k and v of one width
        width = max(self.in_channels - hd, 0) if on_cpu(q) else 0
        bias = self.key_scores(H, W, q).expand(1, 1, Nq, -1)
        q = F.pad(q.mT, (0, width)).contiguous()
        k = F.pad(k.mT, (0, width, 0, 1))
        content = F.scaled_dot_product_attention(
            q, k, shared, attn_mask=bias, scale=hd**-0.5
        )  # (B, nh, Nq, C)
        patches = content.permute(0, 3, 1, 2).flatten(1, 2)  # (B, C nh, Nq)
        return self.apply_filters(patches, H, W, torch.sigmoid(-self.gate))

    def folded_filters(self) -> Tensor:
        """Return weight_h W_val of every head, in float64. Shape: -> (C_out, C / groups, nh)"""
        filters = super().folded_filters()
        if self.value is None:
            return filters
        return torch.einsum("och,cd->odh", filters, self.value.weight.double())

    def content_scores(
        self,
        x: Tensor,
        query: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the queries, or one, divided by sqrt(hd), the keys of the padded grid, and their scores, or None.

        Shape: x (B, C, H, W) -> (B, nh, Nq, hd), (B, nh, (H + 2 pad) (W + 2 pad), hd), (Nq, keys)
        """
        H, W = x.shape[-2:]
        ph, pw = self.padding
        q, k, _ = self.queries_keys_values(x)
        q = q.mT  # (B, nh, Nq, hd)
        if query is not None:
            q = q[:, :, query : query + 1]
        q = scaled(q)
        keys = F.pad(k.unflatten(3, (H, W)), (pw, pw, ph, ph))  # (B, nh, hd, H + 2 pad, W + 2 pad)
        bias = None
        if self.content_window is not None:
            mask = self.windows(H, W).mask(x.device, query)
            mask = mask.flatten(2).flatten(0, 1)  # (Nq, keys)
            bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(
                ~mask, -torch.inf
            )
        return q, keys.flatten(3).mT, bias

    def attention(self, x: Tensor, query: int | None = None) -> Tensor:
        """Return the attention map over the zero-padded keys, whose rows sum to 1, or the row of one query.

        Shape: x (B, C, H, W) -> (B, nh, Nq, (H + 2 pad) (W + 2 pad))
        """
        self.check_map(x, query)
        content = softmax_map(*self.content_scores(x, query))
        position = self.position_attention(x, query).to(content.dtype)
        return gated_mix(content, position, self.gate)

    @torch.no_grad()
    def to_positional(self) -> PositionalConv2d:
        """Return the layer with sigma(gate) = 1: without queries and keys, and with the values in the filters."""
        layer = PositionalConv2d(
            self.in_channels,
            self.out_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            self.bias is not None,
            self.groups,
        )
        layer = layer.to(self.weight)
        layer.weight.copy_(self.folded_filters().view_as(layer.weight))
        layer.centre.copy_(self.centre)
        layer.raw_locality.copy_(self.raw_locality)
        if layer.bias is not None and self.bias is not None:
            layer.bias.copy_(self.bias)
        return layer.train(self.training)
