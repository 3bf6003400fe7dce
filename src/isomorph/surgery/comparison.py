"""Compare the outputs of two models tensor by tensor, and channel by channel where channels have other scales."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isomorph.errors import UserError
from isomorph.operations import leaves, parts_of
from isomorph.surgery.calls import dtype_name, relative

# Differences up to this many times what a model differs from itself in float64 are rounding.
ROUNDING = 8
# Channels are on another scale if no channel is between, and if the largest of them is this much smaller.
_GAP, _SMALLER = 10, 30
# Channels that are smaller than this share of the largest are 0 for whoever reads them.
_NEGLIGIBLE = 1e-6
# Without other inputs to see whether they are always smaller, channels need as many values.
_MANY = 64
# An output that is this much smaller than its own rounding in float32 is 0.
_ZERO = 1e-7
# Rounding in float32 that only the first model has is at most this share of the largest value: more is another way to
# compute. Values that are this many times smaller than their rounding are 0.
_OWN_ROUNDING, _VANISHES = 0.05, 1e3

# Decibels of noise.
_HALF_A_BIT = 3.0

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class TensorDifference:
    """The largest differences of one tensor in the outputs of two models, in float32 and float64.

    `path` says where it is in the outputs, "" for a single tensor, and which channels are meant: `boxes`, `0[:, 4:]`.
    `scale` is its largest finite value in float64, and `rounding` the difference in float32 that rounding explains,
    from how far the first model differs from itself in float64. `problem` says what cannot be measured.

    >>> from isomorph.surgery.comparison import TensorDifference
    >>> row = TensorDifference("scores", (2, 3), "float32", 1e-7, 0.0, 1.0)
    >>> row.is_within(1e-5), row.is_within(1e-8)
    (True, False)
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    fp32: float
    fp64: float
    scale: float
    rounding: float = 0.0
    problem: str = ""

    def excess(self, atol: float) -> float:
        """Return how many times larger than allowed the difference is; infinite if it is not finite."""
        if not math.isfinite(self.fp32 + self.fp64):
            return math.inf
        if self.dtype.startswith(("int", "uint", "bool")) and atol < 1:
            return _ratio(self.fp32 + self.fp64, 0.0)
        allowed = atol * self.scale if self.scale else 0.0
        rounded = min(atol, self.rounding)
        if self.scale > _ZERO * self.rounding:
            rounded = min(rounded, self.scale / 2)
        single = _ratio(self.fp32, max(allowed, self.rounding))
        return max(single, _ratio(self.fp64, max(allowed, rounded)))

    def is_within(self, atol: float) -> bool:
        """True if both differences are at most `atol` times the largest value, or no larger than rounding explains.

        In float64 rounding explains at most `atol`, and half of the largest value. Integers must be equal.
        """
        return self.excess(atol) <= 1

    def __str__(self) -> str:
        sides = "x".join(map(str, self.shape)) or "a number"
        sizes = f"max |diff| {self.fp32:.3g}, {self.fp64:.3g} where max |out| is {self.scale:.3g}"
        problem = f"; {self.problem}" if self.problem else ""
        return f"{self.path or 'output'} ({sides}): {sizes}{problem}"


def _ratio(difference: float, limit: float) -> float:
    """Return a difference as a multiple of the limit."""
    if limit:
        return difference / limit
    return math.inf if difference else 0.0


def tensors_by_path(output: Any) -> Tensors:
    """Return the tensors of an output by path; numbers and arrays of NumPy count as tensors."""
    tensors = {}
    for path, leaf in leaves(output):
        tensor = as_number(leaf)
        if tensor is not None:
            tensors[path.removeprefix(".")] = tensor
    return tensors


def as_number(leaf: Any) -> Tensor | None:
    """Return a tensor, a number or an array as a tensor; None for anything else, and for a number beyond 64 bits."""
    if isinstance(leaf, Tensor):
        return leaf.detach()
    if type(leaf) is int and not -(2**63) <= leaf < 2**63:
        return None
    if isinstance(leaf, bool | int | float | complex):
        return torch.tensor(
            leaf, dtype=torch.float64 if isinstance(leaf, float) else None, device="cpu"
        )
    if isinstance(leaf, np.ndarray | np.generic) and np.asarray(leaf).dtype.kind in "biufc":
        return torch.from_numpy(np.array(leaf))
    return None


def check_structure(outputs: Tensors, others: Tensors) -> None:
    """Raise UserError for outputs without tensors, and where one has other tensors or shapes; it says which."""
    if not outputs:
        raise UserError("the output of the model has no tensors")
    where = "the outputs of the models have different shapes"
    for path, tensor in outputs.items():
        shape = tuple(tensor.shape)
        if path not in others:
            raise UserError(f"{where}: only the first has {path or 'a single tensor'} of {shape}")
        other = tuple(others[path].shape)
        if other != shape:
            raise UserError(f"{where}{f' at {path}' if path else ''}: {shape} and {other}")
    for path in others.keys() - outputs.keys():
        raise UserError(
            f"{where}: only the second has {path or 'a single tensor'} of {tuple(others[path].shape)}"
        )


def structure_notes(output: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield how outputs with the same tensors differ otherwise: in containers, order of keys, None, text and dtype."""
    parts = parts_of(output)
    others = parts_of(other)
    if parts is None or others is None:
        yield from _leaf_notes(output, other, path)
        return
    where = path or "the output"
    if type(output) is not type(other):
        yield f"{where} is {_kind(other)}, in the original {_kind(output)}"
    for name in parts:
        if name not in others:
            yield f"{where} has no {name}, which is {parts[name]!r:.20} in the original"
    for name in others:
        if name not in parts:
            yield f"{where} has {name}={others[name]!r:.20}, which the original does not have"
    shared = [name for name in parts if name in others]
    if shared != [name for name in others if name in parts]:
        yield f"{where} has its keys in another order: {', '.join(others)}; in the original {', '.join(parts)}"
    for name in shared:
        yield from structure_notes(parts[name], others[name], f"{path}.{name}".removeprefix("."))


def _leaf_notes(output: Any, other: Any, path: str) -> Iterator[str]:
    """Yield how two single outputs differ besides their values: in class, dtype, device or text."""
    where = path or "the output"
    other_kind = f"{where} is {_kind(other)}, in the original {_kind(output)}"
    tensor = as_number(output)
    other_tensor = as_number(other)
    if tensor is None or other_tensor is None:
        if type(output) is not type(other):
            yield other_kind
        elif isinstance(output, str | bytes) and output != other:
            yield f"{where} is {other!r:.40}, in the original {output!r:.40}"
        return
    if isinstance(output, Tensor) is not isinstance(other, Tensor):
        yield other_kind
    elif tensor.dtype != other_tensor.dtype:
        yield f"{where} is in {dtype_name(other_tensor)}, in the original in {dtype_name(tensor)}"
    if tensor.device != other_tensor.device:
        yield f"{where} is on {other_tensor.device}, in the original on {tensor.device}"


def _kind(value: Any) -> str:
    """Return the class of a value with its article."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


def largest_difference(output: Any, other: Any) -> tuple[float, float]:
    """Return the largest difference of two outputs, and the largest finite value of the first.

    They are those of the tensor that differs most, relative to its values. Identical infinities are equal, NaN never.

    Raises: UserError if the outputs have other tensors or shapes, or no tensors.
    """
    outputs = tensors_by_path(output)
    others = tensors_by_path(other)
    check_structure(outputs, others)
    differences = [(0.0, 0.0)]
    for path, tensor in outputs.items():
        difference = _largest(_difference(tensor, others[path]))
        differences.append((difference, _largest(_finite(full_precision(tensor).abs()))))
    return max(differences, key=lambda pair: (relative(*pair), pair[1]))


def relative_difference(output: Any, other: Any) -> float:
    """Return the largest difference of two outputs as a share of the largest value. Raises: as `largest_difference`."""
    return relative(*largest_difference(output, other))


# The outputs of a first model and of another for the same inputs.
Pair = tuple[Tensors, Tensors]


def compare_tensors(
    single: Pair,
    double: Pair,
    atol: float,
    redraw: Callable[[], list[Tensors]] = list,
    by_channel: bool = True,
) -> list[TensorDifference]:
    """Return the differences of two models' outputs, tensor by tensor; `single` are those in float32.

    Channels whose values and rounding are smaller by orders of magnitude than those of others, as scores in one tensor
    with boxes in pixels, must agree for themselves too; they have a row of their own where they do not. `redraw`
    returns outputs of the first model for other inputs, which show whether these channels are always smaller. Without
    `by_channel` tensors are compared as a whole.

    Raises: UserError if the outputs have other tensors or shapes, or no tensors.
    """
    check_structure(*single)
    check_structure(*double)
    redraw_once = cache(redraw)
    rows = []
    for path, exact in double[0].items():
        if not exact.numel():
            rows.append(
                TensorDifference(
                    path, tuple(exact.shape), dtype_name(single[0][path]), 0.0, 0.0, 0.0
                )
            )
            continue
        compared = _Compared((single[0][path], single[1][path]), (exact, double[1][path]), atol)
        rows.append(compared.difference(path))
        for axis, channels in compared.smaller_channels() if by_channel else ():
            row = compared.difference(f"{path}{_index(axis, channels)}", axis, channels)
            if row.is_within(atol):
                continue
            random_outputs = [outputs[path] for outputs in redraw_once() if path in outputs]
            if compared.stay_smaller(axis, channels, random_outputs):
                rows.append(row)
    return rows


class _Compared:
    """One tensor in the outputs of two models, in float32 and float64."""

    def __init__(
        self, single: tuple[Tensor, Tensor], double: tuple[Tensor, Tensor], atol: float
    ) -> None:
        self.dtype = dtype_name(single[0])
        self.atol = atol
        numbers, others = map(full_precision, single)
        self.values, exact_others = map(full_precision, double)
        self.fp32 = _difference(*single)
        self.fp64 = _difference(*double)
        # how far each model differs from itself in float64
        self.noise = _noise(numbers, self.values)
        self.other_noise = _noise(others, exact_others)
        self.problem = _count_not_finite(numbers, others) or _count_not_finite(
            self.values, exact_others
        )

    def difference(
        self, path: str, axis: int = 0, channels: Tensor | None = None
    ) -> TensorDifference:
        """Return the largest differences in the whole tensor, or in some of its channels."""

        def largest(values: Tensor) -> float:
            return _largest(values if channels is None else values.index_select(axis, channels))

        scale = largest(_finite(self.values.abs()))
        own = ROUNDING * largest(self.noise)
        others = ROUNDING * largest(self.other_noise)
        if own < _VANISHES * scale:
            own = min(own, max(others, _OWN_ROUNDING * scale))
        return TensorDifference(
            path,
            tuple(self.values.shape),
            self.dtype,
            fp32=largest(self.fp32),
            fp64=largest(self.fp64),
            scale=scale,
            rounding=max(own, min(self.atol, others)),
            problem=self.problem,
        )

    def smaller_channels(self) -> Iterator[tuple[int, Tensor]]:
        """Yield axes, and indices along them whose values and rounding are smaller by orders than those of others."""
        if self.fp32.shape != self.values.shape:  # rounding decides how many there are
            return
        for axis in range(self.values.ndim):
            scales, order = _scales(self.values, axis).sort(descending=True)
            scales = scales[scales > _NEGLIGIBLE * scales[0]]
            noises = _scales(self.noise, axis)[order]
            gaps = (scales[:-1] >= _GAP * scales[1:]).nonzero().flatten() + 1
            bounds = [0, *gaps.tolist(), len(scales)]
            for start, end in pairwise(bounds[1:]):
                # 0 of constants or integers, of which it shows nothing
                rounding = noises[: bounds[1]].max()
                rounds_less = not rounding or noises[start:end].max() <= rounding / _GAP
                if rounds_less and scales[start] <= scales[0] / _SMALLER:
                    yield axis, order[start:end].sort().values

    def stay_smaller(self, axis: int, channels: Tensor, random_outputs: Sequence[Tensor]) -> bool:
        """True if channels are smaller by orders for other inputs too; without these, if they have many values."""
        size = self.values.shape[axis]
        comparable = [
            x
            for x in random_outputs
            if x.ndim == self.values.ndim and x.shape[axis] == size and x.numel()
        ]
        if not comparable:
            return self.values.numel() // size * len(channels) >= _MANY
        scales = _scales(self.values, axis)
        larger = scales > scales[channels].max()
        for tensor in comparable:
            scales = scales.maximum(_scales(full_precision(tensor), axis))
        largest = scales[channels].max()
        return bool(scales[larger].min() >= _GAP * largest and scales.max() >= _SMALLER * largest)


def full_precision(x: Tensor) -> Tensor:
    """Return a tensor in float64 or complex128, dense."""
    if x.layout != torch.strided:
        x = x.to_dense()
    if x.is_quantized:
        x = x.dequantize()
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _largest(values: Tensor) -> float:
    """Return the largest value, infinity if one is NaN, 0 without any."""
    largest = values.max().item() if values.numel() else 0.0
    return math.inf if math.isnan(largest) else largest


def _absolute_difference(values: Tensor, others: Tensor) -> Tensor:
    others = others.to(values.device)
    return (values - others).abs().masked_fill(values == others, 0)  # infinities may be equal


def _difference(tensor: Tensor, other: Tensor) -> Tensor:
    """Return how far two tensors are apart; whole numbers that float64 cannot tell apart, by one at least."""
    difference = _absolute_difference(full_precision(tensor), full_precision(other))
    is_whole = tensor.dtype == other.dtype == torch.int64
    if is_whole and tensor.layout == other.layout == torch.strided:
        return difference.maximum((tensor != other.to(tensor.device)).double())
    return difference


def _noise(values: Tensor, exact: Tensor) -> Tensor:
    """Return how far values are from exact ones, 0 where one is not finite, or if they have different shapes."""
    if values.shape != exact.shape:
        return torch.zeros_like(exact.abs())
    return _finite(_absolute_difference(values, exact))


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num(0, 0, 0)


def _scales(values: Tensor, axis: int) -> Tensor:
    """Return the largest value at every index of an axis. Shape: (..., C, ...) -> (C,)"""
    rows = _finite(values.abs()).movedim(axis, 0).reshape(values.shape[axis], -1)
    return rows.amax(1)


def _count_not_finite(values: Tensor, others: Tensor) -> str:
    """Return how many values of one model alone are not finite, as a sentence, or ""."""
    differ = ~(values == others)
    for ordinal, tensor in (("second", others), ("first", values)):
        count = int((differ & ~tensor.isfinite()).sum())
        if count:
            return f"{count} of {tensor.numel()} values of the {ordinal} model are not finite"
    return ""


def _index(axis: int, channels: Tensor) -> str:
    """Return channels as an index in Python: [:, 4:84]."""
    chosen = channels.tolist()
    first = chosen[0]
    last = chosen[-1]
    text = f"{first}:{last + 1}" if len(chosen) == last - first + 1 else str(chosen[:6])
    return f"[{':, ' * axis}{text}]"


def signal_to_noise(outputs: Tensor, others: Tensor) -> float:
    """Return 10 log10(sum(outputs^2) / sum((outputs - others)^2)), in decibels; infinite for equal tensors.

    >>> from isomorph.surgery.comparison import signal_to_noise
    >>> round(signal_to_noise(torch.full((4,), 10.0), torch.full((4,), 9.0)))
    20
    """
    exact = outputs.double()
    noise = (exact - others.double().to(exact.device)).square().sum()
    if not noise:
        return math.inf
    return 10 * (exact.square().sum() / noise).log10().item()


def class_agreement(outputs: Tensor, others: Tensor, classes: int | None = None) -> float | None:
    """Return in how many rows, in percent, two tensors (B, classes) have their largest value in the same column.

    None for a tensor of another shape or, if the number of `classes` is known, of another width.

    >>> from isomorph.surgery.comparison import class_agreement
    >>> class_agreement(torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.5]]))
    50.0
    """
    width = outputs.shape[1] if outputs.ndim == 2 else 0
    if width < 2 or classes not in (None, width):
        return None
    is_same = outputs.argmax(1) == others.to(outputs.device).argmax(1)
    return 100 * is_same.double().mean().item()


@dataclass(frozen=True)
class Fidelity:
    """How close a file with int8 weights is to its model, on a number of `images`.

    `output_sqnr` is the signal-to-quantisation-noise ratio of the outputs in decibels, and `agreement` the share of
    images, in percent, of which both predict the same class; None where outputs are not (B, classes).

    >>> from isomorph.surgery.comparison import Fidelity
    >>> stored = Fidelity(30.0, 99.0, 512)
    >>> Fidelity(28.5, 97.0, 64).is_like(stored), Fidelity(20.0, 99.0, 64).is_like(stored)
    (True, False)
    """

    output_sqnr: float
    agreement: float | None
    images: int

    def is_like(self, stored: "Fidelity") -> bool:
        """True if the noise is at most half a bit (3 dB) more than it was, and as many classes agree.

        The share of images that disagree may be larger by three standard deviations, as other images are a sample.
        """
        if not self.output_sqnr >= stored.output_sqnr - _HALF_A_BIT:
            return False
        if self.agreement is None or stored.agreement is None:
            return True
        wrong = 1 - stored.agreement / 100
        share = (wrong * stored.images + 1) / (stored.images + 2)
        allowed = share + 3 * math.sqrt(share * (1 - share) / max(self.images, 1))
        return 1 - self.agreement / 100 <= allowed + 1 / max(self.images, 1)

    def __str__(self) -> str:
        agreement = "" if self.agreement is None else f", same class on {self.agreement:.1f}%"
        return f"{self.output_sqnr:.1f} dB{agreement} of {self.images} images"


def measure_fidelity(pairs: Sequence[Pair], classes: int | None = None) -> Fidelity:
    """Return how close outputs are to those of the first model, batch by batch, which have one tensor each."""
    outputs = torch.cat([next(iter(first.values())).double() for first, _ in pairs])
    others = torch.cat([next(iter(second.values())).double() for _, second in pairs])
    return Fidelity(
        signal_to_noise(outputs, others), class_agreement(outputs, others, classes), len(outputs)
    )
