"""Rules for attention keep the scale of its scores, whatever it is, and accept what runs when it is called."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import nn

import isomorph as iso
from attention_layers import CHANNELS_FIRST, CHANNELS_LAST, LAYERS, NETWORKS, TOKENS, WITH_CLASS, C
from isomorph.surgery.attention_layers import attention_facts
from isomorph.surgery.observed_scores import observe_calls, observe_scores
from law_rows import Alone, deviation, disturb, values
from refusals import refused

GRIDS = {
    TOKENS: dict(grid_size=(4, 4), prefix_tokens=0),
    WITH_CLASS: dict(grid_size=(4, 4), prefix_tokens=1),
    CHANNELS_FIRST: dict(grid_size=(4, 6), prefix_tokens=0),
    CHANNELS_LAST: dict(grid_size=(4, 6), prefix_tokens=0),
    (2, 24, C): dict(grid_size=(4, 6), prefix_tokens=0),
}
RULES = {
    "windows": lambda grid: iso.AttentionToWindow(2, **grid),
    "refined": lambda grid: iso.AttentionToRefined(ratio=1),
    "relative": lambda grid: iso.AttentionToRelative(**grid),
    "gated": lambda grid: iso.AttentionToGPSA(**grid),
}
LEAK = 1e-6
"""What a gate leaves out of the function, relative to the output."""


def scaled(model, factor, fused):
    """A copy whose attention has another scale, in one of timm's two forms."""
    new = copy.deepcopy(model)
    for module in new.modules():
        for name in ("scale", "scaling"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, getattr(module, name) * factor)
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return new


def forms(model):
    """The model as it is, fused or not with another scale, and not fused with its own."""
    yield model
    for factor, fused in ((0.37, True), (0.37, False), (1.0, False)):
        yield scaled(model, factor, fused)


def windows_alone(new):
    iso.Anneal(2).apply(new, 2)
    return new


def check(model, rule, where, x):
    """A model and what a rule makes of the layers that it accepts compute the same; so do its windows alone."""
    if not iso.surgery.acceptance(model, rule, where).accepted:
        return False
    new = iso.recast(model, rule, where)
    y = model(*x)
    assert deviation(new(*x), y) < LEAK
    assert deviation(iso.revert(new)(*x), y) < LEAK
    if isinstance(rule, iso.AttentionToWindow):
        pruned = iso.prune(windows_alone(new))
        assert deviation(pruned(*x), new(*x)) < 1e-9
    return True


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_what_is_accepted_runs_and_keeps_its_scale(name):
    layer = LAYERS[name]
    torch.manual_seed(0)
    plain = disturb(Alone(layer.make()), 0.7)
    grid = GRIDS.get(tuple(layer.shape), {})
    x = values((layer.shape, *layer.more))
    where = "layer.attention" if name.startswith("multihead") else "layer"
    for model in forms(plain):
        for make in RULES.values():
            check(model, make(grid), where, x)


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_networks_of_other_libraries_run_and_keep_their_scale(name):
    torch.manual_seed(0)
    plain = disturb(Alone(NETWORKS[name]()))
    x = values(((2, 3, 32, 32),))
    rules = [iso.AttentionToWindow(2), iso.AttentionToRefined(), iso.AttentionToGPSA()]
    taken = [check(scaled(plain, 0.37, True), rule, "*", x) for rule in rules]
    if "transformers" not in name:
        return
    plain.layer.set_attn_implementation("eager")
    assert [check(plain, rule, "*", x) for rule in rules] == taken


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scale", [1 / 8, 8**-0.5, 3.0])
@torch.no_grad()
def test_all_rules_keep_the_scale_of_timm_s_attention(scale, fused):
    torch.manual_seed(0)
    plain = disturb(nn.Sequential(Attention(24, 3, qkv_bias=True)))
    plain[0].scale = scale
    plain[0].fused_attn = fused
    grid = GRIDS[WITH_CLASS]
    x = [torch.randn(2, 17, 24, dtype=torch.float64)]
    rules = [make(grid) for make in RULES.values()]
    rules += [iso.AttentionToRefined(ratio=0), iso.AttentionToRefined(reduce=False)]
    rules += [
        iso.AttentionToRefined(span="spatial", **grid),
        iso.AttentionToRelative(prefix_bias=True, **grid),
    ]
    for rule in rules:
        assert check(plain, rule, "0", x), rule
    moved = iso.recast(plain, iso.AttentionToRelative(**grid), "0")
    nn.init.normal_(moved[0].relative_bias)
    maps = moved[0].attention(*x)
    v = moved[0].queries_keys_values(*x)[2]
    torch.testing.assert_close(moved(*x), moved[0].project_output(maps @ v, *x))
    maps = iso.attention_maps(plain, *x)["0"]
    refined = iso.recast(plain, iso.AttentionToRefined(), "0")
    torch.testing.assert_close(iso.attention_maps(refined, *x)["0"], maps)
    logits = [iso.analysis.logit_stats(model, *x)["0"].entropy for model in (plain, refined)]
    torch.testing.assert_close(*logits)


class OwnAttention(nn.Module):
    """Attention with two forms and a scale of a name of its own, which only one of them needs not to be told."""

    def __init__(self, fused, softcap=0.0):
        super().__init__()
        self.qkv = nn.Linear(24, 72)
        self.num_heads = 3
        self.temperature = 0.2
        self.fused_attn = fused
        self.softcap = softcap

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        if self.fused_attn:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = (q * self.temperature) @ k.mT
            if self.softcap:
                scores = self.softcap * (scores / self.softcap).tanh()
            out = scores.softmax(-1) @ v
        return out.transpose(1, 2).flatten(2)


class GivenScale(OwnAttention):
    """Attention that gives the fused operation its scale."""

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, scale=self.temperature)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("layer", "pruned_is_fused"),
    [
        (OwnAttention(fused=True), True),
        (OwnAttention(fused=False), True),
        (OwnAttention(fused=False, softcap=0.5), False),
        (GivenScale(fused=True), True),
    ],
)
@torch.no_grad()
def test_the_scale_is_seen_whatever_its_name(layer, pruned_is_fused):
    model = disturb(nn.Sequential(layer))
    x = [torch.randn(2, 17, 24, dtype=torch.float64)]
    rules = [make(GRIDS[WITH_CLASS]) for key, make in RULES.items() if key != "relative"]
    for rule in rules:
        assert check(model, rule, "0", x)
    pruned = iso.prune(windows_alone(iso.recast(model, rules[0], "0")))
    # a layer whose forms differ in more than the scale keeps the mask
    assert pruned[0].fused_attn == pruned_is_fused


@torch.no_grad()
def test_a_trial_leaves_no_traces():
    """Neither in the layer, nor in the random state, nor in what hooks of the user count."""
    calls = []
    model = disturb(nn.Sequential(Attention(24, 3), nn.BatchNorm1d(17))).train()
    model[0].fused_attn = False
    model[0].qkv.register_forward_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    rule = iso.AttentionToWindow(2, **GRIDS[WITH_CLASS])
    assert iso.surgery.acceptance(model, rule).accepted == ["0"]
    observe_calls(model)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert calls == []
    assert model[0].training


SMALLEST = {
    "vit_tiny_patch16_224": dict(img_size=32, depth=1),
    "samvit_base_patch16": dict(
        img_size=64, embed_dim=24, depth=2, num_heads=2, global_attn_indexes=(1,), neck_chans=8
    ),
    "pvt_v2_b0": {},
    "beit_base_patch16_224": dict(img_size=32, depth=1, embed_dim=24, num_heads=2),
    "eva02_tiny_patch14_224": dict(img_size=56, depth=1, embed_dim=24, num_heads=2),
    "vit_base_patch16_siglip_224": dict(img_size=64, depth=1, embed_dim=24, num_heads=2),
    "twins_svt_small": dict(depths=(1, 1, 1, 1)),
    "swin_tiny_patch4_window7_224": dict(embed_dim=24, depths=(1, 1), num_heads=(2, 2)),
    "maxvit_pico_rw_256": dict(img_size=64, depths=(1, 1, 1, 1)),
}
"""Networks of timm in which attention is called in different ways: on maps, on windows, on pooled keys, by a pool."""


@pytest.mark.parametrize("name", SMALLEST)
@torch.no_grad()
def test_what_is_accepted_in_a_network_runs(name):
    torch.manual_seed(0)
    model = disturb(timm.create_model(name, num_classes=3, **SMALLEST[name]), 0.1)
    x = torch.randn(1, 3, *model.pretrained_cfg["input_size"][1:], dtype=torch.float64)
    if "img_size" in SMALLEST[name]:
        size = SMALLEST[name]["img_size"]
        x = torch.randn(1, 3, size, size, dtype=torch.float64)
    taken = check(model, iso.AttentionToWindow(2), "*", [x])
    facts = [attention_facts(type(module)) for module in model.modules()]
    assert taken == any(facts) or name in ("swin_tiny_patch4_window7_224",)


def test_each_layer_that_cannot_have_windows_says_so():
    rule = iso.AttentionToWindow(2)
    model = timm.create_model("pvt_v2_b0")
    rejected = iso.surgery.acceptance(model, rule).rejected
    assert set(rejected) == {
        f"stages.{stage}.blocks.{block}.attn" for stage in range(3) for block in range(2)
    }
    for name, reason in rejected.items():
        refused(reason, iso.recast, model, rule, name)
    assert observe_scores(nn.Linear(2, 2)) is None
    assert observe_scores(copy.deepcopy(model.stages[0].blocks[0].attn).to("meta")).mismatch
