"""The rules: which module becomes which, with the function kept."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from timm.layers import to_2tuple
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from isomorph.errors import UserError
from isomorph.layers import GPSA2d

DIALS = {"exact": (20.0, 15.0), "paper": (1.0, 1.0)}
"""(locality, gate) of the two named inits of ConvToGPSA. Exact: leaks of exp(-20) to the next tap and of 3e-7 to
content, within rounding of float32, with gradients still alive. Paper: on the verge of locality (T-CNN section 2)."""


def dials(init: str, locality: float | None, gate: float | None) -> tuple[float, float]:
    """The locality and gate of an init, each overridden by a given value.

    Raises: UserError for an unknown init a locality that is not positive, or an infinite value.
    """
    if init not in DIALS:
        raise UserError(f"init {init!r} is unknown; choose 'exact' or 'paper'")
    default_locality, default_gate = DIALS[init]
    locality = default_locality if locality is None else locality
    gate = default_gate if gate is None else gate
    if not 0 < locality < math.inf:
        raise UserError(f"locality {locality} must be above 0 and finite")
    if not math.isfinite(gate):
        raise UserError(f"gate {gate} must be finite")
    return locality, gate


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
        dials(self.init, self.locality, self.gate)

    def reason(self, module: nn.Module) -> str | None:
        """Why the module cannot be rebuilt, or None."""
        if not isinstance(module, nn.Conv2d):
            return f"{type(module).__name__} is not an nn.Conv2d"
        if type(module)._conv_forward is not nn.Conv2d._conv_forward or type(module).forward is not nn.Conv2d.forward:
            return f"{type(module).__name__} does not compute what nn.Conv2d does with its weight"
        if is_parametrized(module):
            return "its weight is parametrized, which would be lost"
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
        gpsa.set_dials(*dials(self.init, self.locality, self.gate))
        gpsa.to(module.weight.dtype)
        gpsa.weight = nn.Parameter(module.weight.detach().clone())
        if module.bias is not None:
            gpsa.bias = nn.Parameter(module.bias.detach().clone())
        return gpsa
