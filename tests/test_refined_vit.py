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


def perturbed(name, **arguments):
    model = noisy(timm.create_model(name, **{**SMALL, **arguments}))
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
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
    for n, p in model.named_parameters():
        if "attn" in n:
            assert p.grad is not None
            assert p.grad.abs().max() > 0
    maps = iso.attention_maps(model, x)
    assert len(maps) == 4
    torch.testing.assert_close(copy.deepcopy(model)(x), y)
    torch.save(model.state_dict(), tmp_path / "own.pth")
    again = timm.create_model("refined_vit_s", **SMALL, **form).eval()
    iso.load_weights(again, tmp_path / "own.pth")
    torch.testing.assert_close(again(x), y)


@pytest.mark.parametrize("share", [1, 3])
def test_maps_are_shared(share):
    model = perturbed("refined_vit_b", share=share, depth=5)
    x = torch.randn(1, 3, 32, 32)
    maps = list(iso.attention_maps(model, x).values())
    for i, found in enumerate(maps):
        assert torch.equal(found, maps[i - i % (share + 1)])
        assert torch.equal(found, maps[i - 1]) == (i > 0 and i % (share + 1) > 0)
    found = iso.analysis.map_similarity(model, x)
    torch.testing.assert_close(found[0, 1], torch.tensor(1.0))


def test_a_plain_checkpoint_becomes_the_same_function(tmp_path):
    shape = {**SMALL, "patch_size": 4}
    plain = timm.create_model("vit_base_patch16_224", **shape).eval()
    torch.save(plain.state_dict(), tmp_path / "plain.pth")
    refined = timm.create_model("refined_vit_b", **shape)
    iso.load_weights(refined, tmp_path / "plain.pth")
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(refined.eval()(x), plain(x), atol=1e-5, rtol=1e-5)
    refused(
        "share=0",
        checkpoint_filter_fn,
        plain.state_dict(),
        timm.create_model("refined_vit_b", share=1, **shape),
    )
    with pytest.raises(iso.UserError):  # drawn refiners are not what the checkpoint computes
        iso.load_weights(
            timm.create_model("refined_vit_b", init="paper", **shape), tmp_path / "plain.pth"
        )


@pytest.mark.parametrize("name", ["refined_vit_s", "refined_vit_s_released"])
def test_positions_follow_the_size(name, tmp_path):
    """Fine-tuning at another size starts from the resized embedding; the same at a call, at creation and in place."""
    model = perturbed(name)
    x = torch.randn(1, 3, 64, 48)
    torch.save(
        {"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}},
        tmp_path / "small.pth",
    )
    larger = timm.create_model(name, **{**SMALL, "img_size": (64, 48)})
    iso.load_weights(larger, tmp_path / "small.pth")
    torch.testing.assert_close(larger.eval()(x), model(x))
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
    refused(said, timm.create_model, name, **{**SMALL, **arguments})


def norm_maps(x, state, name):
    mean = state[f"{name}.running_mean"]
    var = state[f"{name}.running_var"]
    return F.batch_norm(x, mean, var, state[f"{name}.weight"], state[f"{name}.bias"])


def released(state, x, heads, depth, patch):
    """The released network from its checkpoint alone, with plain functions: what METHODS.md says it computes."""
    y = x
    for i, (stride, padding) in enumerate(((2, 3), (1, 1), (1, 1)), start=1):
        y = F.conv2d(y, state[f"patch_embed.conv{i}.weight"], stride=stride, padding=padding)
        y = F.relu(norm_maps(y, state, f"patch_embed.bn{i}"))
    y = F.conv2d(
        y, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=patch // 2
    )
    y = y.flatten(2).transpose(1, 2)
    y = torch.cat([state["cls_token"].expand(len(y), -1, -1), y], 1) + state["pos_embed"]
    previous = None
    C = y.shape[-1]
    scale = (C // heads) ** -0.5

    def layer_norm(t, name):
        return F.layer_norm(t, (C,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    def linear(t, name):
        return F.linear(t, state[f"{name}.weight"], state[f"{name}.bias"])

    def by_head(t):
        return t.unflatten(-1, (heads, -1)).transpose(1, 2)

    for i in range(depth):
        name = f"blocks.{i}"
        t = layer_norm(y * 0.5, f"{name}.norm1")
        if i % 2 == 0:
            q, k, v = (by_head(part) for part in linear(t, f"{name}.attn.qkv").chunk(3, -1))
            maps = torch.softmax(q @ k.mT * scale, -1)
            previous = maps if previous is None else maps + previous * scale
            weights = previous
        else:
            v = by_head(linear(t, f"{name}.attn.qkv"))
            dla = f"{name}.attn.DLA"
            z = F.relu6(
                norm_maps(F.conv2d(previous, state[f"{dla}.conv_exp.weight"]), state, f"{dla}.bn1")
            )
            z = F.conv2d(z, state[f"{dla}.depth_sep_conv.weight"], padding=1, groups=z.shape[1])
            z = F.relu6(norm_maps(z, state, f"{dla}.bn2"))
            z = previous + norm_maps(
                F.conv2d(z, state[f"{dla}.conv_pro.weight"]), state, f"{dla}.bn3"
            )
            weights = norm_maps(z, state, f"{name}.attn.adapt_bn") * scale
        y = y + linear((weights @ v).transpose(1, 2).flatten(2), f"{name}.attn.proj") / 0.5
        t = F.gelu(linear(layer_norm(y * 0.5, f"{name}.norm2"), f"{name}.mlp.fc1"))
        y = y + state[f"{name}.mlp.scale_channel"] * linear(t, f"{name}.mlp.fc2") / 0.5
    y = layer_norm(y, "norm")
    return linear(y[:, 0], "head") + 0.5 * linear(y[:, 1:], "aux_head").amax(1)


def test_the_released_function():
    model = perturbed("refined_vit_s_released").double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(
        model(x), released(model.state_dict(), x, 3, 4, 8), rtol=0, atol=1e-12
    )
    fused = iso.fuse(model)
    assert not [n for n, m in fused.named_modules() if isinstance(m, nn.BatchNorm2d) and "DLA" in n]
    torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["refined_vit_s", "refined_vit_s_released"])
def test_other_classes_and_channels_start_from_a_checkpoint(name, tmp_path):
    """timm's pretrained path and isomorph's: all but the heads, and filters summed for one channel."""
    given = timm.create_model(name, **SMALL | dict(num_classes=1000), dense_head=True)
    torch.save(given.state_dict(), tmp_path / "given.pth")
    overlay = dict(file=str(tmp_path / "given.pth"))
    shape = {key: value for key, value in SMALL.items() if key != "num_classes"}
    made = timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay=overlay, in_chans=1, num_classes=7, **shape
    )
    torch.testing.assert_close(made.blocks[1].mlp.fc1.weight, given.blocks[1].mlp.fc1.weight)
    torch.testing.assert_close(
        made.patch_embed.conv1.weight, given.patch_embed.conv1.weight.sum(1, keepdim=True)
    )
    other = timm.create_model(name, **SMALL, dense_head=True)
    iso.load_weights(other, tmp_path / "given.pth", fresh_head=True)
    torch.testing.assert_close(other.norm.weight, given.norm.weight)
    if name.endswith("released"):
        bare = timm.create_model(name, **SMALL | dict(num_classes=1000), dense_head=False)
        iso.load_weights(bare, tmp_path / "given.pth")


def test_the_head_of_the_patches_counts():
    model = perturbed("refined_vit_s", dense_head=True)
    x = torch.randn(2, 3, 32, 32)
    logits, tokens = model(x, tokens=True)
    assert tokens.shape == (2, 16, 5)
    torch.testing.assert_close(model(x), logits + 0.5 * tokens.amax(1))
    model.reset_classifier(3)
    assert model(x, tokens=True)[1].shape == (2, 16, 3)
    refused("dense_head=True", perturbed("refined_vit_s"), x, tokens=True)


def test_a_box_swaps_patches_between_images():
    """An image made of two in pixels is the image mixed in tokens, where patches do not overlap."""
    model = perturbed("refined_vit_s", dense_head=True, conv_embed=False)
    x = torch.randn(2, 3, 32, 32)
    box = Box(1, 3, 0, 2)
    pixels = x.clone()
    pixels[:, :, 8:24, 0:16] = x.flip(0)[:, :, 8:24, 0:16]
    for a, b in zip(model(x, tokens=True, box=box), model(pixels, tokens=True), strict=True):
        torch.testing.assert_close(a, b)
