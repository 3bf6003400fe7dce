"""TDRL-ViT: a plain lightweight ViT whose linear layers are pyramids in training, and which fuses back to that ViT.

timm's VisionTransformer after one recast: queries, keys, values and both layers of every MLP are `PyramidLinear`; the
output projection of attention is left alone (its weight merges with that of the values). `layout="plain"` is the plain
ViT, the form that `iso.fuse` gives.
"""

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

from timm.models import generate_default_cfgs, register_model, vision_transformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from isomorph.layers import JointPyramid, PyramidConv2d, PyramidLinear
from isomorph.layers.pyramid_birth import carry
from isomorph.models.foreign_checkpoints import ForeignCheckpoints
from isomorph.models.vit_cfg import build_vit, unwrapped, vit_cfg
from isomorph.surgery import Edit, LinearToPyramid, fuse, replay, targets

WHERE = ("blocks.*.attn.qkv", "blocks.*.mlp.fc1", "blocks.*.mlp.fc2")
"""Where the paper puts pyramids: everywhere in a block but the output projection."""


PRETRAINING = ("decoder", "mask_token", "encoderfeature_pred", "decoderfeature_pred")
"""First words of the tensors that masked pre-training has besides the encoder (MAE, G2SD)."""


class TDRLViT(ForeignCheckpoints, VisionTransformer):
    """Vision transformer trained with pyramids for linear layers, a full timm citizen of any image size.

    `layout` (or plain) and `rectify` are LinearToPyramid's, `where` its globs; other arguments are VisionTransformer's.

    Shape: x (B, in_chans, height, width) -> (B, num_classes), multiples of the patch (`dynamic_img_pad=True`: any)
    Source: TDRL section 4.1
    Raises: UserError for an unknown layout or rectification.
    """

    fused_arguments: ClassVar[dict[str, Any]] = {"layout": "plain"}
    """What creates the network that fusing gives."""

    def __init__(
        self,
        layout: str = "P-W2S",
        rectify: str = "paper",
        where: Sequence[str] = WHERE,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"dynamic_img_size": True, **kwargs})
        if layout != "plain":
            rule = LinearToPyramid(layout, init="paper", rectify=rectify)  # type: ignore[arg-type]
            replay(self, Edit(rule, tuple(targets(self, rule, list(where)))))

    def is_foreign(self, state: dict[str, Tensor]) -> bool:
        """A plain ViT's, which has one weight where a pyramid has many, or one with what only pre-training needs."""
        plain = any(f"{name}.weight" in state for name, _ in pyramids_of(self))
        return plain or any(name.startswith(PRETRAINING) for name in state)

    def convert_foreign(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return checkpoint_filter_fn(state, self)


def pyramids_of(model: nn.Module) -> list[tuple[str, JointPyramid | PyramidLinear | PyramidConv2d]]:
    """Names and layers of all that is a pyramid where a plain ViT has a linear layer."""
    kinds = JointPyramid | PyramidLinear | PyramidConv2d
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: TDRLViT) -> dict[str, Tensor]:
    """A TDRL-ViT's checkpoint as it is; a plain ViT's (timm, DeiT, MAE) with its layers carried by the pyramids.

    What belongs to masked pre-training only, decoder and mask token, is left out.

    The number of heads is invisible in a checkpoint: `tdrl_vit_ti` has 12, timm's `vit_tiny` 3.
    """
    state_dict = {n: tensor for n, tensor in unwrapped(state_dict).items() if not n.startswith(PRETRAINING)}
    plain = fuse(copy.deepcopy(model).eval())
    state_dict = vision_transformer.checkpoint_filter_fn(state_dict, plain)
    for name, module in pyramids_of(model):
        if f"{name}.weight" in state_dict:
            weight = state_dict.pop(f"{name}.weight")
            bias = state_dict.pop(f"{name}.bias", weight.new_zeros(len(weight)))
            state_dict |= {f"{name}.{key}": tensor for key, tensor in carried(module, weight, bias).items()}
    return state_dict


def carried(module: JointPyramid | PyramidLinear | PyramidConv2d, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """The state of pyramids that compute a plain layer."""
    twin = copy.deepcopy(module).cpu()
    pyramids = list(twin.pyramids) if isinstance(twin, JointPyramid) else [twin]
    parts = zip(pyramids, weight.chunk(len(pyramids)), bias.chunk(len(pyramids)), strict=True)
    for pyramid, part, shift in parts:
        carry(pyramid, part.flatten(1), shift)  # type: ignore[arg-type]
    return twin.state_dict()


VARIANTS = {"tdrl_vit_ti": (192, 12), "tdrl_vit_s": (384, 6)}
"""Width and heads. ViT-Tiny has 12 heads here, as in MAE-Lite and TDRL; of ViT-Small the paper says none."""


default_cfgs = generate_default_cfgs({name: vit_cfg() for name in VARIANTS})  # no public weights exist


def create_tdrl_vit(variant: str, pretrained: bool, **kwargs: Any) -> TDRLViT:
    """Builds a variant through timm."""
    width, heads = VARIANTS[variant]
    arguments = {"embed_dim": width, "num_heads": heads, **kwargs}
    return build_vit(TDRLViT, variant, pretrained, checkpoint_filter_fn, arguments)


@register_model
def tdrl_vit_ti(pretrained: bool = False, **kwargs: Any) -> TDRLViT:
    """TDRL-ViT-Ti: 48.86M parameters in training, 5.7M fused; 78.7 top-1 pre-trained (TDRL Table 1)."""
    return create_tdrl_vit("tdrl_vit_ti", pretrained, **kwargs)


@register_model
def tdrl_vit_s(pretrained: bool = False, **kwargs: Any) -> TDRLViT:
    """TDRL-ViT-S: 194M parameters in training, 22.1M fused; 81.3 top-1 pre-trained (TDRL Table 3)."""
    return create_tdrl_vit("tdrl_vit_s", pretrained, **kwargs)
