"""Eval mode: what layers keep in it, a model put into it temporarily, its outputs checked, two layers compared."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from isomorph.errors import NotFinite
from isomorph.layers.eager import can_keep

Value = TypeVar("Value", Tensor, tuple[Tensor, ...])


class _Kept(NamedTuple):
    """A result, the tensors that it was computed from, and the state in which they were."""

    sources: tuple[Tensor, ...]
    state: tuple[Any, ...]
    value: Any


class KeepsInEval(nn.Module):
    """Base of layers that compute once, in eval mode, what depends on their parameters alone.

    A result is kept without gradients only (under `no_grad`, or with frozen parameters), and never while torch traces,
    compiles, exports or transforms the call. It is computed again after a parameter was replaced or changed in place,
    for other arguments, and under another autocast; it is dropped by `train()`, `eval()`, `load_state_dict()`, a change
    of device or dtype, and a call that needs gradients, and is no part of copies and pickles. Threads may share a
    layer. Writes through `.data` cannot be seen: call `eval()` after them.
    """

    _kept: Mapping[str, _Kept] = MappingProxyType({})

    def keep(self, sources: tuple[Tensor, ...], compute: Callable[..., Value], *arguments: Hashable) -> Value:
        """Return `compute(*arguments)`, which reads no tensors but `sources`; one result is kept for each function.

        What it returns must not be written to.
        """
        if self.training or not can_keep(*sources):
            return compute(*arguments)
        if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
            self._drop_kept()  # whoever trains in eval mode may write to parameters unseen
            return compute(*arguments)
        device, kept = sources[0].device, self._kept.get(compute.__name__)  # another thread may replace it at any time
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        precision = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        versions = tuple((source.data_ptr(), source._version) for source in sources)
        state = (arguments, stream, precision, versions)
        if kept and kept.state == state and all(map(lambda a, b: a is b, kept.sources, sources)):
            return kept.value
        with torch.inference_mode(False), torch.no_grad():
            value = compute(*arguments)
        if all(type(each) is Tensor for each in (value if isinstance(value, tuple) else (value,))):
            self._kept = {**self._kept, compute.__name__: _Kept(sources, state, value)}
        return value

    def _drop_kept(self) -> None:
        self.__dict__.pop("_kept", None)

    def train(self, mode: bool = True) -> Self:
        self._drop_kept()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self._drop_kept()
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._drop_kept()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}


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


def require_finite(outputs: Any) -> None:
    """Raise NotFinite if a tensor in a network's outputs has NaN or infinite values."""
    if not all(bool(each.isfinite().all()) for each in tree_leaves(outputs) if isinstance(each, Tensor)):
        raise NotFinite("the network's outputs are not finite (NaN or infinite); check its weights and the inputs")


@torch.no_grad()
def relative_deviation(layer: nn.Module, other: nn.Module, shape: tuple[int, ...], like: Tensor) -> float:
    """Return the largest |difference| of two layers in eval mode, relative to the largest |output| of `other`.

    The input is standard normal, with the given shape and the device and dtype of `like`.
    """
    probe = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)
    with eval_mode(layer), eval_mode(other):  # dropout would differ from itself
        expected, actual = other(probe), layer(probe)
    return relative_difference(actual, expected)


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest |difference|, relative to the largest |expected|; 0 for zeros, and on the meta device."""
    if expected.is_meta:
        return 0.0
    largest = expected.abs().max()
    return ((actual - expected).abs().max() / largest.clamp(min=torch.finfo(largest.dtype).tiny)).item()
