"""Values of a model that are affine functions of another value, read from what one call of it computes.

Operation after operation: a layer starts such a function, a norm in eval mode or a scale changes it, a sum adds two, a
move takes it along. What each operation does is one method below.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.operations import Flow, Operation, TensorVersion, value_of
from isomorph.surgery.affine import Affine, Summand, carrier_of, sum_of
from isomorph.surgery.channels import Channels, ChannelStep, follow_channels, kind_of_step
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
from isomorph.surgery.modules import parent_name
from isomorph.surgery.plain_layers import describe_attachments

_TAKES_PART = ("__getitem__", "select", "narrow")
_TURNED = "its channels are on another axis than those of the layer before it"


class AffineValues:
    """The affine values of one call, by value, and why norms and layers are none.

    `protected`: values that are not to change, because they are outputs of the model or of a module with hooks.
    `affine_norms`: whether weights and biases of LayerNorm, RMSNorm and GroupNorm are read too. `avoid`: layers that
    are not to be added to others.
    """

    def __init__(
        self,
        model: nn.Module,
        flow: Flow,
        protected: set[TensorVersion],
        affine_norms: bool,
        avoid: frozenset[str],
    ) -> None:
        self.model = model
        self.flow = flow
        self.protected = protected
        self.affine_norms = affine_norms
        self.avoid = avoid
        self.affine_of: dict[TensorVersion, Affine] = {}
        # Values that another affine value takes up.
        self.used: set[TensorVersion] = set()
        # Names of the norms, and why nothing is done with one.
        self.norms: set[str] = set()
        self.left: dict[str, str] = {}
        # Why the output of a layer is not an affine value.
        self.rejected: dict[TensorVersion, str] = {}
        # Outputs of pointwise layers, with what these read.
        self.chained: list[tuple[TensorVersion, Affine]] = []
        self.operations_of: dict[str, list[Operation]] = defaultdict(list)
        depending = [
            operation
            for operation in flow.operations
            if not flow.constant.issuperset(operation.outputs)
        ]
        for operation in depending:
            self.operations_of[operation.module].append(operation)
        for operation in depending:
            self._read(operation)

    def is_read_once(self, value: TensorVersion) -> bool:
        return len(self.flow.reads[value]) == 1 and value not in self.protected

    def is_avoided(self, *layers: str | None) -> bool:
        return not self.avoid.isdisjoint(layers)

    def shape(self, value: TensorVersion) -> tuple[int, ...]:
        return tuple(self.flow.tensors[value].shape)

    def _dependent_inputs(self, operation: Operation) -> list[TensorVersion]:
        """Return the values that an operation reads and that follow from the inputs of the model."""
        return [value for value in operation.inputs if value not in self.flow.constant]

    def _read(self, operation: Operation) -> None:
        """Note the outputs of an operation that are affine values, and the values that they take up."""
        moved_values = self._read_moves(operation)
        self.affine_of |= moved_values
        if moved_values or len(operation.outputs) != 1:
            self.used |= {affine.steps[-1].value for affine in moved_values.values()}
            return
        affine = self._read_arithmetic(operation)
        if affine is None:
            return
        output = operation.outputs[0]
        self.affine_of[output] = affine if is_unchanged(operation) else replace(affine, end=output)
        for value in operation.inputs:
            if value in self.affine_of and self.is_read_once(value) and value != affine.source:
                self.used.add(value)

    def _read_arithmetic(self, operation: Operation) -> Affine | None:
        """Return what an operation computes as an affine value: a layer, norm, scale or sum; None for any other."""
        depends_on = self._dependent_inputs(operation)
        if not depends_on:
            return None
        x = depends_on[0]
        if operation.name in LAYERS:
            return self._read_layer(operation)
        if (
            operation.name in NORMS
            and bind_arguments(operation).get("input") is self.flow.tensors[x]
        ):
            return self._read_norm(operation, x)
        if is_unchanged(operation) or adds_zero(operation):
            return self._affine_to_extend(x)
        has_two_values = len(operation.inputs) == len(operation.args) == 2 and not operation.kwargs
        if operation.name not in ARITHMETIC or not has_two_values:
            return None
        if len(depends_on) == 1:
            return self._read_scale(operation, x)
        return self._read_sum(operation)

    def _affine_to_extend(self, value: TensorVersion) -> Affine | None:
        """Return what a value is, if nothing but the next operation reads it; None if others do."""
        return self.affine_of.get(value) if self.is_read_once(value) else None

    def _new_affine(
        self,
        value: TensorVersion,
        axis: int,
        layer: str | None = None,
        window: InputWindow = InputWindow(),  # noqa: B008
    ) -> Affine:
        """Return a layer of a source, or the source itself; `axis` and the number of channels are those of `value`."""
        channels = self.shape(value)[axis]
        ones = torch.ones(channels, dtype=torch.float64, device=self.flow.tensors[value].device)
        return Affine(
            value, value, value, axis, (Summand(layer, window, ones),), torch.zeros_like(ones)
        )

    # Moves, averages and choices of elements

    def _read_moves(self, operation: Operation) -> dict[TensorVersion, Affine]:
        """Return the outputs of an operation that moves, averages or selects the elements of one of its inputs."""
        for value in dict.fromkeys(operation.inputs):
            base = self._affine_to_extend(value)
            others: list[Operation] = []
            if base is None and self._is_read_in_parts(value):
                base = self.affine_of[value]
                others = [other for other in self.flow.reads[value] if other is not operation]
            if base is None:
                continue
            kind = kind_of_step(self.flow, operation, value)
            if kind is None:
                continue
            if len(operation.outputs) > 1 or others:
                may_move = base.is_layer_alone
            else:  # into readers a scale goes where it was computed, before an average or a choice
                may_move = base.has_layer or kind == "move"
            if may_move:
                return base.moved(operation, value, kind, tuple(others))
        return {}

    def _is_read_in_parts(self, value: TensorVersion) -> bool:
        """True for what a layer gives if others read it in parts, such as queries, keys and values."""
        base = self.affine_of.get(value)
        if base is None or not base.is_layer_alone or value in self.protected:
            return False
        readers = self.flow.reads[value]
        return len(readers) > 1 and all(reader.name in _TAKES_PART for reader in readers)

    # Layers

    def _read_layer(self, operation: Operation) -> Affine | None:
        """Return the output of a layer as an affine value of its input; None, with the reason noted, if it is not."""
        arguments = bind_arguments(operation)
        output = operation.outputs[0]
        source = operation.inputs[0]
        if value_of(arguments["weight"]) not in self.flow.constant or source in self.flow.constant:
            return None
        window = window_of(operation)
        weight = self._parameter_of(arguments["weight"])
        if weight is not arguments["weight"]:
            window = window._replace(computed=True)
        if weight is None or (window.computed and window.transposed):
            self.rejected[output] = "its layer computes its weight"
            return None
        name, reason = self._owner(operation, weight, arguments.get("bias"))
        if reason:
            self.rejected[output] = reason
            return None
        axis = len(self.shape(output)) - 1 - len(window.kernel)
        affine = replace(self._new_affine(output, axis, name, window), source=source)
        before = self._affine_to_extend(source)
        if before is None or before.steps or not window.is_pointwise:
            return affine
        self.chained.append((output, before))
        return replace(affine, through=self._through_two_layers(before, affine, name))

    def _through_two_layers(self, before: Affine, affine: Affine, name: str) -> Affine | None:
        """Return a pointwise layer and the layer before it as a function of what that one reads, or None."""
        first = carrier_of(before.summands)
        if first is None or not before.is_layer_alone or self.is_avoided(first.layer, name):
            return None
        if first.window.groups > 1 or not first.window.is_plain:
            return None
        summand = first._replace(gain=affine.summands[0].gain, after=name)
        return replace(affine, source=before.source, summands=(summand,))

    def _parameter_of(self, weight: Tensor) -> Tensor | None:
        """Return the parameter of whose rows the rows of a weight consist, the weight itself if it is one, or None."""
        value = value_of(weight)
        steps: list[ChannelStep] = []
        while value[0] not in self.flow.names:
            operation = self.flow.operation_of.get(value)
            if operation is None or len(self.flow.reads[value]) != 1:
                return None
            source = operation.inputs[0]
            if not is_unchanged(operation):
                if kind_of_step(self.flow, operation, source) != "move":
                    return None
                steps.insert(
                    0, ChannelStep(operation, source, "move", operation.outputs.index(value))
                )
            value = source
        parameter = self.flow.tensors[value]
        if not steps:
            return parameter
        channels = follow_channels(self.flow, value, 0, steps)
        if channels is None or not channels.keeps_shifts:
            return None
        rows = channels.along(0)
        is_in_order = rows is not None and rows.tolist() == list(range(len(parameter)))
        return parameter if is_in_order else None

    def _owner(self, operation: Operation, weight: Tensor, bias: Tensor | None) -> tuple[str, str]:
        """Return the name of the layer that owns a weight, and why nothing can be written into it, if so."""
        names = self.flow.names[id(weight)]
        if len(names) > 1:
            return "", f"{names[0]} is tied"
        name = parent_name(names[0])
        module = self.model.get_submodule(name)
        shown_name = name or "the model"
        if len(self.flow.reads[value_of(weight)]) != 1:
            return name, f"{shown_name} is used more than once"
        attached = describe_attachments(module)
        if attached:
            return name, f"{shown_name} has {attached}"
        if bias is not None and (
            len(self.flow.names.get(id(bias), ())) > 1 or len(self.flow.reads[value_of(bias)]) != 1
        ):
            return name, f"the bias of {shown_name} is tied or used elsewhere"
        own_bias = (vars(module) | module._parameters).get("bias", weight)
        owns_both = module._parameters.get("weight") is weight and own_bias is bias
        if not owns_both or (bias is None and operation.module != name):
            return name, f"the bias of {shown_name} is not its own"
        return name, ""

    # Norms and scales

    def _read_norm(self, operation: Operation, x: TensorVersion) -> Affine | None:
        """Return the output of a norm, x scaled and shifted by channel; None, with the reason noted, if it is not."""
        if operation.name != "batch_norm":
            return self._read_affine_norm(operation)
        arguments = bind_arguments(operation)
        name = operation.module
        self.norms.add(name)
        mean: Any = arguments.get("running_mean")
        variance: Any = arguments.get("running_var")
        reason = self._why_needed(operation)
        if not reason and (arguments.get("training") or mean is None or variance is None):
            reason = "it uses the statistics of the batch"
        if reason:
            self.left[name] = reason
            return None
        gain = torch.rsqrt(variance.double() + arguments.get("eps", 1e-5))
        if arguments.get("weight") is not None:
            gain = gain * arguments["weight"].double()
        shift = -mean.double() * gain
        if arguments.get("bias") is not None:
            shift = shift + arguments["bias"].double()

        change = ("identity", name)
        base = self._affine_to_extend(x)
        if base is None:
            reason = self._why_none_before(x)
        else:
            sides = (-1, *[1] * (len(self.shape(x)) - 2))
            scale = self._by_channel(base, gain.view(sides), shift.view(sides))
            if not isinstance(scale, str):
                return base.scaled(*scale, change)
            reason = scale
        self.left[name] = reason
        return self._new_affine(x, 1).scaled(gain, shift, change)

    def _read_affine_norm(self, operation: Operation) -> Affine | None:
        """Return the weight and bias of a LayerNorm, RMSNorm or GroupNorm as a function of what it normalises."""
        arguments = bind_arguments(operation)
        name = operation.module
        output = operation.outputs[0]
        weight = arguments.get("weight")
        bias = arguments.get("bias")
        owns = self.model.get_submodule(name)._parameters.get("weight") is weight
        if (
            not self.affine_norms
            or weight is None
            or weight.ndim != 1
            or not owns
            or output in self.protected
        ):
            return None
        self.norms.add(name)
        reason = self._why_not_alone(name)
        if reason:
            self.left[name] = reason
            return None
        axis = 1 if operation.name == "group_norm" else len(self.shape(output)) - 1
        shift = torch.zeros_like(weight) if bias is None else bias
        normalised = replace(self._new_affine(output, axis), source=(0, 0))
        return normalised.scaled(weight.double(), shift.double(), ("unscaled", name))

    def _why_needed(self, operation: Operation) -> str:
        """Return why the module of an operation cannot become the identity, or ""."""
        name = operation.module
        reason = self._why_not_alone(name)
        if not reason and (not name or not self._computes_in_turn(name)):
            return "its module computes more than the norm"
        return reason

    def _computes_in_turn(self, name: str) -> bool:
        """True for a module called once with one value, whose operations of arithmetic follow one another."""
        value = only_value(self.flow.inputs[name])
        for operation in self.operations_of[name]:
            is_arithmetic = operation.name in ARITHMETIC | {"batch_norm"} or is_unchanged(operation)
            if not is_arithmetic or self._dependent_inputs(operation) != [value]:
                return False
            value = operation.outputs[0]
        return True

    def _why_not_alone(self, name: str) -> str:
        """Return what else would change with a norm: its hooks, or further calls; "" if nothing."""
        attached = describe_attachments(self.model.get_submodule(name))
        if attached:
            return f"it has {attached}"
        return "it is called more than once" if len(self.flow.inputs[name]) > 1 else ""

    def _why_none_before(self, value: TensorVersion) -> str:
        """Return why no layer before a norm can take it up."""
        if value in self.affine_of:
            return "the output of the layer before it is read elsewhere"
        if value in self.rejected:
            return self.rejected[value]
        operation = self.flow.operation_of.get(value)
        if operation:
            return f"it follows {operation.name}"
        _, version = value
        return "it follows a write in place" if version else "it reads the model's input"

    def _by_channel(self, base: Affine, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor] | str:
        """Return gain and shift of the value by channel of its start, or why it has none.

        Shape: gain and shift broadcast to the value -> (C,), (C,)
        """
        if not base.steps:
            shape = self.shape(base.start)
            return _along_axis(gain, shift, len(shape), base.axis, shape[base.axis]) or _TURNED
        channels = follow_channels(self.flow, base.start, base.axis, base.steps)
        if channels is None:
            return _TURNED
        reason = why_stopped(channels, base.steps, gain, shift)
        if reason:
            return f"it follows {reason}"
        gains = channels.vector(gain, 1.0)
        shifts = channels.vector(shift, 0.0)
        if gains is None or shifts is None:
            return _TURNED
        return gains, shifts

    def _read_scale(self, operation: Operation, x: TensorVersion) -> Affine | None:
        """Return a value times, or plus, numbers that the model stores."""
        (constant,) = set(operation.inputs) - {x}
        shape = self.shape(x)
        is_turned = operation.name in SUB | DIV and operation.inputs[1] != constant
        if is_turned or self.shape(operation.outputs[0]) != shape or self._why_needed(operation):
            return None
        number = self.flow.tensors[constant].detach().double()
        gain = torch.ones_like(number)
        shift = torch.zeros_like(number)
        if operation.name in MUL:
            gain = number
        elif operation.name in DIV:
            gain = 1 / number
        elif operation.name in ADD:
            shift = number
        else:
            shift = -number
        for base in self._bases(x):
            scale = self._by_channel(base, gain, shift)
            if not isinstance(scale, str):
                return base.scaled(*scale, ("identity", operation.module))
        return None

    def _bases(self, value: TensorVersion) -> list[Affine]:
        """Return an affine value, or any other value as its own source, with channels on either axis."""
        base = self._affine_to_extend(value)
        if base:
            return [base]
        last = len(self.shape(value)) - 1
        return [self._new_affine(value, axis) for axis in sorted({1, last}) if 0 < axis <= last]

    # Sums

    def _read_sum(self, operation: Operation) -> Affine | None:
        """Return a sum or difference as a function of one source, or None."""
        first, second = operation.inputs
        if operation.name not in ADD | SUB or first == second:
            return None
        total = next(self._sums(first, second, operation.name in SUB), None)
        if total is None or (total.has_layer and carrier_of(total.summands) is None):
            return None
        for value in operation.inputs:
            if value not in self.affine_of and value != total.source:  # multiplied by a number
                self.used.add(self.flow.operation_of[value].inputs[0])
        return total

    def _sums(
        self, first: TensorVersion, second: TensorVersion, subtracts: bool
    ) -> Iterator[Affine]:
        """Yield a sum or difference as a function of the source of both values, or of one value if it is the source."""
        first_terms = self._terms(first)
        second_terms = self._terms(second)
        if subtracts:
            second_terms = [
                term.negated() for term in second_terms if not self.is_avoided(*term.layers)
            ]
        for first_term, second_term in product(first_terms, second_terms):
            total = sum_of(first_term, second_term)
            if total:
                yield total
        for term in first_terms:
            if term.source == second:
                yield _with_source(term, -1.0 if subtracts else 1.0)
        for term in second_terms:
            if term.source == first:
                yield _with_source(term, 1.0)

    def _terms(self, value: TensorVersion) -> list[Affine]:
        """Return a summand as a function of its source, also if code multiplies it by a number, and `through`."""
        affine = self._affine_to_extend(value) or self._multiplied(value)
        if affine is None:
            return []
        forms = [affine] if affine.through is None else [affine, affine.through]
        return [form for form in forms if not form.steps]

    def _multiplied(self, value: TensorVersion) -> Affine | None:
        """Return a value of layers that the model's own code multiplies by a number, or None."""
        operation = self.flow.operation_of.get(value)
        # numbers may not be those of the code
        if self.flow.branches_on_data or self.flow.reads_parameters:
            return None
        if (
            operation is None
            or operation.name not in MUL | DIV
            or len(operation.inputs) != 1
            or not self.is_read_once(value)
        ):
            return None
        numbers = [
            argument
            for argument in operation.args
            if isinstance(argument, float) or type(argument) is int
        ]
        is_turned = operation.name in DIV and not isinstance(operation.args[0], Tensor)
        base = self._affine_to_extend(operation.inputs[0])
        if base is None or is_turned or not numbers:
            return None
        if not all(base.layers) or self.is_avoided(*base.layers):
            return None
        return base.times(1 / numbers[0] if operation.name in DIV else numbers[0])


def only_value(calls: list[tuple[TensorVersion, ...]]) -> TensorVersion | None:
    """Return the value that a module reads or returns, None if it is called several times or has several."""
    return calls[0][0] if len(calls) == 1 and len(calls[0]) == 1 else None


def _with_source(affine: Affine, factor: float) -> Affine:
    """Return affine + factor * source, where the model's own code adds the source."""
    gain = factor * torch.ones_like(affine.shift)
    summand = Summand(None, InputWindow(), gain, stays=True, factor=factor)
    return replace(affine, summands=(*affine.summands, summand), through=None)


def _along_axis(
    gain: Tensor, shift: Tensor, ndim: int, axis: int, channels: int
) -> tuple[Tensor, Tensor] | None:
    """Return tensors that vary along one axis of those with which they are broadcast. Shape: -> (C,), (C,)"""
    sides = (1,) * (ndim - gain.ndim) + tuple(gain.shape)
    if len(sides) != ndim or gain.numel() != sides[axis]:  # it varies along another axis
        return None
    return gain.reshape(-1).expand(channels), shift.reshape(-1).expand(channels)


def why_stopped(
    channels: Channels, steps: tuple[ChannelStep, ...], gain: Tensor, shift: Tensor
) -> str:
    """Return through which operation a scale or a shift does not pass, or ""."""
    if channels.keeps_order and (gain < 0).any():
        largest = [step.operation.name for step in steps if step.kind == "largest"]
        return f"{largest[-1]}, through which a scale below 0 does not pass"
    if shift.any() and not channels.keeps_shifts:
        last = steps[-1].operation.name
        return f"{last}, after zeros or an average with them, through which a shift does not pass"
    return ""
