"""Layouts of attention maps: where the heads and windows are among the axes of a layer's map.

The standard layout is (B, nh, Nq, Nk), in which the windows of a layer count as images.
"""

from typing import Literal

from torch import Tensor

MapLayout = Literal["heads", "windows", "joint", "queries"]
"""What comes after the batch axis.

- heads: (B, nh, Nq, Nk), or (B, Nq, Nk) for one head, or (B, nh, windows, Nq, Nk).
- windows: (B, windows, nh, Nq, Nk).
- joint: batch and heads in one axis: (B nh, Nq, Nk) or (B nh, windows, Nq, Nk).
- queries: (B, Nq, nh, Nk).
"""


def to_standard_map(maps: Tensor, layout: MapLayout, heads: int) -> Tensor:
    """Return maps, queries or keys in the standard layout. Shape: (...) -> (B windows, nh, ., .)"""
    if layout == "queries":
        return maps.transpose(1, 2)
    if layout == "windows":
        return maps.flatten(0, 1)
    if layout == "joint":
        maps = maps.unflatten(0, (-1, heads))
    elif maps.ndim == 3:
        return maps[:, None]
    return maps.transpose(1, 2).flatten(0, 1) if maps.ndim == 5 else maps


def from_standard_map(maps: Tensor, layout: MapLayout, like: Tensor) -> Tensor:
    """Return maps in the layout and with the axes of `like`, from which `to_standard_map` made them.

    Shape: maps (B windows, nh, Nq, Nk) -> as like
    """
    if layout == "queries":
        return maps.transpose(1, 2)
    if layout == "heads" and like.ndim == 5:
        return maps.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)
    if layout == "joint" and like.ndim == 4:
        return maps.unflatten(0, (-1, like.shape[1])).transpose(1, 2).flatten(0, 1)
    return maps.reshape(like.shape)
