"""Transformed CNNs: ResNets whose last stage has gated positional self-attention, initialised from the CNN's weights.

A T-ResNet is timm's ResNet after `Unstride` on layer4 (as in BoTNet; it changes the function), then `ConvToGPSA` on
every conv2 there. In a T-CIFAR-ResNet every convolution of layer3 is recast at its own stride.
"""

from functools import partial
from typing import Any

import timm
from timm.layers import get_attn
from timm.models import generate_default_cfgs
from timm.models.resnet import Bottleneck, ResNet
from torch import Tensor, nn

from isomorph.layers import GPSA2d
from isomorph.models import cifar_resnet
from isomorph.models.base import ForeignCheckpoints, Variant, build_variant, parameters_without_decay, register_variants
from isomorph.models.cifar_resnet import CifarResNet, cifar_cfg, create_cifar_resnet
from isomorph.surgery import ConvToGPSA, Edit, Unstride, apply_edit
from isomorph.surgery.recast import apply_rule

RESNET_RS = dict(stem_width=32, stem_type="deep", replace_stem_pool=True, avg_down=True)
RESNET_RS["block_args"] = dict(attn_layer=partial(get_attn("se"), rd_ratio=0.25))
RESNET_D = dict(stem_width=32, stem_type="deep", avg_down=True)

# timm's name, blocks by stage, form and fine-tuning resolution (T-CNN Tables 1 and 5) of each ResNet.
_NETWORKS: list[tuple[str, tuple[int, ...], dict[str, Any], int, str]] = [
    ("resnetrs50", (3, 4, 6, 3), RESNET_RS, 224, "38M parameters, 81.0 top-1 at 224 (T-CNN Table 2)"),
    ("resnetrs101", (3, 4, 23, 3), RESNET_RS, 224, "66M parameters, 82.4 top-1 at 224 (T-CNN Table 2)"),
    ("resnetrs152", (3, 8, 36, 3), RESNET_RS, 320, "89M parameters, 83.7 top-1 at 320 (T-CNN Table 2)"),
    ("resnetrs200", (3, 24, 36, 3), RESNET_RS, 320, "96M parameters, 84.0 top-1 at 320 (T-CNN Table 2)"),
    ("resnetrs270", (4, 29, 53, 4), RESNET_RS, 320, "133M parameters, 84.3 top-1 at 320 (T-CNN Table 2)"),
    ("resnetrs350", (4, 36, 72, 4), RESNET_RS, 320, "167M parameters, 84.5 top-1 at 320 (T-CNN Table 2)"),
    ("resnet50d", (3, 4, 6, 3), RESNET_D, 320, "81.6 top-1 at 320 (T-CNN Table 5)"),
    ("resnet101d", (3, 4, 23, 3), RESNET_D, 384, "83.1 top-1 at 384 (T-CNN Table 5)"),
    ("resnet152d", (3, 8, 36, 3), RESNET_D, 384, "83.8 top-1 at 384 (T-CNN Table 5)"),
    ("resnet200d", (3, 24, 36, 3), RESNET_D, 384, "83.9 top-1 at 384 (T-CNN Table 5)"),
]
VARIANTS = {f"t_{name}": Variant(dict(layers=layers, **form), text) for name, layers, form, _, text in _NETWORKS}


class TransformedMixin(ForeignCheckpoints):
    """Checkpoints and weight decay of a CNN with convolutions recast as attention."""

    def is_foreign(self, state: dict[str, Tensor]) -> bool:
        """Return True for a CNN's weights: the filters of every attention layer, and no other tensor of any."""
        layers = [name for name, module in self.named_modules() if isinstance(module, GPSA2d)]
        if not layers or any(f"{name}.weight" not in state for name in layers):
            return False
        return state.keys().isdisjoint(_attention_tensors(self))

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters of attention that weight decay would pull to other positions."""
        return parameters_without_decay(self)


class TResNet(TransformedMixin, ResNet):
    """ResNet whose last stage has no stride and GPSA2d in place of conv2.

    Shape: x (B, in_chans, H, W) -> (B, num_classes)
    Source: T-CNN section 2, "Architectural details"
    """

    def __init__(
        self, init: str = "paper", locality: float | None = None, gate: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(block=Bottleneck, **kwargs)
        apply_edit(self, Edit(Unstride(), ("layer4",)))
        self.feature_info[-1]["reduction"] //= 2
        apply_rule(self, ConvToGPSA(init, locality, gate), "layer4.*.conv2")  # type: ignore[arg-type]


class TCifarResNet(TransformedMixin, CifarResNet):
    """CIFAR ResNet with GPSA2d in place of every convolution of layer3, each at its own stride.

    Shape: x (B, in_chans, H, W) -> (B, num_classes)
    """

    def __init__(
        self, init: str = "paper", locality: float | None = None, gate: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        apply_rule(self, ConvToGPSA(init, locality, gate), "layer3.*.conv?")  # type: ignore[arg-type]


def _attention_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of attention layers that a convolution does not have."""
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, GPSA2d):
            for key, tensor in module.state_dict(prefix=f"{name}.").items():
                if key not in (f"{name}.weight", f"{name}.bias"):
                    tensors[key] = tensor
    return tensors


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Convert a CNN's checkpoint for a T-CNN: the other tensors of its attention stay at their initialisation."""
    if isinstance(model, CifarResNet):
        state_dict = cifar_resnet.checkpoint_filter_fn(state_dict, model)
    return {**_attention_tensors(model), **state_dict}


def _backbone_cfg(name: str, size: int) -> dict[str, Any]:
    cfg = timm.models.get_pretrained_cfg(name).to_dict()
    for key in ("architecture", "tag", "test_input_size", "hf_hub_id"):
        cfg.pop(key, None)
    return {**cfg, "input_size": (3, size, size), "pool_size": (size // 16, size // 16)}


_SMALL = {
    f"t_cifar_resnet{depth}": Variant(dict(depth=depth), f"with the {count} convolutions of layer3 as attention")
    for depth, count in ((20, "six"), (56, "eighteen"))
}
default_cfgs = generate_default_cfgs(
    {f"t_{name}.cnn_in1k": _backbone_cfg(name, size) for name, _, _, size, _ in _NETWORKS}
    | {f"{name}.cnn_cifar10": cifar_cfg(arguments["depth"]) for name, (arguments, _) in _SMALL.items()}
)
register_variants(__name__, partial(build_variant, TResNet, feature_cfg={}), VARIANTS)
register_variants(__name__, partial(create_cifar_resnet, kind=TCifarResNet), _SMALL)
