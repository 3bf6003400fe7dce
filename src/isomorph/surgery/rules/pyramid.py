"""Rule that replaces linear layers and convolutions by pyramids of parallel branches (TDRL), which `fuse` merges."""

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from timm.models.byobnet import MobileOneBlock
from torch import nn

from isomorph.errors import UserError
from isomorph.layers import AnnealedPair, AnnealedReLU, JointPyramid, PyramidConv2d, PyramidLinear
from isomorph.layers.gated.tap_heads import TapHeads
from isomorph.layers.pyramid.base import BranchLayout
from isomorph.layers.pyramid.batchnorm import fold
from isomorph.layers.pyramid.inits import init_from_affine, init_random
from isomorph.layers.unfused_multihead import MultiheadLinears
from isomorph.surgery.mobileone import PyramidBlock, block_mismatch, merge_branches
from isomorph.surgery.plain_layers import (
    conv_padding,
    is_plain_norm,
    linear_mismatch,
    plain_layer,
    with_same_padding,
)
from isomorph.surgery.recast import match_original
from isomorph.surgery.reparameterize import guard_pyramids
from isomorph.surgery.rule import RESCALE, Rule, check_choice, check_number, register_rule
from isomorph.surgery.site import (
    JOINT_PARTS,
    SEPARATE_BIAS,
    Site,
    call_joint_projection,
    part_names,
)

# Last names of query and key projections, whose branch sums get a BatchNorm under rectify="paper" (TDRL 3.3).
_LOGIT_PROJECTIONS = {
    "".join(parts) for parts in product(("", "to_", "proj_", "w"), "qk", ("", "_proj"))
}
_LOGIT_PROJECTIONS |= {"query", "key", "q_linear", "k_linear"}

_RECTIFICATIONS = ("paper", "batchnorm", "rescale", "none")


def _rectify_by_name(rectify: str | Mapping[str, str]) -> dict[str, str]:
    """Return the rectifications by the last name of a layer, that of all layers by "". Raises: UserError."""
    pairs: list[tuple[str, str]] = []
    if isinstance(rectify, Mapping):
        pairs = list(rectify.items())
    else:
        for part in str(rectify).split(","):
            name, _, value = part.rpartition("=")
            pairs.append((name, value))
    by_name = {name.strip(): value.strip() for name, value in pairs}
    is_named_once = len(by_name) == len(pairs)
    if not pairs or not is_named_once or not set(by_name.values()) <= set(_RECTIFICATIONS):
        raise UserError(
            f"rectify {rectify!r} is unknown; choose 'paper', 'batchnorm', 'rescale' or 'none', or one for each layer, "
            "named once, as in 'q=none,v=rescale'"
        )
    return dict(sorted(by_name.items()))


def _split_projection(joint: nn.Linear, parts: int) -> list[nn.Linear]:
    """Return a joint projection as one linear layer for each part."""
    width = joint.out_features // parts
    layers = []
    for _ in range(parts):
        layer = nn.Linear(joint.in_features, width, joint.bias is not None, device="meta")
        layers.append(layer.train(joint.training))
    for name, parameter in joint.named_parameters():
        for part, rows in zip(layers, parameter.detach().chunk(parts), strict=True):
            setattr(part, name, nn.Parameter(rows.clone(), parameter.requires_grad))
    return layers


def _last_names(model: nn.Module) -> set[str]:
    """Return the last components of the names of all layers, and of the parts of joint projections."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    return {name.rpartition(".")[2] for name in (*names, *part_names(model))}


def _split_mismatch(site: Site) -> str | None:
    """Return why the outputs of a layer are not queries, keys and values in turn, or None if they are."""
    names = site.part_names
    if not names or not isinstance(site.module, nn.Linear):
        return f"it is no linear layer named {' or '.join(JOINT_PARTS)}"
    if hasattr(site.parent, "key_dim") or hasattr(site.parent, "val_dim"):
        return f"{type(site.parent).__name__} orders the outputs by head, not as queries, keys and values"
    if site.module.out_features % len(names):
        return (
            f"its {site.module.out_features} outputs cannot be split into {len(names)} equal parts"
        )
    return None


def _never_called(site: Site) -> str | None:
    """Return that the parent reads a layer's weight without calling it, or None."""
    parent = site.parent
    adds_bias = getattr(parent, "q_bias", None) is not None and not hasattr(parent, SEPARATE_BIAS)
    packs_weights = (
        isinstance(parent, nn.MultiheadAttention | TapHeads)
        and type(parent) is not MultiheadLinears
    )
    if adds_bias or packs_weights:
        return f"{type(parent).__name__} reads its weight without calling it"
    return None


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

    atol = 1e-4
    is_reverted = False
    kind = (nn.Linear, nn.Conv2d, AnnealedPair)
    takes_parts = True

    @property
    def keeps_function(self) -> bool:
        """True for the same-function initialisation."""
        return self.init == "same-function"

    def __post_init__(self) -> None:
        BranchLayout.parse(self.layout)
        check_choice("init", self.init, ("same-function", "paper"))
        check_choice("form", self.form, ("closed", "branches"))
        chosen = [
            f"{name}={value}" if name else value
            for name, value in _rectify_by_name(self.rectify).items()
        ]
        object.__setattr__(self, "rectify", ",".join(chosen))
        if self.rescale_by is not None:
            check_number("rescale_by", self.rescale_by, RESCALE)

    def reason(self, site: Site) -> str | None:
        """Return why the module cannot be recast, or None if it can."""
        named = set(_rectify_by_name(self.rectify)) - {""}
        unknown = named - site.once(_last_names)
        if unknown:
            return f"rectify names {', '.join(sorted(unknown))}, but the model has no layer of that last name"
        module = site.module
        if site.part and isinstance(module, JointPyramid):
            part = module.pyramids[site.part_names.index(site.part)]
            return None if type(part) is nn.Linear else "it is already a pyramid"
        if site.part:
            problem = _split_mismatch(site)
            if problem:
                return f"{problem}; recast the whole layer"
        if isinstance(module, MobileOneBlock):
            return block_mismatch(module)
        if isinstance(module, AnnealedPair):
            return self._pair_mismatch(module)
        return linear_mismatch(plain_layer(module)) or _never_called(site)

    def _pair_mismatch(self, pair: AnnealedPair) -> str | None:
        """Return why a pair of convolutions is not one linear layer, or None."""
        if type(pair) is not AnnealedPair or type(pair.act) is not AnnealedReLU:
            return f"{type(pair).__name__} may compute something else than AnnealedPair"
        if self.keeps_function and not pair.act.is_identity:
            return "its ReLU is not the identity yet; anneal it first, or give init='paper'"
        for part in pair.children():
            if part is pair.act or is_plain_norm(part):
                continue
            reason = linear_mismatch(part)
            if reason:
                return reason
        return None

    @torch.no_grad()
    def build(self, site: Site) -> nn.Module:
        """Return the pyramid, or the joint layer with it. Raises: UserError if the module is not accepted."""
        self.check(site)
        module = site.module
        if site.part:
            return self._build_part(site)
        if isinstance(module, MobileOneBlock):
            return self._build_block(module)
        if isinstance(module, AnnealedPair):
            pair = copy.deepcopy(module)
            pair.act = AnnealedReLU(1.0)
            module = pair.eval().fuse()
        plain: Any = plain_layer(module)
        if _split_mismatch(site):
            return with_same_padding(module, self._pyramid(plain, site.last_name))
        parts = _split_projection(plain, len(site.part_names))
        named = zip(parts, site.part_names, strict=True)
        return JointPyramid([self._pyramid(part, name, site.last_name) for part, name in named])  # type: ignore[misc]

    def _build_part(self, site: Site) -> JointPyramid:
        """Return a joint projection with one of its parts as a pyramid."""
        joint = site.module
        parts: list[Any] = []
        if isinstance(joint, JointPyramid):
            parts += joint.pyramids
        else:
            parts += _split_projection(joint, len(site.part_names))
        index = site.part_names.index(site.part)
        layer: Any = parts[index]
        parts[index] = match_original(self._pyramid(layer, site.part, site.last_name), layer)
        return JointPyramid(parts).train(joint.training)

    def connect(self, site: Site) -> None:
        """Make attention with separate biases call pyramids, and timm's methods that merge branches fuse them."""
        site.once(guard_pyramids)
        call_joint_projection(site)

    def _pyramid(
        self, layer: nn.Linear | nn.Conv2d, name: str, joint: str = ""
    ) -> PyramidLinear | PyramidConv2d:
        """Return the pyramid of one layer, initialised from its weights unless init is "paper"."""
        options: Any = {
            "rectify": self._rectification(name, joint),
            "layout": self.layout,
            "rescale_by": self.rescale_by,
            "form": self.form,
        }
        pyramid: PyramidLinear | PyramidConv2d
        if isinstance(layer, nn.Linear):
            pyramid = PyramidLinear(layer.in_features, layer.out_features, **options)
        else:
            window: Any = {
                "kernel_size": layer.kernel_size,
                "stride": layer.stride,
                "padding": conv_padding(layer),
                "dilation": layer.dilation,
                "groups": layer.groups,
            }
            pyramid = PyramidConv2d(layer.in_channels, layer.out_channels, **window, **options)
        pyramid.to(layer.weight)
        if self.init == "paper":
            init_random(pyramid)
        else:
            init_from_affine(pyramid, *fold([layer]))
        pyramid.replaces_bias = layer.bias is not None
        return pyramid

    def _rectification(self, name: str, joint: str) -> str:
        """Return the rectification of a layer with this last name, in a joint projection or alone."""
        by_name = _rectify_by_name(self.rectify)
        chosen = next((by_name[key] for key in (name, joint, "") if key in by_name), "paper")
        if chosen != "paper":
            return chosen
        gets_norm = name in _LOGIT_PROJECTIONS or name in JOINT_PARTS
        return "batchnorm" if gets_norm else "rescale"

    def _build_block(self, block: MobileOneBlock) -> nn.Module:
        """Return a 1x1 block as a pyramid and its activation, a larger one with pyramids for its convolutions."""
        block = copy.deepcopy(block)
        if block.conv_kxk[0].conv.kernel_size == (1, 1):
            conv = self._pyramid(merge_branches(block), "")
            return nn.Sequential(OrderedDict(conv=conv, attn=block.attn, act=block.act))
        for branch in block.conv_kxk:
            branch.conv = self._pyramid(branch.conv, "").train(block.training)
        block.__class__ = PyramidBlock
        return block
