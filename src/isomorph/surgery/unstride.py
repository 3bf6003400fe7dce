"""The one step of a T-ResNet that changes the function: the last stage keeps its input's resolution (as in BoTNet).

It is kept apart from `recast`, which changes nothing: measure the CNN, the unstrided CNN and the T-CNN one by one.
"""

import copy
from dataclasses import dataclass
from typing import ClassVar

from timm.layers import BlurPool2d
from torch import nn

from isomorph.errors import UserError
from isomorph.surgery.compiled import copy_model
from isomorph.surgery.recast import Edit, Where, replay, targets


@dataclass(frozen=True)
class Unstride:
    """A stage with every convolution and average pool at stride 1; a pool that only down-sampled becomes nothing."""

    atol: ClassVar[float] = 0.0
    kind: ClassVar[type[nn.Module]] = nn.Module

    def accepts(self, module: nn.Module) -> bool:
        parts = list(module.modules())
        return any(map(_is_strided, parts)) and not any(isinstance(part, nn.MaxPool2d | BlurPool2d) for part in parts)

    def build(self, module: nn.Module) -> nn.Module:
        if not any(map(_is_strided, module.modules())):
            raise UserError("Unstride cannot rebuild it: it has no stride to remove")
        stage = copy.deepcopy(module)
        for name, part in list(stage.named_modules()):
            if isinstance(part, nn.MaxPool2d | BlurPool2d):
                raise UserError(
                    f"Unstride cannot rebuild it: {name} is a {type(part).__name__}, which it leaves strided"
                )
            if isinstance(part, nn.Conv2d) and _is_strided(part):
                part.stride = (1, 1)
            elif _is_strided(part) and not name:
                return nn.Identity()
            elif _is_strided(part):
                stage.set_submodule(name, nn.Identity())
        return stage


def _is_strided(module: nn.Module) -> bool:
    """Whether the module is a convolution or an average pool that reduces resolution."""
    return isinstance(module, nn.Conv2d | nn.AvgPool2d) and module.stride not in (1, (1, 1))


def unstride(model: nn.Module, where: Where) -> nn.Module:
    """A copy of the model in which the stages that `where` selects keep their input's resolution; the weights stay.

    Raises: UserError when `where` matches nothing, or a stage without a stride, or when hooks on a pool would be lost.
    """
    edit = Edit(Unstride(), tuple(targets(model, Unstride(), where)))
    return replay(copy_model(model), edit)
