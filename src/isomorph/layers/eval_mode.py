"""Eval mode: what layers keep in it, a model put into it temporarily, its outputs checked, two layers compared."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from isomorph.errors import NotFinite
from isomorph.layers.eager import can_keep

Value = TypeVar("Value", Tensor, tuple[Tensor, ...])


class KeepsInEval(nn.Module):
    """Base of layers that compute once, in eval mode, what depends on their parameters alone.

    A result is kept without gradients only (under `no_grad`, or with frozen parameters), and never while torch traces
    or transforms the call. It is computed again for changed parameters, other arguments and another autocast, and
    dropped by `train()`, `eval()`, `load_state_dict()`, a change of device or dtype, and a call that needs gradients.
    Copies have none; threads may share a layer. Writes through `.data` cannot be seen: call `eval()` after them.
    """

    _kept: Mapping[str, tuple[tuple[Tensor, ...], tuple[Any, ...], Any]] = MappingProxyType({})
    """By function: the tensors that a result was computed from, the state in which they were, and the result."""

    def keep(self, sources: tuple[Tensor, ...], compute: Callable[..., Value], *arguments: Hashable) -> Value:
        """Return `compute(*arguments)`, a function of `sources` alone, which must not be written to; one is kept."""
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
        if kept and kept[1] == state and all(map(lambda a, b: a is b, kept[0], sources)):
            return kept[2]
        with torch.inference_mode(False), torch.no_grad():
            value = compute(*arguments)
        if all(type(each) is Tensor for each in (value if isinstance(value, tuple) else (value,))):
            self._kept = {**self._kept, compute.__name__: (sources, state, value)}
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
def require_same(layer: nn.Module, plain: nn.Module, shape: tuple[int, ...], atol: float, advice: str) -> None:
    """Check that two layers are equal, in float64. Raises: ValueError for a relative |difference| above `atol`."""
    probe = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(next(plain.parameters()).device)
    outputs = []
    for module in (layer, plain):
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        exact = {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}
        with eval_mode(module):  # dropout would differ from itself
            outputs.append(torch.func.functional_call(module, exact, (probe.double(),)))
    actual, expected = outputs
    if expected.is_meta:
        return
    deviation = ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300)).item()
    if not deviation <= atol:
        raise ValueError(
            f"this {type(layer).__name__} does not equal a {type(plain).__name__}: the relative deviation is "
            f"{deviation:.2g}, above {atol:g}; {advice}"
        )
