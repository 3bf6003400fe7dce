"""ConViT: a ViT whose first blocks use gated positional self-attention (GPSA), initialised as convolutions.

The class token is added after these blocks, and only patches have absolute positions, which are optional.
"""

from functools import partial
from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.models import generate_default_cfgs, vision_transformer
from timm.models.vision_transformer import Block
from torch import Tensor

from isomorph.errors import UserError
from isomorph.layers import GPSA, PSA
from isomorph.layers.grid import GridSize
from isomorph.models.base import (
    State,
    Variant,
    build_variant,
    image_cfg,
    register_variants,
    unwrap_state_dict,
)
from isomorph.models.blockwise import BlockwiseViT

# Attention layers for the first blocks: two softmaxes and a gate (gpsa, eq. 7), or one softmax
# (psa, eq. 4).
LOCAL_ATTENTION: dict[str, type[GPSA] | type[PSA]] = {"gpsa": GPSA, "psa": PSA}


class LocalBlock(Block):
    """A ViT block with GPSA or PSA as its attention; `forward` also takes the grid size.

    Shape: x (B, H W, C) -> (B, H W, C)
    Source: ConViT Fig. 4 and eq. 5; `local_init=False` is the random initialisation of Table 3 (c, d, g)
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        locality_strength: float = 1.0,
        gate: float = 1.0,
        local_init: bool = True,
        local_attention: str = "gpsa",
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        attention_kwargs = {
            name: kwargs[name] for name in ("qkv_bias", "proj_drop") if name in kwargs
        }
        attention = LOCAL_ATTENTION[local_attention](dim, num_heads, **attention_kwargs)
        self.attn = attention.to(device=kwargs.get("device"), dtype=kwargs.get("dtype"))
        self.locality_strength = locality_strength
        self.gate = gate
        self.local_init = local_init
        if not local_init:
            self.attn.v.reset_parameters()
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise positions, values and gates; timm calls this after it has initialised the linear layers."""
        if self.local_init:
            self.attn.reset_attention(self.locality_strength)
        else:
            trunc_normal_(self.attn.position, std=0.02)
        if isinstance(self.attn, GPSA):
            self.attn.set_gating(gate=self.gate)

    reset_parameters = init_weights

    def forward(self, x: Tensor, grid_size: GridSize) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), grid_size)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class ConViT(BlockwiseViT):
    """Vision transformer whose first attention layers are initialised as convolutions, with timm's interface.

    The first `local_up_to_layer` blocks use GPSA (0: a plain ViT), or PSA, with one softmax and no gates, if
    `local_attention` is "psa". `locality_strength` and `gate` (lambda, before the sigmoid) are initial values;
    `local_init=False` initialises centres and values randomly. Other arguments are those of VisionTransformer.

    Shape: x (B, in_chans, height, width) -> (B, num_classes); height and width are multiples of the patch size, or any
    with `dynamic_img_pad=True`
    Source: ConViT section 3; differs: images of any size and aspect ratio; no weight decay on positions and gates
    Raises: UserError if num_heads is not a square number, if no block is left for the class token, or for an argument
        that GPSA does not support.
    """

    unsupported = (
        "patch_drop_rate",
        "attn_drop_rate",
        "reg_tokens",
        "qk_norm",
        "scale_attn_norm",
        "attn_layer",
    )

    def __init__(
        self,
        local_up_to_layer: int = 10,
        locality_strength: float = 1.0,
        gate: float = 1.0,
        local_init: bool = True,
        use_pos_embed: bool = True,
        local_attention: str = "gpsa",
        **kwargs: Any,
    ) -> None:
        depth = kwargs.get("depth", 12)
        heads = kwargs.get("num_heads", 12)
        if local_up_to_layer and not kwargs.get("proj_bias", True):
            raise UserError(
                "proj_bias=False is not supported by ConViT, whose GPSA has this bias; leave it out"
            )
        if local_attention not in LOCAL_ATTENTION:
            raise UserError(
                f"local_attention {local_attention!r} is unknown; use {' or '.join(LOCAL_ATTENTION)}",
            )
        if local_up_to_layer and round(heads**0.5) ** 2 != heads:
            raise UserError(
                f"num_heads {heads} is not a square number, which a ConViT needs; use 1, 4, 9, 16, ...",
            )
        if local_up_to_layer >= depth and kwargs.get("class_token", True):
            raise UserError(
                f"local_up_to_layer {local_up_to_layer} of {depth} leaves no block for the class token; "
                "lower it, or set class_token=False and global_pool='avg'"
            )
        local: dict[str, Any] = dict(
            locality_strength=locality_strength,
            gate=gate,
            local_init=local_init,
            local_attention=local_attention,
        )

        def block(depth: int, dim: int, num_heads: int, **arguments: Any) -> Block:
            if depth >= local_up_to_layer:
                return Block(dim, num_heads, **arguments)
            return LocalBlock(dim, num_heads, **local, **arguments)

        pos_embed = "learn" if use_pos_embed else "none"
        super().__init__(
            **{"qkv_bias": False, **kwargs},
            no_embed_class=True,
            block_fn=block,
            pos_embed=pos_embed,
        )
        self.local_up_to_layer = local_up_to_layer
        self.update_grid()

    def is_foreign(self, state: State) -> bool:
        """Return True for the names of the authors' and timm's code."""
        return any(name.endswith(".attn.pos_proj.weight") for name in state)

    def prefix_tokens(self) -> list[Tensor]:
        """Return no tokens: the class token joins later."""
        return []

    def run_block(
        self,
        i: int,
        x: Tensor,
        maps: None,
        grid_size: GridSize,
    ) -> tuple[Tensor, None]:
        """Run block i; add the class token before the first plain one. Shape: x (B, N, C) -> (B, N or N + 1, C)"""
        if i == self.local_up_to_layer and self.cls_token is not None:
            class_tokens = self.cls_token.expand(x.shape[0], -1, -1)
            x = torch.cat([class_tokens, x], dim=1)
        if i < self.local_up_to_layer:
            return self.call_block(i, x, grid_size), None
        return self.call_block(i, x), None


def checkpoint_filter_fn(state_dict: dict[str, Any], model: Any) -> dict[str, Any]:
    """Convert a checkpoint of the authors, timm's convit_* or isomorph, resizing its positions from a square grid."""
    state = {}
    for name, tensor in unwrap_state_dict(state_dict).items():
        # which is constant along the softmax, and has no effect
        if not name.endswith("pos_proj.bias"):
            name = name.replace("gating_param", "gate").replace("pos_proj.weight", "position")
            state[name] = tensor
    return vision_transformer.checkpoint_filter_fn(state, model)


# ConViT Table 1: 48 channels per head, and 64 in the `_plus` variants.
VARIANTS = {
    "convit_ti": Variant(dict(num_heads=4, embed_dim=192), "5.7M parameters, 73.1 top-1"),
    "convit_s": Variant(dict(num_heads=9, embed_dim=432), "27.8M parameters, 81.3 top-1"),
    "convit_b": Variant(dict(num_heads=16, embed_dim=768), "86.5M parameters, 82.4 top-1"),
    "convit_ti_plus": Variant(dict(num_heads=4, embed_dim=256), "10.0M parameters, 76.7 top-1"),
    "convit_s_plus": Variant(dict(num_heads=9, embed_dim=576), "49.0M parameters, 82.2 top-1"),
    "convit_b_plus": Variant(dict(num_heads=16, embed_dim=1024), "153.1M parameters, 82.5 top-1"),
}

# timm's names of the variants with published weights, which the `_plus` variants do not have.
TIMM_NAMES = {"convit_ti": "convit_tiny", "convit_s": "convit_small", "convit_b": "convit_base"}


def _all_cfgs() -> dict[str, Any]:
    cfgs = {}
    for name in VARIANTS:
        if name in TIMM_NAMES:
            published = f"timm/{TIMM_NAMES[name]}.fb_in1k"
            cfgs[f"{name}.fb_in1k"] = image_cfg(hf_hub_id=published, license="apache-2.0")
        else:
            cfgs[name] = image_cfg()
    return cfgs


default_cfgs = generate_default_cfgs(_all_cfgs())
register_variants(__name__, partial(build_variant, ConViT), VARIANTS)
