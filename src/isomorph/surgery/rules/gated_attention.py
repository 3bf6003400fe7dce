"""Rule that replaces the attention of a ViT by gated positional self-attention (GPSA)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timm.layers import Attention
from torch import nn

from isomorph.layers import GatedMap, ViTGPSA
from isomorph.layers.attention_base import ATTENTION_PARTS, copy_parts, has_usual_scale
from isomorph.layers.grid import GridSize
from isomorph.layers.modes import match_requires_grad
from isomorph.surgery.attention_layers import gating_reason
from isomorph.surgery.edited_attention import edit_map, edit_reason
from isomorph.surgery.grid_hooks import AnyAttentionRule
from isomorph.surgery.plain_layers import (
    class_name,
    describe_attachments,
    describe_stand_in,
    override_reason,
    projection_mismatch,
)
from isomorph.surgery.rule import register_rule
from isomorph.surgery.rules.gated import GatedRule, NamedGating
from isomorph.surgery.site import Site

# Initial gating parameters of AttentionToGPSA. Exact: all but 3e-7 of the attention is by content; near: all but 0.7%.
ATTENTION_GATING: NamedGating = {"exact": (1.0, -15.0), "near": (1.0, -5.0), "paper": (1.0, 1.0)}


def attention_mismatch(module: nn.Module) -> str | None:
    """Return how a module differs from timm's Attention, or None if it computes the same from its weights."""
    if not isinstance(module, Attention):
        return f"{type(module).__name__} is not timm's Attention"
    reason = override_reason(module, Attention)
    if reason:
        return reason
    names = (*module._modules, *module._parameters, *module._buffers)
    extra = [name for name in names if name not in ATTENTION_PARTS]
    if extra:
        return (
            f"it has {', '.join(extra)} besides the parts of timm's Attention, which would be lost"
        )
    for name in ("qkv", "proj"):
        projection: Any = getattr(module, name)
        if isinstance(projection, nn.Linear):
            continue
        stand_in = describe_stand_in(projection)
        if stand_in:
            return f"its {name} {stand_in}"
        kind = class_name(projection)
        advice = "recast the attention before its projections; or first iso.fuse a pyramid, iso.revert other layers"
        return f"its {name} is a {kind}, not an nn.Linear; {advice}"
    if type(module.attn_drop) is not nn.Dropout:
        return f"its attn_drop is a {type(module.attn_drop).__name__}, not an nn.Dropout"
    attachments = describe_attachments(module.attn_drop)
    if module.fused_attn and attachments:
        return (
            f"its attn_drop has {attachments}, which fused attention never calls; remove them first"
        )
    if not module.qkv.weight.is_floating_point():
        return f"its qkv.weight has dtype {module.qkv.weight.dtype}, which is not a floating-point type"
    if not isinstance(module.scale, int | float):
        return f"its scale is a {type(module.scale).__name__}, not a number"
    return None


@register_rule
@dataclass(frozen=True)
class AttentionToGPSA(GatedRule, AnyAttentionRule):
    """Replace the attention of a ViT by gated positional self-attention, keeping its projections (ConViT).

    Accepts timm's Attention (any number of heads, with or without biases and q and k norms). Its qkv is split into
    query and key, and value; its other parts are carried over, whatever they are. Attention of other classes that forms
    a map over positions, in windows or on pooled keys too, and timm's Attention with further parts (a gate, a norm
    before the projection, dropout of the map, a qkv that is not a plain nn.Linear) keep their class and get a
    `GatedMap` after their softmax: the map is formed, which fused attention avoids, and the values stay as they are
    with both inits.

    `init="exact"` keeps the values and opens the gates to content: the same function within `atol`, with positional
    attention to be learnt; in a short training its gates stay where they are. `init="near"` puts 0.7% of the attention
    by position, is equal within 0.05 of the largest output, and its gates move from the first steps. `init="paper"` is
    ConViT's initialisation (identity values, locality 1, gate 1), for networks that will be trained.

    Class and register tokens have no grid position: attention from and to them is by content only. A class token that
    is the only query (CaiT, attention pooling) is in the middle of the image.
    `to_attention()`, or `iso.revert`, converts back while the gates are open to content.

    Where `grid_size` or `prefix_tokens` is None it is read from the model; the grid then follows the size of every
    image.

    Source: ConViT section 3.
    Raises: UserError for a field out of range; from `recast`, for an attention layer that it does not accept.

    Example:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval()
        >>> gpsa = iso.recast(vit, iso.AttentionToGPSA(), where="blocks.0.attn")
        >>> type(gpsa.blocks[0].attn).__name__
        'ViTGPSA'
        >>> iso.verify(vit, gpsa, torch.randn(1, 3, 32, 32)).passed
        True
    """

    grid_size: GridSize | None = None
    """Height and width of the grid of tokens; by default the model's."""

    prefix_tokens: int | None = None
    """Number of class and register tokens before the grid; by default the model's."""

    atol = 1e-4
    named_gating = ATTENTION_GATING

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_grid_fields()

    def reason(self, site: Site) -> str | None:
        """Return why the module cannot be recast, or None if it can."""
        if not self._edits_map(site):
            return self.grid_reason(site)
        return edit_reason(site.module) or gating_reason(site.module)

    def _edits_map(self, site: Site) -> bool:
        """True if the layer gets an edit of its map: `ViTGPSA` does not compute what it does."""
        module = site.module
        if attention_mismatch(module) or projection_mismatch(module, "qkv"):
            return True
        if module.gate is not None or type(module.norm) is not nn.Identity or module.attn_drop.p:
            return True
        if not has_usual_scale(module):
            return True
        if not module.qkv.in_features == module.attn_dim == module.proj.out_features:
            return True
        grid = self.grid_at(site)
        return grid.from_image and grid.size is None

    @torch.no_grad()
    def build(self, site: Site) -> nn.Module:
        """Return a ViTGPSA, or the layer with a `GatedMap`. Raises: UserError if the module is not accepted."""
        self.check(site)
        module = site.module
        grid = self.grid_at(site)
        locality, gate = self.gating()
        if self._edits_map(site):
            make = partial(GatedMap, locality=locality, gate=gate)
            return edit_map(module, make, grid.size, grid.prefix_tokens)
        assert grid.size is not None  # by `reason`, and so is the other
        assert grid.prefix_tokens is not None
        qkv = module.qkv
        dim = qkv.in_features
        gpsa = ViTGPSA(dim, module.num_heads, grid.size, qkv.bias is not None, grid.prefix_tokens)
        gpsa.to(qkv.weight.device, qkv.weight.dtype).set_gating(locality, gate)
        for name, tensor in qkv.named_parameters():
            qk, v = tensor.split([2 * dim, dim])
            gpsa.qk.get_parameter(name).copy_(qk)
            if self.init != "paper":
                gpsa.v.get_parameter(name).copy_(v)
            elif name == "bias":
                gpsa.v.bias.zero_()
        for part in (gpsa.qk, gpsa.v):
            match_requires_grad(part, qkv)
        copy_parts(module, gpsa, ("proj", "proj_drop", "q_norm", "k_norm"))
        return gpsa
