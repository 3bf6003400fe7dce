"""Layers of timm that are plain ones in another form: standardised weights, SAME padding, biases outside of a qkv."""

import pytest
import timm
import timm.layers
import torch
from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d
from timm.layers.conv2d_same import Conv2dSame
from timm.models import beit, convit, eva, swin_transformer_v2
from timm.models.edgenext import PositionalEncodingFourier
from torch import nn

import isomorph as iso
from isomorph.layers import SamePadding
from law_rows import noisy

CONVS = {
    "same": lambda: Conv2dSame(4, 6, 3),
    "same, stride 2": lambda: Conv2dSame(4, 6, 3, 2),
    "standardised": lambda: StdConv2d(4, 6, 3, 2, 1),
    "scaled": lambda: ScaledStdConv2d(4, 6, 3, padding=1),
    "scaled, same": lambda: ScaledStdConv2dSame(4, 6, 3, 2, padding="same"),
}


@pytest.mark.parametrize("name", CONVS)
@pytest.mark.parametrize(
    ("rule", "back", "atol"),
    [(iso.ConvToGPSA(), iso.revert, 2e-5), (iso.LinearToPyramid(), iso.fuse, 1e-10)],
)
def test_convolutions_of_another_form_keep_their_function(name, rule, back, atol):
    torch.manual_seed(0)
    model = nn.Sequential(CONVS[name]()).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    new = iso.recast(model, rule, "0")
    plain = back(new)
    assert {type(module) for module in plain.modules()} <= {nn.Sequential, nn.Conv2d, SamePadding}
    for size in ((8, 8), (9, 7), (10, 11)):
        x = torch.randn(2, 4, *size, dtype=torch.float64)
        torch.testing.assert_close(new(x), model(x), atol=atol, rtol=0)
        torch.testing.assert_close(plain(x), model(x), atol=atol, rtol=0)


def test_reverted_convolutions_are_saved(tmp_path):
    model = timm.create_model("test_nfnet", num_classes=3).eval()
    x = torch.randn(1, 3, 65, 64)
    where = "stages.*.conv2"
    nn.init.normal_(model.get_classifier().weight)
    once = iso.revert(iso.recast(model, iso.ConvToGPSA(), where))
    first = iso.edits(once)[-1].names[0]
    again = iso.revert(iso.recast(once, iso.ConvToGPSA(content="none"), first))
    part = iso.revert(iso.recast(model, iso.ConvToGPSA(), where), first)
    for reverted in (once, again, part):
        assert iso.edits(reverted)[-1].rule == iso.surgery.Revert()
        iso.save(reverted, tmp_path / "model.safetensors")
        torch.testing.assert_close(iso.load(tmp_path / "model.safetensors")(x), reverted(x))
        torch.testing.assert_close(reverted(x), model(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "make", [lambda: PositionalEncodingFourier(8, 16), lambda: convit.GPSA(16, 4)]
)
def test_the_weight_of_a_pyramid_can_be_read(make):
    """Networks read dtype and device of a layer's weight."""
    model = nn.Sequential(make()).eval()
    fourier = isinstance(model[0], PositionalEncodingFourier)
    where, x = ("0.token_projection", (1, 3, 4)) if fourier else ("0.qk", torch.randn(2, 16, 16))
    wide = iso.recast(model, iso.LinearToPyramid(), where)
    torch.testing.assert_close(wide(x), model(x), atol=1e-5, rtol=1e-5)
    pyramid = wide.get_submodule(where)
    noisy(pyramid)
    for name in ("weight", "bias"):
        torch.testing.assert_close(
            getattr(pyramid, name), getattr(pyramid.fuse(), name), atol=1e-5, rtol=1e-5
        )
    evaluated = pyramid.weight
    assert torch.equal(pyramid.train().weight, evaluated)  # with running statistics
    assert pyramid.half().weight.dtype == torch.float16


ATTENTION = {
    "beit": (
        lambda: beit.Attention(16, 4, qkv_bias=True, window_size=(4, 4)),
        torch.randn(2, 17, 16),
    ),
    "eva": (lambda: eva.EvaAttention(16, 4, scale_norm=False), torch.randn(2, 17, 16)),
    "swin v2": (lambda: swin_transformer_v2.WindowAttention(16, (4, 4), 4), torch.randn(2, 16, 16)),
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("where", ["0.qkv", "0.v"])
def test_a_qkv_with_separate_biases_becomes_a_pyramid_that_is_called(name, where):
    torch.manual_seed(0)
    model = nn.Sequential(ATTENTION[name][0]()).eval()
    x = ATTENTION[name][1]
    noisy(model, 0.3)
    wide = iso.recast(model, iso.LinearToPyramid(), where)
    torch.testing.assert_close(wide(x), model(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(iso.fuse(wide)(x), model(x), atol=1e-5, rtol=1e-5)
    wide.train()(x).square().sum().backward()
    gradients = [
        p.grad for n, p in wide.named_parameters() if ".branches." in n and p.grad is not None
    ]
    assert max(gradient.abs().max() for gradient in gradients) > 0
