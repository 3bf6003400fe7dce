"""Rule by which the global attention of a ViT becomes attention in windows."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.layers.grid import GridSize, fit_grid
from isomorph.layers.modes import first_float
from isomorph.layers.window import (
    TokenWindows,
    attend_in_padded_windows,
    attend_in_windows,
    attend_with_share,
    limit_bias,
)
from isomorph.operations import FollowMaps, FusedCall, TensorVersion, value_of
from isomorph.surgery.altered import copy_as
from isomorph.surgery.attention_layers import attention_facts, calls_fused_attention
from isomorph.surgery.edited_attention import AlteredAttention, alter, edit_reason, own_shapes
from isomorph.surgery.grid_hooks import AnyAttentionRule
from isomorph.surgery.observed_scores import TokenGrids, fused_scale, observe_calls, observe_scores
from isomorph.surgery.rule import check_int, register_rule
from isomorph.surgery.site import Site, TokenGrid

# Side of a window in tokens.
SIDE = (1, 4096)

_SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)


class _Attend(FollowMaps):
    """Torch function mode that limits the attention of a layer to its windows, wherever its scores are."""

    def __init__(self, layer: Any, shapes: list[GridSize]) -> None:
        super().__init__()
        self.layer = layer
        self.shapes = shapes
        self.has_scores = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SOFTMAX:
            args = self._with_share(args)
        return super().__torch_function__(func, types, args, kwargs)

    def _with_share(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a softmax, with log m added to the scores of all pairs of tokens."""
        if not args or args[0].ndim < 3 or args[0].shape[-2] != args[0].shape[-1]:
            return args
        scores = args[0]
        grid, prefix = fit_grid(scores.shape[-1], self.shapes, self.layer.prefix_tokens)
        self.has_scores = True
        if self.layer._is_global:
            return args
        windows = TokenWindows(grid, self.layer.window, prefix)
        return scores + windows.log_share(self.layer.share, scores), *args[1:]

    def at_fused(self, call: FusedCall) -> Tensor:
        """Compute fused attention within the windows."""
        layer = self.layer
        if call.is_causal or call.query.shape[:-1] != call.key.shape[:-1]:
            needs = "windows need self-attention that is not causal, with keys of its own for each token and head"
            raise ValueError(f"{layer.original.__name__}: {needs}; leave it out of where")
        grid, prefix = fit_grid(call.query.shape[-2], self.shapes, layer.prefix_tokens)
        self.has_scores = True
        if layer._is_global:
            return super().at_fused(call)
        out = self._attend_in(_with_four_axes(call), grid, prefix)
        return out.reshape(*call.query.shape[:-1], out.shape[-1])

    def _attend_in(self, call: FusedCall, grid: GridSize, prefix: int) -> Tensor:
        """Return the values that the windows weigh. Shape: -> (B, nh, N, hd)"""
        layer = self.layer
        has_open_size = not all(isinstance(side, int) for side in grid)
        is_open = torch.compiler.is_exporting() and call.attn_mask is None and has_open_size
        if layer.pruned and not is_open:
            # the number of windows is a constant of a traced graph
            grid = (int(grid[0]), int(grid[1]))
        windows = TokenWindows(grid, layer.window, prefix)
        scale = call.scale if layer.fused_scale is None else layer.fused_scale
        attend = partial(F.scaled_dot_product_attention, dropout_p=call.dropout_p, scale=scale)
        q, k, v = call.query, call.key, call.value
        if layer.pruned and is_open:
            return attend_in_padded_windows(attend, q, k, v, windows)
        if layer.pruned:
            return attend_in_windows(attend, q, k, v, call.attn_mask, windows)
        return attend_with_share(attend, q, k, v, call.attn_mask, windows, layer.share)


def _with_four_axes(call: FusedCall) -> FusedCall:
    """Return a call on (B nh, N, hd) as one on (B nh, 1, N, hd), and one on (B, windows, nh, N, hd) on all windows."""
    axes = call.query.ndim
    if axes == 4:
        return call

    def reshaped(x: Tensor) -> Tensor:
        if x.ndim < axes:  # a mask that is the same for all
            return x
        return x[:, None] if axes == 3 else x.flatten(0, axes - 4)

    return replace(
        call,
        query=reshaped(call.query),
        key=reshaped(call.key),
        value=reshaped(call.value),
        attn_mask=None if call.attn_mask is None else reshaped(call.attn_mask),
    )


class WindowAttention(AlteredAttention):
    """Mixin for scores plus log(share) outside of windows: share 1 is global; `pruned` layers compute windows alone.

    `fused_scale` is the scale by which a layer of timm that forms its scores computes the same when it is fused, or
    None. Pruned layers that form their scores, as with transformers' eager attention, keep the mask.
    """

    window: int
    share: Tensor
    _is_global: bool
    _last_share: TensorVersion
    _is_checked: bool
    pruned: bool
    fused_scale: float | None
    added = (
        *AlteredAttention.added,
        "window",
        "share",
        "_is_global",
        "_last_share",
        "_is_checked",
        "pruned",
        "fused_scale",
    )

    @property
    def no_map(self) -> str | None:
        """Why a map of all tokens cannot be formed, or None: `to_windows` limits a relative bias."""
        if self.pruned and hasattr(getattr(self, "rel_pos", None), "relative_position_index"):
            return "has lost the relative bias outside of its windows; look at the model before iso.prune"
        return None

    def set_share(self, share: float) -> None:
        """Set the share of what is outside of the window, from 0 (windows alone) to 1 (global attention)."""
        self.share.fill_(share)
        self._is_global = share == 1  # without waiting for a GPU
        self._last_share = value_of(self.share)

    def _is_open(self) -> bool:
        """Whether the share is 1, also after averages or copies of the model wrote the buffer."""
        if torch.compiler.is_compiling() or self.share.is_meta:
            return self._is_global
        if self._last_share != value_of(self.share):
            self._last_share = value_of(self.share)
            self._is_global = bool(self.share == 1)
        return self._is_global

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]
        if self.pruned and not self.share.is_meta:
            self.set_share(0.0)
        self._is_open()  # compiled code reads _is_global, not the buffer

    def forward(self, *args: Any, grid_size: GridSize | None = None, **kwargs: Any) -> Any:
        if self._is_open() and (self._is_checked or torch.compiler.is_compiling()):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        mode = _Attend(self, self.shapes(grid_size, self.arguments_by_name(args, kwargs)))
        with mode:
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not mode.has_scores:
            problem = f"the scores of {self.original.__name__} were not seen in this call, so it has no windows"
            if self.facts.interface:
                problem += '; call model.set_attn_implementation("sdpa")'
            raise ValueError(problem)
        self._is_checked = True
        return out

    def to_attention(self, atol: float = 0.0) -> nn.Module:
        """Return the layer with global attention. Raises: ValueError if its share is not 1, unless atol is infinite."""
        if self.pruned or not (self._is_open() or atol == float("inf")):
            raise ValueError(
                f"this layer is not global attention: its share is {self.share.item():g}; keep it"
            )
        return self.plain()

    def to_windows(self) -> nn.Module:
        """Return the layer that computes windows alone, whatever its share."""
        layer: Any = copy_as(cast(Any, self), cast(Any, type(self)))
        layer.pruned = True
        layer.set_share(0.0)
        if layer.fused_scale is not None:
            layer.fused_attn = True
        if hasattr(getattr(layer, "rel_pos", None), "relative_position_index"):
            limit_bias(layer.rel_pos, TokenWindows(layer.rel_pos.window_size, layer.window))
        return layer


@register_rule
@dataclass(frozen=True)
class AttentionToWindow(AnyAttentionRule):
    """Give the global attention of a ViT windows to which an anneal limits it, for large images.

    Accepts self-attention of any class that calls `scaled_dot_product_attention`, with RoPE, a bias, class and register
    tokens. Scores get log m: m = 1 in the query's window of `window` x `window` tokens, and from and to prefix tokens;
    m = share elsewhere. At first share is 1: the attention as it is. `iso.Anneal(steps)` moves it to 0 in fine-tuning;
    `iso.prune` then computes the windows alone: exactly, without padding, at a cost linear in the number of tokens.
    Select blocks with `where`, so that others stay global. `iso.revert` converts back while the share is 1.

    Where `grid_size` or `prefix_tokens` is None it is read from the model; the grid then follows the size of every
    image.

    Source: not of a paper; windows of ViTDet (Li et al., 2022) section 3
    Raises: UserError for a field out of range; from `recast`, for an attention layer that it does not accept.

    Example:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()
        >>> new = iso.recast(vit, iso.AttentionToWindow(window=2), where="blocks.0.attn")
        >>> iso.verify(vit, new, torch.randn(1, 3, 64, 64)).fp32
        0.0
        >>> iso.Anneal(steps=10).apply(new, step=10)
        >>> iso.prune(new).blocks[0].attn.pruned
        True
    """

    window: int = 8
    """Side of the windows in tokens."""

    grid_size: GridSize | None = None
    """Height and width of the grid of tokens; by default the model's."""

    prefix_tokens: int | None = None
    """Number of class and register tokens before the grid; by default the model's."""

    atol = 1e-5

    def __post_init__(self) -> None:
        check_int("window", self.window, SIDE)
        self.check_grid_fields()

    def reason(self, site: Site) -> str | None:
        """Return why the module cannot be recast, or None if it can."""
        module = site.module
        reason = edit_reason(module)
        if reason:
            return reason
        facts = attention_facts(type(module))
        if facts is None or not calls_fused_attention(type(module)):
            return f"{type(module).__name__} never calls scaled_dot_product_attention"
        reason = facts.grid_reason(module) or facts.query_reason
        if reason:
            return reason
        grid = self.grid_at(site)
        window_sizes = own_shapes(module, {})
        if window_sizes and grid.size and window_sizes[0] != grid.size:
            return f"it attends in windows of {window_sizes[0][0]} x {window_sizes[0][1]} already"
        config = getattr(module, "config", None)
        if getattr(config, "num_key_value_heads", None) not in (
            None,
            getattr(config, "num_attention_heads", None),
        ):
            return "its queries share keys (grouped-query attention)"
        scores = site.once(observe_calls).get(module) or observe_scores(
            module, _grids_of(module, grid)
        )
        if scores and scores.mismatch:
            return scores.mismatch
        return None if grid.from_image else self.grid_reason(site)

    @torch.no_grad()
    def build(self, site: Site) -> nn.Module:
        """Return the layer, with share 1. Raises: UserError with the reason if the module is not accepted."""
        self.check(site)
        module = site.module
        grid = self.grid_at(site)
        layer = alter(module, WindowAttention, grid.size, grid.prefix_tokens)
        layer.fused_scale = fused_scale(module, _grids_of(module, grid))
        layer.register_buffer("share", torch.ones((), device=first_float(module).device))
        layer.window = self.window
        layer.pruned = False
        layer._is_global = True
        layer._is_checked = False
        layer._last_share = (0, 0)
        return layer


def _grids_of(module: nn.Module, grid: TokenGrid) -> TokenGrids:
    """Return the sizes that the tokens of a layer may have, each with its prefix tokens."""
    prefixes = dict.fromkeys((grid.prefix_tokens or 0, 0, 1))
    sizes = own_shapes(module, {})
    if grid.size is not None:
        sizes.append(grid.size)
    return [(size, prefix) for size in sizes for prefix in prefixes]
