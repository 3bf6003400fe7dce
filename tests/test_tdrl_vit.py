"""TDRL-ViT: the published sizes, plain checkpoints in, plain networks out, attention watched in training."""

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from isomorph.lab.recipes import RECIPES
from isomorph.lab.report import compare_sections, read_run_logs
from isomorph.lab.training.build import build_model
from isomorph.lab.training.optim import scaled_groups
from isomorph.lab.training.recipe.fields import OptimPart
from isomorph.lab.training.recipe.model_fields import ModelPart
from isomorph.lab.training.recipe.recipe import validate
from isomorph.lab.training.run import loop
from isomorph.lab.training.run.log import read_log
from isomorph.models.tdrl_vit import checkpoint_filter_fn
from refusals import refused

SMALL = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)
PYRAMIDS = ("attn.qkv", "mlp.fc1", "mlp.fc2")
FFN = ["blocks.*.mlp.fc?"]
COUNTS = {
    "plain ViT-Ti": (dict(layout="plain"), 5_717_416, 5.72),
    "P-W2S (Table 8)": (dict(), 48_859_816, 48.86),
    "R-D2W1S in the MLP (Table 10)": (dict(layout="R-D2W1S", where=FFN), 31_033_768, 31.03),
    "naive in the MLP (Table 10)": (dict(layout="naive-W8", where=FFN), 30_754_984, 30.75),
}


@pytest.mark.parametrize("name", COUNTS)
def test_published_counts(name):
    arguments, count, millions = COUNTS[name]
    with torch.device("meta"):
        model = timm.create_model("tdrl_vit_ti", **arguments)
    found = sum(p.numel() for p in model.parameters())
    assert found == count
    assert round(found / 1e6, 2) == millions
    assert model.blocks[0].attn.num_heads == 12
    assert type(model.blocks[0].attn.proj) is nn.Linear


STARTS = [
    "tdrl_vit_ti_g2sd",
    "tdrl_plain_scratch",
    "tdrl_fig2_patch_embed_g2sd",
    "tdrl_fig5_v_8_g2sd",
    "tdrl_deit_b",
]


def test_both_arms_of_every_run_start_by_one_rule():
    for name in RECIPES:
        if not name.startswith("tdrl_"):
            continue
        part = iso.load_recipe(name).model
        assert "mae" in (part.weight_init, part.kwargs.get("weight_init"))


@pytest.mark.parametrize("name", STARTS)
def test_that_rule_is_xavier_in_every_matrix(name):
    """As it stands, whether a pyramid's or not, the patch embedding viewed as one."""
    part = iso.load_recipe(name).model
    narrow = dict(embed_dim=48, depth=1, num_heads=3, patch_size=8, img_size=16)
    where = part.kwargs.get("where")
    where = (
        {"where": [glob.replace(f".{i}.", ".0.") for i, glob in enumerate(where)]} if where else {}
    )
    part = part.model_copy(update=dict(kwargs=part.kwargs | narrow | where))
    layers = [m for m in build_model(part, 10).modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    shares = [
        (m.std() * (sum(m.shape) / 2) ** 0.5).item()
        for m in (layer.weight.flatten(1) for layer in layers)
    ]
    assert len(shares) > 5
    assert all(share == pytest.approx(1, abs=0.08) for share in shares), shares


def test_deit_b_with_pyramids_in_queries_keys_and_values():
    with torch.device("meta"):
        wide = iso.recast(
            timm.create_model("deit_base_patch16_224"), iso.LinearToPyramid(), "blocks.*.attn.qkv"
        )
    kinds = {
        name.split(".", 2)[2]
        for name, m in wide.named_modules()
        if isinstance(m, iso.layers.PyramidLinear)
    }
    assert kinds == {f"attn.qkv.pyramids.{i}" for i in range(3)}
    linear = 768**2 + 768
    norm = 2 * 768
    pyramid = 6 * linear + 3 * norm  # branches of 2 and 3 linear layers, the skip
    assert sum(p.numel() for p in wide.parameters()) == 86_567_656 + 12 * (
        3 * (pyramid - linear) + 2 * norm
    )


def test_a_plain_checkpoint_is_carried_by_the_pyramids():
    plain = timm.create_model("vit_tiny_patch16_224", **SMALL).eval()
    for where in (
        ("blocks.*.attn.qkv", "blocks.*.mlp.fc?"),
        ("patch_embed.proj",),
        "blocks.*.attn.v",
    ):
        wide = timm.create_model("tdrl_vit_ti", where=where, **SMALL).eval()
        wide.load_state_dict(checkpoint_filter_fn(plain.state_dict(), wide))
        iso.verify(plain, wide, torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("layout", ["P-W2S", "plain"])
def test_a_pre_trained_encoder_starts_a_fine_tuning_run(layout, tmp_path):
    """MAE's file: no head, a decoder besides. What else is missing or unknown is still an error."""
    plain = timm.create_model("vit_tiny_patch16_224", **SMALL).state_dict()
    mae = {n: t for n, t in plain.items() if not n.startswith("head")} | {
        "mask_token": torch.zeros(1, 1, 8)
    }
    torch.save(
        {"model": mae | {"decoder_blocks.0.norm1.weight": torch.zeros(8)}}, tmp_path / "mae.pth"
    )
    small = {**SMALL, "num_classes": 7, "layout": layout}
    part = ModelPart(name="tdrl_vit_ti", kwargs=small, weights=tmp_path / "mae.pth")
    model = build_model(part, 7).eval()
    assert model.head.out_features == 7
    x = torch.randn(2, 3, 32, 32)
    reference = timm.create_model("vit_tiny_patch16_224", **SMALL).eval()
    reference.load_state_dict(plain)
    torch.testing.assert_close(
        model.forward_features(x), reference.forward_features(x), rtol=1e-4, atol=1e-4
    )
    torch.save({"model": mae | {"blocks.9.norm1.weight": torch.zeros(24)}}, tmp_path / "mae.pth")
    refused(r"1 unexpected \(blocks.9.norm1.weight\)", build_model, part, 7)


@pytest.mark.parametrize("how", ["named", "recast", "conv"])
def test_a_fused_model_is_saved_as_the_plain_one(how, tmp_path):
    if how == "named":
        wide = timm.create_model("tdrl_vit_ti", layout="P-W2S", **SMALL)
        plain = timm.create_model("tdrl_vit_ti", layout="plain", **SMALL)
    else:
        plain = timm.create_model("vit_tiny_patch16_224", **SMALL)
        wide = iso.recast(
            plain,
            iso.LinearToPyramid(),
            "blocks.*.mlp.fc?" if how == "recast" else "patch_embed.proj",
        )
    thin = iso.fuse(wide.eval())
    iso.save(thin, tmp_path / "thin.safetensors")
    again = iso.load(tmp_path / "thin.safetensors")
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(again(x), wide(x), rtol=1e-4, atol=1e-5)
    assert iso.edits(again) == ()
    iso.load_weights(plain, tmp_path / "thin.safetensors")  # what model.weights does
    torch.testing.assert_close(plain.eval()(x), again(x))


def test_layers_before_a_batchnorm_may_have_their_own_rate():
    model = timm.create_model("tdrl_vit_ti", **SMALL)
    groups = scaled_groups(model, OptimPart(lr=1e-3, branch_lr=1e-4, weight_decay=0.1))
    (branches,) = [g for g in groups if g["name"] == "branches"]
    assert branches["lr_scale"] == pytest.approx(0.1)
    assert branches["weight_decay"] == 0.1
    held = {id(p) for p in branches["params"]}
    found = {name for name, p in model.blocks[1].mlp.fc1.named_parameters() if id(p) in held}
    assert found == {"branches.0.0.weight", "branches.1.0.weight", "branches.1.2.weight"}
    for g in scaled_groups(model, OptimPart(lr=1e-3)):
        assert g["name"] != "branches"


def test_the_monitor_watches_every_block(tmp_path):
    recipe = dict(monitor_every=3, epochs=2, out=str(tmp_path)) | dict(
        model=dict(name="tdrl_vit_ti", kwargs={**SMALL, "weight_init": "jax", "num_classes": 10}),
        data=dict(source="digits", fraction=0.1, size=[32, 32], batch_size=32, test_images=20),
        optim=dict(lr=1e-3, warmup_epochs=0),
    )
    iso.train(validate(recipe), show=False)
    rows = read_log(tmp_path / "monitor.jsonl")
    assert [row["step"] for row in rows] == list(range(1, rows[-1]["step"] + 1, 3))
    for row in rows:
        assert set(row["max_logit"]) == set(row["entropy"]) == {"blocks.0.attn", "blocks.1.attn"}
    for row in rows:
        for value in row["entropy"].values():
            assert 0 < value < 17**0.5 * 10
    for row in rows:  # TDRL Fig. 3 (c): the maximum before and after the softmax
        assert set(row["max_attention"]) == set(row["max_logit"])
        for value in row["max_attention"].values():
            assert 1 / 17 < value <= 1
        assert set(row["branch_similarity"]) == {
            f"blocks.{i}.{part}" for i in (0, 1) for part in PYRAMIDS
        }
        for value in row["branch_similarity"].values():
            assert 0 <= value <= 1
    panels = {}
    for part in compare_sections(read_run_logs([tmp_path])):
        for chart in part.charts:
            panels[chart.title] = chart
    (panel,) = (
        panel
        for name, panel in panels.items()
        if name.startswith("Similarity of the branches of pyramids")
    )
    assert len(panel.lines[tmp_path.name].x) == len(rows)


def test_branch_similarity_is_the_cka_of_the_branches():
    model = timm.create_model("tdrl_vit_ti", **SMALL).eval()
    x = torch.randn(4, 3, 32, 32)
    seen = {}
    layers = {
        "blocks.1.mlp.fc1": model.blocks[1].mlp.fc1,
        "blocks.0.attn.qkv": model.blocks[0].attn.qkv,
    }
    thin = iso.fuse(model)
    for name, layer in layers.items():
        layer.register_forward_pre_hook(
            lambda _, args, name=name: seen.update({name: args[0].flatten(0, 1)})
        )
    found = iso.analysis.branch_similarity(model, x)
    assert found["blocks.0.attn.qkv"].shape == (3, 3, 3)
    fc1, qkv = layers
    for name, pyramid, values in (
        (fc1, layers[fc1], found[fc1]),
        (qkv, layers[qkv].pyramids[2], found[qkv][2]),
    ):
        outputs = [nn.Sequential(*chain)(seen[name]) for chain in pyramid.chains]
        expected = torch.stack(
            [torch.stack([iso.analysis.linear_cka(a, b) for b in outputs]) for a in outputs]
        )
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
    pairs = found[fc1][0, 1], found[fc1][0, 2], found[fc1][1, 2]
    assert loop._branches(model, x)["branch_similarity"][fc1] == pytest.approx(
        sum(pairs).item() / 3
    )
    refused("no pyramids", iso.analysis.branch_similarity, thin, x)
