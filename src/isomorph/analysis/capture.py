"""Capture the attention of any layer while the unchanged forward of the model runs.

Of a layer that calls `scaled_dot_product_attention` the queries and keys are captured, without forming a map. Of one
that forms its map itself the matrix is captured that it multiplies its values by, after all operations that follow the
softmax (talking heads, gates, differences). So the code does not depend on the class of the layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from isomorph.analysis.applied_attention import (
    AppliedAttention,
    FormedMap,
    MethodMap,
    Scores,
    has_attention_method,
)
from isomorph.analysis.timm_layouts import fused_form_has_no_map, to_standard_layout
from isomorph.errors import UserError
from isomorph.layers.eval_mode import eval_mode
from isomorph.surgery.attention_classes import no_map_reason
from isomorph.surgery.model_inputs import check_inputs
from isomorph.surgery.where import Where, describe_where, matches_where, nearest_names

_SOFTMAX = {torch.softmax, Tensor.softmax, F.softmax}
_PRODUCT = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
_TRANSPARENT = (nn.Softmax, nn.Dropout, nn.Identity)
"""Submodules whose operations count as those of the layer around them."""


class LayerCall:
    """One call of a layer, with the attention captured in it."""

    def __init__(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next((key for key in ("x", *kwargs) if key in kwargs), "x")  # the tokens, by their name in the layer
        named = {key: value for key, value in kwargs.items() if args or key != first}
        self.name, self.layer, self.args, self.kwargs = name, layer, args or (kwargs.get(first),), named
        self.captured: list[AppliedAttention] = []
        self.softmax: tuple[Tensor, Tensor] | None = None

    def attention(self) -> AppliedAttention | None:
        """Return the attention that the layer applied, after its forward, or None if it applied none."""
        if has_attention_method(self.layer):
            return MethodMap(self.layer, self.args, self.kwargs, self.name)
        formed = [maps for maps in self.captured if isinstance(maps, FormedMap)]
        if len(formed) == len(self.captured) > 1:  # the layer loops over its heads
            return _join_heads(formed)
        return self.captured[-1] if self.captured else None

    def record_fused_attention(self, q: Tensor, k: Tensor, _: Tensor, *args: Any, **kwargs: Any) -> None:
        """Record a call of scaled_dot_product_attention."""
        self.captured.append(_fused_scores(self.layer, q, k, *args, **kwargs))

    def record_product(self, a: Tensor, b: Any) -> None:
        """Record a product if it is that of a map with values: the first product after a softmax over keys."""
        if self.softmax is None or not isinstance(b, Tensor) or min(a.ndim, b.ndim) < 3:
            return
        logits, after = self.softmax
        maps = _map_among(after, a, b)
        if maps is not None:
            self.softmax = None
            self.captured.append(
                FormedMap(to_standard_layout(self.layer, maps), Scores(to_standard_layout(self.layer, logits), None))
            )


def _map_among(after: Tensor, a: Tensor, b: Tensor) -> Tensor | None:
    """Return the factor of a product that is the output of a softmax, perhaps changed since then, or None."""
    candidates = [a, b.mT]
    same = [c for c in candidates if c.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()]
    matching = [c for c in same + candidates if c.shape[-2:] == after.shape[-2:]]
    return matching[0] if matching else None


def _join_heads(heads: list[FormedMap]) -> FormedMap:
    """Return the maps of several heads as one."""
    logits = [head.logits.q for head in heads if head.logits]
    maps = torch.cat([head.maps for head in heads], 1)
    return FormedMap(maps, Scores(torch.cat(logits, 1), None) if logits else None)


def _fused_scores(
    layer: nn.Module,
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Scores:
    """Return the scores of a call of scaled_dot_product_attention, whose arguments these are without the values."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    if is_causal:
        attn_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
    if attn_mask is not None and q.ndim != 4:
        attn_mask = to_standard_layout(layer, attn_mask.expand(*q.shape[:-1], k.shape[-2]))
    return Scores(to_standard_layout(layer, q) * scale, to_standard_layout(layer, k), attn_mask)


class _AttentionMode(TorchFunctionMode):
    """Torch function mode that records softmax and products for the innermost running layer.

    A mode sees every call of a torch function, so layers need not be patched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[LayerCall | None] = []  # None: ignore the operations of this layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        call = self.stack[-1] if self.stack else None
        if call is None:
            return out
        if func is F.scaled_dot_product_attention:
            call.record_fused_attention(
                *args, **{{"query": "q", "key": "k", "value": "_"}.get(n, n): v for n, v in given.items()}
            )
        elif func is F.multi_head_attention_forward:  # of nn.MultiheadAttention, which runs in C++
            with_weights = {**given, "need_weights": True, "average_attn_weights": False}
            call.captured.append(FormedMap(F.multi_head_attention_forward(*args, **with_weights)[1], None))
        elif func in _SOFTMAX and _is_over_keys(out, *args[1:], **given):
            call.softmax = (args[0], out)
        elif func in _PRODUCT:
            call.record_product(args[0], args[1] if len(args) > 1 else given.get("other", given.get("mat2")))
        return out


def _is_over_keys(out: Tensor, dim: Any = None, *_: Any, **kwargs: Any) -> bool:
    """True if a softmax runs over the last axis of a tensor of three axes or more."""
    dim = kwargs.get("dim", dim)
    return out.ndim > 2 and dim in (-1, out.ndim - 1)


@contextmanager
def _plain_attention(model: nn.Module) -> Iterator[None]:
    """Context in which layers whose fused form has no map run in their plain form."""
    layers: list[Any] = [layer for layer in model.modules() if fused_form_has_no_map(layer)]
    forms = [layer.fused_attn for layer in layers]
    try:
        for layer in layers:
            layer.fused_attn = False
        yield
    finally:
        for layer, form in zip(layers, forms, strict=True):
            layer.fused_attn = form


@torch.no_grad()
def run_with_hooks(model: nn.Module, batch: Tensor, handles: Sequence[RemovableHandle]) -> None:
    """Run the model in eval mode, not compiled, and remove the hooks afterwards.

    Raises: UserError unless the batch is a tensor.
    """
    check_inputs(batch, Tensor)
    try:
        with eval_mode(model), torch.compiler.set_stance("force_eager"):
            model(batch)
    finally:
        for handle in handles:
            handle.remove()


def capture_inputs(
    model: nn.Module, batch: Tensor, measure: Callable[..., Any], layers: Mapping[str, nn.Module]
) -> dict[str, Any]:
    """Return `measure(layer, *inputs)` for every layer, on the inputs that it receives in the model, in eval mode."""
    results: dict[str, Any] = {}

    def measure_as(name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            results[name] = measure(layer, *args, **kwargs)

        return hook

    handles = [layer.register_forward_pre_hook(measure_as(name), with_kwargs=True) for name, layer in layers.items()]
    run_with_hooks(model, batch, handles)
    return results


_Measure = Callable[[LayerCall, AppliedAttention], Any]


@torch.no_grad()
def capture_attention(model: nn.Module, batch: Tensor, measure: _Measure, where: Where = "*") -> dict[str, Any]:
    """Return `measure(call, attention)` for every selected attention layer, in the order of the forward, in eval mode.

    It is called as soon as the layer has run, and nothing else of the layer is stored. Of a layer that runs several
    times the last call counts. Layers for which `measure` returns None are left out.

    Raises: UserError if no selected layer has an attention map, with the names of layers that have, or the reason.
    """
    mode, results, measured, others = _AttentionMode(), dict[str, Any](), list[str](), list[str]()
    reasons: list[str] = []

    def enter(name: str, layer: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inside = mode.stack and (mode.stack[-1] is None or has_attention_method(mode.stack[-1].layer))
            reason = no_map_reason(layer)
            if reason and matches_where(where, name, layer):
                reasons.append(f"{name} ({type(layer).__name__}) {reason}")
            mode.stack.append(None if reason or inside else LayerCall(name, layer, args, kwargs))

        return hook

    def leave(name: str, layer: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, ___: Any) -> None:
            call = mode.stack.pop()
            attention = call.attention() if call else None
            if call is None or attention is None:
                return
            if not matches_where(where, name, layer):
                others.append(name)
                return
            measured.append(name)
            mode.stack.append(None)  # operations of `measure` are not the model's
            result = measure(call, attention)
            mode.stack.pop()
            if result is not None:
                results[name] = result

        return hook

    with ExitStack() as stack:
        handles = []
        for name, layer in model.named_modules():
            if not isinstance(layer, _TRANSPARENT):
                handles.append(layer.register_forward_pre_hook(enter(name, layer), with_kwargs=True))
                handles.append(layer.register_forward_hook(leave(name, layer)))
        stack.enter_context(_plain_attention(model))
        stack.enter_context(mode)
        run_with_hooks(model, batch, handles)
    if not measured:
        raise UserError(_missing_message(where, others, reasons))
    return results


def _missing_message(where: Where, others: list[str], reasons: list[str]) -> str:
    """Return the error message for a `where` that selects no attention layer with a map."""
    if reasons:
        return reasons[0]
    if others:
        return f"{describe_where(where)} matches no attention layer{nearest_names(where, others)}"
    return "the model has no attention layer with a known map; recast it first"
