"""How sharp attention is before and after the softmax: what diverges first when training does (TDRL Fig. 3)."""

from typing import Any, NamedTuple

import torch
from timm.layers import Attention
from torch import Tensor, nn

from isomorph.analysis.attention import queries_keys, visit
from isomorph.errors import UserError
from isomorph.layers import GPSA

QUERIES_AT_ONCE = 64
"""Rows of the map that exist at the same time."""


class LogitStats(NamedTuple):
    """Of each head: largest logit and largest attention, mean over images; entropy in nats, mean over queries."""

    max_logit: Tensor
    max_attention: Tensor
    entropy: Tensor


def logit_stats(model: nn.Module, batch: Tensor) -> dict[str, LogitStats]:
    """Largest attention logit, largest attention and attention entropy by layer, in eval mode; no map is kept.

    Logits are what the softmax is given, scaled by 1 / sqrt(head width). A logit of 1,000 is attention lost; an entropy
    of 0 is one-hot attention, of log(N) uniform attention. Content attention only, of layers whose queries and keys are
    known: timm's Attention, pyramids in it or not, and GPSA on tokens.

    Shape: batch (B, C, H, W) -> {name: LogitStats, (heads,) each}
    Source: TDRL Fig. 3
    Raises: UserError when the model has no such layer.
    """
    named = model.named_modules()
    layers = {name: layer for name, layer in named if isinstance(layer, Attention | GPSA)}
    if not layers:
        raise UserError("the model has no attention layer whose queries and keys are known")
    return {name: LogitStats(*found) for name, found in visit(model, batch, look, layers).items()}


def look(layer: nn.Module, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Statistics of one layer. Shape: -> (3, heads)"""
    q, k = queries_keys(layer, x)
    return summarise(q.float() * q.shape[-1] ** -0.5, k.float())


def summarise(q: Tensor, k: Tensor) -> Tensor:
    """Largest logit, largest attention, entropy, some queries at a time. Shape: (B, nh, N, hd) twice -> (3, nh)"""
    tops, peaks, entropies = [], [], []
    for part in q.split(QUERIES_AT_ONCE, dim=2):
        logits = part @ k.transpose(-2, -1)  # (B, nh, n, N)
        total = logits.logsumexp(-1)  # (B, nh, n)
        entropies.append((total - (torch.softmax(logits, -1) * logits).sum(-1)).sum(2))
        highest = logits.amax(-1)
        tops.append(highest.amax(-1))
        peaks.append((highest - total).exp().amax(-1))
    largest, sharpest = (torch.stack(parts).amax(0).mean(0) for parts in (tops, peaks))
    return torch.stack([largest, sharpest, torch.stack(entropies).sum(0).mean(0) / q.shape[2]])
