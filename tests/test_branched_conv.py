"""MobileOne's blocks with all branches as one convolution: equal to timm's forward pass in training, with gradients."""

import copy

import pytest
import timm
import torch
from timm.models.byobnet import ByoBlockCfg, LayerFn, MobileOneBlock
from timm.utils.model import reparameterize_model
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import isomorph as iso
from isomorph.layers.pyramid import moments
from isomorph.surgery.mobileone import CombinedBlock, shared_window

BLOCKS = ["stem", "stages.?.?", "stages.?.??"]
CASES = {
    "depthwise": (dict(in_chs=6, out_chs=6, group_size=1), False),
    "strided": (dict(in_chs=6, out_chs=6, group_size=1, stride=2), False),
    "stem": (dict(in_chs=3, out_chs=8, stride=2), False),
    "grouped": (dict(in_chs=6, out_chs=6, group_size=2), False),
    "own branches": (dict(in_chs=6, out_chs=6, group_size=1), True),
    "own branches, dense": (dict(in_chs=6, out_chs=6), True),
    "own branches, 1x1": (dict(in_chs=6, out_chs=6, kernel_size=1), True),
}


def block_of(name):
    """A block in train mode, with pyramids or with its own convolutions, and weights other than at initialisation."""
    kwargs, own = CASES[name]
    plain = MobileOneBlock(**kwargs, num_conv_branches=3, layers=LayerFn()).double().eval()
    rule = iso.BranchesToConv() if own else iso.LinearToPyramid(init="paper")
    block = iso.recast(nn.Sequential(plain), rule, "0")[0]
    assert isinstance(block, CombinedBlock)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return block.train()


def by_branches(block):
    """A copy that runs timm's forward pass."""
    copied = copy.deepcopy(block)
    copied.__class__ = MobileOneBlock
    return copied


@pytest.mark.parametrize("name", CASES)
def test_equals_the_branches_with_gradients_and_statistics(name):
    block = block_of(name)
    reference = by_branches(block)
    x = torch.randn(4, CASES[name][0]["in_chs"], 7, 6, dtype=torch.float64) + 1
    factor, results = None, []
    for module in (block, reference):
        own = x.clone().requires_grad_()
        y = module(own)
        factor = torch.randn_like(y) if factor is None else factor
        gradients = torch.autograd.grad((y * factor).sum(), [own, *module.parameters()])
        results.append((y, *gradients))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)
    for (key, ours), theirs in zip(block.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["depthwise", "own branches, 1x1"])
def test_frozen_norms_and_eval_mode(name):
    block = block_of(name)
    block.conv_kxk[1].eval()
    reference, x = by_branches(block), torch.randn(4, 6, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(block(x), reference(x), rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(block.eval()(x), reference.eval()(x), rtol=1e-12, atol=1e-12)


def test_the_input_is_measured_once(monkeypatch):
    seen, measure = [], moments.measure_patches
    monkeypatch.setattr(moments, "measure_patches", lambda *a: seen.append(a) or measure(*a))
    block_of("depthwise")(torch.randn(4, 6, 5, 5, dtype=torch.float64))
    assert len(seen) == 1


def test_half_precision_and_second_derivatives():
    block, x = block_of("depthwise").float(), torch.randn(4, 6, 5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = block(x)
    assert y.dtype == torch.bfloat16
    assert ((y - by_branches(block)(x)).abs().max() / y.abs().max()).item() < 0.03
    block = iso.BranchesToConv().build(MobileOneBlock(2, 2, group_size=1, layers=LayerFn())).double()
    block.act = nn.Identity()
    x = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: block(t).square(), x)


def test_a_network_trains_as_timms_and_merges():
    branches = dict(num_conv_branches=4)
    depthwise = ByoBlockCfg(type="one", d=2, c=32, gs=1, s=2, block_kwargs=branches)
    pointwise = ByoBlockCfg(type="one", d=1, c=48, gs=0, block_kwargs=dict(kernel_size=1, **branches))
    plain = timm.create_model("mobileone_s0", num_classes=4, blocks=((depthwise,), (pointwise,)), stem_chs=32).double()
    fast = iso.recast(plain, iso.BranchesToConv(), BLOCKS[:2])
    images = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    losses = []
    for network in (plain, fast):
        optimizer, found = torch.optim.SGD(network.train().parameters(), 1e-3), []
        for _ in range(3):
            loss = nn.functional.cross_entropy(network(images), torch.arange(4))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
    plain.load_state_dict(fast.eval().state_dict())  # the same names
    merged = reparameterize_model(fast)
    assert not any(isinstance(m, _BatchNorm) for m in merged.modules())
    torch.testing.assert_close(merged(images), plain.eval()(images))


def edited(block, change):
    """A block with one branch of another kind."""
    conv = block.conv_kxk[1].conv
    if change == "dilated":
        conv.dilation, conv.padding = (2, 2), (2, 2)
    elif change == "sequence":
        block.conv_kxk[1] = nn.Sequential(conv, nn.BatchNorm2d(6, dtype=torch.float64))
    elif change == "gated":
        block.conv_kxk[1].conv = iso.ConvToGPSA().build(conv)
    elif change == "pyramid":
        block.conv_scale.conv = iso.LinearToPyramid().build(block.conv_scale.conv)
    return block.train()


@pytest.mark.parametrize("change", ["dilated", "sequence", "gated", "pyramid"])
def test_branches_that_read_other_patches_run_as_in_timm(change):
    torch.manual_seed(0)
    plain = MobileOneBlock(6, 6, group_size=1, num_conv_branches=3, layers=LayerFn()).double()
    x = torch.randn(4, 6, 7, 6, dtype=torch.float64)
    combined = edited(iso.BranchesToConv().build(copy.deepcopy(plain)), change)
    torch.testing.assert_close(combined(x), by_branches(combined)(x))
    with pytest.raises(iso.UserError, match="do not read the same patches"):
        iso.BranchesToConv().build(edited(plain, change))


@pytest.mark.parametrize("kernel_size", [2, 5, 7])
def test_other_kernels(kernel_size):
    block = MobileOneBlock(6, 6, kernel_size, 2, group_size=1, layers=LayerFn()).double()
    wide = iso.LinearToPyramid(init="paper").build(block.eval()).train()
    assert isinstance(wide, CombinedBlock)
    x = torch.randn(4, 6, 9, 8, dtype=torch.float64)
    if kernel_size % 2:
        torch.testing.assert_close(wide(x), by_branches(wide)(x), rtol=1e-9, atol=1e-10)
    else:
        assert shared_window(wide) is None


def test_hooks_on_branches_are_not_lost():
    block = MobileOneBlock(6, 6, group_size=1, layers=LayerFn())
    block.conv_kxk[0].register_forward_hook(lambda *_: None)
    for rule in (iso.BranchesToConv(), iso.LinearToPyramid()):
        with pytest.raises(iso.UserError, match=r"its conv_kxk.0 has .*hook.*which training would skip"):
            rule.build(block)


def test_compile_and_checkpointing():
    block = iso.BranchesToConv().build(MobileOneBlock(2, 2, group_size=1, layers=LayerFn())).double().train()
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    expected = copy.deepcopy(block)(x)
    compiled = torch.compile(copy.deepcopy(block), backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled, expected)
    again = copy.deepcopy(block)
    y = torch.utils.checkpoint.checkpoint(again, x, use_reentrant=False)
    found, wanted = (torch.autograd.grad(t.square().sum(), x, retain_graph=True)[0] for t in (y, expected))
    torch.testing.assert_close(found, wanted)
    assert again.identity.num_batches_tracked == 1
