"""Refined-ViT (Refiner): a ViT whose attention maps are refined, and may be reused by the blocks that follow.

It is timm's VisionTransformer with refined attention. Sizes S, M and L also have a convolutional patch embedding, a
narrower MLP, and no queries and keys in every second block, which reuses the maps of the block before. The networks
that the authors released compute another function; they are in `refined_vit_released.py`.
"""

from typing import Any

from timm.layers import Attention
from timm.models import generate_default_cfgs, register_model, vision_transformer
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import RefinedAttention, SpatialAttention
from isomorph.layers.refiner import MapConvolution
from isomorph.layers.reused_attention import ReusedAttention
from isomorph.models.conv_embed import ConvPatchEmbed
from isomorph.models.dense_head import DenseHeadViT, classifier_names
from isomorph.models.foreign_checkpoints import ForeignCheckpoints
from isomorph.models.vit_cfg import build_vit, unwrap_state_dict, vit_cfg
from isomorph.surgery import AttentionToRefined


class RefinedBlock(Block):
    """A ViT block with the given attention, called with the grid size if it is spatial; it passes no maps on.

    Shape: x (B, N, C), maps (B, nh, N, N) of an earlier block or None, grid_size (H, W) -> (B, N, C), maps or None
    """

    def __init__(self, attention: nn.Module, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attn = attention

    def attend(self, x: Tensor, maps: Tensor | None, **grid: Any) -> tuple[Tensor, Tensor | None]:
        """Return the output of attention and the maps for the next block."""
        return self.attn(x, **grid), None

    def forward(
        self, x: Tensor, maps: Tensor | None = None, grid_size: tuple[int, int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        grid = dict(grid_size=grid_size) if isinstance(self.attn, SpatialAttention) else {}
        y, maps = self.attend(self.norm1(x), maps, **grid)
        x = x + self.drop_path1(self.ls1(y))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x)))), maps


class MapSharingBlock(RefinedBlock):
    """A block that passes its refined maps to the next."""

    def attend(self, x: Tensor, maps: Tensor | None, **grid: Any) -> tuple[Tensor, Tensor]:
        return self.attn(x, return_maps=True, **grid)


class MapReusingBlock(RefinedBlock):
    """A block that applies the maps of an earlier block to its own values (Refiner B.4)."""

    def attend(self, x: Tensor, maps: Tensor | None, **grid: Any) -> tuple[Tensor, Tensor | None]:
        return self.attn(x, maps), maps


class RefinedViT(ForeignCheckpoints, DenseHeadViT):
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
        if not isinstance(share, int) or share < 0:
            raise UserError(f"share {share} must be a number of blocks, or 0 for none")
        if share and not reduce:
            raise UserError(
                "share needs reduce=True: without reduction there are more maps than heads in the next block"
            )
        if share and kwargs.get("scale_attn_norm"):
            raise UserError("scale_attn_norm needs share=0: blocks that reuse maps do not have this norm")
        if kwargs.get("attn_layer", Attention) is not Attention:
            raise UserError("attn_layer is not an argument of a Refined-ViT; give ratio, kernel, reduce and span")
        plain = ratio == kernel == 0
        prefix = int(kwargs.get("class_token", True)) + kwargs.get("reg_tokens", 0)
        form: Any = (ratio, 1 if plain else kernel, init, reduce, span, recompute, None, prefix)
        rule = AttentionToRefined(*form)

        def block(depth: int, **given: Any) -> RefinedBlock:
            if depth % (share + 1):
                return MapReusingBlock(_build_reusing_attention(given), **given)
            attention = _build_attention(rule, plain, share > 0, given)
            return (MapSharingBlock if share else RefinedBlock)(attention, **given)

        embed = dict(embed_layer=ConvPatchEmbed) if conv_embed else {}
        super().__init__(**{**kwargs, **embed, "block_fn": block})
        self.share, self.init, self.shares_maps = share, init, share > 0
        for layer in self.modules():
            if isinstance(layer, RefinedAttention):
                layer.is_revertible = False
        self.update_grid()

    def initial_state(self, grid_size: tuple[int, int]) -> tuple[None, tuple[int, int]]:
        """Return no maps, and the grid size, which every block gets."""
        return None, grid_size

    def run_block(self, i: int, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        maps, grid_size = state
        x, maps = self.call_block(i, x, maps, grid_size)
        return x, (maps, grid_size)

    def state_maps(self, state: Any) -> Any:
        return state[0]

    def update_grid(self) -> None:
        super().update_grid()
        for module in self.modules():
            if isinstance(module, SpatialAttention):
                module.grid_size = self.patch_embed.grid_size

    def is_foreign(self, state: dict[str, Tensor]) -> bool:
        return is_plain_vit(state, self)

    def convert_foreign(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return checkpoint_filter_fn(state, self)


def _attention_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a block that its attention takes."""
    names = ("dim", "num_heads", "qkv_bias", "qk_norm", "proj_bias", "attn_drop", "proj_drop", "norm_layer")
    return {name: given[name] for name in (*names, "device", "dtype")} | dict(scale_norm=given["scale_attn_norm"])


def _build_attention(rule: AttentionToRefined, plain: bool, giving: bool, given: dict[str, Any]) -> nn.Module:
    """Build the attention of a block that computes maps, in the fastest form that can return what it has to."""
    arguments = _attention_arguments(given)
    if plain and not giving:
        return Attention(**arguments)
    if rule.ratio == 0 and giving:  # the map is passed on, so it must be formed and convolved explicitly
        form: dict[str, Any] = dict(init=rule.init, device=given["device"], dtype=given["dtype"])
        refine = nn.Identity() if plain else MapConvolution(given["num_heads"], rule.kernel, **form)
        return RefinedAttention(refine=refine, recompute=rule.recompute, **arguments)
    return rule.new_layer(**arguments)


def _build_reusing_attention(given: dict[str, Any]) -> ReusedAttention:
    """Build the attention of a block that has values but no queries and keys."""
    kind = dict(device=given["device"], dtype=given["dtype"])
    arguments: dict[str, Any] = {name: given[name] for name in ("qkv_bias", "proj_bias", "proj_drop")}
    return ReusedAttention(given["dim"], given["num_heads"], **arguments, **kind)


def _refiner_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the refiners, which a plain ViT does not have."""
    return {name: tensor for name, tensor in model.state_dict().items() if ".attn.refine." in name}


def is_plain_vit(state: dict[str, Tensor], model: nn.Module) -> bool:
    """Return True if the model has refiners and the checkpoint is a plain ViT's, with queries and keys in block 1."""
    refiners = _refiner_tensors(model)
    return bool(refiners) and "blocks.1.attn.qkv.weight" in state and not any(name in state for name in refiners)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: RefinedViT) -> dict[str, Tensor]:
    """Convert a checkpoint: resize the position embedding, and give a plain ViT's refiners that change nothing.

    Raises: UserError for a plain ViT's checkpoint if the model reuses maps: queries and keys would be lost.
    """
    state: dict[str, Tensor] = vision_transformer.checkpoint_filter_fn(unwrap_state_dict(state_dict), model)
    if not is_plain_vit(state, model):
        return state
    if model.share:
        raise UserError("a plain ViT's checkpoint has queries and keys in every block; create the model with share=0")
    return state | _refiner_tensors(model) if model.init == "same-function" else state


VARIANTS: dict[str, dict[str, Any]] = {
    "refined_vit_b": dict(depth=12, embed_dim=768, num_heads=12),
    "refined_vit_s": dict(depth=16, embed_dim=384, num_heads=12, mlp_ratio=3, conv_embed=True, share=1),
    "refined_vit_m": dict(depth=32, embed_dim=420, num_heads=12, mlp_ratio=3, conv_embed=True, share=1),
    "refined_vit_l": dict(depth=32, embed_dim=512, num_heads=16, mlp_ratio=3, conv_embed=True, share=1),
}
"""Refiner Table 10. The published sizes of S, M and L come out with the released embedding and MLP, and shared maps."""


def _first_conv_name(conv_embed: bool) -> str:
    """Return the name of the layer that reads the image."""
    return "patch_embed.conv1" if conv_embed else "patch_embed.proj"


default_cfgs = generate_default_cfgs(
    {name: vit_cfg(first_conv=_first_conv_name("conv_embed" in shape)) for name, shape in VARIANTS.items()}
)  # no public weights exist


def _create_refined_vit(variant: str, pretrained: bool, **kwargs: Any) -> RefinedViT:
    """Build a variant through timm."""
    arguments = VARIANTS[variant] | kwargs
    cfg = dict(
        classifier=classifier_names(arguments.get("dense_head", False)),
        first_conv=_first_conv_name(arguments.get("conv_embed", False)),
    )
    return build_vit(RefinedViT, variant, pretrained, checkpoint_filter_fn, arguments, **cfg)


@register_model
def refined_vit_b(pretrained: bool = False, **kwargs: Any) -> RefinedViT:
    """Refined-ViT-Base: 86M parameters, 81.2 top-1 by the standard recipe (Refiner Tables 10, 11)."""
    return _create_refined_vit("refined_vit_b", pretrained, **kwargs)


@register_model
def refined_vit_s(pretrained: bool = False, **kwargs: Any) -> RefinedViT:
    """Refined-ViT-S: 25M parameters, 83.6 top-1 (Refiner Tables 7, 10)."""
    return _create_refined_vit("refined_vit_s", pretrained, **kwargs)


@register_model
def refined_vit_m(pretrained: bool = False, **kwargs: Any) -> RefinedViT:
    """Refined-ViT-M: 55M parameters, 84.6 top-1 (Refiner Tables 7, 10)."""
    return _create_refined_vit("refined_vit_m", pretrained, **kwargs)


@register_model
def refined_vit_l(pretrained: bool = False, **kwargs: Any) -> RefinedViT:
    """Refined-ViT-L: 81M parameters, 84.9 top-1 (Refiner Tables 7, 10)."""
    return _create_refined_vit("refined_vit_l", pretrained, **kwargs)
