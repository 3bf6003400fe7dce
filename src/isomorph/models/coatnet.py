"""CoAtNet: a stem, stages of MBConv, then stages of Transformer blocks with relative attention; sizes 0 to 7."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import LayerNorm2d, NormMlpClassifierHead, calculate_drop_path_rates
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from isomorph.layers import LayerNormMBConv, MBConv, RelativeAttention
from isomorph.layers.chunked import is_functorch_tensor
from isomorph.layers.mbconv import BatchNormStem, InvertedBottleneck, LayerNormStem, Stem
from isomorph.layers.relative_attention import resize_table
from isomorph.layers.weight_decay import parameters_without_decay
from isomorph.models.coatnet_blocks import PatchStem, PlainTransformerBlock, PostTransformerBlock, TransformerBlock
from isomorph.models.coatnet_layout import (
    BlockGroup,
    check_choices,
    check_positive_integers,
    check_rates,
    count_resolutions,
    parse_image_size,
    parse_layout,
)
from isomorph.models.foreign_checkpoints import ForeignCheckpoints
from isomorph.models.staged import StagedNet
from isomorph.models.vit_cfg import require_images, unwrap_state_dict, vit_cfg

# Both read sizes or layouts, so torch.fx must call them rather than trace into them.
torch.fx.wrap("require_images")
torch.fx.wrap("to_channels_last")

BLOCKS_BY_NORM: dict[str, tuple[type[Stem], type[InvertedBottleneck]]] = {
    "batch": (BatchNormStem, MBConv),
    "layer": (LayerNormStem, LayerNormMBConv),
}
"""Stem and convolutional block for each norm (Table 8)."""
BLOCKS_BY_ATTENTION: dict[str, type[TransformerBlock]] = {
    "pre": TransformerBlock,
    "post": PostTransformerBlock,
    "none": PlainTransformerBlock,
}
"""Transformer block for each kind of relative attention (eq. 3, Table 6)."""


def to_channels_last(x: Tensor) -> Tensor:
    """Return the images in channels-last memory format; unchanged in torch.func transforms, where it does not exist."""
    return x if is_functorch_tensor(x) else x.contiguous(memory_format=torch.channels_last)


def _init_weights(module: nn.Module) -> None:
    """Initialise convolutions as EfficientNet does (normal, by fan out), linear layers with Xavier's uniform.

    The paper does not say how.
    """
    if isinstance(module, nn.Conv2d):
        fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
    if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class CoAtNet(ForeignCheckpoints, StagedNet):
    """CoAtNet: stages of convolution, then stages of attention, for images of any size, with timm's interface.

    `layout` is described in coatnet_layout.py; `depths` and `widths` have one number for each of its letters, the
    stem's first. `head_dim` is the number of channels of an attention head. `norm`, "batch" or "layer", is that of the
    stem and the convolutional blocks. `stride_on` is InvertedBottleneck's. `relative` adds relative attention "pre" or
    "post" the softmax, or not at all ("none"). `stem_stride` is for the stem S, `patch_size` for P. `head_hidden_size`
    adds a linear layer and a tanh before the classifier, as in timm's CoAtNets. Relative attention has tables for
    `img_size`, which are resized at every call for other images.

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
        stem_stride: int = 2,
        patch_size: int = 16,
        head_hidden_size: int | None = None,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_choices(norm=norm, relative=relative, stride_on=stride_on, global_pool=global_pool)
        check_positive_integers(head_dim=head_dim, stem_stride=stem_stride, patch_size=patch_size)
        check_positive_integers(**(dict(head_hidden_size=head_hidden_size) if head_hidden_size else {}))
        check_rates(drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        (first, *rest), *others = parse_layout(layout, depths, widths)
        self.img_size, self.in_chans, self.num_classes = parse_image_size(img_size), in_chans, num_classes
        stem, convolution = BLOCKS_BY_NORM[norm]
        patches = first.kind == "P"
        self.stem_stride = patch_size if patches else stem_stride
        self.stem: nn.Module = (PatchStem if patches else stem)(in_chans, first.width, self.stem_stride)
        make: dict[str, Callable[..., nn.Module]] = dict(
            C=partial(convolution, stride_on=stride_on), T=partial(BLOCKS_BY_ATTENTION[relative], head_dim=head_dim)
        )
        self.build_stages([rest, *others], first.width, make, drop_path_rate)
        self.num_features = self.embed_dim = widths[-1]
        self.head = NormMlpClassifierHead(
            self.num_features, num_classes, head_hidden_size, global_pool, drop_rate, norm_layer=LayerNorm2d
        )
        self.head_hidden_size = self.head.num_features
        self.apply(_init_weights)

    def build_stages(
        self, stages: list[list[BlockGroup]], dim: int, make: dict[str, Callable[..., nn.Module]], drop_path: float
    ) -> None:
        """Build the blocks of every resolution, and `feature_info` for timm's feature extraction."""
        rates = iter(calculate_drop_path_rates(drop_path, sum(group.depth for groups in stages for group in groups)))
        self.stages = nn.Sequential()
        self.feature_info: list[dict[str, Any]] = []
        reduction = self.stem_stride
        for i, groups in enumerate(stages):
            blocks = []
            for group in groups:
                for stride in [2 if group.halves else 1] + [1] * (group.depth - 1):
                    reduction *= stride
                    grid = dict(grid_size=self.grid_at(reduction)) if group.kind == "T" else {}
                    blocks.append(make[group.kind](dim, group.width, stride, drop_path=next(rates), **grid))
                    dim = group.width
            self.stages.append(nn.Sequential(*blocks))
            module = f"stages.{i}" if blocks else "stem"  # a stage without blocks leaves no trace
            self.feature_info.append(dict(num_chs=dim, reduction=reduction, module=module))

    def is_foreign(self, state: dict[str, Tensor]) -> bool:
        """Return True for tables of relative attention that were made for another image size."""
        own = {n: parameter.shape for n, parameter in self.named_parameters() if n.endswith(".relative_bias")}
        return any(name in state and state[name].shape != shape for name, shape in own.items())

    def convert_foreign(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return checkpoint_filter_fn(state, self)

    def grid_at(self, reduction: int) -> tuple[int, int]:
        """Return the size of the feature map at a reduction, for the image size that the network is created for."""
        height, width = self.img_size
        return -(-height // reduction), -(-width // reduction)

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resize the tables of relative attention permanently, which saves resizing at each call."""
        self.img_size = parse_image_size(img_size)
        for stage, info in zip(self.stages, self.feature_info, strict=False):  # later ones may have been pruned
            for module in stage.modules():
                if isinstance(module, RelativeAttention):
                    module.set_grid_size(self.grid_at(info["reduction"]))

    def embed(self, x: Tensor) -> Tensor:
        """Return the first feature map, which like all that follow is in channels-last memory format.

        Raises: UserError if x is not a batch of images.
        """
        return self.run_stage(self.stages[0], self.stem(to_channels_last(require_images(x))))

    def levels(self) -> list[Callable[[Tensor], Tensor]]:
        """Return one function for each resolution."""
        return [self.embed, *(partial(self.run_stage, stage) for stage in self.stages[1:])]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool and classify. Shape: x (B, C, H, W) -> (B, num_classes)"""
        return self.head(x, pre_logits=pre_logits)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after the last index; return the indices.

        `prune_head` also drops pooling and classifier, `prune_norm` the norm between them. When stages are dropped the
        head goes too, as its width no longer fits.
        """
        take, last = feature_take_indices(len(self.stages), indices)
        pruned = last + 1 < len(self.stages)
        self.stages = self.stages[: last + 1]
        if prune_norm or prune_head or pruned:
            self.num_classes = 0
            self.num_features = self.feature_info[last]["num_chs"]
            self.head.reset(0, "", reset_other=prune_norm or pruned)
            self.head_hidden_size = self.num_features if pruned else self.head.num_features
        return take

    def get_classifier(self) -> nn.Module:
        """Return the classifier."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by an untrained one; with 0 classes the model returns pooled features."""
        self.num_classes = num_classes
        like = next(self.stem.parameters())
        self.head.reset(num_classes, global_pool, device=like.device, dtype=like.dtype)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the tables of relative attention."""
        return parameters_without_decay(self)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the parameter groups for layer decay: the stem, then stages or blocks, then the head."""
        blocks = r"^stages\.(\d+)" if coarse else r"^stages\.(\d+)\.(\d+)"
        return dict(stem=r"^stem", blocks=[(blocks, None), (r"^head\.norm", (99999,))])


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: CoAtNet) -> dict[str, Tensor]:
    """Convert a CoAtNet's checkpoint: resize its tables to the model's image size (CoAtNet A.1)."""
    state = unwrap_state_dict(state_dict)
    for name, module in model.named_modules():
        table = state.get(f"{name}.relative_bias")
        if isinstance(module, RelativeAttention) and table is not None:
            state[f"{name}.relative_bias"] = resize_table(table, module.grid_size)
    return state


MIXED = dict(layout="C-C-CT-T", head_dim=128)
VARIANTS: dict[str, dict[str, Any]] = {
    "coatnet_0": dict(depths=(2, 2, 3, 5, 2), widths=(64, 96, 192, 384, 768)),
    "coatnet_1": dict(depths=(2, 2, 6, 14, 2), widths=(64, 96, 192, 384, 768)),
    "coatnet_2": dict(depths=(2, 2, 6, 14, 2), widths=(128, 128, 256, 512, 1024)),
    "coatnet_3": dict(depths=(2, 2, 6, 14, 2), widths=(192, 192, 384, 768, 1536)),
    "coatnet_4": dict(depths=(2, 2, 12, 28, 2), widths=(192, 192, 384, 768, 1536)),
    "coatnet_5": dict(depths=(2, 2, 12, 28, 2), widths=(192, 256, 512, 1280, 2048), head_dim=64),
    "coatnet_6": dict(depths=(2, 2, 4, 8, 42, 2), widths=(192, 192, 384, 768, 1536, 3072), **MIXED),
    "coatnet_7": dict(depths=(2, 2, 4, 8, 42, 2), widths=(192, 256, 512, 1024, 2048, 3072), **MIXED),
}
"""CoAtNet Tables 3, 11 and 12; differs: Table 12 has 2048 where CoAtNet-6 has 3072 (docs/decisions/007)."""

default_cfgs = generate_default_cfgs(
    {name: vit_cfg(first_conv="stem.conv1", classifier="head.fc", pool_size=(7, 7)) for name in VARIANTS}
)  # no public weights exist


def _create_coatnet(variant: str, pretrained: bool, **kwargs: Any) -> CoAtNet:
    """Build a variant through timm, with features of every resolution."""
    arguments = VARIANTS[variant] | kwargs
    levels = tuple(range(count_resolutions(arguments.get("layout", "C-C-T-T"))))
    features = dict(out_indices=arguments.pop("out_indices", levels), feature_cls="getter", flatten_sequential=True)
    return build_model_with_cfg(
        CoAtNet, variant, pretrained, pretrained_filter_fn=checkpoint_filter_fn, feature_cfg=features, **arguments
    )


@register_model
def coatnet_0(pretrained: bool = False, **kwargs: Any) -> CoAtNet:
    """CoAtNet-0: 25M parameters, 81.6 top-1 (CoAtNet Table 4)."""
    return _create_coatnet("coatnet_0", pretrained, **kwargs)


@register_model
def coatnet_1(pretrained: bool = False, **kwargs: Any) -> CoAtNet:
    """CoAtNet-1: 42M parameters, 83.3 top-1 (CoAtNet Table 4)."""
    return _create_coatnet("coatnet_1", pretrained, **kwargs)


@register_model
def coatnet_2(pretrained: bool = False, **kwargs: Any) -> CoAtNet:
    """CoAtNet-2: 75M parameters, 84.1 top-1 (CoAtNet Table 4)."""
    return _create_coatnet("coatnet_2", pretrained, **kwargs)


@register_model
def coatnet_3(pretrained: bool = False, **kwargs: Any) -> CoAtNet:
    """CoAtNet-3: 168M parameters, 84.5 top-1 (CoAtNet Table 4)."""
    return _create_coatnet("coatnet_3", pretrained, **kwargs)


@register_model
def coatnet_4(pretrained: bool = False, **kwargs: Any) -> CoAtNet:
    """CoAtNet-4: 275M parameters, 88.56 top-1 at 512 after ImageNet-21K (CoAtNet Table 4)."""
    return _create_coatnet("coatnet_4", pretrained, **kwargs)


@register_model
def coatnet_5(pretrained: bool = False, **kwargs: Any) -> CoAtNet:
    """CoAtNet-5: 688M parameters, 89.77 top-1 at 512 after JFT-300M (CoAtNet Table 5)."""
    return _create_coatnet("coatnet_5", pretrained, **kwargs)


@register_model
def coatnet_6(pretrained: bool = False, **kwargs: Any) -> CoAtNet:
    """CoAtNet-6: 1.47B parameters, 90.45 top-1 at 512 after JFT-3B (CoAtNet Table 5)."""
    return _create_coatnet("coatnet_6", pretrained, **kwargs)


@register_model
def coatnet_7(pretrained: bool = False, **kwargs: Any) -> CoAtNet:
    """CoAtNet-7: 2.44B parameters, 90.88 top-1 at 512 after JFT-3B (CoAtNet Table 5)."""
    return _create_coatnet("coatnet_7", pretrained, **kwargs)
