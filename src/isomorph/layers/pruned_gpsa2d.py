"""GPSA2d whose heads attend by position, by content or by both: what is left when closed heads are pruned.

A head is described by a letter: p (position only), c (content only), b (both), or t (position, on a single tap).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from isomorph.layers.content_heads import ContentConv2d
from isomorph.layers.gpsa2d import GPSA2d
from isomorph.layers.positional_conv import PositionalConv2d
from isomorph.layers.window_gpsa2d import WindowContentConv2d, WindowGPSA2d

PartClass = type[PositionalConv2d | ContentConv2d | GPSA2d]

PART_CLASSES: dict[str, dict[str, PartClass]] = {
    "global": {"p": PositionalConv2d, "c": ContentConv2d, "b": GPSA2d},
    "window": {"p": PositionalConv2d, "c": WindowContentConv2d, "b": WindowGPSA2d},
}
"""Layer that computes the heads of each letter, by where they attend by content."""

PARTS = {"p": "position", "c": "content", "b": "both"}
"""Attribute of the layer of the heads of each letter."""


def part_class(letter: str, content: dict[str, Any]) -> Callable[..., PositionalConv2d | ContentConv2d | GPSA2d]:
    """Return the layer of the heads of a letter, made with the arguments that say where they attend by content."""
    kind = PART_CLASSES[next(iter(content), "global")][letter]
    return kind if letter == "p" else partial(kind, **content)


class PrunedGPSA2d(nn.Module):
    """A GPSA2d of which some heads attend by position only and some by content only.

        y = sum_position P_h x weight_h + sum_content C_h x weight_h + sum_both A_h x weight_h + bias

    `heads` has a letter for each tap of the kernel, in row-major order: p for position only, c for content only, b for
    both with a gate. Heads of one letter are one layer: `position` (`PositionalConv2d`), `content` (`ContentConv2d`)
    and `both` (`GPSA2d`). Position costs work linear in the number of positions. The values are part of the filters.
    With `window`, the layers are those of `WindowGPSA2d`. The other arguments are those of
    `GPSA2d`.

    Shape: x (B, C, H, W) -> (B, C_out, Hq, Wq), sizes as nn.Conv2d
    Source: T-CNN eq. 7, with gates at 0 or 1 for some heads
    Raises: ValueError if `heads` is not one letter of p, c and b for each tap.

    Example:
        >>> layer = iso.layers.PrunedGPSA2d("pppppbbbc", 8, 16, kernel_size=3, padding=1)
        >>> layer(torch.randn(2, 8, 6, 6)).shape
        torch.Size([2, 16, 6, 6])
        >>> [round(share, 2) for share in layer.position_share.tolist()]
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.73, 0.73, 0.73, 0.0]
    """

    def __init__(
        self,
        heads: str,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        bias: bool = True,
        groups: int = 1,
        window: int | tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        content = {} if window is None else {"window": window}
        if len(heads) != kernel_size**2 or set(heads) - set(PARTS):
            raise ValueError(f"heads {heads!r} must be {kernel_size**2} letters of p, c and b, one for each tap")
        self.heads, self.num_heads = heads, len(heads)
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, kernel_size
        self.stride: tuple[int, int] = to_2tuple(stride)
        self.padding: tuple[int, int] = to_2tuple(padding)
        for letter, name in PARTS.items():
            if letter in heads:
                size = (in_channels, out_channels, kernel_size, stride, padding)
                part = part_class(letter, content)(*size, bias=bias, num_heads=heads.count(letter), groups=groups)
                self.add_module(name, part)
                bias = False  # the first part has it

    def parts(self) -> dict[str, PositionalConv2d | ContentConv2d | GPSA2d]:
        """Return the layers of the heads that are not pruned away, by letter."""
        return {letter: getattr(self, name) for letter, name in PARTS.items() if hasattr(self, name)}

    def forward(self, x: Tensor) -> Tensor:
        first, *others = (part(x) for part in self.parts().values())
        return sum(others, first)

    def in_head_order(self, parts: list[Tensor], dim: int = 0) -> Tensor:
        """Join tensors of the parts, one slice for each head, in the order of the heads."""
        order = torch.tensor(sorted(range(len(self.heads)), key=lambda h: (list(PARTS).index(self.heads[h]), h)))
        return torch.cat(parts, dim).index_select(dim, order.argsort().to(parts[0].device))

    @property
    def position_share(self) -> Tensor:
        """Share of position attention in every head. Shape: -> (nh,)"""
        return self.in_head_order([part.position_share for part in self.parts().values()])

    @property
    def locality(self) -> Tensor:
        """Sharpness of each head's position attention; NaN for a head without position. Shape: -> (nh,)"""
        return self.in_head_order([part.locality for part in self.parts().values()])

    @property
    def centre(self) -> Tensor:
        """Offset (row, column) where each head's position attention peaks, or NaN. Shape: -> (nh, 2)"""
        return self.in_head_order([part.centre for part in self.parts().values()])

    def query_grid(self, H: int, W: int) -> tuple[int, int]:
        """Return the height and width of the output for an H x W input."""
        return next(iter(self.parts().values())).query_grid(H, W)

    def attention(self, x: Tensor, query: int | None = None) -> Tensor:
        """Return the attention map over the zero-padded keys, or the row of one query. Rows sum to 1.

        Shape: x (B, C, H, W) -> (B, nh, Nq, (H + 2 pad) (W + 2 pad))
        """
        return self.in_head_order([part.attention(x, query) for part in self.parts().values()], dim=1)

    def extra_repr(self) -> str:
        return f"heads={self.heads}"
