"""The attention of every layer, and inputs of layers, captured while the unchanged forward of the model runs.

A layer with a method `attention` computes its map on demand; what others apply is found by operation (`ReadMaps`).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import torch
from timm.layers import Attention
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.attention_base import content_scores, score_scale
from isomorph.layers.gated.tap_heads import TapHeads
from isomorph.layers.modes import eval_mode
from isomorph.operations import (
    AppliedAttention,
    ModuleCall,
    ReadMaps,
    images_per_chunk,
    observing,
    unwrap,
)
from isomorph.operations.observe import Notice
from isomorph.process import replaced_attribute
from isomorph.surgery.attention_layers import facts_of, heads_of
from isomorph.surgery.calls import Inputs, run_model
from isomorph.surgery.rules.window import WindowAttention
from isomorph.surgery.site import Where, describe_where, matches_where, nearest_names

# Submodules whose operations count as those of the layer around them.
_TRANSPARENT = (nn.Softmax, nn.Dropout, nn.Identity)
# Most bytes that the maps of a recast convolution may take when they are formed.
MAX_MAP_BYTES = 2**32


class MethodMap(NamedTuple):
    """Attention of a layer with a method `attention`, which is called on demand with the inputs of the layer."""

    layer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str = ""
    shape: tuple[int, int] | None = None

    @property
    def logits(self) -> AppliedAttention | None:
        """The scores of the layer's softmax, None where they are not known."""
        return _scores(self.layer, *self.args, **self.kwargs)

    def map(self) -> Tensor:
        """Return the attention map. Shape: -> (B, nh, Nq, Nk)"""
        if isinstance(self.layer, TapHeads):
            _check_size(self.name, self.layer, self.args[0])
        return self.layer.attention(*self.args, **self.kwargs)

    def row(self, query: int) -> Tensor:
        """Return the attention of one query. Shape: -> (B, nh, Nk)"""
        if isinstance(self.layer, TapHeads):
            return cast(Any, self.layer).attention(self.args[0], query)[:, :, 0]
        return torch.cat([maps[:, :, query] for maps in self.chunks()])

    def images(self, start: int, stop: int) -> "MethodMap":
        """Return the attention of images start to stop, with these rows of every input that has one row an image."""
        count = len(self.args[0])

        def part(value: Any) -> Any:
            if isinstance(value, Tensor) and value.ndim > 1 and len(value) == count:
                return value[start:stop]
            return value

        kwargs = {name: part(value) for name, value in self.kwargs.items()}
        return MethodMap(self.layer, tuple(map(part, self.args)), kwargs, self.name)

    def chunks(self) -> Iterator[Tensor]:
        """Yield the maps of a few images at a time. Shape: (b, nh, Nq, Nk) each"""
        first = self.images(0, 1).map()
        yield first
        count = images_per_chunk(*first.shape[1:])
        for start in range(1, len(self.args[0]), count):
            yield self.images(start, start + count).map()


def _check_size(name: str, layer: Any, x: Tensor) -> None:
    queries = math.prod(layer.query_grid(*x.shape[2:]))
    keys = math.prod(layer.key_grid(*x.shape[2:]))
    size = x.element_size() * len(x) * layer.num_heads * queries * keys
    if size > MAX_MAP_BYTES:
        raise UserError(
            f"the attention maps of {name or type(layer).__name__} ({len(x)} x {layer.num_heads} heads, {queries:,} "
            f"queries, {keys:,} keys) take {size / 2**30:.1f} GiB of the {MAX_MAP_BYTES / 2**30:.0f} GiB allowed; use "
            "smaller or fewer images, select other layers, or look at one query with iso.analysis.attention_from"
        )


def _scores(layer: Any, *args: Any, **kwargs: Any) -> AppliedAttention | None:
    """Return the scores of a layer: those of its method `content_scores`, or of timm's Attention; else None."""
    if hasattr(layer, "content_scores"):
        return AppliedAttention(*layer.content_scores(*args, **kwargs))
    if isinstance(layer, Attention):
        return AppliedAttention(*content_scores(layer, *args, **kwargs))
    return None


def has_attention_method(layer: nn.Module) -> bool:
    """True for a layer whose class has a method `attention`, which computes its map on demand."""
    return callable(getattr(type(layer), "attention", None))


class LayerCall(NamedTuple):
    """One call of a layer: its name, the tokens first among its arguments, and the shape of the map that they are from.

    The map is the input with four axes of the nearest module around the layer; () if there is none.
    """

    name: str
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    map_shape: tuple[int, ...] = ()

    @classmethod
    def from_module_call(cls, call: ModuleCall, around: tuple[int, ...] = ()) -> "LayerCall":
        """Return a call with its tokens first: the argument `x`, or the first, where all are given by name."""
        args = call.args
        named = dict(call.kwargs)
        if not args:
            first = "x" if "x" in named else next(iter(named), "x")
            args = (named.pop(first, None),)
        if getattr(args[0], "ndim", 0) == 4:
            around = tuple(args[0].shape)
        return cls(call.name, call.module, args, named, around)


@contextmanager
def _plain_attention(model: nn.Module) -> Iterator[None]:
    """Context in which layers run in the form that has a map of all tokens: not fused, or with masked windows."""
    layers: list[Any] = list(model.modules())
    with ExitStack() as changes:
        for layer in layers:
            facts = facts_of(layer)
            if facts and facts.plain:
                changes.enter_context(replaced_attribute(layer, "scale", score_scale(layer)))
                changes.enter_context(replaced_attribute(layer, "fused_attn", False))
            if isinstance(layer, WindowAttention) and not layer.no_map:
                changes.enter_context(replaced_attribute(layer, "pruned", False))
        yield


@torch.no_grad()
def run_observed(
    model: nn.Module,
    batch: Inputs,
    before: Notice | None = None,
    after: Notice | None = None,
    names: Iterable[str] | None = None,
) -> None:
    """Run the model in eval mode, not compiled, and show the calls of the named modules to `before` and `after`.

    Raises: UserError unless the batch is a tensor, or a dictionary of arguments.
    """
    watching = observing(model, before, after, names)
    with watching, eval_mode(model), torch.compiler.set_stance("force_eager"):
        run_model(model, batch)


def capture_inputs(
    model: nn.Module, batch: Inputs, measure: Callable[..., Any], names: Iterable[str]
) -> dict[str, Any]:
    """Return `measure(layer, *inputs)` for every named layer, on the inputs that it receives in the model."""
    results: dict[str, Any] = {}

    def before(call: ModuleCall) -> None:
        results[call.name] = measure(call.module, *call.args, **call.kwargs)

    run_observed(model, batch, before, names=names)
    return results


_Measure = Callable[[LayerCall, Any], Any]


class _Capture:
    """The hooks by which `ReadMaps` knows which layer runs; `results` of the measured layers by name."""

    def __init__(self, measure: _Measure, where: Where) -> None:
        self.measure = measure
        self.where = where
        self.mode = ReadMaps()
        # None: what runs inside is not a layer's own attention
        self.calls: list[LayerCall | None] = []
        self.results: dict[str, Any] = {}
        self.measured: list[str] = []
        self.others: list[str] = []
        self.reasons: list[str] = []

    def enter(self, entered: ModuleCall) -> None:
        name = entered.name
        layer = entered.module
        inside = False
        if self.calls:
            outer = self.calls[-1]
            inside = outer is None or has_attention_method(outer.layer)
        facts = facts_of(layer)
        reason = (facts and facts.no_map) or getattr(layer, "no_map", None)
        if reason and matches_where(self.where, name, layer):
            self.reasons.append(f"{name} ({type(layer).__name__}) {reason}")
        call = None
        if not (reason or inside):
            map_shape = next(
                (outer_call.map_shape for outer_call in reversed(self.calls) if outer_call), ()
            )
            call = LayerCall.from_module_call(entered, map_shape)
        self.calls.append(call)
        layout = facts.layout(layer) if facts else None
        self.mode.enter(
            heads_of(layer, facts), layout, ignore=call is None or has_attention_method(layer)
        )

    def leave(self, ended: ModuleCall) -> None:
        name = ended.name
        call = self.calls.pop()
        attention: AppliedAttention | MethodMap | None = self.mode.leave()
        if call and has_attention_method(call.layer):
            attention = MethodMap(call.layer, call.args, call.kwargs, name)
        if call is None or attention is None:
            return
        if not matches_where(self.where, name, call.layer):
            self.others.append(name)
            return
        self.measured.append(name)
        self.calls.append(None)  # operations of `measure` are not the model's
        self.mode.enter(ignore=True)
        result = self.measure(call, attention)
        self.calls.pop()
        self.mode.leave()
        if result is not None:
            self.results[name] = result

    def missing(self) -> str:
        """Return why no attention was measured."""
        if self.reasons:
            return self.reasons[0]
        if self.others:
            return f"{describe_where(self.where)} matches no attention layer{nearest_names(self.where, self.others)}"
        return (
            "the model has no attention layer with a known map; recast it first, or let it attend by torch's softmax "
            "or scaled_dot_product_attention, not by a kernel that hides it (flex_attention, xformers, flash-attn)"
        )


@torch.no_grad()
def capture_attention(
    model: nn.Module,
    batch: Inputs,
    measure: _Measure,
    where: Where = "*",
) -> dict[str, Any]:
    """Return `measure(call, attention)` for every selected attention layer, in the order of the forward, in eval mode.

    It is called as soon as the layer has run. Of a layer that runs several times the last call counts. Layers for which
    `measure` returns None are left out.

    Raises: UserError if no selected layer has an attention map, with the names of layers that have, or the reason.
    """
    model = unwrap(model, to_copy=False)
    capture = _Capture(measure, where)
    layers = [name for name, part in model.named_modules() if not isinstance(part, _TRANSPARENT)]
    with _plain_attention(model), capture.mode:
        run_observed(model, batch, capture.enter, capture.leave, layers)
    if not capture.measured:
        raise UserError(capture.missing())
    return capture.results
