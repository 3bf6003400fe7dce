"""Transformed CNNs: ResNets whose last stage has gated positional self-attention, initialised from the CNN's weights.

A T-ResNet is timm's ResNet after two edits: `Unstride` on layer4 (as in BoTNet; it changes the function), then
`ConvToGPSA` on conv2 of every block there (with init="exact" it does not). In a T-CIFAR-ResNet every convolution of
layer3 is recast at its own stride. `pretrained=True` loads the CNN's weights; `init`, `locality` and `gate` are those
of `ConvToGPSA`.
"""

from functools import partial
from typing import Any

import timm
from timm.layers import get_attn
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import Bottleneck, ResNet
from torch import Tensor, nn

from isomorph.layers import GPSA2d
from isomorph.layers.weight_decay import parameters_without_decay
from isomorph.models import cifar_resnet
from isomorph.models.cifar_resnet import CifarResNet, cifar_cfg, create_cifar_resnet
from isomorph.models.foreign_checkpoints import ForeignCheckpoints
from isomorph.surgery import ConvToGPSA, Edit, Unstride, replay, targets

RESNET_RS = dict(stem_width=32, stem_type="deep", replace_stem_pool=True, avg_down=True)
RESNET_RS["block_args"] = dict(attn_layer=partial(get_attn("se"), rd_ratio=0.25))
RESNET_D = dict(stem_width=32, stem_type="deep", avg_down=True)

VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "t_resnetrs50": ("resnetrs50", dict(layers=(3, 4, 6, 3), **RESNET_RS), 224),
    "t_resnetrs101": ("resnetrs101", dict(layers=(3, 4, 23, 3), **RESNET_RS), 224),
    "t_resnetrs152": ("resnetrs152", dict(layers=(3, 8, 36, 3), **RESNET_RS), 320),
    "t_resnetrs200": ("resnetrs200", dict(layers=(3, 24, 36, 3), **RESNET_RS), 320),
    "t_resnetrs270": ("resnetrs270", dict(layers=(4, 29, 53, 4), **RESNET_RS), 320),
    "t_resnetrs350": ("resnetrs350", dict(layers=(4, 36, 72, 4), **RESNET_RS), 320),
    "t_resnet50d": ("resnet50d", dict(layers=(3, 4, 6, 3), **RESNET_D), 320),
    "t_resnet101d": ("resnet101d", dict(layers=(3, 4, 23, 3), **RESNET_D), 384),
    "t_resnet152d": ("resnet152d", dict(layers=(3, 8, 36, 3), **RESNET_D), 384),
    "t_resnet200d": ("resnet200d", dict(layers=(3, 24, 36, 3), **RESNET_D), 384),
}
"""timm backbone, its arguments and the fine-tuning resolution of each variant (T-CNN Table 1 and Table 5)."""


class TransformedMixin(ForeignCheckpoints):
    """Recasting, checkpoints and weight decay of a CNN with convolutions recast as attention."""

    def is_foreign(self, state: dict[str, Tensor]) -> bool:
        """Return True for a CNN's weights: the filters of every attention layer, and no other tensor of any."""
        layers = [name for name, module in self.named_modules() if isinstance(module, GPSA2d)]
        filters = bool(layers) and all(f"{name}.weight" in state for name in layers)
        return filters and not any(name in state for name in _attention_tensors(self))

    def convert_foreign(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return checkpoint_filter_fn(state, self)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the centres, localities and gates of the attention layers."""
        return parameters_without_decay(self)

    def recast_convs(self, where: str, rule: ConvToGPSA) -> None:
        """Recast convolutions in place, while the network is being built."""
        replay(self, Edit(rule, tuple(targets(self, rule, where))))


class TResNet(TransformedMixin, ResNet):
    """ResNet whose last stage has no stride and GPSA2d in place of conv2.

    Shape: x (B, in_chans, H, W) -> (B, num_classes)
    Source: T-CNN section 2, "Architectural details"
    """

    def __init__(
        self, init: str = "paper", locality: float | None = None, gate: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(block=Bottleneck, **kwargs)
        replay(self, Edit(Unstride(), ("layer4",)))
        self.feature_info[-1]["reduction"] //= 2
        self.recast_convs("layer4.*.conv2", ConvToGPSA(init, locality, gate))  # type: ignore[arg-type]


class TCifarResNet(TransformedMixin, CifarResNet):
    """CIFAR ResNet with GPSA2d in place of every convolution of layer3, each at its own stride.

    Shape: x (B, in_chans, H, W) -> (B, num_classes)
    """

    def __init__(
        self, init: str = "paper", locality: float | None = None, gate: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.recast_convs("layer3.*.conv?", ConvToGPSA(init, locality, gate))  # type: ignore[arg-type]


def _attention_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the attention layers that a convolution does not have."""
    return {
        f"{name}.{key}": tensor
        for name, module in model.named_modules()
        if isinstance(module, GPSA2d)
        for key, tensor in module.state_dict().items()
        if key not in ("weight", "bias")
    }


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Convert a CNN's checkpoint for a T-CNN: the other tensors of its attention stay at their initialisation."""
    if isinstance(model, CifarResNet):
        state_dict = cifar_resnet.checkpoint_filter_fn(state_dict, model)
    return {**_attention_tensors(model), **state_dict}


def _backbone_cfg(base: str, resolution: int) -> dict[str, Any]:
    """Return timm's pretrained_cfg of the backbone, at the paper's fine-tuning resolution."""
    cfg = timm.models.get_pretrained_cfg(base).to_dict()
    for key in ("architecture", "tag", "test_input_size", "hf_hub_id"):
        cfg.pop(key, None)
    return {**cfg, "input_size": (3, resolution, resolution), "pool_size": (resolution // 16, resolution // 16)}


default_cfgs = generate_default_cfgs(
    {f"{name}.cnn_in1k": _backbone_cfg(base, resolution) for name, (base, _, resolution) in VARIANTS.items()}
    | {f"t_{base}.cnn_cifar10": cifar_cfg(base) for base in ("cifar_resnet20", "cifar_resnet56")}
)


def _create_tresnet(variant: str, pretrained: bool, **kwargs: Any) -> TResNet:
    """Build a variant through timm, with the backbone's weights if pretrained."""
    arguments = {**VARIANTS[variant][1], **kwargs}
    return build_model_with_cfg(TResNet, variant, pretrained, pretrained_filter_fn=checkpoint_filter_fn, **arguments)


@register_model
def t_resnetrs50(pretrained: bool = False, **kwargs: Any) -> TResNet:
    """T-ResNet50-RS: 38M parameters, 81.0 top-1 at 224 (T-CNN Table 2)."""
    return _create_tresnet("t_resnetrs50", pretrained, **kwargs)


@register_model
def t_resnetrs101(pretrained: bool = False, **kwargs: Any) -> TResNet:
    """T-ResNet101-RS: 66M parameters, 82.4 top-1 at 224 (T-CNN Table 2)."""
    return _create_tresnet("t_resnetrs101", pretrained, **kwargs)


@register_model
def t_resnetrs152(pretrained: bool = False, **kwargs: Any) -> TResNet:
    """T-ResNet152-RS: 89M parameters, 83.7 top-1 at 320 (T-CNN Table 2)."""
    return _create_tresnet("t_resnetrs152", pretrained, **kwargs)


@register_model
def t_resnetrs200(pretrained: bool = False, **kwargs: Any) -> TResNet:
    """T-ResNet200-RS: 96M parameters, 84.0 top-1 at 320 (T-CNN Table 2)."""
    return _create_tresnet("t_resnetrs200", pretrained, **kwargs)


@register_model
def t_resnetrs270(pretrained: bool = False, **kwargs: Any) -> TResNet:
    """T-ResNet270-RS: 133M parameters, 84.3 top-1 at 320 (T-CNN Table 2)."""
    return _create_tresnet("t_resnetrs270", pretrained, **kwargs)


@register_model
def t_resnetrs350(pretrained: bool = False, **kwargs: Any) -> TResNet:
    """T-ResNet350-RS: 167M parameters, 84.5 top-1 at 320 (T-CNN Table 2)."""
    return _create_tresnet("t_resnetrs350", pretrained, **kwargs)


@register_model
def t_resnet50d(pretrained: bool = False, **kwargs: Any) -> TResNet:
    """T-ResNet50-D: 81.6 top-1 at 320 (T-CNN Table 5)."""
    return _create_tresnet("t_resnet50d", pretrained, **kwargs)


@register_model
def t_resnet101d(pretrained: bool = False, **kwargs: Any) -> TResNet:
    """T-ResNet101-D: 83.1 top-1 at 384 (T-CNN Table 5)."""
    return _create_tresnet("t_resnet101d", pretrained, **kwargs)


@register_model
def t_resnet152d(pretrained: bool = False, **kwargs: Any) -> TResNet:
    """T-ResNet152-D: 83.8 top-1 at 384 (T-CNN Table 5)."""
    return _create_tresnet("t_resnet152d", pretrained, **kwargs)


@register_model
def t_resnet200d(pretrained: bool = False, **kwargs: Any) -> TResNet:
    """T-ResNet200-D: 83.9 top-1 at 384 (T-CNN Table 5)."""
    return _create_tresnet("t_resnet200d", pretrained, **kwargs)


@register_model
def t_cifar_resnet20(pretrained: bool = False, **kwargs: Any) -> TCifarResNet:
    """T-CIFAR-ResNet-20: cifar_resnet20 with the six convolutions of layer3 as attention."""
    kwargs["filter_fn"] = checkpoint_filter_fn
    return create_cifar_resnet("t_cifar_resnet20", "cifar_resnet20", TCifarResNet, pretrained, **kwargs)  # type: ignore[return-value]


@register_model
def t_cifar_resnet56(pretrained: bool = False, **kwargs: Any) -> TCifarResNet:
    """T-CIFAR-ResNet-56: cifar_resnet56 with the eighteen convolutions of layer3 as attention."""
    kwargs["filter_fn"] = checkpoint_filter_fn
    return create_cifar_resnet("t_cifar_resnet56", "cifar_resnet56", TCifarResNet, pretrained, **kwargs)  # type: ignore[return-value]
