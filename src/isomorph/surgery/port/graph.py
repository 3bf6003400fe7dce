"""The graph of operations that read the parameters of a model, found in one run of it.

A value is followed as long as it is only moved (views, slices, joins, gathers) and as parameters are added to it: its
entries are those of a base value plus those of parameters. So it does not matter how code lays out queries, gathers a
table of relative positions or adds class tokens and positions.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from isomorph.errors import UserError, one_line
from isomorph.operations import tensors_in
from isomorph.surgery.layer_calls import ADD, MUL
from isomorph.surgery.port.arguments import bind, settings_of
from isomorph.surgery.port.movement import positions
from isomorph.surgery.port.numbers import Entries, Numbers
from isomorph.surgery.port.watch import Call, Run, Watch, memory_of, replay

PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "einsum", "baddbmm"}
LAYERS = {"linear", "conv1d", "conv2d", "conv3d"}
TRANSPOSED = {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
NORMS = {"batch_norm", "layer_norm", "group_norm", "rms_norm", "instance_norm"}

NO_VALUES: Mapping[int, Tensor] = MappingProxyType({})


@dataclass(eq=False)
class Content:
    """What the entries of a value are: entries of a base, plus entries of parameters.

    `ids`: positions in the base, -1 for none. `terms`: entries of parameters that are added, -1 for none. All have the
    shape of the value. A value that no image reaches has no base; one that is computed has itself as base.
    """

    base: int | None = None
    ids: Tensor | None = None
    terms: tuple[Tensor, ...] = ()

    @property
    def is_parameter(self) -> bool:
        return self.base is None and len(self.terms) == 1


@dataclass(eq=False)
class Operand:
    """A tensor that a step reads: its numbers, and which entries of parameters they are, if they are only moved.

    `slot`: that of its value in the run, None for the numbers of `entries`.
    """

    value: Tensor
    entries: Tensor | None
    slot: int | None = None


@dataclass(eq=False)
class Step:
    """An operation that reads parameters; a value to which parameters are added is one of the kind `shift`."""

    index: int
    kind: str
    module: str
    call: Call | None
    operands: dict[str, Operand]
    input: int | None
    output: int
    sources: frozenset[int] = frozenset()
    # The value from which its layers read, also one that no image reaches.
    reads: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    # In which order it reads channels so that both models read the same, None for the order that they have.
    columns: Tensor | None = None
    # In which order a layer has its rows so that both models make the same, None for that of its parts.
    row_order: Tensor | None = None
    # What a shift adds.
    terms: tuple[Operand, ...] = ()
    # Which entries of its input a shift adds them to, -1 for none.
    ids: Tensor | None = None
    # The first entry of its base that it reads.
    start: int = 0

    @property
    def weight(self) -> Tensor:
        return self.operands["weight"].value

    @property
    def rows(self) -> int:
        """Number of outputs of a layer."""
        return len(self.weight)

    @property
    def is_depthwise(self) -> bool:
        """True for a convolution each of whose outputs reads one channel, also a transposed one."""
        if self.kind not in ("layer", "transposed layer") or self.weight.shape[1] != 1:
            return False
        groups = self.settings.get("groups", 1)
        return bool(groups > 1 and (self.kind == "layer" or groups == self.rows))


class Graph:
    """Steps of a run in order, and where the entries of every value come from."""

    def __init__(self, record: Watch) -> None:
        self.record = record
        self.steps: list[Step] = []
        self.contents: dict[int, Content] = defaultdict(Content)
        # The steps from which a value follows without another step between.
        self.sources: dict[int, frozenset[int]] = defaultdict(frozenset)
        # Values that depend on the image or on a step.
        self.dependent: set[int] = set()
        # Views of a base that computing operations read: the value, the call, and its place among the arguments.
        self.leaves: dict[int, list[tuple[int, Call, int]]] = defaultdict(list)
        # Of what joins values with several bases: these, and which of their entries it has, one after the other.
        self.joined: dict[int, tuple[list[int], Tensor]] = {}
        tensors = {slot: record.values[slot] for slot in record.names}
        self.entries = Entries({slot: tensor.shape for slot, tensor in tensors.items()})
        self.numbers = Numbers(self.entries, tensors)
        # The entries of buffers: numbers to carry where a norm reads them, elsewhere constants of the code.
        self.statistics: dict[int, Tensor] = {}
        for slot in record.names:
            entries = self.entries.of_parameter(slot)
            if slot in record.buffers:
                self.statistics[slot] = entries
            else:
                self.contents[slot] = Content(terms=(entries,))
        for slot in record.inputs:
            self._begin(slot, frozenset())
        for call in record.calls:
            self._follow(call)
        for slot in record.outputs.values():
            self._read(slot)

    @property
    def values(self) -> list[Tensor]:
        """All values by slot."""
        return self.record.values

    def run(
        self, numbers: Numbers, run: Run = Call.run, constants: Mapping[int, Tensor] = NO_VALUES
    ) -> list[Tensor]:
        """Return all values for other numbers of the parameters, and for other constants.

        Raises: UserError where the operations do not run on them, as those whose shapes depend on numbers.
        """
        try:
            return replay(self.record, {**constants, **numbers.tensors}, run)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise UserError(
                "a model computes something else for other weights, such as shapes; it cannot be followed: "
                f"{one_line(error)}"
            ) from error

    @property
    def reads_computed(self) -> bool:
        """True if a step reads a tensor that is computed from parameters."""
        operands = [operand for step in self.steps for operand in step.operands.values()]
        return any(operand.entries is None for operand in operands)

    def take(self, numbers: Numbers, values: list[Tensor]) -> None:
        """Take other numbers of the parameters, and the values of a run with them."""
        self.numbers = numbers
        self.record.values = values
        for step in self.steps:
            for operand in (*step.operands.values(), *step.terms):
                if operand.entries is not None:
                    operand.value = numbers.pick(operand.entries)
                elif operand.slot is not None:
                    operand.value = self.values[operand.slot]

    def content(self, slot: int) -> Content:
        """Return what a value is; the positions in itself of one that is computed are made when they are asked for."""
        content = self.contents[slot]
        if content.base == slot and content.ids is None:
            value = self.values[slot]
            content.ids = torch.arange(value.numel()).reshape(value.shape)
        return content

    def _begin(self, slot: int, sources: frozenset[int]) -> None:
        """Make a value the base of what follows from it."""
        self.contents[slot] = Content(slot)
        self.sources[slot] = sources
        self.dependent.add(slot)

    def _continue(self, slot: int, content: Content, inputs: Iterable[int]) -> None:
        """Note what a value is that follows from others without a step between."""
        self.contents[slot] = content
        self.sources[slot] = self._sources_of(inputs)
        if not self.dependent.isdisjoint(inputs):
            self.dependent.add(slot)

    def _sources_of(self, slots: Iterable[int]) -> frozenset[int]:
        return frozenset().union(*[self.sources[slot] for slot in slots])

    def _follow(self, call: Call) -> None:
        """Follow a call: a view, a movement, a sum with parameters, a step, or another operation."""
        reads = any(self.contents[slot].terms for slot in call.inputs)
        if self.dependent.isdisjoint(call.inputs) and not reads:
            return
        if self._view(call):
            return
        entries = None if self._is_chosen(call) else positions(call, self.values)
        if entries is not None and self._move(call, entries):
            return
        if call.name in ADD and self._add(call):
            return
        if not self._step(call):
            for argument, slot in enumerate(call.inputs):
                self._read(slot, call, argument)
            for slot in call.outputs:
                self._begin(slot, self._sources_of(call.inputs))

    def _is_chosen(self, call: Call) -> bool:
        """True if the image decides by indices or conditions what a call gives."""
        computed = self.dependent.intersection(call.inputs)
        return any(not self.values[slot].is_floating_point() for slot in computed)

    def _view(self, call: Call) -> bool:
        """Follow a view of one value, as transposed or sliced ones; False for another operation."""
        slot = call.inputs[0]
        value = self.values[slot]
        if call.writes or {*call.inputs} != {slot}:
            return False
        for output in call.outputs:
            output_value = self.values[output]
            is_view = memory_of(output_value) == memory_of(value)
            if output_value.dtype != value.dtype or not is_view:
                return False
        content = self.content(slot)
        layers = [content.ids, *content.terms]
        viewed = [self._viewed(call, layer) for layer in layers if layer is not None]
        if any(output is None for output in viewed):
            return False
        for i, output in enumerate(call.outputs):
            moved_layers = [layer[i] for layer in viewed if layer is not None]
            ids = None if content.ids is None else moved_layers.pop(0)
            terms = self._present(moved_layers)
            self._continue(output, Content(content.base, ids, terms), call.inputs)
        return True

    def _viewed(self, call: Call, entries: Tensor) -> list[Tensor] | None:
        """Return entries of its input as a call of a view function moves them; None if it does not take them."""
        slot = call.inputs[0]
        try:
            views = tensors_in(call.run(lambda n: entries if n == slot else self.values[n]))
        except (RuntimeError, TypeError):
            return None
        shapes = [self.values[output].shape for output in call.outputs]
        if [view.shape for view in views] != shapes or any(x.dtype != entries.dtype for x in views):
            return None
        return views

    def _move(self, call: Call, movements: list[Tensor]) -> bool:
        """Follow a movement; False if its inputs have several bases."""
        floating = [n for n in dict.fromkeys(call.inputs) if self.values[n].is_floating_point()]
        contents = [self.content(slot) for slot in floating]
        bases = {content.base for content in contents if content.base is not None}
        if len(bases) > 1:
            self.joined |= {
                slot: (floating, where) for slot, where in zip(call.outputs, movements, strict=True)
            }
            return False
        depth = max(len(content.terms) for content in contents)
        ids = self._join_entries(floating, [content.ids for content in contents])
        layers = []
        for i in range(depth):
            parts = [content.terms[i] if i < len(content.terms) else None for content in contents]
            layers.append(self._join_entries(floating, parts))
        base = bases.pop() if bases else None
        for slot, where in zip(call.outputs, movements, strict=True):
            if (where == -1).all():  # zeros
                self.contents[slot] = Content()
                continue
            terms = self._present([layer[where] for layer in layers])
            content = Content(base, ids[where] if base is not None else None, terms)
            self._continue(slot, content, floating)
        return True

    def _present(self, terms: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the terms that have entries of parameters."""
        present = []
        for entries in terms:
            if self.entries.owner(entries) is not None or (entries >= 0).any():
                present.append(entries)
        return tuple(present)

    def _join_entries(self, slots: list[int], parts: Iterable[Tensor | None]) -> Tensor:
        """Return the entries of several values one after the other, and -1 as the last, for none."""
        flat = []
        for slot, part in zip(slots, parts, strict=True):
            size = self.values[slot].numel()
            flat.append(torch.full((size,), -1) if part is None else part.flatten())
        return torch.cat([*flat, torch.tensor([-1])])

    def _add(self, call: Call) -> bool:
        """Follow a sum with parameters; False for another sum."""
        if len(call.inputs) != 2 or call.kwargs.get("alpha", 1) != 1:
            return False
        if not any(self.contents[slot].terms for slot in call.inputs):
            return False
        first, second = map(self.content, call.inputs)
        if first.base is not None and second.base is not None:
            return False
        slot = call.outputs[0]
        shape = self.values[slot].shape
        base = first if first.base is not None else second
        ids = None if base.ids is None else base.ids.expand(shape)
        terms = tuple(entries.expand(shape) for entries in (*first.terms, *second.terms))
        self._continue(slot, Content(base.base, ids, terms), call.inputs)
        return True

    def _read(self, slot: int, call: Call | None = None, argument: int = 0) -> None:
        """Note that a value is read, after a step for the parameters that are added to it."""
        content = self.contents[slot]
        if content.terms and not content.is_parameter:
            self._shift(slot, content)
        elif content.base is not None and call is not None:
            self.leaves[content.base].append((slot, call, argument))

    def _shift(self, slot: int, content: Content) -> None:
        """Add the step that adds parameters to a value."""
        call = self.record.call_of.get(slot)
        terms = tuple(Operand(self.numbers.pick(entries), entries) for entries in content.terms)
        step = Step(
            index=len(self.steps),
            kind="shift",
            module=call.module if call else "",
            call=call,
            operands={},
            input=content.base,
            output=slot,
            sources=self.sources[slot],
            terms=terms,
            ids=content.ids,
        )
        self.steps.append(step)
        self._begin(slot, frozenset([step.index]))

    def _step(self, call: Call) -> bool:
        """Add the step of a call that reads parameters, or that is a layer; False for another call."""
        if not self.values[call.outputs[0]].is_floating_point():
            return False
        bound = bind(call)
        operands: dict[str, Operand] = {}
        data: list[int] = []
        slots_read: list[int] = []
        for argument, (role, slot) in enumerate(bound.items()):
            content = self.contents[slot]
            is_weight = call.name in LAYERS | TRANSPOSED | NORMS and role not in ("input", "x")
            if content.is_parameter:
                operands[role] = Operand(self.values[slot], content.terms[0], slot)
                continue
            if slot not in self.dependent and not content.terms:
                if is_weight:
                    entries = self.statistics.get(slot)
                    operands[role] = Operand(self.values[slot], entries, slot)
                continue
            self._read(slot, call, argument)
            slots_read.append(slot)
            if is_weight:  # computed from parameters by steps of their own
                operands[role] = Operand(self.values[slot], None, slot)
            else:
                data.append(slot)
        if not any(operand.entries is not None for operand in operands.values()) and not (
            call.name in LAYERS and "weight" in operands
        ):
            return False
        step = Step(
            index=len(self.steps),
            kind=_kind(call.name),
            module=call.module,
            call=call,
            operands=operands,
            input=data[0] if data else None,
            output=call.outputs[0],
            sources=self._sources_of(slots_read),
            reads=bound.get("input", bound.get("first")),
            settings=settings_of(call),
        )
        _as_layer(step, call)
        if step.kind == "scale" and len(operands) == 1:
            step.operands = {"scale": next(iter(operands.values()))}
        step.start = self._first_entry(step)
        self.steps.append(step)
        for slot in call.outputs:
            self._begin(slot, frozenset([step.index]))
        return True

    def _first_entry(self, step: Step) -> int:
        """Return the first entry of its base that a step reads."""
        if step.input is None:
            return 0
        content = self.contents[step.input]
        if content.ids is None or content.base == step.input:
            return 0
        return int(content.ids.min())


def _kind(name: str) -> str:
    """Return the kind of step that a function of this name is."""
    if name in LAYERS:
        return "layer"
    if name in TRANSPOSED:
        return "transposed layer"
    if name in MUL:
        return "scale"
    if name in PRODUCTS:
        return "product"
    return name.strip("_")


def _as_layer(step: Step, call: Call) -> None:
    """Make a product with a matrix of parameters, x @ w, the layer that it is."""
    if step.kind != "product" or call.name == "einsum" or len(step.operands) != 1:
        return
    (role, operand) = next(iter(step.operands.items()))
    if operand.value.ndim != 2 or role != "second" or operand.entries is None:
        return
    step.kind = "layer"
    operand.value = operand.value.mT
    operand.entries = operand.entries.mT
    step.operands = {"weight": operand}
