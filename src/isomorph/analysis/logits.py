"""How sharp attention is before and after the softmax: what diverges first when training does (TDRL Fig. 3)."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isomorph.analysis.batches import mean_over
from isomorph.analysis.capture import LayerCall, capture_attention
from isomorph.analysis.applied_attention import AppliedAttention, Scores
from isomorph.errors import UserError
from isomorph.surgery.where import Where

_QUERIES_PER_CHUNK = 64
"""Rows of the map that exist at the same time."""


class LogitStats(NamedTuple):
    """Of each head: largest logit and largest attention, mean over images; entropy in nats, mean over queries."""

    max_logit: Tensor
    max_attention: Tensor
    entropy: Tensor


def logit_stats(model: nn.Module, data: Tensor | Iterable[Any], where: Where = "*") -> dict[str, LogitStats]:
    """Largest attention logit, largest attention and attention entropy by layer, in eval mode; no map is kept.

    Logits are what the softmax is given: scaled, with masks and relative positions. A logit of 1,000 is attention lost;
    an entropy of 0 is one-hot attention, of log(N) uniform attention. Of every layer that has a softmax over keys; of
    GPSA, on tokens and on maps, the content half. What a layer does to its map after the softmax is not in here.

    Shape: a batch (B, C, H, W), or a loader of such -> {name: LogitStats, (heads,) each}
    Source: TDRL Fig. 3
    Raises: UserError when the model has no such layer.
    """

    def look(batch: Tensor) -> dict[str, Tensor]:
        found = capture_attention(model, batch, _layer_stats, where)
        if not found:
            raise UserError("the model has no attention layer whose queries and keys are known")
        return found

    return {name: LogitStats(*found) for name, found in mean_over(data, look).items()}


def _layer_stats(_: LayerCall, applied: AppliedAttention) -> Tensor | None:
    """Statistics of one layer. Shape: -> (3, heads)"""
    return None if applied.logits is None else summarise_scores(applied.logits.float())


def summarise_scores(found: Scores) -> Tensor:
    """Largest logit, largest attention, entropy, some queries at a time. Shape: -> (3, nh)"""
    tops, peaks, entropies = [], [], []
    queries = found.q.shape[2]
    for start in range(0, queries, _QUERIES_PER_CHUNK):
        logits = found.rows(start, start + _QUERIES_PER_CHUNK)  # (B, nh, n, N)
        total = logits.logsumexp(-1)  # (B, nh, n)
        weighted = (torch.softmax(logits, -1) * logits).nan_to_num()  # 0 x -inf where a mask forbids
        entropies.append((total - weighted.sum(-1)).sum(2))
        highest = logits.amax(-1)
        tops.append(highest.amax(-1))
        peaks.append((highest - total).exp().amax(-1))
    largest, sharpest = (torch.stack(parts).amax(0).mean(0) for parts in (tops, peaks))
    return torch.stack([largest, sharpest, torch.stack(entropies).sum(0).mean(0) / queries])
