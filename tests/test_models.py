"""Every model of isomorph is a timm citizen of the published size."""

import pytest
import timm
import torch
from timm.models import group_parameters

import isomorph as iso
from isomorph.layers import GPSA2d

PARAMETERS = {
    "cifar_resnet20": 269_722,
    "cifar_resnet32": 464_154,
    "cifar_resnet44": 658_586,
    "cifar_resnet56": 853_018,
    "coatnet_0": 24_446_228,
    "coatnet_1": 41_635_184,
    "coatnet_2": 73_635_144,
    "coatnet_3": 164_605_432,
    "coatnet_4": 273_064_456,
    "coatnet_5": 682_856_600,
    "coatnet_6": 1_461_684_976,
    "coatnet_7": 2_432_532_472,
    # the published counts less the dead biases of pos_proj: one a head in each of 10 layers
    "convit_ti": 5_710_512 - 40,
    "convit_s": 27_777_322 - 90,
    "convit_b": 86_540_040 - 160,
    "convit_ti_plus": 9_972_912 - 40,
    "convit_s_plus": 48_979_882 - 90,
    "convit_b_plus": 153_134_856 - 160,
    "refined_vit_b": 86_581_912,
    "refined_vit_s": 25_015_976,
    "refined_vit_m": 55_013_420,
    "refined_vit_l": 80_616_712,
    "refined_vit_s_released": 25_408_656,
    "refined_vit_m_released": 55_450_932,
    "refined_vit_l_released": 81_150_192,
    # base + layers * (3 C^2 + 9 heads * (2 centre + locality + gate))
    "t_cifar_resnet20": 269_722 + 3 * 32**2 + 36 + 5 * (3 * 64**2 + 36),
    "t_cifar_resnet56": 853_018 + 3 * 32**2 + 36 + 17 * (3 * 64**2 + 36),
    "t_resnetrs50": 35_691_912 + 3 * (3 * 512**2 + 36),
    "t_resnetrs101": 63_618_696 + 3 * (3 * 512**2 + 36),
    "t_resnetrs152": 86_621_576 + 3 * (3 * 512**2 + 36),
    "t_resnetrs200": 93_209_992 + 3 * (3 * 512**2 + 36),
    "t_resnetrs270": 129_861_448 + 4 * (3 * 512**2 + 36),
    "t_resnetrs350": 163_956_168 + 4 * (3 * 512**2 + 36),
    "t_resnet50d": 25_576_264 + 3 * (3 * 512**2 + 36),
    "t_resnet101d": 44_568_392 + 3 * (3 * 512**2 + 36),
    "t_resnet152d": 60_212_040 + 3 * (3 * 512**2 + 36),
    "t_resnet200d": 64_693_064 + 3 * (3 * 512**2 + 36),
    "tdrl_vit_ti": 48_859_816,  # the paper's 48.86M
    "tdrl_vit_s": 194_154_856,
    "vanillanet_5": 22_328_800,
    "tdrl_vit_ti_distilled": 48_859_816 + 2 * 192 + 193_000,  # a token, its position, a second head
}
PAPER_MILLIONS = {  # T-CNN Table 2
    "t_resnetrs50": 38,
    "t_resnetrs101": 66,
    "t_resnetrs152": 89,
    "t_resnetrs200": 96,
    "t_resnetrs270": 133,
    "t_resnetrs350": 167,
}
VITS = ["convit_ti", "refined_vit_s", "refined_vit_s_released", "tdrl_vit_ti"]
SMALL = ["cifar_resnet20", "coatnet_0", "vanillanet_5", "t_cifar_resnet20", "t_resnet50d", "t_resnetrs50", *VITS]
ODD_SIZES = {name: dict(dynamic_img_pad=True) for name in VITS}


SHORT = {"tdrl_vit_ti": dict(depth=3)}
"""Blocks enough to differ: the network as published takes seconds a test."""


def create(name, **kwargs):
    return timm.create_model(name, **SHORT.get(name, {}), **kwargs)


def size_of(name):
    return 32 if "cifar" in name else 64


def test_the_table_is_complete():
    assert set(iso.models.names()) == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    count = sum(p.numel() for p in model.parameters())
    assert count == PARAMETERS[name]
    if name in PAPER_MILLIONS:
        assert count / 1e6 == pytest.approx(PAPER_MILLIONS[name], rel=0.01)


@pytest.mark.parametrize("name", SMALL)
class TestCitizen:
    def test_forward_backward_on_odd_rectangles(self, name):
        model = create(name, num_classes=7, **ODD_SIZES.get(name, {}))
        y = model(torch.randn(2, 3, size_of(name) + 5, size_of(name) - 3))
        assert y.shape == (2, 7)
        y.square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    def test_features_and_head_are_forward(self, name):
        model = create(name).eval()
        x = torch.randn(1, 3, size_of(name), size_of(name))
        features = model.forward_features(x)
        torch.testing.assert_close(model.forward_head(features), model(x))
        assert model.forward_head(features, pre_logits=True).shape == (1, model.num_features)
        last, taken = model.forward_intermediates(x, indices=2)
        torch.testing.assert_close(last, features)
        assert len(taken) == 2
        if features.ndim == 4:  # tokens are normed once more, and lead with the class
            torch.testing.assert_close(taken[-1], features)

    def test_features_only_reports_true_reductions(self, name):
        model = create(name, features_only=True)
        x = torch.randn(1, 3, 2 * size_of(name), size_of(name))
        for y, channels, reduction in zip(
            model(x), model.feature_info.channels(), model.feature_info.reduction(), strict=True
        ):
            assert y.shape == (1, channels, 2 * size_of(name) // reduction, size_of(name) // reduction)

    def test_reset_classifier(self, name):
        model = create(name)
        model.reset_classifier(0)
        assert model(torch.randn(2, 3, 64, 64)).shape == (2, model.num_features)
        model.reset_classifier(5)
        assert model(torch.randn(2, 3, 64, 64)).shape == (2, 5)
        assert model.get_classifier().out_features == 5

    def test_gradient_checkpointing_changes_nothing(self, name):
        model, x = create(name).eval(), torch.randn(1, 3, 64, 64)
        expected = model(x)
        model.set_grad_checkpointing()
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
                module.eval()
        y = model(x)
        torch.testing.assert_close(y, expected)
        y.sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    def test_every_parameter_has_a_layer_group(self, name):
        model = create(name)
        grouped = group_parameters(model, model.group_matcher())
        assert sum(map(len, grouped.values())) == len(list(model.parameters()))

    def test_other_input_channels(self, name):
        assert create(name, in_chans=1)(torch.randn(2, 1, 64, 64)).shape[0] == 2


@pytest.mark.parametrize("name", ["t_cifar_resnet20", "t_resnet50d"])
def test_attention_is_exempt_from_decay(name):
    model = timm.create_model(name)
    layers = [n for n, m in model.named_modules() if isinstance(m, GPSA2d)]
    assert model.no_weight_decay() == {f"{n}.{p}" for n in layers for p in ("centre", "raw_locality", "gate")}


def test_forward_intermediates_stops_early_and_prunes():
    model = timm.create_model("cifar_resnet20").eval()
    x = torch.randn(1, 3, 32, 32)
    taken = model.forward_intermediates(x, indices=[0, 1], stop_early=True, intermediates_only=True)
    assert [y.shape[1] for y in taken] == [16, 16]
    assert model.prune_intermediate_layers([1]) == [1]
    assert len(model.layer3) == 0
    assert model(x).shape[1] == 16


def test_a_tresnet_is_unstride_then_recast():
    """The named model from the backbone's weights is the surgery by hand on the backbone."""
    cnn = timm.create_model("resnet50d", num_classes=4).eval()
    for block in cnn.layer4:
        torch.nn.init.ones_(block.bn3.weight)  # zero at birth, which would hide the branch
    from isomorph.models.tcnn import checkpoint_filter_fn

    named = timm.create_model("t_resnet50d", num_classes=4, init="exact").eval()
    named.load_state_dict(checkpoint_filter_fn(cnn.state_dict(), named))
    flat = iso.unstride(cnn, "layer4")
    x = torch.randn(1, 3, 64, 96)
    iso.verify(flat, named, x)
    by_hand = iso.recast(flat, iso.ConvToGPSA(), "layer4.*.conv2")
    torch.testing.assert_close(by_hand(x), named(x))
    assert (flat(x) - cnn(x)).abs().max() > 1e-3  # the stride does change the function


def test_pretrained_weights_load_strictly(data_root):
    model = timm.create_model("cifar_resnet20", pretrained=True).eval()
    twin = timm.create_model("t_cifar_resnet20", pretrained=True, init="exact").eval()
    x = torch.randn(2, 3, 37, 45)
    iso.verify(model, twin, x)
    fine_tune = timm.create_model("cifar_resnet20", pretrained=True, num_classes=3, in_chans=1)
    assert fine_tune(torch.randn(2, 1, 32, 32)).shape == (2, 3)


def test_public_layout_loads(tmp_path):
    """The public file wraps its tensors, prefixes them and has no batch counters."""
    model = timm.create_model("cifar_resnet20")
    public = {f"module.{k}": v for k, v in model.state_dict().items() if "num_batches" not in k}
    torch.save({"state_dict": public, "best_prec1": 91.7}, tmp_path / "public.th")
    other = timm.create_model("cifar_resnet20")
    iso.load_weights(other, tmp_path / "public.th")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
