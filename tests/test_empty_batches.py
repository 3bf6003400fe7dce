"""No images give no outputs, of the right shape, wherever timm's own networks do so."""

import pytest
import timm
import torch
from torch import nn

from isomorph.layers import (
    GPSA,
    GPSA2d,
    PyramidConv2d,
    PyramidLinear,
    SpatialAttention,
    WindowGPSA2d,
)
from small_models import MODELS, SMALL, build, recast, vit

RECASTS = [name.removeprefix("vit, ") for name in MODELS if name.startswith("vit, ")]


def check(model, x, shape):
    """As timm's models and torch's BatchNorm: empty outputs, gradients of zero, statistics as they were."""
    before = {name: b.clone() for name, b in model.named_buffers() if "num_batches" not in name}
    with torch.no_grad():
        assert model.eval()(x).shape == shape
    for mode in (False, True):
        model.train(mode).zero_grad()
        y = model(x.requires_grad_())
        assert y.shape == shape
        y.sum().backward()
        assert x.grad.shape == x.shape
        for p in model.parameters():
            if p.grad is not None:
                assert not p.grad.any()
        assert any(p.grad is not None for p in model.parameters())
    for name, buffer in model.named_buffers():
        assert name not in before or torch.equal(buffer, before[name]), name


@pytest.mark.parametrize(
    "name", [name for name in MODELS if not name.startswith("vit") and name != "tdrl_vit"]
)
def test_every_family(name):
    model = build(name)
    size = 16 if "cifar" in name else 32
    x = torch.empty(0, 3, 2 * size, size).double()
    check(model, x, (0, 3))
    if hasattr(model, "forward_intermediates") and "tdrl_vit" not in name:  # its method is timm's
        last, maps = model.eval().forward_intermediates(x)
        assert len(last) == 0
        for m in maps:
            assert len(m) == 0
            assert m.ndim == 4


@pytest.mark.parametrize("rule", [*RECASTS, None])
def test_a_vit_recast_by_every_rule(rule):
    """Of one image size: of any, timm's own does not take empty batches."""
    fixed = dict(dynamic_img_size=False)
    check(recast(rule, **fixed) if rule else vit(**fixed), torch.empty(0, 3, 64, 64), (0, 3))


@pytest.mark.parametrize(
    ("layer", "shape", "given"),
    [
        (GPSA(8, 4, (9, 9)), (0, 81, 8), (0, 81, 8)),
        (GPSA(8, 4, (3, 3)), (0, 9, 8), (0, 9, 8)),
        (SpatialAttention(8, 2, grid_size=(3, 2), prefix_tokens=1), (0, 7, 8), (0, 7, 8)),
        (GPSA2d(6, 4, 3, stride=2, padding=1), (0, 6, 8, 5), (0, 4, 4, 3)),
        (GPSA2d(6, 4, 3, padding=1), (0, 6, 40, 24), (0, 4, 40, 24)),
        (PyramidLinear(6, 4), (0, 3, 6), (0, 3, 4)),
        (PyramidLinear(6, 4, rectify="batchnorm"), (4, 0, 6), (4, 0, 4)),
        (PyramidConv2d(6, 4, 3, padding=1), (0, 6, 5, 4), (0, 4, 5, 4)),
        (PyramidConv2d(6, 6, 3, 2, 1, groups=3, rectify="batchnorm"), (0, 6, 5, 4), (0, 6, 3, 2)),
        (PyramidConv2d(6, 4), (0, 6, 5, 4), (0, 4, 5, 4)),
        (PyramidLinear(6, 4, form="branches"), (0, 3, 6), (0, 3, 4)),
        (PyramidLinear(6, 4, layout="naive-W1"), (0, 3, 6), (0, 3, 4)),
        (WindowGPSA2d(6, 4, 3, padding=1), (0, 6, 20, 24), (0, 4, 20, 24)),
    ],
)
def test_every_layer(layer, shape, given):
    check(layer, torch.empty(shape), given)


def test_statistics_count_an_empty_batch_as_torchs_do():
    pyramid = PyramidLinear(6, 4)
    norm = nn.BatchNorm1d(6)
    for layer in (pyramid, norm):
        layer(torch.randn(5, 6))
        layer(torch.empty(0, 6))
    counted = {int(b) for n, b in pyramid.named_buffers() if "num_batches" in n}
    assert counted == {int(norm.num_batches_tracked)} == {2}
    with pytest.raises(ValueError, match="more than 1 value"):
        pyramid(torch.randn(1, 6))


@pytest.mark.parametrize(
    "form", [dict(), dict(pos_embed="none"), dict(no_embed_class=True), dict(reg_tokens=2)]
)
def test_positions_are_timms(form):
    ours = timm.create_model(
        "refined_vit_b", num_classes=3, ratio=0, kernel=0, **{**SMALL, **form}
    ).eval()
    theirs = vit(**form).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 96, 48)
    torch.testing.assert_close(ours(x), theirs(x))
