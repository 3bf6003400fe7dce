"""Rule that replaces convolutions by gated positional self-attention (GPSA)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from timm.layers import to_2tuple
from torch import nn

from isomorph.errors import UserError
from isomorph.layers import GPSA2d, PositionalConv2d, WindowGPSA2d
from isomorph.surgery.plain_layers import (
    conv_padding,
    layer_mismatch,
    plain_layer,
    with_same_padding,
)
from isomorph.surgery.rule import (
    GATE,
    LOCALITY,
    WINDOW,
    Rule,
    check_choice,
    check_int,
    check_number,
    register_rule,
)
from isomorph.surgery.site import Site

# (locality, gate) for every value of `init`; the gate is the logit, before the sigmoid.
NamedGating = Mapping[str, tuple[float, float]]

# Initial gating parameters of ConvToGPSA.
#
# Exact: exp(-20) of the attention leaks to the next tap and 3e-7 to content, within rounding of float32, with gradients
# still alive. Near: 0.03% to content, so that gates move from the first steps. Paper: the "verge of locality" of T-CNN
# section 2.
CONV_GATING: NamedGating = {"exact": (20.0, 15.0), "near": (20.0, 8.0), "paper": (1.0, 1.0)}

# Largest difference with `init="near"`, relative to the largest output: what these shares add up to.
NEAR_TOLERANCE = 0.05


def check_gating(locality: float, gate: float) -> None:
    """Raises: UserError for values out of bounds."""
    check_number("locality", locality, LOCALITY)
    check_number("gate", gate, GATE)


GatedLayer = GPSA2d | PositionalConv2d

# Layer for every value of `content` of ConvToGPSA.
CONTENT: Mapping[str, type[GatedLayer]] = {
    "global": GPSA2d,
    "window": WindowGPSA2d,
    "none": PositionalConv2d,
}


@dataclass(frozen=True)
class GatedRule(Rule):
    """A rule for gated attention; `named_gating` has the locality and gate of every value of `init`."""

    named_gating: ClassVar[NamedGating]

    init: Literal["exact", "near", "paper"] = "exact"
    """exact: the layer computes what the module computed; near: the same within 0.05 of the largest output, with gates
    that move from the first steps; paper: the initialisation of the paper, to be trained."""

    locality: float | None = None
    """Sharpness of each head's attention around its centre, above 0; by default that of init."""

    gate: float | None = None
    """Logit of the share of position in the attention, which iso.gates returns; by default that of init."""

    @property
    def keeps_function(self) -> bool:
        """True for the initialisations exact and near with their own locality and gate."""
        return self.init != "paper" and self.locality is None and self.gate is None

    @property
    def accepted_difference(self) -> float:
        return NEAR_TOLERANCE if self.init == "near" else self.atol

    def __post_init__(self) -> None:
        check_choice("init", self.init, self.named_gating)
        check_gating(*self.gating())

    def gating(self) -> tuple[float, float]:
        """Return the initial locality and gate of every head."""
        locality, gate = self.named_gating[self.init]
        if self.locality is not None:
            locality = self.locality
        if self.gate is not None:
            gate = self.gate
        return locality, gate


@register_rule
@dataclass(frozen=True)
class ConvToGPSA(GatedRule):
    """Replace a k x k convolution by gated positional self-attention with k*k heads (T-CNN eq. 4-7).

    Accepts any nn.Conv2d with an odd square kernel, dilation=1 and zero padding, with any stride and groups (depthwise
    too: groups share the heads), with or without bias. With `init="exact"` the layer computes the convolution within
    `atol`; with `init="near"` within 0.05 of the largest output, with gates that move from the first steps; with
    `init="paper"` (locality 1, gate 1) each head puts about 0.23 of its attention on its tap, and the
    model needs fine-tuning.
    `GPSA2d.to_conv()`, or `iso.revert`, converts back while the gates are closed.

    `content` says where heads attend by content. With "global" (`GPSA2d`) cost grows with the square of the number of
    positions: use it for late stages. With "window" (`WindowGPSA2d`) and "none"
    (`PositionalConv2d`: a convolution whose taps can move and widen) it is linear, for every stage.

    Source: T-CNN section 2.
    Raises: UserError for a field out of range; from `recast`, for a convolution that it does not accept.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20").eval()
        >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.*.conv?")
        >>> type(tcnn.layer3[0].conv1).__name__
        'GPSA2d'
        >>> iso.verify(cnn, tcnn, torch.randn(1, 3, 32, 32)).passed
        True
    """

    content: Literal["global", "window", "none"] = "global"
    """What heads attend to by content: the whole feature map (global), a window around the query, or nothing, so that
    only position is left."""

    window: int | None = None
    """Height and width of the window in positions, odd; by default 7. For content="window"."""

    atol = 1e-3
    kind = (nn.Conv2d,)
    named_gating = CONV_GATING

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("content", self.content, CONTENT)
        if self.content == "none" and self.gate is not None:
            raise UserError(
                f"gate {self.gate:g} has no effect with content='none', which has no gates; leave it out"
            )
        if self.window is not None:
            check_int("window", self.window, WINDOW)
            if self.content != "window":
                raise UserError(
                    f"window {self.window} has no effect with content={self.content!r}; use 'window'"
                )
            if self.window % 2 == 0:
                raise UserError(
                    f"window {self.window} has no position in its middle; use an odd number"
                )

    def reason(self, site: Site) -> str | None:
        """Return why the module cannot be recast, or None if it can."""
        conv = plain_layer(site.module)
        if not isinstance(conv, nn.Conv2d):
            return f"{type(conv).__name__} is not an nn.Conv2d"
        kh, kw = conv.kernel_size
        if kh != kw:
            return f"the {kh}x{kw} kernel is not square"
        if kh % 2 == 0:
            return f"the {kh}x{kw} kernel has even sides, so no tap lies in its middle"
        if conv.dilation != (1, 1):
            return f"dilation={conv.dilation} is not 1: the taps must be neighbouring pixels"
        if conv.padding_mode != "zeros":
            return f"padding_mode={conv.padding_mode!r} is not 'zeros'"
        return layer_mismatch(conv, nn.Conv2d)

    @torch.no_grad()
    def build(self, site: Site) -> nn.Module:
        """Return the attention, after SAME padding, if any. Raises: UserError if the module is not accepted."""
        self.check(site)
        conv: Any = plain_layer(site.module)
        options: dict[str, Any] = {"bias": conv.bias is not None, "groups": conv.groups}
        if self.window is not None:
            options["window"] = self.window
        gpsa: Any = CONTENT[self.content](
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size[0],
            to_2tuple(conv.stride),
            conv_padding(conv) or 0,
            **options,
        )
        gpsa.set_gating(*self.gating())
        gpsa.to(conv.weight.dtype)
        for name, parameter in conv.named_parameters():
            setattr(gpsa, name, nn.Parameter(parameter.detach().clone()))
        return with_same_padding(site.module, gpsa)
