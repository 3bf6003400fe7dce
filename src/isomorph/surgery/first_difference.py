"""The first operation after which two models differ, found by the values that both compute.

Names and classes play no part. A value of one model is known to the other if that computes the same numbers, in any
order of axes. What lies between known values is computed in another way, and does not matter.
"""

import math
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isomorph.surgery.calls import Inputs
from isomorph.surgery.port.arguments import bind, settings_of
from isomorph.surgery.port.compare import differing, in_layout
from isomorph.surgery.port.watch import Call, watch

# Values are equal if they differ by less than this share of how much the outputs differ.
_SHARE = 1e-3


class Operations(NamedTuple):
    """The operations of a call of a model, and the values that they read and make, by slot."""

    calls: list[Call]
    values: list[Tensor]
    inputs: list[int]
    outputs: list[int]
    # Relative differences that rounding explains.
    rounding: float

    @classmethod
    def of(cls, model: nn.Module, inputs: Inputs) -> "Operations":
        """Return the operations of a module, in the precision of the inputs."""
        record = watch(model, inputs)
        outputs = list(record.outputs.values())
        return cls(record.calls, record.values, record.inputs, outputs, rounding=1e-10)


@dataclass(frozen=True)
class FirstDifference:
    """The first operation after which two models differ, and by how much before and after it.

    `module` and `operation` are those of the second model, `original_module` and `original_operation` what the first
    has there, empty if nothing. `before` and `after` are differences relative to the largest value, the others are
    absolute. `reasons` are settings and weights of both that differ.
    """

    module: str
    operation: str
    original_module: str
    original_operation: str
    before: float
    after: float
    absolute_before: float
    absolute_after: float
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        location = f"first at {self.operation} in {self.module or 'the model'}"
        if self.original_operation:
            location += (
                f" (original: {self.original_operation} in {self.original_module or 'the model'})"
            )
        sizes = (
            f"relative difference {self.before:.2g} before it, {self.after:.2g} after it"
            f" (max |diff| {self.absolute_before:.2g}, {self.absolute_after:.2g})"
        )
        if math.isinf(self.after):
            sizes = f"relative difference {self.before:.2g} before it; the other model has no value to compare it with"
        return "; ".join([f"{location}: {sizes}", *self.reasons])


class _Match(NamedTuple):
    """By how much the other model's equal value differs from a value, and the largest magnitude of the value."""

    difference: float
    scale: float


class _Side:
    """The values of one model that depend on its inputs, and which of them the other model computes too."""

    def __init__(self, run: Operations) -> None:
        self.run = run
        self.dependent = set(run.inputs)
        self.call_of: dict[int, Call] = {}
        for call in run.calls:
            for slot in call.outputs:
                self.call_of[slot] = call
            if not self.dependent.isdisjoint(call.inputs):
                self.dependent.update(call.outputs)
        # By number of elements, not by shape: axes may be in any order.
        self.by_size: dict[int, list[int]] = defaultdict(list)
        self.summaries: dict[int, Tensor] = {}
        for slot in sorted(self.dependent):
            value = run.values[slot]
            if value.is_floating_point() and value.numel():
                self.by_size[value.numel()].append(slot)
                self.summaries[slot] = _summary(value)
        # How far the other model's equal value is, for the values that have one.
        self.matches: dict[int, _Match] = {}
        # Values with a match, and those that they are computed from.
        self.known: set[int] = set()
        # Values that lead to an output without a match.
        self.relevant: set[int] = set()

    def compare(self, other: "_Side", tolerance: float) -> None:
        """Find the values that the other model computes too, and those that lead to an output that it does not."""
        for size, slots in self.by_size.items():
            candidates = other.by_size.get(size, [])
            if not candidates:
                continue
            summaries = torch.stack([other.summaries[candidate] for candidate in candidates])
            for slot in slots:
                distances = (summaries - self.summaries[slot]).abs().amax(1)
                scale = float(self.summaries[slot][-1])
                close = (distances <= 2 * tolerance * scale).nonzero().flatten().tolist()
                match = self._first_equal(
                    slot, other, [candidates[i] for i in close], tolerance, scale
                )
                if match is not None:
                    self.matches[slot] = match
        self.known = self._before(self.matches)
        outputs = [slot for slot in self.run.outputs if slot in self.summaries]
        self.relevant = self._before(slot for slot in outputs if slot not in self.matches)

    def _first_equal(
        self, slot: int, other: "_Side", candidates: list[int], tolerance: float, scale: float
    ) -> _Match | None:
        """Return the first of the candidates that equals a value, in any order of its axes."""
        value = self.run.values[slot]
        for candidate in candidates:
            _, difference = in_layout(other.run.values[candidate].to(value), value, tolerance)
            if difference <= tolerance:
                return _Match(difference, scale)
        return None

    def _before(self, slots: Iterable[int], until: Container[int] = ()) -> set[int]:
        """Return values and those that they are computed from, back to those in `until`."""
        stack = list(slots)
        ancestors: set[int] = set()
        while stack:
            slot = stack.pop()
            if slot in ancestors or slot not in self.dependent:
                continue
            ancestors.add(slot)
            if slot in self.call_of and slot not in until:
                stack += self.call_of[slot].inputs
        return ancestors

    def border(self) -> list[tuple[Call, int]]:
        """Return the calls that make an unknown value of known ones, with its slot."""
        border = []
        for call in self.run.calls:
            unknown_inputs = self.dependent.intersection(call.inputs) - self.known
            if unknown_inputs:
                continue
            for slot in call.outputs:
                if slot in self.relevant and slot not in self.known and slot in self.summaries:
                    border.append((call, slot))
        return border

    def difference_before(self, call: Call) -> _Match:
        """Return the largest difference of the known values that a call follows from."""
        matches = [
            self.matches[slot]
            for slot in self._before(call.inputs, until=self.matches)
            if slot in self.matches
        ]
        return max(matches, key=lambda match: match.difference, default=_Match(0.0, 0.0))


def _summary(value: Tensor) -> Tensor:
    """Return numbers of a value that the order of its entries does not change, the largest magnitude last."""
    x = value.detach().double().flatten().cpu()
    return torch.stack(
        [x.mean(), x.min(), x.max(), x.abs().mean(), x.square().mean().sqrt(), x.abs().max()]
    )


@torch.no_grad()
def first_difference(
    original: Operations, other: Operations, difference: float, atol: float
) -> FirstDifference | None:
    """Return the first operation of the second model after which the models differ; None if all outputs are known.

    `difference`: how much the outputs differ, relative to the largest value. Values are equal if they differ by a
    thousandth of that, at most by `atol`.
    """
    rounding = max(original.rounding, other.rounding)
    tolerance = max(rounding, min(atol, _SHARE * difference))
    original_side = _Side(original)
    other_side = _Side(other)
    original_side.compare(other_side, tolerance)
    other_side.compare(original_side, tolerance)
    border = other_side.border()
    if not border:
        return None
    call, slot = border[0]
    before = other_side.difference_before(call)
    value = other.values[slot]
    original_call: Call | None = None
    nearest = (True, math.inf)
    for candidate, original_slot in original_side.border():
        _, distance = in_layout(original.values[original_slot].to(value), value, tolerance)
        is_other_kind = candidate.operation != call.operation
        if original_call is None or (is_other_kind, distance) < nearest:
            original_call = candidate
            nearest = is_other_kind, distance
    scale = float(other_side.summaries[slot][-1])
    return FirstDifference(
        module=call.module,
        operation=call.operation,
        original_module=original_call.module if original_call else "",
        original_operation=original_call.operation if original_call else "",
        before=before.difference,
        after=nearest[1],
        absolute_before=before.difference * before.scale,
        absolute_after=nearest[1] * scale,
        reasons=_reasons(original_call, call, original_side, other_side) if original_call else (),
    )


def _reasons(
    original_call: Call, call: Call, original_side: _Side, other_side: _Side
) -> tuple[str, ...]:
    """Return the settings and weights by which two calls of one function differ."""
    if original_call.operation != call.operation:
        return ()
    settings = differing(settings_of(original_call), settings_of(call))
    reasons = [
        f"{name}: {original_value} in the original, {value}"
        for name, original_value, value in settings
    ]
    weights = bind(original_call)
    for role, slot in bind(call).items():
        if (
            slot in other_side.dependent
            or role not in weights
            or weights[role] in original_side.dependent
        ):
            continue
        tensor = other_side.run.values[slot]
        original_tensor = original_side.run.values[weights[role]]
        if tensor.numel() != original_tensor.numel():
            reasons.append(f"its {role} has another size")
            continue
        _, difference = in_layout(original_tensor.to(tensor), tensor)
        if difference > max(original_side.run.rounding, other_side.run.rounding):
            reasons.append(f"its {role} differs by {difference:.2g}")
    return tuple(reasons)
