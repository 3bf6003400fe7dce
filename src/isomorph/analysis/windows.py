"""Attention windows of Swin and MaxViT: the positions of their tokens on the feature map, with shift and padding."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from timm.models.maxxvit import PartitionAttention2d
from torch import Tensor, nn

from isomorph.analysis.capture import capture_inputs

_PARTITION_METHODS = ("_attn", "_partition_attn")
"""Methods of timm's blocks (Swin V1 and V2, MaxViT) that cut a feature map into windows, call `attn` and join them."""


class Windows(NamedTuple):
    """Windows of a feature map: `members` has the position of every token, counted row by row, or -1 for padding.

    Shape: members (windows, N)
    """

    grid: tuple[int, int]
    members: Tensor

    def on_grid(self, maps: Tensor) -> Tensor:
        """Return the maps of all windows with queries in the order of their positions, and the keys of each window.

        Shape: maps (B * windows, nh, N, N) -> (B, nh, H W, N)
        """
        positions = self.members.flatten()
        inside = (positions >= 0).nonzero().flatten()
        order = torch.empty_like(inside)
        order[positions[inside]] = inside
        maps = maps.unflatten(0, (-1, len(self.members))).transpose(1, 2)  # (B, nh, windows, N, N)
        return maps.flatten(2, 3)[:, :, order.to(maps.device)]

    def distances(self, numbers: Iterable[int]) -> tuple[Tensor, int]:
        """Return the distances between the tokens of some windows, and the number of tokens that are not padding.

        Distances are in steps of the grid, 0 from and to padding. `numbers` count windows over all images of a batch.

        Shape: -> (n, N, N)
        """
        members = self.members[torch.tensor(list(numbers)) % len(self.members)]
        inside = members >= 0
        positions = torch.stack([members // self.grid[1], members % self.grid[1]], -1).double()  # (n, N, 2)
        return torch.cdist(positions, positions) * (inside[:, :, None] & inside[:, None]), int(inside.sum())

    def keys_of(self, position: int) -> Tensor:
        """Return the positions of the keys of a query, -1 for padding. Shape: -> (N,)"""
        return self.members[(self.members == position).any(1)][0]


class _InputRecorder(nn.Module):
    """Module that records its input and returns it, in place of an attention layer."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.recorded = x
        return x


def _windows_of(block: nn.Module, shape: torch.Size) -> Windows:
    """Return the windows of a block for an input of this shape, by running its partition on position numbers.

    Shape: (B, H, W, C), or (B, C, H, W) for MaxViT's attention by convolutions
    """
    first = isinstance(block, PartitionAttention2d)
    H, W = shape[2:] if first else shape[1:3]
    numbers = torch.arange(1.0, H * W + 1).view((1, 1, H, W) if first else (1, H, W, 1))
    attn, recorder = block.attn, _InputRecorder()
    device = next(block.parameters(), numbers).device
    block.attn = recorder
    try:
        partition = next(getattr(block, name) for name in _PARTITION_METHODS if hasattr(block, name))
        partition(numbers.to(device))
    finally:
        block.attn = attn
    return Windows((H, W), recorder.recorded.flatten(1).cpu().round().long() - 1)


@torch.no_grad()
def attention_windows(model: nn.Module, batch: Tensor) -> dict[str, Windows]:
    """Return the windows of the attention layers of timm's Swin and MaxViT families, for images of this size.

    Models without windows give an empty dict.

    Shape: batch (B, C, H, W) -> {name: Windows}

    Example:
        >>> swin = timm.create_model("swin_tiny_patch4_window7_224", embed_dim=12, depths=(1,), num_heads=(2,))
        >>> windows = iso.analysis.attention_windows(swin, torch.randn(1, 3, 224, 224))
        >>> windows["layers.0.blocks.0.attn"].grid, tuple(windows["layers.0.blocks.0.attn"].members.shape)
        ((56, 56), (64, 49))
    """
    blocks = {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "attn", None), nn.Module)
        and any(hasattr(module, way) for way in _PARTITION_METHODS)
    }
    shapes = capture_inputs(model, batch[:1], lambda _, x, *args, **kwargs: x.shape, blocks) if blocks else {}
    return {f"{name}.attn".removeprefix("."): _windows_of(blocks[name], shape) for name, shape in shapes.items()}
