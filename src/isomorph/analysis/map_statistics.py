"""What attention maps are like, in a number for each head: entropy, effective rank, similarity of heads.

Each takes a batch or a loader and gives means over images; maps exist for a few images of one layer at a time.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.analysis.batches import mean_over
from isomorph.analysis.capture import LayerCall, capture_attention
from isomorph.analysis.applied_attention import AppliedAttention
from isomorph.surgery.where import Where


def _mean_over_images(measure: Callable[[Tensor], Tensor]) -> Callable[[LayerCall, AppliedAttention], Tensor]:
    """The mean of what `measure(maps)` gives for each image, over the images of a layer, a few at a time."""

    def look(_: LayerCall, applied: AppliedAttention) -> Tensor:
        total, images = torch.zeros(()), 0
        for maps in applied.pieces():
            total = total.to(maps.device) + measure(maps.float()).sum(0)
            images += len(maps)
        return total / images

    return look


def attention_entropy(model: nn.Module, data: Tensor | Iterable[Any], where: Where = "*") -> dict[str, Tensor]:
    """Over how much each head spreads its attention: -sum a log a in nats, mean over queries and images.

    0 for attention on one key, log N for uniform attention; of the map as applied, where `logit_stats` takes that of
    the softmax. NaN for a map with negative weights.

    Shape: a batch (B, C, H, W), or a loader of such -> {name: (heads,)}
    Raises: UserError as `attention_maps` does.
    """
    look = _mean_over_images(lambda maps: entropy(maps).mean(-1))
    return mean_over(data, lambda batch: capture_attention(model, batch, look, where))


def entropy(weights: Tensor) -> Tensor:
    """-sum w log w over the last axis; NaN where a weight is negative. Shape: (..., n) -> (...)"""
    found = torch.special.entr(weights)
    return torch.where(torch.isinf(found), torch.nan, found).sum(-1)


def effective_rank(model: nn.Module, data: Tensor | Iterable[Any], where: Where = "*") -> dict[str, Tensor]:
    """How many directions each head's map really mixes: exp of the entropy of its singular values, mean over images.

    1 for uniform attention, N for each token looking at itself.

    Shape: a batch (B, C, H, W), or a loader of such -> {name: (heads,)}
    Source: Roy and Vetterli (2007), The effective rank
    Raises: UserError as `attention_maps` does.
    """
    look = _mean_over_images(effective_matrix_rank)
    return mean_over(data, lambda batch: capture_attention(model, batch, look, where))


def effective_matrix_rank(maps: Tensor) -> Tensor:
    """Effective rank of matrices. Shape: (..., n, m) -> (...)"""
    values = torch.linalg.svdvals(maps)
    return entropy(values / values.sum(-1, keepdim=True)).exp()


def head_similarity(model: nn.Module, data: Tensor | Iterable[Any], where: Where = "*") -> dict[str, Tensor]:
    """How alike the maps of a block's heads are: cosine of what a query looks at, mean over images and queries.

    Shape: a batch (B, C, H, W), or a loader of such -> {name: (maps, maps)}
    Raises: UserError as `attention_maps` does.
    """

    def cosines(maps: Tensor) -> Tensor:
        maps = F.normalize(maps, dim=-1)  # (b, nh, Nq, Nk)
        return torch.einsum("bhqk,bgqk->bhg", maps, maps) / maps.shape[2]

    look = _mean_over_images(cosines)
    return mean_over(data, lambda batch: capture_attention(model, batch, look, where))
