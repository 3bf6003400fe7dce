"""How sharp attention is before and after the softmax: what diverges first when training does (TDRL Fig. 3)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isomorph.analysis.attention import visit
from isomorph.analysis.scores import SCORED, Scores, scores
from isomorph.errors import UserError

QUERIES_AT_ONCE = 64
"""Rows of the map that exist at the same time."""


class LogitStats(NamedTuple):
    """Of each head: largest logit and largest attention, mean over images; entropy in nats, mean over queries."""

    max_logit: Tensor
    max_attention: Tensor
    entropy: Tensor


def logit_stats(model: nn.Module, batch: Tensor) -> dict[str, LogitStats]:
    """Largest attention logit, largest attention and attention entropy by layer, in eval mode; no map is kept.

    Logits are what the softmax is given: scaled by 1 / sqrt(head width), with masks and relative positions. A logit of
    1,000 is attention lost; an entropy of 0 is one-hot attention, of log(N) uniform attention. Of layers whose queries
    and keys are known: timm's Attention, pyramids in it or not, that of its CoAtNets and MaxViTs, relative attention,
    and GPSA on tokens (content only).

    Shape: batch (B, C, H, W) -> {name: LogitStats, (heads,) each}
    Source: TDRL Fig. 3
    Raises: UserError when the model has no such layer.
    """
    named = model.named_modules()
    layers = {name: layer for name, layer in named if isinstance(layer, SCORED)}
    if not layers:
        raise UserError("the model has no attention layer whose queries and keys are known")
    return {name: LogitStats(*found) for name, found in visit(model, batch, look, layers).items()}


def look(layer: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Statistics of one layer. Shape: -> (3, heads)"""
    q, k, bias = scores(layer, x, *args, **kwargs)
    return summarise(Scores(q.float(), k.float(), None if bias is None else bias.float()))


def summarise(found: Scores) -> Tensor:
    """Largest logit, largest attention, entropy, some queries at a time. Shape: -> (3, nh)"""
    tops, peaks, entropies = [], [], []
    queries = found.q.shape[2]
    for start in range(0, queries, QUERIES_AT_ONCE):
        logits = found.rows(start, start + QUERIES_AT_ONCE)  # (B, nh, n, N)
        total = logits.logsumexp(-1)  # (B, nh, n)
        entropies.append((total - (torch.softmax(logits, -1) * logits).sum(-1)).sum(2))
        highest = logits.amax(-1)
        tops.append(highest.amax(-1))
        peaks.append((highest - total).exp().amax(-1))
    largest, sharpest = (torch.stack(parts).amax(0).mean(0) for parts in (tops, peaks))
    return torch.stack([largest, sharpest, torch.stack(entropies).sum(0).mean(0) / queries])
