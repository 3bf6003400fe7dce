"""Transformed CNNs: ResNets whose last stage has gated positional self-attention, initialised from the CNN's weights.

A T-ResNet is timm's ResNet after `Unstride` on layer4 (as in BoTNet; it changes the function), then `ConvToGPSA` on
every conv2 there. In a T-CIFAR-ResNet every convolution of layer3 is recast at its own stride.
"""

from functools import partial
from typing import Any, NamedTuple

import timm
from timm.layers import get_attn
from timm.models import generate_default_cfgs
from timm.models.resnet import Bottleneck, ResNet
from torch import nn

from isomorph.layers import GPSA2d
from isomorph.models import cifar_resnet
from isomorph.models.base import (
    ForeignCheckpoints,
    State,
    Variant,
    build_variant,
    parameters_without_decay,
    register_variants,
)
from isomorph.models.cifar_resnet import CifarResNet, cifar_cfg, create_cifar_resnet
from isomorph.surgery import ConvToGPSA, Edit, Unstride, apply_edit
from isomorph.surgery.recast import apply_rule

RESNET_RS: dict[str, Any] = dict(
    stem_width=32,
    stem_type="deep",
    replace_stem_pool=True,
    avg_down=True,
    block_args=dict(attn_layer=partial(get_attn("se"), rd_ratio=0.25)),
)
RESNET_D: dict[str, Any] = dict(stem_width=32, stem_type="deep", avg_down=True)


class _Network(NamedTuple):
    """A ResNet of timm: its blocks by stage, its form, and the resolution of fine-tuning (T-CNN Tables 1 and 5)."""

    layers: tuple[int, ...]
    form: dict[str, Any]
    size: int
    description: str


_NETWORKS = {
    "resnetrs50": _Network(
        (3, 4, 6, 3), RESNET_RS, 224, "38M parameters, 81.0 top-1 at 224 (T-CNN Table 2)"
    ),
    "resnetrs101": _Network(
        (3, 4, 23, 3), RESNET_RS, 224, "66M parameters, 82.4 top-1 at 224 (T-CNN Table 2)"
    ),
    "resnetrs152": _Network(
        (3, 8, 36, 3), RESNET_RS, 320, "89M parameters, 83.7 top-1 at 320 (T-CNN Table 2)"
    ),
    "resnetrs200": _Network(
        (3, 24, 36, 3), RESNET_RS, 320, "96M parameters, 84.0 top-1 at 320 (T-CNN Table 2)"
    ),
    "resnetrs270": _Network(
        (4, 29, 53, 4), RESNET_RS, 320, "133M parameters, 84.3 top-1 at 320 (T-CNN Table 2)"
    ),
    "resnetrs350": _Network(
        (4, 36, 72, 4), RESNET_RS, 320, "167M parameters, 84.5 top-1 at 320 (T-CNN Table 2)"
    ),
    "resnet50d": _Network((3, 4, 6, 3), RESNET_D, 320, "81.6 top-1 at 320 (T-CNN Table 5)"),
    "resnet101d": _Network((3, 4, 23, 3), RESNET_D, 384, "83.1 top-1 at 384 (T-CNN Table 5)"),
    "resnet152d": _Network((3, 8, 36, 3), RESNET_D, 384, "83.8 top-1 at 384 (T-CNN Table 5)"),
    "resnet200d": _Network((3, 24, 36, 3), RESNET_D, 384, "83.9 top-1 at 384 (T-CNN Table 5)"),
}


class TransformedMixin(ForeignCheckpoints):
    """Checkpoints and weight decay of a CNN with convolutions recast as attention."""

    def is_foreign(self, state: State) -> bool:
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
        self,
        init: str = "paper",
        locality: float | None = None,
        gate: float | None = None,
        **kwargs: Any,
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
        self,
        init: str = "paper",
        locality: float | None = None,
        gate: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        apply_rule(self, ConvToGPSA(init, locality, gate), "layer3.*.conv?")  # type: ignore[arg-type]


def _attention_tensors(model: nn.Module) -> State:
    """Return the tensors of attention layers that a convolution does not have."""
    tensors: State = {}
    for name, module in model.named_modules():
        if isinstance(module, GPSA2d):
            for key, tensor in module.state_dict(prefix=f"{name}.").items():
                if key not in (f"{name}.weight", f"{name}.bias"):
                    tensors[key] = tensor
    return tensors


def checkpoint_filter_fn(state_dict: State, model: nn.Module) -> State:
    """Convert a CNN's checkpoint for a T-CNN: the other tensors of its attention stay at their initialisation."""
    if isinstance(model, CifarResNet):
        state_dict = cifar_resnet.checkpoint_filter_fn(state_dict, model)
    return {**_attention_tensors(model), **state_dict}


def _backbone_cfg(name: str, size: int) -> dict[str, Any]:
    cfg = timm.models.get_pretrained_cfg(name).to_dict()
    for key in ("architecture", "tag", "test_input_size", "hf_hub_id"):
        cfg.pop(key, None)
    cfg["input_size"] = (3, size, size)
    cfg["pool_size"] = (size // 16, size // 16)
    return cfg


VARIANTS: dict[str, Variant] = {}
_CFGS: dict[str, dict[str, Any]] = {}
for _name, _network in _NETWORKS.items():
    _arguments = dict(layers=_network.layers, **_network.form)
    VARIANTS[f"t_{_name}"] = Variant(_arguments, _network.description)
    _CFGS[f"t_{_name}.cnn_in1k"] = _backbone_cfg(_name, _network.size)

_SMALL = {
    "t_cifar_resnet20": Variant(dict(depth=20), "with the six convolutions of layer3 as attention"),
    "t_cifar_resnet56": Variant(
        dict(depth=56), "with the eighteen convolutions of layer3 as attention"
    ),
}
for _name, _variant in _SMALL.items():
    _CFGS[f"{_name}.cnn_cifar10"] = cifar_cfg(_variant.arguments["depth"])
default_cfgs = generate_default_cfgs(_CFGS)
register_variants(__name__, partial(build_variant, TResNet, feature_cfg={}), VARIANTS)
register_variants(__name__, partial(create_cifar_resnet, kind=TCifarResNet), _SMALL)
