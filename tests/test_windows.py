"""Attention in windows: the mask against a slow formula, the windows against the mask, in float64; what it refuses."""

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from timm import models
from timm.layers import Attention
from torch import nn

import isomorph as iso
from attention_layers import NETWORKS
from isomorph.lab.training.recipe.recipe import validate
from isomorph.layers.window import (
    TokenWindows,
    attend_in_padded_windows,
    attend_in_windows,
    attend_with_share,
)
from isomorph.surgery.rules.window import _Attend as Attend
from law_rows import Alone, deviation, disturb
from refusals import refused


def doubles(*shape):
    return torch.randn(shape, dtype=torch.float64)


def slow(q, k, v, bias, windows, share):
    """Attention with m exp(score) for exp(score), pair by pair."""
    (_, W), side, prefix = windows

    def window_of(token):
        row, column = divmod(token - prefix, W)
        return row // side, column // side

    scale = q.shape[3] ** -0.5
    out = torch.zeros_like(v)
    for b, h, i in np.ndindex(q.shape[:3]):
        weights = []
        for j in range(k.shape[2]):
            together = min(i, j) < prefix or window_of(i) == window_of(j)
            m = 1.0 if together else share
            score = q[b, h, i] @ k[b, h, j] * scale
            weights.append(m * math.exp(score + bias[h, i, j]))
        out[b, h, i] = torch.tensor(weights, dtype=q.dtype) @ v[b, h] / sum(weights)
    return out


def test_padded_windows_are_no_more_than_the_grid_needs():
    """5 x 4 positions in windows of 3 x 3: two by two."""
    tokens = torch.randn(1, 2, 20, 3)
    shapes = []

    def attend(q, k, v, mask):
        shapes.append(tuple(q.shape))
        return F.scaled_dot_product_attention(q, k, v, mask)

    attend_in_padded_windows(attend, tokens, tokens, tokens, TokenWindows((5, 4), 3, 0))
    assert shapes == [(4, 2, 9, 3)]


@pytest.mark.parametrize(
    "windows", [TokenWindows((5, 4), 2, 2), TokenWindows((3, 5), 3, 0), TokenWindows((2, 5), 3, 1)]
)
@pytest.mark.parametrize("share", [1.0, 0.3, 0.0])
def test_the_mask_and_the_windows_equal_the_slow_formula(windows, share):
    (H, W), side, prefix = windows
    N = prefix + H * W
    attend = F.scaled_dot_product_attention
    q, k, v = doubles(3, 2, 2, N, 3)
    bias = doubles(2, N, N)

    def with_share(mask):
        return attend_with_share(attend, q, k, v, mask, windows, torch.tensor(share))

    def in_windows(mask):
        return attend_in_windows(attend, q, k, v, mask, windows)

    expected = slow(q, k, v, bias, windows, share)
    assert deviation(with_share(bias), expected) < 1e-6
    if share == 0 or side >= max(H, W):
        assert deviation(in_windows(bias), expected) < 1e-12
        padded = attend_in_padded_windows(attend, q, k, v, windows)
        assert deviation(padded, in_windows(None)) < 1e-12

    allowed = torch.rand(2, 1, 1, N) < 0.7  # real tokens, of which every window has one
    allowed[..., :prefix] = True
    allowed[..., prefix::2] = True
    hidden = torch.zeros(2, 1, 1, N, dtype=torch.float64).masked_fill(~allowed, -1e3)
    for mask in (allowed, allowed.expand(-1, -1, N, -1)):
        assert deviation(with_share(mask), with_share(hidden)) < 1e-12
        assert deviation(in_windows(mask), in_windows(hidden.expand(-1, -1, N, -1))) < 1e-12


class Named(NamedTuple):
    """A model of timm, the size of its images, and a window. `fixed`: it is created for that size."""

    name: str
    size: tuple[int, int]
    window: int
    fixed: bool = True
    options: dict[str, str] = {}


MODELS = {
    "DINOv3": Named("vit_small_patch16_dinov3", (80, 208), 5, fixed=False),
    "DINOv3, divided": Named("vit_small_patch16_dinov3", (64, 64), 2, fixed=False),
    "EVA-02": Named("eva02_tiny_patch14_224", (98, 70), 3),
    "relpos": Named("vit_relpos_small_patch16_224", (112, 144), 4),
    "relpos, class token": Named("vit_relpos_base_patch16_cls_224", (112, 80), 3),
    "relpos, table": Named(
        "vit_relpos_small_patch16_224", (80, 112), 3, options=dict(rel_pos_type="bias")
    ),
    "relpos, shared": Named("vit_srelpos_small_patch16_224", (112, 80), 3),
    "DINOv2": Named("vit_small_patch14_reg4_dinov2", (98, 126), 4),
    "BEiT": Named("beit_base_patch16_224", (112, 80), 3),
}


def build(name):
    row = MODELS[name]
    options = dict(depth=2, embed_dim=48, num_heads=4, num_classes=3) | row.options
    if row.fixed:
        options["img_size"] = row.size
    torch.manual_seed(0)
    model = disturb(timm.create_model(row.name, **options))
    return model, doubles(2, 3, *row.size), iso.AttentionToWindow(row.window)


def local(new):
    """The model with windows alone, by the mask."""
    iso.Anneal(2).apply(new, 2)
    return new


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_global_at_first_and_the_windows_equal_the_mask(name, tmp_path):
    model, x, rule = build(name)
    new = iso.recast(model, rule)
    (edit,) = iso.edits(new)
    assert len(edit.names) == 2
    everywhere = model(x)
    assert torch.equal(new(x), everywhere)

    iso.Anneal(2).apply(new, 1)
    average = torch.optim.swa_utils.AveragedModel(new, use_buffers=True)
    half = new(x)
    masked = local(new)(x)
    average.update_parameters(new)
    average.module.load_state_dict(new.state_dict())
    assert torch.equal(average(x), masked)
    assert deviation(half, everywhere) > 1e-6
    assert deviation(masked, everywhere) > 1e-6
    assert deviation(half, masked) > 1e-6

    pruned = iso.prune(new)
    assert deviation(pruned(x), masked) < 1e-12
    if getattr(new.blocks[0].attn, "rel_pos", None):
        refused("look at the model before iso.prune", iso.attention_maps, pruned, x)
    else:
        maps = iso.attention_maps(new, x)
        of_pruned = iso.attention_maps(pruned, x)
        for key, value in maps.items():
            assert torch.equal(of_pruned[key], value)
        for layer in pruned.blocks:
            assert layer.attn.pruned
    path = tmp_path / "model.safetensors"
    for saved in (new, pruned):
        iso.save(saved, path)
        loaded = iso.load(path, base=model).eval()
        assert torch.equal(loaded(x), saved(x))
        assert iso.edits(loaded) == iso.edits(saved)


@torch.no_grad()
def test_registers_grids_and_blocks_of_every_kind():
    """RoPE, sizes that change, blocks that stay global, other libraries, and the way back."""
    model, _, rule = build("DINOv3")
    new = local(iso.recast(model, rule, "blocks.1.attn"))
    pruned = iso.prune(new)
    wide = doubles(1, 3, 80, 96)
    tall = doubles(1, 3, 96, 64)
    for x in (wide, tall, wide, tall):
        assert deviation(pruned(x), new(x)) < 1e-12
    assert iso.verify(new, pruned, wide).atol == 1e-5
    refused("its share is 0", iso.revert, new)
    iso.Anneal(2).apply(new, 0)
    back = iso.revert(new)
    assert repr(back) == repr(model)
    assert iso.edits(back) == ()
    assert list(back.state_dict()) == list(model.state_dict())
    for name in (
        "torchvision's ViT",
        "transformers' DINOv3",
        "transformers' DINOv2 with registers",
    ):
        plain = disturb(Alone(NETWORKS[name]()))
        new = iso.recast(plain, iso.AttentionToWindow(3))
        x = doubles(2, 3, 32, 32)
        expected = plain(x)
        assert deviation(new(x), expected) < 1e-12
        pruned = iso.prune(local(new))
        assert deviation(pruned(x), new(x)) < 1e-12
        assert deviation(new(x), expected) > 1e-6


@pytest.mark.parametrize("name", ["coatnet_rmlp_0_rw_224", "maxvit_pico_rw_256"])
@torch.no_grad()
def test_windows_of_hybrids_with_a_relative_bias(name):
    model = disturb(timm.create_model(name, img_size=96, depths=(1, 1, 1, 1), num_classes=3), 0.1)
    x = doubles(1, 3, 96, 96)
    new = local(iso.recast(model, iso.AttentionToWindow(2), "stages.2.*"))
    pruned = iso.prune(new)
    assert deviation(pruned(x), new(x)) < 1e-12
    assert deviation(new(x), model(x)) > 1e-12


def test_what_cannot_have_windows_is_rejected():
    """Keys of fewer tokens, and keys of other tokens, as the model calls a layer; not causal attention."""
    said = "its keys are not those of its queries"
    rule = iso.AttentionToWindow(2)
    pvt = timm.create_model("pvt_v2_b0").eval()
    refused(said, iso.recast, pvt, rule, "stages.0.*.attn")
    options = dict(img_size=64, depth=1, embed_dim=24, num_heads=2)
    siglip = timm.create_model("vit_base_patch16_siglip_224", **options).eval()
    refused(said, iso.recast, siglip, rule, "attn_pool")


def test_anneals_in_training_compiles_and_exports():
    model, x, rule = build("DINOv3, divided")
    new = iso.recast(model, rule)
    weight = new.blocks[0].attn.qkv.weight
    for step in range(3):
        iso.Anneal(2).apply(new, step)
        loss = new(x).square().sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        assert gradient.isfinite().all()
    with torch.no_grad():
        pruned = iso.prune(new).requires_grad_(False)
        for plain in (new, pruned):
            torch._dynamo.reset()
            compiled = torch.compile(plain, fullgraph=True, backend="eager")
            assert deviation(compiled(x), plain(x)) < 1e-12
        any_batch = {0: torch.export.Dim("batch")}
        program = torch.export.export(pruned, (x,), dynamic_shapes=[any_batch]).module()
        images = doubles(3, 3, 64, 64)
        assert deviation(program(images), pruned(images)) < 1e-12


def test_windows_alone_are_exported_at_open_sizes():
    options = dict(
        depth=2, embed_dim=24, num_heads=2, num_classes=3, img_size=64, dynamic_img_size=True
    )
    model = disturb(timm.create_model("vit_tiny_patch16_224", **options)).float()
    new = iso.recast(model, iso.AttentionToWindow(3))
    pruned = iso.prune(local(new))
    rows = torch.export.Dim("rows", min=2)
    columns = torch.export.Dim("columns", min=2)
    sides = {2: 16 * rows, 3: 16 * columns}
    x = torch.randn(2, 3, 96, 128)
    program = torch.export.export(pruned, (x,), dynamic_shapes=[sides]).module()
    # windows of 3 divide both sides of the grid, none, one
    for size in ((96, 144), (80, 208), (64, 96)):
        x = torch.randn(2, 3, *size)
        assert deviation(program(x), pruned(x)) < 1e-5
        assert deviation(pruned(x), model(x)) > 1e-4


class Unfused(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v


def test_refused_with_the_reason():
    rule = iso.AttentionToWindow(2, grid_size=(3, 3), prefix_tokens=0)
    edited = iso.recast(nn.Sequential(Attention(12, 3)), rule, "0")
    for layer, said in (
        (Unfused(), "never calls scaled_dot_product_attention"),
        (models.cait.ClassAttn(12, 3), "class token is a query"),
        (edited[0], "edited already; revert it first"),
        (nn.Linear(2, 2), "matches only other classes"),
    ):
        refused(said, iso.recast, nn.Sequential(layer), rule, "0")
    alone = nn.Sequential(Attention(12, 3))
    refused("grid of its tokens is unknown", iso.recast, alone, iso.AttentionToWindow(), "0")
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224", depths=(1,), num_heads=(3,), embed_dim=24, num_classes=0
    )
    refused("it attends in windows of 7 x 7 already", iso.recast, swin, iso.AttentionToWindow())
    refused("window 0 must be", iso.AttentionToWindow, 0)
    refused("nothing to prune: the share .* is 1; iso.Anneal", iso.prune, edited)
    refused("compute windows alone already", iso.prune, iso.prune(local(edited)))
    layer = local(edited)[0]
    x = torch.randn(2, 9, 12)
    with pytest.raises(ValueError, match="not causal"):
        layer(x, is_causal=True)
    with pytest.raises(ValueError, match="8 tokens do not fill"):
        layer(x[:, :8])
    expected = layer(x)
    layer.fused_attn = False
    torch.testing.assert_close(layer(x), expected)
    q = torch.randn(2, 4, 9, 3)
    k = torch.randn(2, 2, 9, 3)
    with Attend(layer, [(3, 3)]), pytest.raises(ValueError, match="keys of its own"):
        F.scaled_dot_product_attention(q, k, k, enable_gqa=True)


def test_square_windows_inside_a_model_are_not_taken_for_its_image():
    """TinyViT attends in windows of 7 and 14 tokens, whatever the proportions of the image."""
    vit = timm.create_model("tiny_vit_5m_224", num_classes=2).double().eval()
    windowed = iso.recast(vit, iso.AttentionToWindow(2), where="stages.*.blocks.0.attn")
    x = doubles(1, 3, 97, 129)
    with torch.no_grad():
        torch.testing.assert_close(windowed(x), vit(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("run", [torch.compile, torch.export.export], ids=["compile", "export"])
@torch.no_grad()
def test_weights_that_are_loaded_close_windows_in_compiled_code_too(run):
    vit = disturb(
        timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24)
    ).float()
    new = iso.recast(vit, iso.AttentionToWindow(1), where="blocks.*.attn")
    state = iso.recast(vit, iso.AttentionToWindow(1), where="blocks.*.attn")
    iso.Anneal(1).apply(state, 1)
    new.load_state_dict(state.state_dict())
    x = torch.randn(2, 3, 32, 32)
    if run is torch.compile:
        compiled = torch.compile(new, backend="eager")
    else:
        compiled = torch.export.export(new, (x,)).module()
    assert deviation(compiled(x), state(x)) < 1e-6
    assert deviation(state(x), vit(x)) > 1e-3


def test_pruned_windows_stay_with_any_share():
    vit = disturb(
        timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24)
    )
    new = iso.recast(vit, iso.AttentionToWindow(1), where="blocks.*.attn")
    iso.Anneal(1).apply(new, 1)
    pruned = iso.prune(new)
    x = doubles(1, 3, 32, 32)
    before = pruned(x)
    pruned.load_state_dict(pruned.state_dict() | {"blocks.0.attn.share": torch.ones(())})
    assert deviation(pruned(x), before) < 1e-12


def test_pruned_windows_keep_the_configuration_of_their_model():
    vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)
    vit.config = vit.blocks[0].attn.config = SimpleNamespace()
    new = iso.recast(vit, iso.AttentionToWindow(window=2), where="blocks.0.attn")
    iso.Anneal(steps=1).apply(new, step=1)
    pruned = iso.prune(new)
    assert pruned.blocks[0].attn.config is pruned.config


@pytest.mark.parametrize("anneal", [True, False])
def test_windows_close_in_a_training_run_that_anneals(anneal, tmp_path):
    small = dict(img_size=24, patch_size=4, embed_dim=12, depth=2, num_heads=2)
    recast = dict(rule="AttentionToWindow", window=2, where="blocks.0.attn")
    values = dict(
        model=dict(name="vit_tiny_patch16_224", kwargs=small, recast=recast),
        data=dict(source="digits", fraction=0.1, size=[24, 24], batch_size=32, test_images=20),
        epochs=2,
        ema=0.9,
        out=str(tmp_path),
        device="cpu",
    )
    iso.train(validate(values | (dict(anneal=dict(epochs=1)) if anneal else {})), show=False)
    trained = iso.load(tmp_path / "model.safetensors")
    if not anneal:
        refused("nothing to prune: the share", iso.prune, trained)
        return
    pruned = iso.prune(trained)
    assert pruned.blocks[0].attn.pruned
    images = torch.randn(2, 3, 24, 24)
    torch.testing.assert_close(pruned(images), trained(images), atol=1e-5, rtol=1e-5)
