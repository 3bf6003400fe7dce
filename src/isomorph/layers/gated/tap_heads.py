"""Heads of attention on feature maps, one for each tap of a convolution: geometry, filters and positions.

`PositionalConv2d`, and the base that it shares with `GPSA2d`. Each head h forms a map of attention A_h over the
zero-padded keys and applies the filter of its tap to what it gathers: y = sum_h A_h x weight_h + bias.

Letters: B batch, C channels, H W key grid, Hq Wq query grid, nh heads (one per tap), hd head width, Nq queries.
"""

import math

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module, to_2tuple
from torch import Tensor, nn

from isomorph.layers.gated.positions import (
    Axis,
    PositionHeads,
    axis_attention,
    compute_dtype,
    is_autocast_on,
    kronecker,
    window_centres,
    without_subnormals,
)
from isomorph.layers.gated.taps import TapAxis, folded_taps, soft_taps
from isomorph.layers.grid import GridSize, Sides, batched, conv_output_size
from isomorph.layers.modes import can_keep, match_requires_grad, on_cpu, require_same, upcast

# Sharpness of the softplus that keeps localities positive (T-CNN, footnote 1, where its sign is a
# misprint).
SOFTPLUS_BETA = 5.0


# Offset from the nearest position up to which the attention of a head on a line is summed.
FAR = 64


def nearest_taps(centre: Tensor, kernel_size: int) -> Tensor:
    """Return the row and column of the tap of a window nearest to each centre. Shape: (nh, 2) -> (nh, 2)"""
    middle = kernel_size // 2
    return (centre.round() + middle).clamp(0, 2 * middle).long()


class TapHeads(PositionHeads):
    """Base of layers that replace a convolution by attention heads, one for each tap of the filter.

    Gating parameters, per head: `locality` (positive through softplus of `raw_locality`) and `centre` (row, column).

    Raises: ValueError for an even or non-positive kernel size, or groups that do not divide the channels.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: Sides = 1,
        padding: Sides = 0,
        bias: bool = True,
        groups: int = 1,
    ) -> None:
        super().__init__()
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"groups {groups} do not divide {in_channels} input and {out_channels} output channels",
            )
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size {kernel_size} has no centre; use an odd number above 0")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        self.stride: GridSize = to_2tuple(stride)
        self.padding: GridSize = to_2tuple(padding)
        self.groups = groups
        self.num_heads = kernel_size**2
        filters = torch.empty(out_channels, in_channels // groups, kernel_size, kernel_size)
        self.weight = nn.Parameter(filters)
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        self.centre = nn.Parameter(torch.empty(self.num_heads, 2))
        self.raw_locality = nn.Parameter(torch.empty(self.num_heads))
        self._add_content()
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        self.reset_attention()

    def _add_content(self) -> None:
        """Create the parameters of content attention, if the layer has any."""

    @torch.no_grad()
    def reset_attention(self, locality: float = 1.0, gate: float = 1.0) -> None:
        """Centre every head on its tap, and set locality and gate (T-CNN eq. 4)."""
        self.centre.copy_(window_centres((self.kernel_size, self.kernel_size)))
        self.set_gating(locality, gate)

    @property
    def head_width(self) -> int:
        """Rows of W_qry and W_key of each head, the last ones filled up with zeros."""
        return -(-self.in_channels // self.num_heads)

    def check_map(self, x: Tensor, query: int | None = None) -> GridSize:
        """Return the height and width of a feature map.

        Raises: ValueError if its channels or its dtype are not the layer's, or for a `query` that is no index of one.
        """
        name = type(self).__name__
        autocast = is_autocast_on(x) and x.is_floating_point() and x.itemsize <= 4
        if x.ndim != 4:
            raise ValueError(
                f"{name} reads feature maps (B, C, H, W); this input has shape {tuple(x.shape)}",
            )
        if x.shape[1] != self.in_channels:
            raise ValueError(
                f"{name} reads feature maps of {self.in_channels} channels, not {x.shape[1]}",
            )
        if x.dtype != self.weight.dtype and not autocast:
            raise ValueError(
                f"{name} has weights in {self.weight.dtype}, its input is {x.dtype}; convert one of them",
            )
        H, W = x.shape[2:]
        if query is not None:
            queries = math.prod(self.query_grid(H, W))
            if not 0 <= query < queries:
                raise ValueError(f"query {query} must be from 0 to {queries - 1}")
        return H, W

    def query_grid(self, H: int, W: int) -> GridSize:
        """Return the size of the output. Raises: ValueError for a feature map smaller than the window."""
        Hq = conv_output_size(H, self.kernel_size, self.stride[0], self.padding[0])
        Wq = conv_output_size(W, self.kernel_size, self.stride[1], self.padding[1])
        return Hq, Wq

    def key_grid(self, H: int, W: int) -> GridSize:
        """Return the size of the zero-padded map, whose positions are the keys."""
        ph, pw = self.padding
        return H + 2 * ph, W + 2 * pw

    def axes(self, H: int, W: int) -> tuple[Axis, Axis]:
        """Return the queries and the padded keys along the rows and the columns of an H x W map."""
        middle = self.kernel_size // 2
        sizes = zip(self.query_grid(H, W), self.key_grid(H, W), self.stride, strict=True)
        rows, columns = [Axis(queries, keys, middle, stride) for queries, keys, stride in sizes]
        return rows, columns

    @property
    def queries_every_position(self) -> bool:
        """True if every position of the map is a query."""
        middle = self.kernel_size // 2
        return self.stride == (1, 1) and self.padding == (middle, middle)

    def query_positions(self, x: Tensor) -> Tensor:
        """Return the features of x at the middle of every window. Shape: x (B, C, H, W) -> (B, C, Hq, Wq)"""
        sh, sw = self.stride
        ph = self.padding[0] - self.kernel_size // 2
        pw = self.padding[1] - self.kernel_size // 2
        if ph or pw:  # negative padding crops
            x = F.pad(x, (pw, pw, ph, ph))
        return x[:, :, ::sh, ::sw].contiguous()

    def with_bias(self, y: Tensor) -> Tensor:
        """Add the bias to every position. Shape: (B, C_out, Hq, Wq) -> the same"""
        if self.bias is None:
            return y
        return y + self.bias.view(-1, 1, 1).to(y.dtype)

    def extra_repr(self) -> str:
        shown = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        shown += f", padding={self.padding}, bias={self.bias is not None}"
        if self.groups != 1:
            shown += f", groups={self.groups}"
        return shown

    def _set_locality(self, locality: float) -> None:
        log = math.log(-math.expm1(-SOFTPLUS_BETA * locality))
        self.raw_locality.fill_(locality + log / SOFTPLUS_BETA)  # whose softplus is the locality

    @property
    def locality(self) -> Tensor:
        """Sharpness of each head's position attention; 1 / locality is its span. Shape: -> (nh,)"""
        return F.softplus(upcast(self.raw_locality), beta=SOFTPLUS_BETA)

    def axis_maps(self, H: int, W: int) -> tuple[Tensor, Tensor]:
        """Return position attention to the padded keys. Shape: -> (nh, Hq, H + 2 pad), (nh, Wq, W + 2 pad)"""
        locality = self.locality[:, None]
        position = torch.cat([locality * self.centre, locality], 1)
        return axis_attention(position, self.axes(H, W), of_taps=True)

    def axis_positions(self, H: int, W: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the axis maps without padded keys, whose values are 0. Shape: -> (nh, Hq, H), (nh, Wq, W)"""
        rows, columns = self.axis_maps(H, W)
        ph, pw = self.padding
        rows = without_subnormals(rows)[..., ph : ph + H]
        columns = without_subnormals(columns)[..., pw : pw + W]
        return rows.to(dtype), columns.to(dtype)

    def position_attention(self, x: Tensor, query: int | None = None) -> Tensor:
        """Return the map, or one row. Shape: x (B, C, H, W) -> (nh, Nq, (H + 2 pad) (W + 2 pad))"""
        rows, columns = self.axis_maps(*self.check_map(x, query))
        if query is not None:
            row, column = divmod(query, columns.shape[1])
            rows = rows[:, row : row + 1]
            columns = columns[:, column : column + 1]
        return kronecker(rows, columns)

    def filters(self, share: Tensor | None = None) -> Tensor:
        """Return the filter of every head, scaled by its share. Shape: share (nh,) -> (C_out, C / groups, nh)"""
        filters = self.weight.flatten(2)
        return filters if share is None else filters * share

    def position_taps(self, values: Tensor, share: Tensor | None = None) -> Tensor:
        """Return the sum over heads of position attention times values times filter, scaled by a share of each head.

        Shape: values (B, C, H, W), share (nh,) -> (B, C_out, Hq, Wq)
        """
        filters = self.filters(share).to(values.dtype)
        H, W = values.shape[2:]
        heads = (self.centre, self.raw_locality)

        def axis_maps() -> tuple[Tensor, ...]:
            return self.cached(heads, self.axis_positions, H, W, values.dtype)

        if on_cpu(values) and can_keep(*heads):
            y = folded_taps(values, self.tap_axes(H, W), filters, axis_maps)
            if y is not None:
                return y
        rows, columns = axis_maps()
        return soft_taps(values, rows, columns, filters)

    def tap_axes(self, H: int, W: int) -> list[TapAxis]:
        """Return the heads along the rows and the columns of an H x W map."""
        queries = self.query_grid(H, W)
        centre = upcast(self.centre)
        locality = self.locality
        axes = []
        for axis, keys in enumerate((H, W)):
            taps = TapAxis(
                kernel_size=self.kernel_size,
                stride=self.stride[axis],
                padding=self.padding[axis],
                queries=queries[axis],
                keys=keys,
                centre=centre[:, axis],
                locality=locality,
            )
            axes.append(taps)
        return axes

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that weight decay would pull to 0: centres to the middle tap, gates to one half."""
        return {"centre", "raw_locality", "gate"} & set(self._parameters)

    @torch.no_grad()
    def folded_filters(self) -> Tensor:
        """Return the filter of every head on the input itself, in float64. Shape: -> (C_out, C / groups, nh)"""
        return self.weight.flatten(2).double()

    @torch.no_grad()
    def to_conv(self, atol: float = 1e-3) -> nn.Conv2d:
        """Return the convolution that this layer equals, with each head's filter at the tap nearest to its centre.

        Raises: ValueError as `require_same`: the layer attends by content, or heads have left their taps.
        """
        conv = self.tap_convolution()
        shape = (1, self.in_channels, 4 * self.kernel_size + 3, 4 * self.kernel_size + 5)
        require_same(
            self,
            conv,
            shape,
            atol,
            "keep it as attention, or give a larger atol, which changes the outputs",
        )
        return conv

    @torch.no_grad()
    def off_tap_share(self) -> Tensor:
        """Return the share of position attention off the tap nearest to each centre, 1 off the window. Shape: (nh,)"""
        centre = self.centre.double()
        locality = self.locality.double()[:, None, None]
        tap = nearest_taps(centre, self.kernel_size) - self.kernel_size // 2  # (nh, 2)
        neighbours = torch.arange(-FAR, FAR + 1, dtype=torch.float64, device=centre.device)
        distance = tap[..., None] + neighbours - centre[..., None]  # (nh, 2, neighbours)
        attention = torch.softmax(-locality * distance.square(), dim=-1)
        on_tap = attention[..., FAR].prod(1)  # (nh,)
        inside = (tap == centre.round()).all(1)
        return torch.where(inside, 1 - on_tap, 1.0)

    @torch.no_grad()
    def tap_convolution(self) -> nn.Conv2d:
        """Return `to_conv` without its check."""
        conv = nn.Conv2d(
            self.in_channels,
            self.out_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            groups=self.groups,
            bias=self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        rows, columns = nearest_taps(self.centre, self.kernel_size).unbind(1)
        filters = self.folded_filters()
        taps = filters.new_zeros(*filters.shape[:2], self.kernel_size**2)
        # heads on the same tap add up
        taps = taps.index_add(2, rows * self.kernel_size + columns, filters)
        conv.weight.copy_(taps.view_as(conv.weight))
        if self.bias is not None and conv.bias is not None:
            conv.bias.copy_(self.bias)
        match_requires_grad(conv, self)
        return conv.train(self.training)


@register_notrace_module
class PositionalConv2d(TapHeads):
    """A convolution whose taps can move and widen: self-attention by position alone, with a filter for each head.

        y = sum_h P_h x weight_h + bias,    P_h = softmax(-locality_h |delta - centre_h|^2)

    It is `GPSA2d` with sigma(gate) = 1 and without its values, which the filters contain. P_h is separable in rows and
    columns, and the same for every image: no map is formed, and cost is linear in the number of positions. With high
    localities it is a convolution, at the cost of one. Arguments as in `GPSA2d`; with `groups` equal to the number of
    channels, it is a depthwise convolution with soft taps.

    Shape: x (B, C, H, W) -> (B, C_out, Hq, Wq), sizes as nn.Conv2d
    Source: T-CNN eq. 4 without its content attention
    Raises: ValueError for an even or non-positive kernel size, groups that do not divide the channels, or a feature map
        smaller than the window.

    Example:
        >>> layer = iso.layers.PositionalConv2d(8, 16, kernel_size=3, padding=1)
        >>> layer(torch.randn(2, 8, 6, 6)).shape
        torch.Size([2, 16, 6, 6])
        >>> layer.set_gating(locality=30.0)  # so local that it is a convolution
        >>> layer.to_conv()
        Conv2d(8, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """

    @batched
    def forward(self, x: Tensor) -> Tensor:
        self.check_map(x)
        return self.with_bias(self.position_taps(x.to(compute_dtype(x))))

    def attention(self, x: Tensor, query: int | None = None) -> Tensor:
        """Return the map, the same for every image. Shape: x (B, C, H, W) -> (B, nh, Nq, (H + 2 pad) (W + 2 pad))"""
        position = self.position_attention(x, query).to(x.dtype)
        return position.expand(x.shape[0], -1, -1, -1)
