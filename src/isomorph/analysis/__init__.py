"""(model, batch) -> tensors by layer name."""

from isomorph.analysis.attention import attention_maps, gates, looks, spans

__all__ = ["attention_maps", "gates", "looks", "spans"]
