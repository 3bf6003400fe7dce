"""The rule that trains wide and ships thin: linear layers become pyramids, which `fuse` brings back."""

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from timm.layers import ConvNormAct
from timm.models.byobnet import MobileOneBlock
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import UserError
from isomorph.layers import JointPyramid, PyramidConv2d, PyramidLinear
from isomorph.layers.affine_chain import matrix
from isomorph.layers.pyramid import Layout, Rectify
from isomorph.layers.pyramid_birth import carry, draw
from isomorph.surgery.bounds import RESCALE, check_choice, check_number
from isomorph.surgery.chains import conv_padding, is_chain, is_plain_norm, merge_branches, merge_chain, unlike_linear
from isomorph.surgery.exact import changed

JOINT: Mapping[str, tuple[str, ...]] = {"qkv": ("q", "k", "v"), "qk": ("q", "k"), "kv": ("k", "v")}
"""Projections that are one linear layer in a model and several pyramids here, by their last name."""

RECTIFIED = {
    f"{before}{name}{after}" for name in "qk" for before in ("", "to_", "proj_", "w") for after in ("", "_proj")
}
RECTIFIED |= {"query", "key", "q_linear", "k_linear"}
"""Last names of the projections whose products are attention logits: BatchNorm rectifies their sum."""


def unlike_joint(module: nn.Module, name: str, parent: nn.Module | None) -> str | None:
    """Why a projection of a joint name is not queries, keys and values in a row, or None."""
    if name not in JOINT:
        return None
    if not isinstance(module, nn.Linear):
        return f"it is a joint {name} convolution"
    if hasattr(parent, "key_dim") or hasattr(parent, "val_dim"):
        return f"{type(parent).__name__} deals its outputs to heads, not to queries, keys and values"
    if module.out_features % len(JOINT[name]):
        return f"its {module.out_features} outputs are not {len(JOINT[name])} equal parts"
    return None


def unlike_block(block: MobileOneBlock) -> str | None:
    """Why a block of MobileOne is not the sum of its convolutional branches, or None."""
    if methods := " and ".join(changed(block, MobileOneBlock)):
        return f"{type(block).__name__} does not compute what timm's MobileOneBlock does: it has its own {methods}"
    if block.reparam_conv is not None:
        return "it is fused already; its reparam_conv is a target of its own"
    if type(block.drop_path) is not nn.Identity:
        return "it drops paths between its branches"
    for name, part in block.conv_kxk.named_modules():
        if isinstance(part, nn.Conv2d) and (reason := unlike_linear(part)):
            return f"of its conv_kxk.{name}: {reason}"
        if isinstance(part, ConvNormAct) and changed(part, ConvNormAct):
            return f"its conv_kxk.{name} does not compute what timm's ConvNormAct does"
    norms = [*block.conv_kxk.modules(), block.identity] if is_pointwise_block(block) else []
    if any(isinstance(part, _BatchNorm) and not is_plain_norm(part) for part in norms):
        return "its branches have norms that are not plain BatchNorm"
    return None


def is_pointwise_block(block: MobileOneBlock) -> bool:
    """Whether all branches of a block are 1x1: one linear map of every position."""
    return block.conv_kxk[0].conv.kernel_size == (1, 1)


@dataclass(frozen=True)
class LinearToPyramid:
    """A linear layer becomes a pyramid of Linear + BatchNorm branches, which trains better and fuses back (TDRL).

    Takes nn.Linear; nn.Conv2d (zero padding), as a linear layer on its patches; an nn.Sequential of several such with
    BatchNorms and nothing else, as one map; and timm's MobileOneBlock: a 1x1 block is replaced, the convolutions of a
    3x3 block become pyramids within it (TDRL A.4). A joint `qkv` becomes three pyramids that share their moments.

    `init="same-function"` computes what the layer computed, in eval mode exactly; `"paper"` draws anew, for training
    from scratch. `rectify="paper"` puts BatchNorm on the sums of queries and keys, recognised by name, and divides
    others by sqrt(N); `rescale_by` overrides N. The way back is `fuse`, at any time.
    """

    layout: str = "P-W2S"
    init: Literal["same-function", "paper"] = "same-function"
    rectify: Literal["paper", "batchnorm", "rescale", "none"] = "paper"
    rescale_by: float | None = None

    atol: ClassVar[float] = 1e-4
    kind: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, nn.Conv2d)

    def __post_init__(self) -> None:
        Layout.parse(self.layout)
        check_choice("init", self.init, ("same-function", "paper"))
        check_choice("rectify", self.rectify, ("paper", "batchnorm", "rescale", "none"))
        if self.rescale_by is not None:
            check_number("rescale_by", self.rescale_by, RESCALE)

    def within(self, model: nn.Module) -> "NamedLinears":
        """The rule with the names of the model's layers, which tell queries and keys from others."""
        return NamedLinears(
            self, {m: (n, parent) for parent in model.modules() for n, m in parent._modules.items() if m is not None}
        )

    def accepts(self, module: nn.Module) -> bool:
        return NamedLinears(self, {}).accepts(module)

    def build(self, module: nn.Module) -> nn.Module:
        """Raises: UserError with the reason when the module is not accepted."""
        return NamedLinears(self, {}).build(module)


@dataclass(frozen=True)
class NamedLinears:
    """LinearToPyramid within one model: each module's last name, and its parent."""

    rule: LinearToPyramid
    places: Mapping[nn.Module, tuple[str, nn.Module]] = field(repr=False)

    @property
    def kind(self) -> tuple[type[nn.Module], ...]:
        return self.rule.kind

    def accepts(self, module: nn.Module) -> bool:
        return self.reason(module) is None

    def reason(self, module: nn.Module) -> str | None:
        """Why the module cannot be rebuilt, or None."""
        name, parent = self.places.get(module, ("", None))
        if isinstance(module, MobileOneBlock):
            return unlike_block(module)
        if isinstance(module, nn.Sequential):
            return None if is_chain(module) else "it does more than linear maps and BatchNorm"
        if reason := unlike_linear(module):
            return reason
        if isinstance(parent, nn.MultiheadAttention):
            return "nn.MultiheadAttention reads its weight instead of calling it"
        if getattr(parent, "q_bias", None) is not None:
            return f"{type(parent).__name__} reads its weight and adds biases of its own instead of calling it"
        problem = unlike_joint(module, name, parent)
        if problem and self.rule.rectify == "paper":
            return f"{problem}; give rectify='batchnorm' or 'rescale' to take it as one pyramid"
        return None

    @torch.no_grad()
    def build(self, module: nn.Module) -> nn.Module:
        """Raises: UserError with the reason when the module is not accepted."""
        if reason := self.reason(module):
            raise UserError(f"LinearToPyramid cannot rebuild it: {reason}")
        if isinstance(module, MobileOneBlock):
            return self.build_block(module)
        if isinstance(module, nn.Sequential):
            module = merge_chain(module)
        name, parent = self.places.get(module, ("", None))
        if isinstance(module, nn.Conv2d):
            return self.build_conv(module, name)
        assert isinstance(module, nn.Linear)
        parts = (name,) if unlike_joint(module, name, parent) else JOINT.get(name, (name,))
        weights = module.weight.chunk(len(parts))
        biases = [None] * len(parts) if module.bias is None else module.bias.chunk(len(parts))
        pyramids = [self.build_linear(*given) for given in zip(parts, weights, biases, strict=True)]
        return pyramids[0] if len(pyramids) == 1 else JointPyramid(pyramids)

    def arguments(self, name: str) -> dict[str, Any]:
        """Layout and rectification for a layer of that name."""
        rectify: Rectify = "batchnorm" if name in RECTIFIED else "rescale"
        if self.rule.rectify != "paper":
            rectify = self.rule.rectify
        return dict(layout=self.rule.layout, rectify=rectify, rescale_by=self.rule.rescale_by)

    def build_linear(self, name: str, weight: Tensor, bias: Tensor | None) -> PyramidLinear:
        pyramid = PyramidLinear(weight.shape[1], weight.shape[0], **self.arguments(name)).to(weight)
        if self.rule.init == "paper":
            draw(pyramid)
        else:
            carry(pyramid, weight, weight.new_zeros(weight.shape[0]) if bias is None else bias)
        return pyramid

    def build_conv(self, conv: nn.Conv2d, name: str) -> PyramidConv2d:
        padding = conv_padding(conv)
        assert padding is not None
        window = (conv.kernel_size, conv.stride, padding, conv.dilation, conv.groups)
        pyramid = PyramidConv2d(conv.in_channels, conv.out_channels, *window, **self.arguments(name)).to(conv.weight)  # type: ignore[arg-type]
        if self.rule.init == "paper":
            draw(pyramid)
        else:
            weight = matrix(conv)
            bias = weight.new_zeros(weight.shape[:-1]) if conv.bias is None else conv.bias.view(weight.shape[:-1])
            carry(pyramid, weight, bias)
        return pyramid

    def build_block(self, block: MobileOneBlock) -> nn.Module:
        """A 1x1 block as a pyramid and its activation; a larger one with pyramids for its convolutions."""
        if is_pointwise_block(block):
            pyramid = self.build_conv(merge_branches(block), "")
            return nn.Sequential(
                OrderedDict(conv=pyramid, attn=copy.deepcopy(block.attn), act=copy.deepcopy(block.act))
            )
        combined = copy.deepcopy(block)
        for branch in combined.conv_kxk:
            branch.conv = self.build_conv(branch.conv, "").train(block.training)
        return combined
