"""What of a model is exactly one layer, found by what one call of it computes.

A value is an affine function of another, its source, where only layers, norms in eval mode, scales, sums and views lie
between them: the sum of summands gain * layer(source), or gain * source, plus a shift. Such a value is written into one
layer; without a layer it is written into all layers that read it.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import product, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isomorph.operations import Flow, Operation, Value, hooks_on, value_of
from isomorph.surgery.plain_layers import describe_attachments

# The parameters of torch's functions, in order.
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_LAYERS: dict[str, tuple[str, ...]] = {"linear": _CONV[:3], **{f"conv{n}d": _CONV for n in (1, 2, 3)}}
_LAYERS |= {f"conv_transpose{n}d": _TRANSPOSED for n in (1, 2, 3)}
_NORMS = {
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
}
_ADD, _SUB = {"add", "add_", "__add__", "__radd__", "__iadd__"}, {"sub", "sub_", "__sub__", "__isub__"}
_MUL = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
_DIV = {"div", "div_", "true_divide", "__truediv__", "__itruediv__"}
_ARITHMETIC = _ADD | _SUB | _MUL | _DIV
_VIEWS = {"flatten", "reshape", "view", "permute", "transpose", "swapaxes", "unsqueeze", "squeeze", "unflatten"}
_VIEWS |= {"reshape_as", "view_as"}
# Operations that give their input back in eval mode.
_UNCHANGED = {"contiguous", "clone", "detach", "identity", "dropout", "dropout1d", "dropout2d", "dropout3d"}
_UNCHANGED |= {"alpha_dropout", "feature_dropout"}

# What becomes of a module, and its name: identity, nothing (0), or unscaled (a norm without its weight and bias).
Change = tuple[str, str]


class InputWindow(NamedTuple):
    """Which inputs a layer reads; a linear layer has no sides. `padding` is half of what both sides of an axis get."""

    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[float, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False

    @property
    def is_pointwise(self) -> bool:
        sides = (*self.kernel, *self.stride)
        return self.groups == 1 and not self.transposed and set(sides) <= {1} and not any(self.padding)


class Summand(NamedTuple):
    """A summand of a value: gain * layer(source), or gain * source if there is no layer. Shape: gain (C,)

    `stays`: the model's own code adds the source, or multiplies the layer by a number, and goes on to. `after`: a
    pointwise layer that reads the first, so that the summand is gain * after(layer(source)).
    """

    layer: str | None
    window: InputWindow
    gain: Tensor
    stays: bool = False
    after: str | None = None
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class Affine:
    """A value as a function of its source: the sum of summands, plus a shift of shape (C,); `axis` is that of channels.

    `gone`: what becomes of the modules between them when it is written into a layer. `through`: the same value as a
    function of what the layer before its layer reads, such as the adapter up(down(x)).
    """

    source: Value
    axis: int
    summands: tuple[Summand, ...]
    shift: Tensor
    gone: tuple[Change, ...] = ()
    viewed: bool = False
    through: "Affine | None" = None

    def scaled(self, gain: Tensor, shift: Tensor, change: Change) -> "Affine":
        """Return gain * value + shift, computed by what the change removes."""
        summands = tuple(summand._replace(gain=summand.gain * gain) for summand in self.summands)
        gone = self.gone if change in self.gone else (*self.gone, change)
        through = self.through and self.through.scaled(gain, shift, change)
        return replace(self, summands=summands, shift=self.shift * gain + shift, gone=gone, through=through)

    def times(self, number: float) -> "Affine":
        """Return number * value, multiplied by the model's own code."""
        summands = tuple(each._replace(gain=each.gain * number, stays=True, factor=number) for each in self.summands)
        through = self.through and self.through.times(number)
        return replace(self, summands=summands, shift=self.shift * number, through=through)


@dataclass(frozen=True, eq=False)
class Group:
    """What is written together: summands and a shift into the first of the carriers, or into all readers, or a chain.

    A chain is two layers, of which the first becomes the product; where norms or sums lie between them it needs these
    to be written into the first. `windows` are those of the carriers.
    """

    kind: str
    carriers: tuple[str, ...]
    windows: tuple[InputWindow, ...]
    gone: tuple[Change, ...]
    summands: tuple[Summand, ...] = ()
    shift: Tensor = torch.zeros(0)  # noqa: RUF009
    needs_sum: bool = False
    # Modules that are not merged and whose inputs or outputs change.
    across: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What decides whether two calls agree."""
        summands = tuple((each.layer, each.window, each.stays, each.after, each.factor) for each in self.summands)
        return self.kind, self.carriers, self.windows, self.gone, summands


def _bind(operation: Operation) -> dict[str, Any]:
    names = (_LAYERS | _NORMS)[operation.name]
    return dict(zip(names, operation.args, strict=False)) | operation.kwargs


def _window(operation: Operation) -> InputWindow:
    given, weight = _bind(operation), _bind(operation)["weight"]
    sides = tuple(weight.shape[2:])

    def each(value: Any) -> tuple[Any, ...]:
        return (value,) * len(sides) if isinstance(value, int) else tuple(value) * (len(sides) // len(value))

    dilation, padding = each(given.get("dilation", 1)), given.get("padding", 0)
    if isinstance(padding, str):
        same = padding == "same"
        padding = tuple(d * (k - 1) / 2 if same else 0 for d, k in zip(dilation, sides, strict=True))
    numbers = each(given.get("stride", 1)), each(padding), dilation
    return InputWindow(sides, *numbers, given.get("groups", 1), "transpose" in operation.name)


def _carrier(summands: tuple[Summand, ...]) -> Summand | None:
    """Return the summand whose layer can hold the sum of all, or None: that with the largest window."""
    layers = [summand for summand in summands if summand.layer and not (summand.stays or summand.after)]
    if len(summands) == 1 or not layers or any(summand.window.transposed for summand in summands):
        return layers[0] if len(summands) == 1 and layers else None
    carrier = max(layers, key=lambda summand: math.prod(summand.window.kernel))
    return carrier if all(_fits(summand, carrier) for summand in summands) else None


def _sum_of(one: Affine, other: Affine) -> Affine | None:
    summands, gone = (*one.summands, *other.summands), (*one.gone, *other.gone)
    if (one.source, one.axis) != (other.source, other.axis):
        return None
    return replace(one, summands=summands, shift=one.shift + other.shift, gone=gone, through=None)


def _fits(summand: Summand, carrier: Summand) -> bool:
    """True if the filters of a summand, padded with zeros, are filters of the carrier's window."""
    outer, inner = carrier.window, summand.window
    if summand.layer is None:
        one = (1,) * len(outer.kernel)
        inner = InputWindow(one, one, (0,) * len(one), outer.dilation, outer.groups)
    same = inner.stride == outer.stride and inner.groups % outer.groups == 0
    axes = zip(inner.kernel, outer.kernel, inner.padding, outer.padding, inner.dilation, outer.dilation, strict=True)
    return same and all(
        k <= K and (K - k) % 2 == 0 and P - p == D * (K - k) / 2 and (k == 1 or d == D) for k, K, p, P, d, D in axes
    )


class Plan:
    """The groups that one call of a model shows, and the norms of the model that are left, with the reason for each."""

    def __init__(self, model: nn.Module, flow: Flow, affine: bool = False, avoid: frozenset[str] = frozenset()) -> None:
        self.model, self.flow, self.affine, self.avoid = model, flow, affine, avoid
        self.groups: list[Group] = []
        self.norms: set[str] = set()
        self.left: dict[str, str] = {}
        self._kept = set(flow.given_out)
        for name, module in model.named_modules():
            calls = (*flow.inputs[name], *flow.outputs[name]) if hooks_on(module) else ()
            self._kept |= {value for call in calls for value in call}
        self._deciding = set(flow.deciding)
        for name in sorted(flow.deciding, key=len, reverse=True):
            while name in self._deciding and name and not any(flow.outputs[name]):  # its parent gets what it decided
                name = name.rpartition(".")[0]
                self._deciding.add(name)
        self._own: dict[str, list[Operation]] = defaultdict(list)
        live = [each for each in flow.operations if not flow.constant.issuperset(each.outputs)]
        for operation in live:
            self._own[operation.module].append(operation)
        self._values: dict[Value, Affine] = {}
        self._used: set[Value] = set()
        self._refused: dict[Value, str] = {}
        self._chained: list[tuple[Value, Affine]] = []
        for operation in live:
            if len(operation.outputs) == 1 and (found := self._follow(operation)):
                self._values[operation.outputs[0]] = found
                taken = (v for v in operation.inputs if v in self._values and self._is_read_once(v))
                self._used |= {value for value in taken if value != found.source}
        for value, found in self._values.items():
            if value not in self._used:
                has_layer = any(each.layer for each in found.summands)
                if has_layer:
                    self._write_into_layer(value, found)
                else:
                    self._push(value, found)
        self._add_chains()

    def _avoided(self, *layers: str | None) -> bool:
        return not self.avoid.isdisjoint(layers)

    @property
    def called(self) -> set[str]:
        """Names of the modules that the call runs, and of those whose parameters it reads."""
        names = {name for name, outputs in self.flow.outputs.items() if outputs}
        for value, tensor in self.flow.tensors.items():
            if self.flow.reads.get(value):
                names |= {name.rpartition(".")[0] for name in self.flow.names.get(id(tensor), ())}
        return names

    def concerns(self, group: Group) -> bool:
        """True if the call runs or reads what a group changes."""
        names = (*group.carriers, *(name for _, name in group.gone))
        weights: list[Any] = [self.model.get_submodule(name).weight for name in group.carriers]
        return any(n in self.flow.outputs for n in names) or any(self.flow.reads.get(value_of(w)) for w in weights)

    def _is_read_once(self, value: Value) -> bool:
        return len(self.flow.reads[value]) == 1 and value not in self._kept

    def _take(self, value: Value) -> Affine | None:
        return self._values.get(value) if self._is_read_once(value) else None

    def _shape(self, value: Value) -> tuple[int, ...]:
        return tuple(self.flow.tensors[value].shape)

    def _source(self, value: Value, axis: int, layer: str | None = None, window: InputWindow = InputWindow()) -> Affine:  # noqa: B008
        """Return a layer of a source, or the source itself; `axis` and the number of channels are those of `value`."""
        ones = torch.ones(self._shape(value)[axis], dtype=torch.float64, device=self.flow.tensors[value].device)
        return Affine(value, axis, (Summand(layer, window, ones),), torch.zeros_like(ones))

    def _follow(self, operation: Operation) -> Affine | None:
        name, x = operation.name, next((v for v in operation.inputs if v not in self.flow.constant), None)
        if x is None:
            return None
        if name in _LAYERS:
            return self._follow_layer(operation)
        if name in _NORMS and _bind(operation).get("input") is self.flow.tensors[x]:
            return self._follow_norm(operation, x)
        if name in _VIEWS and (base := self._take(x)):
            axis = _new_axis(operation, base.axis, self._shape(x), self._shape(operation.outputs[0]))
            return None if axis is None else replace(base, axis=axis, viewed=True, through=None)
        adds_nothing = name in _ADD and any(type(each) is int and each == 0 for each in operation.args)
        if name in _UNCHANGED or (adds_nothing and len(operation.inputs) == 1):
            return self._take(x)
        if name in _ARITHMETIC and len(operation.inputs) == len(operation.args) == 2 and not operation.kwargs:
            constant = any(value in self.flow.constant for value in operation.inputs)
            return self._follow_scale(operation, x) if constant else self._follow_sum(operation)
        return None

    def _follow_layer(self, operation: Operation) -> Affine | None:
        given, output, (source, *_) = _bind(operation), operation.outputs[0], operation.inputs
        if value_of(given["weight"]) not in self.flow.constant or source in self.flow.constant:
            return None
        name, reason = self._owner(operation, given["weight"], given.get("bias"))
        if reason:
            self._refused[output] = reason
            return None
        window = _window(operation)
        axis = len(self._shape(output)) - 1 - len(window.kernel)
        found = replace(self._source(output, axis, name, window), source=source)
        if (before := self._take(source)) and not before.viewed and window.is_pointwise:
            self._chained.append((output, before))
            first = _carrier(before.summands)
            plain = first and first.window.groups == 1 and not first.window.transposed and len(before.summands) == 1
            if first and plain and not before.gone and not self._avoided(first.layer, name):
                summand = first._replace(gain=found.summands[0].gain, after=name)
                found = replace(found, through=replace(found, source=before.source, summands=(summand,)))
        return found

    def _owner(self, operation: Operation, weight: Tensor, bias: Tensor | None) -> tuple[str, str]:
        """Return the name of the layer that owns a weight, and why nothing can be written into it, if so."""
        names = self.flow.names.get(id(weight), [])
        if len(names) != 1:
            return "", f"the weight of {names[0]} is tied" if names else "its layer computes its weight"
        name = names[0].rpartition(".")[0]
        module, shown = self.model.get_submodule(name), name or "the model"
        if len(self.flow.reads[value_of(weight)]) != 1:
            return name, f"{shown} is used more than once"
        if attached := describe_attachments(module):
            return name, f"{shown} has {attached}"
        if bias is not None and (len(self.flow.names[id(bias)]) > 1 or len(self.flow.reads[value_of(bias)]) != 1):
            return name, f"the bias of {shown} is tied or used elsewhere"
        own = module._parameters.get("weight") is weight and module._parameters.get("bias", weight) is bias
        if not own or (bias is None and operation.module != name):
            return name, f"the bias of {shown} is not its own"
        return name, ""

    def _why_needed(self, operation: Operation) -> str:
        """Return why the module of an operation cannot become the identity, or ""."""
        name, flow = operation.module, self.flow
        if operation.name in _NORMS and (reason := self._not_alone(name)):
            return reason
        own, calls = self._own[name], flow.inputs[name]
        steps = all(each.name in _ARITHMETIC | _UNCHANGED | {"batch_norm"} for each in own)
        last = [calls[0][0] if calls and calls[0] else None, *(each.outputs[0] for each in own)]
        in_turn = all(before in each.inputs for before, each in zip(last[:-1], own, strict=True))
        single = all(sum(v not in flow.constant for v in each.inputs) == 1 for each in own)
        if name and len(calls) == 1 == len(calls[0]) and steps and in_turn and single:
            return describe_attachments(self.model.get_submodule(name)) or ""
        return "its module computes more than the norm"

    def _follow_norm(self, operation: Operation, x: Value) -> Affine | None:
        given, name, output = _bind(operation), operation.module, operation.outputs[0]
        weight, bias = (None if given.get(key) is None else given[key].double() for key in ("weight", "bias"))
        if operation.name != "batch_norm":
            owns = self.model.get_submodule(name)._parameters.get("weight") is given.get("weight")
            if not self.affine or weight is None or weight.ndim != 1 or not owns or self._kept.intersection([output]):
                return None
            self.norms.add(name)
            axis = 1 if operation.name == "group_norm" else len(self._shape(output)) - 1
            if reason := self._not_alone(name):
                self.left[name] = reason
                return None
            shift = torch.zeros_like(weight) if bias is None else bias
            return replace(self._source(output, axis), source=(0, 0)).scaled(weight, shift, ("unscaled", name))
        self.norms.add(name)
        mean, variance = (given.get(key) for key in ("running_mean", "running_var"))
        reason = self._why_needed(operation)
        if reason or given.get("training") or mean is None or variance is None:
            self.left[name] = reason or "it uses the statistics of the batch"
            return None
        gain = torch.rsqrt(variance.double() + given.get("eps", 1e-5))
        gain = gain if weight is None else gain * weight
        shift = (torch.zeros_like(gain) if bias is None else bias) - mean.double() * gain
        base = self._take(x)
        if base is None or base.axis != 1:
            self.left[name] = self._why_none_before(x)
            base = self._source(x, 1)
        return base.scaled(gain, shift, ("identity", name))

    def _not_alone(self, name: str) -> str:
        attached = describe_attachments(self.model.get_submodule(name))
        twice = "it is called more than once" if len(self.flow.inputs[name]) > 1 else ""
        return f"it has {attached}" if attached else twice

    def _why_none_before(self, value: Value) -> str:
        maker = self.flow.made.get(value)
        if value in self._values:
            turned = "its channels are on another axis than those of the layer before it"
            return turned if self._is_read_once(value) else "the output of the layer before it is read elsewhere"
        return self._refused.get(value) or (f"it follows {maker.name}" if maker else "it reads the model's input")

    def _follow_scale(self, operation: Operation, x: Value) -> Affine | None:
        (constant,) = set(operation.inputs) - {x}
        shape, base = self._shape(x), self._take(x)
        turned = operation.name in _SUB | _DIV and operation.inputs[1] != constant
        if turned or self._shape(operation.outputs[0]) != shape or self._why_needed(operation):
            return None
        for axis in (base.axis,) if base else dict.fromkeys((1, len(shape) - 1)):
            tensor = self.flow.tensors[constant]
            sides = (1,) * (len(shape) - tensor.ndim) + tuple(tensor.shape)
            if axis < len(sides) == len(shape) and all(n == 1 for i, n in enumerate(sides) if i != axis):
                vector = tensor.detach().double().reshape(-1).expand(shape[axis])
                ones, zeros = torch.ones_like(vector), torch.zeros_like(vector)
                gain = vector if operation.name in _MUL else 1 / vector if operation.name in _DIV else ones
                shift = vector if operation.name in _ADD else -vector if operation.name in _SUB else zeros
                return (base or self._source(x, axis)).scaled(gain, shift, ("identity", operation.module))
        return None

    def _terms(self, value: Value) -> list[Affine]:
        """Return a summand as a function of its source, also if code multiplies it by a number, and `through`."""
        found, made = self._take(value), self.flow.made.get(value)
        written = not (self.flow.deciding or self.flow.numbers)  # numbers are those of the code
        if found is None and made and written and len(made.inputs) == 1 and self._is_read_once(value):
            numbers = [each for each in made.args if isinstance(each, float) or type(each) is int]
            base, turned = self._take(made.inputs[0]), made.name in _DIV and not isinstance(made.args[0], Tensor)
            layers = [each.layer for each in base.summands] if base else []
            if base and numbers and made.name in _MUL | _DIV and all(layers) and not (turned or self._avoided(*layers)):
                found = base.times(1 / numbers[0] if made.name in _DIV else numbers[0])
        return [each for each in (found, found and found.through) if each and not each.viewed]

    def _follow_sum(self, operation: Operation) -> Affine | None:
        if operation.name not in _ADD or operation.inputs[0] == operation.inputs[1]:
            return None
        one, other = (self._take(value) for value in operation.inputs)
        total = next(filter(None, starmap(_sum_of, product(*map(self._terms, operation.inputs)))), None)
        if total is None:
            for each, value in ((one, operation.inputs[1]), (other, operation.inputs[0])):
                if each and each.source == value and not each.viewed:
                    own = Summand(None, InputWindow(), torch.ones_like(each.shift), stays=True)
                    total = replace(each, summands=(*each.summands, own))
        if total is None or not (_carrier(total.summands) or not any(each.layer for each in total.summands)):
            return None
        scaled = [self.flow.made[value] for value in operation.inputs if value not in (*self._values, total.source)]
        self._used |= {each.inputs[0] for each in scaled}
        return total

    def _write_into_layer(self, value: Value, found: Affine) -> None:
        carrier = _carrier(found.summands)
        others = [summand.layer for summand in found.summands if summand.layer and summand is not carrier]
        if carrier is None or carrier.layer is None or not (found.gone or others):
            return
        gone, branch = list(found.gone), any(summand.layer is None and not summand.stays for summand in found.summands)
        for i, (form, name) in enumerate(gone):
            if branch and form == "identity" and found.source in self.flow.inputs[name][0]:
                gone[i] = "nothing", name  # the branch without a layer: its weight is in the carrier
        others += [summand.after for summand in found.summands if summand.after]
        changes = (*gone, *(("nothing", name) for name in others if name))
        group = Group("sum", (carrier.layer,), (carrier.window,), changes, found.summands, found.shift)
        self._add(group, self._values_between(found.source, value))

    def _push(self, value: Value, found: Affine) -> None:
        if len(found.summands) > 1:
            self.left |= {name: "it follows a sum" for _, name in found.gone if name in self.norms - set(self.left)}
            return
        readers: list[tuple[str, InputWindow]] = []
        if reason := self._find_readers(value, found.axis, bool(found.shift.any()), readers):
            for name in self.norms.intersection(name for _, name in found.gone):
                before = f"{self.left[name]}; nor does it fit into what follows: " if name in self.left else ""
                self.left[name] = before + reason
            return
        names, windows = zip(*readers, strict=True)
        changed = {value, *self._values_between(found.source, value), *self._views_of(value)}
        self._add(Group("readers", names, windows, found.gone, found.summands, found.shift), changed)

    def _find_readers(
        self, value: Value, axis: int, shifted: bool, readers: list[tuple[str, InputWindow]]
    ) -> str | None:
        """Add the layers that read a value, also as a view of it; return why it cannot be written into all, if so."""
        if value in self._kept or not self.flow.reads[value]:
            return "what it gives is an output of the model"
        shape = self._shape(value)
        for operation in self.flow.reads[value]:
            output: Value = operation.outputs[0]
            moved: int | None = axis
            if operation.name in _VIEWS:
                moved = _new_axis(operation, axis, shape, self._shape(output))
            if operation.name in _VIEWS | _UNCHANGED | {"roll"} and moved is not None:
                if reason := self._find_readers(output, moved, shifted, readers):
                    return reason
                continue
            layer = self._values.get(output) if operation.name in _LAYERS else None
            if not layer or layer.source != value or axis != len(shape) - 1 - len(layer.summands[0].window.kernel):
                return self._refused.get(output) or f"it is read by {operation.name}"
            name, window = layer.summands[0][:2]
            if window.transposed or (shifted and any(window.padding)):
                return f"{name} is transposed" if window.transposed else f"{name} pads with zeros"
            readers.append((str(name), window))
        return None

    def _values_between(self, source: Value, value: Value) -> set[Value]:
        """Return the values from which one is computed, back to its source, without both."""
        between: set[Value] = set()
        waiting = [value]
        while waiting:
            maker = self.flow.made.get(waiting.pop())
            for read in maker.inputs if maker else ():
                if read != source and read in self._values and read not in between:
                    between.add(read)
                    waiting.append(read)
        return between

    def _views_of(self, value: Value) -> set[Value]:
        """Return what operations give that a norm passes on its way into the layers that read it."""
        views: set[Value] = set()
        for operation in self.flow.reads[value]:
            if operation.name not in _LAYERS:
                output = operation.outputs[0]
                views |= {output, *self._views_of(output)}
        return views

    def _across(self, group: Group, changed: set[Value], parts: set[str]) -> tuple[str, ...]:
        """Return the modules that are not among the parts and whose inputs or outputs are among the changed values."""
        parts = parts | {*group.carriers, *_parts_of(group)}
        names = []
        for name, module in self.model.named_modules():
            values = (*self.flow.inputs.get(name, ()), *self.flow.outputs.get(name, ()))
            is_touched = not changed.isdisjoint(value for call in values for value in call)
            if name and is_touched and not _consists_of(name, module, parts):
                names.append(name)
        return tuple(names)

    def _add(self, group: Group, changed: set[Value], parts: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """Add a group unless the code that connects its modules branches on the numbers of a batch.

        `changed`: the values that are others once the group is merged, by which it is found what lies `across` it:
        modules that are neither merged here nor among the parts.
        """
        names = [*group.carriers, *(name for _, name in group.gone)]
        for change in group.gone if group.kind != "chain" else ():
            ends = [self._values.get(each.outputs[0]) for each in self._own[change[1]][-1:]]
            if change[0] == "identity" and not any(end and change in end.gone for end in ends):
                reason = "its module computes more than the norm"
                self.left |= {name: reason for _, name in group.gone if name in self.norms}
                return
        for deciding in self._deciding:
            if len({_child_of(deciding, name) for name in names}) > 1 or deciding in names:
                reason = f"{deciding or 'the model'} branches on the numbers of a batch"
                self.left |= {name: reason for _, name in group.gone if name in self.norms}
                return
        for _, name in group.gone:
            self.left.pop(name, None)
        self.groups.append(replace(group, across=self._across(group, changed, set(parts))))

    def _add_chains(self) -> None:
        """Add the pairs of layers whose product is not larger, last ones first, so that a whole chain becomes one."""
        nothing = {name for group in self.groups for form, name in group.gone if form == "nothing"}
        outputs: dict[str, int] = {}
        for output, before in self._chained[::-1]:
            first, last = _carrier(before.summands), self._values[output].summands[0].layer
            if first is None or not first.layer or not last or nothing & {first.layer, last}:
                continue
            stays = any(summand.layer is None for summand in before.summands)
            if stays or first.window.groups > 1 or first.window.transposed:
                continue
            one, two = (self.model.get_submodule(name).get_parameter("weight") for name in (first.layer, last))
            rows = outputs.get(last, len(two))
            if one.ndim == two.ndim and rows * one[0].numel() <= one.numel() + rows * two.shape[1]:
                outputs[first.layer] = rows
                windows = first.window, self._values[output].summands[0].window
                between = bool(before.gone) or len(before.summands) > 1
                group = Group("chain", (first.layer, last), windows, (("identity", last),), needs_sum=between)
                self._add(group, self._values_between(before.source, output), _parts_of(before))


def _parts_of(found: Affine | Group) -> set[str]:
    """Return the names of the modules that compute a value or are merged with a group."""
    names = {name for _, name in found.gone}
    for summand in found.summands:
        names |= {name for name in (summand.layer, summand.after) if name}
    return names


def _consists_of(name: str, module: nn.Module, parts: set[str]) -> bool:
    """Return True if every module with parameters or buffers of its own, here and inside, is among the parts."""
    for path, inner in module.named_modules(prefix=name):
        has_own = any(True for _ in inner.parameters(recurse=False)) or any(True for _ in inner.buffers(recurse=False))
        inside = any(path == part or path.startswith(f"{part}.") for part in parts)
        if has_own and not inside:
            return False
    return True


def _child_of(parent: str, name: str) -> str | None:
    if parent and not name.startswith(f"{parent}."):
        return None
    return name.removeprefix(f"{parent}." if parent else "").partition(".")[0]


def _new_axis(operation: Operation, axis: int, before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
    if operation.name in ("permute", "transpose", "swapaxes"):
        given = [*operation.args[1:], *operation.kwargs.values()]
        order = [int(d) % len(before) for d in (given[0] if isinstance(given[0], list | tuple) else given)]
        if operation.name == "permute":
            return order.index(axis)
        return order[1 - order.index(axis)] if axis in order else axis
    leading, channels = math.prod(before[:axis]), before[axis]
    places = [i for i, side in enumerate(after) if side == channels and math.prod(after[:i]) == leading]
    return places[0] if len(places) == 1 and channels > 1 else None
