"""TDRL-ViT: a plain lightweight ViT whose linear layers are pyramids in training; `iso.fuse` gives the plain ViT back.

The output projection of attention stays linear, as its weight merges with that of the values.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from timm.models import generate_default_cfgs, vision_transformer
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from isomorph.layers.pyramid.base import Parallel
from isomorph.layers.pyramid.inits import init_as_mae, init_from_affine
from isomorph.layers.relative.attention import resize_table
from isomorph.models.base import (
    State,
    Variant,
    build_variant,
    image_cfg,
    register_variants,
    unwrap_state_dict,
)
from isomorph.models.blockwise import AnySizeViT
from isomorph.operations import copy_module
from isomorph.surgery import AttentionToRelative, LinearToPyramid, fuse
from isomorph.surgery.modules import outermost_modules
from isomorph.surgery.recast import apply_rule

# Layers that the paper replaces by pyramids: all linear layers of a block except the output
# projection.
PYRAMID_LAYERS = ("blocks.*.attn.qkv", "blocks.*.mlp.fc1", "blocks.*.mlp.fc2")

# Prefixes of the tensors in a masked pre-training checkpoint that are not the encoder's (MAE,
# G2SD).
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

    def is_foreign(self, state: State) -> bool:
        """Return True for a plain ViT's weights, with one weight per pyramid, or those of masked pre-training."""
        if any(name.startswith(PRETRAINING_PREFIXES) for name in state):
            return True
        if any(f"{name}.weight" in state for name in _named_pyramids(self)):
            return True
        for name, parameter in _relative_biases(self).items():
            if name in state and state[name].shape != parameter.shape:
                return True
        return False

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of parameter names for layer decay; the last norm has the head's rate, as in MAE's code."""
        return {**super().group_matcher(coarse), "blocks": r"^blocks\.(\d+)"}


class TDRLViTDistilled(TDRLViT, VisionTransformerDistilled):
    """TDRL-ViT with DeiT's distillation token and head; in eval mode logits are the mean of both (TDRL section 4.1)."""


def _named_pyramids(model: nn.Module) -> dict[str, Parallel]:
    return outermost_modules(model, lambda module: isinstance(module, Parallel))  # type: ignore[return-value]


def checkpoint_filter_fn(state_dict: State, model: TDRLViT) -> State:
    """Convert a checkpoint: a TDRL-ViT's is loaded unchanged, a plain ViT's (timm, DeiT, MAE) into the pyramids.

    A pre-training's decoder is dropped, and its last norm by a model that averages over patches (`global_pool` avg),
    which has a new one after pooling; a distillation token or tables of positions keep the model's values if it lacks
    them. The number of heads is not checked: `tdrl_vit_ti` has 12, timm's `vit_tiny` 3.
    """
    items = unwrap_state_dict(state_dict).items()
    state_dict = {
        name: tensor for name, tensor in items if not name.startswith(PRETRAINING_PREFIXES)
    }
    state_dict = _fit_tokens_and_tables(_with_own_pooling(state_dict, model), model)
    plain = fuse(copy_module(model).eval(), norms=False)
    state_dict = vision_transformer.checkpoint_filter_fn(state_dict, plain)
    for name, module in _named_pyramids(model).items():
        if f"{name}.weight" in state_dict:
            weight = state_dict.pop(f"{name}.weight")
            bias = state_dict.pop(f"{name}.bias", weight.new_zeros(len(weight)))
            for key, tensor in _pyramid_state(module, weight, bias).items():
                state_dict[f"{name}.{key}"] = tensor
    return state_dict


def _with_own_pooling(state_dict: State, model: TDRLViT) -> State:
    """Replace the class token's norm by the model's new one if it averages over patches, as MAE's fine-tuning does."""
    model_state = model.state_dict()
    new = {name: model_state[name] for name in model_state if name.startswith("fc_norm.")}
    if not new or "fc_norm.weight" in state_dict:
        return state_dict
    others = {name: tensor for name, tensor in state_dict.items() if not name.startswith("norm.")}
    return {**others, **new}


def _fit_tokens_and_tables(state_dict: State, model: TDRLViT) -> State:
    """Add a distillation token and relative biases that a checkpoint lacks, and resize tables of relative biases.

    The token is the model's own, and its position zero, as in the code published with G2SD.
    """
    added: State = {}
    if (
        isinstance(model, TDRLViTDistilled)
        and "dist_token" not in state_dict
        and "pos_embed" in state_dict
    ):
        positions = state_dict["pos_embed"]
        of_class_token = positions[:, :1]
        zero = torch.zeros_like(of_class_token)
        added["pos_embed"] = torch.cat([of_class_token, zero, positions[:, 1:]], 1)
        added["dist_token"] = model.dist_token.detach()
    for name, model_bias in _relative_biases(model).items():
        bias = state_dict.get(name, model_bias)
        if bias.ndim == model_bias.ndim == 3:  # a table of 2 H - 1 by 2 W - 1 offsets
            _, rows, columns = model_bias.shape
            bias = resize_table(bias, ((rows + 1) // 2, (columns + 1) // 2))
        added[name] = bias
    return {**state_dict, **added}


def _relative_biases(model: nn.Module) -> State:
    """Return the tables and scalars of relative attention by name."""
    names = (".relative_bias", ".prefix_bias")
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if name.endswith(names)
    }


def _pyramid_state(module: Parallel, weight: Tensor, bias: Tensor) -> State:
    """Return the state of a pyramid (or of pyramids and linear layers side by side) that computes a plain layer."""
    twin: Any = copy_module(module).cpu()
    weights = weight.chunk(len(twin.parts))
    biases = bias.chunk(len(twin.parts))
    for part, own_weight, own_bias in zip(twin.parts, weights, biases, strict=True):
        if not isinstance(part, nn.Linear):
            init_from_affine(part, own_weight.flatten(1), own_bias)
        elif part.bias is None:
            part.load_state_dict({"weight": own_weight})
        else:
            part.load_state_dict({"weight": own_weight, "bias": own_bias})
    return twin.state_dict()


# 12 heads as in MAE-Lite and TDRL; for ViT-Small the paper gives none. Top-1 when pre-trained: TDRL
# Tables 1 and 3.
VARIANTS = {
    "tdrl_vit_ti": Variant(
        dict(embed_dim=192, num_heads=12), "48.86M parameters, 5.7M fused; 78.7 top-1"
    ),
    "tdrl_vit_s": Variant(
        dict(embed_dim=384, num_heads=6), "194M parameters, 22.1M fused; 81.3 top-1"
    ),
}

_DISTILLED = "with a distillation token 79.1 top-1 pre-trained and distilled by a ViT-B"
DISTILLED = {"tdrl_vit_ti_distilled": Variant(VARIANTS["tdrl_vit_ti"].arguments, _DISTILLED)}
_CFGS = dict.fromkeys(VARIANTS, image_cfg())
_CFGS |= dict.fromkeys(DISTILLED, image_cfg(classifier=("head", "head_dist")))
default_cfgs = generate_default_cfgs(_CFGS)  # no public weights exist
register_variants(__name__, partial(build_variant, TDRLViT), VARIANTS)
register_variants(__name__, partial(build_variant, TDRLViTDistilled), DISTILLED)
