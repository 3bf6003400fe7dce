"""Rule that gives the attention of a ViT a table of relative positions (CoAtNet)."""

from dataclasses import dataclass

import torch
from timm.layers import Attention

from isomorph.layers import ViTRelativeAttention
from isomorph.layers.attention_base import like_attention
from isomorph.layers.grid import GridSize
from isomorph.surgery.grid_hooks import GridRule
from isomorph.surgery.rule import check_bool, register_rule
from isomorph.surgery.rules.gated_attention import attention_mismatch
from isomorph.surgery.site import Site


@register_rule
@dataclass(frozen=True)
class AttentionToRelative(GridRule):
    """Give the attention of a ViT a table of relative positions that starts at zero (CoAtNet).

    Accepts timm's Attention with any number and width of heads, norms, gate and dropout. Each head learns a scalar for
    every offset between two grid positions, added to its scores: CoAtNet eq. 3. The table starts at zero, so that the
    layer computes what it computed, and is resized to the grid of every image; the layer's `set_grid_size` resizes it
    for good, after timm's `set_input_size`. Class and register tokens have no position and get no bias, or with
    `prefix_bias` one of their own. `ViTRelativeAttention.to_attention()`, or `iso.revert`, converts back while all
    biases are zero.

    Where `grid_size` or `prefix_tokens` is None it is read from the model's `patch_embed`.

    Source: CoAtNet eq. 3 (pre)
    Raises: UserError for a field out of range; from `recast`, for an attention layer that it does not accept.

    Example:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval()
        >>> relative = iso.recast(vit, iso.AttentionToRelative(), where="blocks.*.attn")
        >>> tuple(relative.blocks[0].attn.relative_bias.shape)  # heads, rows and columns of offsets
        (3, 3, 3)
        >>> iso.verify(vit, relative, torch.randn(1, 3, 32, 32)).passed
        True
    """

    grid_size: GridSize | None = None
    """Height and width of the grid of tokens; by default the model's."""

    prefix_tokens: int | None = None
    """Number of class and register tokens before the grid; by default the model's."""

    prefix_bias: bool = False
    """Learn three scalars per head for scores from and to class and register tokens too, as in BEiT."""

    atol = 1e-4
    kind = (Attention,)

    def __post_init__(self) -> None:
        self.check_grid_fields()
        check_bool("prefix_bias", self.prefix_bias)

    def reason(self, site: Site) -> str | None:
        """Return why the module cannot be recast, or None if it can."""
        return attention_mismatch(site.module) or self.grid_reason(site)

    @torch.no_grad()
    def build(self, site: Site) -> ViTRelativeAttention:
        """Return the relative attention. Raises: UserError if the module is not accepted."""
        self.check(site)
        grid = self.grid_at(site)
        return like_attention(
            site.module,
            ViTRelativeAttention,
            grid_size=grid.size,
            prefix_tokens=grid.prefix_tokens,
            prefix_bias=self.prefix_bias,
        )
