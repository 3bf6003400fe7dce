"""Entropy and similarity of heads, as means over images; maps are computed for a few images of a layer at a time."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.analysis.batches import Data, mean_over
from isomorph.analysis.layer_attention import LayerCall, capture_attention
from isomorph.layers.modes import upcast
from isomorph.operations import AppliedAttention
from isomorph.surgery.site import Where


def _mean_over_images(
    model: nn.Module,
    data: Data,
    where: Where,
    measure: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Return the mean over images of what is measured of each image's maps, by layer, for a few images at a time.

    Shape: measure (B, nh, Nq, Nk) -> (B, ...), one row an image
    """

    def mean_of_layer(_: LayerCall, applied: AppliedAttention) -> Tensor:
        total = torch.zeros(())
        images = 0
        for maps in applied.chunks():
            total = total.to(maps.device) + measure(upcast(maps)).sum(0)
            images += len(maps)
        return total / images

    return mean_over(
        model, data, lambda batch: capture_attention(model, batch, mean_of_layer, where)
    )


def attention_entropy(model: nn.Module, data: Data, where: Where = "*") -> dict[str, Tensor]:
    """Return the attention entropy of every head: -sum a log a in nats, mean over queries and images.

    The map is the one that the layer applies; `logit_stats` uses the output of the softmax. NaN for negative weights.

    Shape: batch (B, C, H, W) or inputs by name, or a loader of such -> {name: (heads,)}
    Raises: UserError as in `attention_maps`.

    >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    >>> tuple(iso.analysis.attention_entropy(vit, torch.randn(4, 3, 32, 32))["blocks.0.attn"].shape)
    (3,)
    """
    return _mean_over_images(model, data, where, lambda maps: entropy(maps).mean(-1))


def entropy(weights: Tensor) -> Tensor:
    """Return -sum w log w over the last axis, NaN where a weight is negative. Shape: (..., n) -> (...)"""
    terms = torch.special.entr(weights)
    return torch.where(torch.isinf(terms), torch.nan, terms).sum(-1)


def head_similarity(model: nn.Module, data: Data, where: Where = "*") -> dict[str, Tensor]:
    """Return the similarity between the heads of every layer: correlation of attention, mean over images and queries.

    It is the cosine of a query's weights after subtracting their mean over keys. Uniform attention is similar to
    uniform attention alone.

    Shape: batch (B, C, H, W) or inputs by name, or a loader of such -> {name: (maps, maps)}
    Raises: UserError as in `attention_maps`.

    >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    >>> tuple(iso.analysis.head_similarity(vit, torch.randn(4, 3, 32, 32))["blocks.0.attn"].shape)
    (3, 3)
    """

    def cosines(maps: Tensor) -> Tensor:
        maps = centred_rows(maps)  # (b, nh, Nq, Nk)
        # summed over keys; then over queries in float64
        products = torch.einsum("bhqk,bgqk->bqhg", maps, maps)
        return products.mean(1, dtype=torch.float64).to(maps.dtype)

    return _mean_over_images(model, data, where, cosines)


def centred_rows(maps: Tensor) -> Tensor:
    """Return vectors whose products are the correlations of the rows of maps, 1 for two uniform rows.

    Shape: (..., Nk) -> (..., Nk + 1); the last coordinate is 1 for a uniform row, whose others are 0
    """
    centred = maps - maps.mean(-1, keepdim=True)
    rounding = 4 * torch.finfo(maps.dtype).eps * maps.norm(dim=-1, keepdim=True)
    uniform = centred.norm(dim=-1, keepdim=True) <= rounding  # (..., 1)
    directions = F.normalize(centred.masked_fill(uniform, 0), dim=-1)
    return torch.cat([directions, uniform.to(maps)], -1)
