"""The rules: which module becomes which, with the function kept."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from timm.layers import Attention, to_2tuple
from torch import nn

from isomorph.errors import UserError
from isomorph.layers import GPSA2d, ViTGPSA
from isomorph.layers.refined_attention import PARTS
from isomorph.surgery.attachments import describe_attachments
from isomorph.surgery.field_checks import GATE, LOCALITY, check_choice, check_number
from isomorph.surgery.grid_hooks import attach_grid, check_grid_fields, with_model_grid
from isomorph.surgery.layer_checks import layer_mismatch, overridden_methods

NamedGating = Mapping[str, tuple[float, float]]

CONV_GATING: NamedGating = {"exact": (20.0, 15.0), "paper": (1.0, 1.0)}
"""(locality, gate) of the two named inits of ConvToGPSA. Exact: leaks of exp(-20) to the next tap and of 3e-7 to
content, within rounding of float32, with gradients still alive. Paper: on the verge of locality (T-CNN section 2)."""


ATTENTION_GATING: NamedGating = {"exact": (1.0, -15.0), "paper": (1.0, 1.0)}
"""(locality, gate) of the two named inits of AttentionToGPSA. Exact: all look at content, but for 3e-7."""


def initial_gating(
    init: str, locality: float | None, gate: float | None, named: NamedGating = CONV_GATING
) -> tuple[float, float]:
    """The locality and gate of an init, each overridden by a given value.

    Raises: UserError for an unknown init, or a value that is not within bounds.
    """
    check_choice("init", init, named)
    default_locality, default_gate = named[init]
    locality = default_locality if locality is None else locality
    gate = default_gate if gate is None else gate
    check_gating(locality, gate)
    return locality, gate


def check_gating(locality: float, gate: float) -> None:
    """Raises: UserError for a locality or a gate that is not within bounds."""
    check_number("locality", locality, LOCALITY)
    check_number("gate", gate, GATE)


@dataclass(frozen=True)
class ConvToGPSA:
    """A k x k convolution becomes gated positional self-attention with k*k heads (T-CNN eq. 4-7).

    Takes any nn.Conv2d with an odd square kernel, groups 1, dilation 1 and zero padding; any stride, bias or not.
    Grade of equality: a limit. `init="exact"` is the convolution within `atol`; `init="paper"` (locality 1, gate 1)
    is a starting point that needs fine-tuning: it keeps about .23 of each head on its tap. `locality` and `gate`
    override the init's values. `GPSA2d.to_conv()` is the way back while the gates are closed.
    """

    init: Literal["exact", "paper"] = "exact"
    locality: float | None = None
    gate: float | None = None

    atol: ClassVar[float] = 1e-3
    kind: ClassVar[type[nn.Module]] = nn.Conv2d

    def __post_init__(self) -> None:
        initial_gating(self.init, self.locality, self.gate)

    def reason(self, module: nn.Module) -> str | None:
        """Why the module cannot be rebuilt, or None."""
        if not isinstance(module, nn.Conv2d):
            return f"{type(module).__name__} is not an nn.Conv2d"
        if reason := layer_mismatch(module, nn.Conv2d, "nn.Conv2d"):
            return reason
        (kh, kw) = module.kernel_size
        if kh != kw:
            return f"the {kh}x{kw} kernel is not square"
        if kh % 2 == 0:
            return f"the {kh}x{kw} kernel is even: no key lies in its middle"
        if module.groups != 1:
            return f"groups={module.groups}, only 1 can share one value projection"
        if module.dilation != (1, 1):
            return f"dilation={module.dilation}, only 1 keeps the taps on neighbouring keys"
        if module.padding_mode != "zeros":
            return f"padding_mode={module.padding_mode!r}, only 'zeros' is attention over zero keys"
        return None

    def accepts(self, module: nn.Module) -> bool:
        return self.reason(module) is None

    @torch.no_grad()
    def build(self, module: nn.Module) -> GPSA2d:
        """Raises: UserError with the reason when the module is not accepted."""
        if reason := self.reason(module):
            raise UserError(f"ConvToGPSA cannot rebuild it: {reason}")
        assert isinstance(module, nn.Conv2d)
        named = {"same": module.kernel_size[0] // 2, "valid": 0}
        gpsa = GPSA2d(
            module.in_channels,
            module.out_channels,
            module.kernel_size[0],
            to_2tuple(module.stride),
            named[module.padding] if isinstance(module.padding, str) else to_2tuple(module.padding),
            bias=module.bias is not None,
        )
        gpsa.set_dials(*initial_gating(self.init, self.locality, self.gate))
        gpsa.to(module.weight.dtype)
        gpsa.weight = nn.Parameter(module.weight.detach().clone())
        if module.bias is not None:
            gpsa.bias = nn.Parameter(module.bias.detach().clone())
        return gpsa


def attention_mismatch(module: nn.Module) -> str | None:
    """Why a module does not compute what timm's Attention does with its weights, or None."""
    if not isinstance(module, Attention):
        return f"{type(module).__name__} is not timm's Attention"
    if methods := " and ".join(overridden_methods(module, Attention)):
        return f"{type(module).__name__} does not compute what timm's Attention does: it has its own {methods}"
    if extra := [name for name in (*module._modules, *module._parameters, *module._buffers) if name not in PARTS]:
        return f"it holds {', '.join(extra)} besides the parts of timm's Attention, which would be lost"
    if not (isinstance(module.qkv, nn.Linear) and isinstance(module.proj, nn.Linear)):
        kinds = f"{type(module.qkv).__name__} and {type(module.proj).__name__}"
        return f"its projections are {kinds}, not linear layers; recast the attention first, or fuse it"
    if type(module.attn_drop) is not nn.Dropout:
        return f"its attn_drop is a {type(module.attn_drop).__name__}, not an nn.Dropout"
    if module.fused_attn and (found := describe_attachments(module.attn_drop)):
        return f"its attn_drop has {found}, which fused attention never calls; remove them first"
    if not module.qkv.weight.is_floating_point():
        return f"the weight of its qkv is of {module.qkv.weight.dtype}, not of a floating-point type"
    if not module.fused_attn and not math.isclose(module.scale, module.head_dim**-0.5):
        return f"its scale {module.scale:g} is not {module.head_dim**-0.5:g}, which its heads of {module.head_dim} have"
    return None


def projection_mismatch(module: Attention, name: str) -> str | None:
    """Why the weights of a projection cannot be taken apart, or None."""
    reason = layer_mismatch(getattr(module, name), nn.Linear, "nn.Linear")
    return f"of its {name}: {reason}" if reason else None


@dataclass(frozen=True)
class AttentionToGPSA:
    """A ViT's attention becomes gated positional self-attention: queries, keys and output projection are kept.

    Takes timm's Attention (any number of heads, biases or not, q and k norms). Its qkv is taken apart and has to be an
    nn.Linear as it comes; its other parts are carried over, whatever they are. `init="exact"` keeps the values too and
    opens the gates to content: the same function within `atol`, and places to be learnt. `init="paper"` is ConViT's
    birth: values the identity, locality 1, gate 1; for networks that will be trained. `locality` and `gate` override
    the init's. Class and register tokens have no place: they look, and are looked at, by content only.
    `ViTGPSA.to_attention()` is the way back while the gates are open.

    `grid_size` and `prefix_tokens` are read off the model (its `patch_embed`) where they are None, and the grid then
    follows every image.
    """

    init: Literal["exact", "paper"] = "exact"
    locality: float | None = None
    gate: float | None = None
    grid_size: tuple[int, int] | None = None
    prefix_tokens: int | None = None

    atol: ClassVar[float] = 1e-4
    kind: ClassVar[type[nn.Module]] = Attention

    def __post_init__(self) -> None:
        initial_gating(self.init, self.locality, self.gate, ATTENTION_GATING)
        check_grid_fields(self)

    def within(self, model: nn.Module) -> "AttentionToGPSA":
        return with_model_grid(self, model)

    def attach(self, model: nn.Module) -> None:
        attach_grid(self, model)

    def reason(self, module: nn.Module) -> str | None:
        """Why the module cannot be rebuilt, or None."""
        if reason := attention_mismatch(module):
            return reason
        assert isinstance(module, Attention)
        if module.gate is not None or type(module.norm) is not nn.Identity:
            return "its output is gated or normalised before the projection"
        if module.attn_drop.p:
            return f"it drops {module.attn_drop.p} of its map, which is never formed here"
        if reason := projection_mismatch(module, "qkv"):
            return reason
        if not module.qkv.in_features == module.attn_dim == module.proj.out_features:
            return f"{module.qkv.in_features} channels become {module.attn_dim}, then {module.proj.out_features}"
        if self.grid_size is None or self.prefix_tokens is None:
            return "the grid of its tokens is unknown; give AttentionToGPSA grid_size=(height, width) and prefix_tokens"
        return None

    def accepts(self, module: nn.Module) -> bool:
        return self.reason(module) is None

    @torch.no_grad()
    def build(self, module: nn.Module) -> ViTGPSA:
        """Raises: UserError with the reason when the module is not accepted."""
        if reason := self.reason(module):
            raise UserError(f"AttentionToGPSA cannot rebuild it: {reason}")
        assert isinstance(module, Attention)
        assert self.grid_size is not None
        qkv, dim = module.qkv, module.qkv.in_features
        bias = qkv.bias is not None
        arguments: dict[str, Any] = dict(qkv_bias=bias, prefix_tokens=self.prefix_tokens)
        gpsa = ViTGPSA(dim, module.num_heads, self.grid_size, **arguments).to(qkv.weight.device, qkv.weight.dtype)
        gpsa.set_dials(*initial_gating(self.init, self.locality, self.gate, ATTENTION_GATING))
        for name, tensor in qkv.named_parameters():
            qk, v = tensor.split([2 * dim, dim])
            gpsa.qk.get_parameter(name).copy_(qk)
            if self.init == "exact":
                gpsa.v.get_parameter(name).copy_(v)
        if self.init == "paper" and bias:
            nn.init.zeros_(gpsa.v.bias)
        gpsa.qk.requires_grad_(qkv.weight.requires_grad)
        gpsa.v.requires_grad_(qkv.weight.requires_grad)
        for name in ("proj", "proj_drop", "q_norm", "k_norm"):
            setattr(gpsa, name, copy.deepcopy(getattr(module, name)))
        return gpsa


GATED_RULES: dict[str, type[ConvToGPSA] | type[AttentionToGPSA]] = {
    "ConvToGPSA": ConvToGPSA,
    "AttentionToGPSA": AttentionToGPSA,
}
"""Rules that end in gated attention: they share init, locality and gate."""
