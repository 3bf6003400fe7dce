"""Fuse a model: its branches by their own methods, then its norms, scales and branches into the layers before them."""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import DoesNotRun, UserError
from isomorph.layers import ConvNorm, JointPyramid
from isomorph.layers.pyramid.base import Pyramid
from isomorph.operations import unwrap
from isomorph.surgery.linear_chains import absorb_conv_biases, conv_and_norm
from isomorph.surgery.merge import Cases, FuseReport, compare, merge, own_example, search
from isomorph.surgery.model_inputs import Inputs, run_model
from isomorph.surgery.plain_layers import first_altered_part
from isomorph.surgery.recast import check_finite, check_model, match_original, replay, usual_defaults
from isomorph.surgery.record import Edit, add_notes, copy_model
from isomorph.surgery.rule import Rule
from isomorph.surgery.where import outermost_modules

FUSED_FIRST = (Pyramid, JointPyramid, ConvNorm)
"""Layers that are fused before the block around them."""
_METHODS = ("fuse", "reparameterize", "switch_to_deploy")
"""Methods by which a module merges itself: the first returns the result, the others change the module."""


@dataclass(frozen=True)
class Fuse(Rule):
    """Rule that replaces a layer by the result of its method `fuse()` or `reparameterize()`, the same in eval mode.

    Methods of timm run in float64. Pyramids inside the module are fused first. In units of a convolution and a
    BatchNorm, the bias of a fused pyramid moves into the running mean if the convolution had none, so that the unit has
    the parameters with which it was created; methods of timm ignore such a bias.

    Raises: UserError from `build` if the module has no `fuse()`.

    Example:
        >>> pyramid = iso.layers.PyramidLinear(4, 8).eval()
        >>> type(iso.surgery.Fuse().build(pyramid)).__name__
        'Linear'
    """

    atol: ClassVar[float] = 1e-4

    def reason(self, module: nn.Module) -> str | None:
        """Return that the module's `fuse()` cannot handle all layers inside it and it is no unit with a pyramid."""
        free = _method(module) and not _is_blocked(module)
        return None if free or _pyramid_of_unit(module) else f"{type(module).__name__} has no fused form"

    def build(self, module: nn.Module) -> nn.Module:
        """Return the fused form of a copy of the module in eval mode.

        Raises: UserError if the module has no `fuse()`, or overrides the forward that its `fuse()` is for.
        """
        self.check(module)
        if name := _pyramid_of_unit(module):
            return _build_unit(self, copy.deepcopy(module), name)
        kind, method = type(module), _method(module)
        owner = next((base for base in kind.__mro__ if method in vars(base)), kind)
        # a subclass with its own forward may compute something that the inherited fuse() does not know
        if any("forward" in vars(base) for base in kind.__mro__[: kind.__mro__.index(owner)]):
            raise UserError(f"{kind.__name__} overrides forward, which {owner.__name__}.{method}() does not know")
        try:
            copied: Any = copy.deepcopy(module).eval()
            for name, inner in outermost_modules(copied, lambda part: isinstance(part, FUSED_FIRST)).items():
                if inner is not copied:
                    copied.set_submodule(name, self.build(inner).eval())
            return copied.fuse() if _is_own(copied) else _merge_by_timm(copied, method)
        except RuntimeError:
            if reason := first_altered_part(module):
                raise UserError(f"{kind.__name__} cannot be fused: {reason}") from None
            raise


def _method(module: nn.Module) -> str:
    """Return the name of the method by which a module merges itself, or "" where it has none."""
    return next((name for name in _METHODS if callable(getattr(module, name, None))), "")


def _is_own(module: nn.Module) -> bool:
    return getattr(getattr(module, "fuse", None), "__module__", "").startswith("isomorph.")


@torch.no_grad()
def _merge_by_timm(module: nn.Module, method: str) -> nn.Module:
    """Return what a method of timm makes of a module, computed in float64, with its dtype, device and requires_grad."""
    parameters = list(module.parameters())
    dtypes, trained = {p.dtype for p in parameters}, any(p.requires_grad for p in parameters)
    absorb_conv_biases(module)
    if len(dtypes) != 1:
        return getattr(module, method)() or module
    with _new_tensors(torch.float64, parameters[0].device):
        merged = getattr(module.double(), method)() or module
    return merged.to(dtypes.pop()).eval().requires_grad_(trained)


def guard_pyramids(model: nn.Module) -> None:
    """Make methods of timm fuse the pyramids in their module first, since they read weights and no biases, in place."""
    for module in model.modules():
        for method in _METHODS:
            own, held = getattr(type(module), method, None), any(isinstance(part, Pyramid) for part in module.modules())
            vars(module).pop(method, None)
            if own and held and not own.__module__.startswith("isomorph."):
                vars(module)[method] = partial(_fuse_pyramids_first, module, method)


def _fuse_pyramids_first(module: nn.Module, method: str) -> Any:
    vars(module).pop(method)
    for name, inner in outermost_modules(module, lambda part: isinstance(part, FUSED_FIRST)).items():
        module.set_submodule(name, Fuse().build(inner))
    absorb_conv_biases(module)
    return getattr(module, method)()


@contextmanager
def _new_tensors(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Context in which new tensors have a dtype and a device: timm's methods make layers without saying which."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def recast_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of isomorph in a module, or the module itself if it is one."""
    return [part for part in module.modules() if type(part).__module__.startswith("isomorph.layers.")]


def _is_blocked(module: nn.Module) -> bool:
    """True for a method that is not isomorph's on a module with recast layers that stay, as attention does."""
    return not _is_own(module) and not all(isinstance(part, FUSED_FIRST) for part in recast_layers(module))


def _pyramid_of_unit(module: nn.Module) -> str | None:
    """Return the name of the pyramid in a unit of a pyramid and a BatchNorm, without `fuse()`, or None for others."""
    if _method(module) or not any(isinstance(child, Pyramid) for child in module.children()):
        return None
    names = conv_and_norm(module)
    return names[0] if names else None


def _build_unit(rule: Fuse, unit: nn.Module, name: str) -> nn.Module:
    pyramid: Any = unit.get_submodule(name)
    unit.set_submodule(name, match_original(rule.build(pyramid), pyramid))
    if not pyramid.replaces_bias:
        absorb_conv_biases(unit)
    return unit


def fuse(
    model: nn.Module, example: Inputs | Sequence[Inputs] | None = None, norms: bool = True, affine: bool = False
) -> nn.Module:
    """Return a copy of the model with all merged that is exactly one layer; in eval mode the function is the same.

    First every layer with a method `fuse()`, such as a pyramid, or `reparameterize()` is replaced by its result: the
    outermost ones, which may be the model itself. Then norms, scales, sums of branches, and chains of linear layers
    whose product is not larger are written into the layer before them, or into all layers after them. They are found
    by what the model computes, whatever its classes, in all its entry points and at two sizes; the result is compared
    at three sizes in float64, and what changes the outputs is left out. What is left, and why, says `fuse_with_report`.

    A layer that converts back only under a condition, such as GPSA2d, is left as it is; see `revert`. A compiled model
    is unwrapped and not compiled again. Hooks and tied parameters are treated as in `recast`.

    Args:
        model: a model in eval mode.
        example: a batch as the model reads it, or several of different sizes; timm's models have an input size. Without
            one, only layers with a method of their own are replaced.
        norms: False to replace only layers with a method `fuse()`.
        affine: also move the weights and biases of LayerNorm, RMSNorm and GroupNorm into the layers that read them.

    Raises: UserError if the model is in train mode, where BatchNorm uses the statistics of a batch, if hooks would be
        lost, or if the model does not run on the example; NotFinite if its weights, statistics or outputs are not.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20").eval()
        >>> wide = iso.recast(cnn, iso.LinearToPyramid(), where="linear")
        >>> thin = iso.fuse(wide)
        >>> type(wide.linear).__name__, type(thin.linear).__name__, type(thin.bn1).__name__
        ('PyramidLinear', 'Linear', 'Identity')
    """
    with usual_defaults(check_model(model)):
        return fuse_with_report(model, example, norms, affine)[0]


def fuse_with_report(
    model: nn.Module, example: Inputs | Sequence[Inputs] | None = None, norms: bool = True, affine: bool = False
) -> tuple[nn.Module, FuseReport]:
    """Return what `fuse` returns, and what was merged, what was left and why, and how far both models differ.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20").eval()
        >>> iso.surgery.fuse_with_report(cnn)[1].merged["bn1"]
        'conv1'
    """
    plain = check_model(model)
    training = next((name for name, module in plain.named_modules() if module.training), None)
    if training is not None:
        raise UserError(
            f"fuse needs eval mode, but {training or 'the model'} is in train mode; call model.eval() first"
        )
    check_finite(plain)
    names, problem = fusible_modules(plain, norms), "give an example, a batch as the model reads it"
    left: dict[str, str] = {}
    merged: dict[str, str] = {}
    cases: Cases | None = None
    exact = copy_model(model)
    if norms and not any(parameter.is_meta for parameter in plain.parameters()):
        exact.double()
        tried = own_example(exact) if example is None else example
        try:
            cases = Cases(exact, tried) if tried is not None else None
        except DoesNotRun as error:
            if example is not None:  # an error of the model in its own precision is the user's
                run_model(model, example if isinstance(example, torch.Tensor | Mapping) else next(iter(example)))
            problem = f"in float64, {error}" if example is not None else f"{error}; give an example"
    if cases:
        left |= search(list(names), lambda chosen: compare(cases, lambda: _fused(copy.deepcopy(exact), chosen)))
    names = tuple(name for name in names if name not in left)
    new = _fused(copy_model(model), names)
    if cases:
        exact, edits, merged, reasons = merge(_fused(exact, names), cases, affine)
        for rule in dict.fromkeys(rule for rule, _ in edits):
            new = replay(new, Edit(rule, tuple(name for each, name in edits if each == rule)))
        new.load_state_dict(exact.state_dict())
        left |= reasons
    elif norms:
        left |= {name: problem for name, module in new.named_modules() if isinstance(module, _BatchNorm)}
    if left:
        name, reason = next(iter(left.items()))
        add_notes(new, f"fuse left {len(left)} norms or layers as they are, {name} because: {reason}")
    counts = [sum(p.numel() for p in each.parameters()) for each in (plain, new)]
    tested = (cases.difference(exact), (cases.macs, cases.count(exact)), cases.sizes) if cases else (None, None, ())
    difference, macs, sizes = tested
    return new, FuseReport(names, merged, left, (counts[0], counts[1]), macs, difference, sizes)


def _is_changed(rule: Fuse, module: nn.Module) -> bool:
    """True if a method that changes its module has not been called before; some of timm's fail the second time."""
    module = copy.deepcopy(module).to("meta")
    try:
        return rule.build(module).state_dict().keys() != module.state_dict().keys()
    except (AttributeError, TypeError):
        return False


def _fused(model: nn.Module, names: Sequence[str]) -> nn.Module:
    return replay(model, Edit(Fuse(), tuple(names))) if names else model


def fusible_modules(model: nn.Module, branches: bool = False) -> tuple[str, ...]:
    """Return the names of the modules that `fuse` would replace; with `branches` those with `reparameterize()` too.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> iso.surgery.fusible_modules(iso.recast(cnn, iso.LinearToPyramid(), where="linear"))
        ('linear',)
    """
    model, rule = unwrap(model), Fuse()
    names = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    blocked = (module for module in model.modules() if _method(module) and _is_blocked(module))
    # a blocked module's fuse() may call that of its children, which stay as they are until it is free
    waiting = {part for module in blocked for part in module.modules() if not isinstance(part, FUSED_FIRST)}

    def wanted(module: nn.Module) -> bool:
        """True for a module to replace; not for a unit whose pyramid has other names too, under which it would stay."""
        name = _pyramid_of_unit(module)
        shared = name is not None and names[module.get_submodule(name)] > names[module]
        method = _method(module)
        asked = name is not None or method == "fuse" or (branches and method != "")
        found = asked and rule.accepts(module) and module not in waiting and not shared
        return found and (name is not None or method == "fuse" or _is_changed(rule, module))

    return tuple(outermost_modules(model, wanted))
