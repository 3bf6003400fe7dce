"""Distributed local attention (Refiner section 3.3) without a map: a convolution of the map is two of tokens.

    y_h = (D_h * A_h) v_h = sum_a shift_a(A_h sum_b D_h[a, b] shift_-b(v_h))

The columns of a kernel move to the values, its rows to the output; between them stands plain attention with values k
times as wide, through `scaled_dot_product_attention`. Memory is O(N). Letters as in `refiner.py`.
"""

import torch.nn.functional as F
from torch import Tensor

from isomorph.layers.refined_attention import RefinedAttention
from isomorph.layers.refiner import MapConvolution


class LocalAttention(RefinedAttention):
    """Distributed local attention: each head's map is convolved on its own, and no map is ever formed.

    y = proj((D * softmax(q k^T / sqrt(hd))) v)

    `refine` holds the kernels D; other arguments are RefinedAttention's.

    Shape: x (B, N, C) -> (B, N, C); attn_mask (B, N) or (B, 1, 1, N), True for real tokens
    Source: Refiner section 3.3, Table 2 "+ DLA"
    Raises: as RefinedAttention.
    """

    refine: MapConvolution
    default_refiner = MapConvolution

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        mask = None if real is None else real[..., None, :]  # (B, 1, 1, N)
        drop = self.attn_drop.p if self.training else 0.0
        values = widen(v if real is None else v * real[..., None], self.refine.local())  # (B, H, N, k hd)
        mixed = _attend_wide(q, k, values, mask, drop, self.scale)  # (B, H, N, k hd)
        return gather(mixed if real is None else mixed * real[..., None], v.shape[-1])


def widen(v: Tensor, taps: Tensor) -> Tensor:
    """sum_b D[a, b] shift_-b(v) for every row a of the kernel, side by side.

    Shape: v (B, H, N, hd), taps (H, k, k) -> (B, H, N, k hd)
    """
    H, k, _ = taps.shape
    columns = taps.flip(-1).reshape(H * k, 1, k, 1)
    moved = F.conv2d(v, columns, padding=(k // 2, 0), groups=H)  # (B, H k, N, hd)
    return moved.unflatten(1, (H, k)).transpose(2, 3).flatten(3)


def gather(wide: Tensor, width: int) -> Tensor:
    """sum_a shift_a of the a-th part. Shape: wide (B, H, N, k hd) -> (B, H, N, hd)"""
    parts = wide.unflatten(-1, (-1, width))  # (B, H, N, k, hd)
    N, k = parts.shape[2:4]
    padded = F.pad(parts, (0, 0, 0, 0, k // 2, k // 2))
    return sum((padded[:, :, a : a + N, a] for a in range(1, k)), padded[:, :, :N, 0])


def _attend_wide(q: Tensor, k: Tensor, values: Tensor, mask: Tensor | None, drop: float, scale: float) -> Tensor:
    """softmax(scale q k^T) values, without its map, for values of any width.

    Torch's kernel for the CPU wants one width for all, those for GPUs want multiples of 8, or else they form the map;
    zeros make them so.

    Shape: q, k (B, H, N, hd), values (B, H, N, D) -> (B, H, N, D)
    """
    width = values.shape[-1]
    if q.device.type == "cpu":
        q, k = (F.pad(t, (0, width - t.shape[-1])) for t in (q, k))
    elif q.shape[-1] % 8 or width % 8:
        q, k, values = (F.pad(t, (0, -t.shape[-1] % 8)) for t in (q, k, values))
    mixed = F.scaled_dot_product_attention(q, k, values, attn_mask=mask, dropout_p=drop, scale=scale)
    return mixed[..., :width]
