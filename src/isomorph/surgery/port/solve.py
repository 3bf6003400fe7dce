"""The numbers of a target's parameters that make its steps those of the source."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from isomorph.surgery.port.graph import NORMS, Graph, Operand, Step, is_range
from isomorph.surgery.port.pair import Joint, Pairing, Part

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
    def of(cls, operand: Operand) -> "Tensors":
        """Return the numbers of an operand."""
        value = operand.value.detach().double()
        if operand.entries is None:
            return cls(value, torch.full(value.shape, COMPUTED))
        entries = operand.entries
        if is_range(entries.flatten()):
            return cls(value, entries)
        return cls(value, entries.masked_fill(entries < 0, NEUTRAL))

    @classmethod
    def neutral(cls, shape: Any, number: float) -> "Tensors":
        """Return a number that changes nothing, for every entry of a shape."""
        value = torch.full(tuple(shape), number, dtype=torch.float64)
        return cls(value, torch.full(tuple(shape), NEUTRAL))

    @classmethod
    def cat(cls, parts: "list[Tensors]") -> "Tensors":
        """Return several along their first axis."""
        if len(parts) == 1:
            return parts[0]
        return cls(torch.cat([x.value for x in parts]), torch.cat([x.entries for x in parts]))

    def __getitem__(self, where: Any) -> "Tensors":
        return Tensors(self.value[where], self.entries[where])

    def scaled(self, gain: Tensor) -> "Tensors":
        """Return the numbers times one for each row."""
        gain = gain.double().reshape(-1, *[1] * (self.value.ndim - 1))
        return Tensors(self.value * gain, torch.full_like(self.entries, COMPUTED))

    def reshape(self, *shape: int) -> "Tensors":
        """Return the same numbers in another shape."""
        return Tensors(self.value.reshape(*shape), self.entries.reshape(*shape))


@dataclass(eq=False)
class Solution:
    """Numbers for all entries of the target's parameters, and where they come from."""

    numbers: Tensor
    origins: Tensor
    lost: list[str] = field(default_factory=list)
    """What the source has and the target has no parameter for."""

    unplaced: list[Tensor] = field(default_factory=list)
    """The source's entries that the target cannot hold."""

    @property
    def has_free_numbers(self) -> bool:
        """True if some of the target's numbers are not the source's."""
        return bool((self.origins <= NEUTRAL).any())

    def lose(self, given: Tensors, what: str) -> None:
        """Note numbers that the target cannot hold."""
        self.lost.append(what)
        self.unplaced.append(given.entries[given.entries >= 0])

    def put(self, entries: Tensor | None, given: Tensors, module: str) -> None:
        """Write numbers into the target's entries; those that it has no parameter for must be 0."""
        if entries is None:
            return
        entries = entries.reshape(-1)
        value = given.value.reshape(-1)
        origins = given.entries.reshape(-1)
        if is_range(entries):
            whole = slice(int(entries[0]), int(entries[-1]) + 1)
            if bool((self.origins[whole] == OWN).all()):
                self.numbers[whole] = value
                self.origins[whole] = origins
                return
        inside = entries >= 0
        if not bool(inside.all()):
            if bool(value[~inside].any()):
                what = f"{module}: the target has a constant 0"
                self.lose(Tensors(value, origins)[~inside], what)
            entries = entries[inside]
            value = value[inside]
            origins = origins[inside]
        known = self.origins[entries] != OWN
        if bool(known.any()) and bool((known & (self.numbers[entries] != value)).any()):
            self.lost.append(f"{module}: the target reads one tensor where the source has two")
        self.numbers[entries] = value
        self.origins[entries] = origins


def solve(
    source: Graph,
    target: Graph,
    pairing: Pairing,
    orders: Mapping[int, int] = MappingProxyType({}),
    neutral: bool = True,
) -> Solution:
    """Return the numbers of the target's parameters for the current ones of the source.

    `orders`: which order of its parts (`part_orders`) a layer of the source takes, by its joint. With `neutral`, scales
    and shifts that only the target has become 1 and 0.
    """
    solution = Solution(target.all_numbers.clone(), torch.full((target.count,), OWN))
    for one, other in pairing.pairs:
        if one.first.kind == "layer":
            gain = _gain_after(one, pairing)
            _solve_layer(one, other, solution, orders.get(one.index, 0), gain)
        elif one.first.kind == "shift":
            _solve_shift(one.first, other.first, solution)
        else:
            _solve_operands(one.first, other.first, solution)
    for joint in pairing.only_target if neutral else ():
        _solve_alone(joint.first, solution)
    return solution


def _rows(part: Part, role: str) -> Tensors | None:
    """Return the rows of a part's weight or bias in the order in which they are read."""
    operand = part.step.operands.get(role)
    if operand is None:
        return None
    given = Tensors.of(operand)
    if role == "weight":
        given = given.reshape(part.step.rows, -1)
        columns = part.step.columns
        if columns is not None and len(columns) == given.value.shape[1]:
            given = given[:, columns]
        elif columns is not None and part.step.weight.shape[1] == len(columns):
            shape = part.step.weight.shape
            given = given.reshape(*shape)[:, columns].reshape(part.step.rows, -1)
    if torch.equal(part.rows, torch.arange(part.step.rows)):
        return given
    return given[part.rows]


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


def _gain_after(one: Joint, pairing: Pairing) -> Tensor | None:
    """Return the scale of its outputs that follows a layer of the source and has no counterpart in the target."""
    if len(one.parts) != 1 or len(one.readers) != 1:
        return None
    for joint in pairing.only_source:
        if joint.index in one.readers and joint.first.kind == "scale":
            scale = joint.first.operands["scale"].value.flatten()
            if joint.sources == {one.index} and len(scale) == len(one.parts[0].rows):
                return scale
    return None


def _solve_layer(
    one: Joint, other: Joint, solution: Solution, choice: int, gain: Tensor | None
) -> None:
    orders = part_orders(one, other)
    parts = [one.parts[i] for i in orders[choice]] if orders else one.parts
    given = Tensors.cat([rows for part in parts if (rows := _rows(part, "weight"))])
    if gain is not None:
        given = given.scaled(gain[parts[0].rows])
    places: list[Tensor] = []
    is_read = all(part.step.operands["weight"].entries is not None for part in other.parts)
    if is_read:
        for part in other.parts:
            rows = _rows(part, "weight")
            assert rows is not None
            places.append(rows.entries)
        solution.put(torch.cat(places), given, other.module)
    _solve_bias(parts, other, solution, gain)
    if "input" in one.first.operands and "input" in other.first.operands:
        _put(one.first.operands["input"], other.first.operands["input"], solution, other.module)


def _solve_bias(parts: list[Part], other: Joint, solution: Solution, gain: Tensor | None) -> None:
    biases = []
    for part in parts:
        bias = _rows(part, "bias")
        biases.append(bias or Tensors.neutral((len(part.rows),), 0.0))
    given = Tensors.cat(biases)
    if gain is not None:
        given = given.scaled(gain[parts[0].rows])
    start = 0
    for part in other.parts:
        own = given[start : start + len(part.rows)]
        start += len(part.rows)
        bias = _rows(part, "bias")
        if bias is not None and part.step.operands["bias"].entries is not None:
            solution.put(bias.entries, own, part.step.module)
        elif bias is None and bool(own.value.any()):
            solution.lose(own, f"{part.step.module}: the target has no bias there")


def _solve_shift(one: Step, other: Step, solution: Solution) -> None:
    """Write added parameters: one by one if both have as many, else their sum into the first of the target's."""
    given = [Tensors.of(each) for each in one.terms]
    if not given or one.terms[0].value.shape.numel() != other.terms[0].value.shape.numel():
        solution.lost.append(f"{other.module}: parameters of another size are added there")
        return
    same = len(given) == len(other.terms) and all(
        torch.equal(a.entries.flatten() < 0, b.value_is_none.flatten())
        for a, b in zip(given, map(_Places, other.terms), strict=True)
    )
    if same:
        for each, place in zip(given, other.terms, strict=True):
            solution.put(place.entries, each, other.module)
        return
    shape = other.terms[0].value.shape
    total = torch.zeros(shape, dtype=torch.float64)
    origins = torch.full(shape, NEUTRAL)
    for each in given:
        total += each.value.reshape(shape)
        entries = each.entries.reshape(shape)
        origins = torch.where(entries >= 0, torch.where(origins >= 0, COMPUTED, entries), origins)
    left = torch.ones(shape, dtype=torch.bool)
    for place in other.terms:
        assert place.entries is not None
        here = place.entries >= 0
        value = total.masked_fill(~(here & left), 0.0)
        solution.put(place.entries, Tensors(value, origins), other.module)
        left &= ~here
    if bool(total[left].any()):
        solution.lost.append(f"{other.module}: added parameters that the target cannot hold")


class _Places:
    def __init__(self, operand: Operand) -> None:
        assert operand.entries is not None
        self.value_is_none = operand.entries < 0


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
            solution.lose(Tensors.of(operand), f"{other.module}: the target has no {role} there")


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
    one = Tensors.of(given).reshape(-1)
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


def fill_leftovers(source: Graph, target: Graph, solution: Solution, which: int) -> None:
    """Give parameters of the target that no step fills those of the source that no step has placed, by size in order.

    Where one model has k for each of the other's, every k-th is taken, from `which` on. Whether that is right only a
    comparison of outputs shows.
    """
    used = set(source.owners(solution.origins))
    given = _by_size(source, [number for number in source.first if number not in used])
    wanted = _by_size(
        target, [number for number in target.first if _is_free(target, number, solution)]
    )
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
            entries = torch.arange(target.first[number], target.first[number] + size)
            theirs = torch.arange(source.first[other], source.first[other] + size)
            solution.origins[entries] = OWN
            solution.put(
                entries, Tensors(source.all_numbers[theirs], theirs), target.seen.names[number][0]
            )


def _is_free(target: Graph, number: int, solution: Solution) -> bool:
    """True if none of a parameter's numbers is the source's."""
    first = target.first[number]
    origins = solution.origins[first : first + target.seen.values[number].numel()]
    return bool((origins <= NEUTRAL).all())


def _by_size(graph: Graph, numbers: list[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number in numbers:
        if number not in graph.seen.buffers:
            found.setdefault(graph.seen.values[number].numel(), []).append(number)
    return found


@torch.no_grad()
def draw(graph: Graph, seed: int = 0) -> Tensor:
    """Return random numbers for all entries of a model's parameters, under which its outputs neither grow nor vanish.

    Fresh weights hide faults: a LayerScale of 0, a bias of 0, statistics of 0 and 1.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = graph.all_numbers.clone()

    def normal(shape: Any) -> Tensor:
        return torch.randn(tuple(shape), generator=generator).double()

    for step, role, operand in _operands(graph):
        if operand.entries is None:
            continue
        entries = operand.entries.flatten()
        drawn = normal(entries.shape)
        if step.kind == "layer" and role == "weight":
            drawn *= max(operand.value[0].numel(), 1) ** -0.5
        elif role in ("bias", "term"):
            drawn *= 0.3
        elif role == "running_mean":
            drawn *= 0.1
        elif role == "running_var":
            drawn = 1 + drawn.abs()
        elif role in ("weight", "scale") and step.kind != "product":
            drawn = 1 + 0.3 * drawn
        else:
            drawn = operand.value.flatten() + 0.1 * drawn
        if is_range(entries):
            numbers[int(entries[0]) : int(entries[-1]) + 1] = drawn
            continue
        inside = entries >= 0
        numbers[entries[inside]] = drawn[inside]
    return numbers


def _operands(graph: Graph) -> Iterator[tuple[Step, str, Operand]]:
    for step in graph.steps:
        for role, operand in step.operands.items():
            yield step, role, operand
        for operand in step.terms:
            yield step, "term", operand


@torch.no_grad()
def write(graph: Graph, model: torch.nn.Module, numbers: Tensor) -> None:
    """Write numbers of all entries into a model's parameters and buffers."""
    state = model.state_dict(keep_vars=True)
    for number, first in graph.first.items():
        tensor = state[graph.seen.names[number][0]]
        own = numbers[first : first + tensor.numel()]
        tensor.copy_(own.reshape(tensor.shape).to(tensor))
    clear_caches(model)


def clear_caches(model: torch.nn.Module) -> None:
    """Let modules drop what they keep in eval mode, such as tables of positions read from parameters."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    for module, mode in modes.items():
        module.train(mode)
