"""Every call of a torch function in one run of a model, with its values as they were at that time.

Attention that is one operation is run as the operations that it stands for, so that models which differ in this alone
are watched alike.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from isomorph.operations import FusedCall, leaves, tensors_in
from isomorph.operations.flow import LIKE_SECOND, SHAPES_ALONE, name_of
from isomorph.operations.observe import Running, observing
from isomorph.surgery.calls import Inputs, run_model
from isomorph.surgery.comparison import as_number

# Operations whose outputs have none of the numbers of their input.
_FRESH = SHAPES_ALONE | {"new_tensor"}


@dataclass(frozen=True)
class Ref:
    """A tensor among the arguments of a call: the slot of its value."""

    slot: int


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a torch function: the module that runs it, and the slots of the values that it reads and makes.

    `writes`: it may write into the first value that it reads.
    """

    index: int
    name: str
    function: Callable[..., Any] | None  # None of what ran outside of Python
    module: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    writes: bool = False

    @property
    def operation(self) -> str:
        """Name without the underscores of methods and of operations in place."""
        return self.name.strip("_")

    def run(self, value_of: Callable[[int], Tensor]) -> Any:
        """Run the function again, on other values, which it does not change."""
        assert self.function is not None

        def argument_of(ref: Ref) -> Tensor:
            value = value_of(ref.slot)
            if self.writes and ref.slot == self.inputs[0]:
                return value.clone()
            return value

        return self.function(
            *map_nested(Ref, argument_of, self.args), **map_nested(Ref, argument_of, self.kwargs)
        )


def map_nested(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """Return arguments with those of a kind changed, also in containers."""
    if isinstance(value, kind):
        return change(value)
    if type(value) is tuple or type(value) is list:
        return type(value)([map_nested(kind, change, item) for item in value])
    if type(value) is dict:
        return {name: map_nested(kind, change, item) for name, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | Ref | Tensor):
        return value
    return tree_map_only(kind, change, value)  # torch knows further containers


class _MemoryLayout(NamedTuple):
    """Where the elements of a tensor are in its memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(tensor.size(), tensor.stride(), int(tensor.storage_offset()))


class _Write(NamedTuple):
    """What was written to a memory: the version after it, the slot of the value, and where it is."""

    version: int
    slot: int
    layout: _MemoryLayout


def _written_through(
    before: Tensor, written: Tensor, own: _MemoryLayout, other: _MemoryLayout, length: int
) -> Tensor:
    """Return a tensor after another view of its memory, of `length` elements, was written to."""
    indices = torch.arange(length)
    own_indices = indices.as_strided(*own)
    memory = before.new_zeros(length)
    memory[own_indices] = before
    memory[indices.as_strided(*other)] = written
    return memory[own_indices]


def _set_item(tensor: Tensor, index: Any, value: Any) -> Tensor:
    """Return a copy of a tensor in which an item is set."""
    new = tensor.clone()
    new[index] = value
    return new


def memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


class Watch(TorchFunctionMode):
    """Context that records calls and values.

    A value has a slot, its place among all values: those of the model's tensors first, then in the order of making.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.values: list[Tensor] = []
        # The call that makes a value, and the calls that read it, by its slot.
        self.call_of: dict[int, Call] = {}
        self.readers: dict[int, list[Call]] = defaultdict(list)
        self.running = Running()
        # The names of every parameter and buffer, by the slot of its value.
        self.names: dict[int, list[str]] = defaultdict(list)
        self.inputs: list[int] = []
        # The tensors of the result by path, and the paths of numbers that are not tensors.
        self.outputs: dict[str, int] = {}
        self.numbers_out: list[str] = []
        self._slots: dict[int, tuple[int, int]] = {}
        # Values by the memory in which they are, and what was written to it.
        self._sharing: dict[int, list[int]] = defaultdict(list)
        self._writes: dict[int, list[_Write]] = defaultdict(list)
        self._alive: list[Tensor] = []  # the identity of a tensor is its own only while it lives
        # Which of these are buffers.
        self.buffers: set[int] = set()
        for name, tensor in entries_of(model).items():
            slot = self.slot_of(tensor)
            self.names[slot].append(name)
            if not isinstance(tensor, nn.Parameter):
                self.buffers.add(slot)

    def slot_of(self, tensor: Tensor) -> int:
        """Return the slot of a value: of a tensor at its version."""
        entry = self._slots.get(id(tensor))
        if entry is None:
            return self._add(tensor)
        slot, version = entry
        if version == tensor._version:
            return slot
        writes = [x for x in self._writes[memory_of(tensor)] if x.version > version]
        for write in writes:
            slot = self._write(tensor, slot, write)
        return slot if writes else self._add(tensor)

    def _write(self, tensor: Tensor, slot: int, write: _Write) -> int:
        """Record that elements of a tensor were written to through another view of their memory."""
        own = _MemoryLayout.of(tensor)
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
        function = partial(_written_through, own=own, other=write.layout, length=length)
        new = self._add(tensor)
        before = self.values[slot]
        self.values[new] = function(before, self.values[write.slot])
        args = Ref(slot), Ref(write.slot)
        slots = slot, write.slot
        module = self.running.innermost
        self._record(Call(len(self.calls), "write", function, module, args, {}, slots, (new,)))
        return new

    def _add(self, tensor: Tensor) -> int:
        slot = len(self.values)
        self._sharing[memory_of(tensor)].append(slot)
        self.values.append(tensor.detach())
        self._alive.append(tensor)
        self._slots[id(tensor)] = (slot, tensor._version)
        return slot

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        explicit = EXPLICIT.get(func)
        if explicit:
            with self:
                out = explicit(*args, **keywords)
            if out is not None:
                return out
        name = name_of(func)
        tensors_read = tensors_in(args[:1] if name in LIKE_SECOND else (args, keywords))
        inputs = tuple(map(self.slot_of, tensors_read))
        references = map_nested(
            Tensor, lambda x: Ref(self.slot_of(x)), {"args": tuple(args), "kwargs": keywords}
        )
        writes = bool(tensors_read) and _writes(name, args, keywords)
        if writes:
            self._keep(tensors_read[0])
        out = func(*args, **keywords)
        tensors_made = [args[0]] if name == "__setitem__" else tensors_in(out)
        is_new = bool(tensors_made) and name not in _FRESH
        if is_new and not all(
            any(x is y for y in tensors_read) and self._is_known(x) for x in tensors_made
        ):
            outputs = tuple(map(self._add, tensors_made))
            sets_item = name == "__setitem__"
            call = Call(
                index=len(self.calls),
                name=name,
                function=_set_item if sets_item else func,
                module=self.running.innermost,
                **references,
                inputs=inputs,
                outputs=outputs,
                writes=writes and not sets_item,
            )
            self._record(call)
            if writes and tensors_made[0] is tensors_read[0]:
                self._note_write(tensors_made[0], outputs[0])
        return out

    def _record(self, call: Call) -> None:
        self.calls.append(call)
        for slot in dict.fromkeys(call.inputs):
            self.readers[slot].append(call)
        self.call_of |= dict.fromkeys(call.outputs, call)

    def _keep(self, tensor: Tensor) -> None:
        """Keep the numbers of all values in the memory of a tensor that is written to."""
        storage = memory_of(tensor)
        for slot in self._sharing.pop(storage, []):
            if memory_of(self.values[slot]) == storage:
                self.values[slot] = self.values[slot].clone()

    def _note_write(self, tensor: Tensor, slot: int) -> None:
        write = _Write(tensor._version, slot, _MemoryLayout.of(tensor))
        self._writes[memory_of(tensor)].append(write)

    def _is_known(self, tensor: Tensor) -> bool:
        entry = self._slots.get(id(tensor))
        return entry is not None and entry[1] == tensor._version


def _writes(name: str, args: Any, kwargs: Any) -> bool:
    """True for an operation that may write into its first tensor."""
    if name == "__setitem__" or (name.startswith("__i") and name != "__invert__"):
        return True
    if name.endswith("_") and not name.endswith("__"):
        return True
    return bool(kwargs.get("inplace")) or any(argument is True for argument in args[1:])


def _attend(*args: Any, **kwargs: Any) -> Tensor:
    """Compute fused attention as a softmax between two products."""
    call = FusedCall(*args, **kwargs)
    key, value = call.repeated
    scores = call.scaled_query @ key.mT  # (..., Nq, Nk)
    mask = call.mask
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ value


def _add_product(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    """Compute `addcmul` as a product and a sum."""
    product = tensor1 * tensor2
    return input + (product if value == 1 else value * product)


def _multi_head(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None] | None:
    """Compute torch's multi-head attention as projections and fused attention; None with further arguments.

    Shape: query (Nq, B, C), key and value (Nk, B, C) -> (Nq, B, C)
    """
    bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    unusual = ("bias_k", "bias_v", "attn_mask", "key_padding_mask", "static_k", "static_v")
    if any(arguments[name] is not None for name in unusual) or arguments["add_zero_attn"]:
        return None
    if arguments["query"].ndim != 3:
        return None
    if arguments["use_separate_proj_weight"]:
        weights = [arguments[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = arguments["in_proj_weight"].chunk(3)
    biases = [None] * 3 if arguments["in_proj_bias"] is None else arguments["in_proj_bias"].chunk(3)
    tokens = (arguments["query"], arguments["key"], arguments["value"])
    heads = []
    for x, weight, bias in zip(tokens, weights, biases, strict=True):
        y = F.linear(x, weight, bias)  # (N, B, C)
        y = y.unflatten(-1, (arguments["num_heads"], -1))  # (N, B, nh, hd)
        heads.append(y.permute(1, 2, 0, 3))  # (B, nh, N, hd)
    maps: Tensor | None = None
    if arguments["need_weights"]:
        q, k, v = heads
        scaled = q * q.shape[-1] ** -0.5
        maps = (scaled @ k.mT).softmax(-1)  # (B, nh, Nq, Nk)
        out = maps @ v
        if arguments["average_attn_weights"]:
            maps = maps.mean(1)
    else:
        out = F.scaled_dot_product_attention(*heads)
    out = out.permute(2, 0, 1, 3).flatten(2)  # (Nq, B, C)
    return F.linear(out, arguments["out_proj_weight"], arguments["out_proj_bias"]), maps


# Functions that are run as the operations that they stand for, where these are known for their arguments.
EXPLICIT: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attend,
    F.multi_head_attention_forward: _multi_head,
    torch.addcmul: _add_product,
    Tensor.addcmul: _add_product,
}


def entries_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that a file of it has, by name, also by the second name of a tied one."""
    state = model.state_dict(keep_vars=True)
    tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
    return {name: x for name, x in tensors.items() if x.is_floating_point()}


def watch(model: nn.Module, inputs: Inputs) -> Watch:
    """Return what happens in a call of a model, in the mode that it is in."""
    record = Watch(model)
    record.inputs = [record.slot_of(x) for x in tensors_in(inputs)]
    exact = torch.autocast("cpu", enabled=False)
    with observing(model) as record.running, torch.no_grad(), exact, record:
        result = run_model(model, inputs)
    for path, x in leaves(result):
        if isinstance(x, Tensor):
            record.outputs[path.lstrip(".")] = record.slot_of(x)
        elif as_number(x) is not None:
            record.numbers_out.append(path.lstrip(".") or "the output")
    return record


Run = Callable[[Call, Callable[[int], Tensor]], Any]


@torch.no_grad()
@torch.autocast("cpu", enabled=False)
def replay(record: Watch, values_given: Mapping[int, Tensor], run: Run = Call.run) -> list[Tensor]:
    """Return all values again where some have other numbers: only the calls that follow from these are run.

    `run`: what is done instead of a call; it gets the call and a function that returns the values it reads.
    """
    values = list(record.values)
    changed = set(values_given)
    for slot, value in values_given.items():
        values[slot] = value
    for call in record.calls:
        if changed.isdisjoint(call.inputs):
            continue
        outputs = tensors_in(run(call, values.__getitem__))
        for slot, value in zip(call.outputs, outputs, strict=True):
            if slot not in values_given:
                values[slot] = value
                changed.add(slot)
    return values
