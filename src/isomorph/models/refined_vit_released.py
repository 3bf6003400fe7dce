"""Refined-ViT as released: the function, the sizes and the keys of the authors' public code and checkpoints.

It differs from the paper's (`refined_vit.py`) in the refiner (`layers/released_refiner.py`), in residual branches that
read half the tokens and are added doubled, in a scale of 1e-5 on the MLP's, and in the head, which counts the patches.
"""

from typing import Any

import torch
from timm.layers import Mlp
from timm.models import generate_default_cfgs, register_model, vision_transformer
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.headed_attention import factory_kwargs
from isomorph.layers.released_refiner import ReleasedAttention, ReleasedReuse
from isomorph.models.conv_embed import ConvPatchEmbed
from isomorph.models.dense_head import DenseHeadViT, classifier_names
from isomorph.models.foreign_checkpoints import ForeignCheckpoints
from isomorph.models.vit_cfg import build_vit, unwrap_state_dict, vit_cfg

BRANCH_SCALE = 0.5
"""What a residual branch reads of the tokens, and what its output is divided by."""


UNSUPPORTED_ARGUMENTS = (
    "qk_norm",
    "scale_attn_norm",
    "init_values",
    "kernel",
    "reduce",
    "span",
    "share",
    "recompute",
    "init",
)
"""Arguments of `refined_vit_*` that the released function has no place for."""


class ScaledMlp(Mlp):
    """timm's Mlp with a scale on every channel of its output. Shape: x (B, N, C) -> (B, N, C)"""

    def __init__(self, in_features: int, **kwargs: Any) -> None:
        super().__init__(in_features, **kwargs)
        self.scale_channel = nn.Parameter(torch.full((in_features,), 1e-5, **factory_kwargs(kwargs)))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale_channel * super().forward(x)


class ReleasedBlock(Block):
    """A ViT block whose branches read half the tokens and are added doubled.

    x + 2 attention(norm(x / 2)), then x + 2 mlp(norm(x / 2))

    Shape: x (B, N, C), maps (B, H, N, N) or None -> (B, N, C), (B, H, N, N)
    Source: Refiner code
    """

    def __init__(self, attention: nn.Module, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "mlp_layer": ScaledMlp})
        self.attn = attention

    def forward(self, x: Tensor, maps: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, maps = self.attn(self.norm1(x * BRANCH_SCALE), maps)
        x = x + self.drop_path1(y) / BRANCH_SCALE
        return x + self.drop_path2(self.mlp(self.norm2(x * BRANCH_SCALE))) / BRANCH_SCALE, maps


class ReleasedRefinedViT(ForeignCheckpoints, DenseHeadViT):
    """The released Refined-ViT, a full timm citizen of any image size.

    `ratio` is that of the refiner; `dense_head=False` leaves the head of the patches out. Other arguments are
    VisionTransformer's.

    Shape: x (B, in_chans, height, width) -> (B, num_classes), multiples of the patch (`dynamic_img_pad=True`: any)
    Source: Refiner code
    Raises: UserError for norms of queries and keys or layer scales, which it has none of.
    """

    hands_maps_on = True

    def __init__(self, ratio: int = 3, dense_head: bool = True, **kwargs: Any) -> None:
        for name in UNSUPPORTED_ARGUMENTS:
            if kwargs.get(name):
                raise UserError(f"the released Refined-ViT has no {name}; the paper's (refined_vit_*) has")
        if not isinstance(ratio, int) or ratio < 1:
            raise UserError(f"ratio {ratio!r} must be a whole number, at least 1")

        def block(depth: int, **given: Any) -> ReleasedBlock:
            kind = dict(device=given["device"], dtype=given["dtype"])
            shared: dict[str, Any] = {name: given[name] for name in ("qkv_bias", "proj_bias", "proj_drop")}
            if depth % 2:
                attention: nn.Module = ReleasedReuse(given["dim"], given["num_heads"], ratio=ratio, **shared, **kind)
            else:
                drop = given["attn_drop"]
                attention = ReleasedAttention(given["dim"], given["num_heads"], attn_drop=drop, **shared, **kind)
            return ReleasedBlock(attention, **given)

        fixed = dict(embed_layer=ConvPatchEmbed, block_fn=block)
        super().__init__(**{"mlp_ratio": 3, **kwargs, **fixed}, dense_head=dense_head)
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=0.02)

    def is_foreign(self, state: dict[str, Tensor]) -> bool:
        """The authors' checkpoints all have the head of the patches."""
        return not self.dense_head and any(name.startswith("aux_head.") for name in state)

    def convert_foreign(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return checkpoint_filter_fn(state, self)


def checkpoint_filter_fn(state_dict: dict[str, Any], model: ReleasedRefinedViT) -> dict[str, Tensor]:
    """The authors' checkpoints, wrapped or not, and our own, their position embedding resized to the model's grid."""
    state: dict[str, Tensor] = vision_transformer.checkpoint_filter_fn(unwrap_state_dict(state_dict), model)
    return state if model.dense_head else {name: t for name, t in state.items() if not name.startswith("aux_head.")}


VARIANTS: dict[str, tuple[dict[str, int], float]] = {
    "refined_vit_s_released": (dict(depth=16, embed_dim=384, num_heads=12), 0.9),
    "refined_vit_m_released": (dict(depth=32, embed_dim=420, num_heads=12), 1.0),
    "refined_vit_l_released": (dict(depth=32, embed_dim=512, num_heads=16), 1.13),
}
"""Shape, and the share of the image that is evaluated (above 1: receptive-field calibration)."""

SHARED_CFG = dict(mean=(0.5,) * 3, std=(0.5,) * 3, first_conv="patch_embed.conv1", classifier=classifier_names(True))


default_cfgs = generate_default_cfgs(
    {name: vit_cfg(crop_pct=crop, **SHARED_CFG) for name, (_, crop) in VARIANTS.items()}
)  # the authors' weights are files to be given: no hub has them


def _create_released(variant: str, pretrained: bool, **kwargs: Any) -> ReleasedRefinedViT:
    """Builds a variant through timm."""
    arguments: dict[str, Any] = VARIANTS[variant][0] | kwargs
    heads = classifier_names(arguments.get("dense_head", True))
    return build_vit(ReleasedRefinedViT, variant, pretrained, checkpoint_filter_fn, arguments, classifier=heads)


@register_model
def refined_vit_s_released(pretrained: bool = False, **kwargs: Any) -> ReleasedRefinedViT:
    """Refined-ViT-S as released: 25,408,656 parameters, 83.6 top-1 (Refiner Table 7)."""
    return _create_released("refined_vit_s_released", pretrained, **kwargs)


@register_model
def refined_vit_m_released(pretrained: bool = False, **kwargs: Any) -> ReleasedRefinedViT:
    """Refined-ViT-M as released: 55,450,932 parameters, 84.6 top-1 (Refiner Table 7)."""
    return _create_released("refined_vit_m_released", pretrained, **kwargs)


@register_model
def refined_vit_l_released(pretrained: bool = False, **kwargs: Any) -> ReleasedRefinedViT:
    """Refined-ViT-L as released: 81,150,192 parameters, 84.9 top-1 (Refiner Table 7)."""
    return _create_released("refined_vit_l_released", pretrained, **kwargs)
