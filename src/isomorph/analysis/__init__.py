"""Measure attention, features and gating parameters of models; most results are tensors by layer name."""

from isomorph.analysis.attention import (
    attention_from,
    attention_maps,
    nonlocality,
    prefix_attention,
)
from isomorph.analysis.attention_logits import LogitStats, logit_stats
from isomorph.analysis.branches import branch_similarity
from isomorph.analysis.cka import CKA, cka, linear_cka, pool_features
from isomorph.analysis.evolution import feature_evolution, map_similarity
from isomorph.analysis.gating import (
    GatingHistory,
    attention_spans,
    centres,
    gammas,
    gates,
    track,
    track_gating,
)
from isomorph.analysis.map_statistics import attention_entropy, head_similarity
from isomorph.analysis.windows import attention_windows

__all__ = [
    "CKA",
    "GatingHistory",
    "LogitStats",
    "attention_entropy",
    "attention_from",
    "attention_maps",
    "attention_spans",
    "attention_windows",
    "branch_similarity",
    "centres",
    "cka",
    "feature_evolution",
    "gammas",
    "gates",
    "head_similarity",
    "linear_cka",
    "logit_stats",
    "map_similarity",
    "nonlocality",
    "pool_features",
    "prefix_attention",
    "track",
    "track_gating",
]


def __dir__() -> list[str]:
    return __all__
