"""CoAtNet: a stem, stages of MBConv, then stages of Transformer blocks with relative attention; sizes 0 to 7.

A layout is written as in the paper. `C-C-T-T` has four stages after the stem, each at half the resolution of the one
before; C is convolution, T attention. Letters without a hyphen between them share a resolution: the third stage of
`C-C-CT-T`, CoAtNet-6's layout, is mixed. The stem is the letter `S`, which may be left out, or `P` for patches: `PT`,
patches and then Transformer blocks, is ViT_REL.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers import (
    Attention,
    DropPath,
    LayerNorm2d,
    Mlp,
    NormMlpClassifierHead,
    PatchEmbed,
    calculate_drop_path_rates,
    to_2tuple,
)
from timm.models import generate_default_cfgs
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import LayerNormMBConv, MBConv, PostRelativeAttention, RelativeAttention
from isomorph.layers.grid import GridSize
from isomorph.layers.modes import is_functorch_tensor
from isomorph.layers.relative.attention import resize_table
from isomorph.layers.relative.mbconv import BatchNormStem, LayerNormStem, make_pool, make_shortcut
from isomorph.models.base import (
    ForeignCheckpoints,
    StagedNet,
    State,
    Variant,
    build_variant,
    image_cfg,
    register_variants,
    require_images,
    unwrap_state_dict,
)
from isomorph.spec import ImageSize

# Both read sizes or layouts, so torch.fx must call them rather than trace into them.
torch.fx.wrap("require_images")
torch.fx.wrap("to_channels_last")

LayerNorm = partial(nn.LayerNorm, eps=1e-6)

# Attention for each place of the relative bias: before or after the softmax (eq. 3), or nowhere
# (Table 6).
ATTENTION = {"pre": RelativeAttention, "post": PostRelativeAttention, "none": Attention}


class TransformerBlock(nn.Module):
    """Attention between the positions of a feature map, then an MLP, both pre-activated; stride 2 halves the map.

    x = Proj(Pool(x)) + attn(Pool(norm1(x))),    x = x + mlp(norm2(x))

    `relative` is one of `ATTENTION`. `grid_size` is the height and width of the output, at the image size that the
    network is created for.

    Shape: x (B, dim, H, W) -> (B, dim_out, ceil(H / stride), ceil(W / stride))
    Source: CoAtNet A.1, eq. 4; without relative attention Table 6
    Raises: UserError if head_dim does not divide dim_out.
    """

    def __init__(
        self,
        dim: int,
        dim_out: int,
        stride: int = 1,
        head_dim: int = 32,
        relative: str = "pre",
        grid_size: GridSize = (14, 14),
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        if dim_out % head_dim:
            raise UserError(f"head_dim {head_dim} does not divide the width {dim_out}")
        self.shortcut = make_shortcut(dim, dim_out, stride)
        self.norm1 = LayerNorm(dim)
        self.pool = make_pool(stride)
        arguments: dict[str, Any] = dict(attn_head_dim=head_dim, dim_out=dim_out, qkv_bias=True)
        if relative != "none":
            arguments["grid_size"] = grid_size
        self.attn = ATTENTION[relative](dim, dim_out // head_dim, **arguments)
        self.norm2 = LayerNorm(dim_out)
        self.mlp = Mlp(dim_out, 4 * dim_out)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x.permute(0, 2, 3, 1))  # (B, H, W, dim)
        y = self.pool(y.permute(0, 3, 1, 2))
        y = y.permute(0, 2, 3, 1)  # (B, H', W', dim)
        if isinstance(self.attn, RelativeAttention):
            y = self.attn(y)
        else:  # plain attention takes tokens
            grid_size = y.shape[1:3]
            y = self.attn(y.flatten(1, 2)).unflatten(1, grid_size)
        x = self.shortcut(x).permute(0, 2, 3, 1)  # (B, H', W', dim_out)
        x = x + self.drop_path(y)
        x = x + self.drop_path(self.mlp(self.norm2(x)))
        return x.permute(0, 3, 1, 2)


# Stem and convolutional block for each norm.
BLOCKS_BY_NORM = {"batch": (BatchNormStem, MBConv), "layer": (LayerNormStem, LayerNormMBConv)}
STEM_DEPTHS = {"S": 2, "P": 1}


class BlockGroup(NamedTuple):
    """Consecutive blocks of one kind and width; if `halves`, the first one halves the feature map."""

    kind: str
    halves: bool
    depth: int
    width: int


def split_layout(layout: str) -> list[str]:
    """Return the stages of a layout, the first of which begins with the stem's letter."""
    if layout[:1] not in STEM_DEPTHS:
        layout = f"S-{layout}"
    return layout.split("-")


def parse_layout(
    layout: str,
    depths: Sequence[int],
    widths: Sequence[int],
) -> list[list[BlockGroup]]:
    """Return the groups of each stage, the stem first. Raises: UserError for an unreadable layout, or unfit sizes."""
    stages = split_layout(layout)
    letters = "".join(stages)
    if not all(stages) or set(letters[1:]) - set("CT") or len(letters) < 2:
        raise UserError(
            f"layout {layout!r} is invalid; write stages of C and T, as in C-C-T-T, C-C-CT-T or PT",
        )
    if not len(depths) == len(widths) == len(letters):
        numbers_given = f"not {len(depths)} and {len(widths)}"
        raise UserError(
            f"layout {layout!r} with its stem has {len(letters)} letters; give as many sizes, {numbers_given}",
        )
    first = STEM_DEPTHS[letters[0]]
    if depths[0] != first:
        raise UserError(
            f"depths {list(depths)} must begin with {first}, the depth of stem {letters[0]}",
        )
    sizes = iter(zip(depths, widths, strict=True))
    groups = []
    for stage in stages:
        stage_groups = []
        for i, kind in enumerate(stage):
            depth, width = next(sizes)
            stage_groups.append(BlockGroup(kind, halves=i == 0, depth=depth, width=width))
        groups.append(stage_groups)
    return groups


def to_channels_last(x: Tensor) -> Tensor:
    """Return the images in channels-last memory format; unchanged in torch.func transforms, where it does not exist."""
    return x if is_functorch_tensor(x) else x.contiguous(memory_format=torch.channels_last)


def _init_weights(module: nn.Module) -> None:
    """Initialise as EfficientNet does (normal, by fan out), linear layers by Xavier; the paper does not say how."""
    if isinstance(module, nn.Conv2d):
        fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
    if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class CoAtNet(ForeignCheckpoints, StagedNet):
    """CoAtNet: stages of convolution, then stages of attention, for images of any size, with timm's interface.

    `layout` is written as above; `depths` and `widths` have one number for each of its letters, the
    stem's first. `head_dim` is the number of channels of an attention head. `norm`, "batch" or "layer",
    is that of the stem and the convolutional blocks. `stride_on` is InvertedBottleneck's. `relative`
    adds relative attention "pre" or "post" the softmax, or not at all ("none"). With `head_hidden`, the
    pooled features pass a linear layer of their own width and a tanh before the classifier, which the
    printed parameter counts ask for (docs/decisions/019). `stem_stride` is for the stem S, `patch_size`
    for P. Relative attention has tables for `img_size`, which are resized at every call for other images.

    Shape: x (B, in_chans, height, width) -> (B, num_classes)
    Source: CoAtNet Fig. 4, Tables 3, 11, 12
    Raises: UserError for an unknown option, or a head_dim that does not divide a width.
    """

    def __init__(
        self,
        layout: str = "C-C-T-T",
        depths: Sequence[int] = (2, 2, 3, 5, 2),
        widths: Sequence[int] = (64, 96, 192, 384, 768),
        head_dim: int = 32,
        norm: str = "batch",
        stride_on: str = "expand",
        relative: str = "pre",
        head_hidden: bool = True,
        stem_stride: int = 2,
        patch_size: int = 16,
        img_size: int | ImageSize = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        for name, value, choices in (
            ("norm", norm, BLOCKS_BY_NORM),
            ("relative", relative, ATTENTION),
        ):
            if value not in choices:
                raise UserError(
                    f"{name} {value!r} is unknown; choose {' or '.join(map(repr, choices))}",
                )
        (first, *first_stage), *others = parse_layout(layout, depths, widths)
        self.img_size = to_2tuple(img_size)
        self.in_chans = in_chans
        self.num_classes = num_classes
        make_stem, convolution = BLOCKS_BY_NORM[norm]
        if first.kind == "P":
            patches = dict(flatten=False, dynamic_img_pad=True)
            self.stem: nn.Module = PatchEmbed(None, patch_size, in_chans, first.width, **patches)
            self.stem_stride = patch_size
        else:
            self.stem = make_stem(in_chans, first.width, stem_stride)
            self.stem_stride = stem_stride
        make: dict[str, Callable[..., nn.Module]] = dict(
            C=partial(convolution, stride_on=stride_on),
            T=partial(TransformerBlock, head_dim=head_dim, relative=relative),
        )
        self.build_stages([first_stage, *others], first.width, make, drop_path_rate)
        self.num_features = self.head_hidden_size = self.embed_dim = widths[-1]
        self.head_hidden = head_hidden
        hidden = widths[-1] if head_hidden else None
        self.head = NormMlpClassifierHead(
            widths[-1], num_classes, hidden, global_pool, drop_rate, norm_layer=LayerNorm2d
        )
        self.apply(_init_weights)

    def build_stages(
        self,
        stages: list[list[BlockGroup]],
        dim: int,
        make: dict[str, Callable[..., nn.Module]],
        drop_path: float,
    ) -> None:
        """Build the blocks of every resolution, and `feature_info` for timm's feature extraction."""
        depths = [sum(group.depth for group in groups) for groups in stages]
        rates = iter(calculate_drop_path_rates(drop_path, sum(depths)))
        self.stages = nn.Sequential()
        self.feature_info: list[dict[str, Any]] = []
        reduction = self.stem_stride
        for i, groups in enumerate(stages):
            blocks = []
            for group in groups:
                for number in range(group.depth):
                    stride = 2 if group.halves and number == 0 else 1
                    reduction *= stride
                    arguments: dict[str, Any] = dict(stride=stride, drop_path=next(rates))
                    if group.kind == "T":
                        arguments["grid_size"] = self.grid_at(reduction)
                    blocks.append(make[group.kind](dim, group.width, **arguments))
                    dim = group.width
            self.stages.append(nn.Sequential(*blocks))
            module = f"stages.{i}" if blocks else "stem"  # a stage without blocks leaves no trace
            self.feature_info.append(dict(num_chs=dim, reduction=reduction, module=module))

    def is_foreign(self, state: State) -> bool:
        """Return True for tables of relative attention of another image size."""
        for name, parameter in self.named_parameters():
            if (
                name.endswith(".relative_bias")
                and name in state
                and state[name].shape != parameter.shape
            ):
                return True
        return False

    def grid_at(self, reduction: int) -> GridSize:
        """Return the size of the feature map at a reduction, for the image size that the network is created for."""
        height, width = self.img_size
        return -(-height // reduction), -(-width // reduction)

    def set_input_size(self, img_size: int | ImageSize) -> None:
        """Resize the tables of relative attention permanently, which saves resizing at each call."""
        self.img_size = to_2tuple(img_size)
        update_model_input_size(self, self.img_size)
        # later ones may have been pruned
        for stage, info in zip(self.stages, self.feature_info, strict=False):
            for module in stage.modules():
                if isinstance(module, RelativeAttention):
                    module.set_grid_size(self.grid_at(info["reduction"]))

    def embed(self, x: Tensor) -> Tensor:
        """Return the first feature map, in channels-last format as all that follow. Raises: UserError for no images."""
        images = to_channels_last(require_images(x))
        return self.run_stage(self.stages[0], self.stem(images))

    def levels(self) -> list[Callable[[Tensor], Tensor]]:
        return [self.embed, *(partial(self.run_stage, stage) for stage in self.stages[1:])]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits, or the pooled features with `pre_logits`. Shape: x (B, C, H, W) -> (B, num_classes)"""
        return self.head(x, pre_logits=pre_logits)

    def arguments_to_record(self) -> dict[str, Any]:
        """Return the arguments without which a checkpoint's record would build another network."""
        return {"head_hidden": self.head_hidden}

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after the last index, and the head if stages go or it is to go; return the indices."""
        num_stages = len(self.stages)
        take, last = feature_take_indices(num_stages, indices)
        self.stages = self.stages[: last + 1]
        if prune_norm or prune_head or last + 1 < num_stages:
            self.num_classes = 0
            self.num_features = self.feature_info[last]["num_chs"]
            self.head.reset(0, "", reset_other=True)
            self.head_hidden_size = self.num_features
        return take

    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier; the hidden layer of the head stays."""
        self.num_classes = num_classes
        parameter = next(self.stem.parameters())
        self.head.reset(num_classes, global_pool, device=parameter.device, dtype=parameter.dtype)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of parameter names by stage, or by block, for layer decay."""
        blocks = r"^stages\.(\d+)" if coarse else r"^stages\.(\d+)\.(\d+)"
        return dict(stem=r"^stem", blocks=[(blocks, None), (r"^head\.norm", (99999,))])


def checkpoint_filter_fn(state_dict: State, model: CoAtNet) -> State:
    """Convert a CoAtNet's checkpoint: resize its tables to the model's image size (CoAtNet A.1)."""
    state = unwrap_state_dict(state_dict)
    for name, module in model.named_modules():
        table = state.get(f"{name}.relative_bias")
        if isinstance(module, RelativeAttention) and table is not None:
            state[f"{name}.relative_bias"] = resize_table(table, module.grid_size)
    return state


_MIXED: dict[str, Any] = dict(layout="C-C-CT-T", head_dim=128)


def _variant(
    depths: tuple[int, ...],
    widths: tuple[int, ...],
    description: str,
    **arguments: Any,
) -> Variant:
    return Variant(dict(depths=depths, widths=widths, **arguments), description)


# CoAtNet Tables 3, 11 and 12; differs: Table 12 has 2048 where CoAtNet-6 has 3072
# (docs/decisions/007). Parameters and top-1: Tables 4 and 5; the largest three were pre-trained on
# ImageNet-21K, JFT-300M and JFT-3B.
VARIANTS = {
    "coatnet_0": _variant((2, 2, 3, 5, 2), (64, 96, 192, 384, 768), "25M parameters, 81.6 top-1"),
    "coatnet_1": _variant((2, 2, 6, 14, 2), (64, 96, 192, 384, 768), "42M parameters, 83.3 top-1"),
    "coatnet_2": _variant(
        (2, 2, 6, 14, 2), (128, 128, 256, 512, 1024), "75M parameters, 84.1 top-1"
    ),
    "coatnet_3": _variant(
        (2, 2, 6, 14, 2), (192, 192, 384, 768, 1536), "168M parameters, 84.5 top-1"
    ),
    "coatnet_4": _variant(
        (2, 2, 12, 28, 2), (192, 192, 384, 768, 1536), "275M parameters, 88.56 top-1 at 512"
    ),
    "coatnet_5": _variant(
        (2, 2, 12, 28, 2),
        (192, 256, 512, 1280, 2048),
        "688M parameters, 89.77 top-1 at 512",
        head_dim=64,
    ),
    "coatnet_6": _variant(
        (2, 2, 4, 8, 42, 2),
        (192, 192, 384, 768, 1536, 3072),
        "1.47B parameters, 90.45 top-1 at 512",
        **_MIXED,
    ),
    "coatnet_7": _variant(
        (2, 2, 4, 8, 42, 2),
        (192, 256, 512, 1024, 2048, 3072),
        "2.44B parameters, 90.88 top-1 at 512",
        **_MIXED,
    ),
}

# What arguments mean in records of checkpoints that were written before these arguments existed.
ARGUMENTS_BEFORE = {"head_hidden": False}

_CFG = image_cfg(first_conv="stem.conv1", classifier="head.fc", pool_size=(7, 7))
default_cfgs = generate_default_cfgs(dict.fromkeys(VARIANTS, _CFG))  # no public weights exist


def _create_coatnet(name: str, pretrained: bool, **arguments: Any) -> CoAtNet:
    stages = split_layout(arguments.get("layout", "C-C-T-T"))
    features = dict(
        out_indices=tuple(range(len(stages))), feature_cls="getter", flatten_sequential=True
    )
    return build_variant(CoAtNet, name, pretrained, features, **arguments)


register_variants(__name__, _create_coatnet, VARIANTS)
