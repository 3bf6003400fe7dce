"""Which channel each element of a value has, after operations that move, average or select elements.

Each channel has a number of its own, its code. A recorded operation runs again on a tensor of codes and on one of
ones: where the codes divided by the ones are codes again, no element mixes two channels; where the ones stay 1, a
shift of a channel passes through the operation as a scale does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from isomorph.layers.modes import noise
from isomorph.operations import Flow, FusedCall, Operation, TensorVersion, tensors_in
from isomorph.surgery.layer_calls import is_unchanged

# Operations each of whose outputs consists of elements of the input, and of zeros.
_MOVES = {
    "flatten",
    "reshape",
    "view",
    "reshape_as",
    "view_as",
    "unflatten",
    "unsqueeze",
    "squeeze",
    "permute",
    "transpose",
    "swapaxes",
    "swapdims",
    "movedim",
    "moveaxis",
    "t",
    "T",
    "mT",
    "adjoint",
    "roll",
    "flip",
    "fliplr",
    "flipud",
    "rot90",
    "narrow",
    "select",
    "__getitem__",
    "index_select",
    "gather",
    "take_along_dim",
    "split",
    "split_with_sizes",
    "tensor_split",
    "chunk",
    "unbind",
    "unfold",
    "pad",
    "expand",
    "expand_as",
    "repeat",
    "repeat_interleave",
    "tile",
    "pixel_shuffle",
    "pixel_unshuffle",
    "channel_shuffle",
    "native_channel_shuffle",
}
# Operations that give weighted means of elements, with weights that do not depend on the elements.
_MEANS = {"mean", "interpolate", "upsample"}
_MEANS |= {f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)}
# Operations that give the largest of some elements; padding is -inf.
_LARGEST = {"amax"} | {f"{kind}max_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)}
# Operations that multiply values by the weights of attention.
_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "einsum"}
_FUSED_ATTENTION = "scaled_dot_product_attention"
# The same operations for tensors with other strides than those recorded.
_FOR_ANY_STRIDES = {"view": Tensor.reshape, "view_as": Tensor.reshape_as}

# How far codes and ones may be from their values by rounding.
_ROUNDING = 1e-9

Kind = Literal["move", "mean", "largest", "attention"]

_KIND_OF: dict[str, Kind] = {
    **dict.fromkeys(_MOVES, "move"),
    **dict.fromkeys(_MEANS, "mean"),
    **dict.fromkeys(_LARGEST, "largest"),
}


class ChannelStep(NamedTuple):
    """An operation on a value, and which of its outputs is followed; `others` read other parts of the value."""

    operation: Operation
    value: TensorVersion
    kind: Kind
    output: int = 0
    others: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class Channels:
    """The channel of each element of a value, -1 for zeros; labels has the shape of the value.

    `keeps_shifts`: no zeros are among them, and the weights of means sum to 1. `keeps_order`: each is the largest of
    some elements, which a scale below 0 would change.
    """

    labels: Tensor
    count: int
    keeps_shifts: bool
    keeps_order: bool

    def vector(self, elements: Tensor, default: float) -> Tensor | None:
        """Return the number of each channel, or None if elements of one channel have several. Shape: -> (count,)"""
        has_channel = self.labels >= 0
        labels = self.labels[has_channel]
        numbers = elements.expand(self.labels.shape)[has_channel]
        vector = numbers.new_full((self.count,), default)
        vector[labels] = numbers
        return vector if torch.equal(vector[labels], numbers) else None

    def along(self, axis: int) -> Tensor | None:
        """Return the channel at each position of an axis, -1 for zeros; None if there are several at one."""
        rows = self.labels.movedim(axis, 0).flatten(1)
        channels = rows.amax(1)
        is_same = (rows == channels[:, None]) | (rows < 0)
        return channels if is_same.all() else None


def kind_of_step(flow: Flow, operation: Operation, value: TensorVersion) -> Kind | None:
    """Return how an operation moves the elements of a value, or None if it does something else."""
    others = {other for other in operation.inputs if other != value}
    if operation.inputs.count(value) != 1:
        return None
    if operation.name in _PRODUCTS and len(others) == 1:
        return "attention" if _are_attention_weights(flow, *others) else None
    if operation.name == _FUSED_ATTENTION:
        return "attention" if _is_plain_attention(flow, operation, value) else None
    if not others <= flow.constant:
        return None
    if any(tensor.dtype == torch.bool for tensor in tensors_in(operation.args[1:])):
        return None  # an index by a mask: its numbers decide the shape of the output
    return _KIND_OF.get(operation.name)


def _is_plain_attention(flow: Flow, operation: Operation, value: TensorVersion) -> bool:
    """True for fused attention without dropout or a mask that depends on inputs, of which `value` are the values."""
    call = FusedCall(*operation.args, **operation.kwargs)
    is_value = id(call.value) == value[0]
    mask = call.attn_mask
    constant_mask = mask is None or any(id(mask) == name for name, _ in flow.constant)
    return is_value and constant_mask and not call.dropout_p


def _are_attention_weights(flow: Flow, value: TensorVersion) -> bool:
    """True for what a softmax gives, also moved."""
    operation = flow.operation_of.get(value)
    if operation is None or operation.name == "softmax":
        return operation is not None
    if len(operation.inputs) != 1 or not (is_unchanged(operation) or operation.name in _MOVES):
        return False
    return _are_attention_weights(flow, operation.inputs[0])


def _other_attention_weights(flow: Flow, value: TensorVersion) -> Tensor:
    """Return attention weights made as a value is, from random scores.

    Scores may be equal, as those of a layer at its initialisation: then sums over every axis are 1, which is no law.
    """
    operation = flow.operation_of[value]
    source = operation.inputs[0]
    if operation.name == "softmax":
        return _run(operation, {source: _noise_like(flow.tensors[source])})[0]
    before = _other_attention_weights(flow, source)
    return _run(operation, {source: before})[operation.outputs.index(value)]


def _noise_like(tensor: Tensor) -> Tensor:
    return noise(*tensor.shape).to(tensor.device)


def _run(operation: Operation, tensors: dict[TensorVersion, Tensor]) -> list[Tensor]:
    """Return the outputs of an operation for other tensors in the place of its inputs."""
    by_identity = {value[0]: tensor for value, tensor in tensors.items()}

    def replace(argument: Any) -> Any:
        return by_identity.get(id(argument), argument) if isinstance(argument, Tensor) else argument

    args, kwargs = tree_map(replace, (operation.args, operation.kwargs))
    function = _FOR_ANY_STRIDES.get(operation.name, operation.function)
    return tensors_in(function(*args, **kwargs))


def _run_step(flow: Flow, step: ChannelStep, tensor: Tensor) -> Tensor:
    """Return what a step makes of a tensor; attention has random weights."""
    tensors = {step.value: tensor}
    if step.operation.name == _FUSED_ATTENTION:
        mask = FusedCall(*step.operation.args, **step.operation.kwargs).attn_mask
        for other in step.operation.inputs:
            if other != step.value and other[0] != id(mask):
                tensors[other] = _noise_like(flow.tensors[other])
    elif step.kind == "attention":
        (weights,) = set(step.operation.inputs) - {step.value}
        tensors[weights] = _other_attention_weights(flow, weights)
    return _run(step.operation, tensors)[step.output]


def _after_step(flow: Flow, step: ChannelStep, tensor: Tensor) -> Tensor | None:
    """Return what a step makes of a tensor, or None if it is not linear or orders elements of several channels."""
    try:
        after = _run_step(flow, step, tensor)
        # padded with another number than 0
        if _run_step(flow, step, torch.zeros_like(tensor)).any():
            return None
        if step.kind == "largest" and not torch.equal(after, -_run_step(flow, step, -tensor)):
            return None
    # of an operation for another dtype or layout
    except (IndexError, RuntimeError, TypeError, ValueError):
        return None
    return after


def follow_channels(
    flow: Flow, start: TensorVersion, axis: int, steps: Sequence[ChannelStep]
) -> Channels | None:
    """Return the channels of a value after steps from a start with channels on an axis; None if they are mixed."""
    tensor = flow.tensors[start]
    count = tensor.shape[axis]
    table = _make_codes(count).to(tensor.device)
    sides = [1] * tensor.ndim
    sides[axis] = count
    codes = table.view(sides).expand(tensor.shape).contiguous()
    ones = torch.ones_like(codes)
    for step in steps:
        if _shares_channels(step, _decode(codes, ones, table)):
            return None
        after = _after_step(flow, step, codes)
        ones_after = _after_step(flow, step, ones)
        if after is None or ones_after is None:
            return None
        codes, ones = after, ones_after
    labels = _decode(codes, ones, table)
    if labels is None:
        return None
    keeps_shifts = bool(((ones - 1).abs() <= _ROUNDING).all())
    keeps_order = any(step.kind == "largest" for step in steps)
    return Channels(labels, count, keeps_shifts, keeps_order)


def _make_codes(count: int) -> Tensor:
    """Return increasing numbers between 1 and 2 of which no mean is another. Shape: -> (count,)"""
    generator = torch.Generator().manual_seed(count)
    offsets = 0.25 + 0.5 * torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")
    return 1 + (torch.arange(count, device="cpu") + offsets) / count


def _shares_channels(step: ChannelStep, labels: Tensor | None) -> bool:
    """True if other parts of the value that a step divides have channels of the part that it takes."""
    if len(step.operation.outputs) == 1 and not step.others:
        return False
    if labels is None:
        return True
    numbers = {step.value: labels.double()}
    parts = _run(step.operation, numbers)
    channels = parts.pop(step.output)
    for other in step.others:
        parts += _run(other, numbers)
    return any(torch.isin(part, channels).any() for part in parts)


def _decode(codes: Tensor, ones: Tensor, table: Tensor) -> Tensor | None:
    """Return the channel of each code, -1 where it is 0; None if one is not in the table."""
    is_not_zero = ones.abs() > _ROUNDING
    numbers = codes / torch.where(is_not_zero, ones, 1)
    nearest = ((numbers - 1) * len(table)).floor().long().clamp(0, len(table) - 1)
    right = (numbers - table[nearest]).abs() <= _ROUNDING
    empty = ~is_not_zero & (codes.abs() <= _ROUNDING)
    return torch.where(is_not_zero, nearest, -1) if (right | empty).all() else None
