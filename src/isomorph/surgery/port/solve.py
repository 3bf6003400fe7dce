"""The numbers of a target's parameters that make its steps those of the source."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isomorph.surgery.port.channel_order import source_parts
from isomorph.surgery.port.graph import NORMS, Graph, Operand, Step
from isomorph.surgery.port.numbers import Numbers, random_numbers
from isomorph.surgery.port.pair import Joint, Pairing, Part, channels_of

# Where a number of the target comes from if it is not from a parameter of the source.
COMPUTED, NEUTRAL, OWN = -1, -2, -3
# The numbers of a norm or scale that has no parameter for them.
_NEUTRAL = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0, "scale": 1.0}


@dataclass(frozen=True, eq=False)
class SourcedTensor:
    """Numbers, and which entries of the source's parameters they are (COMPUTED, NEUTRAL, or an entry)."""

    value: Tensor
    entries: Tensor

    @classmethod
    def neutral(cls, shape: Any, number: float) -> "SourcedTensor":
        """Return a number that changes nothing, for every entry of a shape."""
        value = torch.full(tuple(shape), number, dtype=torch.float64)
        return cls(value, torch.full(tuple(shape), NEUTRAL))

    @classmethod
    def cat(cls, parts: "list[SourcedTensor]") -> "SourcedTensor":
        """Return several along their first axis."""
        return cls(torch.cat([x.value for x in parts]), torch.cat([x.entries for x in parts]))

    def __getitem__(self, where: Any) -> "SourcedTensor":
        return SourcedTensor(self.value[where], self.entries[where])

    def rows(self, rows: Tensor) -> "SourcedTensor":
        """Return some rows, without a copy where they follow each other."""
        first = int(rows[0])
        if torch.equal(rows, torch.arange(first, first + len(rows))):
            return self[first : first + len(rows)]
        return self[rows]

    def computed(self, value: Tensor) -> "SourcedTensor":
        """Return numbers that are computed from these."""
        return SourcedTensor(value, torch.full_like(self.entries, COMPUTED))

    def scaled(self, gain: Tensor) -> "SourcedTensor":
        """Return the numbers times one for each row."""
        return self.computed(self.value * gain.reshape(-1, *[1] * (self.value.ndim - 1)))

    def reshape(self, *shape: int) -> "SourcedTensor":
        """Return the same numbers in another shape."""
        return SourcedTensor(self.value.reshape(*shape), self.entries.reshape(*shape))


class Solution:
    """Numbers for all entries of the target's parameters, and where they come from."""

    def __init__(self, source: Graph, target: Graph, start: Numbers) -> None:
        self.source = source
        self.target = target
        self.numbers = Numbers(target.entries, start.tensors)
        own = torch.tensor(OWN, dtype=torch.int32)
        own_origins = {parameter: own.expand(x.shape) for parameter, x in start.tensors.items()}
        self.origins = Numbers(target.entries, own_origins)
        # The source's parameters whose numbers a parameter of the target has.
        self.sources_of: dict[int, dict[int, None]] = {parameter: {} for parameter in start.tensors}
        # What the source has and the target has no parameter for.
        self.lost: list[str] = []
        # The source's entries that the target cannot hold.
        self.unplaced: list[Tensor] = []
        # The source's entries that others of the target's hold too.
        self.merged: list[Tensor] = []
        # Further terms of shifts of the target, by step.
        self.added: dict[int, list[SourcedTensor]] = {}

    def is_free(self, parameter: int) -> bool:
        """True if none of the numbers of a parameter of the target is the source's."""
        return bool((self.origins.tensors[parameter] <= NEUTRAL).all())

    def names_left(self) -> tuple[str, ...]:
        """Return the names of the source's tensors that no tensor of the target has numbers of."""
        used: set[int] = set().union(*self.sources_of.values())
        for entries in self.merged:
            used.update(self.source.entries.owners(entries))
        names = self.source.record.names
        return tuple(names[parameter][0] for parameter in names if parameter not in used)

    def names_kept(self) -> tuple[str, ...]:
        """Return the names of the target's tensors that keep their own numbers."""
        names_with_own = []
        for parameter, names in self.target.record.names.items():
            if parameter not in self.origins.written and self.target.values[parameter].numel():
                names_with_own.append(names[0])
        return tuple(names_with_own)

    def source_numbers(self, operand: Operand) -> SourcedTensor:
        """Return the numbers of an operand of the source."""
        value = operand.value.detach().double()
        if operand.entries is None:
            return SourcedTensor(value, torch.full(value.shape, COMPUTED))
        if self.source.entries.owner(operand.entries) is not None:
            return SourcedTensor(value, operand.entries)
        return SourcedTensor(value, operand.entries.masked_fill(operand.entries < 0, NEUTRAL))

    def note_lost(self, sourced: SourcedTensor, message: str) -> None:
        """Note numbers that the target cannot hold."""
        self.lost.append(message)
        self.unplaced.append(sourced.entries[sourced.entries >= 0])

    def put(self, entries: Tensor | None, sourced: SourcedTensor, module: str) -> None:
        """Write numbers into the target's entries; those that it has no parameter for must be 0."""
        if entries is None:
            return
        if self._is_free_view(entries):
            self.carry(entries, sourced)
            return
        entries = entries.reshape(-1)
        sourced = sourced.reshape(-1)
        inside = entries >= 0
        if not inside.all():
            outside = sourced[~inside]
            if outside.value.any():
                self.note_lost(outside, f"{module}: the target has a constant 0")
            entries = entries[inside]
            sourced = sourced[inside]
        is_written = self.origins.pick(entries) != OWN
        is_other = self.numbers.pick(entries) != sourced.value
        if (is_written & is_other).any():
            self.lost.append(f"{module}: the target reads one tensor where the source has two")
        self.carry(entries, sourced)

    def carry(self, entries: Tensor, sourced: SourcedTensor) -> None:
        """Write numbers into the target's entries, whatever is there."""
        self.numbers.put(entries, sourced.value)
        self.origins.put(entries, sourced.entries)
        sources = dict.fromkeys(self.source.entries.owners(sourced.entries))
        for parameter in self.target.entries.owners(entries):
            self.sources_of[parameter].update(sources)

    def _is_free_view(self, entries: Tensor) -> bool:
        """True for entries side by side, of one parameter, that have no number of the source's yet."""
        owner = self.target.entries.owner(entries)
        if owner is None or not entries.is_contiguous():
            return False
        return owner not in self.origins.written or bool((self.origins.pick(entries) == OWN).all())


def solve(
    source: Graph,
    target: Graph,
    pairing: Pairing,
    start: Numbers,
    orders: Mapping[int, int],
    neutral: bool,
) -> Solution:
    """Return the numbers of the target's parameters for the current ones of the source.

    `start`: numbers of the target, which it keeps where the source has none. `orders`: which order of its parts
    (`part_orders`) a layer of the source takes, by its joint. With `neutral`, scales and shifts that only the target
    has become 1 and 0.
    """
    solution = Solution(source, target, start)
    for source_joint, target_joint in pairing.pairs:
        if source_joint.first.kind == "layer":
            parts = source_parts(source_joint, target_joint, orders)
            _solve_layer(source_joint, target_joint, parts, solution, pairing)
        elif source_joint.first.kind == "shift":
            _solve_shift(source_joint.first, target_joint.first, solution)
        else:
            _solve_operands(source_joint.first, target_joint.first, solution)
    for joint in pairing.only_target if neutral else ():
        _solve_alone(joint.first, solution)
    return solution


def _rows(
    part: Part, role: str, tensors_of: Callable[[Operand], SourcedTensor]
) -> SourcedTensor | None:
    """Return the rows of a part's weight or bias in the order in which they are read."""
    operand = part.step.operands.get(role)
    if operand is None:
        return None
    sourced = tensors_of(operand)
    step = part.step
    if role == "weight":
        if step.columns is not None and step.weight.shape[1] == len(step.columns):
            sourced = sourced.reshape(*step.weight.shape)[:, step.columns]
        sourced = sourced.reshape(step.rows, -1)
    return sourced.rows(_rows_read(part))


def _rows_read(part: Part) -> Tensor:
    """Return the rows of a part in the order in which both models read them."""
    order = part.step.row_order
    if order is None:
        return part.rows
    return order[torch.isin(order, part.rows)]


def _target_tensors(operand: Operand) -> SourcedTensor:
    """Return the entries of an operand of the target, none for a tensor that is computed."""
    if operand.entries is None:
        return SourcedTensor(operand.value, torch.full(operand.value.shape, -1))
    return SourcedTensor(operand.value, operand.entries)


def _gain_after(layer: Joint, pairing: Pairing, solution: Solution) -> SourcedTensor | None:
    """Return the scale of its outputs that follows a layer of the source and has no counterpart in the target."""
    if len(layer.parts) != 1 or len(layer.readers) != 1:
        return None
    for joint in pairing.only_source:
        if joint.index in layer.readers and joint.first.kind == "scale":
            scale = solution.source_numbers(joint.first.operands["scale"]).reshape(-1)
            if joint.sources == {layer.index} and len(scale.value) == len(layer.parts[0].rows):
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
        has_entry = torch.zeros(step.ids.shape, dtype=torch.bool)
        for term in step.terms:
            has_entry |= _target_tensors(term).entries >= 0
        if has_entry[step.ids >= 0].all():
            return step
    return None


def _solve_layer(
    joint: Joint, other: Joint, parts: list[Part], solution: Solution, pairing: Pairing
) -> None:
    """Write weights and biases of layers side by side, part by part."""
    gain = _gain_after(joint, pairing, solution)
    counts = [len(part.rows) for part in other.parts]
    for role in ("weight", "bias"):
        source_rows = [_source_rows(part, role, solution) for part in parts]
        if gain is not None:
            solution.merged += [source_rows[0].entries, gain.entries]
            source_rows = [source_rows[0].scaled(gain.value[_rows_read(parts[0])])]
        for part, rows in zip(other.parts, _in_parts(source_rows, counts), strict=True):
            _solve_part(rows, part, role, solution, partial(_shift_after, other, pairing))
    if "input" in joint.first.operands and "input" in other.first.operands:
        _put(joint.first.operands["input"], other.first.operands["input"], solution, other.module)


def _source_rows(part: Part, role: str, solution: Solution) -> SourcedTensor:
    """Return the rows of a part of the source, 0 for a bias that it has not."""
    rows = _rows(part, role, solution.source_numbers)
    return rows or SourcedTensor.neutral((len(part.rows),), 0.0)


def _in_parts(tensors: list[SourcedTensor], counts: list[int]) -> list[SourcedTensor]:
    """Return rows in parts of other numbers of rows."""
    if [len(rows.value) for rows in tensors] == counts:
        return tensors
    all_rows = SourcedTensor.cat(tensors)
    parts = []
    start = 0
    for count in counts:
        parts.append(all_rows[start : start + count])
        start += count
    return parts


def _solve_part(
    source_rows: SourcedTensor,
    part: Part,
    role: str,
    solution: Solution,
    find_shift: Callable[[], Step | None],
) -> None:
    """Write the rows of a part; a bias for which there is no place into what is added after it, or it is lost."""
    target_rows = _rows(part, role, _target_tensors)
    if target_rows is not None:
        if part.step.operands[role].entries is not None:
            solution.put(target_rows.entries, source_rows, part.step.module)
        return
    if not source_rows.value.any():
        return
    shift = find_shift()
    if shift is None:
        solution.note_lost(source_rows, f"{part.step.module}: the target has no bias there")
    else:
        _merge_bias(source_rows, part, shift, solution)


def _merge_bias(source_rows: SourcedTensor, part: Part, shift: Step, solution: Solution) -> None:
    """Let the parameters that are added to a layer's outputs hold its bias, as positions do that of patches."""
    assert shift.ids is not None
    bias = torch.zeros(part.step.rows, dtype=torch.float64)
    bias[_rows_read(part)] = source_rows.value
    channels = channels_of(solution.target, part.step, shift.ids)
    added = bias[channels].masked_fill(shift.ids < 0, 0.0)
    origins = torch.where(added != 0, COMPUTED, NEUTRAL)
    solution.added.setdefault(shift.index, []).append(SourcedTensor(added, origins))
    solution.merged.append(source_rows.entries)


def _solve_shift(step: Step, other: Step, solution: Solution) -> None:
    """Write added parameters: one by one if both have as many, else their sum into the first of the target's."""
    shape = other.terms[0].value.shape
    if step.terms[0].value.numel() != shape.numel():
        solution.lost.append(f"{other.module}: parameters of another size are added there")
        return
    source_terms = [solution.source_numbers(term).reshape(*shape) for term in step.terms]
    source_terms += solution.added.get(other.index, [])
    target_entries = [_target_tensors(term).entries for term in other.terms]
    if _have_same_positions(source_terms, target_entries):
        for term, entries in zip(source_terms, target_entries, strict=True):
            solution.put(entries, term, other.module)
        return
    solution.merged += [term.entries for term in source_terms]
    total = torch.zeros(shape, dtype=torch.float64)
    origins = torch.full(shape, NEUTRAL)
    for term in source_terms:
        total += term.value
        is_first = origins == NEUTRAL
        merged_origins = torch.where(is_first, term.entries, COMPUTED)
        origins = torch.where(term.entries == NEUTRAL, origins, merged_origins)
    is_open = torch.ones(shape, dtype=torch.bool)
    for entries in target_entries:
        is_held = entries >= 0
        value = total.masked_fill(~(is_held & is_open), 0.0)
        solution.put(entries, SourcedTensor(value, origins), other.module)
        is_open &= ~is_held
    if total[is_open].any():
        solution.lost.append(f"{other.module}: added parameters that the target cannot hold")


def _have_same_positions(terms: list[SourcedTensor], target_entries: list[Tensor]) -> bool:
    """True if there are as many added parameters as places for them, each at the same positions."""
    if len(terms) != len(target_entries):
        return False
    pairs = zip(terms, target_entries, strict=True)
    return all(torch.equal(term.entries < 0, entries < 0) for term, entries in pairs)


def _solve_operands(step: Step, other: Step, solution: Solution) -> None:
    """Write the operands of a norm, scale or other step, by role."""
    roles = list(step.operands)
    if set(roles) != set(other.operands) and step.kind not in NORMS:
        for operand, target_operand in zip(
            step.operands.values(), other.operands.values(), strict=False
        ):
            _put(operand, target_operand, solution, other.module)
        return
    for role, target_operand in other.operands.items():
        operand_of_source = step.operands.get(role)
        if operand_of_source is not None:
            orders = _columns_for(step, role), _columns_for(other, role)
            _put(operand_of_source, target_operand, solution, other.module, *orders)
        elif target_operand.entries is not None and role in _NEUTRAL:
            neutral = SourcedTensor.neutral(target_operand.value.shape, _NEUTRAL[role])
            solution.put(target_operand.entries, neutral, other.module)
    for role, operand in step.operands.items():
        number = _NEUTRAL.get(role, 0.0)
        if role not in other.operands and (operand.value != number).any():
            solution.note_lost(
                solution.source_numbers(operand), f"{other.module}: the target has no {role} there"
            )


def _columns_for(step: Step, role: str) -> Tensor | None:
    """Return in which order a step reads the rows of an operand; None for the order that they have."""
    makes_others = step.kind == "transposed layer" and not step.is_depthwise
    if step.columns is None or (role == "bias" and makes_others):
        return None
    shape = step.operands[role].value.shape
    has_row_each = len(step.columns) in (shape.numel(), *shape[:1])
    return step.columns if has_row_each else None


def _put(
    operand: Operand,
    target_operand: Operand,
    solution: Solution,
    module: str,
    columns: Tensor | None = None,
    other_columns: Tensor | None = None,
) -> None:
    """Write an operand of the source into one of the target, entry by entry in the order in which they are read."""
    if target_operand.entries is None:
        return
    sourced = solution.source_numbers(operand).reshape(-1)
    entries = target_operand.entries.reshape(-1)
    if len(sourced.value) != len(entries):
        solution.lost.append(f"{module}: a tensor of another size")
        return
    if columns is not None:
        sourced = sourced.reshape(len(columns), -1)[columns].reshape(-1)
    if other_columns is not None:
        entries = entries.reshape(len(other_columns), -1)[other_columns].reshape(-1)
    solution.put(entries, sourced, module)


def _solve_alone(step: Step, solution: Solution) -> None:
    """Let a scale or shift that only the target has change nothing."""
    operands = [(operand, 0.0) for operand in step.terms]
    if step.kind == "scale":  # of a value, or a product of parameters
        operands = [(operand, 1.0) for operand in step.operands.values()]
    for operand, number in operands:
        neutral = SourcedTensor.neutral(operand.value.shape, number)
        solution.put(operand.entries, neutral, step.module)


def carry_unread(solution: Solution) -> list[str]:
    """Carry the entries that no image has read of tensors of one shape, as later rows of a table of positions.

    Return the names of the target's tensors that have the source's numbers in part alone, with how many they keep.
    """
    names = []
    for slot in solution.origins.written:
        origins = solution.origins.tensors[slot]
        is_own = origins == OWN
        if not is_own.any():
            continue
        source_slots = list(solution.sources_of[slot])
        if len(source_slots) == 1 and _is_in_place(solution, slot, source_slots[0]):
            entries = solution.source.entries.of_parameter(source_slots[0])
            carried = SourcedTensor(solution.source.numbers.pick(entries), entries)
            solution.carry(solution.target.entries.of_parameter(slot), carried)
        else:
            name = solution.target.record.names[slot][0]
            names.append(f"{name} ({int(is_own.sum())} of {is_own.numel()})")
    return names


def _is_in_place(solution: Solution, slot: int, source_slot: int) -> bool:
    """True if a tensor of the target has numbers of one of the source of its shape, each in its place."""
    if solution.target.values[slot].shape != solution.source.values[source_slot].shape:
        return False
    origins = solution.origins.tensors[slot].flatten()
    entries = solution.source.entries.of_parameter(source_slot).flatten()
    return bool(((origins == OWN) | (origins == entries)).all())


# Slots of tensors of the source that the target has no numbers of, and of the target's that have none of the source's.
Leftovers = tuple[list[int], list[int]]


def parameters_left(solution: Solution) -> Leftovers:
    """Return the parameters of both models that no step of the other reads in the same way."""
    left, free = _leftovers(solution)
    source_buffers = solution.source.record.buffers
    target_buffers = solution.target.record.buffers
    return [x for x in left if x not in source_buffers], [
        x for x in free if x not in target_buffers
    ]


def buffers_left(solution: Solution) -> Leftovers:
    """Return the buffers of both models that their functions read, as the mean that a model subtracts."""
    slots = []
    for graph, left in zip((solution.source, solution.target), _leftovers(solution), strict=True):
        record = graph.record
        read = {slot for call in record.calls for slot in call.inputs}
        slots.append([x for x in left if x in record.buffers and x in read])
    return slots[0], slots[1]


def _leftovers(solution: Solution) -> Leftovers:
    names_left = solution.names_left()
    source_names = solution.source.record.names.items()
    left = [slot for slot, names in source_names if names[0] in names_left]
    return left, [slot for slot in solution.target.record.names if solution.is_free(slot)]


def fill_leftovers(solution: Solution, leftovers: Leftovers, choice: int = 0) -> None:
    """Give tensors of the target those of the source of their size, in order.

    Where one model has k for each of the other's, every k-th is taken, from `choice` on. Whether that is right only a
    comparison of outputs shows.
    """
    source = solution.source
    target = solution.target
    free_source = _by_size(source, leftovers[0])
    free_target = _by_size(target, leftovers[1])
    for size, parameters in free_target.items():
        others = free_source.get(size, [])
        if not others:
            continue
        several = len(others) // len(parameters)
        shared = len(parameters) // len(others)
        if several > 1:
            others = others[choice::several]
        elif shared > 1:
            parameters = parameters[choice::shared]
        if len(others) != len(parameters):
            continue
        for parameter, other in zip(parameters, others, strict=True):
            source_entries = source.entries.of_parameter(other)
            carried = SourcedTensor(source.numbers.pick(source_entries), source_entries)
            solution.carry(target.entries.of_parameter(parameter), carried)


def _by_size(graph: Graph, slots: list[int]) -> dict[int, list[int]]:
    """Return tensors by their number of entries."""
    by_size: dict[int, list[int]] = {}
    for slot in slots:
        by_size.setdefault(graph.values[slot].numel(), []).append(slot)
    return by_size


@torch.no_grad()
def draw(graph: Graph) -> Numbers:
    """Return random numbers for all entries of a model's parameters, under which its outputs neither grow nor vanish.

    Fresh weights hide faults: a LayerScale of 0, a bias of 0, statistics of 0 and 1.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = Numbers(graph.entries, graph.numbers.tensors)
    for step, role, operand in _operands(graph):
        entries = operand.entries
        if entries is None:
            continue
        values = random_numbers(entries.numel(), generator).view(entries.shape)
        values.mul_(2).sub_(1)  # -1 to 1
        if step.kind == "layer" and role == "weight":
            values *= (3 / max(operand.value[0].numel(), 1)) ** 0.5
        elif role in ("bias", "term"):
            values *= 0.5
        elif role == "running_mean":
            values *= 0.2
        elif role == "running_var":
            values += 1.5
        elif role in ("weight", "scale") and step.kind != "product":
            values = 1 + 0.5 * values
        else:
            values = operand.value + 0.2 * values
        numbers.put(entries, values)
    return numbers


def _operands(graph: Graph) -> Iterator[tuple[Step, str, Operand]]:
    """Yield every operand of all steps, with its step and role."""
    for step in graph.steps:
        for role, operand in step.operands.items():
            yield step, role, operand
        for operand in step.terms:
            yield step, "term", operand
