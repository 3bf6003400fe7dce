"""How a layer may compute in this call (eager, traced, under functorch), and what it keeps in eval mode."""

import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from isomorph.errors import NotFinite

# Type of the device for which layers take the form of a CPU; a test of the other form names
# another.
CPU_DEVICE = "cpu"


def on_cpu(tensor: Tensor) -> bool:
    """True if a layer takes the form that is fast on a CPU for this tensor."""
    return tensor.device.type == CPU_DEVICE


def is_arithmetic_bound(x: Tensor) -> bool:
    """True where arithmetic is what takes the time: on a CPU, and on the meta device, on which it is counted."""
    return on_cpu(x) or x.is_meta


def at_least_float32(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor, or float32 if that is wider: sums and squares are inexact in half precision."""
    return torch.promote_types(tensor.dtype, torch.float32)


def upcast(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, or unchanged if its own dtype is wider."""
    return tensor.to(at_least_float32(tensor))


def noise(*shape: int) -> Tensor:
    """Return standard normal values on the CPU in float64, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def is_eager() -> bool:
    """True if torch runs eagerly: nothing is compiling, exporting or tracing this call."""
    return not torch.compiler.is_compiling() and not torch.jit.is_tracing()


def is_functorch_tensor(tensor: Tensor) -> bool:
    """True for a tensor of a transform of torch.func, such as vmap."""
    return is_eager() and torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def in_functorch() -> bool:
    """True within a transform of torch.func."""
    return is_eager() and torch._C._functorch.maybe_current_level() is not None


def disable_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast: statistics and products of weights keep the dtype of their inputs."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def without_autocast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function's backward pass compute in the dtypes of its gradients where it is called inside autocast."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        device = next((grad.device for grad in grads if grad is not None), torch.device("meta"))
        if device.type == "meta" or not torch.is_autocast_enabled(device.type):
            return backward(ctx, *grads)
        with disable_autocast(device):
            return backward(ctx, *grads)

    return run


# What a function's backward pass returns: for each input its gradient, or None.
Gradients = tuple[Tensor | None, ...]


class SavesInputs(torch.autograd.Function):
    """Base of functions that save their inputs alone, and compute the rest again in the backward pass.

    The inputs are tensors, or None, and after them `options`.
    """

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.options = inputs[len(tensors) :]


def can_keep(*tensors: Tensor) -> bool:
    """True if what is computed from these tensors may serve later calls: nothing traces or captures this one."""
    if (
        not is_eager()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or get_proxy_mode() is not None
    ):
        return False
    for tensor in tensors:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.is_inference():
            return False
    return not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())


def recomputed(function: Callable[..., Tensor], *arguments: Any, **named: Any) -> Tensor:
    """Return what the function returns, computed again in the backward pass instead of keeping what it needs."""
    if not torch.is_grad_enabled() or in_functorch():  # torch.func has no checkpoint
        return function(*arguments, **named)
    return checkpoint(function, *arguments, use_reentrant=False, **named)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context in which tensors that are made without a dtype have this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Bytes of the largest constant that is kept.
LARGEST_CONSTANT = 2**23


@functools.lru_cache(maxsize=128)
def _cached_constant(
    make: Callable[..., Tensor],
    device: torch.device,
    arguments: tuple[Hashable, ...],
) -> Tensor | None:
    """Return a constant on a device, made once; None if it is too large to keep.

    Others get it later, so nothing around this call has a part in it: no mode of torch and no default of float64.
    """
    with (
        default_dtype(torch.float32),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        tensor = make(*arguments, device=torch.device("cpu"))
        # complete on return, for every stream
        return tensor.to(device) if tensor.nbytes <= LARGEST_CONSTANT else None


def constant(make: Callable[..., Tensor], like: Tensor, *arguments: Any) -> Tensor:
    """Return `make(*arguments, device=...)` on the device of `like`: numbers that follow from sizes alone.

    Small ones are made once for all layers and calls, and must not be written to.
    """
    if can_keep(like):
        cached = _cached_constant(make, like.device, arguments)
        if cached is not None:
            return cached
    return make(*arguments, device=like.device)


Value = TypeVar("Value", Tensor, tuple[Tensor, ...])


def _surroundings(device: torch.device) -> tuple[int, torch.dtype | None]:
    """Return the stream and autocast's dtype of a call, on which what it computes depends."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    precision = (
        torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    )
    return stream, precision


class KeepsInEval(nn.Module):
    """Base of layers that compute once, in eval mode, what depends on their parameters alone.

    A result is kept without gradients only (under `no_grad`, or with frozen parameters), and never while torch traces
    or transforms the call. It is computed again for changed parameters, other arguments and another autocast, and
    dropped by `train()`, `eval()`, `load_state_dict()`, a change of device or dtype, and a call that needs gradients.
    Copies have none; threads may share a layer. Writes through `.data` cannot be seen: call `eval()` after them.
    """

    # By function: the tensors that a result was computed from, the state in which they were, and
    # the result.
    _cache: Mapping[str, tuple[tuple[Tensor, ...], tuple[Any, ...], Any]] = MappingProxyType({})

    def cached(
        self,
        sources: tuple[Tensor, ...],
        compute: Callable[..., Value],
        *arguments: Hashable,
    ) -> Value:
        """Return `compute(*arguments)`, a function of `sources` alone, which must not be written to; one is kept."""
        if self.training or not can_keep(*sources):
            return compute(*arguments)
        if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
            self._clear_cache()  # whoever trains in eval mode may write to parameters unseen
            return compute(*arguments)
        state = (
            arguments,
            *_surroundings(sources[0].device),
            [(tensor.data_ptr(), tensor._version) for tensor in sources],
        )
        entry = self._cache.get(compute.__name__)  # another thread may replace it at any time
        if entry and entry[1] == state and all(map(operator.is_, entry[0], sources)):
            return entry[2]
        with torch.inference_mode(False), torch.no_grad():
            value = compute(*arguments)
        if all(type(tensor) is Tensor for tensor in tree_leaves(value)):
            self._cache = {**self._cache, compute.__name__: (sources, state, value)}
        return value

    def _clear_cache(self) -> None:
        self.__dict__.pop("_cache", None)

    def train(self, mode: bool = True) -> Self:
        self._clear_cache()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self._clear_cache()
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._clear_cache()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_cache"}


def match_requires_grad(layer: nn.Module, *sources: nn.Module) -> None:
    """Set requires_grad of each parameter of a layer: True if a source's parameter of the same name has it."""
    for name, parameter in layer.named_parameters():
        own = [operator.attrgetter(name)(source) for source in sources]
        parameter.requires_grad_(any(x.requires_grad for x in own))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode within the block, then restore the mode of every module, a frozen BatchNorm's too."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def first_float(model: nn.Module) -> Tensor:
    """Return the first floating-point parameter or buffer (else a CPU scalar), whose device and dtype inputs get."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.is_floating_point():
            return tensor
    return torch.zeros((), device="cpu")


def require_finite(outputs: Any) -> None:
    """Raise NotFinite if a tensor in a network's outputs has NaN or infinite values."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor) and not bool(leaf.isfinite().all()):
            raise NotFinite(
                "the network's outputs are not finite (NaN or infinite); check its weights and the inputs",
            )


def _call_in_float64(module: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a module with its weights in float64."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    exact = {
        name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()
    }
    with eval_mode(module):  # dropout would differ from itself
        return torch.func.functional_call(module, exact, (x.double(),))


@torch.no_grad()
def require_same(
    layer: nn.Module,
    plain: nn.Module,
    shape: tuple[int, ...],
    atol: float,
    advice: str,
) -> None:
    """Check that two layers are equal, in float64. Raises: ValueError for a relative |difference| above `atol`."""
    probe = noise(*shape).to(first_float(plain).device)
    actual = _call_in_float64(layer, probe)
    expected = _call_in_float64(plain, probe)
    if expected.is_meta:
        return
    largest = expected.abs().max().clamp(min=1e-300)
    deviation = ((actual - expected).abs().max() / largest).item()
    if not deviation <= atol:
        raise ValueError(
            f"this {type(layer).__name__} does not equal a {type(plain).__name__}: the relative deviation is "
            f"{deviation:.2g}, above {atol:g}; {advice}"
        )
