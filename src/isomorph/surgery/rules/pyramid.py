"""Rule that replaces linear layers and convolutions by pyramids of parallel branches (TDRL), which `fuse` merges."""

import copy
import difflib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from timm.models.byobnet import MobileOneBlock
from torch import nn

from isomorph.errors import UserError
from isomorph.layers import (
    AnnealedPair,
    AnnealedReLU,
    BranchedConv2d,
    BranchedLinear,
    JointPyramid,
    PyramidConv2d,
    PyramidLinear,
)
from isomorph.layers.gated.tap_heads import TapHeads
from isomorph.layers.pyramid.base import Layout, init_from_affine, init_random
from isomorph.layers.pyramid.batchnorm import weight_matrix
from isomorph.surgery.fuse import guard_pyramids
from isomorph.surgery.linear_layers import conv_padding, is_plain_norm, linear_mismatch
from isomorph.surgery.mobileone import block_mismatch, combine, is_pointwise_block, merge_branches
from isomorph.surgery.parents import SEPARATE_BIAS, call_joint_projections
from isomorph.surgery.plain_layers import plain_layer, with_same_padding
from isomorph.surgery.recast import match_original
from isomorph.surgery.rule import RESCALE, Rule, check_choice, check_number, register_rule
from isomorph.surgery.where import JOINT_PARTS, JointPart, joint_parts

_LOGIT_PROJECTIONS = {
    f"{before}{name}{after}" for name in "qk" for before in ("", "to_", "proj_", "w") for after in ("", "_proj")
}
_LOGIT_PROJECTIONS |= {"query", "key", "q_linear", "k_linear"}
"""Last names of query and key projections, whose branch sums get a BatchNorm under rectify="paper" (TDRL 3.3)."""


def _joint_mismatch(module: nn.Module, name: str, parent: nn.Module | None) -> str | None:
    """Return why a layer named like a joint projection cannot be split into its parts, or None if it can."""
    if name not in JOINT_PARTS:
        return None
    if not isinstance(module, nn.Linear):
        return f"it is a convolution named {name}"
    if hasattr(parent, "key_dim") or hasattr(parent, "val_dim"):
        return f"{type(parent).__name__} orders the outputs by head, not as queries, keys and values"
    if module.out_features % len(JOINT_PARTS[name]):
        return f"its {module.out_features} outputs cannot be split into {len(JOINT_PARTS[name])} equal parts"
    return None


_RECTIFICATIONS = ("paper", "batchnorm", "rescale", "none")


def _normalise_rectify(given: str | Mapping[str, str]) -> str:
    """Return `rectify` as one string: a rectification, or NAME=RECTIFICATION pairs sorted by name.

    Raises: UserError for an unknown rectification, or a name given twice.
    """
    pairs: list[Any] = [("", given)]
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, str) and "=" in given:
        pairs = [tuple(map(str.strip, pair.partition("=")[::2])) for pair in given.split(",")]
    if not pairs or len(dict(pairs)) < len(pairs):
        raise UserError(f"rectify {given!r} must name each layer once, as in 'q=none,v=rescale'")
    for name, value in pairs:
        if value not in _RECTIFICATIONS:
            raise UserError(
                f"rectify{f' of {name}' if name else ''} {value!r} is unknown; choose 'paper', 'batchnorm', 'rescale' "
                "or 'none', or one for each layer, as in 'q=none,v=rescale'"
            )
    return ",".join(f"{name}={value}" if name else value for name, value in sorted(pairs))


def _split_projection(joint: nn.Linear, parts: int) -> list[nn.Linear]:
    width, bias = joint.out_features // parts, joint.bias is not None
    layers = [nn.Linear(joint.in_features, width, bias, device="meta").train(joint.training) for _ in range(parts)]
    for name, parameter in joint.named_parameters():
        for part, rows in zip(layers, parameter.detach().chunk(parts), strict=True):
            setattr(part, name, nn.Parameter(rows.clone(), parameter.requires_grad))
    return layers


@register_rule
@dataclass(frozen=True)
class LinearToPyramid(Rule):
    """Replace a linear layer by a pyramid of Linear + BatchNorm branches, which trains better and fuses back (TDRL).

    Accepts:
    - nn.Linear;
    - nn.Conv2d with zero padding, as a linear layer on its patches; timm's convolutions with standardised weights
      (from the weight as it is now) or TensorFlow's SAME padding too;
    - timm's MobileOneBlock: a 1x1 block is replaced, in a 3x3 block the convolutions are (TDRL A.4);
    - the pair of convolutions of a VanillaNet block, once its ReLU is the identity, or with `init="paper"` before that.

    A joint `qkv` becomes three pyramids; `where="blocks.[0-3].attn.v"` recasts only its values, and the other parts
    stay linear. A joint projection that is a convolution, or whose outputs are not queries, keys and values in turn,
    becomes one pyramid. `fuse` converts back at any time.

    `rectify="paper"` puts BatchNorm on the branch sums of queries and keys, recognised by name, and of joint
    projections that become one pyramid; it divides the others by sqrt(N). `{"q": "none", "v": "rescale"}` or
    "q=none,v=rescale" sets it by the last name of a layer; layers that are not named get "paper".

    In small trainings from scratch of equal time, plain networks that started well were ahead (docs/methods/tdrl.md).

    Source: TDRL sections 3.2 and 3.3.
    Raises: UserError for a field out of range; from `recast`, for a layer that it does not accept, or a `rectify` that
        names a layer the model does not have.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20").eval()
        >>> wide = iso.recast(cnn, iso.LinearToPyramid("P-W2S"), where="linear")
        >>> type(wide.linear).__name__, type(iso.fuse(wide).linear).__name__
        ('PyramidLinear', 'Linear')
        >>> iso.verify(cnn, wide, torch.randn(1, 3, 32, 32)).passed
        True
    """

    layout: str = "P-W2S"
    """Branches of the pyramid: P-W2S, R-D2W1S, naive-W8 and the like."""

    init: Literal["same-function", "paper"] = "same-function"
    """same-function: equal to the layer in eval mode; paper: random branches, for training from scratch."""

    rectify: str | Mapping[str, str] = "paper"
    """Rectification of the sum: paper, batchnorm, rescale or none, or one for each layer name (q=none,v=rescale)."""

    rescale_by: float | None = None
    """N of the division by sqrt(N); by default the number of branches."""

    form: Literal["closed", "branches"] = "closed"
    """closed: one layer on the tokens, in training too; branches: every branch on all tokens, as the paper trains."""

    atol: ClassVar[float] = 1e-4
    kind: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, nn.Conv2d, AnnealedPair)
    takes_parts: ClassVar[bool] = True
    _parents: ClassVar[Mapping[nn.Module, tuple[str, nn.Module]]] = {}
    """The last name and the parent of each module of a model; empty until `within`."""

    @property
    def keeps_function(self) -> bool:
        """True for the same-function initialisation."""
        return self.init == "same-function"

    def __post_init__(self) -> None:
        Layout.parse(self.layout)
        check_choice("init", self.init, ("same-function", "paper"))
        check_choice("form", self.form, ("closed", "branches"))
        object.__setattr__(self, "rectify", _normalise_rectify(self.rectify))
        if self.rescale_by is not None:
            check_number("rescale_by", self.rescale_by, RESCALE)

    def within(self, model: nn.Module) -> "LinearToPyramid":
        """Return the rule with the last names of the model's layers, by which it recognises queries and keys.

        Raises: UserError if `rectify` names a layer that the model does not have.
        """
        parents = {m: (n, parent) for parent in model.modules() for n, m in parent._modules.items() if m}
        known = {name for name, _ in parents.values()} | {part.name for part in joint_parts(model).values()}
        for name in self._rectify_by_name:
            if name and name not in known:
                close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
                near = f"; nearest names: {', '.join(close)}" if close else ""
                raise UserError(f"rectify names {name}, but the model has no layer of that last name{near}")
        bound = copy.copy(self)
        object.__setattr__(bound, "_parents", parents)
        return bound

    def attach(self, model: nn.Module) -> None:
        """Make attention with separate biases (BEiT, EVA, Swin V2) call its qkv where that is a pyramid.

        And make timm's methods that merge branches fuse the pyramids first.
        """
        guard_pyramids(model)
        call_joint_projections(model)

    def reason(self, module: nn.Module | JointPart) -> str | None:
        """Return why the module cannot be recast, or None if it can."""
        if isinstance(module, JointPart):
            return self._part_reason(module)
        if isinstance(module, MobileOneBlock):
            return block_mismatch(module)
        if isinstance(module, AnnealedPair):
            if (type(module), type(module.act)) != (AnnealedPair, AnnealedReLU):
                return f"{type(module).__name__} may compute something else than AnnealedPair"
            if self.keeps_function and not module.act.is_identity:  # type: ignore[union-attr]
                return "its ReLU is not the identity yet; anneal it first, or give init='paper'"
            parts = [
                part for part in module.children() if not isinstance(part, AnnealedReLU) and not is_plain_norm(part)
            ]
            return next(filter(None, map(linear_mismatch, parts)), None)
        if reason := linear_mismatch(plain_layer(module)):
            return reason
        _, parent = self._parents.get(module, ("", None))
        if isinstance(parent, nn.MultiheadAttention):
            return "nn.MultiheadAttention reads its weight without calling it"
        if isinstance(parent, TapHeads):
            return f"{type(parent).__name__} reads its weight without calling it"
        if getattr(parent, "q_bias", None) is not None and not hasattr(parent, SEPARATE_BIAS):
            return f"{type(parent).__name__} reads its weight without calling it"
        return None

    def _part_reason(self, part: JointPart) -> str | None:
        if isinstance(part.joint, JointPyramid):
            linear = type(part.joint.pyramids[part.names.index(part.name)]) is nn.Linear
            return None if linear else "it is already a pyramid"
        problem = _joint_mismatch(part.joint, *self._parents.get(part.joint, ("", None)))
        return f"{problem}; recast the whole layer" if problem else self.reason(part.joint)

    @torch.no_grad()
    def build(self, module: nn.Module | JointPart) -> nn.Module:
        """Return the pyramid, or the joint layer with pyramids, that replaces a layer or a part of a joint projection.

        Raises: UserError with the reason if the module is not accepted.
        """
        self.check(module)
        if isinstance(module, JointPart):
            return self._build_part(module)
        if isinstance(module, MobileOneBlock):
            return self._build_block(module)
        if isinstance(module, AnnealedPair):
            pair = copy.deepcopy(module)
            pair.act = AnnealedReLU(1.0)
            module = pair.eval().fuse()
        name, parent = self._parents.get(module, ("", None))
        plain = plain_layer(module)
        if isinstance(plain, nn.Conv2d):
            return with_same_padding(module, self._build_conv(plain, name))
        assert isinstance(plain, nn.Linear)
        if _joint_mismatch(plain, name, parent) or name not in JOINT_PARTS:
            return self._build_linear(plain, name)
        pairs = zip(_split_projection(plain, len(JOINT_PARTS[name])), JOINT_PARTS[name], strict=True)
        return JointPyramid([self._build_linear(*pair, name) for pair in pairs])

    def _build_part(self, part: JointPart) -> JointPyramid:
        """Return a joint layer with a pyramid for one part and the other parts as they are."""
        joint = part.joint
        parts: list[Any] = (
            list(joint.pyramids) if isinstance(joint, JointPyramid) else _split_projection(joint, len(part.names))
        )
        index = part.names.index(part.name)
        pyramid = self._build_linear(parts[index], part.name, part.joint_name.rpartition(".")[2])
        parts[index] = match_original(pyramid, parts[index])
        return JointPyramid(parts).train(joint.training)

    @property
    def _rectify_by_name(self) -> dict[str, str]:
        """The rectifications by the last name of a layer; that of all layers has the name ""."""
        assert isinstance(self.rectify, str)
        return dict(pair.rpartition("=")[::2] for pair in self.rectify.split(","))

    def _arguments(self, name: str, joint: str = "") -> dict[str, Any]:
        """Return layout and rectification for a layer, by its last name and that of its joint projection, if any."""
        given = self._rectify_by_name
        rectify = next((given[key] for key in (name, joint, "") if key in given), "paper")
        if rectify == "paper":
            rectify = "batchnorm" if name in _LOGIT_PROJECTIONS or name in JOINT_PARTS else "rescale"
        return dict(rectify=rectify, layout=self.layout, rescale_by=self.rescale_by)

    def _build_linear(self, linear: nn.Linear, name: str, joint: str = "") -> PyramidLinear:
        kind = PyramidLinear if self.form == "closed" else BranchedLinear
        pyramid = kind(linear.in_features, linear.out_features, **self._arguments(name, joint))
        self._initialise(pyramid, linear)
        return pyramid

    def _build_conv(self, conv: nn.Conv2d, name: str) -> PyramidConv2d:
        padding = conv_padding(conv)
        assert padding is not None
        window = (conv.kernel_size, conv.stride, padding, conv.dilation, conv.groups)
        kind = PyramidConv2d if self.form == "closed" else BranchedConv2d
        pyramid = kind(conv.in_channels, conv.out_channels, *window, **self._arguments(name))  # type: ignore[arg-type]
        self._initialise(pyramid, conv)
        return pyramid

    def _initialise(self, pyramid: PyramidLinear | PyramidConv2d, layer: nn.Linear | nn.Conv2d) -> None:
        """Give a new pyramid device and dtype of a layer, and its function unless `init` is "paper"."""
        pyramid.to(layer.weight)
        if self.init == "paper":
            init_random(pyramid)
        else:
            weight = weight_matrix(layer)
            bias = weight.new_zeros(weight.shape[:-1]) if layer.bias is None else layer.bias.view(weight.shape[:-1])
            init_from_affine(pyramid, weight, bias)
        pyramid.replaces_bias = layer.bias is not None

    def _build_block(self, block: MobileOneBlock) -> nn.Module:
        """Return a 1x1 block as a pyramid and its activation, a larger one with pyramids for its convolutions."""
        if is_pointwise_block(block):
            pyramid = self._build_conv(merge_branches(block), "")
            return nn.Sequential(
                OrderedDict(conv=pyramid, attn=copy.deepcopy(block.attn), act=copy.deepcopy(block.act))
            )
        combined: Any = combine(block)
        for branch in combined.conv_kxk:
            branch.conv = self._build_conv(branch.conv, "").train(block.training)
        return combined
