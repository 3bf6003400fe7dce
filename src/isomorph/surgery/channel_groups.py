"""Find the layers between which channels can be rescaled without changing the function.

A group is a producer (a norm, convolution or linear layer that gives each channel its own weight) and all layers that
read its output, with nothing in between but operations that commute with a positive factor per channel: ReLU, pooling,
permutations. Dividing a channel of the producer by s and multiplying the readers' weights for it by s changes nothing.
Groups are read from the graph that `torch.export` traces, whatever modules and functions the model consists of.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from isomorph.errors import UserError
from isomorph.surgery.tied_parameters import tied_parameters

_ATEN = torch.ops.aten
_PRODUCERS: dict[Any, tuple[int, int]] = {
    _ATEN.conv2d.default: (1, 1),
    _ATEN.batch_norm.default: (1, 1),
    _ATEN.linear.default: (1, -1),
    _ATEN.layer_norm.default: (2, -1),
    _ATEN.rms_norm.default: (2, -1),
}
"""Operations with a weight per output channel: the position of the weight, and the channel axis of the output."""
_CONSUMERS = {_ATEN.conv2d.default: 1, _ATEN.linear.default: -1}
"""Operations with weights per input channel, and the channel axis of their input."""
_SAME_AXIS = {
    *(_ATEN.relu.default, _ATEN.relu_.default, _ATEN.leaky_relu.default, _ATEN.leaky_relu_.default),
    *(_ATEN.dropout.default, _ATEN.dropout_.default, _ATEN.feature_dropout.default),
    *(_ATEN.clone.default, _ATEN.contiguous.default, _ATEN.alias.default, _ATEN.detach.default, _ATEN.expand.default),
}
"""Operations on single elements that commute with a positive factor."""
_POOLS = {_ATEN.max_pool2d.default, _ATEN.avg_pool2d.default, _ATEN.adaptive_avg_pool2d.default}
_RESHAPES = {
    *(_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default, _ATEN.flatten.using_ints),
    *(_ATEN.unflatten.int, _ATEN.squeeze.dim, _ATEN.squeeze.dims, _ATEN.unsqueeze.default),
}


@dataclass(frozen=True)
class ChannelGroup:
    """A layer whose channels can be rescaled, and the layers that take the inverse factors, by module name."""

    producer: str
    consumers: tuple[str, ...]


def channel_groups(model: nn.Module, images: Tensor) -> tuple[ChannelGroup, ...]:
    """Return the groups of a model in eval mode, in the order of its forward pass.

    Raises: UserError if torch.export cannot trace the model.
    """
    program = _export(model, images)
    parameters = program.graph_signature.inputs_to_parameters
    tied = {name for names in tied_parameters(model) for name in names}
    owners = {
        node: parameters[node.name].rpartition(".")[0]
        for node in program.graph.nodes
        if node.name in parameters and len(node.users) == 1 and parameters[node.name] not in tied
    }
    found = (_group(node, owners) for node in program.graph.nodes if node.target in _PRODUCERS)
    return tuple(group for group in found if group)


def _export(model: nn.Module, images: Tensor) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(model, (images,))
    except Exception as error:  # torch.export raises errors of many kinds for models that it cannot trace
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the model cannot be equalised, because torch.export cannot trace it: {reason}") from error


def _group(node: Node, owners: Mapping[Node, str]) -> ChannelGroup | None:
    """Return the group of a producer, or None if something else reads its output."""
    weight, axis = _PRODUCERS[node.target]
    given = [arg for arg in node.args[weight : weight + 2] if arg is not None]
    parameters = [arg for arg in given if isinstance(arg, Node) and arg in owners]
    if not given or parameters != given or not _is_per_channel(node, axis):
        return None
    consumers: list[str] = []
    for reader, reader_axis in _readers(node, axis % _value(node).ndim):
        name = _consumer_name(reader, reader_axis, owners)
        if name is None:
            return None
        consumers.append(name)
    return ChannelGroup(owners[parameters[0]], tuple(dict.fromkeys(consumers))) if consumers else None


def _is_per_channel(node: Node, axis: int) -> bool:
    """True if the first axis of a producer's weight is the channel axis of its output."""
    weight = node.args[_PRODUCERS[node.target][0]]
    return isinstance(weight, Node) and _value(weight).shape[0] == _value(node).shape[axis]


def _consumer_name(edge: tuple[Node, Node], axis: int, owners: Mapping[Node, str]) -> str | None:
    """Return the module that reads channels with its own weight, or None if this is another operation."""
    source, reader = edge
    if reader.target not in _CONSUMERS or reader.args[0] is not source:
        return None
    weight = reader.args[1]
    if weight not in owners or _CONSUMERS[reader.target] % _value(source).ndim != axis:
        return None
    return owners[weight]  # type: ignore[index]


def _readers(node: Node, axis: int) -> Iterator[tuple[tuple[Node, Node], int]]:
    """Yield every use of a value that is not transparent for factors per channel, with the value's channel axis."""
    for user in node.users:
        if user.target is _ATEN._assert_tensor_metadata.default:
            continue
        follow = _axis_after(node, user, axis)
        if follow is None:
            yield (node, user), axis
        else:
            yield from _readers(user, follow)


def _axis_after(node: Node, user: Node, axis: int) -> int | None:
    """Return the channel axis of an operation's output if it commutes with factors per channel, else None."""
    target, ndim = user.target, _value(node).ndim
    if target in _SAME_AXIS or (target is _ATEN.to.dtype and _value(user).dtype == _value(node).dtype):
        return axis if _value(user).ndim == ndim else None
    if target in _POOLS:
        return axis if axis == 1 and ndim == 4 else None
    if target in _RESHAPES:
        return _reshaped_axis(_value(node), _value(user), axis)
    rule = _MOVES.get(target)
    return rule(user.args, axis, ndim) if rule else None


def _reshaped_axis(before: Tensor, after: Tensor, axis: int) -> int | None:
    """Return where an axis is after a reshape: where as many elements come before it and it has the same length."""
    leading = math.prod(before.shape[:axis])
    matches = (
        new
        for new, length in enumerate(after.shape)
        if length == before.shape[axis] and math.prod(after.shape[:new]) == leading
    )
    return next(matches, None)


def _after_permute(args: Any, axis: int, ndim: int) -> int | None:
    return [dim % ndim for dim in args[1]].index(axis)


def _after_transpose(args: Any, axis: int, ndim: int) -> int | None:
    first, second = args[1] % ndim, args[2] % ndim
    return {first: second, second: first}.get(axis, axis)


def _after_select(args: Any, axis: int, ndim: int) -> int | None:
    dim = args[1] % ndim
    return None if dim == axis else axis - (dim < axis)


def _after_slice(args: Any, axis: int, ndim: int) -> int | None:
    return None if (args[1] if len(args) > 1 else 0) % ndim == axis else axis


def _after_mean(args: Any, axis: int, ndim: int) -> int | None:
    """Return the axis after a mean over others; the mean over all elements has none."""
    dims = [dim % ndim for dim in (args[1] or range(ndim))]
    keeps = len(args) > 2 and args[2]
    return None if axis in dims else axis if keeps else axis - sum(dim < axis for dim in dims)


_MOVES: dict[Any, Callable[[Any, int, int], int | None]] = {
    _ATEN.permute.default: _after_permute,
    _ATEN.transpose.int: _after_transpose,
    _ATEN.select.int: _after_select,
    _ATEN.slice.Tensor: _after_slice,
    _ATEN.mean.dim: _after_mean,
}
"""Operations that move the channel axis, as functions (arguments, axis, number of axes) -> axis."""


def _value(node: Node) -> Tensor:
    """Return the traced value of a node, which has its shape and dtype."""
    return node.meta["val"]
