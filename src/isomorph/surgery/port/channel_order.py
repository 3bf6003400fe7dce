"""In which order layers and norms read channels, where models move them or join them in another order.

A channel has a label that does not depend on the order: the layer that makes it, and its place among the rows of that
layer. Layers of both models that belong together make the same labels. So both read the same once each has its
columns in the order of their labels.
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

    `ranks`: of each row of a layer, by step. `pair_of`: which pair of the pairing a step is of.
    """

    def __init__(
        self, graph: Graph, ranks: dict[int, Tensor], pair_of: dict[int, int], makers: Makers
    ) -> None:
        self.graph = graph
        self.ranks = ranks
        self.pair_of = pair_of
        self.makers = makers
        self.step_of = {step.output: step for step in graph.steps}
        # Labels along an axis of what operations compute, by value and axis.
        self._labels: dict[tuple[int, int], Tensor | None] = {}

    def columns_of(self, step: Step) -> Tensor | None:
        """Return the channels that a layer, norm or scale reads in the order of their labels; None if they are."""
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
        order = self._labels_at(content.base, places).argsort(stable=True)
        return None if torch.equal(order, torch.arange(len(order))) else order

    def _labels_at(self, base: int, places: Tensor) -> Tensor:
        """Return the labels of some entries of a value that is a base. Shape: (N,) -> (N,)"""
        step = self.step_of.get(base)
        labels = self._labels_of_step(step, places) if step else self._labels_of_call(base, places)
        if labels is not None:
            return labels
        pairs = {self.pair_of.get(source, -1) for source in self.graph.sources[base]}
        return self.makers.number_of(tuple(sorted(pairs))) * _PLACES + places

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
            places_by_rank = rank * (value.numel() // step.rows) + around
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
        """Return the labels along an axis of what an operation makes of one value, if it keeps them apart."""
        inputs = [slot for slot in dict.fromkeys(call.inputs) if slot in self.graph.dependent]
        if len(inputs) != 1 or len(call.outputs) != 1:
            return None
        (slot,) = inputs
        value = self.graph.values[slot]
        size = self.graph.values[base].shape[axis]
        axes = [i for i, side in enumerate(value.shape) if side == size]
        for own_axis in sorted(axes, key=lambda i: i != axis):
            stride = value.shape[own_axis + 1 :].numel()
            labels = self._labels_in(slot, torch.arange(size) * stride)
            if labels is None:
                continue
            order = labels.argsort(stable=True)
            in_order = torch.equal(order, torch.arange(size))
            if in_order or self._keeps_apart(call, slot, own_axis, axis, order):
                return labels
        return None

    def _keeps_apart(self, call: Call, slot: int, axis: int, to: int, order: Tensor) -> bool:
        """True if an operation gives channels in another order for channels in this one."""
        moved = self.graph.values[slot].index_select(axis, order)
        try:
            made = call.run(lambda other: moved if other == slot else self.graph.values[other])
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False
        (out,) = tensors_in(made)
        expected = self.graph.values[call.outputs[0]].index_select(to, order)
        if not expected.is_floating_point():
            return torch.equal(out, expected)
        tolerance = _ROUNDING * float(expected.abs().max())
        return out.shape == expected.shape and torch.allclose(out, expected, 0, tolerance)


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
    ranks: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})
    pairs_of: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for i, joints in enumerate(pairing.pairs):
        for joint, pair_of in zip(joints, pairs_of, strict=True):
            pair_of.update(dict.fromkeys([step.index for step in joint.steps], i))
        parts = source_parts(*joints, orders)
        for side, parts_of_side in enumerate((parts, joints[1].parts)):
            _rank_rows(parts_of_side, ranks[side])
    for side, graph in enumerate((source, target)):
        order = ChannelOrder(graph, ranks[side], pairs_of[side], makers)
        for step in graph.steps:
            step.columns = order.columns_of(step)
            if step.is_depthwise and step.columns is not None:
                order.ranks[step.index] = step.columns.argsort()


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
