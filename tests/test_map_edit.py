"""Edits of the map of any attention: the same function at first, then a refined or gated map, never across a mask."""

import copy
import itertools
import math

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.layers.halo_attn import HaloAttn
from timm.models import nextvit
from torch import nn

import isomorph as iso
from attention_layers import LAYERS, C
from isomorph.layers import GPSA, GatedMap, MapCall, RefinedMap, Refiner
from isomorph.layers.map_edit import convolve_within
from isomorph.surgery.attention_layers import (
    halo_positions,
    mask_unit_positions,
    row_mean_positions,
)
from isomorph.surgery.edited_attention import EditedAttention, edit_map
from law_rows import noisy

REFINED = iso.AttentionToRefined(ratio=1)
GATED = iso.AttentionToGPSA()


def build(name):
    torch.manual_seed(0)
    layer = nn.Sequential(LAYERS[name].make()).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    return layer


def train_edits(model):
    """Move the parameters of all edits away from where they change nothing."""
    for module in model.modules():
        if isinstance(module, GatedMap):
            module.set_gating(locality=0.7, gate=0.5)
        elif isinstance(module, RefinedMap):
            noisy(module, 0.2)
    return model


def doubles(*shape):
    return torch.randn(shape, dtype=torch.float64)


def grid_points(height, width):
    """Rows and columns of a grid, row by row. Shape: -> (H W, 2)"""
    return torch.cartesian_prod(torch.arange(float(height)), torch.arange(float(width)))


def regions(windows, N):
    """Masks of windows whose tokens belong to a few regions, in no particular order."""
    generator = torch.Generator().manual_seed(1)
    label = torch.randint(3, (windows, N), generator=generator)
    return label[:, :, None] == label[:, None]


def test_a_convolved_map_equals_the_slow_formula_under_a_mask():
    maps = torch.rand(4, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    kernel = doubles(3, 3, 3, 3).requires_grad_()
    allowed = regions(2, 6).repeat(2, 1, 1)
    slow = torch.zeros_like(maps)
    for b, i, j in allowed.nonzero().tolist():
        sees = allowed[b]
        for s, t in itertools.product((-1, 0, 1), repeat=2):
            m = i + s
            n = j + t
            inside = 0 <= m < 6 and 0 <= n < 6
            if inside and sees[i, m] and sees[j, n]:
                value = kernel[:, :, s + 1, t + 1] @ maps[b, :, m, n]
                place = torch.zeros(4, 1, 6, 6)
                place[b, 0, i, j] = 1
                slow = slow + place * value[:, None, None]
    fast = convolve_within(maps, kernel, allowed[:, None])
    torch.testing.assert_close(fast, slow)

    weights = torch.randn_like(slow)
    ours = torch.autograd.grad((fast * weights).sum(), (maps, kernel))
    theirs = torch.autograd.grad((slow * weights).sum(), (maps, kernel))
    torch.testing.assert_close(ours, theirs)

    everywhere = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    plain = nn.functional.conv2d(maps, kernel, padding=1)
    torch.testing.assert_close(convolve_within(maps, kernel, everywhere), plain)


@pytest.mark.parametrize(
    "rule",
    [REFINED, GATED, iso.AttentionToRefined(ratio=0), iso.AttentionToRefined(span="spatial")],
)
def test_nothing_leaks_across_the_mask_of_a_shifted_window(rule):
    model = build("swin")
    layer = model[0]
    edited = iso.recast(model, rule, "0")[0]
    allowed = regions(2, 16)
    mask = torch.zeros(2, 16, 16, dtype=torch.float64).masked_fill(~allowed, -100.0)
    x = doubles(4, 16, C)
    expected = layer(x, mask=mask)
    torch.testing.assert_close(edited(x, mask=mask), expected, atol=1e-6, rtol=1e-6)

    train_edits(edited)
    first = allowed[:, 0].repeat(2, 1)  # the tokens in the region of each window's first token
    other = x.clone()
    other[~first] = torch.randn_like(other[~first])
    y = edited(x, mask=mask)
    z = edited(other, mask=mask)
    torch.testing.assert_close(y[first], z[first])
    assert not torch.allclose(y[~first], z[~first])


def test_a_refined_map_is_that_of_refined_attention():
    plain = Attention(C, 4, qkv_bias=True).double().eval()
    x = doubles(2, 9, C)
    fast = iso.AttentionToRefined().build(iso.surgery.Site(plain)).double().eval()
    noisy(fast.refine)

    def refined_map(heads, **kind):
        return RefinedMap(Refiner(heads, **kind))

    gradients = []
    for recompute in (False, True):
        edited = edit_map(plain, refined_map, None, None, recompute)
        edited.map_edit.refine.load_state_dict(fast.refine.state_dict())
        y = edited(x)
        torch.testing.assert_close(y, fast(x))
        gradients += torch.autograd.grad(y.square().sum(), edited.qkv.weight)
    torch.testing.assert_close(*gradients)

    padding = torch.arange(9) < torch.tensor([[9], [5]])
    padded = edited(x, attn_mask=padding[:, None, None])
    shorter = edited(x[1:, :5])
    torch.testing.assert_close(padded[1, :5], shorter[0])
    with pytest.raises(ValueError, match="is_causal is not supported"):
        edited(x, is_causal=True)


def test_a_gated_map_is_that_of_gpsa():
    gpsa = GPSA(C, 4, grid_size=(3, 4), prefix_tokens=1).double()
    gpsa.set_gating(0.8, -0.3)
    x = doubles(2, 13, C)
    edit = GatedMap(4).double()
    state = gpsa.state_dict()
    edit.load_state_dict({"position": state["position"], "gate": state["gate"]})
    q, k = gpsa.queries_keys(x)
    scores = q @ k.mT * 0.5
    for shape in ((3, 4), (96, 128)):
        call = MapCall(shapes=(shape,), prefix=1)
        torch.testing.assert_close(edit(scores.softmax(-1), call), gpsa.attention(x))

    allowed = regions(2, 13)
    content = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
    mixed = edit(content, MapCall(allowed, ((3, 4),), 1))
    torch.testing.assert_close(mixed.sum(-1), torch.ones(2, 4, 13, dtype=torch.float64))
    assert mixed.masked_fill(allowed[:, None], 0).abs().max() == 0

    cells = grid_points(3, 4)
    torch.testing.assert_close(edit.place_map(cells, cells), edit.position_map((3, 4), (3, 4)))
    allowed = regions(2, 12)[:, None]
    by_place = edit.place_map(cells, cells, allowed)
    by_axis = edit.position_map((3, 4), (3, 4), allowed)
    torch.testing.assert_close(by_place, by_axis)
    pooled = edit.position_map((4, 6), (2, 3))  # each key is the mean of 2 x 2 positions
    torch.testing.assert_close(pooled.sum(-1), torch.ones(4, 24, dtype=torch.float64))


@pytest.mark.parametrize("size", [(32, 64), (64, 32)])
def test_the_places_of_hieras_tokens_are_those_of_its_unrolling(size):
    arguments = dict(img_size=size, stages=(1, 1, 1, 1), embed_dim=16, num_heads=1, num_classes=3)
    model = timm.create_model("hiera_tiny_224", **arguments).eval()
    H, W = (side // 4 for side in size)
    mask_units = H // 8 * (W // 8)
    (unrolled,) = model.unroll(grid_points(H, W)[None])
    for block in model.blocks:
        layer = block.attn
        count = layer.window_size * layer.q_stride
        tokens, units = unrolled, mask_units
        if layer.use_mask_unit_attn:
            tokens, units = unrolled.unflatten(0, (-1, mask_units))[:, 0], 1
        # of the patches that a token stands for
        keys = tokens.unflatten(0, (-1, count * units)).mean(0)
        queries, found = mask_unit_positions(layer, [(H, W)], layer.window_size * units, len(keys))
        scale = 8 / math.sqrt(count)  # patches in a step of the keys
        centre = (scale - 1) / 2
        torch.testing.assert_close(found * scale + centre, keys)
        pooled = keys.unflatten(0, (layer.q_stride, -1)).mean(0)
        torch.testing.assert_close(queries * scale + centre, pooled)


class Called(nn.Module):
    def __init__(self, layer, *more):
        super().__init__()
        self.layer = layer
        self.more = more

    def forward(self, x):
        return self.layer(x, *self.more)


@pytest.mark.parametrize(
    "name",
    ["sam", "maxvit", "coatnet", "multi_query_v2", "bottleneck", "iformer", "volo", "cpubone"],
)
def test_a_head_that_attends_to_a_neighbour_finds_it_on_a_rectangle(name):
    """Rows and columns of 4 x 6 positions have one meaning in the layer of any library, whatever its layout."""
    H, W = 4, 6
    gated = iso.recast(build(name), iso.AttentionToGPSA(gate=60.0), "0")
    (edit,) = (module for module in gated.modules() if isinstance(module, GatedMap))
    offsets = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]])[: len(edit.position)]
    with torch.no_grad():  # locality times (2 dx, 2 dy, -1)
        edit.position.copy_(60 * F.pad(2 * offsets.flip(1), (0, 1), value=-1))
    assert torch.equal(iso.analysis.centres(gated)["0"].long(), offsets)
    model = Called(gated[0], *LAYERS[name].more)
    maps = iso.attention_maps(model, doubles(*LAYERS[name].shape))["layer"]
    assert maps.shape[2:] == (H * W, H * W)
    found = torch.stack([maps[0].argmax(-1) // W, maps[0].argmax(-1) % W], -1)  # (nh, H W, 2)
    wanted = grid_points(H, W) + offsets[:, None]
    inside = ((wanted >= 0) & (wanted < torch.tensor([H, W]))).all(-1)
    assert torch.equal(found[inside].float(), wanted[inside])


def test_the_places_of_pooled_and_haloed_keys():
    pooled = nextvit.EfficientAttention(C, head_dim=4, sr_ratio=2)
    queries, keys = row_mean_positions(pooled, [(4, 6)], 24, 6)
    torch.testing.assert_close(keys[0] * 2, torch.tensor([0, 1.5]))
    places = torch.tensor([[0, 4], [0, 5], [1, 0], [1, 1]]).float()
    torch.testing.assert_close(keys[1] * 2, places.mean(0))
    torch.testing.assert_close(queries * 2, grid_points(4, 6))

    halo = HaloAttn(C, num_heads=4, block_size=4, halo_size=3, stride=2)
    queries, keys = halo_positions(halo, (), 4, 100)
    assert queries.tolist() == [[0, 0], [0, 2], [2, 0], [2, 2]]
    assert keys[0].tolist() == [-3, -3]
    assert keys[-1].tolist() == [6, 6]


def test_a_class_token_that_is_the_only_query_is_in_the_middle():
    edit = GatedMap(4).double()
    edit.set_gating(locality=2.0, gate=30.0)
    maps = torch.full((1, 4, 1, 16), 1 / 16, dtype=torch.float64)
    call = MapCall(shapes=((3, 5),), prefix=1)
    alone = edit(maps[..., 1:], call)[0, 0, 0]
    with_itself = edit(maps, call)[0, 0, 0]
    torch.testing.assert_close(with_itself, F.pad(alone, (1, 0)))
    centre = edit.centre[0]
    offsets = grid_points(3, 5).double() - torch.tensor([1, 2])
    distances = (offsets - centre).square().sum(-1)
    torch.testing.assert_close(alone, (-2 * distances).softmax(-1))


@pytest.fixture(scope="module")
def swin():
    arguments = dict(
        depths=(2,),
        num_heads=(2,),
        embed_dim=16,
        window_size=4,
        img_size=32,
        patch_size=4,
        num_classes=3,
    )
    return timm.create_model("swin_tiny_patch4_window7_224", **arguments).eval()


@pytest.mark.parametrize("rule", [REFINED, GATED])
def test_a_swin_is_verified_exported_and_compiled(swin, rule):
    new = iso.recast(swin, rule, "layers.*.attn")
    report = iso.verify(swin, new, torch.randn(2, 3, 32, 32))
    assert len(report.targets) == 2
    block = train_edits(new).layers[0].blocks[1].requires_grad_(False)
    x = torch.randn(2, 8, 8, 16)
    assert block.attn_mask is not None
    y = block(x)
    exported = torch.export.export(block, (x,)).module()
    torch.testing.assert_close(exported(x), y)
    compiled = torch.compile(copy.deepcopy(block), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), y)


def test_features_and_image_sizes_follow():
    arguments = dict(
        img_size=32, depth=2, embed_dim=32, num_heads=4, num_classes=3, dynamic_img_size=True
    )
    plain = timm.create_model("vit_small_patch16_dinov3_qkvb", **arguments).eval()
    square = torch.randn(2, 3, 32, 32)
    tall = torch.randn(1, 3, 64, 32)
    for rule in (iso.AttentionToRefined(), GATED, iso.AttentionToRefined(span="spatial")):
        new = iso.recast(plain, rule, "blocks.*.attn")
        iso.verify(plain, new, [square, tall])
        train_edits(new)
        before = new(tall)
        new(square)
        torch.testing.assert_close(new(tall), before)

    pyramid = timm.create_model("pvt_v2_b0", features_only=True, depths=(1, 1, 1, 1)).eval()
    gated = iso.recast(pyramid, GATED, "*.attn")
    x = torch.randn(1, 3, 64, 96)
    torch.testing.assert_close(gated(x), pyramid(x), atol=1e-5, rtol=1e-5)

    pit = timm.create_model("pit_ti_224", num_classes=3, img_size=64, depth=(1, 1, 1)).eval()
    # timm's Attention on an unknown grid
    for rule in (GATED, iso.AttentionToRefined(span="spatial")):
        new = iso.recast(pit, rule, "transformers.*.attn")
        iso.verify(pit, new, torch.randn(1, 3, 64, 64))
        (edit,) = iso.edits(new)
        for name in edit.names:
            assert isinstance(new.get_submodule(name), EditedAttention)


def test_gates_are_analysed_and_trained_by_the_name_of_the_layer(swin):
    new = iso.recast(swin, GATED, "layers.*.attn")
    (edit,) = iso.edits(new)
    assert set(iso.gates(new)) == set(edit.names)
    groups = {group["name"]: group for group in iso.training.parameter_groups(new)}
    assert len(groups["gates"]["params"]) == 2

    annealed = copy.deepcopy(new)
    iso.Anneal(steps=3, stop=(2.0, 0.5)).apply(annealed, 3)
    gated_maps = [module for module in annealed.modules() if isinstance(module, GatedMap)]
    assert len(gated_maps) == 2
    for gated_map in gated_maps:
        assert gated_map.locality[0] == 2.0
        assert gated_map.gate[0] == 0.5

    ones = torch.ones(1, 3, 32, 32)
    before = iso.attention_maps(swin, ones)
    after = iso.attention_maps(train_edits(new), ones)
    assert after.keys() == before.keys()
    for name, maps in after.items():
        assert maps.shape == before[name].shape
    name = "layers.0.blocks.0.attn"
    assert not torch.allclose(before[name], after[name])


@pytest.mark.parametrize(("fused", "training"), [(True, False), (False, False), (False, True)])
def test_timms_attention_with_another_scale_or_dropout_keeps_its_function(fused, training):
    """In training not the fused form, which draws its dropout in an order of its own."""
    layer = Attention(16, 4)
    layer.fused_attn = fused
    layer.scale = 0.3
    layer.attn_drop = nn.AlphaDropout(0.5)
    model = nn.Sequential(layer).double().train(training)
    rule = iso.AttentionToGPSA(gate=-1000.0, grid_size=(3, 3), prefix_tokens=0)
    edited = iso.recast(model, rule, where="0")
    assert isinstance(edited[0], EditedAttention)
    x = doubles(2, 9, 16)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(edited(x), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("queries", [5, 7])
@torch.no_grad()
def test_refined_cross_attention_takes_masks(queries):
    layer = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True).eval()
    model = nn.Sequential(layer)
    new = iso.recast(model, iso.AttentionToRefined(), where="0.multihead_attn")
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 4:] = True
    target = torch.randn(2, queries, 16)
    memory = torch.randn(2, 7, 16)
    out = layer(target, memory, memory_key_padding_mask=padding)
    torch.testing.assert_close(new[0](target, memory, memory_key_padding_mask=padding), out)
    # also with a kernel that reads neighbours, what is padded plays no part
    for parameter in new[0].multihead_attn.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    out = new[0](target, memory, memory_key_padding_mask=padding)
    torch.testing.assert_close(out[:1], new[0](target[:1], memory[:1, :4]))


def edited_layer(plain):
    edited = edit_map(plain, lambda heads, **kind: RefinedMap(Refiner(heads, **kind)), None, None)
    noisy(edited.map_edit)
    return edited


def test_a_mask_of_pairs_is_one_also_for_as_many_images_as_tokens():
    edited = edited_layer(Attention(C, 4, qkv_bias=True).double().eval())
    (mask,) = regions(1, 9)
    x = doubles(9, 9, C)
    alone = [edited(image[None], attn_mask=mask) for image in x]
    torch.testing.assert_close(edited(x, attn_mask=mask), torch.cat(alone))


def test_a_finite_mask_of_torchs_attention_is_a_mask():
    edited = edited_layer(nn.MultiheadAttention(C, 4, batch_first=True).double().eval())
    (allowed,) = regions(1, 9)
    x = doubles(2, 9, C)
    outputs = []
    for score in (-torch.inf, -1e9):
        mask = torch.zeros(9, 9, dtype=torch.float64).masked_fill(~allowed, score)
        outputs.append(edited(x, x, x, attn_mask=mask)[0])
    torch.testing.assert_close(*outputs)
