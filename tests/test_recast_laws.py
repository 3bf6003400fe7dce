"""What every rule owes: equal at birth, the input untouched, gradients everywhere, refusals in words."""

import copy
import math
from dataclasses import dataclass

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models.byobnet import LayerFn, MobileOneBlock
from torch import nn

import isomorph as iso
from hostile import ALTERATIONS, BRIEF, attachments
from isomorph.surgery import Unstride, compare_outputs, replay

CONVS = [
    nn.Conv2d(5, 7, 3, padding=1),
    nn.Conv2d(5, 7, 3, padding=1, bias=False),
    nn.Conv2d(8, 4, 3, stride=2, padding=1),
    nn.Conv2d(3, 6, 5, stride=2, padding=2),
    nn.Conv2d(4, 4, 7, padding="same"),
    nn.Conv2d(4, 4, 3, padding="valid"),
    nn.Conv2d(4, 6, 1),
    nn.Conv2d(4, 6, 3, stride=(2, 1), padding=(1, 0)),
    nn.Conv2d(2, 3, 3, padding=2),
    nn.Conv2d(6, 4, 3, padding=1, groups=2),
    nn.Conv2d(6, 6, 5, stride=2, padding=2, groups=6),
]
SIZES = [(7, 7), (9, 12), (13, 8)]


def net(conv):
    return nn.Sequential(nn.Identity(), copy.deepcopy(conv), nn.BatchNorm2d(conv.out_channels)).eval()


@pytest.mark.parametrize("conv", CONVS, ids=str)
def test_equal_at_birth(conv):
    cnn = net(conv)
    tcnn = iso.recast(cnn, iso.ConvToGPSA(), "1")
    report = iso.verify(cnn, tcnn, [torch.randn(2, conv.in_channels, *size) for size in SIZES], atol=2e-5, seeds=[1])
    assert isinstance(tcnn[1], iso.layers.GPSA2d)
    assert report.passed
    assert [target.name for target in report.targets] == ["1"]


@pytest.mark.parametrize("conv", CONVS, ids=str)
def test_exact_in_the_limit(conv):
    cnn, rule = net(conv).double(), iso.ConvToGPSA(locality=80.0, gate=60.0)
    report = iso.verify(cnn, iso.recast(cnn, rule, "1"), torch.randn(2, conv.in_channels, 9, 8))
    assert report.fp64 < 1e-11  # rounding: what is left at these dials is exp(-80) and sigma(-60)


@pytest.mark.parametrize("conv", CONVS, ids=str)
def test_there_and_back(conv):
    gpsa = iso.ConvToGPSA().build(conv)
    back = gpsa.to_conv()
    assert back.kernel_size == conv.kernel_size
    torch.testing.assert_close(back.weight, conv.weight)
    x = torch.randn(1, conv.in_channels, 10, 9)
    torch.testing.assert_close(back(x), conv(x))


def test_the_way_back_carries_what_was_learnt():
    gpsa = iso.ConvToGPSA().build(nn.Conv2d(6, 5, 3, padding=1))
    for weight in (gpsa.weight, gpsa.bias, gpsa.value.weight, gpsa.query.weight):
        weight.data += 0.2 * torch.randn_like(weight)
    x = torch.randn(1, 6, 9, 9)
    torch.testing.assert_close(gpsa.to_conv()(x), gpsa(x), atol=1e-4, rtol=1e-4)  # exp(-20) and sigma(-15) leak


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


@pytest.mark.parametrize("init", ["exact", "paper"])
def test_gradients_reach_every_new_parameter(init):
    gpsa = iso.ConvToGPSA(init).build(nn.Conv2d(6, 5, 3, padding=1)).double()
    gpsa(torch.randn(2, 6, 7, 8, dtype=torch.float64)).square().sum().backward()
    for name, parameter in gpsa.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_the_input_model_is_untouched():
    cnn = timm.create_model("cifar_resnet20").train()
    before, kinds = copy.deepcopy(cnn.state_dict()), [type(m) for m in cnn.modules()]
    iso.recast(cnn, iso.ConvToGPSA(), "layer3.*")
    assert [type(m) for m in cnn.modules()] == kinds
    assert all(torch.equal(tensor, cnn.state_dict()[name]) for name, tensor in before.items())
    assert iso.edits(cnn) == ()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_mode_and_requires_grad_are_kept(training, dtype):
    cnn = net(nn.Conv2d(4, 4, 3, padding=1)).to(dtype).train(training)
    cnn[1].requires_grad_(False)
    tcnn = iso.recast(cnn, iso.ConvToGPSA(), "1")
    assert tcnn[1].training is training
    assert {p.dtype for p in tcnn[1].parameters()} == {dtype}
    assert not any(p.requires_grad for p in tcnn[1].parameters())
    assert all(p.requires_grad for p in tcnn[2].parameters())


def test_device_is_kept():
    with torch.device("meta"):
        cnn = net(nn.Conv2d(4, 4, 3, padding=1))
    tcnn = iso.recast(cnn, iso.ConvToGPSA(), "1")
    assert {p.device.type for p in tcnn.parameters()} == {"meta"}


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
    class Widen:
        atol = 0.0

        def accepts(self, module):
            return isinstance(module, nn.ReLU)

        def build(self, module):
            return nn.GELU()

    model = iso.recast(timm.create_model("cifar_resnet20"), Widen(), "layer3.*")
    assert isinstance(model.layer3[0].act1, nn.GELU)
    assert isinstance(model.layer2[0].act1, nn.ReLU)
    with pytest.raises(iso.UserError, match="not a rule of isomorph"):
        iso.save(model, "never.safetensors")


def test_a_shared_module_is_rebuilt_once():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    tcnn = iso.recast(nn.Sequential(conv, nn.ReLU(), conv), iso.ConvToGPSA(), "*")
    assert isinstance(tcnn[0], iso.layers.GPSA2d)
    assert tcnn[0] is tcnn[2]


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


class Restandardised(nn.Conv2d):
    """Computes with another weight than it holds, as timm's StdConv2d does."""

    def forward(self, x):
        return nn.functional.conv2d(x, self.weight - self.weight.mean())


REFUSED = {
    "Restandardised overrides forward of nn.Conv2d": Restandardised(4, 4, 3),
    "parametrized": nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)),
    "even": nn.Conv2d(4, 4, 2),
    "not square": nn.Conv2d(4, 4, (3, 5)),
    "dilation": nn.Conv2d(4, 4, 3, dilation=2),
    "padding_mode='reflect'": nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_name_the_module_and_the_reason(reason):
    with pytest.raises(iso.UserError, match=f"^stage.conv: .*{reason}") as caught:
        iso.recast(nn.ModuleDict({"stage": nn.ModuleDict({"conv": REFUSED[reason]})}), iso.ConvToGPSA(), "stage.*")
    assert "\n" not in str(caught.value)


def test_every_glob_must_match():
    cnn = timm.create_model("cifar_resnet20")
    with pytest.raises(iso.UserError, match=r"'layr2\.\*\.conv1' in where matches no module; nearest names: .*layer2"):
        iso.recast(cnn, iso.ConvToGPSA(), ["layer3.*.conv1", "layr2.*.conv1"])


@pytest.mark.parametrize("rule", [iso.ConvToGPSA, "exact", None])
def test_what_is_no_rule_is_said(rule):
    with pytest.raises(iso.UserError, match="is not a rule"):
        iso.recast(timm.create_model("cifar_resnet20"), rule, "layer3.*")


@pytest.mark.parametrize("where", [None, [], 3, [3], torch.zeros(2)])
def test_what_selects_nothing_is_said(where):
    with pytest.raises(iso.UserError, match="selects nothing"):
        iso.recast(timm.create_model("cifar_resnet20"), iso.ConvToGPSA(), where)


def test_no_match_names_the_nearest():
    cnn = timm.create_model("cifar_resnet20")
    said = {
        "layer3.0.conv22": r"matches no module; nearest names: layer3\.\*\.conv2",
        "layer3.conv1": r"matches no module; nearest names: layer3\.\*\.conv1",
        "2.conv1": r"matches no module; nearest names: layer1\.\*\.conv1, layer2\.\*\.conv1",  # not conv1 alone
        "encoder.block.0": r"matches no module; its layers: conv1, layer1\.\*\.conv1, layer1\.\*\.conv2 and 4 more$",
        "layer3.*.bn1": r"recasts Conv2d, but .* matches only other classes .*names: layer3\.\*\.conv1",
    }
    for where, message in said.items():
        with pytest.raises(iso.UserError, match=message):
            iso.recast(cnn, iso.ConvToGPSA(), where)
    with pytest.raises(iso.UserError, match=r"the predicate <lambda> matches no module; its layers: conv1, "):
        iso.recast(cnn, iso.ConvToGPSA(), lambda name, module: False)
    with pytest.raises(iso.UserError, match=r"its layers: 0, 1\.0$"):  # not * and *.*, which select everything
        iso.recast(nn.Sequential(nn.Conv2d(1, 1, 3), nn.Sequential(nn.Conv2d(1, 1, 3))), iso.ConvToGPSA(), "conv")


def test_a_target_inside_a_target_is_refused():
    cnn = timm.create_model("cifar_resnet20")
    with pytest.raises(iso.UserError, match="is inside target layer3"):
        iso.unstride(cnn, ["layer3", "layer3.0"])


def test_a_target_with_hooks_is_refused():
    cnn = net(nn.Conv2d(4, 4, 3, padding=1))
    cnn[1].register_forward_hook(lambda *args: None)
    with pytest.raises(iso.UserError, match="has hooks"):
        iso.recast(cnn, iso.ConvToGPSA(), "1")


@pytest.mark.parametrize(
    "fields",
    [dict(init="exakt"), dict(locality=0.0), dict(locality=-1.0), dict(locality=math.inf), dict(gate=math.nan)],
)
def test_impossible_rules_are_refused(fields):
    with pytest.raises(iso.UserError):
        iso.ConvToGPSA(**fields)


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


class TestVerify:
    def test_a_different_model_is_caught(self):
        cnn = net(nn.Conv2d(4, 4, 3, padding=1))
        with pytest.raises(iso.UserError, match="NOT equal") as caught:
            iso.verify(cnn, iso.recast(cnn, iso.ConvToGPSA("paper"), "1"), torch.randn(1, 4, 6, 6))
        assert caught.value.report.targets[0].deviation > 1e-3

    def test_a_step_that_changes_the_function_is_caught(self):
        cnn = timm.create_model("resnet50d", num_classes=4).eval()
        for block in cnn.layer4:
            nn.init.ones_(block.bn3.weight)
        tcnn = iso.recast(iso.unstride(cnn, "layer4"), iso.ConvToGPSA(), "layer4.*.conv2")
        with pytest.raises(iso.UserError, match="NOT equal"):
            iso.verify(cnn, tcnn, torch.randn(1, 3, 64, 64))

    def test_a_branch_that_is_switched_off_proves_nothing(self):
        """timm's last norms start at zero: the output does not depend on the branch, the modules do differ."""
        cnn = timm.create_model("resnet18", num_classes=4).eval()
        exact, paper = (iso.recast(cnn, iso.ConvToGPSA(init), "layer4.*.conv2") for init in ("exact", "paper"))
        x = torch.randn(1, 3, 64, 64)
        iso.verify(cnn, exact, x)
        with pytest.raises(iso.UserError, match="NOT equal") as caught:
            iso.verify(cnn, paper, x)
        assert caught.value.report.fp64 == 0

    def test_large_outputs_are_compared_by_share(self):
        cnn = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)).eval()
        cnn[0].weight.data *= 1e6
        iso.verify(cnn, iso.recast(cnn, iso.ConvToGPSA(), "0"), torch.randn(1, 4, 8, 8))

    def test_nan_is_caught_at_any_tolerance(self):
        broken = net(nn.Conv2d(4, 4, 3, padding=1))
        broken[1].weight.data.fill_(float("nan"))
        with pytest.raises(iso.UserError, match="NOT equal"):
            iso.verify(broken, broken, torch.randn(1, 4, 6, 6), atol=math.inf)

    def test_nan_is_caught(self):
        broken = net(nn.Conv2d(4, 4, 3, padding=1))
        broken[1].weight.data.fill_(float("nan"))
        with pytest.raises(iso.UserError, match="max \\|diff\\| inf"):
            iso.verify(broken, broken, torch.randn(1, 4, 6, 6))

    def test_doubtful_results_have_a_note(self):
        cnn = net(nn.Conv2d(4, 4, 3, padding=1))
        cnn.append(nn.Conv2d(4, 2, 1, bias=False))
        cnn[-1].weight.data.zero_()
        report = iso.verify(cnn, copy.deepcopy(cnn), torch.randn(1, 4, 6, 6))
        assert report.passed
        assert "all outputs are 0" in str(report)
        trained = copy.deepcopy(cnn)
        nn.init.normal_(trained[-1].weight)
        assert "all outputs are 0" not in str(compare_outputs(cnn, trained, torch.randn(1, 4, 6, 6)))
        half = net(nn.Conv2d(4, 4, 3, padding=1)).to(torch.bfloat16)
        other = copy.deepcopy(half)
        other[1].weight.data *= 1.01
        with pytest.raises(iso.UserError, match="weights are in bfloat16: rounding alone"):
            iso.verify(half, other, torch.randn(1, 4, 6, 6))

    def test_arguments_need_no_tensor_of_their_own(self):
        class Listed(nn.Module):
            def forward(self, images, times=1):
                return times * torch.stack(images).sum(0)

        inputs = {"images": [torch.randn(2), torch.randn(2)], "times": 3}
        assert compare_outputs(Listed(), Listed(), inputs).passed

    @pytest.mark.parametrize(
        ("model", "x", "atol", "message"),
        [
            (None, torch.randn(1, 4, 6, 6), None, "None is not a model"),
            (nn.LazyLinear(3), torch.randn(1, 4), None, r"weight has no shape yet \(lazy layer\); run the model once"),
            (nn.Identity(), torch.randn(0, 4, 6, 6), None, r"the batch is empty \(0x4x6x6\)"),
            (nn.Identity(), {"x": torch.randn(0, 4)}, None, r"the batch is empty \(x 0x4\)"),
            (nn.Identity(), torch.randn(1, 4), -1e-3, "atol -0.001 must be at least 0"),
            (nn.Identity(), torch.randn(1, 4), float("nan"), "atol nan must be at least 0"),
        ],
    )
    def test_what_cannot_be_compared_is_said(self, model, x, atol, message):
        with pytest.raises(iso.UserError, match=message):
            iso.verify(nn.Identity(), model, x, atol)

    def test_eval_is_forced_and_modes_are_left(self):
        cnn = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.5)).train()
        report = iso.verify(cnn, cnn, torch.randn(1, 4, 6, 6))
        assert report.fp32 == 0
        assert cnn.training
        assert cnn[1].training

    def test_report_reads_as_text_and_as_plain_values(self):
        cnn = net(nn.Conv2d(4, 4, 3, padding=1))
        report = iso.verify(cnn, iso.recast(cnn, iso.ConvToGPSA(), "1"), torch.randn(1, 4, 6, 6), seeds=[3])
        assert report.as_dict()["passed"] is True
        assert len(report.inputs) == 2
        assert "float64" in str(report)
        assert "GPSA2d" in str(report)

    def test_shapes_that_differ_are_said(self):
        with pytest.raises(iso.UserError, match="different shapes"):
            iso.verify(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 5, 3), torch.randn(1, 4, 6, 6))


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


def attention(**kwargs):
    return nn.Sequential(Attention(12, 3, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm, **kwargs))


def mobileone(kernel_size):
    return nn.Sequential(MobileOneBlock(4, 4, kernel_size, layers=LayerFn()))


TOKENS, MAP = (2, 7, 12), (2, 4, 6, 5)
PLACED = dict(grid_size=(2, 3), prefix_tokens=1)
CHAIN = (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 5, 1))
SURGERY = {
    "ConvToGPSA": (iso.ConvToGPSA(), lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1)), MAP),
    "AttentionToGPSA": (iso.AttentionToGPSA(**PLACED), attention, TOKENS),
    "AttentionToRefined": (iso.AttentionToRefined(), attention, TOKENS),
    "local": (iso.AttentionToRefined(ratio=0), attention, TOKENS),
    "without reduction": (iso.AttentionToRefined(reduce=False), attention, TOKENS),
    "positions only": (
        iso.ConvToGPSA(content="none"),
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1)),
        MAP,
    ),
    "AttentionToRelative": (iso.surgery.AttentionToRelative(**PLACED), attention, TOKENS),
    "LinearToPyramid": (iso.LinearToPyramid(), lambda: nn.Sequential(nn.Linear(12, 8)), TOKENS),
    "chain": (iso.LinearToPyramid(), lambda: nn.Sequential(nn.Sequential(*copy.deepcopy(CHAIN))), MAP),
    "mobileone 1x1": (iso.LinearToPyramid(), lambda: mobileone(1), MAP),
    "mobileone 3x3": (iso.LinearToPyramid(), lambda: mobileone(3), MAP),
    "BranchesToConv": (iso.BranchesToConv(), lambda: mobileone(3), MAP),
}
BACK = {
    "GPSA2d": (iso.revert, SURGERY["ConvToGPSA"]),
    "ViTGPSA": (iso.revert, SURGERY["AttentionToGPSA"]),
    "RefinedAttention": (iso.revert, SURGERY["AttentionToRefined"]),
    "ExpandedAttention": (iso.revert, SURGERY["without reduction"]),
    "PositionalConv2d": (iso.revert, SURGERY["positions only"]),
    "ViTRelativeAttention": (iso.revert, SURGERY["AttentionToRelative"]),
    "PyramidLinear": (iso.fuse, (iso.LinearToPyramid("P-W1S"), *SURGERY["LinearToPyramid"][1:])),
    "PyramidConv2d": (iso.fuse, (iso.LinearToPyramid("R-D1W1"), *SURGERY["chain"][1:])),
}


def alter(model, path, alteration):
    """Whether the alteration is one for the module at the path; then the model, altered."""
    altered = copy.deepcopy(model)
    done = ALTERATIONS[alteration](altered.get_submodule(path)) is not False
    return altered.train(model.training) if done else None


def check_nothing_is_lost(model, operate, shape):
    """Every alteration of every part of a model: it is said to be lost, or it is kept."""
    x, kept, refused = torch.randn(shape), 0, []
    paths = [name for name, _ in model.named_modules() if name]
    for path in paths:
        for alteration in ALTERATIONS if len(paths) < 10 or path == "0" else BRIEF:
            altered = alter(model, path, alteration)
            if altered is None:
                continue
            try:
                new = operate(altered)
            except iso.UserError as error:
                refused.append(str(error))
                continue
            kept += 1
            case = f"{alteration} on {path}"
            assert attachments(new) == attachments(altered), case
            if alteration == "whole numbers":
                continue
            with torch.no_grad():
                assert torch.allclose(new.eval()(x), altered.eval()(x), atol=2e-3), case
    assert kept
    assert refused
    words = ("0", "the model cannot be copied", "LinearToPyramid recasts")  # an altered chain is not a target
    assert all(said.startswith(words) and "\n" not in said for said in refused), refused


@pytest.mark.filterwarnings("ignore:.*deprecated")  # the old norms are what is tried
@pytest.mark.parametrize("name", SURGERY)
def test_hostile_targets_keep_what_they_compute_or_are_refused(name):
    rule, make, shape = SURGERY[name]
    check_nothing_is_lost(make().eval(), lambda model: iso.recast(model, rule, "0"), shape)


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("name", BACK)
def test_hostile_layers_go_back_with_all_they_have_or_not_at_all(name):
    back, (rule, make, shape) = BACK[name]
    check_nothing_is_lost(iso.recast(make().eval(), rule, "0"), back, shape)


def subclasses(kind):
    """All classes that timm and torch derive from one, quantised ones included."""
    return {sub for child in kind.__subclasses__() for sub in (child, *subclasses(child))}


OF_ALL = [
    (iso.ConvToGPSA(), nn.Conv2d(4, 4, 3, padding=1), MAP),
    (iso.LinearToPyramid(), nn.Conv2d(4, 4, 3, padding=1), MAP),
    (iso.LinearToPyramid(), nn.Linear(12, 12), TOKENS),
    (iso.AttentionToGPSA(**PLACED), Attention(12, 3), TOKENS),
    (iso.AttentionToRefined(), Attention(12, 3), TOKENS),
]


@pytest.mark.parametrize(("rule", "layer", "shape"), OF_ALL)
def test_no_class_of_timm_or_torch_is_taken_for_what_it_is_not(rule, layer, shape):
    """A layer of a derived class is refused, or computes what the layer of its base computes."""
    import torch.ao.nn.intrinsic.qat  # registers classes that are trained to be quantised

    x, plain = torch.randn(shape), type(layer)
    found = sorted(subclasses(plain), key=str)
    taken = []
    for kind in found:
        other = copy.deepcopy(layer).eval()
        other.__class__ = kind
        if rule.accepts(other):
            taken.append(kind)
            torch.testing.assert_close(other(x), layer.eval()(x), msg=str(kind))
    assert len(found) > 3
    assert len(taken) < len(found)


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
