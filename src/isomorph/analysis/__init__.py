"""(model, batch) -> tensors by layer name."""

from isomorph.analysis.attention import attention_maps, centres, gates, looks, nonlocality, spans

__all__ = ["attention_maps", "centres", "gates", "looks", "nonlocality", "spans"]
