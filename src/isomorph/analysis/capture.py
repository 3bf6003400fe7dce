"""Attention tapped as it is applied: the forward runs as ever, and what it gives its softmax and its values is noted.

A layer that calls `scaled_dot_product_attention` shows its queries and keys; no map is formed. One that forms its map
itself shows the matrix that it multiplies its values with, whatever became of it after the softmax (heads that talk,
gates, differences). So a layer need not be known to be understood.
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
from isomorph.analysis.timm_layouts import fused_form_has_no_map, to_standard_layout, no_map_reason
from isomorph.errors import UserError
from isomorph.layers.eval_mode import eval_mode
from isomorph.surgery.where import Where, describe_where, matches_where, nearest_names

_SOFTMAX = {torch.softmax, Tensor.softmax, F.softmax}
_PRODUCT = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
_TRANSPARENT = (nn.Softmax, nn.Dropout, nn.Identity)
"""Parts of a layer that act in its name."""


class LayerCall:
    """One layer while its forward runs."""

    def __init__(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {key: value for key, value in kwargs.items() if args or key != "x"}
        self.name, self.layer, self.args, self.kwargs = name, layer, args or (kwargs.get("x"),), named
        self.found: list[AppliedAttention] = []
        self.softmax: tuple[Tensor, Tensor] | None = None

    def applied(self) -> AppliedAttention | None:
        """What the layer weighed its values with, once its forward is over."""
        if has_attention_method(self.layer):
            return MethodMap(self.layer, self.args, self.kwargs)
        formed = [one for one in self.found if isinstance(one, FormedMap)]
        if len(formed) == len(self.found) > 1:
            return _join_heads(formed)
        return self.found[-1] if self.found else None

    def fused(self, q: Tensor, k: Tensor, _: Tensor, *args: Any, **kwargs: Any) -> None:
        """Notes a call of scaled_dot_product_attention."""
        self.found.append(_fused_scores(self.layer, q, k, *args, **kwargs))

    def product(self, a: Tensor, b: Any) -> None:
        """Notes the product of a map with values, if it is one: the first product after a softmax over keys."""
        if self.softmax is None or not isinstance(b, Tensor) or min(a.ndim, b.ndim) < 3:
            return
        logits, after = self.softmax
        maps = _map_among(after, a, b)
        if maps is not None:
            self.softmax = None
            self.found.append(FormedMap(to_standard_layout(self.layer, maps), Scores(to_standard_layout(self.layer, logits), None)))


def _map_among(after: Tensor, a: Tensor, b: Tensor) -> Tensor | None:
    """Which factor of a product is the map that a softmax gave, perhaps changed since then."""
    candidates = [a, b.mT]
    same = [c for c in candidates if c.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()]
    alike = [c for c in same + candidates if c.shape[-2:] == after.shape[-2:]]
    return alike[0] if alike else None


def _join_heads(found: list[FormedMap]) -> FormedMap:
    """Heads that a layer goes through one by one, together."""
    logits = [one.logits.q for one in found if one.logits]
    return FormedMap(torch.cat([one.maps for one in found], 1), Scores(torch.cat(logits, 1), None) if logits else None)


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
    """The scores of a call of scaled_dot_product_attention (its values left out)."""
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
    """Notes what the layer on top of the stack does with softmax and products."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[LayerCall | None] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        frame = self.stack[-1] if self.stack else None
        if frame is None:
            return out
        if func is F.scaled_dot_product_attention:
            frame.fused(*args, **{{"query": "q", "key": "k", "value": "_"}.get(n, n): v for n, v in given.items()})
        elif func is F.multi_head_attention_forward:  # what nn.MultiheadAttention calls; it hides what it does
            asked = {**given, "need_weights": True, "average_attn_weights": False}
            frame.found.append(FormedMap(F.multi_head_attention_forward(*args, **asked)[1], None))
        elif func in _SOFTMAX and _is_over_keys(out, *args[1:], **given):
            frame.softmax = (args[0], out)
        elif func in _PRODUCT:
            frame.product(args[0], args[1] if len(args) > 1 else given.get("other", given.get("mat2")))
        return out


def _is_over_keys(out: Tensor, dim: Any = None, *_: Any, **kwargs: Any) -> bool:
    """Whether a softmax runs along the last axis."""
    dim = kwargs.get("dim", dim)
    return out.ndim > 2 and dim in (-1, out.ndim - 1)


@contextmanager
def _plain_attention(model: nn.Module) -> Iterator[None]:
    """Layers whose fused form has no map in their plain form within the block."""
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
    """Runs the model in eval mode, not compiled, and takes the hooks off it again."""
    try:
        with eval_mode(model), torch.compiler.set_stance("force_eager"):
            model(batch)
    finally:
        for handle in handles:
            handle.remove()


def capture_inputs(model: nn.Module, batch: Tensor, look: Callable[..., Any], layers: Mapping[str, nn.Module]) -> dict[str, Any]:
    """What `look(layer, *arguments)` gives for each layer, on the arguments that it really receives, in eval mode."""
    seen: dict[str, Any] = {}

    def keep(name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[name] = look(layer, *args, **kwargs)

        return hook

    handles = [layer.register_forward_pre_hook(keep(name), with_kwargs=True) for name, layer in layers.items()]
    run_with_hooks(model, batch, handles)
    return seen


_Reader = Callable[[LayerCall, AppliedAttention], Any]


@torch.no_grad()
def capture_attention(model: nn.Module, batch: Tensor, look: _Reader, where: Where = "*") -> dict[str, Any]:
    """What `look(frame, applied)` gives for each attention layer that `where` selects, in the order of the forward.

    It looks when the layer has just run; nothing else of the layer is kept. A layer that runs several times is seen as
    it last ran. What `look` gives as None is left out.

    Raises: UserError when no layer that is selected has a map, naming those that have, or why one has none.
    """
    tap, seen, looked, others = _AttentionMode(), dict[str, Any](), list[str](), list[str]()
    refused: dict[str, str] = {}

    def enter(name: str, layer: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inside = tap.stack and (tap.stack[-1] is None or has_attention_method(tap.stack[-1].layer))
            reason = no_map_reason(layer)
            if reason and matches_where(where, name, layer):
                refused[name] = f"{name} ({type(layer).__name__}) {reason}"
            tap.stack.append(None if reason or inside else LayerCall(name, layer, args, kwargs))

        return hook

    def leave(name: str, layer: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, ___: Any) -> None:
            frame = tap.stack.pop()
            applied = frame.applied() if frame else None
            if frame is None or applied is None:
                return
            if not matches_where(where, name, layer):
                others.append(name)
                return
            looked.append(name)
            tap.stack.append(None)  # what looking computes is not the model's doing
            found = look(frame, applied)
            tap.stack.pop()
            if found is not None:
                seen[name] = found

        return hook

    with ExitStack() as stack:
        handles = []
        for name, layer in model.named_modules():
            if not isinstance(layer, _TRANSPARENT):
                handles.append(layer.register_forward_pre_hook(enter(name, layer), with_kwargs=True))
                handles.append(layer.register_forward_hook(leave(name, layer)))
        stack.enter_context(_plain_attention(model))
        stack.enter_context(tap)
        run_with_hooks(model, batch, handles)
    if not looked:
        raise UserError(_missing_message(where, others, list(refused.values())))
    return seen


def _missing_message(where: Where, others: list[str], refused: list[str]) -> str:
    """What to say when no layer was found."""
    if refused:
        return refused[0]
    if others:
        return f"{describe_where(where)} matches no attention layer{nearest_names(where, others)}; the first is {others[0]!r}"
    return "the model has no attention layer whose map is known; recast it first"
