"""Wide and thin again: every network keeps its function on the way to pyramids and on the way back."""

import copy

import pytest
import timm
import torch
from timm.layers import ConvNormAct
from timm.models import levit
from timm.models.byobnet import LayerFn, MobileOneBlock, RepVggBlock
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import isomorph as iso
from isomorph.layers.pyramid.base import Pyramid
from law_rows import deviation, disturb
from refusals import refused

VIT = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)


@pytest.mark.parametrize(
    "options", [dict(group_size=1), dict(group_size=2, stride=2), dict(kernel_size=5)]
)
def test_a_block_of_pyramids_is_timms_forward_pass(options):
    """One convolution in training: output, gradients, statistics; with a frozen norm as timm computes it."""
    plain = MobileOneBlock(6, 6, **options, num_conv_branches=3, layers=LayerFn()).double()
    block = iso.recast(nn.Sequential(plain), iso.LinearToPyramid(init="paper"), "0")[0].train()
    as_timm = copy.deepcopy(block)
    as_timm.__class__ = MobileOneBlock
    x = torch.randn(4, 6, 7, 6, dtype=torch.float64, requires_grad=True)

    def output_and_gradients(net):
        y = net(x)
        return [y, *torch.autograd.grad(y.pow(3).sum(), [x, *net.parameters()])]

    for _ in range(2):
        expected = output_and_gradients(as_timm)
        torch.testing.assert_close(output_and_gradients(block), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(dict(block.named_buffers()), dict(as_timm.named_buffers()))
        block.conv_kxk[1].eval()
        as_timm.conv_kxk[1].eval()


def test_a_skip_carries_the_function_in_train_mode_too():
    plain = nn.Linear(6, 10)
    wide = iso.LinearToPyramid().build(iso.surgery.Site(plain)).train()
    x = torch.randn(20, 6) * 3 + 1
    torch.testing.assert_close(wide(x), plain(x))


@pytest.mark.parametrize("init", ["same-function", "paper"])
@pytest.mark.parametrize("layout", ["P-W2S", "P-W3", "naive-W2"])
def test_every_weight_learns(layout, init):
    """No two branches are alike, and after two steps nothing that can learn is where it was born."""
    site = iso.surgery.Site(nn.Linear(6, 10))
    layer = iso.LinearToPyramid(layout, init).build(site).train()
    initial = copy.deepcopy(layer.state_dict())
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        y = layer(torch.randn(50, 6))
        loss = (y * torch.randn(50, 10)).sum()
        loss.backward()
        optimizer.step()
    silent = {name for name, p in layer.named_parameters() if torch.equal(p, initial[name])}
    before_norm = set()  # BatchNorm takes a bias before it out again
    for i, branch in enumerate(layer.branches):
        for j in range(len(branch)):
            if any(isinstance(m, _BatchNorm) for m in branch[j + 1 :]):
                before_norm.add(f"branches.{i}.{j}.bias")
    assert silent <= before_norm


def test_queries_and_keys_are_rectified_by_batchnorm():
    vit = timm.create_model("vit_tiny_patch16_224", **VIT)
    wide = iso.recast(vit, iso.LinearToPyramid(), ["*.qkv", "*.mlp.fc1"])
    block = wide.blocks[0]
    q, k, v = block.attn.qkv.pyramids
    assert q.rectify == "batchnorm"
    assert k.rectify == "batchnorm"
    assert v.rectify == "rescale"
    assert block.mlp.fc1.rectify == "rescale"

    separate = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("q_proj", "k_proj", "v_proj")})
    wide = iso.recast(separate, iso.LinearToPyramid(), "*")
    assert [layer.rectify for layer in wide.values()] == ["batchnorm", "batchnorm", "rescale"]
    wide = iso.recast(separate, iso.LinearToPyramid(rectify="none"), "*")
    for layer in wide.values():
        assert layer.rectify == "none"


def by_head():
    """Deals its outputs to heads first, as TinyViT does."""
    module = nn.ModuleDict({"qkv": nn.Linear(4, 12)})
    module.key_dim = 2
    return module


def test_any_joint_projection_is_taken_as_one_pyramid():
    convolution = nn.ModuleDict({"qkv": nn.Conv2d(4, 12, 1)})
    without_three_equal_parts = nn.ModuleDict({"qkv": nn.Linear(4, 10)})
    for model in (by_head(), convolution, without_three_equal_parts):
        for rectify, found in (("paper", "batchnorm"), ("rescale", "rescale")):
            wide = iso.recast(model, iso.LinearToPyramid(rectify=rectify), "qkv")
            assert wide.get_submodule("qkv").rectify == found


def test_recalibration_takes_the_statistics_of_the_data():
    wide = timm.create_model("tdrl_vit_ti", **VIT).eval()
    batches = (torch.randn(48, 3, 32, 32) + 2).split(16)
    before = copy.deepcopy(wide.state_dict())
    new = iso.recalibrate(wide, [(x, None) for x in batches], keep_function=False)
    # the input is untouched
    after = wide.state_dict()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key])
    assert not new.training
    qkv = new.blocks[0].attn.qkv
    linear, norm = qkv.pyramids[0].branches[0][:2]
    assert norm.momentum == 0.1
    assert norm.num_batches_tracked == 3

    means = []
    variances = []

    def measure(_, args):
        tokens = linear(args[0]).flatten(0, 1)
        means.append(tokens.mean(0))
        variances.append(tokens.var(0))

    qkv.register_forward_pre_hook(measure)
    for x in batches:
        new(x)
    torch.testing.assert_close(norm.running_mean, torch.stack(means).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack(variances).mean(0))


def in_train_mode(model):
    return copy.deepcopy(model).train()


@pytest.mark.parametrize("depth", [2, 8])
def test_recalibration_can_keep_the_function(depth):
    """In one pass, however deep: train mode then computes what eval mode does."""
    plain = disturb(timm.create_model("vit_tiny_patch16_224", **VIT | dict(depth=depth))).float()
    for block in plain.blocks:
        block.attn.qkv.weight.data *= 10  # attention that is far from uniform
    wide = iso.recast(plain, iso.LinearToPyramid(), ["blocks.*.attn.qkv", "blocks.*.mlp.fc?"])
    images = torch.randn(64, 3, 32, 32)
    near = iso.recalibrate(wide, [images])
    iso.verify(plain, near, images)
    expected = plain(images)

    def error_in_train_mode(model):
        return (in_train_mode(model)(images) - expected).abs().max()

    assert error_in_train_mode(near) < 0.1 * error_in_train_mode(wide)


def test_recalibration_keeps_convolutions_and_plain_norms_too():
    first = iso.layers.AnnealedPair(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 16, 1), slope=1.0)
    second = iso.layers.AnnealedPair(nn.Conv2d(16, 16, 1), nn.Conv2d(16, 12, 1), slope=1.0)
    layers = [nn.Conv2d(3, 8, 4, 4), nn.ReLU(), first, nn.MaxPool2d(2), nn.ReLU(), second]
    plain = disturb(nn.Sequential(*layers)).float()
    wide = iso.recast(plain, iso.LinearToPyramid("P-W2"), "2")
    images = torch.randn(64, 3, 32, 32)
    expected = wide(images)
    near = iso.recalibrate(wide, [images, images])
    torch.testing.assert_close(near(images), expected, rtol=1e-4, atol=1e-4)
    y = in_train_mode(near)(images)
    torch.testing.assert_close(y, near(images), rtol=0.05, atol=0.05)
    y = in_train_mode(wide)(images)
    assert (y - expected).abs().max() > 0.3


@torch.no_grad()
def test_recalibrated_variances_are_unbiased():
    """As those of torch's BatchNorm: of the inputs of the norms of a branch, in eval mode."""
    layer = iso.layers.PyramidLinear(5, 4, "P-W2S", "batchnorm").double().eval()
    x = torch.randn(6, 5, dtype=torch.float64)
    seen = []
    near = iso.recalibrate(nn.Sequential(layer), [x])[0]
    for norm in near.norms:
        norm.register_forward_pre_hook(lambda norm, args: seen.append((norm, args[0].var(0))))
    near.run_branches(x)
    assert len(seen) == len(near.norms)
    for norm, variance in seen:
        torch.testing.assert_close(norm.running_var, variance)


ONE_VALUE = nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (1, 8)), nn.BatchNorm1d(8))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(2, 2), "no BatchNorm"),
        (nn.BatchNorm1d(2, affine=False), "without weights"),
        (ONE_VALUE, "more than 1 value per channel"),
    ],
)
def test_recalibration_says_what_is_missing(model, said):
    refused(said, iso.recalibrate, model, [torch.randn(4, 2)])


@torch.no_grad()
def test_a_layer_of_several_units():
    first = ConvNormAct(4, 4, 1)
    second = ConvNormAct(4, 4, 1)
    second.conv = first.conv
    plain = nn.Sequential(first, second).eval()
    wide = disturb(iso.recast(plain, iso.LinearToPyramid(), "0.conv"))
    thin = iso.fuse(wide, norms=False)
    x = torch.randn(2, 4, 5, 5).double()
    assert deviation(thin(x), wide(x)) < 1e-5
    assert thin[0].conv is thin[1].conv
    assert not isinstance(thin[0].conv, Pyramid)

    first = levit.LinearNorm(8, 8)
    second = levit.LinearNorm(8, 8)
    second.linear = first.linear
    plain = nn.Sequential(first, second).eval()
    wide = disturb(iso.recast(plain, iso.LinearToPyramid(), "0.linear"))
    thin = iso.fuse(wide, norms=False)
    x = torch.randn(2, 3, 8).double()
    assert deviation(thin(x), wide(x)) < 1e-5


def test_units_keep_train_mode():
    plain = nn.Sequential(ConvNormAct(4, 4, 1))
    wide = iso.recast(plain, iso.LinearToPyramid(), "0.conv").train()
    edit = iso.surgery.Edit(iso.surgery.Fuse(), ("0.conv",))
    thin = iso.surgery.apply_edit(wide, edit)
    for module in thin.modules():
        assert module.training


@torch.no_grad()
def test_attention_inside_a_unit_stays():
    net = disturb(nn.Sequential(levit.ConvNorm(4, 4, 3, 1, 1))).float()
    attentive = iso.recast(net, iso.ConvToGPSA(content="none"), "0.linear")
    x = torch.randn(1, 4, 6, 6)
    fused = iso.fuse(attentive, x)
    assert deviation(fused(x), net(x)) < 1e-4

    block = disturb(nn.Sequential(RepVggBlock(4, 4, 3, layers=LayerFn()))).float()
    attentive = iso.recast(block, iso.ConvToGPSA(content="none"), "0.conv_kxk.conv")
    fused = iso.fuse(attentive, x)
    assert deviation(fused(x), block(x)) < 1e-4
    assert block[0].reparam_conv is None


def test_layers_inside_pyramids_and_attention_are_not_selected():
    cnn = timm.create_model("cifar_resnet20").eval()
    wide = iso.recast(cnn, iso.LinearToPyramid(), "layer3.2.conv2")
    assert iso.targets(wide, iso.ConvToGPSA(), "layer3.2.*") == ["layer3.2.conv1"]
    rule = iso.LinearToPyramid()
    refused("matches no module", iso.recast, wide, rule, "layer3.2.conv2.branches.*")
    attentive = iso.recast(cnn, iso.ConvToGPSA(), "layer3.2.conv2")
    refused("GPSA2d reads its weight without calling it", iso.recast, attentive, rule, "*.value")
