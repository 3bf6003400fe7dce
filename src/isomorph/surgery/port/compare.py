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


class _ForcedStep(NamedTuple):
    """What a call of the target gets of the source's: the number of the value that it reads, and values."""

    reads: int | None
    input: Tensor | None
    output: Tensor | None


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

        def value_given(number: int) -> Tensor:
            value = value_of(number)
            if step.input is None or number != step.reads:
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
    source's by the number of the target's.
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
        number_of = _same_arguments(source_call, call)

        def value_given(number: int) -> Tensor:
            return value_of(number_of[number]) if number in number_of else source.values[number]

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
    steps: dict[int, tuple[Step, Step]] = {}
    compared: set[tuple[int | None, int | None]] = set()
    for source_joint, target_joint in pairing.pairs:
        alone = len(source_joint.steps) == len(target_joint.steps) == 1
        source_step = source_joint.first
        target_step = target_joint.first
        if target_step.call is None:
            continue
        output = source.values[source_step.output] if alone else None
        expected = None
        reordered = source_step.columns is not None or target_step.columns is not None
        is_read = target_step.kind != "shift" and target_step.input is not None and not reordered
        if (
            source_step.input is not None
            and is_read
            and (source_step.input, target_step.input) not in compared
        ):
            expected = source.values[source_step.input]
        if alone:
            compared.add((source_step.output, target_step.output))
        forced[target_step.call.index] = _ForcedStep(target_step.input, expected, output)
        steps[target_step.call.index] = source_step, target_step
    run = _Forced(forced)
    values = target.run(numbers, run=run.run)
    differences = []
    settings = SourceSettings()
    for (side, index), difference in sorted(run.differences.items(), key=lambda item: item[0][1]):
        if difference > TOLERANCE:
            if side == "output":
                difference_found = _compare_results(*steps[index], difference, settings)
            else:
                difference_found = _compare_inputs(
                    source, target, *steps[index], difference, settings
                )
            differences.append(difference_found)
    return differences, settings, values


def _compare_results(
    source_step: Step, target_step: Step, difference: float, settings: SourceSettings
) -> Place:
    """Return the place where two steps give another result of the same values, and note the source's settings."""
    settings_found = differing(source_step.settings, target_step.settings)
    message = f"the {target_step.kind} gives another result on the same values"
    _note([(source_step.call, target_step.call)] if settings_found else [], settings)
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
    rounded = tuple(map(_has_rounded_constants, (source, target), (source_calls, target_calls)))
    if difference < _SINGLE and any(rounded):
        precisions = ["float32" if is_rounded else "float64" for is_rounded in rounded]
        settings_found = (("constants rounded to", precisions[0], precisions[1]),)
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
        source.values[number] for number in _constants_before(source, source.record.calls)
    ]
    for number in _constants_before(target, calls):
        constant = target.values[number]
        for value in source_constants:
            if value.numel() != constant.numel() or not value.is_floating_point():
                continue
            fitting, difference = in_layout(value, constant)
            if fitting is not None and 0 < difference < _SINGLE:
                settings.constants[number] = fitting


def _constants_before(graph: Graph, calls: list[Call]) -> list[int]:
    """Return the values that follow from neither images nor parameters, which calls are computed from."""
    stack = [number for call in calls for number in call.inputs]
    constants: dict[int, None] = {}
    while stack:
        number = stack.pop()
        if number in constants or number in graph.dependent or graph.content(number).terms:
            continue
        constants[number] = None
        producer = graph.record.call_of.get(number)
        if producer is not None:
            stack += producer.inputs
    return list(constants)


def _has_rounded_constants(graph: Graph, calls: list[Call]) -> bool:
    """True if operations read constants that the code computes in float32, such as angles of rotations."""
    return any(_is_rounded(graph.values[number]) for number in _constants_before(graph, calls))


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
    borders = {other_step.output for other_step in graph.steps} | set(graph.record.inputs)
    stack = [] if step.input is None else [step.input]
    calls: dict[int, Call] = {}
    visited: set[int] = set()
    while stack:
        number = stack.pop()
        call = graph.record.call_of.get(number)
        if (
            number in borders
            or call is None
            or call.index in visited
            or number not in graph.dependent
        ):
            continue
        visited.add(call.index)
        content = graph.content(number)
        if content.base == number and call.name not in ADD:
            calls[call.index] = call
        stack += call.inputs
    return [calls[index] for index in sorted(calls)][-8:]


def _described(call: Call) -> str:
    """Return a call as code would write it, with its settings alone."""
    settings = settings_of(call).items()
    arguments = [f"{key}={value}" for key, value in settings if _is_plain(value)]
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
        names = [
            ", ".join(call.operation for call in calls) for calls in (source_calls, target_calls)
        ]
        return (("operations", *names),)
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


def compare_all_outputs(source: Graph, target: Graph, values: list[Tensor]) -> list[OutputRow]:
    """Return for every output the value of the other model that equals it most; `values` are the target's.

    Those of the target first: they are outputs of the source, or values on the way to one where only the source has a
    head. If one of them is none of these, those of the source follow, as values of the target.
    """
    source_values = _Values("source", source, source.values)
    target_values = _Values("target", target, values)
    rows = _rows_of(target_values, source_values)
    if all(row.difference <= TOLERANCE for row in rows):
        return rows
    return rows + _rows_of(source_values, target_values)


class _Values(NamedTuple):
    """A model in a comparison of outputs: which one, and its values."""

    own: str
    graph: Graph
    values: list[Tensor]

    def outputs(self) -> Iterator[tuple[str, Tensor]]:
        for path, number in self.graph.record.outputs.items():
            yield f"output {path}".strip(), self.values[number]

    def inner(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the results of all operations, the last first."""
        for call in self.graph.record.calls[::-1]:
            name = f"the result of {call.operation} in {call.module or 'the model'}"
            for number in call.outputs:
                yield name, self.values[number]

    def whole_of(self, number: int) -> Tensor | None:
        """Return the value that one is a moved part of, such as the tokens of which it is the first, or None."""
        content = self.graph.content(number)
        is_part = content.ids is not None and not content.terms
        if not is_part or content.base is None or content.base in self.graph.record.inputs:
            return None
        base_value = self.values[content.base]
        return base_value if base_value.numel() > self.values[number].numel() else None


def _rows_of(values: _Values, other: _Values) -> list[OutputRow]:
    """Return which value of the other model each output of one equals best."""
    rows = []
    for path, number in values.graph.record.outputs.items():
        value = values.values[number]
        if not value.is_floating_point():
            continue
        rows_found = [_nearest(values.own, path, value, other.outputs())]
        is_constant = value.numel() > 1 and (value == value.flatten()[0]).all()
        if rows_found[0].difference > TOLERANCE and not is_constant:
            rows_found.append(_nearest(values.own, path, value, other.inner()))
            base_value = values.whole_of(number)
            if base_value is not None:
                part = _nearest(values.own, path, base_value, other.inner())
                rows_found.append(replace(part, other=f"a part of {part.other}"))
        rows.append(min(rows_found, key=lambda row: row.difference))
    return rows


def _nearest(
    model: str, name: str, value: Tensor, named: Iterable[tuple[str, Tensor]]
) -> OutputRow:
    """Return the value among `named` that is nearest to an output."""
    nearest = OutputRow(model, name, "nothing", math.inf)
    for other, candidate in named:
        if candidate.numel() != value.numel() or not candidate.is_floating_point():
            continue
        _, difference = in_layout(candidate.double(), value.double())
        if difference < nearest.difference:
            nearest = OutputRow(model, name, other, difference)
        if nearest.difference <= TOLERANCE:
            break
    return nearest
