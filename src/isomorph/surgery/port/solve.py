"""The numbers of a target's parameters that make its steps those of the source."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from isomorph.surgery.port.graph import NORMS, Graph, Operand, Step
from isomorph.surgery.port.numbers import Numbers, noise
from isomorph.surgery.port.pair import Joint, Pairing, Part, channels_of

# Where a number of the target comes from if it is not from a parameter of the source.
COMPUTED, NEUTRAL, OWN = -1, -2, -3
# The numbers of a norm or scale that has no parameter for them.
_NEUTRAL = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0, "scale": 1.0}


@dataclass(frozen=True, eq=False)
class Tensors:
    """Numbers, and which entries of the source's parameters they are (COMPUTED, NEUTRAL, or an entry)."""

    value: Tensor
    entries: Tensor

    @classmethod
    def neutral(cls, shape: Any, number: float) -> "Tensors":
        """Return a number that changes nothing, for every entry of a shape."""
        value = torch.full(tuple(shape), number, dtype=torch.float64)
        return cls(value, torch.full(tuple(shape), NEUTRAL))

    @classmethod
    def cat(cls, parts: "list[Tensors]") -> "Tensors":
        """Return several along their first axis."""
        return cls(torch.cat([x.value for x in parts]), torch.cat([x.entries for x in parts]))

    def __getitem__(self, where: Any) -> "Tensors":
        return Tensors(self.value[where], self.entries[where])

    def rows(self, rows: Tensor) -> "Tensors":
        """Return some rows, without a copy where they follow each other."""
        first = int(rows[0])
        if torch.equal(rows, torch.arange(first, first + len(rows))):
            return self[first : first + len(rows)]
        return self[rows]

    def computed(self, value: Tensor) -> "Tensors":
        """Return numbers that are computed from these."""
        return Tensors(value, torch.full_like(self.entries, COMPUTED))

    def scaled(self, gain: Tensor) -> "Tensors":
        """Return the numbers times one for each row."""
        return self.computed(self.value * gain.reshape(-1, *[1] * (self.value.ndim - 1)))

    def reshape(self, *shape: int) -> "Tensors":
        """Return the same numbers in another shape."""
        return Tensors(self.value.reshape(*shape), self.entries.reshape(*shape))


class Solution:
    """Numbers for all entries of the target's parameters, and where they come from."""

    def __init__(self, source: Graph, target: Graph, start: Numbers) -> None:
        self.source = source
        self.target = target
        self.numbers = Numbers(target.entries, start.tensors)
        own = {number: _own(x.shape) for number, x in start.tensors.items()}
        self.origins = Numbers(target.entries, own)
        # The source's parameters whose numbers a parameter of the target has.
        self.givers: dict[int, dict[int, None]] = {number: {} for number in start.tensors}
        # What the source has and the target has no parameter for.
        self.lost: list[str] = []
        # The source's entries that the target cannot hold.
        self.unplaced: list[Tensor] = []
        # The source's entries that others of the target's hold too.
        self.merged: list[Tensor] = []
        # Further terms of shifts of the target, by step.
        self.added: dict[int, list[Tensors]] = {}

    def is_free(self, number: int) -> bool:
        """True if none of the numbers of a parameter of the target is the source's."""
        if number not in self.origins.written:
            return True
        return bool((self.origins.tensors[number] <= NEUTRAL).all())

    @property
    def has_free_parameters(self) -> bool:
        """True if some of the target's parameters have none of the source's numbers."""
        return any(map(self.is_free, self.target.seen.names))

    def names_left(self) -> tuple[str, ...]:
        """Return the names of the source's tensors that no tensor of the target has numbers of."""
        used: set[int] = set()
        for givers in self.givers.values():
            used.update(givers)
        for entries in self.merged:
            used.update(self.source.entries.owners(entries))
        names = self.source.seen.names
        return tuple(names[number][0] for number in names if number not in used)

    def names_kept(self) -> tuple[str, ...]:
        """Return the names of the target's tensors that keep their own numbers."""
        kept = []
        for number, names in self.target.seen.names.items():
            if number not in self.origins.written and self.target.values[number].numel():
                kept.append(names[0])
        return tuple(kept)

    def of(self, operand: Operand) -> Tensors:
        """Return the numbers of an operand of the source."""
        value = operand.value.detach().double()
        if operand.entries is None:
            return Tensors(value, torch.full(value.shape, COMPUTED))
        if self.source.entries.owner(operand.entries) is not None:
            return Tensors(value, operand.entries)
        return Tensors(value, operand.entries.masked_fill(operand.entries < 0, NEUTRAL))

    def lose(self, given: Tensors, what: str) -> None:
        """Note numbers that the target cannot hold."""
        self.lost.append(what)
        self.unplaced.append(given.entries[given.entries >= 0])

    def put(self, entries: Tensor | None, given: Tensors, module: str) -> None:
        """Write numbers into the target's entries; those that it has no parameter for must be 0."""
        if entries is None:
            return
        if self._is_free_view(entries):
            self.carry(entries, given)
            return
        entries = entries.reshape(-1)
        value = given.value.reshape(-1)
        origins = given.entries.reshape(-1)
        inside = entries >= 0
        if not bool(inside.all()):
            if bool(value[~inside].any()):
                what = f"{module}: the target has a constant 0"
                self.lose(Tensors(value, origins)[~inside], what)
            entries = entries[inside]
            value = value[inside]
            origins = origins[inside]
        known = self.origins.pick(entries) != OWN
        if bool(known.any()) and bool((known & (self.numbers.pick(entries) != value)).any()):
            self.lost.append(f"{module}: the target reads one tensor where the source has two")
        self.carry(entries, Tensors(value, origins))

    def carry(self, entries: Tensor, given: Tensors) -> None:
        """Write numbers into the target's entries, whatever is there."""
        self.numbers.put(entries, given.value)
        self.origins.put(entries, given.entries)
        givers = dict.fromkeys(self.source.entries.owners(given.entries))
        for number in self.target.entries.owners(entries):
            self.givers[number].update(givers)

    def _is_free_view(self, entries: Tensor) -> bool:
        """True for entries side by side, of one parameter, that have no number of the source's yet."""
        owner = self.target.entries.owner(entries)
        if owner is None or not entries.is_contiguous():
            return False
        return owner not in self.origins.written or bool((self.origins.pick(entries) == OWN).all())


def _own(shape: torch.Size) -> Tensor:
    """Return OWN for all entries of a parameter, as one number that is expanded."""
    return torch.tensor(OWN, dtype=torch.int32).expand(shape)


def solve(
    source: Graph,
    target: Graph,
    pairing: Pairing,
    start: Numbers,
    orders: Mapping[int, int] = MappingProxyType({}),
    neutral: bool = True,
) -> Solution:
    """Return the numbers of the target's parameters for the current ones of the source.

    `start`: numbers of the target, which it keeps where the source has none. `orders`: which order of its parts
    (`part_orders`) a layer of the source takes, by its joint. With `neutral`, scales and shifts that only the target
    has become 1 and 0.
    """
    solution = Solution(source, target, start)
    for one, other in pairing.pairs:
        if one.first.kind == "layer":
            _solve_layer(one, other, solution, pairing, orders.get(one.index, 0))
        elif one.first.kind == "shift":
            _solve_shift(one.first, other.first, solution)
        else:
            _solve_operands(one.first, other.first, solution)
    for joint in pairing.only_target if neutral else ():
        _solve_alone(joint.first, solution)
    return solution


def _rows(part: Part, role: str, tensors_of: Callable[[Operand], Tensors]) -> Tensors | None:
    """Return the rows of a part's weight or bias in the order in which they are read."""
    operand = part.step.operands.get(role)
    if operand is None:
        return None
    found = tensors_of(operand)
    if role == "weight":
        columns = part.step.columns
        weight = part.step.weight
        if columns is not None and weight.shape[1] == len(columns):
            found = found.reshape(*weight.shape)[:, columns]
        found = found.reshape(part.step.rows, -1)
        if columns is not None and found.value.shape[1] == len(columns) != weight.shape[1]:
            found = found[:, columns]
    return found.rows(part.rows)


def _place(operand: Operand) -> Tensors:
    """Return the entries of an operand of the target, none for a tensor that is computed."""
    if operand.entries is None:
        return Tensors(operand.value, torch.full(operand.value.shape, -1))
    return Tensors(operand.value, operand.entries)


def part_orders(one: Joint, other: Joint) -> list[tuple[int, ...]]:
    """Return in which orders the source's parts may stand for the target's, the most likely first."""
    signed = [part.read_by for part in one.parts], [part.read_by for part in other.parts]
    count = len(one.parts)
    sizes = [len(part.rows) for part in one.parts]
    others = [len(part.rows) for part in other.parts]
    if count != len(others) or sorted(sizes) != sorted(others):
        return []
    fitting = []
    if count > 4:
        return [tuple(range(count))] if sizes == others else []
    for order in permutations(range(count)):
        if [sizes[i] for i in order] == others:
            same = sum(signed[0][i] == sign for i, sign in zip(order, signed[1], strict=True))
            fitting.append((-same, order))
    fitting.sort()
    return [order for _, order in fitting]


def _gain_after(one: Joint, pairing: Pairing, solution: Solution) -> Tensors | None:
    """Return the scale of its outputs that follows a layer of the source and has no counterpart in the target."""
    if len(one.parts) != 1 or len(one.readers) != 1:
        return None
    for joint in pairing.only_source:
        if joint.index in one.readers and joint.first.kind == "scale":
            scale = solution.of(joint.first.operands["scale"]).reshape(-1)
            if joint.sources == {one.index} and len(scale.value) == len(one.parts[0].rows):
                return scale
    return None


def _shift_after(other: Joint, pairing: Pairing) -> Step | None:
    """Return the only reader of a layer of the target, if it adds parameters to all that the layer makes."""
    for _, joint in pairing.pairs:
        step = joint.first
        if step.kind != "shift" or other.readers != {joint.index} or step.ids is None:
            continue
        if len(other.steps) > 1 or step.input != other.first.output:
            continue
        held = torch.zeros(step.ids.shape, dtype=torch.bool)
        for term in step.terms:
            held |= _place(term).entries >= 0
        if bool(held[step.ids >= 0].all()):
            return step
    return None


def _solve_layer(
    one: Joint, other: Joint, solution: Solution, pairing: Pairing, choice: int
) -> None:
    """Write weights and biases of layers side by side, part by part."""
    orders = part_orders(one, other)
    parts = [one.parts[i] for i in orders[choice]] if orders else one.parts
    gain = _gain_after(one, pairing, solution)
    counts = [len(part.rows) for part in other.parts]
    for role in ("weight", "bias"):
        given = [_given(part, role, solution) for part in parts]
        if gain is not None:
            solution.merged += [given[0].entries, gain.entries]
            given = [given[0].scaled(gain.value[parts[0].rows])]
        for part, rows in zip(other.parts, _in_parts(given, counts), strict=True):
            _solve_part(rows, part, role, solution, partial(_shift_after, other, pairing))
    if "input" in one.first.operands and "input" in other.first.operands:
        _put(one.first.operands["input"], other.first.operands["input"], solution, other.module)


def _given(part: Part, role: str, solution: Solution) -> Tensors:
    """Return the rows of a part of the source, 0 for a bias that it has not."""
    rows = _rows(part, role, solution.of)
    return rows or Tensors.neutral((len(part.rows),), 0.0)


def _in_parts(given: list[Tensors], counts: list[int]) -> list[Tensors]:
    """Return rows in parts of other numbers of rows."""
    if [len(rows.value) for rows in given] == counts:
        return given
    whole = Tensors.cat(given)
    parts = []
    start = 0
    for count in counts:
        parts.append(whole[start : start + count])
        start += count
    return parts


def _solve_part(
    given: Tensors,
    part: Part,
    role: str,
    solution: Solution,
    find_shift: Callable[[], Step | None],
) -> None:
    """Write the rows of a part; a bias for which there is no place into what is added after it, or it is lost."""
    place = _rows(part, role, _place)
    if place is not None:
        if part.step.operands[role].entries is not None:
            solution.put(place.entries, given, part.step.module)
        return
    if not bool(given.value.any()):
        return
    shift = find_shift()
    if shift is None:
        solution.lose(given, f"{part.step.module}: the target has no bias there")
    else:
        _merge_bias(given, part, shift, solution)


def _merge_bias(given: Tensors, part: Part, shift: Step, solution: Solution) -> None:
    """Let the parameters that are added to a layer's outputs hold its bias, as positions do that of patches."""
    assert shift.ids is not None
    bias = torch.zeros(part.step.rows, dtype=torch.float64)
    bias[part.rows] = given.value
    channels = channels_of(solution.target, part.step, shift.ids)
    added = bias[channels].masked_fill(shift.ids < 0, 0.0)
    origins = torch.where(added != 0, COMPUTED, NEUTRAL)
    solution.added.setdefault(shift.index, []).append(Tensors(added, origins))
    solution.merged.append(given.entries)


def _solve_shift(one: Step, other: Step, solution: Solution) -> None:
    """Write added parameters: one by one if both have as many, else their sum into the first of the target's."""
    shape = other.terms[0].value.shape
    if one.terms[0].value.numel() != shape.numel():
        solution.lost.append(f"{other.module}: parameters of another size are added there")
        return
    given = [solution.of(each).reshape(*shape) for each in one.terms]
    given += solution.added.get(other.index, [])
    places = [_place(each).entries for each in other.terms]
    if _have_same_places(given, places):
        for each, entries in zip(given, places, strict=True):
            solution.put(entries, each, other.module)
        return
    solution.merged += [each.entries for each in given]
    total = torch.zeros(shape, dtype=torch.float64)
    origins = torch.full(shape, NEUTRAL)
    for each in given:
        total += each.value
        is_first = origins == NEUTRAL
        joined = torch.where(is_first, each.entries, COMPUTED)
        origins = torch.where(each.entries == NEUTRAL, origins, joined)
    left = torch.ones(shape, dtype=torch.bool)
    for entries in places:
        here = entries >= 0
        value = total.masked_fill(~(here & left), 0.0)
        solution.put(entries, Tensors(value, origins), other.module)
        left &= ~here
    if bool(total[left].any()):
        solution.lost.append(f"{other.module}: added parameters that the target cannot hold")


def _have_same_places(given: list[Tensors], places: list[Tensor]) -> bool:
    """True if there are as many added parameters as places for them, each at the same positions."""
    if len(given) != len(places):
        return False
    pairs = zip(given, places, strict=True)
    return all(torch.equal(each.entries < 0, entries < 0) for each, entries in pairs)


def _solve_operands(one: Step, other: Step, solution: Solution) -> None:
    """Write the operands of a norm, scale or other step, by role."""
    roles = list(one.operands)
    if set(roles) != set(other.operands) and one.kind not in NORMS:
        matched = list(zip(one.operands.values(), other.operands.values(), strict=False))
        for operand, place in matched:
            _put(operand, place, solution, other.module)
        return
    for role, place in other.operands.items():
        given = one.operands.get(role)
        if given is not None:
            _put(given, place, solution, other.module, one.columns, other.columns)
        elif place.entries is not None and role in _NEUTRAL:
            neutral = Tensors.neutral(place.value.shape, _NEUTRAL[role])
            solution.put(place.entries, neutral, other.module)
    for role, operand in one.operands.items():
        number = _NEUTRAL.get(role, 0.0)
        if role not in other.operands and bool((operand.value != number).any()):
            solution.lose(solution.of(operand), f"{other.module}: the target has no {role} there")


def _put(
    given: Operand,
    place: Operand,
    solution: Solution,
    module: str,
    columns: Tensor | None = None,
    other_columns: Tensor | None = None,
) -> None:
    if place.entries is None:
        return
    one = solution.of(given).reshape(-1)
    entries = place.entries.reshape(-1)
    if len(one.value) != len(entries):
        solution.lost.append(f"{module}: a tensor of another size")
        return
    if columns is not None and len(columns) == len(entries):
        one = one[columns]
    if other_columns is not None and len(other_columns) == len(entries):
        entries = entries[other_columns]
    solution.put(entries, one, module)


def _solve_alone(step: Step, solution: Solution) -> None:
    """Let a scale or shift that only the target has change nothing."""
    if step.kind == "scale":
        place = step.operands["scale"]
        if place.entries is not None:
            solution.put(place.entries, Tensors.neutral(place.value.shape, 1.0), step.module)
    if step.kind == "shift":
        for place in step.terms:
            solution.put(place.entries, Tensors.neutral(place.value.shape, 0.0), step.module)


def fill_leftovers(solution: Solution, which: int) -> None:
    """Give parameters of the target that no step fills those of the source that no step has placed, by size in order.

    Where one model has k for each of the other's, every k-th is taken, from `which` on. Whether that is right only a
    comparison of outputs shows.
    """
    source = solution.source
    target = solution.target
    left = solution.names_left()
    given = _by_size(source, [x for x, names in source.seen.names.items() if names[0] in left])
    wanted = _by_size(target, [number for number in target.seen.names if solution.is_free(number)])
    for size, numbers in wanted.items():
        others = given.get(size, [])
        if not others:
            continue
        several = len(others) // len(numbers)
        shared = len(numbers) // len(others)
        if several > 1:
            others = others[which::several]
        elif shared > 1:
            numbers = numbers[which::shared]
        if len(others) != len(numbers):
            continue
        for number, other in zip(numbers, others, strict=True):
            theirs = source.entries.of(other)
            carried = Tensors(source.numbers.pick(theirs), theirs)
            solution.carry(target.entries.of(number), carried)


def _by_size(graph: Graph, numbers: list[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number in numbers:
        if number not in graph.seen.buffers:
            found.setdefault(graph.values[number].numel(), []).append(number)
    return found


@torch.no_grad()
def draw(graph: Graph, seed: int = 0) -> Numbers:
    """Return random numbers for all entries of a model's parameters, under which its outputs neither grow nor vanish.

    Fresh weights hide faults: a LayerScale of 0, a bias of 0, statistics of 0 and 1.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = Numbers(graph.entries, graph.numbers.tensors)
    for step, role, operand in _operands(graph):
        entries = operand.entries
        if entries is None:
            continue
        drawn = noise(entries.numel(), generator).view(entries.shape).mul_(2).sub_(1)  # -1 to 1
        if step.kind == "layer" and role == "weight":
            drawn *= (3 / max(operand.value[0].numel(), 1)) ** 0.5
        elif role in ("bias", "term"):
            drawn *= 0.5
        elif role == "running_mean":
            drawn *= 0.2
        elif role == "running_var":
            drawn += 1.5
        elif role in ("weight", "scale") and step.kind != "product":
            drawn = 1 + 0.5 * drawn
        else:
            drawn = operand.value + 0.2 * drawn
        numbers.put(entries, drawn)
    return numbers


def _operands(graph: Graph) -> Iterator[tuple[Step, str, Operand]]:
    for step in graph.steps:
        for role, operand in step.operands.items():
            yield step, role, operand
        for operand in step.terms:
            yield step, "term", operand
