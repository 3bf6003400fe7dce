"""Calls of a model: its inputs, one tensor or several by name, and the difference between outputs."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import UnionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map, tree_map_only

from isomorph.errors import DoesNotRun, UserError, first_line, is_out_of_memory
from isomorph.layers.modes import first_float

# A batch of images or other tensor, or the keyword arguments of a model.
Inputs = Tensor | Mapping[str, Any]


def own_inputs(
    model: nn.Module, batch: int, size: tuple[int, ...] | None = None
) -> dict[str, Any] | None:
    """Return the inputs that a model itself makes (`example_inputs`), on the CPU; None if it has no such method."""
    own = getattr(model, "example_inputs", None)
    if own is None:
        return None
    with torch.device("cpu"):
        return dict(own(batch, size))


def copy_inputs(inputs: Any) -> Any:
    """Return inputs that a model may change in place: each tensor in them is one of its own."""
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    return tree_map(_copy_leaf, inputs)


def _copy_leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, nn.Module) or callable(value):
        return value
    try:
        return copy.deepcopy(value)  # another kind of container
    except Exception:  # whatever an object of the caller's raises that cannot be copied
        return value


def run_model(model: nn.Module, inputs: Inputs) -> Any:
    """Return a model's output for a copy of a tensor or of arguments by name, which it may change in place.

    Raises: UserError for other inputs, DoesNotRun.
    """
    check_inputs(inputs)
    return call_model(model, copy_inputs(inputs))


def call_model(model: nn.Module, inputs: Inputs) -> Any:
    """Return a model's output for a tensor or arguments by name, without a copy. Raises: as `run_model`."""
    check_inputs(inputs)
    try:
        return model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        reason = first_line(error)[:200].rstrip(".")
        if "required positional argument" in reason:
            reason += "; give several inputs by name, as a dict"
        raise DoesNotRun(f"the model does not run on {_describe(inputs)}: {reason}") from error


def _describe(inputs: Inputs) -> str:
    if not isinstance(inputs, Tensor):
        return f"these inputs ({describe_shape(inputs)})"
    described = (
        f"an input of shape {describe_shape(inputs)} in {str(inputs.dtype).removeprefix('torch.')}"
    )
    if inputs.ndim == 4 and inputs.is_floating_point():
        return described
    return f"{described}, not a batch of normalised images (B, C, H, W)"


def describe_shape(inputs: Inputs) -> str:
    """Return the sizes of a batch: 2x3x32x32, or with names: input_ids 2x16, attention_mask 2x16."""
    if isinstance(inputs, Tensor):
        return "x".join(map(str, inputs.shape))
    return ", ".join(f"{path[1:]} {describe_shape(x)}" for path, x in tensors_at(inputs).items())


def check_inputs(inputs: object, kinds: UnionType | type = Tensor | Mapping) -> None:
    """Raise UserError for anything but one batch: a tensor, or where it is allowed a dictionary of arguments."""
    if not isinstance(inputs, kinds):
        raise UserError(
            f"give a batch as the model reads it, like a tensor of images (B, C, H, W), not a {type(inputs).__name__}; "
            f"{_OF_A_LOADER}"
        )


def batches_of(given: Any, of_loader: bool = False) -> Iterator[Inputs]:
    """Yield the batches in an argument: the one that it is, or those of a list or another iterable.

    `of_loader`: each may be a pair of a loader, (inputs, labels), of which the inputs are yielded.

    Raises: UserError for anything else, for no batch, and for batches of different kinds, as one pair would be.
    """
    if isinstance(given, Tensor | Mapping):
        yield given
        return
    if not isinstance(given, Iterable):
        check_inputs(given)
    first: Any = None
    for batch in given:
        if of_loader and isinstance(batch, tuple | list) and batch:
            batch = batch[0]
        check_inputs(batch)
        if first is None:
            first = batch
        if _kind_of(batch) != _kind_of(first):
            raise UserError(
                f"several batches are of one kind, and these are {_describe_kind(first)} and {_describe_kind(batch)}; "
                f"{_OF_A_LOADER}"
            )
        yield batch
    if first is None:
        raise UserError(
            "there is no batch; give at least one, like a tensor of images (B, C, H, W)"
        )


def _kind_of(batch: Inputs) -> tuple[int, bool] | None:
    return (batch.ndim, batch.is_floating_point()) if isinstance(batch, Tensor) else None


def _describe_kind(batch: Inputs) -> str:
    if isinstance(batch, Tensor):
        return f"{describe_shape(batch) or 'a number'} in {str(batch.dtype).removeprefix('torch.')}"
    return f"a {type(batch).__name__}"


# What to give where a loader's pair (images, labels) is not taken.
_OF_A_LOADER = "of a loader, give the images of one batch: next(iter(loader))[0]"


def check_not_empty(inputs: Inputs) -> None:
    """Raise UserError for a batch whose tensors have no values, and for what `check_inputs` rejects."""
    check_inputs(inputs)
    values = [inputs] if isinstance(inputs, Tensor) else list(inputs.values())
    sizes = [value.numel() for value in values if isinstance(value, Tensor)]
    if sizes and not any(sizes):
        raise UserError(
            f"the batch is empty ({describe_shape(inputs)}); give at least one image or other input"
        )


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a floating-point or complex tensor in the given precision, another as it is."""
    if x.is_complex():
        return x.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    if x.is_floating_point():
        return x.to(dtype)
    return x


def map_tensors(batch: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Return a batch with its tensors changed."""
    check_inputs(batch)
    if not isinstance(batch, Tensor):
        batch = dict(batch)
    return tree_map_only(Tensor, change, batch)


def map_floats(batch: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Return a batch with its floating-point and complex tensors changed; integers, such as token ids, stay."""
    return map_tensors(batch, lambda x: change(x) if x.is_floating_point() or x.is_complex() else x)


def to_model(batch: Inputs, model: nn.Module) -> Any:
    """Return a batch on the device of the model, its floating-point and complex tensors in the model's precision."""
    like = first_float(model)
    return map_tensors(batch, lambda x: cast(x, like.dtype).to(like.device))


def cast_floats(batch: Inputs, dtype: torch.dtype) -> Inputs:
    """Return a batch with its floating-point and complex tensors in the given precision."""
    return map_floats(batch, partial(cast, dtype=dtype))


def other_inputs(batch: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Yield a batch again, and with other values and sizes."""
    yield "a second call", batch
    yield "negative inputs", map_floats(batch, torch.neg)
    yield "another batch size", _with_other_count(batch)
    if isinstance(batch, Tensor) and batch.ndim == 4 and batch.is_floating_point():
        H, W = batch.shape[-2:]
        step = math.gcd(H, W, 32)
        yield "another size", F.interpolate(batch, (H + step, W + 2 * step))


def _with_other_count(batch: Inputs) -> Inputs:
    """Return the first example of a batch, or one example twice; of several inputs those with as many rows."""
    if isinstance(batch, Tensor):
        return _other_rows(batch) if batch.ndim else batch
    tensors = [x for x in batch.values() if isinstance(x, Tensor) and x.ndim]
    count = len(tensors[0]) if tensors else 0
    other = {}
    for name, x in batch.items():
        is_batch = isinstance(x, Tensor) and x.ndim and len(x) == count
        other[name] = _other_rows(x) if is_batch else x
    return other


def _other_rows(x: Tensor) -> Tensor:
    return x[:1] if len(x) > 1 else torch.cat([x, x])


def max_or_inf(values: Iterable[float]) -> float:
    """Return the largest value, infinity if one is NaN, 0 without any."""
    return max((math.inf if math.isnan(value) else value for value in values), default=0.0)


def relative(difference: float, scale: float) -> float:
    """Return a difference as a share of the largest value."""
    return difference / scale if difference and scale else difference


def parts_of(value: Any) -> dict[str, Any] | None:
    """Return what a value consists of, by name: of a dict, list, data class or other object; None for a single one."""
    if isinstance(value, Tensor):
        return _numbered(value.unbind()) if value.is_nested else None
    if isinstance(value, Mapping):
        return {str(name): part for name, part in value.items()}
    if isinstance(value, list | tuple):
        return _numbered(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    if isinstance(value, nn.Module | type | np.ndarray | np.generic | Enum) or callable(value):
        return None
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        for name in _slots(kind):
            if hasattr(value, name):
                found[name] = getattr(value, name)
    found.update(getattr(value, "__dict__", {}))
    return found or None


def _numbered(parts: Sequence[Any]) -> dict[str, Any]:
    return {str(number): part for number, part in enumerate(parts)}


def _slots(kind: type) -> list[str]:
    if kind.__module__ in ("builtins", "torch"):
        return []
    names = vars(kind).get("__slots__", ())
    own = [names] if isinstance(names, str) else names
    return [name for name in own if not name.startswith("__")]


def leaves(output: Any, path: str = "", around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield what an output consists of, by name: a tensor, or the items of dicts, lists, data classes and objects."""
    parts = parts_of(output)
    if parts is None:
        yield path, output
        return
    if id(output) in around:  # an object that holds itself
        return
    for name, part in parts.items():
        yield from leaves(part, f"{path}.{name}", (*around, id(output)))


def tensors_at(output: Any) -> dict[str, Tensor]:
    """Return the tensors that an output consists of, by name."""
    return {path: leaf for path, leaf in leaves(output) if isinstance(leaf, Tensor)}


def full_precision(x: Tensor) -> Tensor:
    """Return a tensor in float64 or complex128, dense."""
    if x.layout != torch.strided:
        x = x.to_dense()
    if x.is_quantized:
        x = x.dequantize()
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def largest_difference(output: Any, other: Any) -> tuple[float, float]:
    """Return the largest difference of two outputs, and the largest finite value of the first.

    They are those of the tensor that differs most, relative to its values. Identical infinities are equal, NaN never.

    Raises: UserError if the outputs have different shapes, or no tensors.
    """
    tensors = tensors_at(output)
    others = tensors_at(other)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    other_shapes = {name: tuple(tensor.shape) for name, tensor in others.items()}
    if shapes != other_shapes:
        shown: Any = (shapes, other_shapes)
        if set(shapes) == set(other_shapes) == {""}:
            shown = (shapes[""], other_shapes[""])
        raise UserError(
            f"the outputs of the models have different shapes: {shown[0]} and {shown[1]}"
        )
    if not tensors:
        raise UserError(f"the output of the model has no tensors: {type(output).__name__}")
    found = [(0.0, 0.0)]
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        y = full_precision(tensor)
        z = full_precision(others[name])
        difference = (y - z).abs().masked_fill(y == z, 0).max().item()
        largest = y.abs().nan_to_num(0, 0, 0).max().item()
        found.append((max_or_inf([difference]), largest))
    return max(found, key=lambda pair: (relative(*pair), pair[1]))


def relative_difference(output: Any, other: Any) -> float:
    """Return the largest difference of two outputs as a share of the largest value. Raises: as `largest_difference`."""
    return relative(*largest_difference(output, other))


def noise_of(output: Any, other: Any) -> float:
    """Return the difference of two outputs of one model, 0 where it is not finite or they have different shapes."""
    try:
        difference = largest_difference(output, other)[0]
    except UserError:
        return 0.0
    return difference if math.isfinite(difference) else 0.0
