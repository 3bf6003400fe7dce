"""Refined-ViT (Refiner): a ViT whose attention maps are refined, and may be reused by the blocks that follow.

The networks that the authors released, `refined_vit_*_released`, differ from the paper's in the refiner
(`layers/refined/released.py`), in residual branches whose input is halved and whose output is doubled, in a layer scale
of 1e-5 on the MLP, and in a head that also classifies the patches.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, Mlp, PatchEmbed, to_2tuple
from timm.models import generate_default_cfgs, vision_transformer
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import RefinedAttention, SpatialAttention
from isomorph.layers.attention_base import factory_kwargs
from isomorph.layers.grid import GridSize, pad_to_multiple
from isomorph.layers.refined.attention import ReusedAttention
from isomorph.layers.refined.refiner import MapConvolution
from isomorph.layers.refined.released import ReleasedAttention, ReleasedReuse
from isomorph.models.base import (
    State,
    Variant,
    build_variant,
    image_cfg,
    register_variants,
    unwrap_state_dict,
)
from isomorph.models.blockwise import DenseHeadViT
from isomorph.surgery import AttentionToRefined


class ConvPatchEmbed(PatchEmbed):
    """Three convolutions with BatchNorm and ReLU, the first with stride 2, then a patch embedding of the feature map.

    conv 7x7, stride 2 -> conv 3x3 -> conv 3x3, of `widths` -> conv p/2 x p/2, stride p/2, for patch size p

    Shape: x (B, in_chans, height, width) -> (B, H, W, C)
    Source: Refiner code; 3 convolutions in Refiner Table 11, "More convs for patch embedding"
    Raises: UserError for an odd patch size, or when the patch size is changed later.
    """

    def __init__(
        self,
        img_size: Any = 224,
        patch_size: Any = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        widths: Sequence[int] = (32, 64, 128),
        **kwargs: Any,
    ) -> None:
        patch = to_2tuple(patch_size)
        if any(size % 2 for size in patch):
            raise UserError(
                f"patch_size {patch_size} must be even: the first convolution halves the image",
            )
        super().__init__(img_size, patch, in_chans, embed_dim, **kwargs)
        factory = factory_kwargs(kwargs)
        first, second, third = widths
        self.conv1 = nn.Conv2d(in_chans, first, 7, stride=2, padding=3, bias=False, **factory)
        self.bn1 = nn.BatchNorm2d(first, **factory)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1, bias=False, **factory)
        self.bn2 = nn.BatchNorm2d(second, **factory)
        self.conv3 = nn.Conv2d(second, third, 3, padding=1, bias=False, **factory)
        self.bn3 = nn.BatchNorm2d(third, **factory)
        half = (patch[0] // 2, patch[1] // 2)
        self.proj = nn.Conv2d(
            third, embed_dim, half, half, bias=kwargs.get("bias", True), **factory
        )

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Change the image size. Raises: UserError for a different patch size."""
        if patch_size is not None and to_2tuple(patch_size) != self.patch_size:
            raise UserError(
                f"patch_size {patch_size} cannot replace {self.patch_size}; create a new model with it",
            )
        super().set_input_size(img_size)

    def forward(self, x: Tensor) -> Tensor:
        if self.dynamic_img_pad:
            x = pad_to_multiple(x, *self.patch_size)
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.relu(self.bn2(self.conv2(x)), inplace=True)
        x = F.relu(self.bn3(self.conv3(x)), inplace=True)  # (B, 128, height / 2, width / 2)
        return self.norm(self.proj(x).permute(0, 2, 3, 1))  # (B, H, W, C)


# Arguments of a timm block that its attention takes too, also where it reuses maps.
_SHARED = ("dim", "num_heads", "qkv_bias", "proj_bias", "proj_drop", "device", "dtype")


class RefinedBlock(Block):
    """A ViT block with the given attention, called with the grid size if it is spatial.

    With `ReusedAttention` it applies the maps of an earlier block to its own values, and passes them on (Refiner B.4).
    With `share` it passes its own maps to the next.

    Shape: x (B, N, C), maps (B, nh, N, N) of an earlier block or None, grid_size (H, W) -> (B, N, C), maps or None
    """

    def __init__(self, attention: nn.Module, share: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attn = attention
        self.share = share

    def forward(
        self, x: Tensor, maps: Tensor | None = None, grid_size: GridSize | None = None
    ) -> tuple[Tensor, Tensor | None]:
        y = self.norm1(x)
        grid = dict(grid_size=grid_size) if isinstance(self.attn, SpatialAttention) else {}
        if isinstance(self.attn, ReusedAttention):
            y = self.attn(y, maps)
        elif self.share:
            y, maps = self.attn(y, return_maps=True, **grid)
        else:
            y = self.attn(y, **grid)
            maps = None
        x = x + self.drop_path1(self.ls1(y))
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x, maps


class RefinedViT(DenseHeadViT):
    """Vision transformer with refined attention, for images of any size, with timm's interface.

    `ratio`, `kernel`, `reduce`, `span`, `init` and `recompute` are those of `AttentionToRefined`; with `ratio` and
    `kernel` 0 attention is plain. `share` is the number of following blocks that reuse the maps of a refining block.
    `conv_embed` puts three convolutions before the patches. `dense_head` adds a classifier of every patch. Other
    arguments are those of VisionTransformer.

    Shape: x (B, in_chans, height, width) -> (B, num_classes), multiples of the patch (`dynamic_img_pad=True`: any)
    Source: Refiner Fig. 3, Table 10
    Raises: UserError for arguments that do not go together, or that the layers do not take.
    """

    def __init__(
        self,
        ratio: int = 3,
        kernel: int = 3,
        reduce: bool = True,
        span: str = "map",
        init: str = "same-function",
        share: int = 0,
        recompute: bool = False,
        conv_embed: bool = False,
        **kwargs: Any,
    ) -> None:
        if share and not reduce:
            raise UserError(
                "share needs reduce=True: without it there are more maps than heads in the next block",
            )
        if share and kwargs.get("scale_attn_norm"):
            raise UserError(
                "scale_attn_norm needs share=0: blocks that reuse maps do not have this norm",
            )
        plain = ratio == kernel == 0
        form: dict[str, Any] = dict(init=init, reduce=reduce, span=span, recompute=recompute)
        rule = AttentionToRefined(
            ratio=ratio,
            kernel=1 if plain else kernel,
            prefix_tokens=int(kwargs.get("class_token", True)) + kwargs.get("reg_tokens", 0),
            **form,
        )

        def block(depth: int, **block_kwargs: Any) -> RefinedBlock:
            if depth % (share + 1):
                attention: nn.Module = ReusedAttention(
                    **{name: block_kwargs[name] for name in _SHARED}
                )
            else:
                attention = _build_attention(rule, plain, share > 0, block_kwargs)
            return RefinedBlock(attention, share > 0, **block_kwargs)

        if conv_embed:
            kwargs["embed_layer"] = ConvPatchEmbed
        super().__init__(**{**kwargs, "block_fn": block})
        self.share = share
        self.init = init
        self.shares_maps = share > 0
        for layer in self.modules():
            if isinstance(layer, RefinedAttention):
                layer.is_revertible = False
        self.update_grid()

    def run_block(
        self,
        i: int,
        x: Tensor,
        maps: Any,
        grid_size: GridSize,
    ) -> tuple[Tensor, Any]:
        return self.call_block(i, x, maps, grid_size)

    def is_foreign(self, state: State) -> bool:
        """Return True for a plain ViT's weights, which have no refiners."""
        return is_plain_vit(state, self)


def _build_attention(
    rule: AttentionToRefined,
    plain: bool,
    giving: bool,
    block_kwargs: dict[str, Any],
) -> nn.Module:
    """Build the attention of a block that computes maps, in the fastest form that can return what it has to."""
    arguments = {
        name: block_kwargs[name] for name in (*_SHARED, "qk_norm", "attn_drop", "norm_layer")
    }
    arguments["scale_norm"] = block_kwargs["scale_attn_norm"]
    if plain and not giving:
        return Attention(**arguments)
    if rule.ratio or not giving:
        return rule.new_layer(**arguments)
    # the map is passed on, so it must be formed and convolved explicitly
    refine: nn.Module = nn.Identity()
    if not plain:
        refine = MapConvolution(
            block_kwargs["num_heads"], rule.kernel, rule.init, **factory_kwargs(block_kwargs)
        )
    return RefinedAttention(refine=refine, recompute=rule.recompute, **arguments)


# the released networks


class ScaledMlp(Mlp):
    """timm's Mlp with a learned scale of every output channel. Shape: x (B, N, C) -> (B, N, C)"""

    def __init__(self, in_features: int, **kwargs: Any) -> None:
        super().__init__(in_features, **kwargs)
        self.scale_channel = nn.Parameter(
            torch.full((in_features,), 1e-5, **factory_kwargs(kwargs))
        )

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
        y, maps = self.attn(self.norm1(0.5 * x), maps)
        x = x + 2 * self.drop_path1(y)
        x = x + 2 * self.drop_path2(self.mlp(self.norm2(0.5 * x)))
        return x, maps


class ReleasedRefinedViT(DenseHeadViT):
    """The released Refined-ViT, for images of any size, with timm's interface.

    `ratio` is the refiner's expansion ratio; `dense_head=False` leaves out the classifier of the patches. Other
    arguments are those of VisionTransformer.

    Shape: x (B, in_chans, height, width) -> (B, num_classes), multiples of the patch (`dynamic_img_pad=True`: any)
    Source: Refiner code
    Raises: UserError for an argument of VisionTransformer that the released networks do not have.
    """

    shares_maps = True
    unsupported = ("patch_drop_rate", "qk_norm", "scale_attn_norm", "init_values", "attn_layer")

    def __init__(self, ratio: int = 3, dense_head: bool = True, **kwargs: Any) -> None:
        def block(depth: int, **block_kwargs: Any) -> ReleasedBlock:
            shared: dict[str, Any] = {name: block_kwargs[name] for name in _SHARED}
            if depth % 2:
                attention: nn.Module = ReleasedReuse(ratio=ratio, **shared)
            else:
                attention = ReleasedAttention(attn_drop=block_kwargs["attn_drop"], **shared)
            return ReleasedBlock(attention, **block_kwargs)

        fixed = dict(embed_layer=ConvPatchEmbed, block_fn=block)
        super().__init__(**{"mlp_ratio": 3, **kwargs, **fixed}, dense_head=dense_head)
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=0.02)

    def is_foreign(self, state: State) -> bool:
        """Return True for weights with a classifier of patches that this network does not have."""
        return not self.dense_head and any(name.startswith("aux_head.") for name in state)


def _refiner_tensors(model: nn.Module) -> State:
    return {name: tensor for name, tensor in model.state_dict().items() if ".attn.refine." in name}


def is_plain_vit(state: State, model: nn.Module) -> bool:
    """Return True if the model has refiners and the checkpoint is a plain ViT's, with queries and keys in block 1."""
    refiners = _refiner_tensors(model)
    if not refiners or "blocks.1.attn.qkv.weight" not in state:
        return False
    return state.keys().isdisjoint(refiners)


def checkpoint_filter_fn(
    state_dict: State,
    model: RefinedViT | ReleasedRefinedViT,
) -> State:
    """Convert a checkpoint: resize the position embedding, and give a plain ViT's refiners that change nothing.

    Raises: UserError for a plain ViT's checkpoint if the model reuses maps: queries and keys would be lost.
    """
    state: State = vision_transformer.checkpoint_filter_fn(unwrap_state_dict(state_dict), model)
    if isinstance(model, ReleasedRefinedViT):
        if model.dense_head:
            return state
        return {name: tensor for name, tensor in state.items() if not name.startswith("aux_head.")}
    if not is_plain_vit(state, model):
        return state
    if model.share:
        raise UserError(
            "a plain ViT's checkpoint has queries and keys in every block; create the model with share=0",
        )
    if model.init != "same-function":
        return state
    return state | _refiner_tensors(model)


_SIZES: dict[str, dict[str, Any]] = {
    "b": dict(depth=12, embed_dim=768, num_heads=12),
    "s": dict(depth=16, embed_dim=384, num_heads=12),
    "m": dict(depth=32, embed_dim=420, num_heads=12),
    "l": dict(depth=32, embed_dim=512, num_heads=16),
}
_LARGE = dict(mlp_ratio=3, conv_embed=True, share=1)
# Refiner Table 10; top-1: Tables 7, 11. The sizes of S, M, L need the released embedding and MLP,
# and shared maps.
VARIANTS = {
    "refined_vit_b": Variant(_SIZES["b"], "86M parameters, 81.2 top-1"),
    "refined_vit_s": Variant(_SIZES["s"] | _LARGE, "25M parameters, 83.6 top-1"),
    "refined_vit_m": Variant(_SIZES["m"] | _LARGE, "55M parameters, 84.6 top-1"),
    "refined_vit_l": Variant(_SIZES["l"] | _LARGE, "81M parameters, 84.9 top-1"),
}
RELEASED = {
    "refined_vit_s_released": Variant(_SIZES["s"], "25,408,656 parameters, 83.6 top-1"),
    "refined_vit_m_released": Variant(_SIZES["m"], "55,450,932 parameters, 84.6 top-1"),
    "refined_vit_l_released": Variant(_SIZES["l"], "81,150,192 parameters, 84.9 top-1"),
}
_CROPS = dict(zip(RELEASED, (0.9, 1.0, 1.13), strict=True))  # above 1: receptive-field calibration


def _heads_cfg(conv_embed: bool, dense_head: bool) -> dict[str, Any]:
    first = "patch_embed.conv1" if conv_embed else "patch_embed.proj"
    return dict(first_conv=first, classifier=("head", "aux_head") if dense_head else "head")


def _all_cfgs() -> dict[str, Any]:
    """Return the pretrained_cfg of every variant; no URL, as the authors' weights have to be given as a file."""
    cfgs = {}
    for name, variant in VARIANTS.items():
        cfgs[name] = image_cfg(**_heads_cfg("conv_embed" in variant.arguments, False))
    for name, crop in _CROPS.items():
        half = (0.5, 0.5, 0.5)
        cfgs[name] = image_cfg(crop_pct=crop, mean=half, std=half, **_heads_cfg(True, True))
    return cfgs


default_cfgs = generate_default_cfgs(_all_cfgs())


def _create(kind: type, name: str, pretrained: bool, **arguments: Any) -> nn.Module:
    released = kind is ReleasedRefinedViT
    cfg = _heads_cfg(
        released or arguments.get("conv_embed", False), arguments.get("dense_head", released)
    )
    return build_variant(kind, name, pretrained, own_cfg=cfg, **arguments)


register_variants(__name__, partial(_create, RefinedViT), VARIANTS)
register_variants(__name__, partial(_create, ReleasedRefinedViT), RELEASED)
