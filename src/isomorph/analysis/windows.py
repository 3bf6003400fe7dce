"""Where windows of attention lie on the map that they are cut from, shifted and padded as the model does it."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from timm.models.maxxvit import PartitionAttention2d
from torch import Tensor, nn

from isomorph.analysis.capture import capture_inputs

_PARTITION_METHODS = ("_attn", "_partition_attn")
"""Methods of timm's blocks (Swin V1 and V2, MaxViT) that cut a map into windows for `attn` and join it again."""


class Windows(NamedTuple):
    """Windows on a grid: the place of every token of each, counted row by row, -1 for padding.

    Shape: members (windows, N)
    """

    grid: tuple[int, int]
    members: Tensor

    def on_grid(self, maps: Tensor) -> Tensor:
        """The maps of all windows in the order of their queries' places; keys stay those of the query's window.

        Shape: maps (B * windows, nh, N, N) -> (B, nh, H W, N)
        """
        found = self.members.flatten()
        inside = (found >= 0).nonzero().flatten()
        order = torch.empty_like(inside)
        order[found[inside]] = inside
        maps = maps.unflatten(0, (-1, len(self.members))).transpose(1, 2)  # (B, nh, windows, N, N)
        return maps.flatten(2, 3)[:, :, order.to(maps.device)]

    def distances(self, numbers: Iterable[int]) -> tuple[Tensor, int]:
        """|delta| in steps of the grid between the tokens of windows, 0 from and to padding; and how many have a place.

        Windows go by number, on and on over the images of a batch. Shape: -> (n, N, N)
        """
        members = self.members[torch.tensor(list(numbers)) % len(self.members)]
        inside = members >= 0
        places = torch.stack([members // self.grid[1], members % self.grid[1]], -1).double()  # (n, N, 2)
        return torch.cdist(places, places) * (inside[:, :, None] & inside[:, None]), int(inside.sum())

    def keys_of(self, place: int) -> Tensor:
        """Places of the keys that a query at a place sees, -1 for padding. Shape: -> (N,)"""
        return self.members[(self.members == place).any(1)][0]


class _InputRecorder(nn.Module):
    """Takes the place of an attention layer, and keeps what it is called with."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = x
        return x


def _windows_of(block: nn.Module, shape: torch.Size) -> Windows:
    """Windows of a block that is called with a map of this shape: its own partition, run on the numbers of the places.

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
    return Windows((H, W), recorder.seen.flatten(1).cpu().round().long() - 1)


@torch.no_grad()
def attention_windows(model: nn.Module, batch: Tensor) -> dict[str, Windows]:
    """Windows of the attention layers of timm's Swin and MaxViT families, for images like these, by layer name.

    Shape: batch (B, C, H, W)
    """
    blocks = {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "attn", None), nn.Module) and any(hasattr(module, way) for way in _PARTITION_METHODS)
    }
    shapes = capture_inputs(model, batch[:1], lambda _, x, *args, **kwargs: x.shape, blocks) if blocks else {}
    return {f"{name}.attn".removeprefix("."): _windows_of(blocks[name], shape) for name, shape in shapes.items()}
