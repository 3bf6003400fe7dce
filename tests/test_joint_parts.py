"""Pyramids for queries, keys or values alone: a joint projection of which some parts are pyramids."""

import copy
import json

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from isomorph.cli import main
from isomorph.errors import NotFinite
from isomorph.lab.training.recipe.model_fields import RecastPart
from isomorph.layers import JointPyramid, PyramidLinear
from law_rows import noisy

SMALL = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)


def vit(**more):
    torch.manual_seed(0)
    return noisy(timm.create_model("vit_tiny_patch16_224", **SMALL | more).eval())


def kinds(model, block=0):
    return [type(part).__name__ for part in model.blocks[block].attn.qkv.pyramids]


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_values_alone_become_pyramids_and_come_back(tmp_path, qkv_bias):
    plain = vit(qkv_bias=qkv_bias)
    before = copy.deepcopy(plain.state_dict())
    wide = iso.recast(plain, iso.LinearToPyramid(), "blocks.*.attn.v")
    assert iso.edits(wide)[0].names == ("blocks.0.attn.v", "blocks.1.attn.v")
    assert kinds(wide) == ["Linear", "Linear", "PyramidLinear"]
    x = torch.randn(2, 3, 32, 32)
    report = iso.verify(plain, wide, x)
    assert [row.name for row in report.targets] == ["blocks.0.attn.qkv", "blocks.1.attn.qkv"]
    noisy(wide)
    iso.save(wide, tmp_path / "wide.safetensors")
    torch.testing.assert_close(iso.load(tmp_path / "wide.safetensors")(x), wide(x))
    thin = iso.fuse(wide)
    assert type(thin.blocks[0].attn.qkv) is nn.Linear
    torch.testing.assert_close(thin(x), wide(x), rtol=1e-4, atol=1e-5)
    iso.save(thin, tmp_path / "thin.safetensors")
    again = iso.load(tmp_path / "thin.safetensors")
    assert bool(iso.edits(again)) is not qkv_bias  # with biases the fused network is the plain one
    torch.testing.assert_close(again(x), thin(x))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_weights_of_a_part_that_are_not_finite_are_refused():
    plain = vit()
    plain.blocks[0].attn.qkv.weight.data[0, 0] = torch.nan
    with pytest.raises(NotFinite, match=r"blocks\.0\.attn\.qkv"):
        iso.recast(plain, iso.LinearToPyramid(), "blocks.*.attn.v")


def test_parts_are_rectified_each_in_its_own_way():
    plain = vit()
    rule = iso.LinearToPyramid("R-D1W4", rectify={"q": "none", "v": "batchnorm"})
    wide = iso.recast(plain, rule, ["blocks.[0-9].attn.qkv", "blocks.*.mlp.fc1"])
    assert [p.rectify for p in wide.blocks[0].attn.qkv.pyramids] == [
        "none",
        "batchnorm",
        "batchnorm",
    ]
    assert wide.blocks[0].mlp.fc1.rectify == "rescale"
    assert rule == iso.LinearToPyramid("R-D1W4", rectify="v=batchnorm, q=none")
    other = iso.recast(
        plain, iso.LinearToPyramid(rectify="qkv=none,v=batchnorm"), "blocks.0.attn.qkv"
    )
    assert [p.rectify for p in other.blocks[0].attn.qkv.pyramids] == ["none", "none", "batchnorm"]
    iso.verify(plain, wide, torch.randn(2, 3, 32, 32))


def test_parts_can_be_recast_one_after_the_other(tmp_path):
    """Another rule for each part; the first so many blocks only; mode, freezing and parameters kept."""
    plain = vit(depth=3).train()
    plain.blocks[1].attn.qkv.requires_grad_(False)
    wide = iso.recast(plain, iso.LinearToPyramid("P-W1S", rectify="none"), "blocks.[0-1].attn.q")
    wide = iso.recast(wide, iso.LinearToPyramid("R-D1W4"), "blocks.1.attn.[kv]")
    assert kinds(wide, 0) == ["PyramidLinear", "Linear", "Linear"]
    assert kinds(wide, 1) == ["PyramidLinear"] * 3
    assert type(wide.blocks[2].attn.qkv) is nn.Linear
    assert [p.layout for p in wide.blocks[1].attn.qkv.pyramids] == ["P-W1S", "R-D1W4", "R-D1W4"]
    for p in wide.blocks[1].attn.qkv.parameters():
        assert not p.requires_grad
    for p in wide.blocks[0].attn.qkv.parameters():
        assert p.requires_grad
    for module in wide.modules():
        assert module.training
    x = torch.randn(2, 3, 32, 32)
    iso.verify(plain, wide, x)
    iso.save(wide, tmp_path / "wide.safetensors")
    torch.testing.assert_close(iso.load(tmp_path / "wide.safetensors")(x), wide.eval()(x))
    found = iso.analysis.branch_similarity(wide, x)
    assert found["blocks.0.attn.qkv"].shape == (1, 2, 2)  # the one pyramid in it
    assert found["blocks.1.attn.qkv"].shape == (3, 4, 4)  # of 2, 4 and 4 branches
    before = {name: b.clone() for name, b in wide.named_buffers() if name.endswith("running_mean")}
    measured = iso.recalibrate(wide, [x], keep_function=True)
    torch.testing.assert_close(measured.eval()(x), wide.eval()(x), atol=1e-4, rtol=1e-4)
    after = dict(measured.named_buffers())
    assert any(not torch.allclose(after[name], mean) for name, mean in before.items())


def test_a_whole_layer_covers_its_parts():
    found = iso.recast(vit(), iso.LinearToPyramid(), ["blocks.0.attn.qkv", "blocks.*.attn.q"])
    assert [kinds(found, block) for block in (0, 1)] == [
        ["PyramidLinear"] * 3,
        ["PyramidLinear", "Linear", "Linear"],
    ]


def test_recipes_describe_parts():
    part = RecastPart(where="blocks.[0-3].attn.q", rule="LinearToPyramid", rectify={"q": "none"})
    assert part.build_rule() == iso.LinearToPyramid(rectify="q=none")
    parts = ["model.kwargs.where=blocks.*.attn.v", "model.kwargs.rectify.v=none"]
    recipe = iso.load_recipe("cifar_tdrl_scratch", parts)
    model = iso.models.create("tdrl_vit_ti", **recipe.model.kwargs)
    assert kinds(model) == ["Linear", "Linear", "PyramidLinear"]


def test_the_command_recasts_parts(tmp_path, capsys):
    vit = tmp_path / "vit.safetensors"
    wide = tmp_path / "wide.safetensors"
    iso.save(timm.create_model("vit_tiny_patch16_224", **SMALL), vit)

    def recast(rectify):
        options = [
            "--rule",
            "LinearToPyramid",
            "--where",
            "blocks.*.attn.[qv]",
            "--size",
            "32",
            "--overwrite",
        ]
        with pytest.raises(SystemExit) as ended:
            main(["recast", str(vit), *options, "--json", "--rectify", rectify, "--out", str(wide)])
        return ended.value.code, capsys.readouterr()

    code, said = recast("q=none")
    assert not code, said.err
    assert json.loads(said.out)["recast"] == [
        f"blocks.{i}.attn.{part}" for i in range(2) for part in "qv"
    ]
    assert kinds(iso.load(wide)) == ["PyramidLinear", "Linear", "PyramidLinear"]
    code, said = recast("q=nine")
    assert code == 2
    assert "rectify 'q=nine' is unknown" in said.err


FIGURES = {
    "tdrl_fig3_none_g2sd": ({"q": "none", "k": "none"}, 12),
    "tdrl_fig3_batchnorm_100ep": ({"q": "batchnorm", "k": "batchnorm"}, 12),
    "tdrl_fig4_all_none_100ep": (
        dict(q="batchnorm", k="batchnorm", v="none", fc1="none", fc2="none"),
        12,
    ),
    "tdrl_fig4_ffn_w3_none_g2sd": (dict(fc1="none", fc2="none"), 12),
    "tdrl_fig5_v_8_g2sd": (dict(v="rescale"), 8),
}


@pytest.mark.parametrize("name", FIGURES)
def test_recipes_of_the_figures_put_pyramids_where_the_paper_has_them(name):
    part = iso.load_recipe(name).model
    with torch.device("meta"):
        model = iso.models.create(part.name, **part.kwargs)
    wanted, depth = FIGURES[name]
    for number, block in enumerate(model.blocks):
        qkv = block.attn.qkv
        named = dict(zip("qkv", qkv.pyramids, strict=True)) if isinstance(qkv, JointPyramid) else {}
        named |= dict(fc1=block.mlp.fc1, fc2=block.mlp.fc2)
        found = {
            last: layer.rectify for last, layer in named.items() if isinstance(layer, PyramidLinear)
        }
        assert found == (wanted if number < depth else {})
    if "fig3" in name:
        assert {p.layout for p in model.modules() if isinstance(p, PyramidLinear)} == {"R-D1W4"}


def test_every_pre_training_half_of_the_tables_is_there():
    """Tables 3, 9 and 10: what is fine-tuned for 100 epochs has a pre-training of the same form."""
    for half, tuned in (
        ("vit_s", "vit_s"),
        ("plain_s", "plain_s"),
        ("naive", "naive"),
        ("regular", "regular"),
    ):
        first = iso.load_recipe(f"tdrl_{half}_g2sd")
        second = iso.load_recipe(f"tdrl_{tuned}_100ep")
        # fine-tuning reads the average of the patches
        pooled = first.model.kwargs | {"global_pool": "avg"}
        assert first.model.name == second.model.name
        assert pooled == second.model.kwargs
        assert first.mask.teacher_model == "vit_base_patch16_224.mae"
        assert f"tdrl_{tuned}_100ep" in first.expected
    fused = iso.load_recipe("tdrl_fused_g2sd")
    assert fused.epochs == 220
    assert fused.model.kwargs["layout"] == "P-W1S"
