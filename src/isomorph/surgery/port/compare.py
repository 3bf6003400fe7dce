"""Where two models part: their steps side by side in float64, each on what the source's step reads.

The target's steps get the values of the source's, so that each difference is found where it begins.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isomorph.surgery.calls import relative
from isomorph.surgery.layer_calls import ADD
from isomorph.surgery.port.arguments import bind, settings_of
from isomorph.surgery.port.graph import Graph, Step
from isomorph.surgery.port.numbers import Numbers
from isomorph.surgery.port.pair import Pairing
from isomorph.surgery.port.watch import Call

# Relative differences in float64 up to which values are equal.
TOLERANCE = 1e-10
# Relative differences that constants of the code explain which were computed in float32.
_SINGLE = 1e-6
# Values with more axes are not tried in another order.
_MOST_AXES = 5


# A setting that is not a weight: its name, and its values in the source and in the target.
SettingPair = tuple[str, Any, Any]


@dataclass(frozen=True)
class Place:
    """A place where the models part: modules of both, the relative difference, and what differs there.

    `settings`: arguments that are not weights, by name, of the source and of the target.
    """

    source: str
    target: str
    difference: float
    what: str
    settings: tuple[SettingPair, ...] = ()

    def __str__(self) -> str:
        target = self.target or "the model"
        source = self.source or "the model"
        size = "in shape" if math.isinf(self.difference) else f"by {self.difference:.2g}"
        return f"{target} (source: {source}), {size}: {self.what}"


@dataclass(frozen=True)
class OutputRow:
    """An output of one model and the value of the other that equals it, with their relative difference in float64.

    `own`: whose output it is, the target's or the source's; `name`: its name; `other`: the value that it equals.
    """

    own: str
    name: str
    other: str
    difference: float

    @property
    def equals_output(self) -> bool:
        """True if the value that it equals is an output too."""
        return self.other.startswith("output")

    def __str__(self) -> str:
        return f"{self.own}'s {self.name or 'output'} = {self.other}: relative difference {self.difference:.2g}"


def _difference(value: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors relative to the largest number, infinity for NaN."""
    if not value.numel() or torch.equal(value, other):
        return 0.0
    scale = value.abs().max().item()
    difference = (value - other).abs().max().item()
    if math.isnan(difference):
        return math.inf
    return relative(difference, scale)


def in_layout(
    value: Tensor, reference: Tensor, tolerance: float = TOLERANCE
) -> tuple[Tensor | None, float]:
    """Return a value with its axes in the order of another, and their relative difference; None if there is none.

    The first order by which they differ by at most the tolerance, else the one by which they differ least.
    """
    fitting: Tensor | None = None
    smallest = math.inf
    for candidate in _layouts(value, reference):
        difference = _difference(candidate, reference)
        if fitting is None or difference < smallest:
            fitting = candidate
            smallest = difference
        if smallest <= tolerance:
            break
    return fitting, smallest


def _layouts(value: Tensor, reference: Tensor) -> Iterator[Tensor]:
    """Yield a value in the shape of another, with its axes in every order."""
    if value.numel() != reference.numel():
        return
    if value.shape == reference.shape:
        yield value
    squeezed = value.squeeze()
    if squeezed.ndim <= _MOST_AXES:
        for order in permutations(range(squeezed.ndim)):
            yield squeezed.permute(order).reshape(reference.shape)


@dataclass
class _ForcedStep:
    """A step of the source and of the target, and the source's values that the target's gets in place of its own."""

    source: Step
    target: Step
    input: Tensor | None = None
    output: Tensor | None = None


class _Forced:
    """Calls of the target in which steps read and make the values of the source's."""

    def __init__(self, steps: dict[int, _ForcedStep]) -> None:
        self.steps = steps  # by index of the call
        self.differences: dict[tuple[str, int], float] = {}

    def run(self, call: Call, value_of: Callable[[int], Tensor]) -> Any:
        """Run a call of the target on the values of the source's step."""
        step = self.steps.get(call.index)
        if step is None:
            return call.run(value_of)

        def value_given(slot: int) -> Tensor:
            value = value_of(slot)
            if step.input is None or slot != step.target.input:
                return value
            return self._compare(("input", call.index), step.input, value)

        out = call.run(value_given)
        if step.output is None or not isinstance(out, Tensor):
            return out
        return self._compare(("output", call.index), step.output, out)

    def _compare(self, key: tuple[str, int], expected: Tensor, value: Tensor) -> Tensor:
        """Return the expected value in place of one that differs, and keep the difference."""
        fitting, difference = in_layout(expected, value)
        self.differences[key] = difference
        if fitting is None or difference <= TOLERANCE:
            return value
        if expected.shape == value.shape:  # of values that differ the nearest order says nothing
            fitting = expected
        return torch.empty_like(value).copy_(fitting)


@dataclass
class SourceSettings:
    """What a copy of the target runs with the source's settings, to see whether both are equal then.

    `calls`: the source's call that is run on the tensors of one of the target, by the index of that; `constants`: the
    source's by the slot of the target's.
    """

    calls: dict[int, Call] = field(default_factory=dict)
    constants: dict[int, Tensor] = field(default_factory=dict)


def run_with(
    settings: SourceSettings, source: Graph, target: Graph, numbers: Numbers
) -> list[Tensor] | None:
    """Return the target's values with the source's settings; None if it does not run with them."""

    def run(call: Call, value_of: Callable[[int], Tensor]) -> Any:
        source_call = settings.calls.get(call.index)
        if source_call is None:
            return call.run(value_of)
        slot_of = _same_arguments(source_call, call)

        def value_given(slot: int) -> Tensor:
            return value_of(slot_of[slot]) if slot in slot_of else source.values[slot]

        return source_call.run(value_given).reshape(target.values[call.outputs[0]].shape)

    try:
        return target.run(numbers, run=run, constants=settings.constants)
    except (RuntimeError, TypeError, ValueError, IndexError):  # on tensors of another layout
        return None


def _same_arguments(call: Call, other: Call) -> dict[int, int]:
    """Return which values the arguments of one call are in another: by name, else in order."""
    arguments = bind(call)
    other_arguments = bind(other)
    if set(arguments) == set(other_arguments):
        return {arguments[role]: other_arguments[role] for role in arguments}
    return dict(zip(arguments.values(), other_arguments.values(), strict=True))


def compare_steps(
    source: Graph, target: Graph, pairing: Pairing, numbers: Numbers
) -> tuple[list[Place], SourceSettings, list[Tensor]]:
    """Return where the steps of both part, each on the source's values.

    And the settings of the source at these places, and the target's values for its numbers, the source's forced.
    """
    forced: dict[int, _ForcedStep] = {}
    compared: set[tuple[int | None, int | None]] = set()
    for source_joint, target_joint in pairing.pairs:
        alone = len(source_joint.steps) == len(target_joint.steps) == 1
        source_step = source_joint.first
        target_step = target_joint.first
        if target_step.call is None:
            continue
        step = _ForcedStep(source_step, target_step)
        reads = source_step.input, target_step.input
        is_reordered = source_step.columns is not None or target_step.columns is not None
        if target_step.kind != "shift" and not is_reordered and reads not in compared:
            step.input = None if source_step.input is None else source.values[source_step.input]
        if alone:
            step.output = source.values[source_step.output]
            compared.add((source_step.output, target_step.output))
        forced[target_step.call.index] = step
    run = _Forced(forced)
    values = target.run(numbers, run=run.run)
    differences = []
    settings = SourceSettings()
    for (side, index), difference in sorted(run.differences.items(), key=lambda item: item[0][1]):
        if difference <= TOLERANCE:
            continue
        steps = forced[index].source, forced[index].target
        if side == "output":
            differences.append(_compare_results(*steps, difference, settings))
        else:
            differences.append(_compare_inputs(source, target, *steps, difference, settings))
    return differences, settings, values


def _compare_results(
    source_step: Step, target_step: Step, difference: float, settings: SourceSettings
) -> Place:
    """Return the place where two steps give another result of the same values, and note the source's settings."""
    settings_found = differing(source_step.settings, target_step.settings)
    message = f"the {target_step.kind} gives another result on the same values"
    if settings_found:
        _note([(source_step.call, target_step.call)], settings)
    return Place(source_step.module, target_step.module, difference, message, settings_found)


def _compare_inputs(
    source: Graph,
    target: Graph,
    source_step: Step,
    target_step: Step,
    difference: float,
    settings: SourceSettings,
) -> Place:
    """Return the place where steps read other values, and note the source's settings of the operations before."""
    source_calls = _between(source, source_step)
    target_calls = _between(target, target_step)
    settings_found = _differing_calls(source, target, source_calls, target_calls)
    precisions = (
        _precision_of_constants(source, source_calls),
        _precision_of_constants(target, target_calls),
    )
    if difference < _SINGLE and "float32" in precisions:
        settings_found = (("constants rounded to", *precisions),)
        _note_constants(source, target, target_calls, settings)
    elif len(source_calls) == len(target_calls):
        pairs = zip(source_calls, target_calls, strict=True)
        _note([pair for pair in pairs if _differ(*pair)], settings)
    message = f"the {target_step.kind} reads other values"
    if source_calls or target_calls:
        descriptions = [
            ", ".join(map(_described, calls)) or "nothing" for calls in (source_calls, target_calls)
        ]
        message = f"what the {target_step.kind} reads: {descriptions[0]} in the source, {descriptions[1]} in the target"
    return Place(source_step.module, target_step.module, difference, message, settings_found)


def _differ(source_call: Call, target_call: Call) -> bool:
    if source_call.operation != target_call.operation:
        return True
    return bool(differing(settings_of(source_call), settings_of(target_call)))


def _note(pairs: Sequence[tuple[Call | None, Call | None]], settings: SourceSettings) -> None:
    """Note the source's calls for those of the target that read as many tensors."""
    for source_call, other in pairs:
        if source_call and other and len(bind(source_call)) == len(bind(other)):
            settings.calls[other.index] = source_call


def _note_constants(
    source: Graph, target: Graph, calls: list[Call], settings: SourceSettings
) -> None:
    """Note the source's constants for those of the target that are rounded otherwise."""
    source_constants = [
        source.values[slot] for slot in _constants_before(source, source.record.calls)
    ]
    for slot in _constants_before(target, calls):
        constant = target.values[slot]
        for value in source_constants:
            if value.numel() != constant.numel() or not value.is_floating_point():
                continue
            fitting, difference = in_layout(value, constant)
            if fitting is not None and 0 < difference < _SINGLE:
                settings.constants[slot] = fitting


def _constants_before(graph: Graph, calls: list[Call]) -> list[int]:
    """Return the values that follow from neither images nor parameters, which calls are computed from."""
    stack = [slot for call in calls for slot in call.inputs]
    constants: dict[int, None] = {}
    while stack:
        slot = stack.pop()
        if slot in constants or slot in graph.dependent or graph.content(slot).terms:
            continue
        constants[slot] = None
        producer = graph.record.call_of.get(slot)
        if producer is not None:
            stack += producer.inputs
    return list(constants)


def _precision_of_constants(graph: Graph, calls: list[Call]) -> str:
    """Return in which precision the code computes constants that operations read, such as angles of rotations."""
    constants = _constants_before(graph, calls)
    is_rounded = any(_is_rounded(graph.values[slot]) for slot in constants)
    return "float32" if is_rounded else "float64"


def _is_rounded(value: Tensor) -> bool:
    """True for numbers of float32 that use all of its digits."""
    if not value.is_floating_point() or not torch.equal(value, value.float().to(value.dtype)):
        return False
    last_digits = value.float().contiguous().view(torch.int32) & 0xFF
    return bool((last_digits != 0).any())


def differing(settings: dict[str, Any], other: dict[str, Any]) -> tuple[SettingPair, ...]:
    """Return the settings that both have with another value."""
    both = [name for name in settings if name in other]
    return tuple(
        (name, settings[name], other[name]) for name in both if settings[name] != other[name]
    )


def _between(graph: Graph, step: Step) -> list[Call]:
    """Return the operations between the steps before and what a step reads, without those that only move numbers."""
    return _calls_before(graph, [] if step.input is None else [step.input])


def _calls_before(graph: Graph, slots: Iterable[int]) -> list[Call]:
    """Return the operations between the last steps and values, without those that only move numbers."""
    borders = {step.output for step in graph.steps} | set(graph.record.inputs)
    stack = list(slots)
    calls: dict[int, Call] = {}
    visited: set[int] = set()
    while stack:
        slot = stack.pop()
        call = graph.record.call_of.get(slot)
        if slot in borders or call is None or call.index in visited or slot not in graph.dependent:
            continue
        visited.add(call.index)
        content = graph.content(slot)
        if content.base == slot and call.name not in ADD:
            calls[call.index] = call
        stack += call.inputs
    return [calls[index] for index in sorted(calls)][-8:]


def _described(call: Call) -> str:
    """Return a call as code would write it, with its settings alone."""
    settings = settings_of(call).items()
    shown = [(key, value) for key, value in settings if _is_plain(value) and key[0] != "_"]
    arguments = [f"{key}={value}" for key, value in shown]
    return f"{call.operation}({', '.join(arguments)})"


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _count_maps(graph: Graph, call: Call) -> int:
    """Return how many matrices a softmax is taken of."""
    return graph.values[call.outputs[0]].shape[:-2].numel()


def _differing_calls(
    source: Graph, target: Graph, source_calls: list[Call], target_calls: list[Call]
) -> tuple[SettingPair, ...]:
    """Return the settings by which operations of the same names differ, or the names of those that do."""
    if len(source_calls) != len(target_calls):
        names, others = (
            ", ".join(call.operation for call in calls) for calls in (source_calls, target_calls)
        )
        return (("operations", names, others),)
    differences: list[SettingPair] = []
    for source_call, target_call in zip(source_calls, target_calls, strict=True):
        name = source_call.operation
        if name != target_call.operation:
            differences.append(("operation", name, target_call.operation))
            continue
        maps = _count_maps(source, source_call), _count_maps(target, target_call)
        if name == "softmax" and maps[0] != maps[1]:
            return (("heads or windows of attention", *maps),)
        for setting, *values in differing(settings_of(source_call), settings_of(target_call)):
            if all(map(_is_plain, values)):
                differences.append((f"{name} {setting}", *values))
    return tuple(differences)


def differing_ends(source: Graph, target: Graph) -> tuple[str, tuple[SettingPair, ...]] | None:
    """Return what models compute after their last steps and the settings that differ; None if that is the same."""
    source_calls = _calls_before(source, source.record.outputs.values())
    target_calls = _calls_before(target, target.record.outputs.values())
    settings = _differing_calls(source, target, source_calls, target_calls)
    if not settings:
        return None
    descriptions = [
        ", ".join(map(_described, x)) or "nothing" for x in (source_calls, target_calls)
    ]
    message = (
        f"after the last layers: {descriptions[0]} in the source, {descriptions[1]} in the target"
    )
    return message, settings


def compare_all_outputs(
    source: Graph,
    target: Graph,
    source_values: Sequence[Tensor],
    target_values: Sequence[Tensor],
) -> list[OutputRow]:
    """Return for every output the value of the other model that equals it most.

    Those of the target first: they are outputs of the source, or values on the way to one where only the source has a
    head. If one of them is none of these, those of the source follow, as values of the target.
    """
    of_source = _Values("source", source, source_values)
    of_target = _Values("target", target, target_values)
    rows = _rows_of(of_target, of_source)
    if all(row.difference <= TOLERANCE for row in rows):
        return rows
    return rows + _rows_of(of_source, of_target)


class _Values(NamedTuple):
    """A model in a comparison of outputs: which one, and its values."""

    own: str
    graph: Graph
    values: Sequence[Tensor]

    def outputs(self) -> Iterator[tuple[str, Tensor]]:
        for path, slot in self.graph.record.outputs.items():
            yield f"output {path}".strip(), self.values[slot]

    def inner(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the results of all operations, the last first."""
        for call in self.graph.record.calls[::-1]:
            name = f"the result of {call.operation} in {call.module or 'the model'}"
            for slot in call.outputs:
                yield name, self.values[slot]

    def has_part_of(self, value: Tensor, count: int) -> bool:
        """True if an output is a part of as many entries of a value."""
        for slot in self.graph.record.outputs.values():
            base_value = self.whole_of(slot)
            is_part = base_value is not None and base_value.numel() == value.numel()
            if is_part and self.values[slot].numel() == count:
                return True
        return False

    def whole_of(self, slot: int) -> Tensor | None:
        """Return the value that one is a moved part of, such as the tokens of which it is the first, or None."""
        content = self.graph.content(slot)
        is_part = content.ids is not None and not content.terms
        if not is_part or content.base is None or content.base in self.graph.record.inputs:
            return None
        base_value = self.values[content.base]
        return base_value if base_value.numel() > self.values[slot].numel() else None


def _rows_of(values: _Values, other: _Values) -> list[OutputRow]:
    """Return which value of the other model each output of one equals best."""
    rows = []
    for path, slot in values.graph.record.outputs.items():
        value = values.values[slot]
        if not value.is_floating_point():
            rows += _exact_rows(values, path, value, other)
            continue
        rows_found = [_nearest(values.own, path, value, other.outputs())]
        is_constant = value.numel() > 1 and (value == value.flatten()[0]).all()
        if rows_found[0].difference > TOLERANCE and not is_constant:
            rows_found.append(_nearest(values.own, path, value, other.inner()))
            base_value = values.whole_of(slot)
            if base_value is not None and not other.has_part_of(base_value, value.numel()):
                part = _nearest(values.own, path, base_value, other.inner())
                rows_found.append(replace(part, other=f"a part of {part.other}"))
        rows.append(min(rows_found, key=lambda row: row.difference))
    return rows


def _exact_rows(values: _Values, path: str, value: Tensor, other: _Values) -> list[OutputRow]:
    """Return the row of an output of integers, booleans or complex numbers; none if the other model has none such."""
    candidates = [
        (name, _as_floats(candidate))
        for name, candidate in other.outputs()
        if candidate.dtype == value.dtype and candidate.numel() == value.numel()
    ]
    if not candidates:
        return []
    return [_nearest(values.own, path, _as_floats(value), candidates)]


def _as_floats(value: Tensor) -> Tensor:
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value.double()


def _nearest(
    model: str, name: str, value: Tensor, named: Iterable[tuple[str, Tensor]]
) -> OutputRow:
    """Return the value among `named` that is nearest to an output."""
    nearest = OutputRow(model, name, "nothing", math.inf)
    for other, candidate in named:
        if candidate.numel() != value.numel() or not candidate.is_floating_point():
            continue
        fitting, difference = in_layout(candidate.double(), value.double())
        if difference < nearest.difference:
            nearest = OutputRow(model, name, other, difference)
            if fitting is not None and difference <= TOLERANCE and nearest.equals_output:
                nearest = replace(nearest, other=f"{other}{_layout_of(candidate, value, fitting)}")
        if nearest.difference <= TOLERANCE:
            break
    return nearest


def _layout_of(candidate: Tensor, value: Tensor, fitting: Tensor) -> str:
    """Return in which layout a value fits another, nothing for its own, but for axes of one entry."""
    sizes = [[side for side in x.shape if side > 1] for x in (candidate, value)]
    is_in_order = torch.equal(candidate.reshape(value.shape).double(), fitting)
    if not is_in_order:
        return ", with its axes in another order"
    return "" if sizes[0] == sizes[1] else ", in another shape"
