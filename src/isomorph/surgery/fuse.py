"""Fuse a model: its branches by their own methods, then its norms, scales and branches into the layers before them."""

import copy
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import DoesNotRun, UserError
from isomorph.layers import ConvNorm, JointPyramid
from isomorph.layers.pyramid.base import Pyramid
from isomorph.operations import copy_module, unwrap
from isomorph.surgery.calls import Inputs, run_model
from isomorph.surgery.merge import Cases, FuseReport, find_faults, merge, own_example
from isomorph.surgery.modules import outermost_modules
from isomorph.surgery.plain_layers import first_altered_part
from isomorph.surgery.recast import apply_edit, check_finite, check_model, usual_defaults
from isomorph.surgery.rule import Edit, Rule, add_notes, copy_model

# Layers that are fused before the block around them.
_FUSED_FIRST = (Pyramid, JointPyramid, ConvNorm)
# Methods by which a module merges itself: the first returns the result, the others change the module.
_METHODS = ("fuse", "reparameterize", "switch_to_deploy")


@dataclass(frozen=True)
class Fuse(Rule):
    """Rule that replaces a layer by the result of its method `fuse()` or `reparameterize()`, the same in eval mode.

    Methods of timm run in float64. Pyramids inside the module are fused first. The bias of a fused pyramid that had
    none moves into the running mean of the BatchNorm after it in a unit of timm or an nn.Sequential, so that the unit
    has the parameters with which it was created; methods of timm ignore such a bias.

    Raises: UserError from `build` if the module has no `fuse()`.

    >>> type(iso.surgery.Fuse().build(iso.layers.PyramidLinear(4, 8).eval())).__name__
    'Linear'
    """

    atol: ClassVar[float] = 1e-4

    def reason(self, module: nn.Module) -> str | None:
        layers = [part for part in module.modules() if type(part).__module__.startswith("isomorph.layers.")]
        known = _is_own(module) or all(isinstance(part, _FUSED_FIRST) for part in layers)
        return None if known and _method(module) else f"{type(module).__name__} has no fused form"

    def build(self, module: nn.Module) -> nn.Module:
        self.check(module)
        if around := getattr(module, "around", None):  # a block is inserted after it
            return around(self.build)
        kind, method = type(module), _method(module)
        kinds = kind.__mro__[: next((i for i, base in enumerate(kind.__mro__) if method in vars(base)), 0)]
        # the inherited method may not know what the forward of a subclass computes
        if any("forward" in vars(base) and not base.__module__.startswith("isomorph.") for base in kinds):
            raise UserError(f"{kind.__name__} overrides forward, which its method {method}() does not know")
        copied: Any = copy.deepcopy(module).eval()
        try:
            _fuse_pyramids(copied)
            fused = copied.fuse() if _is_own(module) else _merge_by_timm(copied, method)
        except RuntimeError:
            if reason := first_altered_part(module):
                raise UserError(f"{kind.__name__} cannot be fused: {reason}") from None
            raise
        if isinstance(module, Pyramid):
            fused.has_new_bias = not module.replaces_bias
        return fused

    def attach(self, model: nn.Module) -> None:
        """Move the biases that fused pyramids have, and their layers had not, into the norms after them."""
        parents = Counter(layer for unit in model.modules() for layer in unit.children())
        for unit in model.modules():
            known = isinstance(unit, nn.Sequential) or type(unit).__module__.startswith("timm.")
            linear = [layer for layer in unit.children() if isinstance(layer, nn.Linear | nn.Conv2d)]
            for layer, norm in pairwise(unit.children()):
                is_new = known and linear == [layer] and getattr(layer, "has_new_bias", False)
                if is_new and isinstance(norm, _BatchNorm) and norm.running_mean is not None and parents[layer] == 1:
                    norm.running_mean.sub_(layer.bias.detach())  # type: ignore[operator]
                    layer.bias, layer.has_new_bias = None, False  # type: ignore[assignment]


def _method(module: nn.Module) -> str:
    return next((name for name in _METHODS if callable(getattr(module, name, None))), "")


def _is_own(module: nn.Module) -> bool:
    return getattr(getattr(module, "fuse", None), "__module__", "").startswith("isomorph.")


@torch.no_grad()
def _merge_by_timm(module: nn.Module, method: str) -> nn.Module:
    """Return what a method of timm makes of a module, computed in float64, with its dtype, device and requires_grad."""
    parameters = list(module.parameters())
    dtypes, trained = {p.dtype for p in parameters}, any(p.requires_grad for p in parameters)
    if len(dtypes) == 1:
        module.double()
    with usual_defaults(module):  # timm's methods make layers without saying in which dtype and where
        torch.set_default_dtype(next(module.parameters()).dtype)
        merged = getattr(module, method)() or module
    return (merged.to(dtypes.pop()) if len(dtypes) == 1 else merged).eval().requires_grad_(trained)


def _fuse_pyramids(module: nn.Module) -> None:
    for name, inner in outermost_modules(module, lambda part: isinstance(part, _FUSED_FIRST)).items():
        if name:
            module.set_submodule(name, Fuse().build(inner))
    Fuse().attach(module)


def guard_pyramids(model: nn.Module) -> None:
    """Make methods of timm fuse the pyramids in their module first, since they read weights and no biases, in place."""
    for module in model.modules():
        held = any(isinstance(part, Pyramid) for part in module.modules())
        for method in _METHODS:
            own = getattr(type(module), method, None)
            vars(module).pop(method, None)
            if own and held and not own.__module__.startswith("isomorph."):
                vars(module)[method] = partial(_fuse_pyramids_first, module, method)


def _fuse_pyramids_first(module: nn.Module, method: str) -> Any:
    vars(module).pop(method)
    _fuse_pyramids(module)
    return getattr(module, method)()


def fuse(
    model: nn.Module, example: Inputs | Sequence[Inputs] | None = None, norms: bool = True, affine: bool = False
) -> nn.Module:
    """Return a copy of the model in which everything that computes one layer is that layer; the same in eval mode.

    First the outermost layers with a method `fuse()`, such as a pyramid, or `reparameterize()` are replaced by its
    result. Then norms, scales, sums of branches, low-rank adapters, and chains of linear layers whose product is not
    larger are written into the layer before them, or into all layers after them. They are found by what the model
    computes, at timm's entry points and two sizes, and compared at a third with other numbers of images. What changes
    the outputs in float64 is left out; `fuse_with_report` says what, and why.

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

    >>> wide = iso.recast(timm.create_model("cifar_resnet20").eval(), iso.LinearToPyramid(), where="linear")
    >>> thin = iso.fuse(wide)
    >>> type(wide.linear).__name__, type(thin.linear).__name__, type(thin.bn1).__name__
    ('PyramidLinear', 'Linear', 'Identity')
    """
    with usual_defaults(check_model(model)):
        new, report = fuse_with_report(model, example, norms, affine)
    beside = {name.rpartition(".")[0] for name in report.merged}  # norms among which the model chooses, not an own head
    never = [n for n, why in report.left.items() if why == "no example calls it" and n.rpartition(".")[0] in beside]
    if report.left and report.difference is None:
        warnings.warn(f"fuse merged no norms ({len(report.left)}): {next(iter(report.left.values()))}", stacklevel=2)
    elif never:
        warnings.warn(f"no example calls {never[0]}: outputs of inputs that do may change; give one", stacklevel=2)
    return new


def fuse_with_report(
    model: nn.Module, example: Inputs | Sequence[Inputs] | None = None, norms: bool = True, affine: bool = False
) -> tuple[nn.Module, FuseReport]:
    """Return what `fuse` returns, and what was merged, what was left and why, and how far both models differ.

    >>> iso.surgery.fuse_with_report(timm.create_model("cifar_resnet20").eval())[1].merged["bn1"]
    'conv1'
    """
    plain = check_model(model)
    training = next((name for name, module in plain.named_modules() if module.training), None)
    if training is not None:
        raise UserError(f"fuse needs eval mode, but {training or 'the model'} is in train mode; call model.eval()")
    check_finite(plain)
    names, left, merged = fusible_modules(plain, norms), dict[str, str](), dict[str, str]()
    exact, cases, problem = copy_model(model), None, "the weights have no values (device meta)"
    if norms and not any(parameter.is_meta for parameter in plain.parameters()):
        exact = exact.double()
        cases, problem = _cases(exact, model, example)
    if cases:
        left = find_faults(list(names), lambda chosen: cases.fault(lambda: _fused(copy_module(exact), chosen)))
    names = tuple(name for name in names if name not in left)
    new = _fused(copy_model(model), names)
    if cases:
        exact, edits, merged, reasons = merge(_fused(exact, names), cases, affine)
        rounds, turns = defaultdict[tuple[int, Rule], list[str]](list), Counter[str]()
        for merged_as, name in edits:  # those of one module in their order, others together
            rounds[turns[name], merged_as].append(name)
            turns[name] += 1
        for (_, rule), chosen in sorted(rounds.items(), key=lambda item: item[0][0]):  # first layers, then their values
            new = apply_edit(new, Edit(rule, tuple(chosen)))
        new.load_state_dict(exact.state_dict())
        left |= reasons
    elif norms:
        left = {name: problem for name, module in new.named_modules() if isinstance(module, _BatchNorm)}
    if left:
        name, reason = next(iter(left.items()))
        add_notes(new, f"fuse left {len(left)} norms or layers as they are, {name} because: {reason}")
    before, after = (sum(p.numel() for p in each.parameters()) for each in (plain, new))
    report = FuseReport(names, merged, left, (before, after))
    if cases:
        report = replace(report, difference=cases.difference(exact), inputs=cases.sizes)
        with suppress(UserError):  # rounded, a detector may find other objects
            report = replace(report, rounded=cases.difference(copy_model(new).double()))
    return new, report


def _cases(exact: nn.Module, model: nn.Module, example: Inputs | Sequence[Inputs] | None) -> tuple[Cases | None, str]:
    """Return the calls by which a float64 model is compared, or why there are none. Raises: errors of the user's."""
    tried = own_example(exact) if example is None else example
    if tried is None:
        return None, "give an example, a batch as the model reads it"
    try:
        return Cases(exact, tried), ""
    except DoesNotRun as error:
        if example is None:
            return None, f"{error}; give an example"
        run_model(model, example if isinstance(example, torch.Tensor | Mapping) else example[0])
        return None, f"in float64, {error}"


def _fused(model: nn.Module, names: Sequence[str]) -> nn.Module:
    return apply_edit(model, Edit(Fuse(), tuple(names))) if names else model


def fusible_modules(model: nn.Module, branches: bool = False) -> tuple[str, ...]:
    """Return the names of the modules that `fuse` would replace; with `branches` those with `reparameterize()` too.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> iso.surgery.fusible_modules(iso.recast(cnn, iso.LinearToPyramid(), where="linear"))
    ('linear',)
    """
    rule = Fuse()

    def wanted(module: nn.Module) -> bool:
        method = _method(module)
        return rule.accepts(module) and (method == "fuse" or (branches and _is_changed(rule, module)))

    return tuple(outermost_modules(unwrap(model), wanted))


def _is_changed(rule: Fuse, module: nn.Module) -> bool:
    """True if a method that changes its module has not been called before; some of timm's fail the second time."""
    module = copy.deepcopy(module).to("meta")
    try:
        return rule.build(module).state_dict().keys() != module.state_dict().keys()
    except (AttributeError, TypeError):
        return False
