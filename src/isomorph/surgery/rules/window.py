"""Rule by which the global attention of a ViT becomes attention in windows."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.layers.grid import GridSize, fit_grid
from isomorph.layers.modes import first_float
from isomorph.layers.window import Windows, attend_in_padded_windows, attend_in_windows, attend_with_share, limit_bias
from isomorph.operations import FollowMaps, FusedCall, Value, value_of
from isomorph.surgery.attention_layers import attention_facts, calls_fused_attention
from isomorph.surgery.edited_attention import AlteredAttention, AnyAttention, alter, edit_reason, own_shapes
from isomorph.surgery.grid_hooks import GridRule
from isomorph.surgery.rule import check_int, register_rule

# Side of a window in tokens.
SIDE = (1, 4096)


class _Attend(FollowMaps):
    def __init__(self, layer: Any, shapes: list[GridSize]) -> None:
        super().__init__()
        self.layer, self.shapes, self.seen = layer, shapes, False

    def at_fused(self, call: FusedCall) -> Tensor:
        q, k, layer = call.query, call.key, self.layer
        if call.is_causal or q.ndim != 4 or q.shape[:3] != k.shape[:3]:
            needs = "windows need self-attention that is not causal, with keys of its own for each token and head"
            raise ValueError(f"{layer.original.__name__}: {needs}; leave it out of where")
        grid, prefix = fit_grid(q.shape[2], self.shapes, layer.prefix_tokens)
        if layer._is_global:
            self.seen = True
            return super().at_fused(call)
        is_open = torch.compiler.is_exporting() and call.attn_mask is None and not all(isinstance(n, int) for n in grid)
        if layer.pruned and not is_open:
            grid = int(grid[0]), int(grid[1])  # the number of windows is a constant of a traced graph
        self.seen, windows = True, Windows(grid, layer.window, prefix)
        attend = partial(F.scaled_dot_product_attention, dropout_p=call.dropout_p, scale=call.scale)
        if layer.pruned and is_open:
            return attend_in_padded_windows(attend, q, k, call.value, windows)
        if layer.pruned:
            return attend_in_windows(attend, q, k, call.value, call.attn_mask, windows)
        return attend_with_share(attend, q, k, call.value, call.attn_mask, windows, layer.share)


class WindowAttention(AlteredAttention):
    """Mixin for scores plus log(share) outside of windows: share 1 is global; `pruned` layers compute windows alone."""

    window: int
    share: Tensor
    _is_global: bool
    _share_seen: Value
    _is_checked: bool
    pruned: bool
    added = (*AlteredAttention.added, "window", "share", "_is_global", "_share_seen", "_is_checked", "pruned")

    @property
    def no_map(self) -> str | None:
        """Why a map of all tokens cannot be formed, or None: `to_windows` limits a relative bias."""
        limited = self.pruned and hasattr(getattr(self, "rel_pos", None), "relative_position_index")
        return "has lost the relative bias outside of its windows; look at the model before iso.prune" * limited or None

    def set_share(self, share: float) -> None:
        """Set the share of what is outside of the window, from 0 (windows alone) to 1 (global attention)."""
        self.share.fill_(share)
        self._is_global, self._share_seen = share == 1, value_of(self.share)  # without waiting for a GPU

    def _is_open(self) -> bool:
        """Whether the share is 1, also after averages or copies of the model wrote the buffer."""
        if not torch.compiler.is_compiling() and self._share_seen != value_of(self.share) and not self.share.is_meta:
            self._share_seen, self._is_global = value_of(self.share), bool(self.share == 1)
        return self._is_global

    def forward(self, *args: Any, grid_size: GridSize | None = None, **kwargs: Any) -> Any:
        if self._is_open() and (self._is_checked or torch.compiler.is_compiling()):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        mode = _Attend(self, self.shapes(grid_size, self.given(args, kwargs)))
        with mode:
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not mode.seen:
            name, interface = self.original.__name__, '; call model.set_attn_implementation("sdpa") before recasting it'
            hint = interface if self.facts.interface else ""
            raise ValueError(f"{name} did not call scaled_dot_product_attention in this call{hint}")
        self._is_checked = True
        return out

    def to_attention(self, atol: float = 0.0) -> nn.Module:
        """Return the layer with global attention. Raises: ValueError if its share is not 1, unless atol is infinite."""
        if self.pruned or not (self._is_open() or atol == float("inf")):
            raise ValueError(f"this layer is not global attention: its share is {self.share.item():g}; keep it")
        return self.plain()

    def to_windows(self) -> nn.Module:
        """Return the layer that computes windows alone, whatever its share."""
        layer: Any = copy.deepcopy(self)
        layer.pruned = True
        layer.set_share(0.0)
        if hasattr(getattr(layer, "rel_pos", None), "relative_position_index"):
            limit_bias(layer.rel_pos, Windows(layer.rel_pos.window_size, layer.window))
        return layer


@register_rule
@dataclass(frozen=True)
class AttentionToWindow(GridRule):
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

    grid_size: tuple[int, int] | None = None
    """Height and width of the grid of tokens; by default the model's."""

    prefix_tokens: int | None = None
    """Number of class and register tokens before the grid; by default the model's."""

    atol: ClassVar[float] = 1e-5
    kind: ClassVar[tuple[type[nn.Module], ...]] = (AnyAttention,)

    def __post_init__(self) -> None:
        check_int("window", self.window, SIDE)
        self.check_grid_fields()

    def reason(self, module: nn.Module) -> str | None:
        """Return why the module cannot be recast, or None if it can."""
        if reason := edit_reason(module):
            return reason
        facts = attention_facts(type(module))
        if facts is None or not calls_fused_attention(type(module)):
            return f"{type(module).__name__} never calls scaled_dot_product_attention"
        if reason := facts.grid_reason(module) or facts.query_reason:
            return reason
        own = own_shapes(module, {})
        if own and self.grid_size and own[0] != self.grid_size:
            return f"it attends in windows of {own[0][0]} x {own[0][1]} already"
        config = getattr(module, "config", None)
        if getattr(config, "num_key_value_heads", None) not in (None, getattr(config, "num_attention_heads", None)):
            return "its queries share keys (grouped-query attention)"
        return None if self.grid_from_image else self.grid_reason()

    @torch.no_grad()
    def build(self, module: nn.Module) -> nn.Module:
        """Return the layer, with share 1. Raises: UserError with the reason if the module is not accepted."""
        self.check(module)
        layer = alter(module, WindowAttention, self.grid_size, self.prefix_tokens, True)
        layer.register_buffer("share", torch.ones((), device=first_float(module).device))
        layer.window, layer._is_global, layer._is_checked, layer.pruned = self.window, True, False, False
        layer._share_seen = (0, 0)
        return layer
