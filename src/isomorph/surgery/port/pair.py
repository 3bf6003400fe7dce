"""Which steps of two models belong together: by what they are, what they read, and what reads them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from isomorph.surgery.port.graph import PRODUCTS, Graph, Step
from isomorph.surgery.port.watch import Call

# How many operations are followed from a layer to the product that reads what it makes.
_FAR = 24


@dataclass(eq=False)
class Part:
    """Outputs of a layer that go one way, such as queries: the step, its rows in the order in which they are read."""

    step: Step
    rows: Tensor
    read_by: tuple[Any, ...]


@dataclass(eq=False)
class Joint:
    """Layers of one kind that read one value, taken together; or one other step."""

    index: int
    steps: list[Step]
    label: tuple[Any, ...]
    sources: frozenset[int] = frozenset()
    readers: set[int] = field(default_factory=set)
    parts: list[Part] = field(default_factory=list)

    @property
    def first(self) -> Step:
        return self.steps[0]

    @property
    def module(self) -> str:
        return self.first.module

    @property
    def start(self) -> int:
        """The first position of its base that it reads, which tells the class token's head from another's."""
        return self.first.start


def joints_of(graph: Graph) -> list[Joint]:
    """Return the steps of a model, layers side by side as one."""
    joints: list[Joint] = []
    by_key: dict[Any, Joint] = {}
    owner: dict[int, int] = {}
    for step in graph.steps:
        key = _key(step)
        joint = by_key.get(key)
        if joint is None:
            joint = Joint(len(joints), [], ())
            joints.append(joint)
            by_key[key] = joint
        joint.steps.append(step)
        owner[step.index] = joint.index
    for joint in joints:
        joint.label = _label(joint)
        sources = {owner[source] for step in joint.steps for source in step.sources}
        joint.sources = frozenset(sources - {joint.index})
        for source in joint.sources:
            joints[source].readers.add(joint.index)
        if joint.first.kind == "layer":
            joint.parts = [part for step in joint.steps for part in _parts(graph, step)]
    return joints


def _key(step: Step) -> Any:
    """Return what layers side by side have in common; of another step its own index."""
    if step.kind != "layer" or step.reads is None:
        return step.index
    settings = repr(sorted(step.settings.items()))
    return step.reads, tuple(step.weight.shape[1:]), settings, "input" in step.operands


def _label(joint: Joint) -> tuple[Any, ...]:
    """Return by what a joint is told from others before its neighbours are looked at."""
    step = joint.first
    if step.kind == "layer":
        rows = sum(part.rows for part in joint.steps)
        return "layer", step.weight[0].numel(), rows, "input" in step.operands
    if step.kind == "shift":
        return ("shift",)
    sizes = sorted({operand.value.numel() for operand in step.operands.values()})
    return step.kind, *sizes


def _parts(graph: Graph, step: Step) -> Iterator[Part]:
    """Yield the outputs of a layer in parts that are read apart."""
    count = step.rows
    views: list[tuple[Tensor, Call, int]] = []
    for slot, call, argument in graph.leaves[step.output]:
        if slot == step.output:
            views.append((torch.arange(count), call, argument))
            continue
        ids = graph.content(slot).ids
        assert ids is not None
        entries = ids.flatten()
        inside = entries >= 0
        if not inside.any():
            continue
        value = graph.values[step.output]
        if channel_axis(step, value) == value.ndim - 1:  # those of one token are enough
            last = int(entries.max())
            inside = (entries >= last - last % count) & (entries <= last)
        channels = channels_of(graph, step, entries[inside])
        views.append((_in_order(channels, count), call, argument))
    is_unread = torch.ones(count, dtype=torch.bool)
    views.sort(key=lambda view: -len(view[0]))
    parts: list[tuple[Tensor, tuple[Any, ...]]] = []
    for rows, _, _ in views:
        if is_unread[rows].all():
            is_unread[rows] = False
            own_rows = set(rows.tolist())
            reading = [view for view in views if own_rows.issuperset(view[0].tolist())]
            parts.append((rows, _signature(graph, reading)))
    remaining = is_unread.nonzero().flatten()
    if len(remaining):
        parts.append((remaining, ()))
    parts.sort(key=lambda part: int(part[0].min()))
    for rows, signature in parts:
        yield Part(step, rows, signature)


def channels_of(graph: Graph, step: Step, ids: Tensor) -> Tensor:
    """Return which of a layer's outputs entries of its result are."""
    value = graph.values[step.output]
    stride = value.shape[channel_axis(step, value) + 1 :].numel()
    return ids // stride % step.rows


def channel_axis(step: Step, value: Tensor) -> int:
    """Return along which axis of its result a layer has its outputs."""
    assert step.call is not None
    if step.call.name.startswith("conv"):
        return value.ndim - (step.weight.ndim - 1)
    return value.ndim - 1


def _in_order(channels: Tensor, count: int) -> Tensor:
    """Return different channels in the order of their first appearance."""
    first = torch.full((count,), len(channels))
    first.scatter_reduce_(0, channels, torch.arange(len(channels)), "amin")
    order = first.argsort()
    return order[: int((first < len(channels)).sum())]


def _signature(graph: Graph, reading: Sequence[tuple[Tensor, Call, int]]) -> tuple[Any, ...]:
    """Return the products that a part reaches: its place in them, and whether a softmax follows."""
    products = set()
    queue = [(call, argument) for _, call, argument in reading]
    visited: set[tuple[int, int]] = set()
    while queue and len(visited) < _FAR * len(reading):
        call, argument = queue.pop(0)
        if (call.index, argument) in visited:
            continue
        visited.add((call.index, argument))
        if call.name in PRODUCTS:
            products.add((argument, _reaches_softmax(graph, call)))
            continue
        if call.name in ("linear", "conv2d", "conv1d", "softmax"):
            continue
        for output in call.outputs:
            for reader in graph.record.readers[output]:
                queue.append((reader, reader.inputs.index(output)))
    return tuple(sorted(products))


def _reaches_softmax(graph: Graph, product: Call) -> bool:
    """True if a softmax follows from a product before another product does."""
    queue = [product]
    for _ in range(_FAR):
        if not queue:
            return False
        call = queue.pop(0)
        if call.name == "softmax":
            return True
        if call is not product and call.name in PRODUCTS:
            continue
        for output in call.outputs:
            queue += graph.record.readers[output]
    return False


def part_orders(joint: Joint, other: Joint) -> list[tuple[int, ...]]:
    """Return in which orders the source's parts may stand for the target's, the most likely first."""
    signed = [part.read_by for part in joint.parts], [part.read_by for part in other.parts]
    sizes = [len(part.rows) for part in joint.parts]
    others = [len(part.rows) for part in other.parts]
    if sorted(sizes) != sorted(others):
        return []
    count = len(sizes)
    if count > 4:
        return [tuple(range(count))] if sizes == others else []
    fitting = []
    for order in permutations(range(count)):
        if [sizes[i] for i in order] == others:
            num_equal = sum(signed[0][i] == sign for i, sign in zip(order, signed[1], strict=True))
            fitting.append((-num_equal, order))
    fitting.sort()
    return [order for _, order in fitting]


@dataclass(eq=False)
class Pairing:
    """Joints of a source and a target that belong together, and groups of which order alone decided."""

    pairs: list[tuple[Joint, Joint]]
    alike: list[list[int]]
    """Groups of positions in `pairs` whose targets could be exchanged."""

    only_source: list[Joint]
    only_target: list[Joint]


def pair(source: list[Joint], target: list[Joint]) -> Pairing:
    """Return which joints belong together.

    First by colours of the whole graph; what those leave by colours of what lies before, then of what lies after, and
    last by order.
    """
    matches: dict[int, int] = {}
    similar: list[list[int]] = []
    for before, after in ((True, True), (True, False), (False, True)):
        colours = _colours(source, target, before, after)
        _match_classes(source, target, colours, matches, similar)
        if len(matches) == len(source) == len(target):
            break
    _match_in_order(source, target, matches)
    pairs = [(source[one], target[other]) for one, other in sorted(matches.items())]
    position = {one.index: i for i, (one, _) in enumerate(pairs)}
    alike = [[position[joint] for joint in group] for group in similar]
    return Pairing(pairs, alike, *_unmatched(source, target, matches))


def _unmatched(
    source: list[Joint], target: list[Joint], matches: dict[int, int]
) -> tuple[list[Joint], list[Joint]]:
    """Return the joints of both models that are in no match."""
    matched_targets = set(matches.values())
    return (
        [joint for joint in source if joint.index not in matches],
        [joint for joint in target if joint.index not in matched_targets],
    )


def _colours(
    source: list[Joint], target: list[Joint], before: bool, after: bool
) -> tuple[list[int], list[int]]:
    """Return a colour for every joint of both: equal where neither labels nor neighbours tell them apart."""
    names: dict[Any, int] = {}

    def colour(description: Any) -> int:
        return names.setdefault(description, len(names))

    models = [source, target]
    colours = [[colour(joint.label) for joint in joints_of_model] for joints_of_model in models]
    for _ in range(len(source) + len(target)):
        names = {}
        new = []
        for joints, old in zip(models, colours, strict=True):
            described = []
            for joint in joints:
                sources = _sorted_colours(old, joint.sources) if before else ()
                readers = _sorted_colours(old, joint.readers) if after else ()
                described.append(colour((old[joint.index], sources, readers)))
            new.append(described)
        is_stable = len({*new[0], *new[1]}) == len({*colours[0], *colours[1]})
        colours = new
        if is_stable:
            break
    return colours[0], colours[1]


def _sorted_colours(colours: list[int], joints: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(colours[i] for i in joints))


def _match_classes(
    source: list[Joint],
    target: list[Joint],
    colours: tuple[list[int], list[int]],
    matches: dict[int, int],
    similar: list[list[int]],
) -> None:
    """Match the joints of a colour that both have equally often, in order."""
    classes: dict[int, tuple[list[Joint], list[Joint]]] = defaultdict(lambda: ([], []))
    for side, joints in enumerate(_unmatched(source, target, matches)):
        for joint in joints:
            classes[colours[side][joint.index]][side].append(joint)
    for ones, others in classes.values():
        if len(ones) != len(others):
            continue
        ones.sort(key=lambda joint: joint.start)
        others.sort(key=lambda joint: joint.start)
        matches.update((one.index, other.index) for one, other in zip(ones, others, strict=True))
        if len(ones) > 1:
            similar.append([one.index for one in ones])


def _match_in_order(source: list[Joint], target: list[Joint], matches: dict[int, int]) -> None:
    """Match the remaining joints with equal labels in their order."""
    ones, others = _unmatched(source, target, matches)
    labels = [[joint.label for joint in joints] for joints in (ones, others)]
    matcher = SequenceMatcher(None, labels[0], labels[1], autojunk=False)
    for block in matcher.get_matching_blocks():
        for i in range(block.size):
            matches[ones[block.a + i].index] = others[block.b + i].index
