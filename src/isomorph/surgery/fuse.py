"""Fuse the branches of a model: replace every layer that has a method `fuse()` by its result."""

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from isomorph.errors import UserError
from isomorph.layers.pyramid import Pyramid
from isomorph.surgery.compiled import copy_model, unwrap_compiled
from isomorph.surgery.layer_checks import first_altered_part
from isomorph.surgery.linear_chains import absorb_conv_biases, conv_and_norm
from isomorph.surgery.recast import Edit, match_original, outermost_modules, replay


@dataclass(frozen=True)
class Fuse:
    """Rule that replaces a layer by the result of its method `fuse()`, with the same function in eval mode.

    In timm's units of a convolution and a BatchNorm, the bias of a fused pyramid moves into the running mean if the
    convolution had none, so that the unit has the parameters with which timm creates it; timm's `reparameterize_model`
    and its own `fuse()` ignore such a bias. Otherwise a `fuse()` that is not isomorph's is not called on modules with
    recast layers inside, which it does not know.

    Raises: UserError from `build` if the module has no `fuse()`.

    Example:
        >>> pyramid = iso.layers.PyramidLinear(4, 8).eval()
        >>> type(iso.surgery.Fuse().build(pyramid)).__name__
        'Linear'
    """

    atol: ClassVar[float] = 1e-4

    def accepts(self, module: nn.Module) -> bool:
        """Return True if the module has a method `fuse()` that knows its layers, or is a unit around one that has."""
        return _fuses_itself(module) or _unit_with_pyramid(module) is not None

    def build(self, module: nn.Module) -> nn.Module:
        """Return the fused form of a copy of the module in eval mode.

        Raises: UserError if the module has no `fuse()`, or overrides the forward that its `fuse()` is for.
        """
        if names := _unit_with_pyramid(module):
            return self._build_unit(copy.deepcopy(module), names[0])
        kind = type(module)
        if not self.accepts(module):
            raise UserError(f"{kind.__name__} has no fused form")
        owner = next((base for base in kind.__mro__ if "fuse" in vars(base)), kind)
        # a subclass with its own forward may compute something that the inherited fuse() does not know
        if any("forward" in vars(base) for base in kind.__mro__[: kind.__mro__.index(owner)]):
            raise UserError(f"{kind.__name__} overrides forward, which {owner.__name__}.fuse() does not know")
        try:
            copied: Any = copy.deepcopy(module).eval()
            for name, inner in outermost_modules(copied, lambda part: isinstance(part, Pyramid)).items():
                if inner is not copied:
                    copied.set_submodule(name, self.build(inner).eval())
            return copied.fuse()
        except RuntimeError:
            if reason := first_altered_part(module):
                raise UserError(f"{kind.__name__} cannot be fused: {reason}") from None
            raise

    def _build_unit(self, unit: nn.Module, name: str) -> nn.Module:
        """Return a unit with its pyramid, the submodule of this name, fused."""
        pyramid = unit.get_submodule(name)
        unit.set_submodule(name, match_original(self.build(pyramid), pyramid))
        if hasattr(unit, "fuse") or not pyramid.replaces_bias:
            absorb_conv_biases(unit)
        return unit


def _fuses_itself(module: nn.Module) -> bool:
    """True for a method `fuse()` that is isomorph's, or has no layer of isomorph inside."""
    if not callable(getattr(module, "fuse", None)):
        return False
    own = getattr(module.fuse, "__module__", "").startswith("isomorph.")
    return own or not any(type(part).__module__.startswith("isomorph.layers.") for part in module.modules())


def _unit_with_pyramid(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of the pyramid and the BatchNorm of a unit of both; None for other modules."""
    names = conv_and_norm(module)
    return names if names and isinstance(module.get_submodule(names[0]), Pyramid) else None


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
    if not isinstance(model, nn.Module):
        raise UserError(f"{model!r} is not a model; load it first, with iso.load")
    training = next((name for name, module in model.named_modules() if module.training), None)
    if training is not None:
        raise UserError(
            f"fuse needs eval mode, but {training or 'the model'} is in train mode; call model.eval() first"
        )
    fused, names = copy_model(model), fusible_modules(model)
    if not names:
        return fused
    units = [name for name in names if _unit_with_pyramid(fused.get_submodule(name))]
    fused = replay(fused, Edit(Fuse(), names))
    # with their pyramids fused, units that can be merged as a whole are
    now_whole = tuple(name for name in fusible_modules(fused) if name in units or name not in names)
    return replay(fused, Edit(Fuse(), now_whole)) if now_whole else fused


def fusible_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that `fuse` would replace.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> iso.surgery.fusible_modules(iso.recast(cnn, iso.LinearToPyramid(), where="linear"))
        ('linear',)
    """
    model, rule = unwrap_compiled(model), Fuse()
    names = Counter(module for _, module in model.named_modules(remove_duplicate=False))

    def wanted(module: nn.Module) -> bool:
        """True unless it is a unit whose pyramid has other names too, under which it would stay."""
        unit = _unit_with_pyramid(module)
        shared = unit is not None and names[module.get_submodule(unit[0])] > names[module]
        return rule.accepts(module) and not shared

    return tuple(outermost_modules(model, wanted))
