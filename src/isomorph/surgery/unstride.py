"""Remove the strides of a stage, as T-ResNets and BoTNet do; unlike `recast`, this changes the function."""

import copy
from dataclasses import dataclass
from typing import ClassVar

from timm.layers import BlurPool2d
from torch import nn

from isomorph.surgery.modules import Where
from isomorph.surgery.recast import apply_rule
from isomorph.surgery.rule import Rule, copy_model


@dataclass(frozen=True)
class Unstride(Rule):
    """Rule that sets the stride of every convolution of a stage to 1, and removes its strided average pools.

    It changes the function. See `unstride`.

    Raises: UserError from `build` if the module has no stride, or a pool that is not supported.

    >>> iso.surgery.Unstride().build(torch.nn.Conv2d(3, 4, 3, stride=2)).stride
    (1, 1)
    """

    atol: ClassVar[float] = 0.0
    kind: ClassVar[tuple[type[nn.Module], ...]] = (nn.Module,)

    def reason(self, module: nn.Module) -> str | None:
        if not any(map(_is_strided, module.modules())):
            return "it has no stride to remove"
        pools = ((name, part) for name, part in module.named_modules() if isinstance(part, nn.MaxPool2d | BlurPool2d))
        return next((f"it cannot remove the stride of {name} ({type(part).__name__})" for name, part in pools), None)

    def build(self, module: nn.Module) -> nn.Module:
        self.check(module)
        stage = copy.deepcopy(module)
        for name, part in list(stage.named_modules()):
            if isinstance(part, nn.Conv2d) and _is_strided(part):
                part.stride = (1, 1)
            elif _is_strided(part) and not name:
                return nn.Identity()
            elif _is_strided(part):
                stage.set_submodule(name, nn.Identity())
        return stage


def _is_strided(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d | nn.AvgPool2d) and module.stride not in (1, (1, 1))


def unstride(model: nn.Module, where: Where) -> nn.Module:
    """Return a copy of the model in which the selected stages keep the resolution of their input.

    The weights stay, but it changes the function: evaluate the model before and after it. A T-ResNet is an unstrided
    ResNet whose last stage is then recast.

    Source: T-CNN section 3.2; BoTNet
    Raises: UserError if `where` selects nothing or a stage without a stride, or if hooks on a pool would be lost.

    >>> cnn = timm.create_model("cifar_resnet20").eval()
    >>> wide = iso.unstride(cnn, where="layer3")
    >>> x = torch.randn(1, 3, 32, 32)
    >>> tuple(cnn.forward_features(x).shape), tuple(wide.forward_features(x).shape)
    ((1, 64, 8, 8), (1, 64, 16, 16))
    """
    return apply_rule(copy_model(model), Unstride(), where)
