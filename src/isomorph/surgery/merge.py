"""Merge norms, scales, branches and chains of a model into its layers, in float64, and compare both models."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.models import get_model_input_config
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import DoesNotRun, NotFinite, first_line
from isomorph.operations import copy_module, see, tensors_in
from isomorph.surgery.affine import Group, Summand
from isomorph.surgery.affine_plan import Plan
from isomorph.surgery.calls import (
    Inputs,
    cast_floats,
    describe_shape,
    map_tensors,
    other_inputs,
    own_inputs,
    relative_difference,
    run_model,
    to_model,
)
from isomorph.surgery.layer_calls import InputWindow
from isomorph.surgery.modules import list_names
from isomorph.surgery.rule import Rule

# Largest difference in float64, relative to the largest output, that is rounding: models may round inside.
TOLERANCE = 1e-6
# Methods by which a model may be called; the head of timm's, for features as they are without its classifier.
_ENTRIES = ("forward", "forward_features", "forward_intermediates", "forward_head")


@dataclass(frozen=True)
class Merge(Rule):
    """Rule that gives a module the form that it has after its function, or another's, was written into a layer.

    Forms: "layer", a layer with other weights, where asked for with a `bias` or another number of `outputs`;
    "identity", what is left of a norm or scale, its activation; "nothing", a branch that gives 0; "unscaled", a norm
    without its weight and bias. The values come from `fuse`, or from a checkpoint.

    >>> iso.surgery.Merge("identity").build(torch.nn.BatchNorm2d(4))
    Identity()
    """

    form: str
    outputs: int = 0
    bias: bool = False

    atol: ClassVar[float] = 1e-4
    keeps_output: ClassVar[bool] = False

    def reason(self, module: nn.Module) -> str | None:
        needs_weight = self.form in ("layer", "unscaled")
        return "it has no weight" if needs_weight and getattr(module, "weight", None) is None else None

    @torch.no_grad()
    def build(self, module: nn.Module) -> nn.Module:
        self.check(module)
        if self.form == "nothing":
            return Nothing()
        if self.form == "identity":
            kept = [(name, child) for name, child in module.named_children() if type(child) is not nn.Identity]
            return nn.Sequential(OrderedDict(kept)) if kept else nn.Identity()
        new: Any = copy.deepcopy(module)
        if self.form == "unscaled":
            new._parameters |= dict.fromkeys(new._parameters)
            return new
        weight, known = new.weight, "out_features" if hasattr(new, "out_features") else "out_channels"
        rows = self.outputs or getattr(new, known, len(weight))
        if self.outputs:
            new.weight = nn.Parameter(weight.new_zeros(rows, *weight.shape[1:]), weight.requires_grad)
            setattr(new, known, rows)
        if self.outputs or (self.bias and new.bias is None):
            new.bias = nn.Parameter(weight.new_zeros(rows), weight.requires_grad)
        return new


class Nothing(nn.Module):
    """A branch that was written into another layer: it gives 0 for any input."""

    def forward(self, *_: Any) -> int:
        """Return 0."""
        return 0


@dataclass(frozen=True, repr=False)
class FuseReport:
    """What `fuse` did to a model: what was fused and merged into which layers, and what was left, with the reason.

    `difference` is the largest in float64, relative to the largest output, over the `inputs` tried; None if none was.
    `rounded` is that of the model returned, whose weights are rounded to the precision of the given model.

    >>> report = iso.surgery.fuse_with_report(timm.create_model("cifar_resnet20").eval())[1]
    >>> len(report.merged), report.left, report.difference < 1e-12
    (19, {}, True)
    """

    fused: tuple[str, ...] = ()
    merged: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    parameters: tuple[int, int] = (0, 0)
    difference: float | None = None
    inputs: tuple[str, ...] = ()
    rounded: float | None = None

    def __str__(self) -> str:
        counts = f"{len(self.merged)} norms, scales or layers merged, {len(self.left)} left"
        lines = [
            f"{len(self.fused)} layers replaced by their own fuse(); {counts}",
            f"  parameters {self.parameters[0]:,} before, {self.parameters[1]:,} after",
        ]
        if self.difference is not None:
            compared = f"compared at {', '.join(self.inputs)}"
            rounded = f", {self.rounded:.2g} once the weights are rounded" if self.rounded else ""
            lines.append(f"  max |diff| / max |out| {self.difference:.2g} in float64{rounded}, {compared}")
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name or "the model")
        return "\n".join([*lines, *(f"  left {list_names(names)}: {reason}" for reason, names in reasons.items())])

    __repr__ = __str__


def own_example(model: nn.Module) -> Inputs | None:
    """Return a random input of the size that timm or the model itself knows, or None. Shape: -> (1, C, H, W)"""
    if own := own_inputs(model, 1):
        return to_model(own, model)
    if not (getattr(model, "pretrained_cfg", None) or {}).get("input_size"):
        return None
    size = get_model_input_config(model)["input_size"]
    return to_model(torch.randn(1, *size, generator=torch.Generator().manual_seed(0), device="cpu"), model)


class Cases:
    """The calls by which a model in float64 is compared: all its entry points, at three sizes where it has several.

    Of a model that chooses among its numbers, as detectors do, the outputs of the modules before and after the choice
    are compared too.

    Raises: DoesNotRun if the model does not run on the example or gives no numbers; NotFinite if they are not.
    """

    def __init__(self, model: nn.Module, example: Inputs | Sequence[Inputs]) -> None:
        given = [example] if isinstance(example, Tensor | Mapping) else list(example)
        first, *others = [cast_floats(x, torch.float64) for x in (given if given[1:] else (*given, *_crops(given[0])))]
        self._calls = list[tuple[str, Inputs, list[Tensor]]]()
        deciding = see(model, lambda: run_model(model, _copy(first))).deciding
        inside = [(name, child) for name in deciding for child, _ in model.get_submodule(name).named_children()]
        self._watched = [f"{name}.{child}".lstrip(".") for name, child in inside]
        entries = [name for name in _ENTRIES if callable(getattr(model, name, None))]
        for x in others:
            for entry in entries if isinstance(x, Tensor) else entries[:1]:
                self._try(model, entry, x)
        alone = not self._calls and isinstance(first, Tensor)  # it runs at one size only
        batch_sizes = [] if self._calls else [x for what, x in other_inputs(first) if what == "another batch size"]
        for x in (*batch_sizes, first):
            for entry in entries if alone else entries[:1]:
                self._try(model, entry, x)
        numbers = [each for *_, found in self._calls for each in found]
        if not numbers:
            raise DoesNotRun("the model's outputs hold no floating-point numbers to compare")
        if not all(torch.isfinite(each).all() for each in numbers):
            raise NotFinite("the model's outputs are not finite; check its weights and statistics, and the example")
        self._calls.sort(key=lambda call: call[1] is not first)
        self.sizes = tuple(dict.fromkeys(describe_shape(inputs) for _, inputs, _ in self._calls))

    def _try(self, model: nn.Module, entry: str, inputs: Inputs) -> None:
        with suppress(Exception):  # this model has other sizes, or another method of that name
            self._calls.append((entry, inputs, self._outputs(model, entry, inputs)))

    @torch.no_grad()
    def _outputs(self, model: nn.Module, entry: str, inputs: Inputs) -> list[Tensor]:
        """Return the floating-point outputs of a call in float64, and those of the watched modules."""
        found: list[Any] = []
        with ExitStack() as hooks, torch.random.fork_rng():
            for name in self._watched:
                watched = model.get_submodule(name)
                hooks.enter_context(watched.register_forward_hook(lambda *call: found.append(call[-1])))
            torch.manual_seed(0)
            found.append(_call(model, entry, _copy(inputs)))
        return [tensor.double() for tensor in tensors_in(found) if tensor.is_floating_point() and tensor.numel()]

    def plans(self, model: nn.Module, affine: bool, avoid: frozenset[str]) -> Iterator[Plan]:
        """Yield what each call shows."""
        for entry, inputs, _ in self._calls:
            yield Plan(model, see(model, partial(_call, model, entry, _copy(inputs))), affine, avoid)

    def difference(self, model: nn.Module) -> float:
        """Return the largest difference of a model's outputs, relative to the largest value of each.

        Raises: whatever a model raises that cannot be run.
        """
        pairs = ((of, self._outputs(model, entry, inputs)) for entry, inputs, of in self._calls if of)
        return max(starmap(relative_difference, pairs))

    def fault(self, change: Callable[[], nn.Module]) -> str | None:
        """Return how the model that `change` gives differs, or None if it does not."""
        try:
            difference = self.difference(change())
        except Exception as error:  # of any code that meets another module than before
            return f"the model does not run with it merged: {first_line(error)[:100]}"
        return None if difference <= TOLERANCE else f"with it merged, outputs differ by {difference:.1e} of the largest"


def _copy(inputs: Inputs) -> Inputs:
    """Return inputs that a model may change in place, each tensor one of its own."""
    return map_tensors(inputs, torch.clone)


def _call(model: Any, entry: str, inputs: Inputs) -> Any:
    if entry == "forward_head":
        return model.forward_head(model.forward_features(inputs), pre_logits=True)
    method = model if entry == "forward" else getattr(model, entry)
    return method(inputs) if isinstance(inputs, Tensor) else method(**inputs)


def _crops(inputs: Inputs) -> list[Tensor]:
    """Return two inputs with shorter sides, of which one is odd, and one with fewer tokens; one more image, and one."""
    if not isinstance(inputs, Tensor) or inputs.ndim < 2 or not len(inputs):
        return []
    one = inputs[-1:].flip(-1)
    more = torch.cat([inputs, one])
    shares, sides = (3, 2, 3), inputs.shape[2:]
    odd: list[Any] = [slice((n * share // 4) | 1) for n, share in zip(sides, shares, strict=False)]
    even: list[Any] = [slice(max(n * share // 4, 1)) for n, share in zip(sides, shares[1:], strict=False)]
    crops = [more[..., *odd], one[..., *even]] if sides else []
    return crops if len(sides) > 1 else [*crops, more[:, : inputs.shape[1] // 2 + 1], more, one]


def find_faults(names: list[Any], attempt: Callable[[list[Any]], str | None]) -> dict[Any, str]:
    """Return the names with which a model changes, by halving, with what `attempt` says of each."""
    good: list[Any] = []
    bad: dict[Any, str] = {}

    def halve(half: list[Any]) -> None:
        reason = attempt([*good, *half])
        if reason is None:
            good.extend(half)
        elif len(half) == 1:
            bad[half[0]] = reason
        else:
            halve(half[: len(half) // 2])
            halve(half[len(half) // 2 :])

    if names:
        halve(names)
    return bad


def merge(
    model: nn.Module, cases: Cases, affine: bool = False, avoid: frozenset[str] = frozenset()
) -> tuple[nn.Module, list[tuple[Merge, str]], dict[str, str], dict[str, str]]:
    """Return a copy of a float64 model with all groups merged that leave it equal, its edits, what is merged and left.

    Groups count in which all calls agree. Where the merged model differs, the groups at fault are found by halving; if
    they have adapters or branches that code multiplies, it is done again without those, whose layers are in `avoid`.
    """
    first: dict[Any, Group] | None = None
    agreed, norms, left, called = dict[Any, Group](), set[str](), dict[str, str](), set[str]()
    for plan in cases.plans(model, affine, avoid):  # one at a time: each holds what a call computed
        found = {group.key: group for group in plan.groups}
        if first is None:
            first = agreed = found
        agreed = {key: group for key, group in agreed.items() if key in found or not plan.concerns(group)}
        norms, left, called = norms | plan.norms, left | plan.left, called | set(plan.flow.outputs)
    # into readers first: a branch that reads the value may be written into another layer; chains last, from their end
    groups = sorted(agreed.values(), key=lambda group: ("readers", "sum", "chain").index(group.kind))

    def usable(chosen: list[Group]) -> list[Group]:
        sums = {group.carriers[0] for group in chosen if group.kind == "sum"}
        return [each for each in groups if each in chosen and (each.carriers[0] in sums or not each.needs_sum)]

    def merged(chosen: list[Group]) -> tuple[nn.Module, list[tuple[Merge, str]]]:
        new = copy_module(model)
        return new, [edit for group in usable(chosen) for edit in _apply(new, group)]

    bad = find_faults(groups, lambda chosen: cases.fault(lambda: merged(chosen)[0]))
    lost = [group for group in (first or {}).values() if group in bad or group.key not in agreed]
    if extra := {each.layer for group in lost for each in group.summands if each.layer and (each.after or each.stays)}:
        return merge(model, cases, affine, avoid | extra)
    good = usable([group for group in groups if group not in bad])
    into = {name: ", ".join(group.carriers) for group in good for _, name in group.gone}
    left = {name: reason for group, reason in bad.items() for _, name in group.gone if name in norms} | left
    for name, module in model.named_modules():
        if name in norms:
            left.setdefault(name, "calls at other sizes or by other methods differ in what they read")
        elif isinstance(module, _BatchNorm):
            left[name] = "it is not the BatchNorm of a batch" if name in called else "no example calls it"
    new, edits = merged(good)
    return new, edits, into, {name: reason for name, reason in left.items() if name not in into}


@torch.no_grad()
def _apply(model: nn.Module, group: Group) -> list[tuple[Merge, str]]:
    edits: list[tuple[Merge, str]] = []
    layers: list[Any] = [model.get_submodule(name) for name in group.carriers]

    def reshape(rule: Merge, name: str) -> Any:
        model.set_submodule(name, new := rule.build(model.get_submodule(name)).eval())
        edits.append((rule, name))
        return new

    if group.kind == "chain":
        written: list[tuple[Tensor, Tensor | None]] = [_product(*layers)]
    elif group.kind == "readers":
        written = [_after_scale(*each) for each in zip(layers, group.windows, group.scales, strict=True)]
    else:
        written = [_sum(model, layers[0], group)]
    for name, (weight, bias) in zip(group.carriers, written, strict=False):
        layer = reshape(Merge("layer", len(weight) if group.kind == "chain" else 0, bias is not None), name)
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    for form, name in group.gone:
        reshape(Merge(form), name)
    return edits


def _product(first: Any, second: Any) -> tuple[Tensor, Tensor]:
    """Return weight and bias of second(first(x)), where the second is pointwise."""
    rows = second.weight.flatten(1)  # (out, middle)
    bias = rows.new_zeros(len(rows)) if second.bias is None else second.bias
    if first.bias is not None:
        bias = bias + rows @ first.bias
    return (rows @ first.weight.flatten(1)).unflatten(1, first.weight.shape[1:]), bias


def _after_scale(layer: Any, window: InputWindow, scale: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of layer(gain * x + shift)."""
    gain, shift = scale
    weight, bias = layer.weight.unflatten(0, (window.groups, -1)), layer.bias  # (G, out, in, ...)
    sides = (window.groups, 1, weight.shape[2], *[1] * (weight.ndim - 3))
    if shift.any():
        extra = (weight * shift.view(sides)).flatten(2).sum(2).flatten()  # (G out,)
        bias = extra if bias is None else bias + extra
    return (weight * gain.view(sides)).flatten(0, 1), bias


def _sum(model: nn.Module, carrier: Any, group: Group) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias with which the carrier computes the sum and the shift."""
    weight, bias = torch.zeros_like(carrier.weight), group.shift
    for summand in group.summands:
        layer: Any = model.get_submodule(summand.layer) if summand.layer else None
        own = (layer.weight, layer.bias) if layer else (None, None)
        if summand.after:
            own = _product(layer, model.get_submodule(summand.after))
        if own[1] is not None:
            bias = bias + summand.gain * own[1]
        weight = weight + _filters(summand, own[0], group.windows[0], weight)
    return weight, bias if carrier.bias is not None or bias.any() else None


def _filters(summand: Summand, weight: Any, window: InputWindow, like: Tensor) -> Tensor:
    """Return what a summand, whose layer has this weight, adds to that of the carrier: a weight `like` this one."""
    if window.transposed:
        gain = summand.gain.view(window.groups, 1, -1, *[1] * (like.ndim - 2))
        return (weight.unflatten(0, (window.groups, -1)) * gain).flatten(0, 1)  # (in, out / G, ...)
    gain = summand.gain.view(-1, *[1] * (like.ndim - 1))
    if weight is None:
        weight, rows = torch.zeros_like(like), torch.arange(len(like), device=like.device)
        middle: tuple[Any, ...] = (rows, rows % like.shape[1], *(side // 2 for side in window.kernel))
        weight[middle] = 1.0
        return weight * (gain - summand.factor if summand.stays else gain)
    finer = summand.window.groups // window.groups
    if finer > 1:  # blocks on the diagonal of each of the carrier's groups
        blocks = weight.unflatten(0, (window.groups, finer, -1))  # (G, finer, out, in, ...)
        full = blocks.new_zeros(*blocks.shape[:3], finer, *blocks.shape[3:])
        index = torch.arange(finer, device=weight.device)
        full[:, index, :, index] = blocks.transpose(0, 1)
        weight = full.flatten(3, 4).flatten(0, 2)
    margins = [(K - k) // 2 for K, k in zip(window.kernel, summand.window.kernel, strict=True)]
    return F.pad(weight, [side for margin in margins[::-1] for side in (margin, margin)]) * gain
