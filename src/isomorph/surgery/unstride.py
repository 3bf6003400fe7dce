"""Remove the strides of a stage, as T-ResNets and BoTNet do; unlike `recast`, this changes the function."""

import copy
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import BlurPool2d
from torch import Tensor, nn

from isomorph.errors import DoesNotRun, UserError
from isomorph.layers import PyramidConv2d
from isomorph.layers.gated.tap_heads import TapHeads
from isomorph.layers.modes import eval_mode
from isomorph.layers.same_padding import SamePadding
from isomorph.operations import ModuleCall, in_eval_mode, observing
from isomorph.surgery.calls import run_model
from isomorph.surgery.recast import apply_rule
from isomorph.surgery.reference_calls import own_example
from isomorph.surgery.rule import Rule, copy_model, edits
from isomorph.surgery.site import Site, Where

# Layers whose stride becomes 1, with what pads before one.
_CONVOLUTIONS = nn.Conv2d | TapHeads | PyramidConv2d | SamePadding


@dataclass(frozen=True)
class Unstride(Rule):
    """Rule that sets the stride of every convolution of a stage to 1, and removes its strided average pools.

    It changes the function. See `unstride`.

    Raises: UserError from `build` if the module has no stride, or a pool that is not supported.

    >>> iso.surgery.Unstride().build(iso.surgery.Site(torch.nn.Conv2d(3, 4, 3, stride=2))).stride
    (1, 1)
    """

    atol = 0.0
    is_reverted = False
    kind = (nn.Module,)

    def reason(self, site: Site) -> str | None:
        module = site.module
        if not any(map(_is_strided, module.modules())):
            return "it has no stride to remove"
        for name, part in module.named_modules():
            if _is_strided(part, nn.MaxPool2d | BlurPool2d):
                return f"it cannot remove the stride of {name} ({type(part).__name__})"
        return None

    def build(self, site: Site) -> nn.Module:
        self.check(site)
        stage = copy.deepcopy(site.module)
        for name, part in list(stage.named_modules()):
            if not _is_strided(part):
                continue
            if isinstance(part, _CONVOLUTIONS):
                part.stride = (1, 1)
                if isinstance(part, PyramidConv2d):
                    part.window = part.window._replace(stride=(1, 1))
            elif not name:
                return nn.Identity()
            else:
                stage.set_submodule(name, nn.Identity())
        return stage


def _is_strided(module: nn.Module, kinds: Any = _CONVOLUTIONS | nn.AvgPool2d) -> bool:
    return isinstance(module, kinds) and module.stride not in (1, (1, 1))


def unstride(model: nn.Module, where: Where) -> nn.Module:
    """Return a copy of the model in which the selected stages keep the resolution of their input.

    The weights stay, but it changes the function: evaluate the model before and after it. A T-ResNet is an unstrided
    ResNet whose last stage is then recast. timm's `feature_info` keeps the reductions of the strided model.

    Source: T-CNN section 3.2; BoTNet
    Raises: UserError for a detector, if `where` selects nothing or a stage without a stride, if hooks on a pool would
        be lost, and if at the model's own size, where known, a map still gets smaller or the model fails.

    >>> cnn = timm.create_model("cifar_resnet20").eval()
    >>> wide = iso.unstride(cnn, where="layer3")
    >>> x = torch.randn(1, 3, 32, 32)
    >>> tuple(cnn.forward_features(x).shape), tuple(wide.forward_features(x).shape)
    ((1, 64, 8, 8), (1, 64, 16, 16))
    """
    new = copy_model(model)
    if hasattr(new, "detect"):
        raise UserError(
            "a detector needs its backbone's strides; create it with another backbone, like t_resnet50d"
        )
    new = apply_rule(new, Unstride(), where)
    example = own_example(new)
    if example is not None:
        _check_resolution(model, copy_model(new), example)  # a call may leave traces
    return new


@torch.no_grad()
def _check_resolution(model: nn.Module, new: nn.Module, example: Any) -> None:
    """Run a model without strides. Raises: UserError if a module still reduces the resolution or does not run."""
    with eval_mode(new), observing(new, after=_check_stage, names=edits(new)[-1].names):
        try:
            run_model(new, example)
        except DoesNotRun as error:
            own = in_eval_mode(copy_model(model))
            with suppress(DoesNotRun):  # the model itself may not take the size in its config
                run_model(own, example)
                raise UserError(
                    f"without these strides {error}; select others, or unstride before recasting"
                ) from None


def _check_stage(call: ModuleCall) -> None:
    """Raise UserError for a module whose output is smaller than its input."""
    x = call.input
    y = call.output
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.ndim == y.ndim == 4):
        return
    if x.shape[2:] == y.shape[2:] or x.shape[1:3] == y.shape[1:3]:  # (B, C, H, W), (B, H, W, C)
        return
    reason = "a kernel is not padded to keep the size, or a strided layer is no convolution or average pool"
    raise UserError(
        f"{call.name} still makes {tuple(y.shape)} from {tuple(x.shape)}: {reason}; select other modules"
    )
