"""Models that are compiled, distributed or averaged: surgery, files and measurements take the model inside."""

import copy

import pytest
import timm
import torch
import torch.nn.utils.prune
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import isomorph as iso
from isomorph.surgery import fusible_modules

VIT = dict(img_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=3, num_classes=5)
NOTE = "the model was compiled and its copy is not: compile the copy"
RULES = {
    "AttentionToGPSA": (iso.AttentionToGPSA(), "blocks.*.attn"),
    "AttentionToRefined": (iso.AttentionToRefined(span="spatial"), "blocks.*.attn"),
    "LinearToPyramid": (iso.LinearToPyramid(), ["blocks.*.attn.qkv", "blocks.*.mlp.fc?"]),
    "ConvToGPSA": (iso.ConvToGPSA(), "layer3.*.conv2"),
}


def plain(name):
    if name == "ConvToGPSA":
        return timm.create_model("cifar_resnet20", depth=8).eval()
    return timm.create_model("vit_tiny_patch16_224", **VIT).eval()


def parts_of(model):
    return model.blocks if hasattr(model, "blocks") else model.layer3


def in_place(model):
    model.compile()
    return model


def in_parts(wrap):
    def wrapped(model):
        parts = parts_of(model)
        for i, part in enumerate(parts):
            parts[i] = wrap(part)
        return model

    return wrapped


COMPILED = {  # nothing is compiled before it is called
    "whole": torch.compile,
    "in place": in_place,
    "parts": in_parts(torch.compile),
    "both": lambda model: torch.compile(in_parts(torch.compile)(model)),
}
WRAPPED = COMPILED | {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": DistributedDataParallel,
    "DistributedDataParallel, compiled": lambda model: DistributedDataParallel(
        torch.compile(model)
    ),
    "AveragedModel": lambda model: AveragedModel(nn.DataParallel(model)),
    "ModelEmaV3": ModelEmaV3,
}

SURGERY = {
    "absorb": lambda cnn: iso.absorb(cnn, mean=(0.5,) * 3, std=(0.25,) * 3),
    "fuse": lambda cnn: iso.fuse(cnn, norms=False),
    "insert": lambda cnn: iso.insert(cnn, iso.layers.MapAttention, after="layer3"),
    "recalibrate": lambda cnn: iso.recalibrate(cnn, torch.randn(8, 3, 32, 32)),
    "unstride": lambda cnn: iso.unstride(cnn, where="layer3"),
}

SOURCE = iso.data.open_source("digits", "test").subset(range(8))


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("how", WRAPPED)
def test_surgery_takes_the_model_inside(how):
    for name in RULES if how == "both" else ["LinearToPyramid"]:
        (rule, where), model, x = RULES[name], plain(name), torch.randn(1, 3, 32, 32)
        wanted = iso.recast(model, rule, where)
        given = WRAPPED[how](model)
        noted = (NOTE,) * ("ompiled" in how or how in COMPILED)
        assert iso.targets(given, rule, where) == list(iso.edits(wanted)[0].names)
        new = iso.recast(given, rule, where)
        assert [n for n, _ in new.named_modules()] == [n for n, _ in wanted.named_modules()]
        assert iso.edits(new) == iso.edits(wanted)
        assert iso.surgery.notes(new) == noted
        assert iso.verify(given, new, x).notes[: len(noted)] == noted
        pyramids = name == "LinearToPyramid"
        assert bool(fusible_modules(WRAPPED[how](new))) == pyramids
        back = (iso.fuse if pyramids else iso.revert)(torch.compile(new))
        assert iso.surgery.notes(back) == (NOTE,)
        iso.verify(given, back, x)


@pytest.mark.parametrize("name", SURGERY)
def test_all_surgery_says_that_its_copy_is_not_compiled(name):
    assert NOTE in iso.surgery.notes(SURGERY[name](torch.compile(plain("ConvToGPSA"))))


@pytest.mark.parametrize("how", [how for how in WRAPPED if how not in ("parts", "both")])
def test_files_and_measurements_are_those_of_the_model_inside(how, tmp_path):
    model = plain("ConvToGPSA")
    x = torch.randn(2, 3, 32, 32)
    tcnn = iso.recast(model, iso.ConvToGPSA(), "layer3.0.conv2").eval()
    y = tcnn(x)
    wrapped = WRAPPED[how](copy.deepcopy(tcnn))
    iso.save(wrapped, tmp_path / "m.safetensors")
    loaded = iso.load(tmp_path / "m.safetensors")
    assert iso.edits(loaded) == iso.edits(tcnn)
    assert torch.equal(loaded(x), y)
    if "parts" not in how:
        other = WRAPPED[how](plain("ConvToGPSA"))
        iso.save(model, tmp_path / "n.safetensors")
        iso.load_weights(other, tmp_path / "n.safetensors")
        assert iso.verify(other, model, x).fp32 == 0
    if how in ("whole", "AveragedModel"):
        assert iso.export(wrapped, tmp_path / "m.pt2", size=(32, 32)).deviation.passed
    if how != "in place":  # it is compiled when it runs
        assert iso.evaluate(wrapped, SOURCE) == iso.evaluate(tcnn, SOURCE)


def test_names_of_branches_and_windows_are_those_without_wrappers():
    cnn = timm.create_model("cifar_resnet20")
    wide = iso.recast(cnn, iso.LinearToPyramid("P-W2S", init="paper"), where="linear")
    x = torch.randn(2, 3, 32, 32)
    assert list(iso.analysis.branch_similarity(torch.compile(wide), x)) == ["linear"]
    small = dict(img_size=56, embed_dim=12, depths=(2,), num_heads=(2,))
    swin = timm.create_model("swin_tiny_patch4_window7_224", **small)
    x = torch.randn(1, 3, 56, 56)
    plain = iso.analysis.attention_windows(swin, x)
    assert list(iso.analysis.attention_windows(torch.compile(swin), x)) == list(plain)
