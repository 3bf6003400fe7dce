"""Fuse the branches of a model: replace every layer that has a method `fuse()` by its result."""

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from isomorph.errors import UserError
from isomorph.layers import JointPyramid
from isomorph.layers.pyramid.base import Pyramid
from isomorph.operations import unwrap
from isomorph.surgery.linear_chains import absorb_conv_biases, conv_and_norm
from isomorph.surgery.plain_layers import first_altered_part
from isomorph.surgery.recast import check_model, match_original, replay
from isomorph.surgery.record import Edit, copy_model
from isomorph.surgery.rule import Rule
from isomorph.surgery.where import outermost_modules

PYRAMIDS = (Pyramid, JointPyramid)


@dataclass(frozen=True)
class Fuse(Rule):
    """Rule that replaces a layer by the result of its method `fuse()`, with the same function in eval mode.

    Pyramids inside the module are fused first. In units of a convolution and a BatchNorm, the bias of a fused
    pyramid moves into the running mean if the convolution had none, so that the unit has the parameters with which it
    was created; timm's `reparameterize_model` and its own `fuse()` ignore such a bias.

    Raises: UserError from `build` if the module has no `fuse()`.

    Example:
        >>> pyramid = iso.layers.PyramidLinear(4, 8).eval()
        >>> type(iso.surgery.Fuse().build(pyramid)).__name__
        'Linear'
    """

    atol: ClassVar[float] = 1e-4

    def reason(self, module: nn.Module) -> str | None:
        """Return that the module's `fuse()` cannot handle all layers inside it and it is no unit with a pyramid."""
        free = callable(getattr(module, "fuse", None)) and not _is_blocked(module)
        return None if free or _pyramid_of_unit(module) else f"{type(module).__name__} has no fused form"

    def build(self, module: nn.Module) -> nn.Module:
        """Return the fused form of a copy of the module in eval mode.

        Raises: UserError if the module has no `fuse()`, or overrides the forward that its `fuse()` is for.
        """
        self.check(module)
        if name := _pyramid_of_unit(module):
            return _build_unit(self, copy.deepcopy(module), name)
        kind = type(module)
        owner = next((base for base in kind.__mro__ if "fuse" in vars(base)), kind)
        # a subclass with its own forward may compute something that the inherited fuse() does not know
        if any("forward" in vars(base) for base in kind.__mro__[: kind.__mro__.index(owner)]):
            raise UserError(f"{kind.__name__} overrides forward, which {owner.__name__}.fuse() does not know")
        try:
            copied: Any = copy.deepcopy(module).eval()
            for name, inner in outermost_modules(copied, lambda part: isinstance(part, PYRAMIDS)).items():
                if inner is not copied:
                    copied.set_submodule(name, self.build(inner).eval())
            if not _is_own(copied):
                absorb_conv_biases(copied)
            return copied.fuse()
        except RuntimeError:
            if reason := first_altered_part(module):
                raise UserError(f"{kind.__name__} cannot be fused: {reason}") from None
            raise


def _is_own(module: nn.Module) -> bool:
    return getattr(getattr(module, "fuse", None), "__module__", "").startswith("isomorph.")


def recast_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of isomorph in a module, or the module itself if it is one."""
    return [part for part in module.modules() if type(part).__module__.startswith("isomorph.layers.")]


def _is_blocked(module: nn.Module) -> bool:
    """True for a method `fuse()` that is not isomorph's on a module with recast layers that stay, as attention does."""
    return not _is_own(module) and not all(isinstance(part, PYRAMIDS) for part in recast_layers(module))


def _pyramid_of_unit(module: nn.Module) -> str | None:
    """Return the name of the pyramid in a unit of a pyramid and a BatchNorm, without `fuse()`, or None for others."""
    if hasattr(module, "fuse") or not any(isinstance(child, Pyramid) for child in module.children()):
        return None
    names = conv_and_norm(module)
    return names[0] if names else None


def _build_unit(rule: Fuse, unit: nn.Module, name: str) -> nn.Module:
    pyramid: Any = unit.get_submodule(name)
    unit.set_submodule(name, match_original(rule.build(pyramid), pyramid))
    if not pyramid.replaces_bias:
        absorb_conv_biases(unit)
    return unit


def fuse(model: nn.Module) -> nn.Module:
    """Return a copy of the model with every layer that can be fused replaced by its fused form.

    These are the layers with a method `fuse()`, such as pyramids: the outermost ones, which may be the model itself.
    In eval mode the function is the same. A layer that converts back only under a condition, such as GPSA2d, is left
    as it is; see `revert`. A compiled model is unwrapped and not compiled again. Hooks and tied parameters are treated
    as in `recast`.

    Raises: UserError if the model is in train mode, where BatchNorm uses the statistics of a batch, or if hooks would
        be lost.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20").eval()
        >>> wide = iso.recast(cnn, iso.LinearToPyramid(), where="linear")
        >>> type(wide.linear).__name__, type(iso.fuse(wide).linear).__name__
        ('PyramidLinear', 'Linear')
    """
    training = next((name for name, module in check_model(model).named_modules() if module.training), None)
    if training is not None:
        raise UserError(
            f"fuse needs eval mode, but {training or 'the model'} is in train mode; call model.eval() first"
        )
    names = fusible_modules(model)
    return replay(copy_model(model), Edit(Fuse(), names)) if names else copy_model(model)


def fusible_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that `fuse` would replace.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> iso.surgery.fusible_modules(iso.recast(cnn, iso.LinearToPyramid(), where="linear"))
        ('linear',)
    """
    model, rule = unwrap(model), Fuse()
    names = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    blocked = (module for module in model.modules() if callable(getattr(module, "fuse", None)) and _is_blocked(module))
    # a blocked module's fuse() may call that of its children, which stay as they are until it is free
    waiting = {part for module in blocked for part in module.modules() if not isinstance(part, PYRAMIDS)}

    def wanted(module: nn.Module) -> bool:
        """True for a module to replace; not for a unit whose pyramid has other names too, under which it would stay."""
        name = _pyramid_of_unit(module)
        shared = name is not None and names[module.get_submodule(name)] > names[module]
        return rule.accepts(module) and module not in waiting and not shared

    return tuple(outermost_modules(model, wanted))
