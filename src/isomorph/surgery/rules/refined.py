"""The rule that refines attention: a ViT's maps are expanded, convolved and reduced before they weigh the values."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from timm.layers import Attention
from torch import nn

from isomorph.errors import UserError
from isomorph.layers import ExpandedAttention, LocalAttention, RefinedAttention, SpatialAttention
from isomorph.layers.headed_attention import placement
from isomorph.layers.refined_attention import carry_parts, shape_arguments
from isomorph.layers.refiner import CrossKernel, Expansion, MapConvolution, Refiner, SpatialRefiner, SquareKernel
from isomorph.surgery.attachments import describe_attachments
from isomorph.surgery.field_checks import KERNEL, RATIO, check_bool, check_choice, check_int
from isomorph.surgery.grid_hooks import attach_grid, check_grid_fields, with_model_grid
from isomorph.surgery.rules.gated import attention_mismatch, projection_mismatch

Span = Literal["map", "spatial", "row+column"]


def _check_form(ratio: int, kernel: int, reduce: bool, span: str, init: str) -> None:
    """Raises: UserError for a refinement that the layers do not have."""
    check_int("ratio", ratio, RATIO, " (1: talking heads, 0: no expansion)")
    check_bool("reduce", reduce)
    check_int("kernel", kernel, KERNEL, ", and odd (1: no convolution)")
    if kernel % 2 == 0:
        raise UserError(f"kernel {kernel} must be odd, from {KERNEL[0]} to {KERNEL[1]} (1: no convolution)")
    check_choice("span", span, ("map", "spatial", "row+column"))
    check_choice("init", init, ("same-function", "paper"))
    if ratio == 0 and (span != "map" or not reduce):
        given = f"span={span!r}" if span != "map" else "reduce=False"
        raise UserError(f"{given} belongs to an expansion; give a ratio, 1 for talking heads")
    if span != "map" and not reduce:
        raise UserError("without reduction there is span='map' only")


@dataclass(frozen=True)
class AttentionToRefined:
    """A ViT's attention becomes refined attention (Refiner): same weights, and a refiner between softmax and values.

    Takes timm's Attention as it comes (any heads and head width, norms, gate, dropout). `ratio` maps for every head,
    each convolved by a `kernel` x `kernel` kernel, then reduced to one a head; `ratio=0` convolves each head's map
    alone, without ever forming it; `ratio=1, kernel=1` is talking heads. `reduce=False` keeps all maps. `span`: the
    kernel runs over the map, over the image (spatial), or is a row and a column. `recompute` trades time for memory.

    `init="same-function"` changes nothing at birth; `"paper"` draws the refiner, for training from scratch.
    `to_attention()` is the way back while the layer still is plain attention. `grid_size` and `prefix_tokens` are for
    span="spatial" and read off the model where they are None.
    """

    ratio: int = 3
    kernel: int = 3
    init: Literal["same-function", "paper"] = "same-function"
    reduce: bool = True
    span: Span = "map"
    recompute: bool = False
    grid_size: tuple[int, int] | None = None
    prefix_tokens: int | None = None

    atol: ClassVar[float] = 1e-4
    kind: ClassVar[type[nn.Module]] = Attention

    def __post_init__(self) -> None:
        _check_form(self.ratio, self.kernel, self.reduce, self.span, self.init)
        check_bool("recompute", self.recompute)
        check_grid_fields(self)

    def within(self, model: nn.Module) -> "AttentionToRefined":
        return with_model_grid(self, model) if self.span == "spatial" else self

    def attach(self, model: nn.Module) -> None:
        if self.span == "spatial":
            attach_grid(self, model)

    def reason(self, module: nn.Module) -> str | None:
        """Why the module cannot be rebuilt, or None."""
        if reason := attention_mismatch(module):
            return reason
        assert isinstance(module, Attention)
        if self.ratio == 0 and (found := describe_attachments(module.attn_drop)):
            return f"its attn_drop has {found}, and ratio=0 forms no map to call it on"
        if not self.reduce and (reason := projection_mismatch(module, "proj")):
            return reason
        if not self.reduce and (module.gate is not None or type(module.norm) is not nn.Identity):
            return "its output is gated or normalised, which reduce=False would have to widen"
        if self.span == "spatial" and None in (self.grid_size, self.prefix_tokens):
            return "the grid of its tokens is unknown; give AttentionToRefined grid_size=(height, width), prefix_tokens"
        return None

    def accepts(self, module: nn.Module) -> bool:
        return self.reason(module) is None

    @torch.no_grad()
    def build(self, module: nn.Module) -> RefinedAttention:
        """Raises: UserError with the reason when the module is not accepted."""
        if reason := self.reason(module):
            raise UserError(f"AttentionToRefined cannot rebuild it: {reason}")
        assert isinstance(module, Attention)
        refined = self.layer(**shape_arguments(module))
        proj = refined.proj
        carry_parts(module, refined)
        if isinstance(refined, ExpandedAttention):
            refined.proj = proj
            refined.expand_projection(module.proj)
        return refined

    def layer(self, **arguments: Any) -> RefinedAttention:
        """A new layer of this form; arguments are timm's Attention's."""
        heads = arguments["num_heads"]
        form: dict[str, Any] = dict(kernel_size=self.kernel, init=self.init, **placement(arguments))
        arguments = dict(recompute=self.recompute, **arguments)
        if self.ratio == 0:
            return LocalAttention(refine=MapConvolution(heads, **form), **arguments)
        form["ratio"] = self.ratio
        if not self.reduce:
            return ExpandedAttention(refine=Expansion(heads, **form), **arguments)
        if self.span == "spatial":
            place: dict[str, Any] = dict(grid_size=self.grid_size or (14, 14), prefix_tokens=self.prefix_tokens or 0)
            return SpatialAttention(refine=SpatialRefiner(heads, **form), **place, **arguments)
        form["local"] = CrossKernel if self.span == "row+column" else SquareKernel
        return RefinedAttention(refine=Refiner(heads, **form), **arguments)
