"""Attention maps of a model and measures of where they attend, by layer name."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.analysis.batches import Data, count_images, mean_over
from isomorph.analysis.layer_attention import LayerCall, capture_attention
from isomorph.analysis.token_grid import AttentionGrid, find_token_grid, image_grid
from isomorph.analysis.windows import WindowMembers, attention_windows, observed_windows
from isomorph.errors import UserError
from isomorph.layers.modes import at_least_float32
from isomorph.operations import AppliedAttention
from isomorph.surgery.calls import Inputs, check_inputs
from isomorph.surgery.site import Where


def attention_maps(model: nn.Module, batch: Inputs, where: Where = "*") -> dict[str, Tensor]:
    """Return the attention maps of every selected layer as the forward applies them, in eval mode.

    For every layer that multiplies values by softmax(q k^T), with `scaled_dot_product_attention` or without, whether
    timm's, isomorph's or your own. The windows of a layer that attends within windows count as images.

    Shape: batch (B, C, H, W) or inputs by name -> {name: (B or windows, heads, queries, keys)}
    Raises: UserError if `where` selects no layer with an attention map, with the reason.

    >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    >>> maps = iso.attention_maps(vit, torch.randn(4, 3, 32, 32))
    >>> {name: tuple(value.shape) for name, value in maps.items()}
    {'blocks.0.attn': (4, 3, 5, 5), 'blocks.1.attn': (4, 3, 5, 5)}
    """
    return capture_attention(model, batch, lambda _, applied: applied.map(), where)


def _measure_on_grid(
    model: nn.Module,
    batch: Inputs,
    measure: Callable[[str, AppliedAttention, AttentionGrid], Tensor],
    where: Where,
    windows: dict[str, WindowMembers] | None = None,
) -> dict[str, Any]:
    """Return `measure(name, attention, grid)` of layers with known positions; `measure` knows those of `windows`.

    Windows that only running the model shows are added to these.
    """
    check_inputs(batch)
    grid = image_grid(model, batch)
    images = count_images(batch)
    reasons: list[str] = []
    unplaced: list[str] = []

    def measure_call(call: LayerCall, attention: AppliedAttention) -> Tensor | None:
        try:
            if windows and call.name in windows and attention.shape:
                # `windows` has the positions
                positions = AttentionGrid((1, attention.shape[0]), (1, attention.shape[1]))
                return measure(call.name, attention, positions)
            if isinstance(call.args[0], Tensor) and len(call.args[0]) > images:
                unplaced.append(call.name)
            return measure(call.name, attention, find_token_grid(call, attention.shape, grid))
        except UserError as error:
            reasons.append(f"{call.name}: {error}")
            return None

    measured = capture_attention(model, batch, measure_call, where)
    if unplaced and windows is not None:
        observed = observed_windows(model, batch, unplaced)
        if observed:
            windows.update(observed)
            measured = capture_attention(model, batch, measure_call, where)
    if not measured:
        raise UserError(reasons[0])
    return measured


def attention_from(
    model: nn.Module, batch: Inputs, position: tuple[float, float] = (0.5, 0.5), where: Where = "*"
) -> dict[str, Tensor]:
    """Return the attention of one query in every head, on the grid of the layer without padding and prefix tokens.

    `position`: row and column of the query, as fractions of height and width from 0 to 1. Layers whose queries and keys
    have no common grid are left out. A query in a window attends to nothing outside it.

    Shape: batch (B, C, H, W) or inputs by name -> {name: (B, heads, h, w)}
    Raises: UserError as in `attention_maps`, for a position outside of the image, or if the grid of no layer is known.

    >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    >>> attention = iso.analysis.attention_from(vit, torch.randn(4, 3, 32, 32), position=(0.25, 0.75))
    >>> tuple(attention["blocks.0.attn"].shape)
    (4, 3, 2, 2)
    """
    if (
        not isinstance(position, Sequence)
        or len(position) != 2
        or not all(0 <= part <= 1 for part in position)
    ):
        raise UserError(
            f"position {position} must be two fractions of height and width, from 0 to 1",
        )
    windows = attention_windows(model, batch)

    def measure(name: str, attention: AppliedAttention, grid: AttentionGrid) -> Tensor:
        if name in windows:
            return windows[name].map_from(position, attention.row)
        return grid.on_map(attention.row(grid.query_at(position)))

    return _measure_on_grid(model, batch, measure, where, windows)


def nonlocality(model: nn.Module, data: Data, where: Where = "*") -> dict[str, Tensor]:
    """Return the mean attention distance of every head: sum over keys of attention times distance.

    The mean is over queries and images. Distances are in steps of the layer's grid (patches, for a ViT), or of the
    feature map that its windows are cut from. Tokens without a grid position (class token, registers, padding of
    windows) are not queries, and attention to them counts as distance 0. Layers whose queries and keys have no common
    grid are left out.

    Shape: batch (B, C, H, W) or inputs by name, or a loader of such -> {name: (heads,)}
    Source: ConViT eq. 8; differs: each layer receives its own input, the authors' code uses the patch embedding
    Raises: UserError as in `attention_maps`, or if the grid of no layer is known.

    >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    >>> tuple(iso.nonlocality(vit, torch.randn(4, 3, 32, 32))["blocks.0.attn"].shape)
    (3,)
    """

    def measure_batch(batch: Inputs) -> dict[str, Tensor]:
        windows = attention_windows(model, batch)

        def measure(name: str, attention: AppliedAttention, grid: AttentionGrid) -> Tensor:
            total = torch.zeros(())
            images = 0
            queries = 0
            for maps in attention.chunks():
                if name in windows:
                    distances, count = windows[name].distances(range(images, images + len(maps)))
                else:
                    distances = grid.distances(maps.device)
                    count = len(maps) * len(distances)
                distances = distances.to(maps.device, at_least_float32(maps))
                inner = maps[:, :, grid.prefix :, grid.prefix :].to(distances.dtype)
                axes = "bqk" if name in windows else "qk"
                total = total.to(maps.device) + torch.einsum(
                    f"bhqk,{axes}->h", inner, distances
                )  # (nh,)
                images += len(maps)
                queries += count
            return total / queries

        return _measure_on_grid(model, batch, measure, where, windows)

    return mean_over(model, data, measure_batch)


def prefix_attention(model: nn.Module, data: Data, where: Where = "*") -> dict[str, Tensor]:
    """Return the share of attention that patches give to tokens without a grid position: class token and registers.

    The mean of every head over patches and images. `nonlocality` counts this share as distance 0; divided by the rest
    of the attention, 1 - share, it is the mean distance among patches. Layers without such tokens are left out.

    Shape: batch (B, C, H, W) or inputs by name, or a loader of such -> {name: (heads,)}
    Raises: UserError as in `attention_maps`, or if no layer has such tokens.

    >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    >>> tuple(iso.analysis.prefix_attention(vit, torch.randn(4, 3, 32, 32))["blocks.0.attn"].shape)
    (3,)
    """

    def measure(_: str, attention: AppliedAttention, grid: AttentionGrid) -> Tensor:
        if not grid.prefix:
            raise UserError("it has no class token or registers")
        shares = []
        for maps in attention.chunks():
            to_prefix = maps.float()[:, :, grid.prefix :, : grid.prefix]
            shares.append(to_prefix.sum(-1).mean(-1))  # (b, nh)
        return torch.cat(shares).mean(0)

    return mean_over(model, data, lambda batch: _measure_on_grid(model, batch, measure, where))
