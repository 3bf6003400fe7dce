"""Fuse a model: isomorph's layers by their own `fuse()`, then norms, scales and branches by what they compute."""

import copy
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import DoesNotRun, NotFinite, UserError
from isomorph.layers import ConvNorm, JointPyramid
from isomorph.layers.pyramid.base import Pyramid
from isomorph.operations import copy_module, unwrap
from isomorph.slow_work import SlowWork
from isomorph.surgery.calls import Inputs, batches_of, dtype_name, run_model
from isomorph.surgery.fuse_report import FuseReport
from isomorph.surgery.merge import NOT_CALLED, find_faults, merge
from isomorph.surgery.modules import (
    copy_tensors,
    lies_within,
    outermost_modules,
    parent_name,
    tensors_by_name,
)
from isomorph.surgery.plain_layers import describe_stand_in, first_altered_part, is_quantised
from isomorph.surgery.recast import apply_edit, check_finite, check_model, float32_on
from isomorph.surgery.reference_calls import ReferenceCalls, own_example
from isomorph.surgery.rule import Edit, Rule, add_notes, copy_model
from isomorph.surgery.site import Site

# Layers that are fused before the block around them.
_FUSED_FIRST = (Pyramid, JointPyramid, ConvNorm)


@dataclass(frozen=True)
class Fuse(Rule):
    """Rule that replaces a layer of isomorph by the result of its method `fuse()`, the same in eval mode.

    Pyramids inside the module are fused first. The bias of a fused pyramid that had none moves into the running mean of
    the BatchNorm after it in a unit of timm or an nn.Sequential, so that the unit has the parameters with which it was
    created; methods of timm ignore such a bias. Methods of other libraries are not called: one of this name may mean
    something else, and `fuse` finds what is one layer by what it computes.

    Raises: UserError from `build` if the module is not a layer of isomorph with a `fuse()`.

    >>> type(iso.surgery.Fuse().build(iso.surgery.Site(iso.layers.PyramidLinear(4, 8).eval()))).__name__
    'Linear'
    """

    atol = 1e-4
    is_reverted = False

    def reason(self, site: Site) -> str | None:
        if _has_own_fuse(site.module):
            return None
        return f"{type(site.module).__name__} has no fused form"

    def build(self, site: Site) -> nn.Module:
        self.check(site)
        module = site.module
        if hasattr(module, "around"):  # a block is inserted after it
            return module.around(self)
        kind = type(module)
        defining = next(i for i, base in enumerate(kind.__mro__) if "fuse" in vars(base))
        # the inherited method may not know what the forward of a subclass computes
        if any(
            "forward" in vars(base) for base in kind.__mro__[:defining] if not _is_isomorphs(base)
        ):
            raise UserError(
                f"{kind.__name__} overrides forward, which its method fuse() does not know"
            )
        copied: Any = copy.deepcopy(module).eval()
        try:
            fuse_pyramids(copied)
            fused = copied.fuse()
        except RuntimeError:
            reason = first_altered_part(module)
            if reason is None:
                raise
            raise UserError(f"{kind.__name__} cannot be fused: {reason}") from None
        if isinstance(module, Pyramid):
            fused.has_new_bias = not module.replaces_bias
        return fused

    def connect(self, site: Site) -> None:
        """Move the biases that fused pyramids have, and their layers had not, into the norms after them."""
        site.once(_move_biases)


def _move_biases(model: nn.Module) -> None:
    """Move biases that fused pyramids have added into the running means of the BatchNorms after them, in place."""
    parents: Counter[nn.Module] = Counter()
    for unit in model.modules():
        parents.update(unit.children())
    for unit in model.modules():
        pair = _new_bias_and_norm(unit)
        if pair is None:
            continue
        layer, norm = pair
        if parents[layer] == 1 and parents[norm] == 1:
            norm.running_mean.sub_(layer.bias.detach())
            layer.bias = None
            layer.has_new_bias = False


def _new_bias_and_norm(unit: nn.Module) -> tuple[Any, Any] | None:
    """Return the only linear layer of a unit, if its bias is new, and the BatchNorm that the unit runs after it."""
    if not _runs_in_turn(unit):
        return None
    linear = [layer for layer in unit.children() if isinstance(layer, nn.Linear | nn.Conv2d)]
    if len(linear) != 1 or not getattr(linear[0], "has_new_bias", False):
        return None
    for layer, norm in pairwise(unit.children()):
        if layer is linear[0] and isinstance(norm, _BatchNorm) and norm.running_mean is not None:
            return layer, norm
    return None


def _runs_in_turn(unit: nn.Module) -> bool:
    """True for a unit that runs its children one after the other, as far as its class is known."""
    if type(unit).__module__.startswith("timm."):
        return True
    return isinstance(unit, nn.Sequential) and type(unit).forward is nn.Sequential.forward


def _is_isomorphs(kind: Any) -> bool:
    return str(getattr(kind, "__module__", "")).startswith("isomorph.")


def _has_own_fuse(module: nn.Module) -> bool:
    return callable(getattr(module, "fuse", None)) and _is_isomorphs(module.fuse)


def fuse_pyramids(module: nn.Module) -> None:
    """Fuse the pyramids, and the convolutions with norms, inside a module in place; not the module itself."""
    layers = outermost_modules(module, lambda part: isinstance(part, _FUSED_FIRST))
    layers.pop("", None)
    for name, layer in layers.items():
        module.set_submodule(name, Fuse().build(Site(layer)))
    _move_biases(module)


def fuse(
    model: nn.Module,
    example: Inputs | Sequence[Inputs] | None = None,
    norms: bool = True,
    affine: bool = False,
    across: bool = True,
    only_forward: bool = False,
) -> nn.Module:
    """Return a copy of the model in which everything that computes one layer is that layer; the same in eval mode.

    First isomorph's own layers with a method `fuse()`, such as a pyramid, are replaced by its result. Then norms,
    scales, sums of branches, low-rank adapters, and chains of linear layers whose product is not larger are written
    into the layer before them, or into all layers after them. They are found by what the model computes, and compared
    in float64 at several sizes and by all entry points that take the same batch: flags of forward, public methods. What
    changes an output is left out; `fuse_with_report` says what, and why.

    A merge across modules also changes what a module in between gives or gets. It is left out where that module is one
    that code calls alone: a child of the model, or an item of an nn.Sequential or nn.ModuleList there.

    A module in which one layer is left, with what follows it, becomes that layer: its code would add the 0 of branches.

    A layer that converts back only under a condition, such as GPSA2d, is left as it is; see `revert`. A compiled model
    is unwrapped and not compiled again. Hooks and tied parameters are treated as in `recast`.

    Args:
        model: any network, in train or eval mode, which the copy keeps.
        example: a batch as the model reads it, or several of different sizes; timm's models have an input size. Without
            one, only isomorph's layers with a method `fuse()` are replaced.
        norms: False to replace only these layers.
        affine: also move the weights and biases of LayerNorm, RMSNorm and GroupNorm into the layers that read them.
        across: False to keep the inputs and outputs of all modules but those that are merged, for code that taps a
            network with hooks or a feature extractor.
        only_forward: True if nothing but `model(x)` is ever called, as in an exported file: other entry points and
            modules called alone may change.

    Raises: UserError if hooks would be lost, or if the model does not run on an example; NotFinite if its weights,
        statistics or outputs are not, or if merged weights are too large for the model's precision.

    >>> wide = iso.recast(timm.create_model("cifar_resnet20").eval(), iso.LinearToPyramid(), where="linear")
    >>> thin = iso.fuse(wide)
    >>> type(wide.linear).__name__, type(thin.linear).__name__, type(thin.bn1).__name__
    ('PyramidLinear', 'Linear', 'Identity')
    """
    with float32_on(check_model(model)):
        new, report = fuse_with_report(model, example, norms, affine, across, only_forward)
    uncalled = _uncalled_alternatives(report)
    if report.left and report.difference is None:
        reason = next(iter(report.left.values()))
        warnings.warn(f"fuse merged no norms ({len(report.left)}): {reason}", stacklevel=2)
    elif uncalled:
        warnings.warn(
            f"no example calls {uncalled[0]}: outputs of inputs that do may change; give one",
            stacklevel=2,
        )
    return new


def _uncalled_alternatives(report: FuseReport) -> list[str]:
    """Return the modules that no example calls and next to which one was merged: the model may choose among them."""
    parents = {parent_name(name) for name in report.merged}
    uncalled = [name for name, why in report.left.items() if why == NOT_CALLED]
    return [name for name in (*uncalled, *report.uncalled) if parent_name(name) in parents]


def fuse_with_report(
    model: nn.Module,
    example: Inputs | Sequence[Inputs] | None = None,
    norms: bool = True,
    affine: bool = False,
    across: bool = True,
    only_forward: bool = False,
) -> tuple[nn.Module, FuseReport]:
    """Return what `fuse` returns, and what was merged, what was left and why, and how far both models differ.

    >>> iso.surgery.fuse_with_report(timm.create_model("cifar_resnet20").eval())[1].merged["bn1"]
    'conv1'
    """
    plain = check_model(model)
    _check_not_quantised(plain)
    check_finite(plain)
    names = fusible_modules(plain)
    exact = copy_model(model)
    exact.eval()
    with SlowWork("comparing the fused model") as work:
        calls: ReferenceCalls | None = None
        problem = "the weights have no values (device meta)"
        if norms and not any(parameter.is_meta for parameter in plain.parameters()):
            exact = exact.double()
            calls, problem = _reference_calls(
                exact, model, example, only_forward, affine, work.step
            )
        left: dict[str, str] = {}
        if calls is not None:
            left = find_faults(
                list(names), lambda chosen: calls.fault(lambda: _fused(copy_module(exact), chosen))
            )
        names = tuple(name for name in names if name not in left)
        new = _fused(copy_model(model), names)
        report = FuseReport(names)
        if calls is not None:
            exact = _fused(copy_module(exact), names) if names else exact
            merged = merge(exact, calls, across)
            new = _replay(new, merged.edits)
            copy_tensors(merged.model, new)
            left |= merged.report.left
            report = replace(
                merged.report,
                fused=names,
                untried=tuple(calls.untried),
                difference=calls.largest,
                inputs=calls.sizes,
                entry_points=tuple(calls.entries),
                rounded=calls.rounding(merged.model, new),
            )
        elif norms:
            left = {
                name: problem
                for name, module in new.named_modules()
                if isinstance(module, _BatchNorm)
            }
    _check_rounded(new, plain)
    if left:
        name, reason = next(iter(left.items()))
        add_notes(
            new, f"fuse left {len(left)} norms or layers as they are, {name} because: {reason}"
        )
    if report.across:
        name, between = next(iter(report.across.items()))
        count = len(report.across)
        add_notes(
            new,
            f"fuse changed what modules between give or get, such as {between} ({name}; {count} merges)",
        )
    parameters = (_count_parameters(plain), _count_parameters(new))
    return new, replace(report, left=left, parameters=parameters)


def _count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _check_not_quantised(model: nn.Module) -> None:
    """Raise UserError for a model with layers of torch's quantisation."""
    for name, module in model.named_modules():
        if is_quantised(module):
            raise UserError(f"{name or 'the model'} {describe_stand_in(module)}")


def _replay(model: nn.Module, edits: Sequence[tuple[Rule, str]]) -> nn.Module:
    """Apply the edits of a merge: those of one module and of what is inside it in their order, others together."""
    rounds: dict[tuple[int, Rule], list[str]] = defaultdict(list)
    turns: dict[str, int] = {}
    for rule, name in edits:
        turns_before = [
            turn
            for other, turn in turns.items()
            if lies_within(name, {other}) or lies_within(other, {name})
        ]
        turns[name] = max(turns_before, default=-1) + 1
        rounds[turns[name], rule].append(name)
    for (_, rule), names in sorted(rounds.items(), key=lambda item: item[0][0]):
        model = apply_edit(model, Edit(rule, tuple(names)))
    return model


def _check_rounded(model: nn.Module, original: nn.Module) -> None:
    """Raise NotFinite for merged weights that the model's precision cannot hold, but not for a mask with -inf."""
    before = tensors_by_name(original)
    for name, tensor in tensors_by_name(model).items():
        if tensor.is_meta or torch.isfinite(tensor).all():
            continue
        old = before.get(name)
        if old is not None and not torch.isfinite(old).all():
            continue
        raise NotFinite(
            f"merged, {name} is too large for {dtype_name(tensor)}; fuse the model in float32, and cast it to bfloat16 "
            "then"
        )


def _reference_calls(
    exact: nn.Module,
    model: nn.Module,
    example: Inputs | Sequence[Inputs] | None,
    only_forward: bool,
    affine: bool,
    show_step: Callable[[str], None],
) -> tuple[ReferenceCalls | None, str]:
    """Return the calls by which a float64 model is compared, or why there are none. Raises: errors of the user's."""
    batches = own_example(exact) if example is None else example
    if batches is None:
        return None, "give an example, a batch as the model reads it"
    try:
        return ReferenceCalls(exact, batches, only_forward, affine, show_step), ""
    except DoesNotRun as error:
        if example is None:
            return None, f"{error}; give an example"
        plain = copy_model(model)
        plain.eval()
        for inputs in batches_of(example):
            run_model(plain, inputs)
        return None, f"in float64, {error}"


def _fused(model: nn.Module, names: Sequence[str]) -> nn.Module:
    return apply_edit(model, Edit(Fuse(), tuple(names))) if names else model


def fusible_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that `fuse` replaces by the result of their own method.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> iso.surgery.fusible_modules(iso.recast(cnn, iso.LinearToPyramid(), where="linear"))
    ('linear',)
    """
    return tuple(outermost_modules(unwrap(model), _has_own_fuse))
