"""Gated attention on feature maps whose heads attend by content to what looks like the position under their tap.

Letters: B batch, C channels, H W key grid, Hq Wq query grid, nh heads (one per tap), Nq queries, K offsets of a window.
"""

import math

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from isomorph.layers.gated_mix import gated_mix
from isomorph.layers.grid import odd_window
from isomorph.layers.moments import disable_autocast
from isomorph.layers.positional_attention import compute_dtype, geometry_dtype, kronecker
from isomorph.layers.similar_mean import similar_mean, similar_weights
from isomorph.layers.tap_heads import PositionHeads

SIMILAR_WINDOW = 3
"""Default height and width of the window."""

SHARPNESS = 10.0
"""Default sharpness, for images normalised to a variance of about 1 in each of three channels."""


@register_notrace_module
class SimilarGPSA2d(PositionHeads):
    """Gated attention on feature maps whose heads attend by content to positions that look like the one at their tap.

        y = sum_h A_h x weight_h + bias
        A_h(p) = (1 - sigma(gate_h)) S(p + tap_h) + sigma(gate_h) softmax(-locality_h |delta - centre_h|^2)
        S(r) = softmax_window(-sharpness |E x(r) - E x(j)|^2 / 2)    for the positions j of the window around r

    A head replaces the position under its tap by the mean of the similar positions around it. The layer therefore
    convolves the map with itself, denoised (S is non-local means): edges stay and noise goes. `GPSA2d` compares a query
    in the middle of all taps with keys by their product instead, and has to give up a tap to attend by content; here an
    opened head keeps what it reads. With closed gates, or a high sharpness, the layer is the convolution.

    All heads share S and the embedding E (`embedding`, C x C, the identity at first), so a map is averaged once, at a
    cost that is linear in its positions. `sharpness` is positive, as exp of `log_sharpness`; it has the unit of one
    over a variance of the input (`iso.fit_sharpness`). The window is clipped at the border of the map. The filters
    contain the values. The other arguments are those of `GPSA2d`.

    Shape: x (B, C, H, W) -> (B, C_out, Hq, Wq), sizes as nn.Conv2d
    Source: T-CNN eq. 4-7; differs: content is asked for at the tap, by distance. Buades et al. 2005 (non-local means)
    Raises: ValueError for an even window, a sharpness that is not above 0 and finite, or as GPSA2d.

    Example:
        >>> layer = iso.layers.SimilarGPSA2d(8, 16, kernel_size=3, padding=1, window=5)
        >>> layer(torch.randn(2, 8, 20, 30)).shape
        torch.Size([2, 16, 20, 30])
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
        groups: int = 1,
        window: int | tuple[int, int] = SIMILAR_WINDOW,
        sharpness: float = SHARPNESS,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias, None, groups)
        self.window = odd_window(window)
        self.gate = nn.Parameter(torch.empty(self.num_heads))
        self.embedding = nn.Linear(in_channels, in_channels, bias=False)
        self.log_sharpness = nn.Parameter(torch.empty(()))
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        nn.init.eye_(self.embedding.weight)
        self.centre_on_taps()
        self.set_gating(locality=1.0, gate=1.0)
        self.set_sharpness(sharpness)

    @torch.no_grad()
    def set_sharpness(self, sharpness: float) -> None:
        """Set how sharply similar positions are told from others.

        Raises: ValueError if it is not above 0 and finite.
        """
        if not 0 < sharpness < math.inf:
            raise ValueError(f"sharpness {sharpness} must be above 0 and finite")
        self.log_sharpness.fill_(math.log(sharpness))

    @property
    def sharpness(self) -> Tensor:
        """Sharpness of the comparison, in units of one over a variance of the input. Shape: -> ()"""
        return self.log_sharpness.to(geometry_dtype(self.log_sharpness)).exp()

    @property
    def position_share(self) -> Tensor:
        """Share of position attention in every head: sigmoid(gate). Shape: -> (nh,)"""
        return torch.sigmoid(self.gate)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that weight decay would pull to 0: gates, sharpness, and those of the positions."""
        return super().no_weight_decay() | {"log_sharpness"}

    def embed(self, x: Tensor) -> Tensor:
        """Return what is compared: half the squared distance of two positions is minus their score.

        Shape: x (B, C, H, W) -> (B, C, H, W), in float32 at least
        """
        with disable_autocast(x.device):
            dtype = geometry_dtype(x)
            weight = self.embedding.weight.to(dtype) * self.sharpness.to(dtype).sqrt()
            return F.conv2d(x.to(dtype), weight[:, :, None, None])

    def forward(self, x: Tensor) -> Tensor:
        values = x.to(compute_dtype(x))
        similar = similar_mean(values, self.embed(x), self.window)
        filters = self.scaled_filters(torch.sigmoid(-self.gate)).view_as(self.weight).to(values.dtype)
        content = F.conv2d(similar, filters, None, self.stride, self.padding, groups=self.groups)
        return self.with_bias(self.position_taps(values, self.position_share) + content)

    def content_attention(self, x: Tensor) -> Tensor:
        """Return the map of content attention over the zero-padded keys, every row of which sums to 1.

        A tap on the padding attends to itself, a zero.

        Shape: x (B, C, H, W) -> (B, nh, Nq, (H + 2 pad) (W + 2 pad))
        """
        every = self.similarity_map(x)
        (Hq, Wq), (sh, sw), Wp = self.query_grid(*x.shape[-2:]), self.stride, x.shape[-1] + 2 * self.padding[1]
        tap = torch.arange(self.kernel_size, device=x.device)
        rows = sh * torch.arange(Hq, device=x.device) + tap[:, None]  # (k, Hq), of the padded map
        columns = sw * torch.arange(Wq, device=x.device) + tap[:, None]
        asked = rows[:, None, :, None] * Wp + columns[None, :, None, :]  # (k, k, Hq, Wq)
        return every[:, asked.flatten(2).flatten(0, 1)]

    def similarity_map(self, x: Tensor) -> Tensor:
        """Return S for every position of the zero-padded map. Shape: x (B, C, H, W) -> (B, keys, keys)"""
        (H, W), (ph, pw), (up, left) = x.shape[-2:], self.padding, (side // 2 for side in self.window)
        Hp, Wp = H + 2 * ph, W + 2 * pw
        weights = similar_weights(self.embed(x), (up, left)).to(x.dtype)  # (B, K, H, W)
        keys = torch.arange(Hp * Wp, device=x.device).view(Hp, Wp)
        inside = keys[ph : ph + H, pw : pw + W]
        every = torch.eye(Hp * Wp, dtype=x.dtype, device=x.device)
        every[inside.flatten(), inside.flatten()] = 0
        every = every.repeat(x.shape[0], 1, 1)
        for at, weight in enumerate(weights.unbind(1)):
            down, right = at // (2 * left + 1) - up, at % (2 * left + 1) - left
            rows, columns = (
                slice(max(0, -step), max(0, size - max(0, step))) for step, size in ((down, H), (right, W))
            )
            own = inside[rows, columns].flatten()
            every[:, own, own + down * Wp + right] = weight[:, rows, columns].flatten(1)
        return every

    def attention(self, x: Tensor) -> Tensor:
        """Return the attention map over the zero-padded keys; it is formed only here, and every row sums to 1.

        Shape: x (B, C, H, W) -> (B, nh, Nq, (H + 2 pad) (W + 2 pad))
        """
        content = self.content_attention(x)
        return gated_mix(content, kronecker(*self.axis_maps(*x.shape[-2:])).to(content.dtype), self.gate)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, window={self.window}"
