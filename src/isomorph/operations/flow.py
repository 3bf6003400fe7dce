"""Which operations make and read a value in one call of a model, whatever its classes."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from isomorph.operations.observe import ModuleCall, Running, observing
from isomorph.operations.values import PLAIN, TensorVersion, tensors_in, value_of

# Operations that read of their second tensor its shape or dtype alone.
LIKE_SECOND = {"reshape_as", "view_as", "expand_as", "type_as"}
# Operations that read the shape of their tensor alone.
SHAPES_ALONE = {
    "zeros_like",
    "ones_like",
    "empty_like",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
    "full_like",
}


class Operation(NamedTuple):
    """A call of a torch function: its name, the module that runs it, its values, its arguments and the function."""

    name: str
    module: str
    inputs: tuple[TensorVersion, ...]
    outputs: tuple[TensorVersion, ...]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    function: Any = None


class Flow(TorchFunctionMode):
    """The operations in order and by the value that they read, and the calls of every module in a call of `see`."""

    def __init__(self, constants: dict[str, Tensor]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.reads: dict[TensorVersion, list[Operation]] = defaultdict(list)
        self.operation_of: dict[TensorVersion, Operation] = {}
        self.inputs: dict[str, list[tuple[TensorVersion, ...]]] = defaultdict(list)
        self.outputs: dict[str, list[tuple[TensorVersion, ...]]] = defaultdict(list)
        self.running = Running()
        # What the call returned.
        self.result: Any = None
        # Values in what the call returned, and those that it left in attributes of modules.
        self.returned: set[TensorVersion] = set()
        # kept: the identity of a tensor is its own only while it lives
        self.tensors: dict[TensorVersion, Tensor] = {}
        # The names of every parameter and buffer by its identity.
        self.names: dict[int, list[str]] = defaultdict(list)
        for name, tensor in constants.items():
            self.names[id(tensor)].append(name)
            self.tensors[value_of(tensor)] = tensor
        # Values that follow from parameters and buffers alone.
        self.constant = set(self.tensors)
        # Modules in whose own code the numbers of a batch reach Python, which may branch on them.
        self.branches_on_data: set[str] = set()
        # Whether numbers of a parameter or buffer reach Python, or what follows from these alone.
        self.reads_parameters = False
        # Where the numbers of the tensors are that were seen.
        self._memories: set[int] = set()
        self.kernels = Kernels(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _known_by(func) in _FORM_ONLY:
            with self.kernels.within_a_function():
                return func(*args, **kwargs)
        name = name_of(func)
        arguments_read = args[:1] if name in LIKE_SECOND else (args, kwargs)
        tensors_read = tensors_in(arguments_read)
        inputs = tuple(map(value_of, tensors_read))
        self._find_shared_memory(tensors_read)
        with self.kernels.within_a_function():
            out = func(*args, **kwargs)
            tensors_made = tensors_in(out)
            if not tensors_made and tensors_read and _leaves_torch(func, args, kwargs, out):
                self.kernels.values_decide = True
        # what an operation writes in place is another value of the same tensor
        for tensor, before in zip(tensors_read, inputs, strict=True):
            if value_of(tensor) != before:
                tensors_made.append(tensor)
        made = {value_of(tensor): tensor for tensor in tensors_made}
        self.tensors |= made
        self.tensors |= dict(zip(inputs, tensors_read, strict=True))
        self._memories |= set(map(_memory_of, tensors_made))
        module = self.running.innermost
        self._record(Operation(name, module, inputs, tuple(made), args, kwargs, func))
        return out

    def _find_shared_memory(self, tensors: list[Tensor]) -> None:
        """Note a tensor that no operation made, in the memory of one that came before: it left torch, and came back.

        A tensor that was seen at an earlier version did not: a view of it was written to.
        """
        for tensor in tensors:
            identity, version = value_of(tensor)
            if not any((identity, earlier) in self.tensors for earlier in range(version + 1)):
                memory = _memory_of(tensor)
                if memory and memory in self._memories:
                    self.kernels.values_decide = True
                self._memories.add(memory)
                self.tensors[(identity, version)] = tensor

    def _record(self, operation: Operation) -> None:
        """Add an operation to those that read its inputs and make its outputs, and note what follows from constants."""
        inputs = operation.inputs
        outputs = operation.outputs
        name = operation.name
        is_random = "drop" in name or "rand" in name
        constant = bool(inputs) and self.constant.issuperset(inputs) and not is_random
        if self.kernels.values_decide and inputs:
            self.kernels.values_decide = False
            if constant:
                self.reads_parameters = True
            else:
                self.branches_on_data.add(operation.module)
        if not outputs or name in SHAPES_ALONE or set(outputs) <= set(inputs):  # its input again
            return
        self.operations.append(operation)
        for value in dict.fromkeys(inputs):
            self.reads[value].append(operation)
        self.operation_of |= dict.fromkeys(outputs, operation)
        if constant:
            self.constant |= set(outputs)

    def enter(self, call: ModuleCall) -> None:
        self.inputs[call.name].append(_values_in(call.args, call.kwargs))

    def leave(self, call: ModuleCall) -> None:
        self.outputs[call.name].append(_values_in(call.output))

    def record_unseen(self, name: str, tensors_read: list[Tensor], out: Any) -> None:
        """Record an operation that no torch function called, as inside a scripted function."""
        tensors_made = tensors_in(out)
        self.tensors |= {value_of(tensor): tensor for tensor in (*tensors_read, *tensors_made)}
        inputs = tuple(map(value_of, tensors_read))
        outputs = tuple(map(value_of, tensors_made))
        self._record(Operation(name, self.running.innermost, inputs, outputs))


class Kernels(TorchDispatchMode):
    """What the kernels under a flow's functions tell: whether the numbers of a tensor decide a form or reach Python."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow = flow
        self.values_decide = False
        self._is_within = False

    @contextmanager
    def within_a_function(self) -> Iterator[None]:
        """Context in which kernels are those of a torch function, which records them itself."""
        outer = self._is_within
        self._is_within = True
        try:
            yield
        finally:
            self._is_within = outer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors_read = [] if self._is_within else tensors_in(args, kwargs)
        out = func(*args, **kwargs)
        self.values_decide |= _depends_on_values(func, args, kwargs, out)
        if not self._is_within:
            self.flow.record_unseen(func.__name__.partition(".")[0], tensors_read, out)
        return out


def _values_in(*objects: Any) -> tuple[TensorVersion, ...]:
    """Return the values that objects hold; what is asked of the tensors for it is no operation of the model."""
    with torch._C.DisableTorchFunction():
        return tuple(map(value_of, tensors_in(*objects)))


def name_of(func: Any) -> str:
    return getattr(_known_by(func), "__name__", str(func))


def _memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's numbers, 0 of one without."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return 0
    return tensor.untyped_storage().data_ptr()


def _depends_on_values(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Return True if the result of a kernel is a number for Python, or has a form that the values decide."""
    results = tensors_in(out)
    if any(tensor.layout != torch.strided for tensor in results):
        return True
    if torch.Tag.data_dependent_output in func.tags:
        return True
    # by numbers the form is that of the indices, by a mask it is not
    if func is torch.ops.aten.index.Tensor:
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
    if torch.Tag.dynamic_output_shape in func.tags:
        return True
    operands = tensors_in(args, kwargs)
    if func.namespace in ("aten", "prims", "prim") and all(
        tensor.is_floating_point() for tensor in operands
    ):
        return False
    return not _is_same_without_values(func, args, kwargs, [tensor.shape for tensor in results])


# Functions, and attributes of tensors, that have been found to read nothing but the form of tensors.
_FORM_ONLY: set[Any] = set()


def _known_by(func: Any) -> Any:
    """Return a function, or the attribute of tensors that it reads, such as shape."""
    return func.__self__ if getattr(func, "__name__", "") == "__get__" else func


def _leaves_torch(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Return True if a function that returns no tensor reads more than the form of its tensors."""
    function = _known_by(func)
    if function is not func and "interface" not in function.__name__:
        if out is not None:  # which could be a tensor another time
            _FORM_ONLY.add(function)
        return False
    if not _is_same_without_values(func, args, kwargs, out):
        return True
    _FORM_ONLY.add(function)
    return False


def _is_same_without_values(func: Any, args: Any, kwargs: Any, expected: Any) -> bool:
    """Return True if a function gives the same for tensors that have a form and no values."""
    try:
        arguments = tree_map_only(Tensor, _without_values, (args, kwargs))
        out = func(*arguments[0], **arguments[1])
        tensors = tensors_in(out)
        result = [tensor.shape for tensor in tensors] if tensors else out
        return bool(result == expected)
    except Exception:  # of any function that asks for a value
        return False


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@torch.no_grad()
def see(model: nn.Module, call: Callable[[], Any]) -> Flow:
    """Return what happens in a call of a model or of one of its methods: who reads every value, which modules run.

    Modules stay in the mode that they are in. What the call writes into buffers and attributes stays there: see a copy.

    Example:
        >>> unit = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()).eval()
        >>> x = torch.randn(1, 3, 8, 8)
        >>> flow = see(unit, lambda: unit(x))
        >>> [each.name for each in flow.operations], len(flow.outputs["2"])
        (['conv2d', 'batch_norm', 'relu'], 1)
    """
    flow = Flow(_constants(model))
    with observing(model, flow.enter, flow.leave) as flow.running, flow.kernels, flow:
        flow.result = call()
    del flow.kernels.flow  # a circle would keep all tensors until Python looks for circles
    flow.returned = set(map(value_of, (*tensors_in(flow.result), *_tensors_of_attributes(model))))
    return flow


def _constants(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; of a module with several names under its first."""
    constants: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                constants[f"{path}.{name}".lstrip(".")] = tensor
    return constants


def _tensors_of_attributes(model: nn.Module) -> list[Tensor]:
    """Return the tensors in attributes of modules, also in containers and in attributes of objects there."""
    tensors: list[Tensor] = []
    for module in model.modules():
        registered = {id(module._parameters), id(module._buffers), id(module._modules)}
        attributes = []
        for attribute in vars(module).values():
            is_empty = isinstance(attribute, dict) and not attribute  # as most dicts of hooks are
            is_plain = type(attribute) in PLAIN
            if id(attribute) not in registered and not is_empty and not is_plain:
                attributes.append(attribute)
        for leaf in tree_leaves(attributes):
            objects = [leaf]
            if not isinstance(leaf, Tensor):
                objects = tree_leaves(getattr(leaf, "__dict__", leaf))
            tensors += [value for value in objects if isinstance(value, Tensor)]
    return tensors


@contextmanager
def count_calls(model: nn.Module, names: Iterable[str]) -> Iterator[Counter[str]]:
    """Context in which the calls of modules are counted, without the hooks that would keep a parent off a fast path.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval().requires_grad_(False)
        >>> with count_calls(layer, ["self_attn", "linear1"]) as calls:
        ...     y = layer(torch.randn(1, 3, 8))
        >>> calls["self_attn"], calls["linear1"]  # torch reads their weights
        (0, 0)
    """
    calls: Counter[str] = Counter()

    def counted(name: str, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return forward(*args, **kwargs)

        return call

    modules = {name: model.get_submodule(name) for name in names}
    patched_forwards = {name: vars(module).get("forward") for name, module in modules.items()}
    try:
        for name, module in modules.items():
            vars(module)["forward"] = counted(name, module.forward)
        yield calls
    finally:
        for name, module in modules.items():
            vars(module).pop("forward", None)
            if patched_forwards[name] is not None:
                vars(module)["forward"] = patched_forwards[name]
