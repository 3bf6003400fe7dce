"""Calls of a model: its inputs, one tensor or several by name, and the difference between outputs."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from isomorph.errors import DoesNotRun, UserError, first_line, is_out_of_memory
from isomorph.layers.modes import default_dtype, first_float
from isomorph.operations import leaves, tensors_in

# A batch of images or other tensor, or the keyword arguments of a model.
Inputs = Tensor | Mapping[str, Any]


def own_inputs(
    model: nn.Module, batch: int, size: tuple[int, ...] | None = None
) -> dict[str, Any] | None:
    """Return the inputs that a model itself makes (`example_inputs`), on the CPU; None if it has no such method."""
    make_inputs = getattr(model, "example_inputs", None)
    if make_inputs is None:
        return None
    with torch.device("cpu"):
        return dict(make_inputs(batch, size))


def copy_inputs(inputs: Any) -> Any:
    """Return inputs that a model may change in place: each tensor in them is one of its own."""
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    return tree_map(_copy_leaf, inputs)


def _copy_leaf(value: Any) -> Any:
    """Return a copy of a tensor or container among inputs; what cannot be copied is returned itself."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, nn.Module) or callable(value):
        return value
    try:
        return copy.deepcopy(value)  # another kind of container
    except Exception:  # whatever an object of the caller's raises that cannot be copied
        return value


class _Float64(TorchFunctionMode):
    """Mode in which code that names float32 means float64, and operations on both get float64 alone.

    So a model of float64 also runs where its code writes dtype=torch.float32 or x.float(), or keeps numbers outside of
    its buffers. What fills a float32 tensor, as add_ and x[...] = y do, keeps it.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(map(_float64_for_32, args))
        kwargs = {name: _float64_for_32(value) for name, value in (kwargs or {}).items()}
        given = (args, kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            floats = [
                x for x in tree_leaves(given) if isinstance(x, Tensor) and x.is_floating_point()
            ]
            if {x.dtype for x in floats} != {torch.float32, torch.float64}:
                raise
        fills = func.__name__.endswith("_")
        alike = partial(cast, dtype=floats[0].dtype if fills else torch.float64)
        args, named = tree_map_only(Tensor, alike, given)
        return func(*args, **named)


def _float64_for_32(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_own_precision(model: nn.Module) -> Iterator[None]:
    """Context for calls of a model: one in float64 makes float64 numbers, also where its code means float32."""
    if first_float(model).dtype != torch.float64:
        yield
        return
    with default_dtype(torch.float64), _Float64():
        yield


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
        with in_own_precision(model):
            return model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        reason = first_line(error)[:200].rstrip(".")
        if "required positional argument" in reason:
            reason += "; give several inputs by name, as a dict"
        raise DoesNotRun(f"the model does not run on {_describe(inputs)}: {reason}") from error


def _describe(inputs: Inputs) -> str:
    """Describe inputs in an error: shapes and dtype, and that they are not images if so."""
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
    sizes = []
    for path, leaf in leaves(inputs):
        if isinstance(leaf, Tensor):
            sizes.append(f"{path[1:]} {describe_shape(leaf)}")
    return ", ".join(sizes)


def check_inputs(inputs: object) -> None:
    """Raise UserError for anything but one batch: a tensor, or a dictionary of arguments."""
    if not isinstance(inputs, Tensor | Mapping):
        raise UserError(
            f"give a batch as the model reads it, like a tensor of images (B, C, H, W), not a {type(inputs).__name__}; "
            f"{_OF_A_LOADER}"
        )


def batches_of(batches: Any, of_loader: bool = False) -> Iterator[Inputs]:
    """Yield the batches in an argument: the one that it is, or those of a list or another iterable.

    `of_loader`: each may be a pair of a loader, (inputs, labels), of which the inputs are yielded.

    Raises: UserError for anything else, for no batch, and for batches of different kinds, as one pair would be.
    """
    if isinstance(batches, Tensor | Mapping):
        yield batches
        return
    if not isinstance(batches, Iterable):
        check_inputs(batches)
    first: Any = None
    for batch in batches:
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


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, such as float32."""
    return str(tensor.dtype).removeprefix("torch.")


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give the numbers of a model a precision in place, complex ones the matching one; return it."""
    return model._apply(partial(cast, dtype=dtype))


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


def first_of(batch: Inputs) -> Inputs:
    """Return a batch with the first example alone; numbers without an axis stay."""
    return map_tensors(batch, lambda x: x[:1] if x.ndim else x)


def map_floats(batch: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Return a batch with its floating-point and complex tensors changed; integers, such as token ids, stay."""
    return map_tensors(batch, lambda x: change(x) if x.is_floating_point() or x.is_complex() else x)


def to_model(batch: Inputs, model: nn.Module) -> Any:
    """Return a batch on the device of the model, its floating-point and complex tensors in the model's precision."""
    reference = first_float(model)
    return map_tensors(batch, lambda x: cast(x, reference.dtype).to(reference.device))


def cast_floats(batch: Inputs, dtype: torch.dtype) -> Inputs:
    """Return a batch with its floating-point and complex tensors in the given precision."""
    return map_tensors(batch, partial(cast, dtype=dtype))


def sides_of_images(batch: Inputs) -> tuple[int, int] | None:
    """Return the height and width of the images in a batch, None without any."""
    for x in tensors_in(batch):
        if x.ndim == 4 and (x.is_floating_point() or x.dtype == torch.uint8):
            return x.shape[2], x.shape[3]
    return None


def with_sides(batch: Inputs, height: int, width: int) -> Inputs:
    """Return a batch with images of another size; tensors with the same sides, such as masks, are resized too."""
    sides = sides_of_images(batch)

    def resized(x: Tensor) -> Tensor:
        if tuple(x.shape[-2:]) != sides:
            return x
        return at_length(at_length(x, -2, height), -1, width)

    return map_tensors(batch, resized)


def with_other_size(batch: Inputs) -> Inputs | None:
    """Return a batch with images of another size, None for one without images."""
    sides = sides_of_images(batch)
    if sides is None:
        return None
    H, W = sides
    step = math.gcd(H, W, 32)
    return with_sides(batch, H + step, W + 2 * step)


def with_other_lengths(batch: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Yield a batch with twice and with half the tokens (B, N), and with its other (B, N) tensors to match."""
    lengths = [
        x.shape[1]
        for x in tensors_in(batch)
        if x.dtype in (torch.int32, torch.int64) and x.ndim == 2
    ]
    if not lengths:
        return
    length = lengths[0]

    def of_length(new: int) -> Inputs:
        def changed(x: Tensor) -> Tensor:
            is_along = x.ndim == 2 and x.shape[1] == length
            return at_length(x, 1, new) if is_along else x

        return map_tensors(batch, changed)

    yield "twice the tokens", of_length(2 * length)
    if length > 1:
        yield "half the tokens", of_length(length // 2)


def at_length(x: Tensor, axis: int, length: int) -> Tensor:
    """Return a tensor with another length of an axis: a shorter one is cut, a longer one repeats numbers."""
    positions = torch.arange(length, device=x.device)
    if length > x.shape[axis]:
        positions = positions * x.shape[axis] // length
    return x.index_select(axis, positions)


def with_other_count(batch: Inputs) -> Inputs:
    """Return the first example of a batch, or one example twice; of several inputs those of as many rows as it."""
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


def relative(difference: float, scale: float) -> float:
    """Return a difference as a share of the largest value."""
    return difference / scale if difference and scale else difference
