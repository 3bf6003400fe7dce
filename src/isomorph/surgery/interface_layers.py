"""Facts about attention layers of transformers, which leave their map to a function that their configuration names."""

from typing import Any

_DROPOUTS = ("dropout", "attention_dropout", "attn_dropout", "dropout_prob")
"""Attributes in which layers of transformers have the dropout of their map, a number or a module."""
_HEADS = ("num_attention_heads", "num_heads", "n_heads")
"""Attributes of layers and configurations for the number of heads."""
_IMAGE_FIELDS = ("image_size", "patch_size", "num_channels")
"""Fields of the configurations of vision models."""


def interface_heads(layer: Any) -> int:
    """Return the number of heads of an attention layer of transformers."""
    owners = (layer, layer.config)
    return next(getattr(owner, name) for owner in owners for name in _HEADS if hasattr(owner, name))


def interface_dropout(layer: Any) -> float:
    """Return the dropout of the map of an attention layer of transformers."""
    given = next((getattr(layer, name) for name in _DROPOUTS if hasattr(layer, name)), 0.0)
    return float(getattr(given, "p", given))


def interface_reason(layer: Any) -> str | None:
    """Return why the map of an attention layer of transformers cannot be edited, or None if it can."""
    name, config = type(layer).__name__, getattr(layer, "config", None)
    if not hasattr(config, "_attn_implementation"):
        return f"{name} has no config that says how its attention is computed"
    if any(getattr(owner, field, False) for owner in (layer, config) for field in ("is_causal", "is_decoder")):
        return f"{name} is causal: an edited map mixes neighbouring queries, so that a token would see later ones"
    if "Cross" in name:
        return f"{name} attends to other tokens than those of its queries"
    if not any(hasattr(owner, field) for owner in (layer, config) for field in _HEADS):
        return f"{name} does not say how many heads it has"
    return None


def interface_grid_reason(layer: Any) -> str | None:
    """Return why the keys of an attention layer of transformers have no positions on a grid, or None if they do."""
    has_image = any(hasattr(layer.config, name) for name in _IMAGE_FIELDS)
    return None if has_image else "its tokens are words in a row, which is not a grid"
