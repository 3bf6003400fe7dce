"""The graph of operations that read the parameters of a model, found in one run of it.

A value is followed as long as it is only moved (views, slices, joins, gathers) and as parameters are added to it: its
entries are those of a base value plus those of parameters. So it does not matter how code lays out queries, gathers a
table of relative positions or adds class tokens and positions.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from isomorph.errors import UserError
from isomorph.operations import tensors_in
from isomorph.surgery.port.arguments import bind, settings_of
from isomorph.surgery.port.movement import positions
from isomorph.surgery.port.watch import Call, Watch

ADDS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
MULTIPLIES = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "einsum", "baddbmm"}
LAYERS = {"linear", "conv1d", "conv2d", "conv3d"}
TRANSPOSED = {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
NORMS = {"batch_norm", "layer_norm", "group_norm", "rms_norm", "instance_norm"}


@dataclass(frozen=True, eq=False)
class Content:
    """What the entries of a value are: entries of a base, plus entries of parameters.

    `ids`: positions in the base, -1 for none. `terms`: global entries of parameters that are added, -1 for none. All
    have the shape of the value. A value that no image reaches has no base; one that is computed has itself as base.
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

    `number`: that of its value in the run, None for the numbers of `entries`; `turned`: read with its axes exchanged.
    """

    value: Tensor
    entries: Tensor | None
    number: int | None = None
    turned: bool = False


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
    # The order of the channels that are read, where the input is a moved value, and of a shift its parts.
    columns: Tensor | None = None
    terms: tuple[Operand, ...] = ()
    # The first entry of its base that it reads.
    start: int = 0

    @property
    def weight(self) -> Tensor:
        return self.operands["weight"].value

    @property
    def rows(self) -> int:
        """Number of outputs of a layer."""
        return len(self.weight)


class Graph:
    """Steps of a run in order, and where the entries of every value come from."""

    def __init__(self, seen: Watch) -> None:
        self.seen = seen
        self.steps: list[Step] = []
        self.contents: dict[int, Content] = {}
        # The steps from which a value follows without another step between.
        self.sources: dict[int, frozenset[int]] = {}
        # Values that depend on the image or on a step.
        self.live: set[int] = set()
        # Views of a base that computing operations read: the value, the call, and its place among the arguments.
        self.leaves: dict[int, list[tuple[int, Call, int]]] = {}
        # The first entry of every parameter, and their names.
        self.first: dict[int, int] = {}
        self.count = 0
        # The entries of buffers: numbers to carry where a norm reads them, elsewhere constants of the code.
        self.statistics: dict[int, Tensor] = {}
        for number in seen.names:
            self.first[number] = self.count
            size = seen.values[number].numel()
            shape = seen.values[number].shape
            entries = torch.arange(self.count, self.count + size).reshape(shape)
            if number in seen.buffers:
                self.statistics[number] = entries
            else:
                self.contents[number] = Content(terms=(entries,))
            self.count += size
        for number in seen.inputs:
            self._begin(number, frozenset())
        for call in seen.calls:
            self._follow(call)
        self.outputs = [seen.number_of(x) for x in tensors_in(seen.result)]
        for number in self.outputs:
            self._read(number)

    def content(self, number: int) -> Content:
        return self.contents.get(number, Content())

    def _begin(self, number: int, sources: frozenset[int]) -> None:
        """Make a value the base of what follows from it."""
        value = self.seen.values[number]
        self.contents[number] = Content(number, torch.arange(value.numel()).reshape(value.shape))
        self.sources[number] = sources
        self.live.add(number)

    def _follow(self, call: Call) -> None:
        contents = [self.content(number) for number in call.inputs]
        is_live = any(number in self.live for number in call.inputs)
        reads = any(content.terms for content in contents)
        if not is_live and not reads:
            return
        moved = positions(call, self.seen)
        if moved is not None and self._move(call, moved):
            return
        if call.name in ADDS and self._add(call):
            return
        if not self._step(call):
            sources = [self._read(number, call, place) for place, number in enumerate(call.inputs)]
            for number in call.outputs:
                self._begin(number, frozenset().union(*sources))

    def _move(self, call: Call, moved: list[Tensor]) -> bool:
        """Follow a movement; False if its inputs have several bases."""
        floating = [
            n for n in dict.fromkeys(call.inputs) if self.seen.values[n].is_floating_point()
        ]
        contents = [self.content(number) for number in floating]
        bases = {content.base for content in contents if content.base is not None}
        if len(bases) > 1:
            return False
        depth = max(len(content.terms) for content in contents)
        ids = self._joined(floating, [content.ids for content in contents])
        layers = []
        for i in range(depth):
            parts = [content.terms[i] if i < len(content.terms) else None for content in contents]
            layers.append(self._joined(floating, parts))
        base = bases.pop() if bases else None
        sources = [self.sources.get(number, frozenset()) for number in floating]
        for number, where in zip(call.outputs, moved, strict=True):
            if bool((where == -1).all()):  # zeros
                self.contents[number] = Content()
                continue
            terms = tuple(layer[where] for layer in layers)
            terms = tuple(each for each in terms if bool((each >= 0).any()))
            self.contents[number] = Content(base, ids[where] if base is not None else None, terms)
            self.sources[number] = frozenset().union(*sources)
            if any(each in self.live for each in floating):
                self.live.add(number)
        return True

    def _joined(self, numbers: list[int], parts: Iterable[Tensor | None]) -> Tensor:
        """Return the entries of several values one after the other, and -1 as the last, for none."""
        flat = []
        for number, part in zip(numbers, parts, strict=True):
            size = self.seen.values[number].numel()
            flat.append(torch.full((size,), -1) if part is None else part.flatten())
        return torch.cat([*flat, torch.tensor([-1])])

    def _add(self, call: Call) -> bool:
        """Follow a sum with parameters; False for another sum."""
        if len(call.inputs) != 2 or call.kwargs.get("alpha", 1) != 1:
            return False
        one, other = (self.content(number) for number in call.inputs)
        if one.base is not None and other.base is not None:
            return False
        if not (one.terms or other.terms):
            return False
        shape = self.seen.values[call.outputs[0]].shape
        base = one if one.base is not None else other
        ids = None if base.ids is None else base.ids.expand(shape)
        terms = tuple(each.expand(shape) for each in (*one.terms, *other.terms))
        number = call.outputs[0]
        self.contents[number] = Content(base.base, ids, terms)
        sources = [self.sources.get(each, frozenset()) for each in call.inputs]
        self.sources[number] = frozenset().union(*sources)
        if any(each in self.live for each in call.inputs):
            self.live.add(number)
        return True

    def _read(self, number: int, call: Call | None = None, place: int = 0) -> frozenset[int]:
        """Return the steps that a value follows from, after one for the parameters that are added to it."""
        content = self.content(number)
        if content.terms and not content.is_parameter:
            self._shift(number, content)
        elif content.base is not None and call is not None:
            self.leaves.setdefault(content.base, []).append((number, call, place))
        return self.sources.get(number, frozenset())

    def _shift(self, number: int, content: Content) -> None:
        maker = self.seen.makers.get(number)
        terms = tuple(Operand(self.numbers(each), each) for each in content.terms)
        step = Step(
            index=len(self.steps),
            kind="shift",
            module=maker.module if maker else "",
            call=maker,
            operands={},
            input=content.base,
            output=number,
            sources=self.sources.get(number, frozenset()),
            terms=terms,
        )
        self.steps.append(step)
        self._begin(number, frozenset([step.index]))

    def refresh(self, seen: Watch) -> None:
        """Take the numbers of another run of the same model, with other weights."""
        if len(seen.calls) != len(self.seen.calls):
            raise UserError(
                "the model computes something else for other weights; it cannot be followed"
            )
        self.seen = seen
        self.__dict__.pop("all_numbers", None)
        for step in self.steps:
            for operand in (*step.operands.values(), *step.terms):
                if operand.number is not None:
                    value = seen.values[operand.number]
                    operand.value = value.mT if operand.turned else value
                elif operand.entries is not None:
                    operand.value = self.numbers(operand.entries)

    def numbers(self, entries: Tensor) -> Tensor:
        """Return the numbers of parameters at global entries, 0 for none."""
        flat = entries.flatten()
        if is_range(flat):
            return self.all_numbers[int(flat[0]) : int(flat[-1]) + 1].reshape(entries.shape)
        found = self.all_numbers[entries]  # -1 is any number
        return found.masked_fill_(entries < 0, 0.0)

    @cached_property
    def all_numbers(self) -> Tensor:
        """The numbers of all parameters, by global entry."""
        flat = [self.seen.values[number].detach().flatten().double() for number in self.first]
        return torch.cat([*flat, torch.zeros(0, dtype=torch.float64)])

    def owners(self, entries: Tensor) -> list[int]:
        """Return the parameters that global entries belong to, by number."""
        given = entries.flatten()
        given = given[[0, -1]] if is_range(given) else given[given >= 0]
        firsts = torch.tensor(list(self.first.values()))
        places = torch.searchsorted(firsts, given, right=True)
        numbers = list(self.first)
        if len(given) == 2 and is_range(entries.flatten()):
            return numbers[int(places[0]) - 1 : int(places[1])]
        found = places.bincount(minlength=1).nonzero().flatten().tolist()
        return [numbers[place - 1] for place in found]

    def _step(self, call: Call) -> bool:
        """Add the step of a call that reads parameters, or that is a layer; False for another call."""
        if not self.seen.values[call.outputs[0]].is_floating_point():
            return False
        bound = bind(call)
        operands: dict[str, Operand] = {}
        live: list[int] = []
        sources: list[frozenset[int]] = []
        for place, (role, number) in enumerate(bound.items()):
            content = self.content(number)
            is_weight = call.name in LAYERS | TRANSPOSED | NORMS and role not in ("input", "x")
            if content.is_parameter:
                operands[role] = Operand(self.seen.values[number], content.terms[0], number)
                continue
            if number not in self.live and not content.terms:
                if is_weight:
                    entries = self.statistics.get(number)
                    operands[role] = Operand(self.seen.values[number], entries, number)
                continue
            sources.append(self._read(number, call, place))
            if is_weight:  # computed from parameters by steps of their own
                operands[role] = Operand(self.seen.values[number], None, number)
            else:
                live.append(number)
        if not any(each.entries is not None for each in operands.values()) and not (
            call.name in LAYERS and "weight" in operands
        ):
            return False
        step = Step(
            index=len(self.steps),
            kind=_kind(call.name),
            module=call.module,
            call=call,
            operands=operands,
            input=live[0] if live else None,
            output=call.outputs[0],
            sources=frozenset().union(*sources),
            reads=bound.get("input", bound.get("first")),
            settings=settings_of(call),
        )
        _as_layer(step, call)
        if step.kind == "scale" and len(operands) == 1:
            step.operands = {"scale": next(iter(operands.values()))}
        self._order_columns(step)
        self.steps.append(step)
        for number in call.outputs:
            self._begin(number, frozenset([step.index]))
        return True

    def _order_columns(self, step: Step) -> None:
        """Note in which order a layer or norm reads its channels, if its input is a moved value."""
        if step.input is None:
            return
        content = self.content(step.input)
        if content.ids is None or content.base == step.input:
            return
        axis = 1 if step.kind in ("batch_norm", "group_norm") else content.ids.ndim - 1
        if step.call is not None and step.call.name.startswith("conv"):
            axis = 1
        step.start = int(content.ids.max()) if content.ids.numel() == 1 else int(content.ids.min())
        rows = content.ids.movedim(axis, -1)
        rows = rows.reshape(-1, rows.shape[-1])
        complete = (rows >= 0).all(-1).nonzero()
        if not len(complete):
            return
        order = rows[int(complete[0])].argsort()
        if not torch.equal(order, torch.arange(len(order))):
            step.columns = order


def is_range(entries: Tensor) -> bool:
    """True for entries one after the other, as those of a whole parameter are."""
    if not len(entries) or int(entries[0]) < 0 or int(entries[-1] - entries[0]) != len(entries) - 1:
        return False
    return bool((entries[1:] - entries[:-1] == 1).all())


def _kind(name: str) -> str:
    if name in LAYERS:
        return "layer"
    if name in TRANSPOSED:
        return "transposed layer"
    if name in MULTIPLIES:
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
    operand.turned = True
    step.operands = {"weight": operand}
