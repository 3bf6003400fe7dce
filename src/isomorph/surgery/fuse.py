"""The way back: every layer that knows its fused form gives it, and the model computes what it computed."""

import copy
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from isomorph.errors import UserError
from isomorph.surgery.compiled import copy_model, unwrap_compiled
from isomorph.surgery.layer_checks import first_altered_part
from isomorph.surgery.recast import Edit, outermost_modules, replay


@dataclass(frozen=True)
class Fuse:
    """A layer becomes its fused form: the result of its `fuse()`, with the same function in eval mode."""

    atol: ClassVar[float] = 1e-4

    def accepts(self, module: nn.Module) -> bool:
        return callable(getattr(module, "fuse", None))

    def build(self, module: nn.Module) -> nn.Module:
        """Raises: UserError when the module has no `fuse()`, or one that does not know its forward or its parts."""
        kind = type(module)
        if not self.accepts(module):
            raise UserError(f"{kind.__name__} has no fused form")
        owner = next((base for base in kind.__mro__ if "fuse" in vars(base)), kind)
        if any("forward" in vars(base) for base in kind.__mro__[: kind.__mro__.index(owner)]):
            raise UserError(f"{kind.__name__} has its own forward, which {owner.__name__}.fuse() does not know")
        try:
            return copy.deepcopy(module).eval().fuse()  # type: ignore[operator]
        except RuntimeError:
            if reason := first_altered_part(module):
                raise UserError(f"{kind.__name__} cannot be fused: {reason}") from None
            raise


def fuse(model: nn.Module) -> nn.Module:
    """A copy of the model with every module that has a `fuse()` replaced by its result, root included, outermost first.

    `fuse()` on a layer returns a new module and needs no rule, so it works on any checkpoint; a layer whose way back
    holds only under a condition has a named method instead (`GPSA2d.to_conv()`) and is left alone here. Of a compiled
    model the model inside is fused, and not compiled again. Hooks and shared parameters are treated as by `recast`.

    Raises: UserError in train mode: BatchNorm would fuse the statistics of one batch; or when hooks would be lost.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"{model!r} is not a model; load it first, with iso.load")
    training = next((name for name, module in model.named_modules() if module.training), None)
    if training is not None:
        raise UserError(
            f"fuse needs eval mode, and {training or 'the model'} is in train mode; call model.eval() first"
        )
    names = fusible_modules(model)
    return replay(copy_model(model), Edit(Fuse(), names)) if names else copy_model(model)


def fusible_modules(model: nn.Module) -> tuple[str, ...]:
    """Names of the outermost modules that have a fused form."""
    return tuple(outermost_modules(unwrap_compiled(model), Fuse().accepts))
