"""What structure cannot tell in two models, and is tried: orders of parts, steps that look alike, leftovers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Protocol

from isomorph.surgery.port.pair import Joint, Pairing
from isomorph.surgery.port.solve import Solution, part_orders

# Most parameters of one size that one model may have for each of the other's where structure says nothing.
_SHARING = 2
# Most orders of steps that look alike.
_ORDERS = 5


@dataclass(frozen=True)
class Assignment:
    """Which steps belong together, and how the parts of layers are assigned.

    `orders`: which order of its parts a layer of the source takes, by its joint. `leftovers`: which of the parameters
    that no step of the other model reads in the same way is taken, None for none.
    """

    pairing: Pairing
    orders: Mapping[int, int] = field(default_factory=dict)
    leftovers: int | None = None


class Choice(Protocol):
    """A change of an assignment, and what it is about."""

    def apply(self, old: Assignment) -> Assignment:
        """Return the changed assignment."""

    def describe(self, old: Assignment) -> str:
        """Return what is tried."""


@dataclass(frozen=True)
class _Parts:
    """Another order of the parts of some layers, such as queries and keys."""

    joints: tuple[Joint, ...]
    choice: int

    def apply(self, old: Assignment) -> Assignment:
        chosen = {joint.index: self.choice for joint in self.joints}
        return replace(old, orders={**old.orders, **chosen})

    def describe(self, old: Assignment) -> str:
        return f"the order of the parts of {self.joints[0].module}"


@dataclass(frozen=True)
class _Exchange:
    """Another order of the targets of pairs that look alike."""

    group: tuple[int, ...]
    order: tuple[int, ...]

    def apply(self, old: Assignment) -> Assignment:
        pairs = list(old.pairing.pairs)
        for here, there in zip(self.group, self.order, strict=True):
            pairs[here] = pairs[here][0], old.pairing.pairs[there][1]
        return replace(old, pairing=replace(old.pairing, pairs=pairs))

    def describe(self, old: Assignment) -> str:
        first = old.pairing.pairs[self.group[0]][0]
        return f"which of the steps like {first.module} are which"


@dataclass(frozen=True)
class _Leftovers:
    """Parameters that no step of the other model reads in the same way, by size and order.

    Where one model has several for each of the other's, `which` of them is tried.
    """

    which: int

    def apply(self, old: Assignment) -> Assignment:
        return replace(old, leftovers=self.which)

    def describe(self, old: Assignment) -> str:
        return "parameters that both models read in another way"


def choices(pairing: Pairing, solution: Solution) -> Iterator[Choice]:
    """Yield what to try where models are not equal."""
    if solution.names_left() and solution.has_free_parameters:
        yield from map(_Leftovers, range(_SHARING))
    labels: dict[tuple[object, ...], list[Joint]] = {}
    counts: dict[tuple[object, ...], int] = {}
    for one, other in pairing.pairs:
        if len(one.parts) > 1 and not _is_clear(one, other):
            labels.setdefault(one.label, []).append(one)
            counts[one.label] = len(part_orders(one, other))
    for label, joints in labels.items():
        for choice in range(1, counts[label]):
            yield _Parts(tuple(joints), choice)
    for group in pairing.alike:
        for order in list(permutations(group))[1 : 1 + _ORDERS]:
            yield _Exchange(tuple(group), order)


def _is_clear(one: Joint, other: Joint) -> bool:
    """True if what reads the parts of two layers tells which are the same."""
    read = {part.read_by for part in one.parts}
    return len(read) == len(one.parts) and read == {part.read_by for part in other.parts}
