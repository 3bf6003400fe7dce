"""Which operations read a value, in one forward of a model, whatever its classes.

A value is a tensor at a version: an operation in place makes a new one.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

Value = tuple[int, int]
"""The identity and the version of a tensor."""

_AS = {"reshape_as", "view_as", "expand_as", "type_as"}
"""Operations that read of their second tensor its shape or dtype alone."""
_VIEWS = {"flatten", "reshape", "view", "unflatten", "unsqueeze", "squeeze", "contiguous", "reshape_as", "view_as"}
"""Operations that keep all elements in their order."""


class Operation(NamedTuple):
    """A call of a torch function: its name, the module that runs it, and its values."""

    name: str
    module: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class Flow(TorchFunctionMode):
    """What `see` saw: the operations that read every value, and the `outputs` of the calls of every module.

    A module that is not among `outputs` was not called, even if its weights were read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: dict[Value, list[Operation]] = defaultdict(list)
        self.outputs: dict[str, list[tuple[Value, ...]]] = defaultdict(list)
        self.running = [""]
        self._alive: list[Any] = []  # the identity of a tensor is its own only while it lives

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        inputs = _values(args[:1] if name in _AS else (args, kwargs))
        out = func(*args, **(kwargs or {}))
        outputs = _values(out)
        if outputs and outputs != inputs[:1]:  # no attribute such as a shape, and not its input again
            operation = Operation(name, self.running[-1], inputs, outputs)
            for value in dict.fromkeys(inputs):
                self.reads[value].append(operation)
            self._alive.append((args, kwargs, out))
        return out

    def readers(self, value: Value) -> Iterator[Operation]:
        """Yield the operations that read a value, also as a view of it."""
        for operation in self.reads[value]:
            if operation.name in _VIEWS and operation.inputs[0] == value:
                yield from self.readers(operation.outputs[0])
            else:
                yield operation

    def norm_after(self, layer: str) -> str | None:
        """Return the module that applies BatchNorm to the output of a layer's only call, or None if others read it."""
        calls = self.outputs[layer]
        if len(calls) != 1 or len(calls[0]) != 1:
            return None
        readers = [each for each in self.readers(calls[0][0]) if not self._inside(each, layer)]
        return readers[0].module if [each.name for each in readers] == ["batch_norm"] else None

    @staticmethod
    def _inside(operation: Operation, layer: str) -> bool:
        return f"{operation.module}.".startswith(f"{layer}.")


def _value(tensor: Tensor) -> Value:
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def _values(*parts: Any) -> tuple[Value, ...]:
    return tuple(_value(leaf) for leaf in tree_leaves(parts) if isinstance(leaf, Tensor))


@torch.no_grad()
def see(model: nn.Module, *args: Any, **kwargs: Any) -> Flow:
    """Return what a model computes in one call: which operations read every value, and which modules run.

    Modules stay in the mode that they are in.

    Example:
        >>> unit = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()).eval()
        >>> flow = see(unit, torch.randn(1, 3, 8, 8))
        >>> flow.norm_after("0"), len(flow.outputs["2"])
        ('1', 1)
    """
    flow, handles = Flow(), []

    def enter(name: str) -> Any:
        return lambda *_: flow.running.append(name)

    def leave(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            flow.running.pop()
            flow.outputs[name].append(_values(output))

        return hook

    for name, module in model.named_modules():
        handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave(name))]
    try:
        with flow:
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return flow


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
    own = {name: module.forward for name, module in modules.items() if "forward" in vars(module)}
    try:
        for name, module in modules.items():
            vars(module)["forward"] = counted(name, module.forward)
        yield calls
    finally:
        for name, module in modules.items():
            vars(module).pop("forward", None)
            if name in own:
                vars(module)["forward"] = own[name]
