"""Whether an operation only moves numbers, found by running it on numbers that say where they come from."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from isomorph.surgery.port.watch import Call

# Operations that compute, of which there are many and large ones: not tried.
_COMPUTES = {
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "matmul",
    "__matmul__",
    "bmm",
    "softmax",
    "layer_norm",
    "batch_norm",
    "group_norm",
    "einsum",
    "gelu",
    "relu",
    "silu",
}
# How many numbers of an output are looked for in the inputs before the operation is run again.
_SAMPLE = 4
# Entries are named twice: by numbers up to 1/4, whose products vanish next to them, and by whole numbers of the other
# sign, which activations with a bound change. What gives the same entries both times moves them.
_NAME_UNIT = 2.0**-42
_FACTORS = 1.0, -1 / _NAME_UNIT
# An interpolation to the same size moves numbers up to this.
_ROUNDING = 1e-12


def _encode(first: int, tensor: Tensor) -> Tensor:
    """Return small numbers that name the entries of a tensor, of which there are `first` before it."""
    names = torch.arange(first + 1, first + 1 + tensor.numel(), dtype=torch.float64)
    names[first % 2 :: 2] *= -1  # those of odd names
    return names.mul_(_NAME_UNIT).reshape(tensor.shape)


def positions(call: Call, values: Sequence[Tensor]) -> list[Tensor] | None:
    """Return where each entry of a call's outputs comes from, or None if the call computes something.

    An entry is its position among those of all floating-point inputs, one after the other, or -1 for a zero.
    """
    if call.name in _COMPUTES:
        return None
    floating = [n for n in dict.fromkeys(call.inputs) if values[n].is_floating_point()]
    if not floating or not _sample_is_known(call, values, floating):
        return None
    names: dict[int, Tensor] = {}
    count = 0
    for slot in floating:
        names[slot] = _encode(count, values[slot])
        count += names[slot].numel()
    small, large = _FACTORS
    movements = _entries_moved(call, values, names, count, small)
    # what keeps numbers above 0 alone, as relu does, keeps others of opposite names
    opposite = None if movements is None else _entries_moved(call, values, names, count, large)
    if movements is None or opposite is None:
        return None
    numbers = torch.cat([values[slot].flatten().double() for slot in floating])
    numbers = torch.cat([numbers, numbers.new_zeros(1)])
    for slot, entries, others in zip(call.outputs, movements, opposite, strict=True):
        made_of = values[slot].double()
        if entries.shape != made_of.shape or others.shape != made_of.shape:
            return None
        is_moved = torch.allclose(numbers[entries], made_of, rtol=_ROUNDING, atol=_ROUNDING)
        if not is_moved or not torch.equal(entries, others):
            return None
    return movements


def _entries_moved(
    call: Call, values: Sequence[Tensor], names: dict[int, Tensor], count: int, factor: float
) -> list[Tensor] | None:
    """Return the entries that outputs of a call have when it runs on their names, None if one has another number."""

    def value_of(slot: int) -> Tensor:
        return factor * names[slot] if slot in names else values[slot]

    try:
        with torch.no_grad():
            out: Any = call.run(value_of)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    outputs = tree_leaves(out)
    if len(outputs) != len(call.outputs):
        return None
    movements = []
    for output in outputs:
        entries = _decode(output, count, factor)
        if entries is None:
            return None
        movements.append(entries)
    return movements


def _sample_is_known(call: Call, values: Sequence[Tensor], floating: list[int]) -> bool:
    """True if a few numbers of the outputs are among those of the inputs."""
    for slot in call.outputs:
        output = values[slot]
        if not output.is_floating_point() or not output.numel():
            return False
        flat = output.flatten()
        for i in torch.linspace(0, len(flat) - 1, _SAMPLE).long().tolist():
            sample = flat[i]
            is_input = any(_holds(values[n], sample, call.name) for n in floating)
            if not is_input and sample != 0:
                return False
    return True


def _holds(value: Tensor, number: Tensor, name: str) -> bool:
    """True if a number is among those of a value."""
    if name == "interpolate":
        return bool(((value - number).abs() <= _ROUNDING * number.abs()).any())
    return bool((value == number).any())


def _decode(numbers: Any, count: int, factor: float) -> Tensor | None:
    """Return the entries that numbers name, which are `factor` times the names; -1 for 0, None if one is no name."""
    if not isinstance(numbers, Tensor) or not numbers.is_floating_point():
        return None
    names = numbers.double() / (factor * _NAME_UNIT)
    if not names.isfinite().all():
        return None
    rounded = names.abs().round()
    entries = rounded.long()
    if (names.abs() - rounded).abs().gt(1e-3).any() or (entries > count).any():
        return None
    is_negative = (names < 0) == ((entries & 1) == 1)
    return entries.sub_(1) if (is_negative | (entries == 0)).all() else None
