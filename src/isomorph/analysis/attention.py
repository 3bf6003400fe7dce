"""What the attention layers look at, by layer name: any attention of timm's, of ours, of yours."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.analysis.batches import mean_over
from isomorph.analysis.capture import LayerCall, capture_attention
from isomorph.analysis.applied_attention import AppliedAttention
from isomorph.analysis.token_grid import TokenGrid, image_grid, find_token_grid
from isomorph.analysis.windows import attention_windows
from isomorph.errors import UserError
from isomorph.surgery.where import Where


def attention_maps(model: nn.Module, batch: Tensor, where: Where = "*") -> dict[str, Tensor]:
    """The attention map of each layer that `where` selects, as the forward applies it, in eval mode.

    Of any layer that multiplies values with softmax(q k^T), through `scaled_dot_product_attention` or by itself, timm's
    or yours, and of ours. Where a layer attends within windows, these count as images, one after the other.

    Shape: batch (B, C, H, W) -> {name: (B or windows, heads, queries, keys)}
    Raises: UserError when `where` selects no layer with a map, or the layer has none, with the reason.
    """
    return capture_attention(model, batch, lambda _, applied: applied.map(), where)


def _measure_on_grid(
    model: nn.Module, batch: Tensor, look: Callable[[str, AppliedAttention, TokenGrid], Tensor], where: Where
) -> dict[str, Any]:
    """What `look(name, applied, places)` gives for the layers whose queries and keys have known places.

    Raises: UserError when there is no such layer, with the reason of the first.
    """
    grid, reasons = image_grid(model, batch), list[str]()

    def measure(frame: LayerCall, applied: AppliedAttention) -> Tensor | None:
        try:
            where = find_token_grid(frame.layer, *frame.args, shape=applied.shape, grid=grid, **frame.kwargs)
        except UserError as error:
            reasons.append(f"{frame.name}: {error}")
            return None
        return look(frame.name, applied, where)

    found = capture_attention(model, batch, measure, where)
    if not found:
        raise UserError(reasons[0])
    return found


def attention_from(
    model: nn.Module, batch: Tensor, place: tuple[float, float] = (0.5, 0.5), where: Where = "*"
) -> dict[str, Tensor]:
    """What every head looks at from one place, as a picture on the layer's grid without padding and prefix tokens.

    `place`: row and column of the query, as shares of height and width. Layers whose queries and keys lie on no common
    grid (`find_token_grid`) are left out.

    Shape: batch (B, C, H, W) -> {name: (B, heads, h, w)}
    Raises: UserError as `attention_maps` does, or when no layer's places are known.
    """

    def look(_: str, applied: AppliedAttention, where: TokenGrid) -> Tensor:
        return torch.cat([where.picture(maps, place) for maps in applied.pieces()])

    return _measure_on_grid(model, batch, look, where)


def nonlocality(model: nn.Module, data: Tensor | Iterable[Any], where: Where = "*") -> dict[str, Tensor]:
    """How far each head looks: sum over keys of attention times distance, mean over queries and images.

    From the map that each layer really applies to what it really receives, in steps of its grid (in patches, for a
    ViT), or of the map that its windows are cut from (`attention_windows`). Tokens without a place (class token,
    registers, padding of windows) are no queries, and attention to them counts as distance 0.
    Layers whose queries and keys lie on no common grid (`find_token_grid`) are left out.

    Shape: a batch (B, C, H, W), or a loader of such -> {name: (heads,)}
    Source: ConViT eq. 8; differs: the authors' code feeds the patch embedding to every layer
    Raises: UserError as `attention_maps` does, or when no layer's places are known.
    """

    def measure(batch: Tensor) -> dict[str, Tensor]:
        cut = attention_windows(model, batch)

        def look(name: str, applied: AppliedAttention, where: TokenGrid) -> Tensor:
            total, seen, queries = torch.zeros(()), 0, 0
            for maps in applied.pieces():
                if name in cut:
                    distances, count = cut[name].distances(range(seen, seen + len(maps)))
                else:
                    distances = where.distances(maps.device)
                    count = len(maps) * len(distances)
                distances = distances.to(maps.device, torch.promote_types(maps.dtype, torch.float32))
                inner = maps[:, :, where.prefix :, where.prefix :].to(distances.dtype)
                of = "bqk" if name in cut else "qk"
                total = total.to(maps.device) + torch.einsum(f"bhqk,{of}->h", inner, distances)
                seen, queries = seen + len(maps), queries + count
            return total / queries

        return _measure_on_grid(model, batch, look, where)

    return mean_over(data, measure)
