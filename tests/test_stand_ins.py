"""The reason why a rule rejects what another tool made of a model: quantised, wrapped, or made for inference alone."""

import copy
import warnings

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from refusals import refused
from requirements import optional

VIT = dict(img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=2, num_classes=3)
ATTENTION = [
    iso.AttentionToWindow(2),
    iso.AttentionToRefined(),
    iso.AttentionToRelative(),
    iso.AttentionToGPSA(),
]
PROJECTIONS = [iso.LinearToPyramid(), iso.AttentionToLinears()]


def vit():
    return timm.create_model("vit_tiny_patch16_224", **VIT).eval()


@pytest.mark.parametrize(
    "rule", [*ATTENTION, iso.LinearToPyramid()], ids=lambda rule: type(rule).__name__
)
def test_a_model_made_for_inference_is_copied_first(rule):
    where = "blocks.0.attn" if rule in ATTENTION else "blocks.0.mlp.fc1"
    with torch.inference_mode():
        model = vit()
        within = iso.recast(model, rule, where)
    refused("made under torch.inference_mode.* give copy.deepcopy", iso.recast, model, rule, where)
    refused("made under torch.inference_mode", iso.fuse, model)
    refused("made under torch.inference_mode", iso.verify, model, model, torch.randn(1, 3, 32, 32))
    for new in (iso.recast(copy.deepcopy(model), rule, where), within):
        new(torch.randn(2, 3, 32, 32)).sum().backward()
        assert new.patch_embed.proj.weight.grad.isfinite().all()


def quantised():
    with warnings.catch_warnings(action="ignore"):  # torch.ao is deprecated
        return torch.ao.quantization.quantize_dynamic(vit(), {nn.Linear})


@pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="needs int8 kernels of torch"
)
def test_quantised_layers():
    model = quantised()
    for rule in ATTENTION:
        refused(
            "its qkv is quantised .*; change the model before",
            iso.recast,
            model,
            rule,
            "blocks.0.attn",
        )
    for rule in PROJECTIONS:
        refused(
            "qkv is quantised .*; change the model before",
            iso.recast,
            model,
            rule,
            "blocks.0.attn.qkv",
        )
    refused("fc1 is quantised", iso.recast, model, iso.LinearToPyramid(), "blocks.0.mlp.fc1")
    refused(
        "qkv is quantised .*; change the model before", iso.fuse, model, torch.randn(1, 3, 32, 32)
    )


class Adapter(nn.Module):
    """A low-rank adapter around a linear layer, as many tools add it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.in_features = inner.in_features
        self.out_features = inner.out_features
        self.down = nn.Linear(inner.in_features, 2)
        self.up = nn.Linear(2, inner.out_features)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


def wrapped():
    model = vit()
    model.blocks[0].attn.qkv = Adapter(model.blocks[0].attn.qkv)
    return model, ""


def wrapped_by_peft():
    peft = optional("peft", "with")
    return peft.get_peft_model(
        vit(), peft.LoraConfig(target_modules=["qkv"])
    ).eval(), "base_model.model."


@pytest.mark.parametrize("make", [wrapped, pytest.param(wrapped_by_peft, marks=pytest.mark.slow)])
def test_adapters_around_projections(make):
    model, prefix = make()
    layer = f"{prefix}blocks.0.attn"
    x = torch.randn(1, 3, 32, 32)
    for rule in (iso.AttentionToRefined(), iso.AttentionToRelative()):
        refused(
            "its qkv is an adapter .* around its .*; merge it first", iso.recast, model, rule, layer
        )
    for rule in PROJECTIONS:
        refused(
            "qkv is an adapter .* around its .*; merge it first",
            iso.recast,
            model,
            rule,
            f"{layer}.qkv",
        )
    # which keep the class of the layer
    for rule in (iso.AttentionToWindow(2), iso.AttentionToGPSA()):
        assert iso.verify(model, iso.recast(model, rule, layer), x).passed
    merged = model.merge_and_unload() if hasattr(model, "merge_and_unload") else None
    if merged is not None:
        assert iso.verify(
            merged, iso.recast(merged, iso.AttentionToRefined(), "blocks.0.attn"), x
        ).passed


def test_a_class_of_another_package_is_named_in_full():
    model = nn.Sequential(Linear(3, 3))
    refused(f"other classes \\({__name__}.Linear\\)", iso.recast, model, iso.LinearToPyramid(), "0")


class Linear(nn.Module):
    """A layer named like torch's."""

    def __init__(self, *size):
        super().__init__()
        self.inner = nn.Bilinear(*size, 3)

    def forward(self, x):
        return self.inner(x, x)
