"""VanillaNet: its published size, its anneal, its way from two layers to one, and pyramids in place of the two."""

import re

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import isomorph as iso
from isomorph.analysis.cost import count_macs
from isomorph.lab.training.build import build_model
from isomorph.lab.training.recipe.model_fields import ModelPart
from isomorph.lab.training.recipe.recipe import validate
from isomorph.lab.training.run.log import read_log
from isomorph.layers.annealed import AnnealedPair, AnnealedReLU, SeriesActivation
from isomorph.models.vanillanet import checkpoint_filter_fn
from refusals import refused

SMALL = dict(dims=[8, 12, 16, 20], num_classes=5)


def small(slope=0.0, **more):
    """A narrow network whose weights and statistics are not those of its initialisation."""
    torch.manual_seed(0)
    model = timm.create_model("vanillanet_5", **SMALL | more, slope=slope)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    for norm in (m for m in model.modules() if isinstance(m, _BatchNorm)):
        nn.init.uniform_(norm.running_mean, -1, 1)
        nn.init.uniform_(norm.running_var, 0.5, 2)
        nn.init.uniform_(norm.weight, 0.5, 2)
    return model.eval()


UNIT = ("pair.first", "pair.norm1", "pair.second", "pair.norm2", "act.norm", "act.conv")
OWN = (*(f"stem.{name}" for name in UNIT), "head.first", "head.norm1", "head.second", *UNIT)
PUBLIC = (
    "stem1.0",
    "stem1.1",
    "stem2.0",
    "stem2.1",
    "stem2.2.bn",
    "stem2.2",
    "cls1.2",
    "cls1.3",
    "cls2.0",
)
PUBLIC += ("conv1.0", "conv1.1", "conv2.0", "conv2.1", "act.bn", "act")


def public_names(model):
    """The model's tensors as the public checkpoints name them."""
    found = {}
    for own, tensor in model.state_dict().items():
        if not own.endswith(".slope"):
            stage, layer, last = re.fullmatch(r"(stages\.\d+\.)?(.*)(\.\w+)", own).groups(
                default=""
            )
            tensor = (
                tensor[:, :, None, None] if own.startswith("head.") and tensor.ndim == 2 else tensor
            )
            found[stage + dict(zip(OWN, PUBLIC, strict=True))[layer] + last] = tensor
    return found


def norm(state, name, x):
    values = (state[f"{name}.{key}"] for key in ("running_mean", "running_var", "weight", "bias"))
    mean, var, weight, bias = (value[:, None, None] for value in values)
    return (x - mean) / (var + 1e-6).sqrt() * weight + bias


def written_out(state, x, slope=1.0, strides=(2, 2, 2)):
    """VanillaNet in eval mode from a public state dict, operation by operation."""

    def conv(name, x, stride=1):
        return F.conv2d(x, state[f"{name}.weight"], state[f"{name}.bias"], stride)

    def act(name, x):
        weight = state[f"{name}.weight"]
        x = F.conv2d(x.clamp(min=0), weight, padding=weight.shape[-1] // 2, groups=len(weight))
        return norm(state, f"{name}.bn", x)

    def annealed(x):
        return (1 - slope) * x.clamp(min=0) + slope * x

    x = annealed(norm(state, "stem1.1", conv("stem1.0", x, 4)))
    x = act("stem2.2", norm(state, "stem2.1", conv("stem2.0", x)))
    for i, stride in enumerate(strides):
        x = annealed(norm(state, f"stages.{i}.conv1.1", conv(f"stages.{i}.conv1.0", x)))
        x = norm(state, f"stages.{i}.conv2.1", conv(f"stages.{i}.conv2.0", x))
        x = act(f"stages.{i}.act", F.max_pool2d(x, stride))
    x = annealed(norm(state, "cls1.3", conv("cls1.2", x.mean((2, 3), keepdim=True))))
    return conv("cls2.0", x).flatten(1)


@pytest.mark.parametrize("slope", [0.0, 0.4, 1.0])
def test_the_network_is_the_published_one(slope):
    model = small(slope).double()
    x = torch.randn(2, 3, 45, 67, dtype=torch.float64)
    torch.testing.assert_close(model(x), written_out(public_names(model), x, slope))


def test_public_checkpoints_load(tmp_path):
    """Their anneal is over; ours is told so, in a network that is created to train."""
    model = small(1.0)
    torch.save({"model": public_names(model)}, tmp_path / "vanillanet_5.pth")
    other = timm.create_model("vanillanet_5", **SMALL).eval()
    iso.load_weights(other, tmp_path / "vanillanet_5.pth")
    x = torch.randn(2, 3, 40, 36)
    torch.testing.assert_close(other(x), model(x))
    shuffled = dict(sorted(public_names(model).items()))
    assert checkpoint_filter_fn(shuffled, other) == shuffled  # tensors are known by their order
    own = checkpoint_filter_fn(other.state_dict(), other)
    assert own.keys() == other.state_dict().keys()
    part = ModelPart(
        name="vanillanet_5", kwargs=dict(dims=SMALL["dims"]), weights=tmp_path / "vanillanet_5.pth"
    )
    fresh = build_model(part, 3)  # another number of classes: a new head, annealed as the rest is
    assert fresh.head.second.out_features == 3
    assert fresh.head.act.is_identity


def test_published_size_and_cost():
    """15.5M parameters and 5.2 G multiply-adds (VanillaNet Table 4), fused."""
    with torch.device("meta"):
        thin = iso.fuse(timm.create_model("vanillanet_5", slope=1.0).eval())
    count = sum(p.numel() for p in thin.parameters())
    assert count == 15_523_304
    assert round(count / 1e6, 1) == 15.5
    assert count_macs(thin, (3, 224, 224)) / 1e9 == pytest.approx(5.2, abs=0.05)
    assert sum(isinstance(m, nn.Conv2d) and m.groups == 1 for m in thin.modules()) == 4
    assert isinstance(thin.head, nn.Linear)


@pytest.mark.parametrize("slope", [0.0, 0.5, 1.0])
def test_fused_it_is_the_same(slope, tmp_path):
    """BatchNorm is always merged, the two layers where nothing is between them; saved and loaded as any model."""
    model = small(slope)
    x = torch.randn(2, 3, 45, 67)
    thin = iso.fuse(model)
    iso.verify(model, thin, x)
    for m in thin.modules():
        assert not isinstance(m, _BatchNorm)
    linear = [m for m in thin.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert len(linear) == (9 if slope == 1 else 14)  # 4 of activations, 5 layers or 10
    assert repr(iso.fuse(thin)) == repr(thin)
    for name, net in (("thin", thin), ("wide", model)):
        iso.save(net, tmp_path / f"{name}.safetensors")
        again = iso.load(tmp_path / f"{name}.safetensors")
        torch.testing.assert_close(again(x), net(x))
    thin.reset_classifier(3)
    assert thin(x).shape == (2, 3)
    assert not [m for m in thin.modules() if isinstance(m, _BatchNorm)]
    refused("fuse needs eval mode", SeriesActivation(3).fuse)
    refused("fuse needs eval mode", AnnealedPair(nn.Linear(2, 2), nn.Linear(2, 2)).fuse)


@torch.no_grad()
def test_pairs_keep_the_padding_and_fuse_pyramids_inside():
    x = torch.randn(2, 3, 8, 8)
    pair = AnnealedPair(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.Conv2d(8, 4, 1), slope=1.0
    ).eval()
    torch.testing.assert_close(pair.fuse()(x), pair(x), atol=1e-5, rtol=1e-5)
    wide = iso.recast(nn.Sequential(pair).eval(), iso.LinearToPyramid(), "0.second")
    wide[0].second.skip.bias += 1
    torch.testing.assert_close(iso.fuse(wide)(x), wide(x), atol=1e-5, rtol=1e-5)
    with pytest.raises(iso.UserError, match=r"second convolution, .* needs a 1x1 kernel"):
        AnnealedPair(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 3, padding=1))


def test_impossible_networks_are_refused():
    refused("one number more than strides", timm.create_model, "vanillanet_5", dims=[8, 8])
    for slope in (-0.1, 1.1, float("nan")):
        refused(str(slope), AnnealedReLU, slope)


def train(folder, epochs=1, recast=None, **more):
    recipe = dict(anneal=dict(epochs=epochs), ema=0.99, epochs=epochs, out=str(folder)) | dict(
        model=dict(name="vanillanet_5", kwargs=dict(dims=[8, 12, 16, 20]), recast=recast),
        data=dict(source="digits", fraction=0.05, size=[32, 32], batch_size=16, test_images=60),
        optim=dict(name="lamb", lr=1e-3),
    )
    return iso.train(validate(recipe | more), show=False)


def test_a_recipe_anneals_and_the_averaged_weights_follow(tmp_path):
    """One mechanism with the gates of T-CNN: after its epochs every ReLU is the identity, averaged or not."""
    result = train(tmp_path, 2, keep_every=1)
    for m in result.model.modules():
        if isinstance(m, AnnealedReLU):
            assert m.is_identity
    first = iso.load(tmp_path / "epoch-1.safetensors")
    last = iso.load(tmp_path / "model.safetensors")
    assert {m.slope.item() for m in first.modules() if isinstance(m, AnnealedReLU)} == {0.5}
    assert isinstance(iso.fuse(last).head, nn.Linear)
    anneal = iso.Anneal(10)
    model = small()
    for step, slope in ((0, 0.0), (3, 0.3), (10, 1.0)):
        anneal.apply(model, step)
        assert {
            round(m.slope.item(), 6) for m in model.modules() if isinstance(m, AnnealedReLU)
        } == {slope}
    model.head.act.set_slope(0.5)
    anneal.apply(model, 11)  # over: left alone
    assert model.head.act.slope == 0.5
    refused(
        "no gated attention or windows to anneal",
        anneal.apply,
        timm.create_model("cifar_resnet20"),
        0,
    )


def test_pyramids_take_the_place_of_the_two_convolutions(tmp_path):
    """TDRL A.4: drawn anew at any slope; with the function kept only where nothing is between the two."""
    with pytest.raises(
        iso.UserError, match=r"stages\.0\.pair: .* its ReLU is not the identity yet"
    ):
        iso.recast(small(0.5), iso.LinearToPyramid(), "stages.*.pair")
    plain = small(1.0)
    wide = iso.recast(plain, iso.LinearToPyramid(), "stages.*.pair")
    iso.verify(plain, wide, torch.randn(2, 3, 64, 64))
    drawn = iso.recast(small(0.0), iso.LinearToPyramid(init="paper"), "stages.*.pair")
    for stage in drawn.stages:
        assert isinstance(stage.pair, iso.layers.PyramidConv2d)
    assert isinstance(drawn.stem.pair, AnnealedPair)
    recast = iso.load_recipe("tdrl_vanillanet_5").model.recast.model_dump()
    result = train(tmp_path, recast=recast, monitor_every=1)
    rows = read_log(tmp_path / "monitor.jsonl")  # of pyramids in a network without attention
    for row in rows:
        assert row.keys() == {"epoch", "step", "branch_similarity"}
    assert isinstance(iso.fuse(result.model.eval()).stages[0].pair, nn.Conv2d)


@torch.no_grad()
@pytest.mark.parametrize("groups", [2, 8])
def test_a_pair_with_groups_fuses_to_one_convolution(groups):
    first = nn.Conv2d(8, 8, 3, padding=1, groups=groups)
    pair = AnnealedPair(first, nn.Conv2d(8, 16, 1), slope=1.0).eval()
    pair.norm1.running_mean.normal_()
    x = torch.randn(2, 8, 6, 6)
    fused = pair.fuse()
    assert type(fused) is nn.Conv2d
    torch.testing.assert_close(fused(x), pair(x), atol=1e-5, rtol=1e-5)


def test_a_network_that_training_annealed_gets_a_classifier_of_one_layer():
    model = small(0.0)
    iso.Anneal(steps=1).apply(model, step=1)
    thin = iso.fuse(model.eval())
    thin.reset_classifier(3)
    assert type(thin.head) is nn.Linear


@torch.no_grad()
@pytest.mark.parametrize(
    ("rule", "where"),
    [
        (iso.ConvToGPSA(), "0.second"),
        (iso.ConvToConvNorm(), ("0.first", "0.second")),
        (iso.LinearToPyramid(), "0.first"),
    ],
)
def test_a_pair_fuses_what_its_layers_have_become(rule, where):
    pair = AnnealedPair(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), slope=1.0)
    net = iso.recast(nn.Sequential(pair).eval(), rule, where)
    for parameter in net.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(net[0].fuse()(x), net(x), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(iso.fuse(net, norms=False)(x), net(x), atol=1e-4, rtol=1e-4)


def test_a_fused_classifier_is_replaced_by_a_fused_one():
    """Halfway through the annealing, where the pair stays two layers."""
    net = iso.fuse(small(0.5))
    before = [type(layer).__name__ for layer in net.head.modules()]
    net.reset_classifier(5)
    assert [type(layer).__name__ for layer in net.head.modules()] == before
    assert net(torch.randn(1, 3, 64, 64)).shape == (1, 5)
