"""Values as affine functions of another value, their source, and what is written together into layers.

Such a value is a sum of summands, gain * layer(source) or gain * source, plus a shift by channel, moved by steps.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isomorph.operations import Operation, TensorVersion
from isomorph.surgery.channels import ChannelStep, Kind
from isomorph.surgery.layer_calls import InputWindow

# What becomes of a module, and its name: identity, nothing (0), or unscaled (a norm without its weight and bias).
Change = tuple[str, str]


class Summand(NamedTuple):
    """A summand of a value: gain * layer(source), or gain * source if there is no layer. Shape: gain (C,)

    `stays`: the model's own code adds `factor` times the source, or multiplies the layer by it, and still does.
    `after`: a pointwise layer that reads the first, so that the summand is gain * after(layer(source)).
    """

    layer: str | None
    window: InputWindow
    gain: Tensor
    stays: bool = False
    after: str | None = None
    factor: float = 1.0

    def negated(self) -> "Summand":
        """Return the summand as the model's own code subtracts it."""
        is_branch = self.layer is None and not self.stays  # becomes 0, which code may subtract
        return self._replace(gain=-self.gain, stays=not is_branch, factor=-self.factor)


@dataclass(frozen=True, eq=False)
class Affine:
    """A value as a function of its source: the sum of summands, plus a shift of shape (C,), then moved by steps.

    `start` has the channels on `axis`, before the steps; `end` is the last value that a change computes. `changes`:
    what becomes of the modules between source and value when it is written into a layer. `through`: the same value as
    a function of what the layer before its layer reads, such as the adapter up(down(x)).
    """

    source: TensorVersion
    start: TensorVersion
    end: TensorVersion
    axis: int
    summands: tuple[Summand, ...]
    shift: Tensor
    changes: tuple[Change, ...] = ()
    steps: tuple[ChannelStep, ...] = ()
    through: "Affine | None" = None

    @property
    def layers(self) -> list[str | None]:
        """The layer of each summand, None for the source itself."""
        return [summand.layer for summand in self.summands]

    @property
    def has_layer(self) -> bool:
        return any(self.layers)

    @property
    def is_layer_alone(self) -> bool:
        """True if nothing lies between a layer and the value."""
        return self.has_layer and len(self.summands) == 1 and not self.changes

    def moved(
        self,
        operation: Operation,
        value: TensorVersion,
        kind: Kind,
        others: tuple[Operation, ...] = (),
    ) -> "dict[TensorVersion, Affine]":
        """Return each output of an operation that moves the value; `others` move other parts of it."""
        moved = {}
        for number, output in enumerate(operation.outputs):
            step = ChannelStep(operation, value, kind, number, others)
            moved[output] = replace(self, steps=(*self.steps, step), through=None)
        return moved

    def scaled(self, gain: Tensor, shift: Tensor, change: Change) -> "Affine":
        """Return gain * value + shift, computed by what the change removes."""
        summands = tuple(summand._replace(gain=summand.gain * gain) for summand in self.summands)
        changes = self.changes if change in self.changes else (*self.changes, change)
        through = self.through and self.through.scaled(gain, shift, change)
        return replace(
            self,
            summands=summands,
            shift=self.shift * gain + shift,
            changes=changes,
            through=through,
        )

    def times(self, number: float) -> "Affine":
        """Return number * value, multiplied by the model's own code."""
        summands = tuple(
            summand._replace(gain=summand.gain * number, stays=True, factor=number)
            for summand in self.summands
        )
        through = self.through and self.through.times(number)
        return replace(self, summands=summands, shift=self.shift * number, through=through)

    def negated(self) -> "Affine":
        """Return -value, subtracted by the model's own code."""
        summands = tuple(summand.negated() for summand in self.summands)
        through = self.through and self.through.negated()
        return replace(self, summands=summands, shift=-self.shift, through=through)


class Whole(NamedTuple):
    """A module that computes a layer, and then children in turn.

    `parts`: names of the layer and of these children, relative to the module. `modules`: names of all modules that are
    merged or stay.
    """

    name: str
    parts: tuple[str, ...]
    modules: frozenset[str]


@dataclass(frozen=True, eq=False)
class Group:
    """What is written together: summands and a shift into the first of the carriers, or into all readers, or a chain.

    A chain is two layers, of which the first becomes the product; where norms or sums lie between them it needs these
    to be written into the first. Of a `whole` module the carrier and what follows it are left; the summands are its
    input, where its own code adds it. `windows` are those of the carriers, `scales` the gain and shift of each
    reader's inputs.
    """

    kind: str
    carriers: tuple[str, ...]
    windows: tuple[InputWindow, ...]
    changes: tuple[Change, ...]
    summands: tuple[Summand, ...] = ()
    shift: Tensor = torch.zeros(0)  # noqa: RUF009
    needs_sum: bool = False
    # Modules that are not merged and whose inputs or outputs change.
    between: tuple[str, ...] = ()
    scales: tuple[tuple[Tensor, Tensor], ...] = ()
    whole: Whole | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What decides whether two calls agree: the modules and the numbers that are written."""
        summands = tuple(summand._replace(gain=_bytes(summand.gain)) for summand in self.summands)  # type: ignore[arg-type]
        numbers = [self.shift]
        for gain, shift in self.scales:
            numbers += [gain, shift]
        written = tuple(_bytes(tensor) for tensor in numbers)
        modules = (self.carriers, self.windows, self.changes, self.whole)
        return self.kind, *modules, summands, written


def names_in(value_or_group: Affine | Group) -> set[str]:
    """Return the names of the modules that compute a value or are merged with a group."""
    names = {name for _, name in value_or_group.changes}
    for summand in value_or_group.summands:
        names |= {name for name in (summand.layer, summand.after) if name}
    return names


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().double().numpy().tobytes()


def carrier_of(summands: tuple[Summand, ...]) -> Summand | None:
    """Return the summand whose layer can hold the sum of all, or None: that with the largest window."""
    layers = [
        summand for summand in summands if summand.layer and not (summand.stays or summand.after)
    ]
    if not layers:
        return None
    if len(summands) == 1:
        return layers[0]
    if any(summand.window.transposed or summand.window.computed for summand in summands):
        return None
    carrier = max(layers, key=lambda summand: math.prod(summand.window.kernel))
    return carrier if all(_fits(summand, carrier) for summand in summands) else None


def sum_of(first: Affine, second: Affine) -> Affine | None:
    """Return the sum of two values of one source and axis, or None."""
    if (first.source, first.axis) != (second.source, second.axis):
        return None
    summands = (*first.summands, *second.summands)
    changes = (*first.changes, *second.changes)
    return replace(
        first, summands=summands, shift=first.shift + second.shift, changes=changes, through=None
    )


def _fits(summand: Summand, carrier: Summand) -> bool:
    """True if the filters of a summand, padded with zeros, are filters of the carrier's window."""
    outer = carrier.window
    inner = summand.window
    if summand.layer is None:
        ones = (1,) * len(outer.kernel)
        inner = InputWindow(ones, ones, (0,) * len(ones), outer.dilation, outer.groups)
    if inner.stride != outer.stride or inner.groups % outer.groups:
        return False
    inner_axes = zip(inner.kernel, inner.padding, inner.dilation, strict=True)
    outer_axes = zip(outer.kernel, outer.padding, outer.dilation, strict=True)
    return all(_fits_along(*axes) for axes in zip(inner_axes, outer_axes, strict=True))


def _fits_along(inner: tuple[int, float, int], outer: tuple[int, float, int]) -> bool:
    """True if a kernel with its padding and dilation lies in the middle of another along one axis."""
    kernel, padding, dilation = inner
    outer_kernel, outer_padding, outer_dilation = outer
    extra = outer_kernel - kernel
    if extra < 0 or extra % 2:
        return False
    same_taps = kernel == 1 or dilation == outer_dilation
    return same_taps and outer_padding - padding == outer_dilation * extra / 2
