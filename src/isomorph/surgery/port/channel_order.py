"""In which order layers and norms read channels, where models move them or join them in another order.

A channel has a label that does not depend on the order: the layer that makes it, and its place among the rows of that
layer. Layers of both models that belong together make the same labels. So both read the same once each has its
columns in the order of their labels. A layer whose outputs meet channels in another order, in a sum or product, makes
its rows in the order of these.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from isomorph.operations import tensors_in
from isomorph.surgery.port.graph import NORMS, Content, Graph, Step
from isomorph.surgery.port.pair import Joint, Pairing, Part, channel_axis, part_orders
from isomorph.surgery.port.watch import Call

# A label is the number of what makes a value times this, plus a place in it.
_PLACES = 2**40
# Relative differences that another order of sums explains.
_ROUNDING = 1e-10
# Steps that compute each channel of the result from that of their input.
_CHANNELWISE = NORMS | {"scale", "prelu"}
_AXIS_1 = {"batch_norm", "group_norm", "instance_norm", "prelu"}


class Makers:
    """A number for each layer, or set of them, that values of both models follow from."""

    def __init__(self, pairing: Pairing) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        for pair in range(len(pairing.pairs)):
            self._numbers[(pair,)] = pair

    def number_of(self, pairs: tuple[int, ...]) -> int:
        return self._numbers.setdefault(pairs, len(self._numbers))


class ChannelOrder:
    """The labels of the channels of one model, and in which order its steps read them.

    `pairs`: its joints and their parts, pair by pair of the pairing.
    """

    def __init__(self, graph: Graph, pairs: list[tuple[Joint, list[Part]]], makers: Makers) -> None:
        self.graph = graph
        self.makers = makers
        # Which pair of the pairing a step is of.
        self.pair_of: dict[int, int] = {}
        # The place of each row of a layer among those of its joint.
        self.ranks: dict[int, Tensor] = {}
        # Layers whose rows may take another order: those of what they meet.
        self.free: set[int] = set()
        for i, (joint, parts) in enumerate(pairs):
            self.pair_of |= dict.fromkeys([step.index for step in joint.steps], i)
            _rank_rows(parts, self.ranks)
            if len(parts) == 1 and not joint.first.is_depthwise:
                self.free.add(joint.first.index)
        # As before the first layer followed what its outputs meet.
        self.first_ranks = dict(self.ranks)
        self.step_of = {step.output: step for step in graph.steps}
        # Labels along an axis of what operations compute, by value and axis.
        self._labels: dict[tuple[int, int], Tensor | None] = {}

    def note(self) -> None:
        """Note for every step in which order it reads channels, and for layers in which they make them."""
        while True:
            count = len(self.free)
            self._labels.clear()
            for step in self.graph.steps:
                step.columns = self.columns_of(step)
                if step.is_depthwise and step.index in self.pair_of:
                    self._order_depthwise(step)
            if len(self.free) == count:
                break
            # a layer that follows changes the labels of all that is computed from it

    def _order_depthwise(self, step: Step) -> None:
        """Let a depthwise convolution make its rows in the order in which it reads channels."""
        if step.columns is not None:
            self._order_rows(step, _rows_of(step, step.columns).argsort())
        elif step.row_order is not None:
            step.row_order = None
            del self.ranks[step.index]
            if step.index in self.first_ranks:
                self.ranks[step.index] = self.first_ranks[step.index]

    def columns_of(self, step: Step) -> Tensor | None:
        """Return the channels that a layer, norm or scale reads in the order of their labels; None if they are so."""
        if step.input is None or step.kind == "shift":
            return None
        shape = self.graph.values[step.input].shape
        axis = _axis_read(step)
        content = self.graph.contents[step.input]
        if content.base is None or len(shape) <= max(axis, 0):
            return None
        places = _first_row(shape, content, axis)
        if places is None:
            return None
        try:
            order = self._labels_at(content.base, places).argsort(stable=True)
        except RecursionError:  # hundreds of sums without a layer between them
            return None
        return None if _is_in_order(order) else order

    def _labels_at(self, base: int, places: Tensor) -> Tensor:
        """Return the labels of some entries of a value that is a base. Shape: (N,) -> (N,)"""
        step = self.step_of.get(base)
        labels = self._labels_of_step(step, places) if step else self._labels_of_call(base, places)
        if labels is not None:
            return labels
        return self.makers.number_of(self._pairs_before(base)) * _PLACES + places

    def _pairs_before(self, base: int) -> tuple[int, ...]:
        """Return the pairs of the steps that a value follows from."""
        return tuple(sorted({self.pair_of.get(step, -1) for step in self.graph.sources[base]}))

    def _labels_in(self, slot: int, places: Tensor) -> Tensor | None:
        """Return the labels of some entries of a value; None where parameters alone are."""
        content = self.graph.contents[slot]
        if content.base is None:
            return None
        ids = places if content.ids is None else content.ids.reshape(-1)[places]
        return self._labels_at(content.base, ids) if (ids >= 0).all() else None

    def _labels_of_step(self, step: Step, places: Tensor) -> Tensor | None:
        """Return the labels of what a layer makes, or of what a norm, scale or shift gives on; None for others."""
        if step.index in self.ranks:
            value = self.graph.values[step.output]
            axis = channel_axis(step, value)
            stride = value.shape[axis + 1 :].numel()
            channels = places // stride % step.rows
            around = places // (stride * step.rows) * stride + places % stride
            rank = self.ranks[step.index][channels]
            places_by_rank = rank * _entries_a_row(step, value) + around
            return self.makers.number_of((self.pair_of[step.index],)) * _PLACES + places_by_rank
        if step.input is None:
            return None
        if step.kind == "shift" and step.ids is not None:
            ids = step.ids.reshape(-1)[places]
            return self._labels_at(step.input, ids) if (ids >= 0).all() else None
        shapes = [self.graph.values[slot].shape for slot in (step.input, step.output)]
        if step.kind in _CHANNELWISE and shapes[0] == shapes[1]:
            return self._labels_in(step.input, places)
        return None

    def _labels_of_call(self, base: int, places: Tensor) -> Tensor | None:
        """Return the labels of what joins values, or keeps the channels of one apart; None for another operation."""
        joined = self.graph.joined.get(base)
        if joined is not None:
            return self._labels_of_join(*joined, places)
        call = self.graph.record.call_of.get(base)
        coordinates = torch.unravel_index(places, self.graph.values[base].shape)
        varying = [axis for axis, along in enumerate(coordinates) if (along != along[0]).any()]
        if call is None or len(varying) != 1:
            return None
        (axis,) = varying
        key = base, axis
        if key not in self._labels:
            self._labels[key] = self._labels_along(call, *key)
        labels = self._labels[key]
        return None if labels is None else labels[coordinates[axis]]

    def _labels_of_join(self, slots: list[int], entries: Tensor, places: Tensor) -> Tensor | None:
        """Return the labels of entries of several values one after the other."""
        entries = entries.reshape(-1)[places]
        labels = torch.full_like(entries, -1)
        start = 0
        for slot in slots:
            end = start + self.graph.values[slot].numel()
            inside = (entries >= start) & (entries < end)
            if inside.any():
                found = self._labels_in(slot, entries[inside] - start)
                if found is None:
                    return None
                labels[inside] = found
            start = end
        return labels if (labels >= 0).all() else None

    def _labels_along(self, call: Call, base: int, axis: int) -> Tensor | None:
        """Return the labels along an axis of what an operation makes, if it keeps them apart."""
        inputs = [slot for slot in dict.fromkeys(call.inputs) if slot in self.graph.dependent]
        if not inputs or len(call.outputs) != 1:
            return None
        if len(inputs) > 1:
            return self._labels_of_several(call, inputs, base, axis)
        (slot,) = inputs
        value = self.graph.values[slot]
        size = self.graph.values[base].shape[axis]
        axes = [i for i, side in enumerate(value.shape) if side == size]
        for own_axis in sorted(axes, key=lambda i: i != axis):
            labels = self._labels_at_axis(slot, own_axis)
            if labels is None:
                continue
            order = labels.argsort(stable=True)
            if _is_in_order(order) or self._keeps_apart(call, {slot: own_axis}, axis, order):
                return labels
        return None

    def _labels_of_several(
        self, call: Call, inputs: list[int], base: int, axis: int
    ) -> Tensor | None:
        """Return labels along an axis of a sum or product of values; None if all are in order, or fit in none."""
        made = self.graph.values[base]
        axes = {}
        labels_of = {}
        for slot in inputs:
            value = self.graph.values[slot]
            own_axis = axis + value.ndim - made.ndim
            if own_axis < 0 or value.shape[own_axis] == 1:  # the same for all channels
                continue
            labels = self._labels_at_axis(slot, own_axis)
            if labels is None or len(labels) != made.shape[axis]:
                return None
            axes[slot] = own_axis
            labels_of[slot] = labels
        ranks = {slot: x.argsort(stable=True).argsort() for slot, x in labels_of.items()}
        if all(map(_is_in_order, ranks.values())):
            return None
        makers = {slot: self._free_maker(labels) for slot, labels in labels_of.items()}
        # what cannot change leads, and of layers that can the first
        numbers = {slot: maker.index if maker else -1 for slot, maker in makers.items()}
        leading = min(numbers, key=lambda slot: numbers[slot])
        rank = ranks[leading]
        if not self._keeps_apart(call, axes, axis, rank.argsort()):
            return None
        following: dict[Step, Tensor] = {}
        for slot, maker in makers.items():
            if torch.equal(ranks[slot], rank):
                continue
            if maker is None or maker is makers[leading] or maker in following:
                return None
            following[maker] = labels_of[slot]
        for maker, labels in following.items():
            self._follow(maker, labels, rank)
        pairs = self._pairs_before(base)
        return self.makers.number_of(pairs) * _PLACES + rank * made.shape[axis + 1 :].numel()

    def _labels_at_axis(self, slot: int, axis: int) -> Tensor | None:
        """Return the labels of a value's first entries along an axis."""
        shape = self.graph.values[slot].shape
        return self._labels_in(slot, torch.arange(shape[axis]) * shape[axis + 1 :].numel())

    def _keeps_apart(self, call: Call, axes: dict[int, int], to: int, order: Tensor) -> bool:
        """True if an operation gives channels in another order for channels of its inputs in this one."""
        values = self.graph.values
        moved = {slot: values[slot].index_select(axis, order) for slot, axis in axes.items()}
        try:
            made = call.run(lambda slot: moved.get(slot, values[slot]))
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False
        (out,) = tensors_in(made)
        expected = values[call.outputs[0]].index_select(to, order)
        if not expected.is_floating_point():
            return torch.equal(out, expected)
        tolerance = _ROUNDING * float(expected.nan_to_num(0, 0, 0).abs().max())
        return out.shape == expected.shape and torch.allclose(out, expected, 0, tolerance)

    def _free_maker(self, labels: Tensor) -> Step | None:
        """Return the layer whose outputs, each once, have these labels, if it may make them in another order."""
        (pair, *others) = (labels // _PLACES).unique().tolist()
        if others:
            return None
        for step in self.graph.steps:
            if step.index in self.free and self.pair_of[step.index] == pair:
                count = len(self._places_of(step, labels).unique())
                return step if step.rows == count == len(labels) else None
        return None

    def _places_of(self, maker: Step, labels: Tensor) -> Tensor:
        """Return which of a layer's rows, by their ranks, labels are of."""
        return labels % _PLACES // _entries_a_row(maker, self.graph.values[maker.output])

    def _follow(self, maker: Step, labels: Tensor, rank: Tensor) -> None:
        """Let a layer make its rows in the order of what its outputs meet."""
        row = self.ranks[maker.index].argsort()[self._places_of(maker, labels)]
        self.free.remove(maker.index)
        self._order_rows(maker, torch.full_like(rank, -1).scatter(0, row, rank))

    def _order_rows(self, step: Step, rank: Tensor) -> None:
        self.ranks[step.index] = rank
        step.row_order = rank.argsort()


def _is_in_order(order: Tensor) -> bool:
    return torch.equal(order, torch.arange(len(order)))


def _rows_of(step: Step, channels: Tensor) -> Tensor:
    """Return the rows of a depthwise convolution that read channels, one after the other."""
    count = step.rows // len(channels)
    return (channels[:, None] * count + torch.arange(count)).reshape(-1)


def _entries_a_row(step: Step, value: Tensor) -> int:
    """Return how many entries of what a layer makes each of its rows has."""
    return value.numel() // step.rows


def _first_row(shape: torch.Size, content: Content, axis: int) -> Tensor | None:
    """Return the entries of its base that a value has along an axis, where it first has all of them."""
    if content.ids is None:
        return torch.arange(shape[axis]) * shape[axis:][1:].numel()
    rows = content.ids.movedim(axis, -1).reshape(-1, shape[axis])
    complete = (rows >= 0).all(-1).nonzero()
    return rows[int(complete[0])] if len(complete) else None


def _axis_read(step: Step) -> int:
    """Return along which axis of its input a step reads channels."""
    name = step.call.name if step.call else ""
    if name in _AXIS_1 or name.startswith("conv"):
        return 1
    if step.kind == "scale":
        sides = step.operands["scale"].value.shape if "scale" in step.operands else ()
        wide = [i - len(sides) for i, side in enumerate(sides) if side > 1]
        return wide[0] if len(wide) == 1 else -1
    return -1


def order_channels(
    source: Graph, target: Graph, pairing: Pairing, orders: Mapping[int, int]
) -> None:
    """Note for the steps of two models in which order each reads channels, so that both read the same."""
    makers = Makers(pairing)
    parts = [source_parts(*joints, orders) for joints in pairing.pairs]
    of_source = [(joint, own) for (joint, _), own in zip(pairing.pairs, parts, strict=True)]
    of_target = [(joint, joint.parts) for _, joint in pairing.pairs]
    for graph, pairs in ((source, of_source), (target, of_target)):
        for step in graph.steps:
            step.row_order = None
        ChannelOrder(graph, pairs, makers).note()


def source_parts(joint: Joint, other: Joint, orders: Mapping[int, int]) -> list[Part]:
    """Return the parts of layers of the source in the order of those of the target."""
    fitting = part_orders(joint, other)
    if not fitting:
        return joint.parts
    return [joint.parts[i] for i in fitting[orders.get(joint.index, 0)]]


def _rank_rows(parts: list[Part], ranks: dict[int, Tensor]) -> None:
    """Give the rows of layers side by side their places in the order of the parts."""
    count = 0
    for part in parts:
        rank = ranks.setdefault(part.step.index, torch.full((part.step.rows,), -1))
        rank[part.rows] = torch.arange(count, count + len(part.rows))
        count += len(part.rows)
