"""The rows of the law tables: a rule, a module that it recasts, and what the module is called with."""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import timm
import torch
from timm.layers import Attention
from timm.models.byobnet import LayerFn, MobileOneBlock
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import isomorph as iso
from attention_layers import LAYERS, NETWORKS

Call = tuple[Any, ...]
"""Arguments of a call; a tuple of sizes first stands for random values of that shape."""


class Alone(nn.Module):
    """A layer in a model of its own: the model's output is the layer's first, or all of a model of transformers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        out = self.layer(*args, **kwargs)
        if isinstance(out, dict):
            return torch.cat([part.flatten(1) for part in out.values()], 1)
        return out if isinstance(out, torch.Tensor) else out[0]


class Row(NamedTuple):
    """A rule, a model with modules that it accepts, and two calls of it.

    `leak`: what the initialisation leaves out, relative to the output; with the rule `limit`, nothing is left out.
    `heads`: in how many heads the new parameters come, if any. `mask`: an argument that hides the last three tokens.
    `whole`: all laws are tried; without it only those of the function.
    """

    rule: Any
    make: Callable[[], nn.Module]
    call: Call
    other: Call | None = None
    where: Any = "layer"
    back: Callable[[nn.Module], nn.Module] = iso.revert
    leak: float = 1e-12
    limit: Any = None
    heads: int = 0
    mask: dict[str, Any] | None = None
    whole: bool = True


def alone(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Alone(make())


def noisy(model: nn.Module, std: float = 0.1) -> nn.Module:
    """Add noise to every parameter, so that none hides a part of the model by being 0 or 1."""
    for parameter in model.parameters():
        parameter.data += std * torch.randn_like(parameter)
    return model


def disturb(model: nn.Module, spread: float = 0.3) -> nn.Module:
    """Give a model other weights and statistics, of the same scale, in float64 and eval mode."""
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += (
                spread * parameter.std(correction=0).clamp(min=0.1) * torch.randn_like(parameter)
            )
        for norm in (
            m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None
        ):
            norm.running_mean += spread * torch.randn_like(norm.running_mean)
            norm.running_var *= 1 + spread * torch.rand_like(norm.running_var)
    model.eval()
    return model


TOKENS = ((2, 7, 12),)
MAP = ((2, 6, 7, 5),)
OTHER_MAP = ((1, 6, 4, 9),)
GRID = dict(grid_size=(2, 3), prefix_tokens=1)
VIT = dict(
    img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=4, num_classes=3, global_pool="avg"
)
VIT["dynamic_img_size"] = True
IMAGES = ((2, 3, 32, 32),)
OTHER_IMAGES = ((1, 3, 16, 40),)
SHUT = dict(locality=80.0, gate=60.0)
OPEN = dict(gate=-60.0)
"""Gating in the limits of a convolution and of attention by content, in which nothing is left out."""


def conv(*args: Any, **options: Any) -> Callable[[], nn.Module]:
    return alone(lambda: nn.Conv2d(*args, **options))


def attention(**options: Any) -> Callable[[], nn.Module]:
    return alone(lambda: Attention(12, 3, **dict(qkv_bias=True) | options))


def vit(**options: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model("vit_tiny_patch16_224", **VIT | options)


def mobileone(kernel: int, **options: Any) -> Callable[[], nn.Module]:
    return alone(
        lambda: MobileOneBlock(6, 6, kernel, num_conv_branches=2, layers=LayerFn(), **options)
    )


def pair() -> nn.Module:
    return Alone(iso.layers.AnnealedPair(nn.Conv2d(6, 8, 3), nn.Conv2d(8, 5, 1), slope=1.0))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(12, 3, 8, dropout=0.0, batch_first=True)


def gated_conv(
    make: Callable[[], nn.Module], content: str = "global", call: Call = MAP, **row: Any
) -> Row:
    limit = dict(locality=80.0) if content == "none" else SHUT
    rule = iso.ConvToGPSA(content=content)
    limit = iso.ConvToGPSA(content=content, **limit)
    return Row(rule, make, call, row.pop("other", OTHER_MAP), leak=1e-5, limit=limit, **row)


def gated(make: Callable[[], nn.Module], call: Call = TOKENS, heads: int = 3, **row: Any) -> Row:
    place = row.pop("place", {})
    rules = (iso.AttentionToGPSA(**dials, **place) for dials in ({}, OPEN))
    return Row(next(rules), make, call, leak=1e-5, limit=next(rules), heads=heads, **row)


def refined(
    make: Callable[[], nn.Module] | None = None, call: Call = TOKENS, heads: int = 3, **options: Any
) -> Row:
    make = make or attention()
    row = {name: options.pop(name) for name in Row._fields if name in options}
    return Row(
        iso.AttentionToRefined(**options),
        make,
        call,
        leak=row.pop("leak", 1e-12),
        heads=heads,
        **row,
    )


def pyramid(make: Callable[[], nn.Module], call: Call = MAP, **options: Any) -> Row:
    row = {name: options.pop(name) for name in Row._fields if name in options}
    leak = row.pop("leak", 1e-10)
    back = functools.partial(iso.fuse, norms=False)  # without an example no other norm is merged
    return Row(iso.LinearToPyramid(**options), make, call, back=back, leak=leak, **row)


IN_VIT = dict(where="blocks.*.attn", other=OTHER_IMAGES, heads=4)
CONV = conv(6, 8, 3, padding=1)
LINEAR = alone(lambda: nn.Linear(12, 10))
RULES = {
    "conv": gated_conv(CONV),
    "conv, strided": gated_conv(conv(6, 8, 5, stride=2, padding=2, bias=False)),
    "conv, 1x1": gated_conv(conv(6, 8, 1), whole=False),
    "conv, depthwise": gated_conv(conv(6, 6, 5, stride=2, padding=2, groups=6), whole=False),
    "conv, window": gated_conv(CONV, "window"),
    "conv, position only": gated_conv(CONV, "none"),
    "conv, position only, strided": gated_conv(
        conv(6, 6, 5, stride=2, padding=2, groups=3), "none", whole=False
    ),
    "attention, gated": gated(attention(qk_norm=True, norm_layer=nn.LayerNorm), place=GRID),
    "attention, gated, timm's gate": gated(attention(gated=True), place=GRID),
    "attention, gated, in a ViT": gated(vit(), IMAGES, **IN_VIT),
    "attention, gated, registers": gated(vit(reg_tokens=3), IMAGES, **IN_VIT, whole=False),
    "attention, refined": refined(ratio=2),
    "attention, refined, local": refined(ratio=0),
    "attention, refined, all maps": refined(reduce=False),
    "attention, refined, row and column": refined(span="row+column", whole=False),
    "attention, refined, recomputed": refined(recompute=True),
    "attention, refined, in a ViT": refined(vit(), IMAGES, **IN_VIT),
    "attention, refined, spatial": refined(vit(reg_tokens=1), IMAGES, span="spatial", **IN_VIT),
    "attention, relative": Row(iso.AttentionToRelative(**GRID), attention(), TOKENS, heads=3),
    "attention, relative, in a ViT": Row(iso.AttentionToRelative(), vit(), IMAGES, **IN_VIT),
    "attention, relative, prefix": Row(
        iso.AttentionToRelative(prefix_bias=True), vit(reg_tokens=1, qk_norm=True), IMAGES, **IN_VIT
    ),
    "attention, windows": Row(
        iso.AttentionToWindow(2), vit(reg_tokens=1), IMAGES, OTHER_IMAGES, "blocks.*.attn"
    ),
    "linear": pyramid(LINEAR, TOKENS, other=((1, 4, 12),)),
    "linear, deep": pyramid(LINEAR, TOKENS, layout="R-D2W1S", rectify="batchnorm", whole=False),
    "linear, naive": pyramid(
        alone(lambda: nn.Linear(12, 10, bias=False)), TOKENS, layout="naive-W4", whole=False
    ),
    "conv to pyramid": pyramid(CONV, other=OTHER_MAP),
    "conv to pyramid, depthwise": pyramid(
        conv(6, 6, 3, 2, 1, groups=6, bias=False), layout="R-D3W2", whole=False
    ),
    "pair": pyramid(pair, other=((1, 6, 4, 9),)),
    "mobileone, 1x1": pyramid(mobileone(1)),
    "mobileone, 3x3": pyramid(mobileone(3, group_size=1), layout="P-W1S"),
    "joint qkv": pyramid(vit(depth=1), IMAGES, where="blocks.*.attn.qkv", other=OTHER_IMAGES),
    "values alone": pyramid(vit(depth=1), IMAGES, where="blocks.*.attn.v", whole=False),
    "mlp": pyramid(vit(depth=1), IMAGES, where="blocks.*.mlp.fc?", whole=False),
    "linears, joint qkv": Row(
        iso.AttentionToLinears(), vit(depth=1), IMAGES, OTHER_IMAGES, "blocks.*.attn.qkv"
    ),
    "linears, encoder": Row(
        iso.AttentionToLinears(), alone(encoder), TOKENS, ((1, 4, 12),), "layer.self_attn"
    ),
    "conv with a norm": Row(iso.ConvToConvNorm(eps=1e-3), CONV, MAP, OTHER_MAP, back=iso.fuse),
}


def accepted(network: str, rule: Any) -> Callable[[str, nn.Module], bool]:
    """All attention of a network, but for the last layer of one whose output is its class token alone."""
    last = "layer_1" if "torchvision" in network else "none"
    return lambda name, module: last not in name and rule.accepts(iso.surgery.Site(module))


def of_layer(name: str, rule: str) -> Row:
    """The row of a class of attention with one of the two rules that edit its map."""
    layer = LAYERS[name]
    where = "layer"
    if name.startswith("multihead"):
        where = "layer.attention"
    row = dict(where=where, other=layer.other, mask=layer.mask, whole=layer.whole)
    call = (layer.shape, *layer.more)
    make = alone(layer.make)
    if rule == "gated":
        return gated(make, call, 0, **row)
    return refined(make, call, 0, ratio=1, **row)


for _name in LAYERS:
    if _name.startswith("multihead") and _name != "multihead_in_linears":
        _row = of_layer(_name, "gated")
        _row = _row._replace(rule=iso.AttentionToLinears(), leak=1e-12, limit=None)
        RULES[f"linears, {_name}"] = _row
RULES |= {
    f"{name}, {rule}": of_layer(name, rule) for name in LAYERS for rule in ("gated", "refined")
}

for _name, _make in NETWORKS.items():
    _whole = "torchvision" in _name
    _image = ((2, 3, 32, 32),)
    _where = accepted(_name, iso.AttentionToGPSA())
    RULES[f"{_name}, gated"] = gated(alone(_make), _image, 0, where=_where, whole=_whole)
    _where = accepted(_name, iso.AttentionToRefined())
    RULES[f"{_name}, refined"] = refined(alone(_make), _image, 0, where=_where, whole=_whole)


def values(call: Call, seed: int = 0) -> list[Any]:
    """The arguments of a call: random values for the shape that stands first."""
    x = torch.randn(call[0], dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return [x, *call[1:]]


@functools.cache
def plain(name: str) -> nn.Module:
    """The model of a row, with weights and statistics other than those of its class. Not to be changed."""
    torch.manual_seed(0)
    return disturb(RULES[name].make(), 0.7)


@functools.cache
def recast(name: str) -> nn.Module:
    """The model of a row after its rule. Not to be changed."""
    torch.manual_seed(1)
    return iso.recast(plain(name), RULES[name].rule, RULES[name].where)


def new_parameters(name: str, model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that its original does not have."""
    known = dict(plain(name).named_parameters())
    return {
        key: p
        for key, p in model.named_parameters()
        if key not in known or known[key].shape != p.shape
    }


@torch.no_grad()
def move(parameter: torch.Tensor) -> None:
    """Move new parameters far away from their initialisation."""
    parameter.mul_(0.1).add_(0.5 * torch.randn_like(parameter).abs())


@functools.cache
def moved(name: str) -> nn.Module:
    """The recast model of a row with all new parameters moved. Not to be changed."""
    torch.manual_seed(2)
    model = copy.deepcopy(recast(name))
    for parameter in new_parameters(name, model).values():
        move(parameter)
    return model


def deviation(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of two outputs, relative to the largest value."""
    return ((a - b).abs().max() / b.abs().max()).item()
