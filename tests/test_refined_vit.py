"""Refined-ViT, as in the paper and as released: sizes, functions, checkpoints, shared maps, patches with labels."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import nn

import isomorph as iso
from isomorph.layers import ExpandedAttention, LocalAttention, RefinedAttention, SpatialAttention
from isomorph.layers.refined.attention import ReusedAttention
from isomorph.models.blockwise import Box
from isomorph.models.refined_vit import checkpoint_filter_fn
from law_rows import noisy
from refusals import refused

SMALL = dict(img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=3, num_classes=5)


def small(name, **arguments):
    return timm.create_model(name, **SMALL | arguments)


def perturbed(name, **arguments):
    model = noisy(small(name, **arguments))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.eval()


@pytest.mark.parametrize(
    ("form", "first", "second"),
    [
        (dict(share=0), RefinedAttention, RefinedAttention),
        (dict(share=0, ratio=0), LocalAttention, LocalAttention),
        (dict(share=1, ratio=0), RefinedAttention, ReusedAttention),
        (dict(share=0, ratio=0, kernel=0), Attention, Attention),
        (dict(share=0, reduce=False), ExpandedAttention, ExpandedAttention),
        (dict(share=0, span="spatial"), SpatialAttention, SpatialAttention),
        (
            dict(share=1, span="spatial", class_token=False, global_pool="avg"),
            SpatialAttention,
            ReusedAttention,
        ),
        (dict(share=1, recompute=True, span="row+column"), RefinedAttention, ReusedAttention),
    ],
)
def test_forms(form, first, second, tmp_path):
    model = perturbed("refined_vit_s", **form)
    assert [type(block.attn) for block in model.blocks[:2]] == [first, second]
    x = torch.randn(2, 3, 24, 40)
    y = model(x)
    y.square().sum().backward()
    for name, parameter in model.named_parameters():
        if "attn" in name:
            assert parameter.grad is not None
            assert parameter.grad.abs().max() > 0
    assert len(iso.attention_maps(model, x)) == 4
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(x), y)

    path = tmp_path / "own.pth"
    torch.save(model.state_dict(), path)
    again = small("refined_vit_s", **form).eval()
    iso.load_weights(again, path)
    torch.testing.assert_close(again(x), y)


@pytest.mark.parametrize("share", [1, 3])
def test_maps_are_shared(share):
    model = perturbed("refined_vit_b", share=share, depth=5)
    x = torch.randn(1, 3, 32, 32)
    maps = list(iso.attention_maps(model, x).values())
    for i, found in enumerate(maps):
        place_among_sharers = i % (share + 1)
        first = maps[i - place_among_sharers]
        assert torch.equal(found, first)
        assert torch.equal(found, maps[i - 1]) == (place_among_sharers > 0)
    similarity = iso.analysis.map_similarity(model, x)
    torch.testing.assert_close(similarity[0, 1], torch.tensor(1.0))


def test_a_plain_checkpoint_becomes_the_same_function(tmp_path):
    path = tmp_path / "plain.pth"
    plain = small("vit_base_patch16_224", patch_size=4).eval()
    torch.save(plain.state_dict(), path)
    refined = small("refined_vit_b", patch_size=4).eval()
    iso.load_weights(refined, path)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(refined(x), plain(x), atol=1e-5, rtol=1e-5)

    sharing = small("refined_vit_b", patch_size=4, share=1)
    refused("share=0", checkpoint_filter_fn, plain.state_dict(), sharing)
    drawn = small("refined_vit_b", patch_size=4, init="paper")
    with pytest.raises(iso.UserError):  # drawn refiners are not what the checkpoint computes
        iso.load_weights(drawn, path)


@pytest.mark.parametrize("name", ["refined_vit_s", "refined_vit_s_released"])
def test_positions_follow_the_size(name, tmp_path):
    """Fine-tuning at another size starts from the resized embedding; the same at a call, at creation and in place."""
    path = tmp_path / "small.pth"
    model = perturbed(name)
    state = {f"module.{key}": tensor for key, tensor in model.state_dict().items()}
    torch.save({"state_dict": state}, path)
    larger = small(name, img_size=(64, 48)).eval()
    iso.load_weights(larger, path)
    x = torch.randn(1, 3, 64, 48)
    torch.testing.assert_close(larger(x), model(x))
    model.set_input_size((64, 48))
    torch.testing.assert_close(larger(x), model(x))
    refused("create a new model with it", model.set_input_size, patch_size=4)
    refused("not a multiple of the 8 x 8 patch", model, torch.randn(1, 3, 33, 32))
    refused("even", timm.create_model, name, patch_size=7, img_size=28)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("refined_vit_s", dict(share=1, reduce=False), "share needs reduce=True"),
        ("refined_vit_s", dict(patch_drop_rate=0.5), "patch_drop_rate"),
        ("refined_vit_s", dict(share=1, scale_attn_norm=True), "share=0"),
        ("refined_vit_s_released", dict(qk_norm=True), "qk_norm"),
    ],
)
def test_impossible_networks(name, arguments, said):
    refused(said, small, name, **arguments)


def released(state, x, heads, depth, patch):
    """The released network from its checkpoint alone, with plain functions: what METHODS.md says it computes."""
    C = state["cls_token"].shape[-1]
    scale = (C // heads) ** -0.5

    def batch_norm(t, name):
        mean = state[f"{name}.running_mean"]
        var = state[f"{name}.running_var"]
        return F.batch_norm(t, mean, var, state[f"{name}.weight"], state[f"{name}.bias"])

    def layer_norm(t, name):
        return F.layer_norm(t, (C,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    def conv(t, name, **options):
        return F.conv2d(t, state[f"{name}.weight"], state.get(f"{name}.bias"), **options)

    def linear(t, name):
        return F.linear(t, state[f"{name}.weight"], state[f"{name}.bias"])

    def by_head(t):
        return t.unflatten(-1, (heads, -1)).transpose(1, 2)

    def refined(maps, name):
        """The maps of the block before, refined: a residual of 1x1, depthwise 3x3 and 1x1 convolutions."""
        z = F.relu6(batch_norm(conv(maps, f"{name}.DLA.conv_exp"), f"{name}.DLA.bn1"))
        z = conv(z, f"{name}.DLA.depth_sep_conv", padding=1, groups=z.shape[1])
        z = F.relu6(batch_norm(z, f"{name}.DLA.bn2"))
        z = batch_norm(conv(z, f"{name}.DLA.conv_pro"), f"{name}.DLA.bn3")
        return batch_norm(maps + z, f"{name}.adapt_bn") * scale

    y = x
    for i, (stride, padding) in enumerate(((2, 3), (1, 1), (1, 1)), start=1):
        y = conv(y, f"patch_embed.conv{i}", stride=stride, padding=padding)
        y = F.relu(batch_norm(y, f"patch_embed.bn{i}"))
    y = conv(y, "patch_embed.proj", stride=patch // 2)
    y = y.flatten(2).transpose(1, 2)
    class_token = state["cls_token"].expand(len(y), -1, -1)
    y = torch.cat([class_token, y], 1) + state["pos_embed"]

    previous = None
    for i in range(depth):
        name = f"blocks.{i}"
        t = linear(layer_norm(y * 0.5, f"{name}.norm1"), f"{name}.attn.qkv")
        if i % 2 == 0:
            q, k, v = (by_head(part) for part in t.chunk(3, -1))
            maps = torch.softmax(q @ k.mT * scale, -1)
            if previous is not None:
                maps = maps + previous * scale
            previous = weights = maps
        else:
            v = by_head(t)
            weights = refined(previous, f"{name}.attn")
        attended = (weights @ v).transpose(1, 2).flatten(2)
        y = y + linear(attended, f"{name}.attn.proj") / 0.5
        t = linear(layer_norm(y * 0.5, f"{name}.norm2"), f"{name}.mlp.fc1")
        t = linear(F.gelu(t), f"{name}.mlp.fc2")
        y = y + state[f"{name}.mlp.scale_channel"] * t / 0.5

    y = layer_norm(y, "norm")
    of_patches = linear(y[:, 1:], "aux_head")
    return linear(y[:, 0], "head") + 0.5 * of_patches.amax(1)


def test_the_released_function():
    model = perturbed("refined_vit_s_released").double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    y = model(x)
    expected = released(model.state_dict(), x, heads=3, depth=4, patch=8)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)

    fused = iso.fuse(model)
    for name, module in fused.named_modules():
        if "DLA" in name:
            assert not isinstance(module, nn.BatchNorm2d)
    torch.testing.assert_close(fused(x), y, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["refined_vit_s", "refined_vit_s_released"])
def test_other_classes_and_channels_start_from_a_checkpoint(name, tmp_path):
    """timm's pretrained path and isomorph's: all but the heads, and filters summed for one channel."""
    path = tmp_path / "given.pth"
    given = small(name, num_classes=1000, dense_head=True)
    torch.save(given.state_dict(), path)
    overlay = dict(file=str(path))
    made = small(name, pretrained=True, pretrained_cfg_overlay=overlay, in_chans=1, num_classes=7)
    torch.testing.assert_close(made.blocks[1].mlp.fc1.weight, given.blocks[1].mlp.fc1.weight)
    summed = given.patch_embed.conv1.weight.sum(1, keepdim=True)
    torch.testing.assert_close(made.patch_embed.conv1.weight, summed)

    other = small(name, dense_head=True)
    iso.load_weights(other, path, fresh_head=True)
    torch.testing.assert_close(other.norm.weight, given.norm.weight)
    if name.endswith("released"):
        bare = small(name, num_classes=1000, dense_head=False)
        iso.load_weights(bare, path)


def test_the_head_of_the_patches_counts():
    model = perturbed("refined_vit_s", dense_head=True)
    x = torch.randn(2, 3, 32, 32)
    logits, tokens = model(x, tokens=True)
    assert tokens.shape == (2, 16, 5)
    torch.testing.assert_close(model(x), logits + 0.5 * tokens.amax(1))
    model.reset_classifier(3)
    _, tokens = model(x, tokens=True)
    assert tokens.shape == (2, 16, 3)
    refused("dense_head=True", perturbed("refined_vit_s"), x, tokens=True)


def test_a_box_swaps_patches_between_images():
    """An image made of two in pixels is the image mixed in tokens, where patches do not overlap."""
    model = perturbed("refined_vit_s", dense_head=True, conv_embed=False)
    x = torch.randn(2, 3, 32, 32)
    box = Box(1, 3, 0, 2)
    pixels = x.clone()
    pixels[:, :, 8:24, 0:16] = x.flip(0)[:, :, 8:24, 0:16]
    mixed_in_tokens = model(x, tokens=True, box=box)
    torch.testing.assert_close(mixed_in_tokens, model(pixels, tokens=True))
