"""Gated attention on feature maps whose content attention reads a window around every query.

The layer computes y = sum_h A_h V weight_h + bias in two sums, position and content, each scaled by its share in the
gate. Heads without query rows (where there are more taps than channels) attend uniformly: they are one head, whose
filter is the sum of theirs.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor

from isomorph.layers.gated.gpsa2d import GPSA2d
from isomorph.layers.gated.positions import compute_dtype
from isomorph.layers.gated.window_tiles import axis_tiles, window_taps
from isomorph.layers.grid import odd_window
from isomorph.layers.shapes import batched, known_true

WINDOW = 7
"""Default height and width of the window."""

MAX_MASKED_PAIRS = 256 * 256
"""Most query-key pairs for which a masked map is faster than windows in tiles (benchmarks/gpsa_stages.py)."""


@register_notrace_module
class WindowGPSA2d(GPSA2d):
    """Gated attention on feature maps whose heads attend by content to a window around the query.

        y = sum_h A_h V weight_h + bias
        A_h = (1 - sigma(gate_h)) softmax_window(q_h k_h^T / sqrt(hd)) + sigma(gate_h) softmax(position_h)

    It is `GPSA2d` with the softmax of content over the keys of a window of `window` positions (height and width, odd)
    around the query. The window is clipped at the border of the zero-padded map; one that covers the map gives GPSA2d.
    On large maps, work and memory are linear in the number of positions, so early stages can be recast too; small maps
    (256 x 256 query-key pairs at most) are formed whole, which is faster. The other arguments are those of `GPSA2d`.

    Shape: x (B, C, H, W) -> (B, C_out, Hq, Wq), sizes as nn.Conv2d
    Source: T-CNN eq. 4-7; differs: the window, besides what differs in GPSA2d
    Raises: ValueError for an even window, or as GPSA2d.

    Example:
        >>> layer = iso.layers.WindowGPSA2d(8, 16, kernel_size=3, padding=1, window=5)
        >>> layer(torch.randn(2, 8, 20, 30)).shape
        torch.Size([2, 16, 20, 30])
        >>> layer.set_gating(locality=30.0, gate=20.0)  # so local that it is a convolution
        >>> layer.to_conv()
        Conv2d(8, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """

    def __init__(self, *args: Any, window: int | tuple[int, int] = WINDOW, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.window = self.content_window = odd_window(window)

    @batched
    def forward(self, x: Tensor) -> Tensor:
        H, W = self.check_map(x)
        if known_true(math.prod(self.query_grid(H, W)) * H * W <= MAX_MASKED_PAIRS):
            return super().forward(x)
        tokens, value = x.flatten(2), self.value
        values = (tokens.to(compute_dtype(x)) if value is None else value.weight @ tokens).unflatten(-1, (H, W))
        position = self.position_taps(values, self.position_share)
        return self.with_bias(position + self.content_taps(x, values, torch.sigmoid(-self.gate)))

    def content_taps(self, x: Tensor, values: Tensor, share: Tensor) -> Tensor:
        """Return the sum over heads of content attention times values times filter, scaled by a share of each head.

        Shape: x, values (B, C, H, W), share (nh,) -> (B, C_out, Hq, Wq)
        """
        (H, W), (ph, pw), nh = x.shape[-2:], self.padding, self.num_heads
        axes = zip(self.query_grid(H, W), (H, W), self.padding, self.stride, self.window, strict=True)
        rows, columns = (
            axis_tiles(n, size + 2 * padding, self.kernel_size // 2, stride, window, x.device)
            for n, size, padding, stride, window in axes
        )
        own = min(self.in_channels, nh - 1)  # the heads after these have no query rows: they are one head
        width, (w_qry, w_key) = self.head_width, self.joint_weight()[:, :, 0][: 2 * nh * self.head_width].chunk(2)
        w_qry, w_key = w_qry[: (own + 1) * width], w_key[: (own + 1) * width]
        filters = self.weight.flatten(2) * share
        if own < nh - 1:
            filters = torch.cat([filters[..., :own], filters[..., own:].sum(-1, keepdim=True)], dim=-1)
        tokens, v = (F.pad(t, (pw, pw, ph, ph)).permute(0, 2, 3, 1).contiguous() for t in (x, values))  # (B, H, W, C)
        q = F.linear(self.query_positions(x).permute(0, 2, 3, 1).contiguous(), w_qry * width**-0.5)
        return window_taps(q, F.linear(tokens, w_key), v, (rows, columns), filters)
