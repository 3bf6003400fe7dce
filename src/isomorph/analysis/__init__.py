"""(model, batch) -> tensors by layer name."""

from isomorph.analysis.attention import attention_maps, centres, gates, looks, nonlocality, spans
from isomorph.analysis.evolution import feature_evolution, head_similarity, map_similarity
from isomorph.analysis.logits import LogitStats, logit_stats
from isomorph.analysis.similarity import branch_similarity, linear_cka

__all__ = [
    "LogitStats",
    "attention_maps",
    "branch_similarity",
    "centres",
    "feature_evolution",
    "gates",
    "head_similarity",
    "linear_cka",
    "logit_stats",
    "looks",
    "map_similarity",
    "nonlocality",
    "spans",
]
