"""Fuse the branches of a model: replace every layer that has a method `fuse()` by its result."""

import copy
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from isomorph.errors import UserError
from isomorph.surgery.compiled import copy_model, unwrap_compiled
from isomorph.surgery.layer_checks import first_altered_part
from isomorph.surgery.linear_chains import absorb_conv_biases, takes_conv_bias
from isomorph.surgery.recast import Edit, match_original, outermost_modules, replay


@dataclass(frozen=True)
class Fuse:
    """Rule that replaces a layer by the result of its method `fuse()`, with the same function in eval mode.

    In timm's ConvNormAct the bias of the fused convolution moves into the running mean of the BatchNorm, so that the
    unit has the parameters with which timm creates it, and timm's `reparameterize_model` merges it correctly.

    Raises: UserError from `build` if the module has no `fuse()`.

    Example:
        >>> pyramid = iso.layers.PyramidLinear(4, 8).eval()
        >>> type(iso.surgery.Fuse().build(pyramid)).__name__
        'Linear'
    """

    atol: ClassVar[float] = 1e-4

    def accepts(self, module: nn.Module) -> bool:
        """Return True if the module has a method `fuse()`, or is timm's ConvNormAct around one that has."""
        return callable(getattr(module, "fuse", None)) or _is_fusible_unit(module)

    def build(self, module: nn.Module) -> nn.Module:
        """Return the fused form of a copy of the module in eval mode.

        Raises: UserError if the module has no `fuse()`, or overrides the forward that its `fuse()` is for.
        """
        if _is_fusible_unit(module):
            unit = copy.deepcopy(module).eval()
            conv: nn.Module = unit.conv  # type: ignore[assignment]
            unit.conv = match_original(self.build(conv), conv)
            absorb_conv_biases(unit)
            return unit
        kind = type(module)
        if not self.accepts(module):
            raise UserError(f"{kind.__name__} has no fused form")
        owner = next((base for base in kind.__mro__ if "fuse" in vars(base)), kind)
        # a subclass with its own forward may compute something that the inherited fuse() does not know
        if any("forward" in vars(base) for base in kind.__mro__[: kind.__mro__.index(owner)]):
            raise UserError(f"{kind.__name__} overrides forward, which {owner.__name__}.fuse() does not know")
        try:
            return copy.deepcopy(module).eval().fuse()  # type: ignore[operator]
        except RuntimeError:
            if reason := first_altered_part(module):
                raise UserError(f"{kind.__name__} cannot be fused: {reason}") from None
            raise


def _is_fusible_unit(module: nn.Module) -> bool:
    """True for timm's ConvNormAct: a convolution that can be fused, and BatchNorm with running statistics."""
    return takes_conv_bias(module) and callable(getattr(module.conv, "fuse", None))


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
    names = fusible_modules(model)
    return replay(copy_model(model), Edit(Fuse(), names)) if names else copy_model(model)


def fusible_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that `fuse` would replace.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> iso.surgery.fusible_modules(iso.recast(cnn, iso.LinearToPyramid(), where="linear"))
        ('linear',)
    """
    return tuple(outermost_modules(unwrap_compiled(model), Fuse().accepts))
