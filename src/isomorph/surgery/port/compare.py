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
from isomorph.surgery.port.arguments import bind, settings_of
from isomorph.surgery.port.graph import ADDS, Graph, Step
from isomorph.surgery.port.numbers import Numbers
from isomorph.surgery.port.pair import Pairing
from isomorph.surgery.port.watch import Call

# Relative differences in float64 up to which values are equal.
TOLERANCE = 1e-10
# Relative differences that constants of the code explain which were computed in float32.
_SINGLE = 1e-6
# Values with more axes are not tried in another order.
_MOST_AXES = 5


@dataclass(frozen=True)
class Place:
    """A place where the models part: modules of both, the relative difference, and what differs there.

    `settings`: arguments that are not weights, by name, of the source and of the target.
    """

    source: str
    target: str
    difference: float
    what: str
    settings: tuple[tuple[str, Any, Any], ...] = ()

    def __str__(self) -> str:
        target = self.target or "the model"
        source = self.source or "the model"
        apart = "in shape" if math.isinf(self.difference) else f"by {self.difference:.2g}"
        return f"{target} (source: {source}), {apart}: {self.what}"


@dataclass(frozen=True)
class OutputRow:
    """An output of one model and the value of the other that equals it, with their relative difference in float64.

    `own`: whose output it is, the target's or the source's; `name`: its name; `other`: the value that it equals.
    """

    own: str
    name: str
    other: str
    difference: float

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
    value: Tensor, like: Tensor, tolerance: float = TOLERANCE
) -> tuple[Tensor | None, float]:
    """Return a value with its axes in the order of another, and their relative difference; None if there is none.

    The first order by which they differ by at most the tolerance, else the one by which they differ least.
    """
    best: Tensor | None = None
    smallest = math.inf
    for candidate in _layouts(value, like):
        difference = _difference(candidate, like)
        if best is None or difference < smallest:
            best = candidate
            smallest = difference
        if smallest <= tolerance:
            break
    return best, smallest


def _layouts(value: Tensor, like: Tensor) -> Iterator[Tensor]:
    if value.numel() != like.numel():
        return
    if value.shape == like.shape:
        yield value
    squeezed = value.squeeze()
    if squeezed.ndim <= _MOST_AXES:
        for order in permutations(range(squeezed.ndim)):
            yield squeezed.permute(order).reshape(like.shape)


class _Step(NamedTuple):
    """What a call of the target gets of the source's: the number of the value that it reads, and values."""

    reads: int | None
    wanted: Tensor | None
    made: Tensor | None


class _Forced:
    """Calls of the target in which steps read and make the values of the source's."""

    def __init__(self, steps: dict[int, _Step]) -> None:
        self.steps = steps  # by index of the call
        self.differences: dict[tuple[str, int], float] = {}

    def run(self, call: Call, value_of: Callable[[int], Tensor]) -> Any:
        step = self.steps.get(call.index)
        if step is None:
            return call.run(value_of)

        def given(number: int) -> Tensor:
            value = value_of(number)
            if step.wanted is None or number != step.reads:
                return value
            return self._compare(("input", call.index), step.wanted, value)

        out = call.run(given)
        if step.made is None or not isinstance(out, Tensor):
            return out
        return self._compare(("output", call.index), step.made, out)

    def _compare(self, key: tuple[str, int], wanted: Tensor, value: Tensor) -> Tensor:
        fitting, difference = in_layout(wanted, value)
        self.differences[key] = difference
        if fitting is None or difference <= TOLERANCE:
            return value
        if wanted.shape == value.shape:  # of values that differ the nearest order says nothing
            fitting = wanted
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
        theirs = settings.calls.get(call.index)
        if theirs is None:
            return call.run(value_of)
        same = _same_arguments(theirs, call)

        def given(number: int) -> Tensor:
            return value_of(same[number]) if number in same else source.values[number]

        return theirs.run(given).reshape(target.values[call.outputs[0]].shape)

    try:
        return target.run(numbers, run=run, constants=settings.constants)
    except (RuntimeError, TypeError, ValueError, IndexError):  # on tensors of another layout
        return None


def _same_arguments(one: Call, other: Call) -> dict[int, int]:
    """Return which values the arguments of one call are in another: by name, else in order."""
    mine = bind(one)
    theirs = bind(other)
    if set(mine) == set(theirs):
        return {mine[role]: theirs[role] for role in mine}
    return dict(zip(mine.values(), theirs.values(), strict=True))


def compare_steps(
    source: Graph, target: Graph, pairing: Pairing, numbers: Numbers
) -> tuple[list[Place], SourceSettings, list[Tensor]]:
    """Return where the steps of both part, each on the source's values.

    And the settings of the source at these places, and the target's values for its numbers, the source's forced.
    """
    forced: dict[int, _Step] = {}
    steps: dict[int, tuple[Step, Step]] = {}
    compared: set[tuple[int | None, int | None]] = set()
    for one, other in pairing.pairs:
        alone = len(one.steps) == len(other.steps) == 1
        a = one.first
        b = other.first
        if b.call is None:
            continue
        output = source.values[a.output] if alone else None
        wanted = None
        reordered = a.columns is not None or b.columns is not None
        is_read = b.kind != "shift" and b.input is not None and not reordered
        if a.input is not None and is_read and (a.input, b.input) not in compared:
            wanted = source.values[a.input]
        if alone:
            compared.add((a.output, b.output))
        forced[b.call.index] = _Step(b.input, wanted, output)
        steps[b.call.index] = a, b
    run = _Forced(forced)
    values = target.run(numbers, run=run.run)
    places = []
    settings = SourceSettings()
    for (side, index), difference in sorted(run.differences.items(), key=lambda item: item[0][1]):
        if difference > TOLERANCE:
            if side == "output":
                place = _compare_results(*steps[index], difference, settings)
            else:
                place = _compare_inputs(source, target, *steps[index], difference, settings)
            places.append(place)
    return places, settings, values


def _compare_results(one: Step, other: Step, difference: float, settings: SourceSettings) -> Place:
    """Return the place where two steps give another result of the same values, and note the source's settings."""
    found = differing(one.settings, other.settings)
    what = f"the {other.kind} gives another result on the same values"
    _note([(one.call, other.call)] if found else [], settings)
    return Place(one.module, other.module, difference, what, found)


def _compare_inputs(
    source: Graph,
    target: Graph,
    one: Step,
    other: Step,
    difference: float,
    settings: SourceSettings,
) -> Place:
    """Return the place where steps read other values, and note the source's settings of the operations before."""
    mine = _between(source, one)
    theirs = _between(target, other)
    found = _differing_calls(source, target, mine, theirs)
    rounded = tuple(map(_has_rounded_constants, (source, target), (mine, theirs)))
    if difference < _SINGLE and any(rounded):
        kinds = ["float32" if each else "float64" for each in rounded]
        found = (("constants rounded to", kinds[0], kinds[1]),)
        _note_constants(source, target, theirs, settings)
    elif len(mine) == len(theirs):
        _note([pair for pair in zip(mine, theirs, strict=True) if _differ(*pair)], settings)
    what = f"the {other.kind} reads other values"
    if mine or theirs:
        shown = [", ".join(map(_described, calls)) or "nothing" for calls in (mine, theirs)]
        what = f"what the {other.kind} reads: {shown[0]} in the source, {shown[1]} in the target"
    return Place(one.module, other.module, difference, what, found)


def _differ(one: Call, other: Call) -> bool:
    return one.name.strip("_") != other.name.strip("_") or bool(
        differing(settings_of(one), settings_of(other))
    )


def _note(pairs: Sequence[tuple[Call | None, Call | None]], settings: SourceSettings) -> None:
    """Note the source's calls for those of the target that read as many tensors."""
    for one, other in pairs:
        if one and other and len(bind(one)) == len(bind(other)):
            settings.calls[other.index] = one


def _note_constants(
    source: Graph, target: Graph, calls: list[Call], settings: SourceSettings
) -> None:
    """Note the source's constants for those of the target that are rounded otherwise."""
    given = [source.values[number] for number in _constants_before(source, source.seen.calls)]
    for number in _constants_before(target, calls):
        own = target.values[number]
        for value in given:
            if value.numel() != own.numel() or not value.is_floating_point():
                continue
            fitting, difference = in_layout(value, own)
            if fitting is not None and 0 < difference < _SINGLE:
                settings.constants[number] = fitting


def _constants_before(graph: Graph, calls: list[Call]) -> list[int]:
    """Return the values that follow from neither images nor parameters, which calls are computed from."""
    waiting = [number for call in calls for number in call.inputs]
    found: dict[int, None] = {}
    while waiting:
        number = waiting.pop()
        if number in found or number in graph.live or graph.content(number).terms:
            continue
        found[number] = None
        maker = graph.seen.makers.get(number)
        if maker is not None:
            waiting += maker.inputs
    return list(found)


def _has_rounded_constants(graph: Graph, calls: list[Call]) -> bool:
    """True if operations read constants that the code computes in float32, such as angles of rotations."""
    return any(_is_rounded(graph.values[number]) for number in _constants_before(graph, calls))


def _is_rounded(value: Tensor) -> bool:
    """True for numbers of float32 that use all of its digits."""
    if not value.is_floating_point() or not torch.equal(value, value.float().to(value.dtype)):
        return False
    last_digits = value.float().contiguous().view(torch.int32) & 0xFF
    return bool((last_digits != 0).any())


def differing(one: dict[str, Any], other: dict[str, Any]) -> tuple[tuple[str, Any, Any], ...]:
    """Return the settings that both have with another value."""
    both = [name for name in one if name in other]
    return tuple((name, one[name], other[name]) for name in both if one[name] != other[name])


def _between(graph: Graph, step: Step) -> list[Call]:
    """Return the operations between the steps before and what a step reads, without those that only move numbers."""
    ends = {each.output for each in graph.steps} | set(graph.seen.inputs)
    waiting = [] if step.input is None else [step.input]
    found: dict[int, Call] = {}
    visited: set[int] = set()
    while waiting:
        number = waiting.pop()
        call = graph.seen.makers.get(number)
        if number in ends or call is None or call.index in visited or number not in graph.live:
            continue
        visited.add(call.index)
        content = graph.content(number)
        if content.base == number and call.name not in ADDS:
            found[call.index] = call
        waiting += call.inputs
    return [found[index] for index in sorted(found)][-8:]


def _described(call: Call) -> str:
    name = call.name.strip("_")
    given = {key: value for key, value in settings_of(call).items() if _is_plain(value)}
    shown = ", ".join(f"{key}={value}" for key, value in given.items())
    return f"{name}({shown})"


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _count_maps(graph: Graph, call: Call) -> int:
    """Return how many matrices a softmax is taken of."""
    return graph.values[call.outputs[0]].shape[:-2].numel()


def _differing_calls(
    source: Graph, target: Graph, one: list[Call], other: list[Call]
) -> tuple[tuple[str, Any, Any], ...]:
    """Return the settings by which operations of the same names differ, or the names of those that do."""
    names = [call.name.strip("_") for call in one]
    others = [call.name.strip("_") for call in other]
    if len(names) != len(others):
        return (("operations", ", ".join(names), ", ".join(others)),)
    found: list[tuple[str, Any, Any]] = []
    for a, b, mine, theirs in zip(one, other, names, others, strict=True):
        if mine != theirs:
            found.append(("operation", mine, theirs))
            continue
        maps = _count_maps(source, a), _count_maps(target, b)
        if mine == "softmax" and maps[0] != maps[1]:
            return (("heads or windows of attention", *maps),)
        for name, given, wanted in differing(settings_of(a), settings_of(b)):
            if _is_plain(given) and _is_plain(wanted):
                found.append((f"{mine} {name}", given, wanted))
    return tuple(found)


def compare_outputs(source: Graph, target: Graph, values: list[Tensor]) -> list[OutputRow]:
    """Return for every output the value of the other model that equals it most; `values` are the target's.

    Those of the target first: they are outputs of the source, or values on the way to one where only the source has a
    head. If one of them is none of these, those of the source follow, as values of the target.
    """
    a = _Values("source", source, source.values)
    b = _Values("target", target, values)
    rows = _rows_of(b, a)
    if all(row.difference <= TOLERANCE for row in rows):
        return rows
    return rows + _rows_of(a, b)


class _Values(NamedTuple):
    """A model in a comparison of outputs: which one, and its values."""

    own: str
    graph: Graph
    values: list[Tensor]

    def outputs(self) -> Iterator[tuple[str, Tensor]]:
        for path, number in self.graph.seen.outputs.items():
            yield f"output {path}".strip(), self.values[number]

    def inner(self) -> Iterator[tuple[str, Tensor]]:
        for call in self.graph.seen.calls[::-1]:
            name = f"the result of {call.name.strip('_')} in {call.module or 'the model'}"
            for number in call.outputs:
                yield name, self.values[number]

    def whole_of(self, number: int) -> Tensor | None:
        """Return the value that one is a moved part of, such as the tokens of which it is the first, or None."""
        content = self.graph.content(number)
        is_part = content.ids is not None and not content.terms
        if not is_part or content.base is None or content.base in self.graph.seen.inputs:
            return None
        whole = self.values[content.base]
        return whole if whole.numel() > self.values[number].numel() else None


def _rows_of(one: _Values, other: _Values) -> list[OutputRow]:
    rows = []
    for path, number in one.graph.seen.outputs.items():
        value = one.values[number]
        if not value.is_floating_point():
            continue
        found = [_nearest(one.own, path, value, other.outputs())]
        if found[0].difference > TOLERANCE and not _is_constant(value):
            found.append(_nearest(one.own, path, value, other.inner()))
            whole = one.whole_of(number)
            if whole is not None:
                part = _nearest(one.own, path, whole, other.inner())
                found.append(replace(part, other=f"a part of {part.other}"))
        rows.append(min(found, key=lambda row: row.difference))
    return rows


def _is_constant(value: Tensor) -> bool:
    return value.numel() > 1 and bool((value == value.flatten()[0]).all())


def _nearest(own: str, name: str, value: Tensor, named: Iterable[tuple[str, Tensor]]) -> OutputRow:
    best = OutputRow(own, name, "nothing", math.inf)
    for other, candidate in named:
        if candidate.numel() != value.numel() or not candidate.is_floating_point():
            continue
        _, difference = in_layout(candidate.double(), value.double())
        if difference < best.difference:
            best = OutputRow(own, name, other, difference)
        if best.difference <= TOLERANCE:
            break
    return best
