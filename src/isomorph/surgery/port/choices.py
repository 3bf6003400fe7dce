"""What structure cannot tell in two models, and is tried: orders of parts, steps that look alike, leftovers."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations

from isomorph.surgery.port.pair import Joint, Pairing, part_orders
from isomorph.surgery.port.solve import Solution

# Most parameters of one size that one model may have for each of the other's where structure says nothing.
_SHARING = 2
# Most orders of steps that look alike.
_ORDERS = 5


@dataclass(frozen=True)
class Assignment:
    """Which steps belong together, and how the parts of layers are assigned.

    `orders`: which order of its parts a layer of the source takes, by its joint. `leftovers`: which of the parameters
    that no step of the other model reads in the same way is taken, None for none. `buffers`: whether those that the
    functions read are carried.
    """

    pairing: Pairing
    orders: Mapping[int, int] = field(default_factory=dict)
    leftovers: int | None = None
    buffers: bool = False


# What is tried, and how it changes an assignment.
Attempt = tuple[str, Callable[[Assignment], Assignment]]


def choices(pairing: Pairing, solution: Solution) -> Iterator[Attempt]:
    """Yield what to try where models are not equal: leftovers, other orders of parts, exchanges of steps."""
    if solution.names_left() and any(map(solution.is_free, solution.target.record.names)):
        description = "parameters that both models read in another way"
        for leftovers in range(_SHARING):
            yield description, partial(replace, leftovers=leftovers)
        yield "buffers that both models read", partial(replace, leftovers=None, buffers=True)
    yield from _orders(pairing)
    for group in pairing.alike:
        first = pairing.pairs[group[0]][0]
        description = f"which of the steps like {first.module} are which"
        orders = list(permutations(group))
        for order in orders[1 : 1 + _ORDERS]:
            yield description, partial(_exchange, group=group, order=order)


def _orders(pairing: Pairing) -> Iterator[Attempt]:
    """Yield other orders of the parts of layers, the same one for all layers that are like each other."""
    similar: dict[tuple[object, ...], list[tuple[Joint, Joint]]] = defaultdict(list)
    for joint, other in pairing.pairs:
        if len(joint.parts) > 1 and not _is_clear(joint, other):
            similar[joint.label].append((joint, other))
    for pairs in similar.values():
        joints = [joint for joint, _ in pairs]
        description = f"the order of the parts of {joints[0].module}"
        for order in range(1, len(part_orders(*pairs[-1]))):
            yield description, partial(_reorder, joints=joints, order=order)


def _reorder(old: Assignment, joints: Sequence[Joint], order: int) -> Assignment:
    """Assign the parts of some layers, such as queries and keys, in another order."""
    chosen = {joint.index: order for joint in joints}
    return replace(old, orders={**old.orders, **chosen})


def _exchange(old: Assignment, group: Sequence[int], order: Sequence[int]) -> Assignment:
    """Exchange the targets of pairs that look alike."""
    pairs = list(old.pairing.pairs)
    for index, other_index in zip(group, order, strict=True):
        pairs[index] = pairs[index][0], old.pairing.pairs[other_index][1]
    return replace(old, pairing=replace(old.pairing, pairs=pairs))


def _is_clear(joint: Joint, other: Joint) -> bool:
    """True if what reads the parts of two layers tells which are the same."""
    readers = {part.read_by for part in joint.parts}
    return len(readers) == len(joint.parts) and readers == {part.read_by for part in other.parts}
