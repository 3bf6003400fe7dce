"""Rule that replaces a ViT's attention by refined attention (Refiner)."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from timm.layers import Attention
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import UserError
from isomorph.layers import (
    ExpandedAttention,
    LocalAttention,
    RefinedAttention,
    RefinedMap,
    SpatialAttention,
)
from isomorph.layers.attention_base import like_attention
from isomorph.layers.grid import GridSize
from isomorph.layers.refined import refiner
from isomorph.surgery.attention_layers import facts_of
from isomorph.surgery.edited_attention import edit_map, edit_reason
from isomorph.surgery.grid_hooks import AnyAttentionRule
from isomorph.surgery.plain_layers import describe_attachments, projection_mismatch
from isomorph.surgery.rule import KERNEL, RATIO, check_bool, check_choice, check_int, register_rule
from isomorph.surgery.rules.gated_attention import attention_mismatch
from isomorph.surgery.site import Site

# Values of the field `span`: what the kernel slides over.
Span = Literal["map", "spatial", "row+column"]

# Layer of each refiner that is not run by `RefinedAttention`.
_LAYER_OF: dict[type[nn.Module], type[RefinedAttention]] = {
    refiner.MapConvolution: LocalAttention,
    refiner.Expansion: ExpandedAttention,
    refiner.SpatialRefiner: SpatialAttention,
}


@register_rule
@dataclass(frozen=True)
class AttentionToRefined(AnyAttentionRule):
    """Replace the attention of a ViT by refined attention: the same weights, and a refiner after the softmax (Refiner).

    Accepts timm's Attention with any number and width of heads, norms, gate and dropout. The attention maps are
    expanded to `ratio` maps for every head, each convolved with a `kernel` x `kernel` kernel, then reduced to one for
    every head. `ratio=1, kernel=1` is talking heads; `ratio=0` convolves each head's map alone, without ever forming
    it; `reduce=False` keeps all maps. `to_attention()`, or `iso.revert`, converts back while the layer still computes
    plain attention.

    Attention of other classes that forms a map over positions, in windows or on pooled keys too, keeps its class and
    gets a `RefinedMap` after its softmax: the map is formed, which fused attention avoids. It needs `reduce=True`.
    Regions that a mask separates, as in shifted windows, are convolved separately.

    `grid_size` and `prefix_tokens` are for `span="spatial"`; where None they are read from the model.

    Source: Refiner section 3.
    Raises: UserError for a field out of range; from `recast`, for an attention layer that it does not accept.

    Example:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval()
        >>> refined = iso.recast(vit, iso.AttentionToRefined(ratio=2), where="blocks.*.attn")
        >>> type(refined.blocks[0].attn).__name__
        'RefinedAttention'
        >>> iso.verify(vit, refined, torch.randn(1, 3, 32, 32)).passed
        True
    """

    ratio: int = 3
    """Attention maps for every head: 1 is talking heads, 0 convolves each head's map alone."""

    kernel: int = 3
    """Side of the square kernel on the attention maps, odd; 1 for no convolution."""

    init: Literal["same-function", "paper"] = "same-function"
    """same-function: the layer computes what the attention computed; paper: random refiner, to be trained."""

    reduce: bool = True
    """Reduce the maps to one for every head after the convolution."""

    span: Span = "map"
    """The kernel slides over the attention map (map), over the image (spatial), or as a row and a column of the map."""

    recompute: bool = False
    """Compute the maps again in the backward pass instead of storing them: less memory, more time."""

    grid_size: GridSize | None = None
    """Height and width of the grid of tokens, for span="spatial"; by default the model's."""

    prefix_tokens: int | None = None
    """Number of class and register tokens before the grid, for span="spatial"; by default the model's."""

    atol = 1e-4

    @property
    def keeps_function(self) -> bool:
        """True for the same-function initialisation."""
        return self.init == "same-function"

    def __post_init__(self) -> None:
        check_int("ratio", self.ratio, RATIO, " (1: talking heads, 0: no expansion)")
        check_int("kernel", self.kernel, KERNEL, ", and odd (1: no convolution)")
        check_choice("span", self.span, ("map", "spatial", "row+column"))
        check_choice("init", self.init, ("same-function", "paper"))
        for name in ("reduce", "recompute"):
            check_bool(name, getattr(self, name))
        self.check_grid_fields()
        if self.kernel % 2 == 0:
            raise UserError(
                f"kernel {self.kernel} must be odd, from {KERNEL[0]} to {KERNEL[1]} (1: no convolution)"
            )
        if self.ratio == 0 and (self.span != "map" or not self.reduce):
            argument = f"span={self.span!r}" if self.span != "map" else "reduce=False"
            raise UserError(
                f"{argument} needs a ratio of at least 1, and ratio is 0; give ratio=1 for talking heads"
            )
        if self.span != "map" and not self.reduce:
            raise UserError(
                f"span={self.span!r} needs reduce=True; give span='map' with reduce=False"
            )

    def reason(self, site: Site) -> str | None:
        """Return why the module cannot be recast, or None if it can."""
        if self._edits_map(site):
            return edit_reason(site.module) or self._edit_mismatch(site.module)
        reason = attention_mismatch(site.module)
        if not reason and self.ratio == 0:
            reason = _attached_to_dropout(site.module)
        if not reason and not self.reduce:
            reason = _expansion_mismatch(site.module)
        if not reason and self.span == "spatial":
            reason = self.grid_reason(site)
        return reason

    def _edits_map(self, site: Site) -> bool:
        """True if the layer keeps its class and gets an edit of its map."""
        if not isinstance(site.module, Attention):
            return True
        if self.span != "spatial":
            return False
        grid = self.grid_at(site)
        return grid.from_image and grid.size is None

    def _edit_mismatch(self, module: nn.Module) -> str | None:
        """Return why the map of a layer that is not timm's Attention cannot be refined, or None."""
        name = type(module).__name__
        if not self.reduce:
            return f"reduce=False needs a projection of all maps, which only timm's Attention gets, not {name}"
        if self.recompute and any(isinstance(part, _BatchNorm) for part in module.modules()):
            return f"recompute=True would count each batch twice in the BatchNorm of {name}"
        facts = facts_of(module)
        return facts.grid_reason(module) if facts and self.span == "spatial" else None

    @torch.no_grad()
    def build(self, site: Site) -> nn.Module:
        """Return a refined layer, or the layer with a `RefinedMap`. Raises: UserError if it is not accepted."""
        self.check(site)
        if self._edits_map(site):
            grid = self.grid_at(site)
            return edit_map(
                site.module, self._new_edit, grid.size, grid.prefix_tokens, self.recompute
            )
        options: dict[str, Any] = {}
        if self.span == "spatial":
            grid = self.grid_at(site)
            options = {"grid_size": grid.size, "prefix_tokens": grid.prefix_tokens}
        refined = like_attention(site.module, self.new_layer, **options)
        if isinstance(refined, ExpandedAttention):
            refined.expand_projection()
        return refined

    def _new_edit(self, heads: int, device: Any, dtype: Any) -> RefinedMap:
        return RefinedMap(self._refiner(heads, device, dtype))

    def _refiner(self, heads: int, device: Any, dtype: Any) -> Any:
        """Return the refiner of a layer with this number of heads."""
        form: dict[str, Any] = {
            "kernel_size": self.kernel,
            "init": self.init,
            "device": device,
            "dtype": dtype,
        }
        if self.ratio == 0:
            return refiner.MapConvolution(heads, **form)
        if not self.reduce:
            return refiner.Expansion(heads, self.ratio, **form)
        if self.span == "spatial":
            return refiner.SpatialRefiner(heads, self.ratio, **form)
        kernel = refiner.CrossKernel if self.span == "row+column" else refiner.SquareKernel
        return refiner.Refiner(heads, self.ratio, local=kernel, **form)

    def new_layer(
        self, *, device: Any = None, dtype: Any = None, **arguments: Any
    ) -> RefinedAttention:
        """Return a refined layer from the arguments of timm's Attention, and for span="spatial" of a grid."""
        arguments |= {"device": device, "dtype": dtype, "recompute": self.recompute}
        refine = self._refiner(arguments["num_heads"], device, dtype)
        if self.span == "spatial":
            arguments.setdefault("grid_size", self.grid_size or (14, 14))
            arguments.setdefault("prefix_tokens", self.prefix_tokens or 0)
        layer = _LAYER_OF.get(type(refine), RefinedAttention)
        return layer(refine=refine, **arguments)


def _attached_to_dropout(module: Any) -> str | None:
    attachments = describe_attachments(module.attn_drop)
    if attachments is None:
        return None
    return f"its attn_drop has {attachments}, which ratio=0 never calls; remove them first"


def _expansion_mismatch(module: Any) -> str | None:
    """Return why the projection of a layer cannot read more maps than it has heads, or None."""
    reason = projection_mismatch(module, "proj")
    if not reason and (module.gate is not None or type(module.norm) is not nn.Identity):
        reason = "its output is gated or normalised, which reduce=False does not support"
    return reason
