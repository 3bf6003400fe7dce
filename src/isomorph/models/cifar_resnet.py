"""The CIFAR ResNets of He et al. (2015, section 4.2), with the keys of the public CIFAR-10 weights.

Stages of 16, 32 and 64 channels run at 1/1, 1/2 and 1/4 of the size; with n blocks in each there are 6 n + 2 layers.
"""

import os
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from timm.layers import DropPath, calculate_drop_path_rates, create_classifier
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.models.base import (
    StagedNet,
    State,
    Variant,
    build_variant,
    image_cfg,
    register_variants,
    unwrap_state_dict,
)

CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

WEIGHTS = {
    20: "resnet20-12fca82f.th",
    32: "resnet32-d509ac18.th",
    44: "resnet44-014dd654.th",
    56: "resnet56-4bfd9763.th",
}
WEIGHT_FOLDER = "https://github.com/akamaster/pytorch_resnet_cifar10/raw/master/pretrained_models"


class CifarBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which subsamples and pads with zero channels where the shape changes.

    Shape: x (B, C, H, W) -> (B, C_out, ceil(H / stride), ceil(W / stride))
    Source: He et al., option A
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int = 1,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.act2 = nn.ReLU(inplace=True)
        self.new_channels = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.bn1(self.conv1(x)))
        y = self.drop_path(self.bn2(self.conv2(y)))
        return self.act2(y + self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        """Return every second position where the block strides, with channels of zeros around where it widens."""
        vertical, horizontal = self.conv1.stride
        before = self.new_channels // 2
        after = self.new_channels - before
        return F.pad(x[:, :, ::vertical, ::horizontal], (0, 0, 0, 0, before, after))


class CifarResNet(StagedNet):
    """Residual network for small images, with timm's interface.

    Shape: x (B, in_chans, H, W) -> (B, num_classes)
    Source: He et al. (2015), section 4.2
    """

    head_name = "linear"

    def __init__(
        self,
        blocks: int,
        num_classes: int = 10,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.drop_rate = drop_rate
        self.num_features = self.head_hidden_size = 64
        self.conv1 = nn.Conv2d(in_chans, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.act1 = nn.ReLU(inplace=True)
        rates = calculate_drop_path_rates(drop_path_rate, [blocks] * 3, stagewise=True)
        self.layer1 = _build_stage(16, 16, 1, rates[0])
        self.layer2 = _build_stage(16, 32, 2, rates[1])
        self.layer3 = _build_stage(32, 64, 2, rates[2])
        self.feature_info = [dict(num_chs=16, reduction=1, module="act1")]
        for i in range(3):
            reduction = 2**i
            self.feature_info.append(
                dict(num_chs=16 * reduction, reduction=reduction, module=f"layer{i + 1}")
            )
        self.global_pool, self.linear = create_classifier(64, num_classes, pool_type=global_pool)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @property
    def stages(self) -> list[nn.Sequential]:
        return [self.layer1, self.layer2, self.layer3]

    def embed(self, x: Tensor) -> Tensor:
        return self.act1(self.bn1(self.conv1(x)))

    def keep_stages(self, count: int) -> None:
        for i in range(count, 3):
            setattr(self, f"layer{i + 1}", nn.Sequential())

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier; `global_pool` keeps its kind by default."""
        old = next(self.conv1.parameters())
        self.num_classes = num_classes
        pool = self.global_pool.pool_type if global_pool is None else global_pool
        kind = dict(device=old.device, dtype=old.dtype)
        self.global_pool, self.linear = create_classifier(64, num_classes, pool_type=pool, **kind)

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Return patterns of parameter names by stage, or by block, for layer decay."""
        blocks = r"^layer(\d+)" if coarse else r"^layer(\d+)\.(\d+)"
        return dict(stem=r"^conv1|bn1", blocks=blocks)


def _build_stage(
    in_channels: int,
    out_channels: int,
    stride: int,
    rates: list[float],
) -> nn.Sequential:
    blocks = nn.Sequential(CifarBlock(in_channels, out_channels, stride, rates[0]))
    for rate in rates[1:]:
        blocks.append(CifarBlock(out_channels, out_channels, drop_path=rate))
    return blocks


def checkpoint_filter_fn(state_dict: State, model: nn.Module) -> State:
    """Convert a public checkpoint, which has its tensors in `state_dict`, a `module.` prefix and no batch counters."""
    state = unwrap_state_dict(state_dict)
    for name, tensor in model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            state.setdefault(name, tensor)
    return state


def cifar_cfg(depth: int) -> dict[str, Any]:
    """Return the pretrained_cfg of the public weights, which expect ImageNet's mean and std."""
    images = dict(input_size=(3, 32, 32), pool_size=(8, 8), crop_pct=1.0, interpolation="bilinear")
    layers = dict(
        num_classes=10, first_conv="conv1", classifier="linear", label_names=CIFAR10_CLASSES
    )
    return image_cfg(
        url=f"{WEIGHT_FOLDER}/{WEIGHTS[depth]}", license="bsd-2-clause", **images, **layers
    )


def create_cifar_resnet(
    name: str, pretrained: bool, depth: int, kind: type[CifarResNet] = CifarResNet, **arguments: Any
) -> CifarResNet:
    """Build a variant through timm; `depth` is that of the ResNet whose blocks and public weights it has, also where
    `kind` replaces its convolutions.

    The weights are a file in $ISOMORPH_DATA/weights if there is one. A pretrained_cfg given as a dict names weights of
    its own.
    """
    local = {}
    if "ISOMORPH_DATA" in os.environ and not isinstance(arguments.get("pretrained_cfg"), dict):
        folder = Path(os.environ["ISOMORPH_DATA"]).expanduser()
        file = folder / "weights" / f"cifar10_resnet{depth}.safetensors"
        if file.is_file():
            local["file"] = str(file)
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise UserError(f"depth {depth} must be 6 n + 2, with n blocks a stage: 8, 14, 20, 26, ...")
    features = dict(out_indices=(0, 1, 2, 3))
    return build_variant(kind, name, pretrained, features, local, blocks=blocks, **arguments)


VARIANTS = {
    "cifar_resnet20": Variant(dict(depth=20), "CIFAR ResNet-20: 269,722 parameters."),
    "cifar_resnet32": Variant(dict(depth=32), "CIFAR ResNet-32: 464,154 parameters."),
    "cifar_resnet44": Variant(dict(depth=44), "CIFAR ResNet-44: 658,586 parameters."),
    "cifar_resnet56": Variant(dict(depth=56), "CIFAR ResNet-56: 853,018 parameters."),
}

default_cfgs = generate_default_cfgs(
    {f"cifar_resnet{depth}.cifar10": cifar_cfg(depth) for depth in WEIGHTS}
)
register_variants(__name__, create_cifar_resnet, VARIANTS)
