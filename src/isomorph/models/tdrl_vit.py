"""TDRL-ViT: a plain lightweight ViT whose linear layers are pyramids in training; `iso.fuse` gives the plain ViT back.

The output projection of attention stays linear, as its weight merges with that of the values.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from timm.models import generate_default_cfgs, vision_transformer
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from isomorph.layers.pyramid.base import Parallel
from isomorph.layers.pyramid.inits import init_from_affine
from isomorph.layers.relative.attention import resize_table
from isomorph.models.base import Variant, build_variant, image_cfg, init_as_mae, register_variants, unwrap_state_dict
from isomorph.models.blockwise import AnySizeViT
from isomorph.surgery import AttentionToRelative, LinearToPyramid, fuse
from isomorph.surgery.modules import outermost_modules
from isomorph.surgery.recast import apply_rule

# Layers that the paper replaces by pyramids: all linear layers of a block except the output projection.
PYRAMID_LAYERS = ("blocks.*.attn.qkv", "blocks.*.mlp.fc1", "blocks.*.mlp.fc2")

# Prefixes of the tensors in a masked pre-training checkpoint that are not the encoder's (MAE, G2SD).
PRETRAINING_PREFIXES = ("decoder", "mask_token", "encoderfeature_pred", "decoderfeature_pred")


class TDRLViT(AnySizeViT):
    """Vision transformer with pyramids in place of linear layers, for images of any size, with timm's interface.

    `layout` and `rectify` are those of `LinearToPyramid`, with `layout="plain"` for no pyramids. `where`
    are globs of the layers to replace, for example `blocks.[0-3].attn.v`. `relative_bias` adds a table of relative
    positions to the attention of every block, as in BEiT; it starts at zero. Other arguments are those of
    VisionTransformer; `weight_init` may also be "mae": Xavier weights in every matrix, of pyramids or not, the patch
    embedding viewed as one. Pyramids have Xavier weights with each of them.

    Shape: x (B, in_chans, height, width) -> (B, num_classes), multiples of the patch (`dynamic_img_pad=True`: any)
    Source: TDRL section 4.1
    Raises: UserError for an unknown layout or rectification, or a `where` that matches no layer.
    """

    fused_arguments: ClassVar[dict[str, Any]] = {"layout": "plain"}

    def __init__(
        self,
        layout: str = "P-W2S",
        rectify: str | Mapping[str, str] = "paper",
        where: str | Sequence[str] = PYRAMID_LAYERS,
        relative_bias: bool = False,
        weight_init: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(weight_init="" if weight_init == "mae" else weight_init, **kwargs)
        if relative_bias:
            apply_rule(self, AttentionToRelative(prefix_bias=True), "blocks.*.attn")
        if layout != "plain":
            apply_rule(self, LinearToPyramid(layout, init="paper", rectify=rectify), where)
        if weight_init == "mae":
            init_as_mae(self)

    def is_foreign(self, state: dict[str, Tensor]) -> bool:
        """Return True for a plain ViT's weights, with one weight per pyramid, or those of masked pre-training."""
        own = self.state_dict()
        plain = any(f"{name}.weight" in state for name in _named_pyramids(self))
        resized = any(name in state and state[name].shape != own[name].shape for name in _relative_biases(self))
        return plain or resized or any(name.startswith(PRETRAINING_PREFIXES) for name in state)


class TDRLViTDistilled(TDRLViT, VisionTransformerDistilled):
    """TDRL-ViT with DeiT's distillation token and head; in eval mode logits are the mean of both (TDRL section 4.1)."""


def _named_pyramids(model: nn.Module) -> dict[str, Parallel]:
    return outermost_modules(model, lambda module: isinstance(module, Parallel))  # type: ignore[return-value]


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: TDRLViT) -> dict[str, Tensor]:
    """Convert a checkpoint: a TDRL-ViT's is loaded unchanged, a plain ViT's (timm, DeiT, MAE) into the pyramids.

    A pre-training's decoder is dropped, and its last norm by a model that averages over patches (`global_pool` avg),
    which has a new one after pooling; a distillation token or tables of positions keep the model's values if it lacks
    them. The number of heads is not checked: `tdrl_vit_ti` has 12, timm's `vit_tiny` 3.
    """
    given = unwrap_state_dict(state_dict).items()
    state_dict = {name: tensor for name, tensor in given if not name.startswith(PRETRAINING_PREFIXES)}
    state_dict = _with_own_tensors(_with_own_pooling(state_dict, model), model)
    plain = fuse(copy.deepcopy(model).eval(), norms=False)
    state_dict = vision_transformer.checkpoint_filter_fn(state_dict, plain)
    for name, module in _named_pyramids(model).items():
        if f"{name}.weight" in state_dict:
            weight = state_dict.pop(f"{name}.weight")
            bias = state_dict.pop(f"{name}.bias", weight.new_zeros(len(weight)))
            state_dict |= {f"{name}.{key}": tensor for key, tensor in _pyramid_state(module, weight, bias).items()}
    return state_dict


def _with_own_pooling(state_dict: dict[str, Tensor], model: TDRLViT) -> dict[str, Tensor]:
    """Replace the class token's norm by the model's new one if it averages over patches, as MAE's fine-tuning does."""
    own = model.state_dict()
    new = {name: own[name] for name in own if name.startswith("fc_norm.")}
    if not new or "fc_norm.weight" in state_dict:
        return state_dict
    kept = {name: tensor for name, tensor in state_dict.items() if not name.startswith("norm.")}
    return {**kept, **new}


def _with_own_tensors(state_dict: dict[str, Tensor], model: TDRLViT) -> dict[str, Tensor]:
    """Add what a checkpoint lacks; a distillation token has a zero position, as published with G2SD."""
    own, added = model.state_dict(), {}
    if isinstance(model, TDRLViTDistilled) and "dist_token" not in state_dict and "pos_embed" in state_dict:
        positions = state_dict["pos_embed"]
        positions = torch.cat([positions[:, :1], torch.zeros_like(positions[:, :1]), positions[:, 1:]], 1)
        added = {"pos_embed": positions, "dist_token": own["dist_token"]}
    for name in _relative_biases(model):
        given = state_dict.get(name, own[name])
        grid = tuple((side + 1) // 2 for side in own[name].shape[1:])
        added[name] = resize_table(given, grid) if given.ndim == own[name].ndim == 3 else given
    return {**state_dict, **added}


def _relative_biases(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if name.endswith((".relative_bias", ".prefix_bias"))]


def _pyramid_state(module: Parallel, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """Return the state of a pyramid (or of pyramids and linear layers side by side) that computes a plain layer."""
    twin = copy.deepcopy(module).cpu()
    for part, rows, shift in zip(twin.parts, *(each.chunk(len(twin.parts)) for each in (weight, bias)), strict=True):
        if isinstance(part, nn.Linear):
            part.load_state_dict({"weight": rows, "bias": shift} if part.bias is not None else {"weight": rows})
        else:
            init_from_affine(part, rows.flatten(1), shift)
    return twin.state_dict()


# 12 heads as in MAE-Lite and TDRL; for ViT-Small the paper gives none. Top-1 when pre-trained: TDRL Tables 1 and 3.
VARIANTS = {
    "tdrl_vit_ti": Variant(dict(embed_dim=192, num_heads=12), "48.86M parameters, 5.7M fused; 78.7 top-1"),
    "tdrl_vit_s": Variant(dict(embed_dim=384, num_heads=6), "194M parameters, 22.1M fused; 81.3 top-1"),
}

_DISTILLED = "with a distillation token 79.1 top-1 pre-trained and distilled by a ViT-B"
DISTILLED = {"tdrl_vit_ti_distilled": Variant(VARIANTS["tdrl_vit_ti"].arguments, _DISTILLED)}
default_cfgs = generate_default_cfgs(  # no public weights exist
    {name: image_cfg() for name in VARIANTS} | {name: image_cfg(classifier=("head", "head_dist")) for name in DISTILLED}
)
register_variants(__name__, partial(build_variant, TDRLViT), VARIANTS)
register_variants(__name__, partial(build_variant, TDRLViTDistilled), DISTILLED)
