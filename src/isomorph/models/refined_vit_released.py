"""Refined-ViT as released: the function, the sizes and the keys of the authors' public code and checkpoints.

It differs from the paper's (`refined_vit.py`) in the refiner (`layers/refined/released.py`), in residual branches whose
input is halved and whose output is doubled, in a layer scale of 1e-5 on the MLP, and in a head that also classifies the
patches.
"""

from typing import Any

import torch
from timm.layers import Mlp
from timm.models import generate_default_cfgs, vision_transformer
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.attention_base import factory_kwargs
from isomorph.layers.refined.released import ReleasedAttention, ReleasedReuse
from isomorph.models.blockwise import DenseHeadViT
from isomorph.models.refined_vit import ConvPatchEmbed, refined_cfg
from isomorph.models.variants import (
    ForeignCheckpoints,
    Variant,
    build_variant,
    image_cfg,
    register_variants,
    unwrap_state_dict,
)

BRANCH_SCALE = 0.5
"""Factor on the input of a residual branch; its output is divided by it."""

UNSUPPORTED_ARGUMENTS = (
    *("qk_norm", "scale_attn_norm", "init_values"),
    *("kernel", "reduce", "span", "share", "recompute", "init"),
)
"""Arguments of `refined_vit_*` that the released networks do not have."""


class ScaledMlp(Mlp):
    """timm's Mlp with a learned scale of every output channel. Shape: x (B, N, C) -> (B, N, C)"""

    def __init__(self, in_features: int, **kwargs: Any) -> None:
        super().__init__(in_features, **kwargs)
        self.scale_channel = nn.Parameter(torch.full((in_features,), 1e-5, **factory_kwargs(kwargs)))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale_channel * super().forward(x)


class ReleasedBlock(Block):
    """A ViT block whose residual branches halve their input and double their output.

    x + 2 attention(norm(x / 2)), then x + 2 mlp(norm(x / 2))

    Shape: x (B, N, C), maps (B, nh, N, N) or None -> (B, N, C), (B, nh, N, N)
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
    """The released Refined-ViT, for images of any size, with timm's interface.

    `ratio` is the refiner's expansion ratio; `dense_head=False` leaves out the classifier of the patches. Other
    arguments are those of VisionTransformer.

    Shape: x (B, in_chans, height, width) -> (B, num_classes), multiples of the patch (`dynamic_img_pad=True`: any)
    Source: Refiner code
    Raises: UserError for an argument that only the paper's networks have, or a ratio below 1.
    """

    shares_maps = True

    def __init__(self, ratio: int = 3, dense_head: bool = True, **kwargs: Any) -> None:
        for name in UNSUPPORTED_ARGUMENTS:
            if kwargs.get(name):
                raise UserError(f"{name} is not an argument of the released Refined-ViT; use refined_vit_* instead")
        if not isinstance(ratio, int) or ratio < 1:
            raise UserError(f"ratio {ratio!r} must be a whole number of at least 1")

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
        """Return True if the state has a classifier of patches, as all released ones do, and the model has none."""
        return not self.dense_head and any(name.startswith("aux_head.") for name in state)


def checkpoint_filter_fn(state_dict: dict[str, Any], model: ReleasedRefinedViT) -> dict[str, Tensor]:
    """Convert a checkpoint of the authors or of isomorph: unwrap it and resize its position embedding."""
    state: dict[str, Tensor] = vision_transformer.checkpoint_filter_fn(unwrap_state_dict(state_dict), model)
    return state if model.dense_head else {name: t for name, t in state.items() if not name.startswith("aux_head.")}


VARIANTS = {
    "refined_vit_s_released": Variant(dict(depth=16, embed_dim=384, num_heads=12), "25,408,656 parameters, 83.6 top-1"),
    "refined_vit_m_released": Variant(dict(depth=32, embed_dim=420, num_heads=12), "55,450,932 parameters, 84.6 top-1"),
    "refined_vit_l_released": Variant(dict(depth=32, embed_dim=512, num_heads=16), "81,150,192 parameters, 84.9 top-1"),
}
_CROPS = dict(zip(VARIANTS, (0.9, 1.0, 1.13), strict=True))
"""crop_pct of evaluation (above 1: receptive-field calibration)."""

default_cfgs = generate_default_cfgs(
    {n: image_cfg(crop_pct=c, mean=(0.5,) * 3, std=(0.5,) * 3, **refined_cfg(True, True)) for n, c in _CROPS.items()}
)  # no URL: the authors' weights have to be given as a file


def _create_released(name: str, pretrained: bool, **arguments: Any) -> ReleasedRefinedViT:
    cfg = refined_cfg(True, arguments.get("dense_head", True))
    return build_variant(ReleasedRefinedViT, name, pretrained, own_cfg=cfg, **arguments)


register_variants(__name__, _create_released, VARIANTS)
