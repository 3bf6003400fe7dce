"""Attention logits, largest attention and entropy, which diverge first when training does (TDRL Fig. 3)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from isomorph.analysis.batches import Data, mean_over
from isomorph.analysis.layer_attention import LayerCall, capture_attention
from isomorph.errors import UserError
from isomorph.operations import AppliedAttention
from isomorph.surgery.calls import Inputs
from isomorph.surgery.site import Where

# Rows of the attention map that are computed at the same time.
_QUERIES_PER_CHUNK = 64


class LogitStats(NamedTuple):
    """Largest logit, largest attention and entropy (in nats) of every head, as means over images.

    Shape: (heads,) each

    >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    >>> bool((iso.analysis.logit_stats(vit, torch.randn(4, 3, 32, 32))["blocks.0.attn"].entropy > 0).all())
    True
    """

    max_logit: Tensor
    max_attention: Tensor
    entropy: Tensor


def logit_stats(model: nn.Module, data: Data, where: Where = "*") -> dict[str, LogitStats]:
    """Return the largest attention logit, the largest attention and the attention entropy of every layer, in eval mode.

    Logits are the inputs of the softmax: scaled, with masks and relative positions. Layers with a softmax over keys are
    measured; for gated attention (GPSA, GPSA2d) the content attention is. An entropy of 0 is one-hot attention, one
    of log(N) uniform attention. No attention map is stored.

    Shape: batch (B, C, H, W) or inputs by name, or a loader of such -> {name: LogitStats of (heads,) each}
    Source: TDRL Fig. 3
    Raises: UserError if the model has no such layer.

    >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    >>> tuple(iso.analysis.logit_stats(vit, torch.randn(4, 3, 32, 32))["blocks.0.attn"].max_logit.shape)
    (3,)
    """

    def measure(batch: Inputs) -> dict[str, Tensor]:
        stats = capture_attention(model, batch, _layer_stats, where)
        if not stats:
            raise UserError("the model has no attention layer whose queries and keys are known")
        return stats

    return {name: LogitStats(*values) for name, values in mean_over(model, data, measure).items()}


def _layer_stats(_: LayerCall, applied: AppliedAttention) -> Tensor | None:
    """Return the statistics of one layer, or None if its logits are not known. Shape: -> (3, heads)"""
    logits = applied.logits
    return None if logits is None else summarise_scores(logits.float())


def summarise_scores(scores: AppliedAttention) -> Tensor:
    """Return largest logit, largest attention and entropy, computed for some queries at a time. Shape: -> (3, nh)"""
    tops = []
    peaks = []
    entropies = []
    queries = scores.shape[0]
    for start in range(0, queries, _QUERIES_PER_CHUNK):
        logits = scores.rows(start, start + _QUERIES_PER_CHUNK)  # (B, nh, n, N)
        excludes_all = (logits == -torch.inf).all(-1, keepdim=True)  # (B, nh, n, 1)
        weights = torch.softmax(logits, -1).masked_fill(excludes_all, 0)
        entropies.append(torch.special.entr(weights).sum((2, 3)))
        tops.append(logits.amax((2, 3)))
        peaks.append(weights.amax((2, 3)))
    largest = torch.stack(tops).amax(0).mean(0)  # (nh,)
    sharpest = torch.stack(peaks).amax(0).mean(0)
    entropy = torch.stack(entropies).sum(0).mean(0) / queries
    return torch.stack([largest, sharpest, entropy])
