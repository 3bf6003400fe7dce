"""The refiner of the authors' released code, which differs from the paper: it has BatchNorms and ReLU6 on the maps.

Blocks come in pairs. The first is plain attention that adds the maps of the previous pair to its own, and passes on the
sum unrefined. The second has only values, and applies the refined maps to them. Parameter names are those of the
authors' checkpoints. Letters as in `refiner.py`, and hd head width.
"""

from typing import Any

import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn

from isomorph.layers.attention_base import (
    content_scores,
    join_heads,
    softmax_map,
    split_heads,
    split_joint,
)


class ReleasedDLA(nn.Module):
    """A + BN(R ReLU6(BN(D * ReLU6(BN(E A))))). Shape: maps (B, H, N, N) -> (B, H, N, N). Source: Refiner code"""

    def __init__(self, num_heads: int, ratio: int = 3, kernel_size: int = 3, **kind: Any) -> None:
        super().__init__()
        maps = ratio * num_heads
        self.conv_exp = nn.Conv2d(num_heads, maps, 1, bias=False, **kind)
        self.bn1 = nn.BatchNorm2d(maps, **kind)
        self.depth_sep_conv = nn.Conv2d(
            maps, maps, kernel_size, padding=kernel_size // 2, groups=maps, bias=False, **kind
        )
        self.bn2 = nn.BatchNorm2d(maps, **kind)
        self.conv_pro = nn.Conv2d(maps, num_heads, 1, bias=False, **kind)
        self.bn3 = nn.BatchNorm2d(num_heads, **kind)

    def forward(self, maps: Tensor) -> Tensor:
        y = F.relu6(self.bn1(self.conv_exp(maps)))  # (B, M, N, N)
        y = F.relu6(self.bn2(self.depth_sep_conv(y)))
        return maps + self.bn3(self.conv_pro(y))


class ReleasedAttention(Attention):
    """The first layer of a pair: y = proj((softmax(q k^T / sqrt(hd)) + maps / sqrt(hd)) v), maps of the previous pair.

    Shape: x (B, N, C), maps (B, H, N, N) or None -> (B, N, C) and the map that was applied. Source: Refiner code
    """

    def attention(self, x: Tensor, maps: Tensor | None = None) -> Tensor:
        """Return the attention map that `forward` applies. Shape: -> (B, H, N, N)"""
        return self.maps_and_values(x, maps)[0]

    def content_scores(
        self, x: Tensor, maps: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return scaled queries and keys, as `content_scores`; the given maps are added after the softmax."""
        return content_scores(self, x)

    def maps_and_values(self, x: Tensor, maps: Tensor | None) -> tuple[Tensor, Tensor]:
        """Shape: x (B, N, C), maps (B, H, N, N) or None -> (B, H, N, N), (B, H, N, hd)"""
        q, k, v = split_joint(self.qkv(x), self.num_heads)
        applied = softmax_map(q * self.scale, k)
        if maps is not None:
            applied = applied + maps * self.scale
        return self.attn_drop(applied), v

    def forward(self, x: Tensor, maps: Tensor | None = None) -> tuple[Tensor, Tensor]:
        maps, v = self.maps_and_values(x, maps)
        return self.proj_drop(self.proj(join_heads(maps @ v))), maps


class ReleasedReuse(nn.Module):
    """The second layer of a pair: y = proj(BN(DLA(maps)) / sqrt(hd) v), v = qkv(x); maps are returned unrefined.

    Shape: x (B, N, C), maps (B, H, N, N) -> (B, N, C), maps. Source: Refiner code
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        ratio: int = 3,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        **kind: Any,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.DLA = ReleasedDLA(num_heads, ratio, **kind)
        self.adapt_bn = nn.BatchNorm2d(num_heads, **kind)
        self.qkv = nn.Linear(dim, dim, bias=qkv_bias, **kind)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **kind)
        self.proj_drop = nn.Dropout(proj_drop)

    def attention(self, x: Tensor, maps: Tensor) -> Tensor:
        """Return the attention map that `forward` applies. Shape: -> (B, H, N, N)"""
        return self.adapt_bn(self.DLA(maps)) * self.scale

    def forward(self, x: Tensor, maps: Tensor) -> tuple[Tensor, Tensor]:
        v = split_heads(self.qkv(x), self.num_heads)  # (B, H, N, hd)
        y = self.attention(x, maps) @ v  # (B, H, N, hd)
        return self.proj_drop(self.proj(join_heads(y))), maps
