"""Models without wrappers, and which operations make and read a value in one call of a model, whatever its classes.

A value is a tensor at a version: an operation in place makes a new one.
"""

import copy
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.utils.model_ema import ModelEmaV2, ModelEmaV3
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from isomorph.errors import UserError, first_line

# The identity and the version of a tensor.
Value = tuple[int, int]

# Operations that read of their second tensor its shape or dtype alone.
_AS = {"reshape_as", "view_as", "expand_as", "type_as"}
# Operations that read the shape of their tensor alone.
_SHAPES = {"zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_empty", "new_full", "full_like"}
# Operations by which numbers of a tensor reach Python, or the shape of another tensor.
_DECISIONS = {"item", "tolist", "numpy", "nonzero", "masked_select", "unique", "equal", "allclose", "nms", "where"}
_DECISIONS |= {f"__{name}__" for name in ("bool", "int", "float", "index", "array", "contains")}


class Operation(NamedTuple):
    """A call of a torch function: its name, the module that runs it, its values, its arguments and the function."""

    name: str
    module: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    function: Any = None


class Flow(TorchFunctionMode):
    """The operations in order and by the value that they read, and the calls of every module in a call of `see`."""

    def __init__(self, constants: dict[str, Tensor]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.reads: dict[Value, list[Operation]] = defaultdict(list)
        self.made: dict[Value, Operation] = {}
        self.inputs: dict[str, list[tuple[Value, ...]]] = defaultdict(list)
        self.outputs: dict[str, list[tuple[Value, ...]]] = defaultdict(list)
        self.running = [""]
        # What the call returned.
        self.result: Any = None
        self.tensors: dict[Value, Tensor] = {}  # kept: the identity of a tensor is its own only while it lives
        # The names of every parameter and buffer by its identity.
        self.names: dict[int, list[str]] = defaultdict(list)
        for name, tensor in constants.items():
            self.names[id(tensor)].append(name)
            self.tensors[value_of(tensor)] = tensor
        # Values that follow from parameters and buffers alone.
        self.constant = set(self.tensors)
        # Modules in whose own code the numbers of a batch reach Python, which may branch on them.
        self.deciding: set[str] = set()
        # Whether numbers of a parameter or buffer reach Python, or what follows from these alone.
        self.numbers = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        name = func.__self__.__name__ if name == "__get__" else name
        read = tensors_in(args[:1] if name in _AS else (args, kwargs))
        inputs = tuple(map(value_of, read))
        out = func(*args, **(kwargs or {}))
        made = tensors_in(out)
        outputs = tuple(map(value_of, made))
        constant = bool(inputs) and self.constant.issuperset(inputs) and "drop" not in name and "rand" not in name
        if name in _DECISIONS and inputs and not (name == "where" and len(args) > 1):
            self.numbers |= constant
            self.deciding |= set() if constant else {self.running[-1]}
        if outputs and name not in _SHAPES and not set(outputs) <= set(inputs):  # no shape, and not its input again
            operation = Operation(name, self.running[-1], inputs, outputs, args, kwargs or {}, func)
            self.operations.append(operation)
            for value in dict.fromkeys(inputs):
                self.reads[value].append(operation)
            self.made |= dict.fromkeys(outputs, operation)
            self.constant |= set(outputs if constant else ())
        self.tensors |= dict(zip((*inputs, *outputs), (*read, *made), strict=True))
        return out

    def enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.running.append(name)
        self.inputs[name].append(tuple(map(value_of, tensors_in(args, kwargs))))

    def leave(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        self.running.pop()
        self.outputs[name].append(tuple(map(value_of, tensors_in(output))))


def value_of(tensor: Tensor) -> Value:
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def tensors_in(*values: Any, seen: set[int] | None = None) -> list[Tensor]:
    """Return the tensors among values, in lists and dicts, and in attributes of objects other than modules."""
    tensors: list[Tensor] = []
    seen = set() if seen is None else seen
    for value in tree_leaves(values):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, Mapping):
            tensors += tensors_in(*value.values(), seen=seen)
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type) and id(value) not in seen:
            seen.add(id(value))
            tensors += tensors_in(*vars(value).values(), seen=seen)
    return tensors


@torch.no_grad()
def see(model: nn.Module, call: Callable[[], Any]) -> Flow:
    """Return what happens in a call of a model or of one of its methods: who reads every value, which modules run.

    Modules stay in the mode that they are in.

    Example:
        >>> unit = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()).eval()
        >>> x = torch.randn(1, 3, 8, 8)
        >>> flow = see(unit, lambda: unit(x))
        >>> [each.name for each in flow.operations], len(flow.outputs["2"])
        (['conv2d', 'batch_norm', 'relu'], 1)
    """
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    flow = Flow(dict(tensors))
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(flow.enter, name), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(flow.leave, name)))
        with flow:
            flow.result = call()
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
    own = {name: vars(module).get("forward") for name, module in modules.items()}
    try:
        for name, module in modules.items():
            vars(module)["forward"] = counted(name, module.forward)
        yield calls
    finally:
        for name, module in modules.items():
            vars(module).pop("forward", None)
            vars(module).update({"forward": own[name]} if own[name] else {})


Wrappers = tuple[type[nn.Module], ...]

_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
# Classes that keep their model as `module`; a compiled model is the `_orig_mod` of its wrapper.
_WRAPPERS = (*_PARALLEL, AveragedModel, ModelEmaV2, ModelEmaV3)

_PERMANENT_HINT = (
    "make pruning and weight norms permanent first (prune.remove, remove_weight_norm); if a layer keeps a result of "
    "its last call, as timm's LeViT does, call model.train(), and call it under torch.no_grad()"
)


def hooks_on(module: nn.Module) -> list[str]:
    """Return the names of a module's hooks of all kinds, but for surgery's own and transformers' records."""
    # torch has no public list of hooks: each kind is a dict in a private attribute that ends in _hooks
    kinds = [hooks for name, hooks in vars(module).items() if name.endswith("_hooks") and isinstance(hooks, dict)]
    functions = [getattr(hook, "hook", None) or hook for hooks in kinds for hook in hooks.values()]
    own = [hook for hook in functions if not getattr(getattr(hook, "__self__", hook), "reattached", False)]
    return [getattr(hook, "__name__", type(hook).__name__) for hook in own if not records_outputs(hook)]


def records_outputs(hook: Any) -> bool:
    """True for a hook by which transformers records the outputs of layers."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def unwrap(model: Any, to_copy: bool = True) -> Any:
    """Return the model inside the wrappers of torch.compile, DataParallel, DistributedDataParallel and averages.

    To be copied or saved, submodules are unwrapped too, in a copy: they have the names that they had before. What is
    not a model is returned as it is.

    Raises: UserError if a wrapper has hooks, which would be lost; to be copied, also for weights that are divided among
        processes (FSDP).

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> unwrap(torch.nn.DataParallel(torch.compile(cnn))) is cnn
        True
    """
    if not isinstance(model, nn.Module):
        return model
    model = _innermost(model, _WRAPPERS)
    if not to_copy:
        return model
    if _is_sharded(model):
        raise UserError(
            "the weights are divided among processes (FSDP); gather them with get_model_state_dict and "
            "StateDictOptions(full_state_dict=True) of torch.distributed.checkpoint.state_dict, and load them into a "
            "model that is not divided"
        )
    if any(len(wrappers_of(module, _PARALLEL)) > 1 for module in model.modules()):
        model = copy_module(model)
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if child is not None:
                    parent._modules[name] = _innermost(child, _PARALLEL)
    return model


def wrappers_of(module: Any, kinds: Wrappers = _WRAPPERS) -> list[Any]:
    """Return the wrappers around a model, the outermost first, and the model last."""
    name = "module" if isinstance(module, kinds) else "_orig_mod"
    inner = dict(module.named_children()).get(name)
    return [module] if inner is None else [module, *wrappers_of(inner, kinds)]


def _innermost(module: nn.Module, kinds: Wrappers) -> nn.Module:
    *wrappers, inner = wrappers_of(module, kinds)
    for wrapper in wrappers:
        if hooks := hooks_on(wrapper):
            name = type(wrapper).__name__ if isinstance(wrapper, kinds) else "compiled model"
            raise UserError(f"the {name} has hooks ({', '.join(hooks)}); register them on the model inside")
    return inner


def _is_sharded(model: nn.Module) -> bool:
    """True for both kinds of FSDP; without their module, which is slow to import, there is none."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(filter(None, (getattr(fsdp, name, None) for name in ("FullyShardedDataParallel", "FSDPModule"))))
    return any(isinstance(module, kinds) for module in model.modules())


def is_compiled(model: Any) -> bool:
    """True if the model or a submodule is compiled."""
    # model.compile() sets a private attribute of torch's and wraps nothing
    parts = model.modules() if isinstance(model, nn.Module) else ()
    return any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in parts)


@torch.inference_mode(False)  # the copy can be trained
def copy_module(model: nn.Module) -> nn.Module:
    """Return a deep copy. Raises: UserError if torch cannot copy it, as with pruned layers."""
    try:
        new = copy.deepcopy(model)
    except RuntimeError as error:
        reason = first_line(error).partition(". ")[0]
        raise UserError(f"the model cannot be copied ({reason}); {_PERMANENT_HINT}") from None
    modes = {name: module.training for name, module in model.named_modules()}
    for name, copied in new.named_modules():  # a feature extractor of torchvision is copied in train mode
        if copied.training != (mode := modes.get(name, copied.training)):
            copied.train(mode)
    return new
