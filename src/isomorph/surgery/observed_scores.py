"""What attention layers compute from queries and keys, seen in a trial call of a copy of the model or of the layer.

A model is called with an image without values, on the meta device; a layer alone with made-up tokens on small grids.
Models and layers that do not take such inputs are not seen.
"""

import copy
import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.grid import GridSize
from isomorph.layers.modes import first_float, noise
from isomorph.operations import FollowMaps, FusedCall, observing
from isomorph.operations.observe import Running
from isomorph.spec import image_size, spec_of
from isomorph.surgery.altered import copy_as
from isomorph.surgery.attention_layers import attention_facts, calls_fused_attention

# Sizes that the tokens of a layer may have, each with the number of tokens before them.
TokenGrids = Sequence[tuple[GridSize, int]]

# Arguments in which layers of timm receive the size of the feature map of their tokens.
SIZE_NAMES = ("feat_size", "size", "resolution")

# Grids of the trials: small, and large enough for keys that are pooled to an eighth.
_GRIDS = ((4, 4), (16, 16))

# Most tokens of a trial: the map of a layer that forms it has the square of this number of entries.
_MOST_TOKENS = 1024

# Most of the scores that the fit of a scale may leave unexplained; those of two different functions leave far more.
_LARGEST_RESIDUE = 1e-6


class Scores(NamedTuple):
    """The first scores of a call: arguments of `scaled_dot_product_attention`, or the input of the layer's softmax."""

    fused: FusedCall | None = None
    logits: Tensor | None = None

    @property
    def mismatch(self) -> str | None:
        """Why the layer is not self-attention in which each head has its own keys, or None if it is."""
        if self.fused is not None and self.fused.is_causal:
            return "it is causal"
        if self.fused is not None:
            queries, keys = self.fused.query, self.fused.key
            has_equal_tokens = queries.shape[:-1] == keys.shape[:-1]
        else:
            assert self.logits is not None
            has_equal_tokens = self.logits.shape[-2] == self.logits.shape[-1]
        return (
            None
            if has_equal_tokens
            else "its keys are not those of its queries' tokens, one for each token and head"
        )


class _RecordScores(FollowMaps):
    """Torch function mode that records the first scores of every layer; those of a layer that runs alone under ""."""

    def __init__(self) -> None:
        super().__init__()
        self.running = Running()
        self.scores: dict[str, Scores] = {}

    def _record(self, scores: Scores) -> None:
        self.scores.setdefault(self.running.innermost, scores)

    def at_fused(self, call: FusedCall) -> Tensor:
        self._record(Scores(fused=call))
        return super().at_fused(call)

    def at_softmax(self, logits: Tensor, maps: Tensor) -> None:
        self._record(Scores(logits=logits))


def _on_meta(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer on the meta device, without a copy of its values."""
    config = getattr(layer, "config", None)
    memo: dict[int, Any] = {id(config): config}
    for parameter in layer.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in layer.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(layer, memo)


def _in_float64(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer on the CPU in float64."""
    return copy_as(layer, type(layer)).to("cpu", torch.float64)


def _silence(layer: nn.Module) -> nn.Module:
    """Put a copy in eval mode, without the hooks of its original, and in the form that forms its scores."""
    for module in layer.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        module.training = False
        attention = attention_facts(type(module))
        if attention and attention.form:
            module.__class__ = attention.form
    return layer


def _width(layer: nn.Module) -> int | None:
    """Return the number of channels that a layer reads, from the first of its parts that says it."""
    for module in layer.modules():
        for name in ("embed_dim", "in_features", "in_channels"):
            width = getattr(module, name, None)
            if isinstance(width, int):
                return width
    return None


def _further_arguments(layer: nn.Module, x: Tensor, grid: GridSize) -> dict[str, Any] | None:
    """Return the arguments without a default after the first one, or None if one of them cannot be guessed."""
    arguments: dict[str, Any] = {}
    for parameter in list(inspect.signature(layer.forward).parameters.values())[1:]:
        is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_open or parameter.default is not parameter.empty:
            continue
        if parameter.name in SIZE_NAMES:
            arguments[parameter.name] = list(grid)
        elif parameter.name in ("key", "value"):
            arguments[parameter.name] = x
        else:
            return None
    return arguments


def _trials(layer: nn.Module, grids: TokenGrids) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield inputs that a layer may take: tokens, and feature maps with the channels last and first."""
    width = _width(layer)
    if width is None:
        return
    reference = first_float(layer)
    for (H, W), prefix in grids:
        for shape in ((1, prefix + H * W, width), (1, H, W, width), (1, width, H, W)):
            x = noise(*shape).to(reference)
            arguments = _further_arguments(layer, x, (H, W))
            if arguments is not None:
                yield x, arguments


@torch.no_grad()
def _run(layer: nn.Module, x: Tensor, arguments: dict[str, Any]) -> Scores | None:
    """Return the scores of a layer on an input, or None if it does not take it."""
    mode = _RecordScores()
    with suppress(Exception), warnings.catch_warnings(action="ignore"), mode:
        layer(x, **arguments)  # any layer, which may not take such an input
    return mode.scores.get("")


def _grids_of(grids: TokenGrids) -> TokenGrids:
    """Return the grids of the trials with their prefix tokens: a layer's own, if they are small, and a few others."""
    small = [(grid, prefix) for grid, prefix in grids if grid[0] * grid[1] <= _MOST_TOKENS]
    return [*small, *((grid, 0) for grid in _GRIDS)]


def observe_scores(layer: nn.Module, grids: TokenGrids = ()) -> Scores | None:
    """Return the attention scores that a copy of a layer computes of made-up inputs, or None.

    First tensors have shapes alone (device meta), then values in float64, which some layers need. `grids` are sizes
    that the tokens of the layer may have, and numbers of tokens before them.
    """
    copy_functions = [_on_meta] if first_float(layer).is_meta else [_on_meta, _in_float64]
    for copy_layer in copy_functions:
        try:
            copied = _silence(copy_layer(layer))
        except Exception:  # a layer that cannot be copied
            return None
        for x, arguments in _trials(copied, _grids_of(grids)):
            scores = _run(copied, x, arguments)
            if scores is not None:
                return scores
    return None


def fused_scale(layer: Any, grids: TokenGrids = ()) -> float | None:
    """Return the scale with which the fused form of a layer of timm computes what its plain form does.

    None if the layer runs fused or has no fused form, if a trial call does not tell, and if the two forms differ in
    more than the scale.
    """
    if getattr(layer, "fused_attn", True) or first_float(layer).is_meta:
        return None
    try:
        copied: Any = _silence(_in_float64(layer))
    except Exception:  # a layer that cannot be copied
        return None
    for x, arguments in _trials(copied, _grids_of(grids)):
        copied.fused_attn = False
        plain = _run(copied, x, arguments)
        copied.fused_attn = True
        fused = _run(copied, x, arguments)
        if plain and fused and plain.logits is not None and fused.fused is not None:
            return _fit_scale(plain.logits, fused.fused)
    return None


def _fit_scale(logits: Tensor, call: FusedCall) -> float | None:
    """Return the factor of q k^T by which logits come from it and the mask of a call, or None if they do not."""
    products = call.query @ call.repeated[0].mT
    if products.shape != logits.shape:
        return None
    unmasked = logits
    if call.mask is not None and call.mask.dtype != torch.bool:
        unmasked = logits - call.mask
    scale = (products * unmasked).sum() / products.square().sum()
    residue = (unmasked - scale * products).abs().max() / unmasked.abs().max()
    return scale.item() if residue < _LARGEST_RESIDUE else None


def _image_sizes(model: Any) -> Iterator[tuple[int, ...]]:
    """Yield shapes of images that a model may take: what it says itself, then usual ones."""
    own_size = spec_of(model).input_size or (3,)
    config = getattr(model, "config", None)
    channels = getattr(config, "num_channels", own_size[0])
    embedding_size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    for size in (embedding_size, own_size[1:], getattr(config, "image_size", None), 224, 64, 32):
        with suppress(UserError):  # it says none
            yield channels, *image_size(size)  # type: ignore[arg-type]


@torch.no_grad()
def observe_calls(model: nn.Module) -> dict[nn.Module, Scores]:
    """Return the scores of the attention layers of a model that takes images, with shapes alone, by layer."""
    layers = {
        name: part for name, part in model.named_modules() if calls_fused_attention(type(part))
    }
    if not layers:
        return {}
    try:
        copied = _silence(_on_meta(model))
    except Exception:  # a model that cannot be copied
        return {}
    for shape in _image_sizes(model):
        mode = _RecordScores()
        image = torch.empty(1, *shape, device="meta", dtype=first_float(model).dtype)
        watching = observing(copied, names=layers)
        try:
            with warnings.catch_warnings(action="ignore"), watching as mode.running, mode:
                copied(image)
        except Exception:  # of any model, which does not take images of this size
            continue
        return {layers[name]: scores for name, scores in mode.scores.items() if name in layers}
    return {}
