"""What `recast` selects, shares, keeps and rejects; the way back, strides and annealing."""

import copy
from dataclasses import dataclass

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from isomorph.surgery import Unstride, replay


def net(conv):
    return nn.Sequential(nn.Identity(), copy.deepcopy(conv), nn.BatchNorm2d(conv.out_channels)).eval()


@pytest.mark.parametrize("dials", [dict(gate=1.0), dict(locality=1.0)])
def test_an_open_layer_has_no_way_back(dials):
    gpsa = iso.ConvToGPSA().build(nn.Conv2d(6, 5, 3, padding=1))
    gpsa.set_gating(**dials)
    with pytest.raises(ValueError, match=r"deviation is \d"):
        gpsa.to_conv()


def test_taps_are_in_the_order_of_the_kernel():
    """A kernel that picks the upper right neighbour must shift the map down and left, at any init."""
    conv = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    conv.weight.data = torch.zeros(1, 1, 3, 3)
    conv.weight.data[0, 0, 0, 2] = 1.0
    x = torch.arange(20.0).view(1, 1, 4, 5)
    shifted = nn.functional.pad(x, (0, 1, 1, 0))[:, :, :4, 1:]
    torch.testing.assert_close(iso.ConvToGPSA().build(conv)(x), shifted, atol=1e-4, rtol=0)
    assert not torch.allclose(shifted, shifted.transpose(2, 3).reshape_as(shifted))


def test_requires_grad_is_kept_by_name():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    conv.weight.requires_grad_(False)
    gpsa = iso.recast(nn.Sequential(conv), iso.ConvToGPSA(), "0")[0]
    assert not gpsa.weight.requires_grad
    assert gpsa.bias.requires_grad
    assert gpsa.query.weight.requires_grad


def test_unstride_leaves_mode_and_requires_grad_inside_the_stage():
    cnn = timm.create_model("resnet50d").train()
    cnn.layer4[1].bn2.eval().requires_grad_(False)
    flat = iso.unstride(cnn, "layer4")
    assert not flat.layer4[1].bn2.training
    assert not flat.layer4[1].bn2.weight.requires_grad
    assert flat.layer4[1].bn1.training


def test_the_second_name_of_a_shared_module_matches_too():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    tcnn = iso.recast(nn.Sequential(conv, nn.ReLU(), conv), iso.ConvToGPSA(), "2")
    assert tcnn[0] is tcnn[2]
    assert isinstance(tcnn[0], iso.layers.GPSA2d)


def test_a_rule_needs_no_kind():
    @dataclass(frozen=True)
    class Widen(iso.surgery.Rule):
        atol = 0.0

        def reason(self, module):
            return None if isinstance(module, nn.ReLU) else "it is not a ReLU"

        def build(self, module):
            return nn.GELU()

    model = iso.recast(timm.create_model("cifar_resnet20"), Widen(), "layer3.*")
    assert isinstance(model.layer3[0].act1, nn.GELU)
    assert isinstance(model.layer2[0].act1, nn.ReLU)
    with pytest.raises(iso.UserError, match="not a rule of isomorph"):
        iso.save(model, "never.safetensors")


def test_the_root_may_be_the_target():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    gpsa = iso.recast(conv, iso.ConvToGPSA(), where="")
    assert isinstance(gpsa, iso.layers.GPSA2d)
    assert iso.edits(gpsa)[0].names == ("",)


def test_where_takes_globs_and_predicates():
    cnn = timm.create_model("cifar_resnet20")
    assert iso.targets(cnn, iso.ConvToGPSA(), "layer3.0.*") == ["layer3.0.conv1", "layer3.0.conv2"]
    assert iso.targets(cnn, iso.ConvToGPSA(), ["conv1", "layer1.2.conv2"]) == ["conv1", "layer1.2.conv2"]
    wide = iso.targets(cnn, iso.ConvToGPSA(), lambda name, module: getattr(module, "out_channels", 0) == 64)
    assert len(wide) == 6


def test_rules_print_hash_and_replay():
    rule = iso.ConvToGPSA(locality=3.0)
    assert "locality=3.0" in repr(rule)
    assert hash(rule) == hash(iso.ConvToGPSA(locality=3.0))
    cnn = net(nn.Conv2d(4, 4, 3, padding=1))
    tcnn = iso.recast(cnn, rule, "1")
    twin = replay(copy.deepcopy(cnn), iso.edits(tcnn)[0])
    twin.load_state_dict(tcnn.state_dict())
    x = torch.randn(1, 4, 6, 6)
    assert torch.equal(twin(x), tcnn(x))


class TestRevert:
    def test_the_model_is_the_cnn_again_and_saved_as_such(self, tmp_path):
        cnn = timm.create_model("cifar_resnet20").eval()
        tcnn = iso.recast(cnn, iso.ConvToGPSA(), "layer3.*.conv?")
        part = iso.revert(tcnn, "layer3.0.*")
        assert iso.edits(part)[0].names == tuple(f"layer3.{i}.conv{j}" for i in (1, 2) for j in (1, 2))
        back = iso.revert(part)
        assert iso.edits(back) == ()
        iso.verify(cnn, back, torch.randn(1, 3, 33, 40), atol=1e-4)
        iso.save(back, tmp_path / "back.safetensors")
        assert type(iso.load(tmp_path / "back.safetensors")) is type(cnn)

    def test_what_has_left_its_convolution_is_named(self):
        tcnn = iso.recast(timm.create_model("cifar_resnet20"), iso.ConvToGPSA("paper"), "layer3.*.conv?")
        with pytest.raises(iso.UserError, match=r"^layer3\.0\.conv1: .* deviation is"):
            iso.revert(tcnn)
        with pytest.raises(iso.UserError, match="no layer that can be reverted"):
            iso.revert(timm.create_model("cifar_resnet20"))


class TestUnstride:
    def test_weights_stay_and_the_map_grows(self):
        cnn = timm.create_model("resnet50d").eval()
        new = iso.unstride(cnn, "layer4")
        x = torch.randn(1, 3, 64, 96)
        assert cnn.forward_features(x).shape[-2:] == (2, 3)
        assert new.forward_features(x).shape[-2:] == (4, 6)
        assert all(torch.equal(tensor, new.state_dict()[name]) for name, tensor in cnn.state_dict().items())
        assert isinstance(iso.edits(new)[0].rule, Unstride)

    def test_shortcuts_without_parameters_follow(self):
        flat = iso.unstride(timm.create_model("cifar_resnet20"), "layer3").eval()
        assert flat.forward_features(torch.randn(1, 3, 32, 24)).shape == (1, 64, 16, 12)
        iso.verify(flat, iso.recast(flat, iso.ConvToGPSA(), "layer3.*.conv?"), torch.randn(1, 3, 32, 24))

    def test_pools_that_it_leaves_strided_are_refused(self):
        with pytest.raises(iso.UserError, match="BlurPool2d"):
            iso.unstride(timm.create_model("resnetblur50"), "layer4")

    def test_nothing_to_unstride_is_an_error(self):
        with pytest.raises(iso.UserError, match=r"layer1: .*no stride to remove"):
            iso.unstride(timm.create_model("cifar_resnet20"), "layer1")


class TestAnneal:
    def test_goes_from_exact_to_paper(self):
        schedule = iso.Anneal(10)
        assert schedule.at(0) == (20.0, 15.0)
        assert schedule.at(10) == pytest.approx((1.0, 1.0))
        assert schedule.at(5) == pytest.approx((20**0.5, 8.0))

    def test_sets_the_dials_then_lets_go(self):
        model = iso.recast(net(nn.Conv2d(4, 4, 3, padding=1)), iso.ConvToGPSA(), "1")
        schedule = iso.Anneal(4)
        schedule.apply(model, 2)
        torch.testing.assert_close(model[1].locality, torch.full((9,), 20**0.5))
        model[1].set_gating(3.0, 2.0)
        schedule.apply(model, 5)
        torch.testing.assert_close(model[1].gate.data, torch.full((9,), 2.0))

    def test_needs_something_to_anneal(self):
        with pytest.raises(iso.UserError, match="no gated attention layer"):
            iso.Anneal(4).apply(net(nn.Conv2d(4, 4, 3)), 0)
        with pytest.raises(iso.UserError, match="at least 1"):
            iso.Anneal(0)


def test_a_layer_of_zeros_goes_there_and_back():
    conv = torch.nn.Conv2d(4, 4, 3, padding=1)
    torch.nn.init.zeros_(conv.weight)
    torch.nn.init.zeros_(conv.bias)
    recast = iso.recast(torch.nn.Sequential(conv), iso.ConvToGPSA(init="exact"), "0")
    assert type(iso.revert(recast)[0]) is torch.nn.Conv2d


def test_edits_under_a_second_name_are_removed():
    conv = torch.nn.Conv2d(4, 4, 3, padding=1)
    model = torch.nn.ModuleDict({"a": conv, "b": conv})
    assert iso.edits(iso.revert(iso.recast(model, iso.ConvToGPSA(), "b"))) == ()
