"""Options of the commands that change or compare a model: each one arrives where it is meant to."""

import json
from dataclasses import asdict

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from command_line import isomorph, refusal
from isomorph.models.input_sizes import random_inputs
from isomorph.surgery import fuse_with_report
from small_models import vit
from test_prune import small_tcnn

IMAGES = torch.randn(2, 3, 32, 32)
NETS = """from torch import nn
class Clamped(nn.Module):
    def forward(self, x): return x.clamp(-20, 20).mean((2, 3))
class Plain(nn.Module):
    def forward(self, x): return x.mean((2, 3))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A CNN with gated layers, a block or a pyramid; a ViT; of the gates of one layer one is not quite closed."""
    top = tmp_path_factory.mktemp("models")
    cnn = timm.create_model("cifar_resnet20").eval()
    iso.save(cnn, top / "cnn.safetensors")
    iso.save(small_tcnn(4.0), top / "gated.safetensors")
    iso.save(iso.recast(cnn, iso.ConvToGPSA(), "layer3.0.conv?"), top / "exact.safetensors")
    inserted = iso.insert(cnn, iso.layers.MapAttention, "layer3.2")
    nn.init.constant_(inserted.layer3[2].inserted.gamma, 0.5)
    iso.save(inserted, top / "inserted.safetensors")
    iso.save(iso.recast(cnn, iso.LinearToPyramid(), "linear"), top / "wide.safetensors")
    plain = vit(depth=1)
    for parameter in plain.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    iso.save(plain, top / "vit.safetensors")
    wide = iso.recast(plain, iso.LinearToPyramid(), "blocks.*.mlp.fc?")
    iso.save(wide, top / "wide_vit.safetensors")
    (top / "nets.py").write_text(NETS)
    return top


def answer(folder, line):
    run = isomorph(*line.split(), "--json", folder=folder)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def rejected(folder, line):
    return refusal(isomorph(*line.split(), folder=folder))


def gated_layers(path):
    model = iso.load(path)
    return [name for name, module in model.named_modules() if isinstance(module, iso.layers.GPSA2d)]


def test_prune_takes_the_tolerance_and_the_layers(folder):
    done = answer(folder, "prune gated.safetensors --tolerance 0.05 --out closed.safetensors")
    assert [each["layer"] for each in done["layers"]] == ["layer3.0.conv1", "layer3.0.conv2"]
    assert gated_layers(folder / "closed.safetensors") == []
    where = (
        "prune gated.safetensors --tolerance 0.05 --where layer3.0.conv1 --out first.safetensors"
    )
    assert [each["layer"] for each in answer(folder, where)["layers"]] == ["layer3.0.conv1"]
    assert gated_layers(folder / "first.safetensors") == ["layer3.0.conv2"]


def test_prune_compares_within_atol_on_the_images_of_data(folder):
    prune = "prune gated.safetensors --data digits --max-images 3"
    done = answer(folder, f"{prune} --atol 0.09 --out images.safetensors")["report"]
    assert done["atol"] == 0.09
    assert [row["name"].split()[0] for row in done["inputs"]] == ["2x3x32x32", "1x3x32x32"]
    said = rejected(folder, f"{prune} --atol 1e-9 --out never.safetensors")
    assert "NOT equal within 1e-09" in said
    assert "a smaller --tolerance, or a larger --atol" in said
    assert not (folder / "never.safetensors").exists()


FUSE = {
    "vit.safetensors --affine": dict(affine=True),
    "wide_vit.safetensors --affine": dict(affine=True),
    "wide_vit.safetensors --affine --no-across": dict(affine=True, across=False),
    "wide.safetensors --affine --no-norms": dict(affine=True, norms=False),
}


def test_fuse_merges_what_its_options_say(folder):
    merged = set()
    for line, options in FUSE.items():
        done = answer(folder, f"fuse {line} --overwrite --out fused.safetensors")["fuse"]
        model = iso.load(folder / line.split()[0])
        expected = asdict(fuse_with_report(model, random_inputs(1, model), **options)[1])
        for key in ("fused", "merged", "left", "across"):
            assert done[key] == json.loads(json.dumps(expected[key])), (line, key)
        merged.add(str((done["fused"], done["merged"], done["across"])))
    assert len(merged) == len(FUSE)


def test_recast_leaves_out_what_is_excluded_and_removes_strides_first(folder):
    line = "recast cnn.safetensors --where layer3.0.conv? --exclude layer3.0.conv1"
    done = answer(folder, f"{line} --unstride layer3 --out unstrided.safetensors")
    assert done["recast"] == ["layer3.0.conv2"]
    assert gated_layers(folder / "unstrided.safetensors") == ["layer3.0.conv2"]
    expected = iso.unstride(iso.load(folder / "cnn.safetensors"), "layer3").eval()
    model = iso.load(folder / "unstrided.safetensors").eval()
    assert iso.verify(expected, model, IMAGES).passed
    assert model.layer3[0].conv1.stride == (1, 1)


def test_revert_takes_the_layers_and_how_far_outputs_may_move(folder):
    answer(folder, "revert exact.safetensors --where layer3.0.conv2 --out half.safetensors")
    assert gated_layers(folder / "half.safetensors") == ["layer3.0.conv1"]
    revert = "revert inserted.safetensors --out cnn_again.safetensors"
    assert "the inserted block acts" in rejected(folder, revert)
    assert not (folder / "cnn_again.safetensors").exists()
    answer(folder, f"{revert} --atol 1")
    cnn, again = (iso.load(folder / f"{name}.safetensors").eval() for name in ("cnn", "cnn_again"))
    assert torch.equal(again(IMAGES), cnn(IMAGES))


def test_port_partial_saves_what_could_be_carried(folder):
    iso.save(vit(depth=2), folder / "deeper.safetensors")
    port = "port vit.safetensors deeper.safetensors --out ported.safetensors"
    assert "--partial saves the target with what could be carried" in rejected(folder, port)
    assert not (folder / "ported.safetensors").exists()
    assert not answer(folder, f"{port} --partial")["report"]["equal"]
    source, ported = (iso.load(folder / f"{name}.safetensors") for name in ("vit", "ported"))
    assert torch.equal(ported.patch_embed.proj.weight, source.patch_embed.proj.weight)
    assert len(ported.blocks) == 2


def test_verify_thorough_finds_what_ordinary_inputs_do_not_show(folder):
    verify = "verify nets:Plain nets:Clamped --size 8"
    assert answer(folder, verify)["passed"]
    run = isomorph(*verify.split(), "--thorough", folder=folder)
    assert run.returncode == 2
    assert "NOT equal" in run.stderr
