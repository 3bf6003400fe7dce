"""The rule that trains wide and ships thin: linear layers become pyramids, which `fuse` brings back."""

import copy
import difflib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from timm.layers import ConvNormAct
from timm.models.byobnet import MobileOneBlock
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import UserError
from isomorph.layers import AnnealedPair, JointPyramid, PyramidConv2d, PyramidLinear
from isomorph.layers.affine_chain import matrix
from isomorph.layers.pyramid import Layout
from isomorph.layers.pyramid_init import carry, draw
from isomorph.surgery.field_checks import RESCALE, check_choice, check_number
from isomorph.surgery.joint_projections import JOINT_PARTS, JointPart, joint_parts
from isomorph.surgery.layer_checks import overridden_methods
from isomorph.surgery.linear_chains import (
    conv_padding,
    is_chain,
    is_plain_norm,
    linear_mismatch,
    merge_branches,
    merge_chain,
)
from isomorph.surgery.recast import match_original

_LOGIT_PROJECTIONS = {
    f"{before}{name}{after}" for name in "qk" for before in ("", "to_", "proj_", "w") for after in ("", "_proj")
}
_LOGIT_PROJECTIONS |= {"query", "key", "q_linear", "k_linear"}
"""Last names of the projections whose products are attention logits: BatchNorm rectifies their sum."""


def _joint_mismatch(module: nn.Module, name: str, parent: nn.Module | None) -> str | None:
    """Why a projection of a joint name is not queries, keys and values in a row, or None."""
    if name not in JOINT_PARTS:
        return None
    if not isinstance(module, nn.Linear):
        return f"it is a joint {name} convolution"
    if hasattr(parent, "key_dim") or hasattr(parent, "val_dim"):
        return f"{type(parent).__name__} deals its outputs to heads, not to queries, keys and values"
    if module.out_features % len(JOINT_PARTS[name]):
        return f"its {module.out_features} outputs are not {len(JOINT_PARTS[name])} equal parts"
    return None


_RECTIFICATIONS = ("paper", "batchnorm", "rescale", "none")


def _normalise_rectify(given: str | Mapping[str, str]) -> str:
    """A rectification, or NAME=RECTIFICATION of several layers by their last names, as one string in a fixed order.

    Raises: UserError for an unknown one, or a name given twice.
    """
    pairs = list(given.items()) if isinstance(given, Mapping) else []
    if isinstance(given, str) and "=" not in given:
        _check_rectification(given)
        return given
    if isinstance(given, str):
        pairs = [(name.strip(), value.strip()) for name, _, value in (pair.partition("=") for pair in given.split(","))]
    if not pairs or len(dict(pairs)) < len(pairs):
        raise UserError(f"rectify {given!r} must name each layer once, as in 'q=none,v=rescale'")
    for name, value in pairs:
        _check_rectification(value, f" of {name}")
    return ",".join(f"{name}={value}" for name, value in sorted(pairs))


def _check_rectification(value: Any, place: str = "") -> None:
    """Raises: UserError for a rectification that does not exist."""
    if value not in _RECTIFICATIONS:
        raise UserError(
            f"rectify{place} {value!r} is unknown; choose 'paper', 'batchnorm', 'rescale' or 'none', or one for each "
            "layer, as in 'q=none,v=rescale'"
        )


def _block_mismatch(block: MobileOneBlock) -> str | None:
    """Why a block of MobileOne is not the sum of its convolutional branches, or None."""
    if methods := " and ".join(overridden_methods(block, MobileOneBlock)):
        return f"{type(block).__name__} does not compute what timm's MobileOneBlock does: it has its own {methods}"
    if block.reparam_conv is not None:
        return "it is fused already; its reparam_conv is a target of its own"
    if type(block.drop_path) is not nn.Identity:
        return "it drops paths between its branches"
    for name, part in block.conv_kxk.named_modules():
        if isinstance(part, nn.Conv2d) and (reason := linear_mismatch(part)):
            return f"of its conv_kxk.{name}: {reason}"
        if isinstance(part, ConvNormAct) and overridden_methods(part, ConvNormAct):
            return f"its conv_kxk.{name} does not compute what timm's ConvNormAct does"
    norms = [*block.conv_kxk.modules(), block.identity] if _is_pointwise_block(block) else []
    if any(isinstance(part, _BatchNorm) and not is_plain_norm(part) for part in norms):
        return "its branches have norms that are not plain BatchNorm"
    return None


def _is_pointwise_block(block: MobileOneBlock) -> bool:
    """Whether all branches of a block are 1x1: one linear map of every position."""
    return block.conv_kxk[0].conv.kernel_size == (1, 1)


@dataclass(frozen=True)
class LinearToPyramid:
    """A linear layer becomes a pyramid of Linear + BatchNorm branches, which trains better and fuses back (TDRL).

    Takes nn.Linear; nn.Conv2d (zero padding), as a linear layer on its patches; an nn.Sequential of several such with
    BatchNorms and nothing else, as one map; and timm's MobileOneBlock: a 1x1 block is replaced, the convolutions of a
    3x3 block become pyramids within it (TDRL A.4). A VanillaNet's pair is one map once its ReLU is the identity, and
    for init="paper" before. A joint `qkv` becomes three pyramids that share their moments;
    `where="blocks.[0-3].attn.v"` names its values alone, and the other parts stay linear.

    `init="same-function"` computes what the layer computed, in eval mode exactly; `"paper"` draws anew, for training
    from scratch. `rectify="paper"` puts BatchNorm on the sums of queries and keys, recognised by name, and divides
    others by sqrt(N); `rescale_by` overrides N. `rectify={"q": "none", "v": "rescale"}` or "q=none,v=rescale" is for
    layers by their last names, and "paper" for all others. The way back is `fuse`, at any time.
    """

    layout: str = "P-W2S"
    init: Literal["same-function", "paper"] = "same-function"
    rectify: str | Mapping[str, str] = "paper"
    rescale_by: float | None = None

    atol: ClassVar[float] = 1e-4
    kind: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, nn.Conv2d, AnnealedPair)
    takes_parts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Layout.parse(self.layout)
        check_choice("init", self.init, ("same-function", "paper"))
        object.__setattr__(self, "rectify", _normalise_rectify(self.rectify))
        if self.rescale_by is not None:
            check_number("rescale_by", self.rescale_by, RESCALE)

    def within(self, model: nn.Module) -> "_BoundRule":
        """The rule with the names of the model's layers, which tell queries and keys from others.

        Raises: UserError when `rectify` names a layer that the model does not have.
        """
        places = {m: (n, parent) for parent in model.modules() for n, m in parent._modules.items() if m}
        known = {name for name, _ in places.values()} | {part.name for part in joint_parts(model).values()}
        for name in self.rectified:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
                near = f"; nearest names: {', '.join(close)}" if close else ""
                raise UserError(f"rectify names {name}, which is the last name of no layer of the model{near}")
        return _BoundRule(self, places)

    @property
    def rectified(self) -> dict[str, str]:
        """Rectification of the layers that have one of their own, by last name."""
        assert isinstance(self.rectify, str)
        return dict(pair.split("=") for pair in self.rectify.split(",")) if "=" in self.rectify else {}

    def rectification(self, name: str, joint: str = "") -> str:
        """Rectification of a layer of that last name, or of that of its joint layer; "paper" where it goes by name."""
        assert isinstance(self.rectify, str)
        if "=" not in self.rectify:
            return self.rectify
        return self.rectified.get(name) or self.rectified.get(joint) or "paper"

    def accepts(self, module: nn.Module) -> bool:
        return _BoundRule(self, {}).accepts(module)

    def build(self, module: nn.Module) -> nn.Module:
        """Raises: UserError with the reason when the module is not accepted."""
        return _BoundRule(self, {}).build(module)


def _split_projection(joint: nn.Linear, parts: int) -> list[nn.Linear]:
    """The equal parts of a joint projection, as layers of their own."""
    width, bias = joint.out_features // parts, joint.bias is not None
    found = [nn.Linear(joint.in_features, width, bias, device="meta").train(joint.training) for _ in range(parts)]
    for name, parameter in joint.named_parameters():
        for part, rows in zip(found, parameter.detach().chunk(parts), strict=True):
            setattr(part, name, nn.Parameter(rows.clone(), parameter.requires_grad))
    return found


@dataclass(frozen=True)
class _BoundRule:
    """LinearToPyramid within one model: each module's last name, and its parent."""

    rule: LinearToPyramid
    places: Mapping[nn.Module, tuple[str, nn.Module]] = field(repr=False)

    @property
    def kind(self) -> tuple[type[nn.Module], ...]:
        return self.rule.kind

    def accepts(self, module: nn.Module | JointPart) -> bool:
        return self.reason(module) is None

    def reason(self, module: nn.Module | JointPart) -> str | None:
        """Why the module cannot be rebuilt, or None."""
        if isinstance(module, JointPart):
            return self.reason_of_part(module)
        name, parent = self.places.get(module, ("", None))
        if isinstance(module, MobileOneBlock):
            return _block_mismatch(module)
        if isinstance(module, nn.Sequential):
            if is_chain(module, self.redraws):
                return None
            if isinstance(module, AnnealedPair) and is_chain(module, annealed=True):
                return "its ReLU is not the identity yet: anneal it first, or give init='paper' to start anew"
            return "it does more than linear maps and BatchNorm"
        if reason := linear_mismatch(module):
            return reason
        if isinstance(parent, nn.MultiheadAttention):
            return "nn.MultiheadAttention reads its weight instead of calling it"
        if getattr(parent, "q_bias", None) is not None:
            return f"{type(parent).__name__} reads its weight and adds biases of its own instead of calling it"
        problem = _joint_mismatch(module, name, parent)
        if problem and self.rule.rectification(name) == "paper":
            return f"{problem}; give rectify='batchnorm' or 'rescale' to take it as one pyramid"
        return None

    @property
    def redraws(self) -> bool:
        """Whether pyramids are drawn anew: their function need not be that of what they replace."""
        return self.rule.init == "paper"

    def reason_of_part(self, part: JointPart) -> str | None:
        """Why a part of a joint projection cannot be rebuilt, or None."""
        if isinstance(part.joint, JointPyramid):
            linear = type(part.joint.pyramids[part.names.index(part.name)]) is nn.Linear
            return None if linear else "it is a pyramid already"
        problem = _joint_mismatch(part.joint, *self.places.get(part.joint, ("", None)))
        return f"{problem}; take the whole layer" if problem else self.reason(part.joint)

    @torch.no_grad()
    def build(self, module: nn.Module | JointPart) -> nn.Module:
        """Raises: UserError with the reason when the module is not accepted."""
        if reason := self.reason(module):
            raise UserError(f"LinearToPyramid cannot rebuild it: {reason}")
        if isinstance(module, JointPart):
            return self.build_part(module)
        if isinstance(module, MobileOneBlock):
            return self.build_block(module)
        if isinstance(module, nn.Sequential):
            module = merge_chain(module, self.redraws)
        name, parent = self.places.get(module, ("", None))
        if isinstance(module, nn.Conv2d):
            return self.build_conv(module, name)
        assert isinstance(module, nn.Linear)
        if _joint_mismatch(module, name, parent) or name not in JOINT_PARTS:
            return self.build_linear(module, name)
        pairs = zip(_split_projection(module, len(JOINT_PARTS[name])), JOINT_PARTS[name], strict=True)
        return JointPyramid([self.build_linear(*pair, name) for pair in pairs])

    def build_part(self, part: JointPart) -> JointPyramid:
        """The joint layer with a pyramid for one part; the others stay as they are."""
        joint = part.joint
        parts: list[Any] = (
            list(joint.pyramids) if isinstance(joint, JointPyramid) else _split_projection(joint, len(part.names))
        )
        place = part.names.index(part.name)
        pyramid = self.build_linear(parts[place], part.name, part.joint_name.rpartition(".")[2])
        parts[place] = match_original(pyramid, parts[place])
        return JointPyramid(parts).train(joint.training)

    def arguments(self, name: str, joint: str = "") -> dict[str, Any]:
        """Layout and rectification for a layer of that name, a part of a joint layer maybe."""
        rectify = self.rule.rectification(name, joint)
        if rectify == "paper":
            rectify = "batchnorm" if name in _LOGIT_PROJECTIONS else "rescale"
        return dict(layout=self.rule.layout, rectify=rectify, rescale_by=self.rule.rescale_by)

    def build_linear(self, linear: nn.Linear, name: str, joint: str = "") -> PyramidLinear:
        weight = linear.weight
        pyramid = PyramidLinear(linear.in_features, linear.out_features, **self.arguments(name, joint)).to(weight)
        if self.rule.init == "paper":
            draw(pyramid)
        else:
            carry(pyramid, weight, weight.new_zeros(len(weight)) if linear.bias is None else linear.bias)
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
        if _is_pointwise_block(block):
            pyramid = self.build_conv(merge_branches(block), "")
            return nn.Sequential(
                OrderedDict(conv=pyramid, attn=copy.deepcopy(block.attn), act=copy.deepcopy(block.act))
            )
        combined = copy.deepcopy(block)
        for branch in combined.conv_kxk:
            branch.conv = self.build_conv(branch.conv, "").train(block.training)
        return combined
