"""Distributed local attention (Refiner section 3.3) computed without forming an attention map.

A convolution of the map splits into a convolution of the values and a sum over the output:

    y_h = (D_h * A_h) v_h = sum_a shift_a(A_h sum_b D_h[a, b] shift_-b(v_h))

The columns of the kernel are applied to the values and its rows to the output. Between them is ordinary attention with
values k times as wide, through `scaled_dot_product_attention`. Memory is O(N). Letters as in `refiner.py`.
"""

import torch.nn.functional as F
from torch import Tensor

from isomorph.layers.refined_attention import RefinedAttention
from isomorph.layers.refiner import MapConvolution


class LocalAttention(RefinedAttention):
    """Attention whose maps are smoothed or sharpened locally: each head's map is convolved with its own small kernel.

    y = proj((D * softmax(q k^T / sqrt(hd))) v)

    The convolution lets neighbouring queries and keys share their attention, which gives each head a local pattern. No
    map is formed, so memory grows linearly with the number of tokens. The kernels D are in `refine`, a
    `MapConvolution`; the other arguments are those of `RefinedAttention`.

    Shape: x (B, N, C) -> (B, N, C); attn_mask (B, N) or (B, 1, 1, N), True for real tokens
    Source: Refiner section 3.3, Table 2 "+ DLA"
    Raises: as RefinedAttention.

    Example:
        >>> layer = iso.layers.LocalAttention(dim=64, num_heads=4)
        >>> layer(torch.randn(2, 50, 64)).shape
        torch.Size([2, 50, 64])
        >>> wide = iso.layers.LocalAttention(64, 4, refine=iso.layers.MapConvolution(4, kernel_size=5))
    """

    refine: MapConvolution
    default_refiner = MapConvolution

    def attend(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None) -> Tensor:
        """Return the convolved maps times the values. Shape: q, k, v (B, H, N, hd) -> (B, H, N, hd)"""
        mask = None if token_mask is None else token_mask[..., None, :]  # (B, 1, 1, N)
        drop = self.attn_drop.p if self.training else 0.0
        values = _convolve_values(
            v if token_mask is None else v * token_mask[..., None], self.refine.local()
        )  # (B, H, N, k hd)
        mixed = _attend_wide_values(q, k, values, mask, drop, self.scale)  # (B, H, N, k hd)
        return _sum_shifted(mixed if token_mask is None else mixed * token_mask[..., None], v.shape[-1])


def _convolve_values(v: Tensor, taps: Tensor) -> Tensor:
    """Return sum_b D[a, b] shift_-b(v) for every kernel row a, concatenated along the width.

    Shape: v (B, H, N, hd), taps (H, k, k) -> (B, H, N, k hd)
    """
    H, k, _ = taps.shape
    columns = taps.flip(-1).reshape(H * k, 1, k, 1)
    moved = F.conv2d(v, columns, padding=(k // 2, 0), groups=H)  # (B, H k, N, hd)
    return moved.unflatten(1, (H, k)).transpose(2, 3).flatten(3)


def _sum_shifted(wide: Tensor, width: int) -> Tensor:
    """Sum the k parts of the width, part a shifted by a tokens. Shape: wide (B, H, N, k hd) -> (B, H, N, hd)"""
    parts = wide.unflatten(-1, (-1, width))  # (B, H, N, k, hd)
    N, k = parts.shape[2:4]
    padded = F.pad(parts, (0, 0, 0, 0, k // 2, k // 2))
    return sum((padded[:, :, a : a + N, a] for a in range(1, k)), padded[:, :, :N, 0])


def _attend_wide_values(q: Tensor, k: Tensor, values: Tensor, mask: Tensor | None, drop: float, scale: float) -> Tensor:
    """Return softmax(scale q k^T) values for values of any width, without forming the map.

    Torch's fused CPU kernel requires q, k and v of one width, and its GPU kernels widths that are multiples of 8;
    otherwise they form the map. Zero padding meets both requirements.

    Shape: q, k (B, H, N, hd), values (B, H, N, D) -> (B, H, N, D)
    """
    width = values.shape[-1]
    if q.device.type == "cpu":
        q, k = (F.pad(t, (0, width - t.shape[-1])) for t in (q, k))
    elif q.shape[-1] % 8 or width % 8:
        q, k, values = (F.pad(t, (0, -t.shape[-1] % 8)) for t in (q, k, values))
    mixed = F.scaled_dot_product_attention(q, k, values, attn_mask=mask, dropout_p=drop, scale=scale)
    return mixed[..., :width]
