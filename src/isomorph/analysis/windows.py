"""Attention windows of Swin, MaxViT, DaViT and Twins: the positions of their tokens, shift and padding."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.models.maxxvit import PartitionAttention2d
from torch import Tensor, nn

from isomorph.analysis.batches import some_images
from isomorph.analysis.layer_attention import capture_inputs, run_observed
from isomorph.analysis.token_grid import AttentionGrid
from isomorph.layers import DecomposedAttention
from isomorph.layers.grid import GridSize
from isomorph.layers.modes import eval_mode, noise
from isomorph.operations import ModuleCall, observing, unwrap
from isomorph.process import replaced_attribute
from isomorph.surgery.attention_layers import names_of
from isomorph.surgery.calls import Inputs
from isomorph.surgery.modules import parent_name

# Methods of timm's blocks (Swin V1, V2, V2 CR, MaxViT) that cut a map into windows, call `attn` and
# join them.
_PARTITION_METHODS = ("_attn", "_partition_attn", "_shifted_window_attn")


class WindowMembers(NamedTuple):
    """Windows of a feature map: `members` has the position of every token, counted row by row, or -1 for padding.

    Shape: members (windows, N)
    """

    grid: GridSize
    members: Tensor

    def on_grid(self, maps: Tensor) -> Tensor:
        """Return maps with queries in order of position. Shape: (B * windows, nh, N, N) -> (B, nh, H W, N)"""
        positions = self.members.flatten()
        inside = (positions >= 0).nonzero().flatten()
        order = torch.empty_like(inside)
        order[positions[inside]] = inside
        maps = maps.unflatten(0, (-1, len(self.members))).transpose(1, 2)  # (B, nh, windows, N, N)
        return maps.flatten(2, 3)[:, :, order.to(maps.device)]

    def distances(self, numbers: Iterable[int]) -> tuple[Tensor, int]:
        """Return the distances between the tokens of some windows, and the number of tokens that are not padding.

        In steps of the grid, 0 from and to padding; `numbers` count windows over a batch. Shape: -> (n, N, N)
        """
        members = self.members[torch.tensor(list(numbers)) % len(self.members)]
        inside = members >= 0
        W = self.grid[1]
        positions = torch.stack([members // W, members % W], -1).double()  # (n, N, 2)
        pairs = inside[:, :, None] & inside[:, None]
        return torch.cdist(positions, positions) * pairs, int(inside.sum())

    def keys_of(self, position: int) -> Tensor:
        """Return the positions of the keys of a query, -1 for padding. Shape: -> (N,)"""
        return self.members[(self.members == position).any(1)][0]

    def map_from(self, position: tuple[float, float], row: Callable[[int], Tensor]) -> Tensor:
        """Return the attention of one query on the whole map, 0 outside its window. Shape: -> (B, nh, H, W)

        `position`: fractions of height and width; `row`: the attention of a token in every window, (B * windows, nh, N)
        """
        H, W = self.grid
        query = AttentionGrid(self.grid, self.grid).query_at(position)
        window, token = (self.members == query).nonzero()[0].tolist()
        by_window = row(token).unflatten(0, (-1, len(self.members)))
        attention = by_window[:, window]  # (B, nh, N)
        members = self.members[window].to(attention.device)
        inside = members >= 0
        maps = attention.new_zeros(*attention.shape[:2], H * W)
        maps[:, :, members[inside]] = attention[:, :, inside]
        return maps.unflatten(-1, (H, W))


class _InputRecorder(nn.Module):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.recorded = x
        return x


def _windows_of(block: nn.Module, shape: torch.Size) -> WindowMembers:
    """Return the windows of a block for inputs (B, H, W, C), by running its partition on position numbers."""
    if isinstance(block, PartitionAttention2d):  # (B, C, H, W)
        H, W = shape[2:]
        numbers = torch.arange(1.0, H * W + 1).view(1, 1, H, W)
    else:
        H, W = shape[1:3]
        numbers = torch.arange(1.0, H * W + 1).view(1, H, W, 1)
    numbers = numbers.to(next(block.parameters(), numbers).device)
    recorder = _InputRecorder()
    with replaced_attribute(block, "attn", recorder):
        _partition(block)(numbers)
    members = recorder.recorded.flatten(1).cpu().round().long() - 1
    return WindowMembers((H, W), members)


@torch.no_grad()
def attention_windows(model: nn.Module, batch: Inputs) -> dict[str, WindowMembers]:
    """Return the windows of the layers of timm's Swin, MaxViT, DaViT and Twins, for images of this size; {} if none.

    Shape: batch (B, C, H, W) -> {name: WindowMembers}

    >>> swin = timm.create_model("swin_tiny_patch4_window7_224", embed_dim=12, depths=(1,), num_heads=(2,))
    >>> windows = iso.analysis.attention_windows(swin, torch.randn(1, 3, 224, 224))
    >>> windows["layers.0.blocks.0.attn"].grid, tuple(windows["layers.0.blocks.0.attn"].members.shape)
    ((56, 56), (64, 49))
    """
    model = unwrap(model, to_copy=False)
    cutting: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if _plain_kind(module) or _partition(module):
            cutting[name] = module
    if not cutting:
        return {}
    windows = {}
    for name, size in capture_inputs(model, some_images(batch, 0, 1), _map_size, cutting).items():
        module = cutting[name]
        if _partition(module):
            windows[f"{name}.attn".removeprefix(".")] = _windows_of(module, size)
        else:
            attention, window_size = _PLAIN_WINDOWS[_plain_kind(module)]
            windows[f"{name}.{attention}".strip(".")] = _plain_windows(size, window_size(module))
    return windows


def _partition(module: nn.Module) -> Any:
    """Return the method by which a block of timm cuts maps into windows for its `attn`, or None."""
    if not isinstance(getattr(module, "attn", None), nn.Module):
        return None
    methods = [getattr(module, name, None) for name in _PARTITION_METHODS]
    return next(filter(None, methods), None)


def _plain_kind(module: nn.Module) -> str:
    """Return the name in `_PLAIN_WINDOWS` of a module's class; empty for another class, or without windows."""
    if isinstance(module, DecomposedAttention) and module.window is None:
        return ""
    return next((name for name in names_of(module) if name in _PLAIN_WINDOWS), "")


@torch.no_grad()
def observed_windows(
    model: nn.Module,
    batch: Inputs,
    names: Sequence[str],
) -> dict[str, WindowMembers]:
    """Return the windows of attention layers, by which tokens of the map around them arrive where; {} if unclear.

    The nearest module around a layer that reads a whole map is run on maps of two kinds of tokens, one run for each
    binary digit of the positions. That needs what lies between to change every token alone, as a norm does.
    """
    model = unwrap(model, to_copy=False)
    outer_names = {name: _names_around(name) for name in names}
    observed = dict.fromkeys(itertools.chain(*outer_names.values()))
    calls: dict[str, ModuleCall] = {}

    def record(call: ModuleCall) -> None:
        calls[call.name] = call

    run_observed(model, some_images(batch, 0, 1), record, names=observed)
    windows_of = {}
    for name in names:
        for outer in outer_names[name]:
            size = _size_of_map(calls[outer]) if outer in calls else None
            if size is None:
                continue
            with eval_mode(calls[outer].module):
                inside = name.removeprefix(f"{outer}.")
                windows = _decoded_windows(calls[outer], inside, size)
            if windows is not None:
                windows_of[name] = windows
                break
    return windows_of


def _names_around(name: str) -> list[str]:
    """Return the names of the modules around a module, the nearest first."""
    names = []
    while name:
        name = parent_name(name)
        names.append(name)
    return names


def _size_of_map(call: ModuleCall) -> GridSize | None:
    """Return the size of the map of one image that a module reads, (1, H W, C) next to (H, W), or (1, H, W, C)."""
    x = call.args[0] if call.args else None
    if not isinstance(x, Tensor) or len(x) != 1:
        return None
    if x.ndim == 4:
        return x.shape[1], x.shape[2]
    if x.ndim != 3:
        return None
    for value in (*call.args[1:], *call.kwargs.values()):
        pair = value.tolist() if isinstance(value, Tensor) and value.ndim == 1 else value
        if _are_sides(pair, x.shape[1]):
            return pair[0], pair[1]
    return None


def _are_sides(pair: Any, positions: int) -> bool:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    return all(isinstance(side, int) for side in pair) and pair[0] * pair[1] == positions


def _decoded_windows(call: ModuleCall, attention: str, size: GridSize) -> WindowMembers | None:
    """Return the windows of the attention in a block, None unless every position of the map arrives once."""
    x = call.args[0]
    count = size[0] * size[1]
    plain, marked = noise(2, x.shape[-1]).to(x)
    positions = torch.arange(count, device=x.device)

    def received(ones: Tensor) -> Tensor:
        tokens = torch.where(ones[:, None], marked, plain).reshape(x.shape)
        new_call = call._replace(args=(tokens, *call.args[1:]))
        return _last_input(new_call, attention)

    zeros_there = received(positions < 0)
    ones_there = received(positions >= 0)
    if zeros_there.shape[-1] != x.shape[-1]:
        return None
    members = torch.zeros(zeros_there.shape[:2], dtype=torch.long, device=x.device)
    for digit in range(max(1, (count - 1).bit_length())):
        received_tokens = received((positions >> digit) % 2 == 1)
        is_one = (received_tokens == ones_there).all(-1)
        if not bool((is_one | (received_tokens == zeros_there).all(-1)).all()):
            return None
        members += is_one.long() << digit
    members[(zeros_there == ones_there).all(-1)] = -1  # padding
    if not torch.equal(members[members >= 0].sort().values, positions):
        return None
    return WindowMembers(size, members.cpu())


def _last_input(call: ModuleCall, inside: str) -> Tensor:
    """Return what a module inside receives in a call, each window as a row of tokens."""
    inputs: list[Any] = []
    with observing(call.module, lambda inner_call: inputs.append(inner_call.input), names=[inside]):
        call.module(*call.args, **call.kwargs)
    return inputs[-1].flatten(1, -2)  # of windows (h, w, C) too


# Classes that cut a map into windows without shift: the name of the attention inside, and the
# window's size.
_PLAIN_WINDOWS: dict[str, tuple[str, Callable[[Any], GridSize]]] = {
    "timm.models.davit.SpatialBlock": ("attn", lambda block: block.window_size),
    "timm.models.twins.LocallyGroupedAttn": ("", lambda layer: (layer.ws, layer.ws)),
    "isomorph.layers.relative.decomposed.DecomposedAttention": ("", lambda layer: layer.window),
}


def _map_size(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the shape of a block's input, or the size (H, W) of the map of a layer in `_PLAIN_WINDOWS`."""
    if not _plain_kind(module):
        return x.shape
    if isinstance(module, DecomposedAttention):
        return tuple(x.shape[1:3])
    if x.ndim == 4:
        return tuple(x.shape[2:])
    return tuple(args[0] if args else kwargs["size"])


def _plain_windows(size: GridSize, window: GridSize) -> WindowMembers:
    H, W = size
    h, w = window
    numbers = torch.arange(H * W).view(H, W)
    padded = F.pad(numbers, (0, -W % w, 0, -H % h), value=-1)
    rows = padded.unflatten(0, (-1, h)).unflatten(
        2, (-1, w)
    )  # (windows down, h, windows across, w)
    windows = rows.transpose(1, 2).flatten(0, 1)
    return WindowMembers((H, W), windows.flatten(1))
