"""Layouts of attention maps in timm's layers, and layers of timm that have no attention map."""

from torch import Tensor, nn

from isomorph.layers.map_layouts import to_standard_map
from isomorph.surgery.attention_classes import attention_form, names_of


def to_standard_layout(layer: nn.Module, tensor: Tensor) -> Tensor:
    """Return maps, queries or keys of any layer in the standard layout. Shape: -> (B, nh, ., .)"""
    form = attention_form(type(layer))
    layout, heads = (form.layout_of(layer), form.heads(layer)) if form else ("heads", 1)
    return to_standard_map(tensor, layout, heads)


_NO_FUSED_MAP = {"timm.layers.diff_attention.DiffAttention"}
"""Layers whose fused form subtracts two outputs, so that only their plain form has a map."""


def fused_form_has_no_map(layer: nn.Module) -> bool:
    """True if the fused form of the layer has no map."""
    return bool(_NO_FUSED_MAP.intersection(names_of(layer)))
