"""What of a model is exactly one layer, found by what one call of it computes.

A value is an affine function of another, its source, where only layers, norms in eval mode, scales, sums and moves lie
between them: the sum of summands gain * layer(source), or gain * source, plus a shift. Such a value is written into one
layer; without a layer it is written into all layers that read it.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, nn

from isomorph.operations import Flow, Operation, Value, hooks_on, value_of
from isomorph.surgery.affine import Affine, Group, Summand, carrier_of, sum_of
from isomorph.surgery.channels import Channels, Step, follow_channels, kind_of_step
from isomorph.surgery.layer_calls import (
    ADD,
    ARITHMETIC,
    DIV,
    LAYERS,
    MUL,
    NORMS,
    SUB,
    InputWindow,
    adds_zero,
    bind_arguments,
    is_unchanged,
    window_of,
)
from isomorph.surgery.plain_layers import describe_attachments

# A layer that reads a value, its window, and the gain and shift of its inputs.
_Reader = tuple[str, InputWindow, tuple[Tensor, Tensor]]


class Plan:
    """The groups that one call of a model shows, and the norms of the model that are left, with the reason for each."""

    def __init__(self, model: nn.Module, flow: Flow, affine: bool = False, avoid: frozenset[str] = frozenset()) -> None:
        self.model, self.flow, self.affine, self.avoid = model, flow, affine, avoid
        self.groups: list[Group] = []
        self.norms: set[str] = set()
        self.left: dict[str, str] = {}
        self._kept = set(flow.given_out)
        # The modules whose inputs or outputs a value is, the order of all, and which hold parameters in each.
        self._touching: dict[Value, set[str]] = defaultdict(set)
        self._order: dict[str, int] = {}
        self._owners: dict[str, list[str]] = {}
        for name, module in model.named_modules():
            self._add_module(name, module)
        self._deciding = set(flow.branches_on_data)
        for name in sorted(flow.branches_on_data, key=len, reverse=True):
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
            self._record(operation)
        for value, found in self._values.items():
            if value not in self._used:
                if found.has_layer:
                    self._write_into_layer(found)
                else:
                    self._push(value, found)
        self._add_chains()

    def _add_module(self, name: str, module: nn.Module) -> None:
        """Note the values that a module gets and gives, and that those of one with hooks are not to change."""
        values = set[Value]()
        for call in (*self.flow.inputs.get(name, ()), *self.flow.outputs.get(name, ())):
            values |= set(call)
        if hooks_on(module):
            self._kept |= values
        self._order[name] = len(self._order)
        for value in values if name else ():
            self._touching[value].add(name)

    def _record(self, operation: Operation) -> None:
        """Note the outputs of an operation that are affine functions, and the values that they take up."""
        moved = self._follow_moves(operation)
        self._values |= moved
        if moved or len(operation.outputs) != 1:
            self._used |= {found.steps[-1].value for found in moved.values()}
            return
        if found := self._follow(operation):
            output = operation.outputs[0]
            self._values[output] = found if is_unchanged(operation) else replace(found, end=output)
            taken = [value for value in operation.inputs if value in self._values and self._is_read_once(value)]
            self._used |= {value for value in taken if value != found.source}

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
        weights = [self.model.get_submodule(name).get_parameter("weight") for name in group.carriers]
        called = any(name in self.flow.outputs for name in names)
        return called or any(self.flow.reads.get(value_of(weight)) for weight in weights)

    def _is_read_once(self, value: Value) -> bool:
        return len(self.flow.reads[value]) == 1 and value not in self._kept

    def _take(self, value: Value) -> Affine | None:
        return self._values.get(value) if self._is_read_once(value) else None

    def _shape(self, value: Value) -> tuple[int, ...]:
        return tuple(self.flow.tensors[value].shape)

    def _source(self, value: Value, axis: int, layer: str | None = None, window: InputWindow = InputWindow()) -> Affine:  # noqa: B008
        """Return a layer of a source, or the source itself; `axis` and the number of channels are those of `value`."""
        ones = torch.ones(self._shape(value)[axis], dtype=torch.float64, device=self.flow.tensors[value].device)
        return Affine(value, value, value, axis, (Summand(layer, window, ones),), torch.zeros_like(ones))

    def _follow(self, operation: Operation) -> Affine | None:
        x = next((value for value in operation.inputs if value not in self.flow.constant), None)
        if x is None:
            return None
        if operation.name in LAYERS:
            return self._follow_layer(operation)
        if operation.name in NORMS and bind_arguments(operation).get("input") is self.flow.tensors[x]:
            return self._follow_norm(operation, x)
        if is_unchanged(operation) or adds_zero(operation):
            return self._take(x)
        two_values = len(operation.inputs) == len(operation.args) == 2 and not operation.kwargs
        if operation.name not in ARITHMETIC or not two_values:
            return None
        if any(value in self.flow.constant for value in operation.inputs):
            return self._follow_scale(operation, x)
        return self._follow_sum(operation)

    def _follow_moves(self, operation: Operation) -> dict[Value, Affine]:
        """Return the outputs of an operation that moves, averages or selects the elements of one of its inputs."""
        for value in dict.fromkeys(operation.inputs):
            base, others = self._take(value), list[Operation]()
            if base is None and self._is_divided(value):
                base = self._values[value]
                others = [other for other in self.flow.reads[value] if other is not operation]
            if base is None or (kind := kind_of_step(self.flow, operation, value)) is None:
                continue
            is_divided = len(operation.outputs) > 1 or others
            # into readers a scale goes where it was computed, before an average or a choice
            if base.is_layer_alone if is_divided else base.has_layer or kind == "move":
                steps = [Step(operation, value, kind, i, tuple(others)) for i in range(len(operation.outputs))]
                return {output: base.moved(step) for output, step in zip(operation.outputs, steps, strict=True)}
        return {}

    def _is_divided(self, value: Value) -> bool:
        """True for what a layer gives if others read it in parts, such as queries, keys and values."""
        base = self._values.get(value)
        if base is None or not base.is_layer_alone or value in self._kept:
            return False
        readers = self.flow.reads[value]
        return all(each.name in ("__getitem__", "select", "narrow") for each in readers) and len(readers) > 1

    def _follow_layer(self, operation: Operation) -> Affine | None:
        given = bind_arguments(operation)
        output, source = operation.outputs[0], operation.inputs[0]
        if value_of(given["weight"]) not in self.flow.constant or source in self.flow.constant:
            return None
        window = window_of(operation)
        weight = self._parameter_of(given["weight"])
        if weight is not given["weight"]:
            window = window._replace(computed=True)
        name, reason = self._owner(operation, weight, given.get("bias"))
        if weight is None or (window.computed and window.transposed):
            reason = "its layer computes its weight"
        if reason:
            self._refused[output] = reason
            return None
        axis = len(self._shape(output)) - 1 - len(window.kernel)
        found = replace(self._source(output, axis, name, window), source=source)
        before = self._take(source)
        if before is None or before.steps or not window.is_pointwise:
            return found
        self._chained.append((output, before))
        first = carrier_of(before.summands)
        if first is None or len(before.summands) > 1 or before.gone or self._avoided(first.layer, name):
            return found
        if first.window.groups > 1 or not first.window.is_plain:
            return found
        summand = first._replace(gain=found.summands[0].gain, after=name)
        return replace(found, through=replace(found, source=before.source, summands=(summand,)))

    def _parameter_of(self, weight: Tensor) -> Tensor | None:
        """Return the parameter of whose rows the rows of a weight consist, the weight itself if it is one, or None."""
        value, steps = value_of(weight), list[Step]()
        while value[0] not in self.flow.names:
            made = self.flow.made.get(value)
            if made is None or len(self.flow.reads[value]) != 1:
                return None
            source = made.inputs[0]
            if not is_unchanged(made):
                if kind_of_step(self.flow, made, source) != "move":
                    return None
                steps.insert(0, Step(made, source, "move", made.outputs.index(value)))
            value = source
        parameter = self.flow.tensors[value]
        if not steps:
            return parameter
        channels = follow_channels(self.flow, value, 0, steps)
        rows = None if channels is None or not channels.keeps_shifts else channels.along(0)
        in_order = rows is not None and rows.tolist() == list(range(len(parameter)))
        return parameter if in_order else None

    def _owner(self, operation: Operation, weight: Tensor | None, bias: Tensor | None) -> tuple[str, str]:
        """Return the name of the layer that owns a weight, and why nothing can be written into it, if so."""
        names = [] if weight is None else self.flow.names.get(id(weight), [])
        if weight is None or len(names) != 1:
            return "", f"the weight of {names[0]} is tied" if names else "its layer computes its weight"
        name = names[0].rpartition(".")[0]
        module, shown = self.model.get_submodule(name), name or "the model"
        if len(self.flow.reads[value_of(weight)]) != 1:
            return name, f"{shown} is used more than once"
        if attached := describe_attachments(module):
            return name, f"{shown} has {attached}"
        if bias is not None and (len(self.flow.names[id(bias)]) > 1 or len(self.flow.reads[value_of(bias)]) != 1):
            return name, f"the bias of {shown} is tied or used elsewhere"
        own_bias = (vars(module) | module._parameters).get("bias", weight)
        own = module._parameters.get("weight") is weight and own_bias is bias
        if not own or (bias is None and operation.module != name):
            return name, f"the bias of {shown} is not its own"
        return name, ""

    def _why_needed(self, operation: Operation) -> str:
        """Return why the module of an operation cannot become the identity, or ""."""
        name, flow = operation.module, self.flow
        if operation.name in NORMS and (reason := self._not_alone(name)):
            return reason
        own, calls = self._own[name], flow.inputs[name]
        steps = all(each.name in ARITHMETIC | {"batch_norm"} or is_unchanged(each) for each in own)
        last = [calls[0][0] if calls and calls[0] else None, *(each.outputs[0] for each in own)]
        in_turn = all(before in each.inputs for before, each in zip(last[:-1], own, strict=True))
        single = all(sum(v not in flow.constant for v in each.inputs) == 1 for each in own)
        if name and len(calls) == 1 == len(calls[0]) and steps and in_turn and single:
            return describe_attachments(self.model.get_submodule(name)) or ""
        return "its module computes more than the norm"

    def _follow_norm(self, operation: Operation, x: Value) -> Affine | None:
        if operation.name != "batch_norm":
            return self._follow_affine_norm(operation)
        given, name = bind_arguments(operation), operation.module
        self.norms.add(name)
        mean, variance = given.get("running_mean"), given.get("running_var")
        reason = self._why_needed(operation)
        if reason or given.get("training") or mean is None or variance is None:
            self.left[name] = reason or "it uses the statistics of the batch"
            return None
        gain = torch.rsqrt(variance.double() + given.get("eps", 1e-5))
        if given.get("weight") is not None:
            gain = gain * given["weight"].double()
        shift = -mean.double() * gain
        if given.get("bias") is not None:
            shift = shift + given["bias"].double()
        change = ("identity", name)
        sides = (-1, *[1] * (len(self._shape(x)) - 2))
        base = self._take(x)
        scale = self._by_channel(base, gain.view(sides), shift.view(sides)) if base else self._why_none_before(x)
        if base is None or isinstance(scale, str):
            self.left[name] = str(scale)
            return self._source(x, 1).scaled(gain, shift, change)
        return base.scaled(*scale, change)

    def _follow_affine_norm(self, operation: Operation) -> Affine | None:
        """Return the weight and bias of a LayerNorm, RMSNorm or GroupNorm as a function of what it normalises."""
        given, name, output = bind_arguments(operation), operation.module, operation.outputs[0]
        weight, bias = given.get("weight"), given.get("bias")
        owns = self.model.get_submodule(name)._parameters.get("weight") is weight
        if not self.affine or weight is None or weight.ndim != 1 or not owns or output in self._kept:
            return None
        self.norms.add(name)
        axis = 1 if operation.name == "group_norm" else len(self._shape(output)) - 1
        if reason := self._not_alone(name):
            self.left[name] = reason
            return None
        shift = torch.zeros_like(weight) if bias is None else bias
        normalised = replace(self._source(output, axis), source=(0, 0))
        return normalised.scaled(weight.double(), shift.double(), ("unscaled", name))

    def _not_alone(self, name: str) -> str:
        attached = describe_attachments(self.model.get_submodule(name))
        twice = "it is called more than once" if len(self.flow.inputs[name]) > 1 else ""
        return f"it has {attached}" if attached else twice

    def _why_none_before(self, value: Value) -> str:
        if value in self._values:
            return "the output of the layer before it is read elsewhere"
        maker = self.flow.made.get(value)
        return self._refused.get(value) or (f"it follows {maker.name}" if maker else "it reads the model's input")

    def _by_channel(self, base: Affine, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor] | str:
        """Return gain and shift of the value by channel of its start, or why it has none.

        Shape: gain and shift broadcast to the value -> (C,), (C,)
        """
        turned = "its channels are on another axis than those of the layer before it"
        if not base.steps:
            tensor = self.flow.tensors[base.start]
            return _along_axis(gain, shift, tensor.ndim, base.axis, tensor.shape[base.axis]) or turned
        channels = follow_channels(self.flow, base.start, base.axis, base.steps)
        if channels is None:
            return turned
        if reason := _why_stopped(channels, base.steps, gain, shift):
            return f"it follows {reason}"
        gains, shifts = channels.vector(gain, 1.0), channels.vector(shift, 0.0)
        return turned if gains is None or shifts is None else (gains, shifts)

    def _follow_scale(self, operation: Operation, x: Value) -> Affine | None:
        (constant,) = set(operation.inputs) - {x}
        shape = self._shape(x)
        turned = operation.name in SUB | DIV and operation.inputs[1] != constant
        if turned or self._shape(operation.outputs[0]) != shape or self._why_needed(operation):
            return None
        number = self.flow.tensors[constant].detach().double()
        gain, shift = torch.ones_like(number), torch.zeros_like(number)
        if operation.name in MUL | DIV:
            gain = number if operation.name in MUL else 1 / number
        else:
            shift = number if operation.name in ADD else -number
        base = self._take(x)
        axes = (1, len(shape) - 1) if len(shape) > 1 else ()
        bases = [base] if base else [self._source(x, axis) for axis in dict.fromkeys(axes)]
        for each in bases:
            scale = self._by_channel(each, gain, shift)
            if not isinstance(scale, str):
                return each.scaled(*scale, ("identity", operation.module))
        return None

    def _terms(self, value: Value) -> list[Affine]:
        """Return a summand as a function of its source, also if code multiplies it by a number, and `through`."""
        found = self._take(value) or self._multiplied(value)
        return [each for each in (found, found and found.through) if each and not each.steps]

    def _multiplied(self, value: Value) -> Affine | None:
        """Return a value of layers that the model's own code multiplies by a number, or None."""
        made = self.flow.made.get(value)
        if self.flow.branches_on_data or self.flow.reads_parameters:  # numbers may not be those of the code
            return None
        if made is None:
            return None
        if made.name not in MUL | DIV or len(made.inputs) != 1 or not self._is_read_once(value):
            return None
        numbers = [each for each in made.args if isinstance(each, float) or type(each) is int]
        turned = made.name in DIV and not isinstance(made.args[0], Tensor)
        base = self._take(made.inputs[0])
        if base is None or turned or not numbers:
            return None
        layers = [each.layer for each in base.summands]
        if not all(layers) or self._avoided(*layers):
            return None
        return base.times(1 / numbers[0] if made.name in DIV else numbers[0])

    def _follow_sum(self, operation: Operation) -> Affine | None:
        first, second = operation.inputs
        if operation.name not in ADD | SUB or first == second:
            return None
        total = next(self._sums(first, second, operation.name in SUB), None)
        if total is None or (total.has_layer and carrier_of(total.summands) is None):
            return None
        for value in operation.inputs:
            if value not in self._values and value != total.source:  # multiplied by a number
                self._used.add(self.flow.made[value].inputs[0])
        return total

    def _sums(self, first: Value, second: Value, subtracts: bool) -> Iterator[Affine]:
        """Yield a sum or difference as a function of the source of both values, or of one value if it is the source."""
        terms = self._terms(second)
        if subtracts:
            terms = [each.negated() for each in terms if not self._avoided(*(part.layer for part in each.summands))]
        for one, other in product(self._terms(first), terms):
            if total := sum_of(one, other):
                yield total
        for each in self._terms(first):
            if each.source == second:
                yield _with_source(each, -1.0 if subtracts else 1.0)
        for each in terms:
            if each.source == first:
                yield _with_source(each, 1.0)

    def _write_into_layer(self, found: Affine) -> None:
        carrier = carrier_of(found.summands)
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
        self._add(group, self._values_between(found.source, found.end))

    def _push(self, value: Value, found: Affine) -> None:
        if len(found.summands) > 1:
            self.left |= {name: "it follows a sum" for _, name in found.gone if name in self.norms - set(self.left)}
            return
        readers: list[_Reader] = []
        if reason := self._find_readers(value, found, readers):
            for name in self.norms.intersection(name for _, name in found.gone):
                before = f"{self.left[name]}; nor does it fit into what follows: " if name in self.left else ""
                self.left[name] = before + reason
            return
        names, windows, scales = zip(*readers, strict=True)
        changed = {value, *self._values_between(found.source, value), *self._values_after(value)}
        self._add(Group("readers", names, windows, found.gone, found.summands, found.shift, scales=scales), changed)

    def _find_readers(self, value: Value, found: Affine, readers: list[_Reader]) -> str | None:
        """Add the layers that read a value, also moved; return why it cannot be written into all, if so."""
        if value in self._kept or not self.flow.reads[value]:
            return "what it gives is an output of the model"
        for operation in self.flow.reads[value]:
            moved = {}
            if is_unchanged(operation) or adds_zero(operation):
                moved = {operation.outputs[0]: found}
            elif kind := kind_of_step(self.flow, operation, value):
                outputs = enumerate(operation.outputs)
                moved = {output: found.moved(Step(operation, value, kind, i)) for i, output in outputs}
            for output, each in moved.items():
                unread = len(moved) > 1 and not self.flow.reads[output] and output not in self._kept
                if not unread and (reason := self._find_readers(output, each, readers)):
                    return reason
            if not moved and (reason := self._add_reader(operation, value, found, readers)):
                return reason
        return None

    def _add_reader(self, operation: Operation, value: Value, found: Affine, readers: list[_Reader]) -> str | None:
        """Add a layer that reads a value; return why the value cannot be written into it, if so."""
        output = operation.outputs[0]
        layer = self._values.get(output) if operation.name in LAYERS else None
        steps = [step.operation.name for step in found.steps if step.kind != "move"]
        read_by = f"it is read by {(*steps, operation.name)[0]}"
        if layer is None or layer.source != value:
            return self._refused.get(output) or read_by
        name, window = layer.summands[0][:2]
        if not window.is_plain:
            return f"{name} is transposed" if window.transposed else f"{name} computes its weight"
        if bool(found.shift.any()) and any(window.padding):
            return f"{name} pads with zeros"
        axis = len(self._shape(value)) - 1 - len(window.kernel)
        rows = torch.arange(len(found.shift), device=found.shift.device) if axis == found.axis else None
        gain = found.summands[0].gain
        if found.steps:
            channels = follow_channels(self.flow, found.start, found.axis, found.steps)
            if channels and (reason := _why_stopped(channels, found.steps, gain, found.shift)):
                return f"it is read by {reason}"
            rows = channels.along(axis) if channels else None
        if rows is None:
            return read_by
        zero = rows < 0
        readers.append((str(name), window, (gain[rows].where(~zero, 1), found.shift[rows].where(~zero, 0))))
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

    def _values_after(self, value: Value) -> set[Value]:
        """Return what operations give that a norm passes on its way into the layers that read it."""
        after: set[Value] = set()
        for operation in self.flow.reads[value]:
            if operation.name not in LAYERS:
                for output in operation.outputs:
                    after |= {output, *self._values_after(output)}
        return after

    def _across(self, group: Group, changed: set[Value], parts: set[str]) -> tuple[str, ...]:
        """Return the modules that are not among the parts and whose inputs or outputs are among the changed values.

        A norm that is written into its readers is one of them: it gives what it gets then.
        """
        parts = parts | {*group.carriers, *_parts_of(group)}
        touched = set[str]()
        for value in changed:
            touched |= self._touching[value]
        names = [name for name in touched if not self._consists_of(name, parts)]
        names.sort(key=self._order.__getitem__)
        if group.kind == "readers":
            names += [name for _, name in group.gone]
        return tuple(names)

    def _consists_of(self, name: str, parts: set[str]) -> bool:
        """Return True if every module with parameters or buffers of its own, here and inside, is among the parts."""
        if name not in self._owners:
            self._owners[name] = _owners_in(name, self.model.get_submodule(name))
        outside = [path for path in self._owners[name] if not _lies_within(path, parts)]
        return not outside

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
            first, last = carrier_of(before.summands), self._values[output].summands[0].layer
            if first is None or not first.layer or not last or nothing & {first.layer, last}:
                continue
            stays = any(summand.layer is None for summand in before.summands)
            if stays or first.window.groups > 1 or not first.window.is_plain:
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


def _lies_within(path: str, parts: set[str]) -> bool:
    """Return True for the name of one of the parts, or of a module inside one."""
    while path not in parts:
        if not path:
            return False
        path = path.rpartition(".")[0]
    return True


def _owners_in(name: str, module: nn.Module) -> list[str]:
    """Return the names of a module and of those inside that have parameters or buffers of their own."""
    owners = []
    for path, inner in module.named_modules(prefix=name):
        own = (*inner._parameters.values(), *inner._buffers.values())
        if any(tensor is not None for tensor in own):
            owners.append(path)
    return owners


def _child_of(parent: str, name: str) -> str | None:
    if parent and not name.startswith(f"{parent}."):
        return None
    return name.removeprefix(f"{parent}." if parent else "").partition(".")[0]


def _with_source(found: Affine, factor: float) -> Affine:
    """Return found + factor * source, where the model's own code adds the source."""
    own = Summand(None, InputWindow(), factor * torch.ones_like(found.shift), stays=True, factor=factor)
    return replace(found, summands=(*found.summands, own), through=None)


def _along_axis(gain: Tensor, shift: Tensor, ndim: int, axis: int, channels: int) -> tuple[Tensor, Tensor] | None:
    """Return tensors that vary along one axis of those with which they are broadcast. Shape: -> (C,), (C,)"""
    sides = (1,) * (ndim - gain.ndim) + tuple(gain.shape)
    if len(sides) != ndim or any(side != 1 for i, side in enumerate(sides) if i != axis):
        return None
    return gain.reshape(-1).expand(channels), shift.reshape(-1).expand(channels)


def _why_stopped(channels: Channels, steps: tuple[Step, ...], gain: Tensor, shift: Tensor) -> str:
    """Return through which operation a scale or a shift does not pass, or ""."""
    names = {step.kind: step.operation.name for step in steps}
    if channels.keeps_order and bool((gain < 0).any()):
        return f"{names['largest']}, through which a scale below 0 does not pass"
    if bool(shift.any()) and not channels.keeps_shifts:
        return f"{steps[-1].operation.name}, after zeros or an average with them, through which a shift does not pass"
    return ""
