"""What `recast` selects, shares, keeps and rejects; the way back, strides and annealing."""

import copy
import threading

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from isomorph.surgery import Unstride
from refusals import refused

CONV = iso.ConvToGPSA()


def resnet():
    return timm.create_model("cifar_resnet20").eval()


def test_where_takes_globs_predicates_and_the_root():
    cnn = resnet()
    assert iso.targets(cnn, CONV, "layer3.0.*") == ["layer3.0.conv1", "layer3.0.conv2"]
    assert iso.targets(cnn, CONV, ["conv1", "layer1.2.conv2"]) == ["conv1", "layer1.2.conv2"]
    assert (
        len(iso.targets(cnn, CONV, lambda name, module: getattr(module, "out_channels", 0) == 64))
        == 6
    )
    gpsa = iso.recast(nn.Conv2d(4, 4, 3, padding=1), CONV, where="")
    assert isinstance(gpsa, iso.layers.GPSA2d)
    assert iso.edits(gpsa)[0].names == ("",)


def test_what_is_reverted_is_the_cnn_again_and_saved_as_such(tmp_path):
    cnn = resnet()
    part = iso.revert(iso.recast(cnn, CONV, "layer3.*.conv?"), "layer3.0.*")
    assert iso.edits(part)[0].names == tuple(f"layer3.{i}.conv{j}" for i in (1, 2) for j in (1, 2))
    back = iso.revert(part)
    assert iso.edits(back) == ()
    iso.verify(cnn, back, torch.randn(1, 3, 33, 40), atol=1e-4)
    iso.save(back, tmp_path / "back.safetensors")
    assert type(iso.load(tmp_path / "back.safetensors")) is type(cnn)
    paper = iso.recast(cnn, iso.ConvToGPSA("paper"), "layer3.*.conv?")
    refused(r"^layer3\.0\.conv1: .* deviation is", iso.revert, paper)
    refused("no layer that can be reverted", iso.revert, cnn)


def test_unstride_keeps_weights_modes_and_shortcuts():
    cnn = timm.create_model("resnet50d").train()
    cnn.layer4[1].bn2.eval().requires_grad_(False)
    new = iso.unstride(cnn, "layer4")
    x = torch.randn(1, 3, 64, 96)
    norms = new.layer4[1].bn1, new.layer4[1].bn2
    assert [(norm.training, norm.weight.requires_grad) for norm in norms] == [
        (True, True),
        (False, False),
    ]
    assert [net.eval().forward_features(x).shape[-2:] for net in (cnn, new)] == [(2, 3), (4, 6)]
    for name, tensor in cnn.state_dict().items():
        assert torch.equal(tensor, new.state_dict()[name])
    assert isinstance(iso.edits(new)[0].rule, Unstride)
    flat = iso.unstride(resnet(), "layer3")  # its shortcuts are average pools
    assert flat.forward_features(torch.randn(1, 3, 32, 24)).shape == (1, 64, 16, 12)
    iso.verify(flat, iso.recast(flat, CONV, "layer3.*.conv?"), torch.randn(1, 3, 32, 24))
    refused("BlurPool2d", iso.unstride, timm.create_model("resnetblur50"), "layer4")
    refused(r"layer1: .*no stride to remove", iso.unstride, resnet(), "layer1")
    refused(
        "a detector needs", iso.unstride, timm.create_model("mask_rcnn", backbone="resnet18"), "*"
    )
    refused("still makes", iso.unstride, timm.create_model("convnextv2_atto"), "stages.3")
    refused(
        "unstride before recasting", iso.unstride, timm.create_model("hrnet_w18_small"), "stage3"
    )


def test_an_anneal_goes_from_exact_to_paper_then_lets_go():
    schedule = iso.Anneal(4)
    assert [schedule.at(n) for n in (0, 2, 4)] == [
        (20.0, 15.0),
        pytest.approx((20**0.5, 8.0)),
        (1.0, 1.0),
    ]
    model = iso.recast(resnet(), CONV, "conv1")
    schedule.apply(model, 2)
    torch.testing.assert_close(model.conv1.locality, torch.full((9,), 20**0.5))
    model.conv1.set_gating(3.0, 2.0)
    schedule.apply(model, 5)
    torch.testing.assert_close(model.conv1.gate.data, torch.full((9,), 2.0))
    refused("no gated attention", iso.Anneal(4).apply, resnet(), 0)


CHANGES = {
    "recast": lambda cnn: iso.recast(cnn, iso.ConvToGPSA(), "layer3.*.conv?"),
    "a layer with random values": lambda cnn: iso.recast(cnn, iso.LinearToPyramid(), "linear"),
    "fuse": lambda cnn: iso.fuse(iso.recast(cnn, iso.LinearToPyramid(), "linear")),
    "insert": lambda cnn: iso.insert(cnn, iso.layers.MapAttention, "layer3.2"),
    "revert": lambda cnn: iso.revert(
        iso.recast(cnn, iso.ConvToGPSA(init="exact"), "layer3.0.conv1")
    ),
    "prune": lambda cnn: iso.prune(iso.recast(cnn, iso.ConvToGPSA(init="exact"), "layer3.0.conv1")),
    "unstride": lambda cnn: iso.unstride(cnn, "layer3"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_torch_draws_as_before(change):
    """Surgery leaves the random state as it was, and layers of two recasts are no copies of each other."""
    cnn = timm.create_model("cifar_resnet20").eval()
    state = torch.get_rng_state()
    CHANGES[change](cnn)
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_of_two_recasts_draw_other_values():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    rule = iso.LinearToPyramid("P-W2S")
    new = iso.recast(iso.recast(net, rule, "0"), rule, "1")
    first, second = (dict(layer.named_parameters()) for layer in new)
    drawn = [name for name, p in first.items() if p.ndim > 1 and p.unique().numel() > 8]
    assert drawn
    for name in drawn:
        assert not torch.equal(first[name], second[name])


DOCUMENTED = [  # guides/troubleshooting.md, guides/prune.md
    (iso.LinearToPyramid(), 1e-4),
    (iso.surgery.Fuse(), 1e-4),
    (iso.AttentionToRefined(), 1e-4),
    (iso.AttentionToLinears(), 1e-5),
    (iso.surgery.Absorb((0.5,) * 3, (0.5,) * 3), 1e-5),
    (iso.surgery.Prune("position", 0.0), 1e-4),
    (iso.surgery.Prune("position", 0.001), 0.01),
    (iso.surgery.Prune("position", 0.2), 0.1),
    (iso.surgery.Prune("windows"), 1e-5),
]


@pytest.mark.parametrize(("rule", "tolerance"), DOCUMENTED, ids=lambda value: repr(value))
def test_verify_accepts_what_the_documentation_says(rule, tolerance):
    assert rule.accepted_difference == pytest.approx(tolerance)


@pytest.mark.parametrize(("size", "stride", "padding"), [(3, 2, 1), (1, 2, 0), (5, 3, 2)])
@torch.no_grad()
def test_a_convolution_without_its_stride_gives_the_positions_between_too(size, stride, padding):
    net = nn.Sequential(nn.Conv2d(3, 4, size, stride, padding)).double()
    x = torch.randn(2, 3, 12, 15, dtype=torch.float64)
    full = iso.unstride(net, "0")(x)
    assert full.shape[2:] == (12, 15)
    torch.testing.assert_close(full[..., ::stride, ::stride], net(x))


@torch.no_grad()
def test_a_shortcut_that_averages_reads_the_map_as_it_is():
    model = timm.create_model("resnet18d").eval()
    block = model.layer2[0]
    flat = iso.unstride(model, "layer2.0").layer2[0]
    x = torch.randn(1, 64, 8, 12)
    _, conv, norm = block.downsample
    torch.testing.assert_close(flat.downsample(x), norm(conv(x)))


@pytest.mark.parametrize("rule", [iso.LinearToPyramid(), iso.ConvToGPSA(init="exact")])
@torch.no_grad()
def test_strides_of_a_recast_convolution_are_removed_too(rule):
    net = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1)).eval()
    x = torch.randn(2, 3, 8, 10)
    expected = iso.unstride(net, "0")(x)
    flat = iso.unstride(iso.recast(net, rule, "0"), "0")
    torch.testing.assert_close(flat(x), expected, atol=1e-3, rtol=1e-3)


def test_frozen_norms_in_a_block_stay_in_eval_mode():
    cnn = timm.create_model("cifar_resnet20").train()
    norms = [name for name, m in cnn.named_modules() if isinstance(m, nn.BatchNorm2d)]
    for name in norms:
        cnn.get_submodule(name).eval()
    new = iso.insert(cnn, iso.layers.MapAttention, "layer3.1")
    assert new.layer3[1].training
    assert not any(new.get_submodule(name).training for name in norms)


class FreezesNorm(nn.Module):
    """Its `train` returns nothing, as in code of detectors."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()

    def forward(self, x):
        return self.norm(self.conv(x))


def test_a_train_that_returns_nothing(tmp_path):
    model = FreezesNorm()
    model.eval()
    x = torch.randn(2, 3, 8, 8)
    assert iso.verify(model, iso.recast(model, iso.ConvToGPSA(), "conv"), x).passed
    iso.save(model, tmp_path / "m.safetensors")
    again = iso.load(tmp_path / "m.safetensors", base=FreezesNorm())
    torch.testing.assert_close(again(x), model(x))
    iso.fuse(model, x)
    iso.export(model, tmp_path / "m.pt2", size=8)
    for timed in ("inference", "train"):
        (row,) = iso.cost_table({"m": model}, [(8, 8)], [2], seconds=0, timed=timed)
        assert row["macs"] == 4 * 3 * 9 * 64
        assert "problem" not in row


def test_what_is_attached_to_parameters_is_kept_or_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight._no_weight_decay = True
    model[0].bias.register_hook(lambda gradient: gradient * 0)
    new = iso.recast(model, iso.LinearToPyramid(), "1")
    assert new[0].weight._no_weight_decay
    (note,) = iso.surgery.notes(new)
    assert note == "hooks on gradients are not copied (0.bias): register them on the copy"


def test_a_model_with_a_lock_is_one_line():
    model = nn.Sequential(nn.Linear(4, 4))
    model.lock = threading.Lock()
    refused("cannot be copied .*lock.*take files", iso.recast, model, iso.LinearToPyramid(), "0")


def test_a_convolution_with_a_norm_has_its_mode_and_reads_one_map():
    conv = nn.Conv2d(3, 8, 3).eval()
    x = torch.randn(2, 3, 8, 8)
    layer = iso.layers.ConvNorm.from_conv(conv)
    torch.testing.assert_close(layer(x), conv(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer(x[0]), conv(x[0]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.fuse()(x), conv(x), atol=1e-5, rtol=1e-5)
    layer.norm.train()
    refused("eval mode", layer.fuse)


def test_checkpointing_runs_a_cumulative_average_as_before():
    cnn = timm.create_model("cifar_resnet20")
    model = iso.recast(cnn, iso.LinearToPyramid(), where="layer3.0.conv?").train()
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.momentum = None
    twin = copy.deepcopy(model)
    twin.set_grad_checkpointing()
    x = torch.randn(4, 3, 32, 32)
    for net in (model, twin):
        net(x).square().sum().backward()
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_module_in_train_mode_inside_a_model_in_eval_mode_stays_so():
    small = dict(img_size=32, depth=2, attn_drop_rate=0.2)
    vit = timm.create_model("vit_tiny_patch16_224", **small).eval()
    vit.blocks[0].attn.attn_drop.train()
    vit.blocks[1].attn.train()
    new = iso.recast(vit, iso.AttentionToRefined(), "blocks.*.attn")
    assert new.blocks[0].attn.attn_drop.training
    assert not new.blocks[0].attn.training
    assert new.blocks[1].attn.training


def test_gradient_hooks_are_named_beside_a_wrapped_part():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].bias.register_hook(lambda gradient: gradient * 0)
    model[1] = nn.DataParallel(model[1])
    notes = iso.surgery.notes(iso.recast(model, iso.LinearToPyramid(), "1"))
    assert any("hooks on gradients are not copied (0.bias)" in note for note in notes)


class Aux(nn.Module):
    """A norm that runs in train mode alone, as of auxiliary heads."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.aux = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.aux(self.norm(x)) if self.training else self.norm(x)


def test_a_norm_that_no_batch_calls_keeps_its_statistics():
    model = Aux()
    model.aux.running_mean.fill_(5.0)
    batches = [torch.randn(8, 3, 4, 4) + 2]
    new = iso.recalibrate(model, batches, keep_function=False)
    assert (new.aux.running_mean == 5).all()
    assert (new.norm.running_mean > 1).all()
