"""VanillaNet: a plain network of convolutions and pooling, trained with twice as many layers as it has when fused.

In training every layer is a pair with a ReLU between, which is annealed to the identity (`anneal.epochs` in a recipe).
`iso.fuse` then merges each pair: `vanillanet_5` has five layers.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from timm.layers import SelectAdaptivePool2d, trunc_normal_
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.annealed import AnnealedPair, SeriesActivation
from isomorph.models.base import (
    StagedNet,
    State,
    Variant,
    build_variant,
    image_cfg,
    register_variants,
    renamed_in_order,
    unwrap_state_dict,
)

PATCH = 4


class VanillaNet(StagedNet):
    """A plain network of a stem, stages of one layer each, and a classifier, with timm's interface.

    `dims` are the channels of the stem and of every stage, `strides` the stride of max-pooling in each stage. The
    activations have (2 act_num + 1)^2 taps. `slope` is the initial slope of the annealed ReLUs: 0 to train the network,
    1 for a network whose annealing is complete.

    Shape: x (B, in_chans, height, width) -> (B, num_classes)
    Source: VanillaNet (Chen et al., 2023) section 3
    Raises: UserError if dims does not have one number more than strides.
    """

    # Arguments that create the network to fuse, with one layer for each pair.
    fused_arguments: ClassVar[dict[str, Any]] = {"slope": 1.0}

    def __init__(
        self,
        dims: Sequence[int] = (512, 1024, 2048, 4096),
        strides: Sequence[int] = (2, 2, 2),
        act_num: int = 3,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        slope: float = 0.0,
    ) -> None:
        super().__init__()
        if len(dims) != len(strides) + 1:
            raise UserError(
                f"dims {list(dims)} must have one number more than strides {list(strides)}: the stem's",
            )
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.drop_rate = drop_rate
        self.slope = slope
        self.num_features = self.head_hidden_size = dims[-1]
        first = nn.Conv2d(in_chans, dims[0], PATCH, PATCH)
        pair = AnnealedPair(first, nn.Conv2d(dims[0], dims[0], 1), slope=slope)
        self.stem = nn.Sequential(OrderedDict(pair=pair, act=SeriesActivation(dims[0], act_num)))
        reduction = PATCH
        self.feature_info = [dict(num_chs=dims[0], reduction=reduction, module="stem")]
        self.stages = nn.ModuleList()
        for i, (before, after, stride) in enumerate(zip(dims[:-1], dims[1:], strides, strict=True)):
            self.stages.append(_build_stage(before, after, stride, act_num, slope))
            reduction *= stride
            self.feature_info.append(dict(num_chs=after, reduction=reduction, module=f"stages.{i}"))
        self.global_pool = SelectAdaptivePool2d(pool_type=global_pool, flatten=bool(global_pool))
        self.head = self.make_head()
        self.apply(_initialise)

    def make_head(self) -> nn.Module:
        """Return a new classifier, a pair of linear layers; the identity without classes."""
        if not self.num_classes:
            return nn.Identity()
        first = nn.Linear(self.num_features * self.global_pool.feat_mult(), self.num_classes)
        return AnnealedPair(
            first, nn.Linear(self.num_classes, self.num_classes), last_norm=False, slope=self.slope
        )

    def embed(self, x: Tensor) -> Tensor:
        return self.stem(x)

    def get_classifier(self) -> nn.Module:
        """Return the last layer, which gives the logits."""
        return getattr(self.head, "second", self.head)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by an untrained one, fused and annealed as the old one is."""
        old = self.head
        self.num_classes = num_classes
        if global_pool is not None:
            self.global_pool = SelectAdaptivePool2d(
                pool_type=global_pool, flatten=bool(global_pool)
            )
        act = getattr(old, "act", None)
        if act is not None:
            self.slope = float(act.slope)
        elif isinstance(old, nn.Linear):
            self.slope = 1.0  # a pair became one layer, so its ReLU was the identity
        self.head = self.make_head().apply(_initialise)
        is_fused = not isinstance(old, AnnealedPair | nn.Identity)
        if is_fused and num_classes:
            self.head = self.head.eval().fuse()  # type: ignore[operator]
        self.head.to(next(self.stem.parameters())).train(self.training)

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Return patterns of parameter names by stage, for layer decay."""
        return dict(stem=r"^stem", blocks=r"^stages\.(\d+)")


def _build_stage(before: int, after: int, stride: int, act_num: int, slope: float) -> nn.Sequential:
    pair = AnnealedPair(nn.Conv2d(before, before, 1), nn.Conv2d(before, after, 1), slope=slope)
    pool = nn.Identity() if stride == 1 else nn.MaxPool2d(stride)
    return nn.Sequential(OrderedDict(pair=pair, pool=pool, act=SeriesActivation(after, act_num)))


def _initialise(module: nn.Module) -> None:
    """Initialise weights with standard deviation .02 and biases with 0, as published."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def checkpoint_filter_fn(state_dict: State, model: nn.Module) -> State:
    """Convert a public checkpoint: same order, a classifier of convolutions, annealing complete (slopes are 1)."""
    state = unwrap_state_dict(state_dict)
    model_state = model.state_dict()
    slopes = [name for name in model_state if name.endswith(".slope")]
    renamed = renamed_in_order(state, [name for name in model_state if name not in slopes])
    if "stem1.0.weight" not in state or renamed is None:
        return state
    for name, tensor in renamed.items():
        if name.startswith("head.") and tensor.ndim == 4:
            renamed[name] = tensor.flatten(1)
    for name in slopes:
        renamed[name] = torch.ones_like(model_state[name])
    return renamed


_DESCRIPTION = "15.5M parameters fused, 72.5 top-1 (VanillaNet Table 4)"
VARIANTS = {
    "vanillanet_5": Variant(dict(dims=(512, 1024, 2048, 4096), strides=(2, 2, 2)), _DESCRIPTION)
}
_LAYERS = dict(first_conv="stem.pair.first", classifier=("head.first", "head.norm1", "head.second"))
# No URL: weights come as a file.
default_cfgs = generate_default_cfgs(
    {name: image_cfg(pool_size=(7, 7), **_LAYERS) for name in VARIANTS}
)


def _create_vanillanet(name: str, pretrained: bool, **arguments: Any) -> VanillaNet:
    features = dict(out_indices=tuple(range(len(arguments["dims"]))), feature_cls="getter")
    return build_variant(VanillaNet, name, pretrained, features, **arguments)


register_variants(__name__, _create_vanillanet, VARIANTS)
