"""model.weights takes those of the model before its recast and those after it, and says which they were."""

import pytest
import timm
import torch

import isomorph as iso
from isomorph.training.build import build_model
from isomorph.training.recipe.model_fields import ModelPart
from isomorph.training.run.open import check_files
from tiny_runs import TINY, tiny

VIT = dict(name="vit_tiny_patch16_224", kwargs=dict(img_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=3))
CNN = dict(name="cifar_resnet20")
PARTS = {
    "ConvToGPSA": CNN | dict(recast=dict(where="layer3.2.conv?")),
    "drawn": CNN | dict(recast=dict(where="layer3.2.conv?", init="paper")),
    "unstride": CNN | dict(unstride="layer3"),
    "unstride and recast": CNN | dict(unstride="layer3", recast=dict(where="layer3.2.conv?")),
    "frozen": CNN | dict(recast=dict(where="layer3.2.conv?"), freeze=["*.gate"]),
    "AttentionToGPSA": VIT | dict(recast=dict(where="blocks.*.attn", rule="AttentionToGPSA")),
    "AttentionToRefined": VIT | dict(recast=dict(where="blocks.*.attn", rule="AttentionToRefined")),
    "LinearToPyramid": VIT | dict(recast=dict(where=["*.qkv", "*.fc?"], rule="LinearToPyramid")),
    "patch embedding": VIT | dict(recast=dict(where="patch_embed.proj", rule="LinearToPyramid")),
    "head": VIT | dict(recast=dict(where="head", rule="LinearToPyramid")),
    "no recast": CNN,
    "pyramids by birth": dict(VIT, name="tdrl_vit_ti"),
}


def trained(part, classes):
    """A model of the recipe as a run leaves it: no tensor is where it was at the start."""
    model = build_model(ModelPart(**part), classes)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("name", PARTS)
def test_weights_of_both_forms_are_taken(name, tmp_path):
    part, x = PARTS[name], torch.randn(2, 3, 32, 32)
    model = trained(part, 5).eval()
    iso.save(model, tmp_path / "after.safetensors")
    base = {key: value for key, value in part.items() if key in ("name", "kwargs")}
    iso.save(trained(base, 5).eval(), tmp_path / "before.safetensors")
    again = build_model(ModelPart(**part, weights=tmp_path / "after.safetensors"), 5).eval()
    assert iso.edits(again) == iso.edits(model)
    assert torch.equal(again(x), model(x))
    recast = "recast" in part
    assert ("(of the recast model)" in again.isomorph_record.start) == recast
    assert [n for n, p in again.named_parameters() if not p.requires_grad] == [
        n for n, p in model.named_parameters() if not p.requires_grad
    ]
    fresh = build_model(ModelPart(**part, weights=tmp_path / "before.safetensors"), 5).eval()
    assert iso.edits(fresh) == iso.edits(model)
    assert ("(of the model before its recast)" in fresh.isomorph_record.start) == recast
    other = build_model(ModelPart(**part, weights=tmp_path / "after.safetensors"), 3).eval()
    assert other(x).shape == (2, 3)
    assert "; new: " in other.isomorph_record.start
    heads = {"linear.weight", "linear.bias"} if part["name"].startswith("cifar") else {"head.weight", "head.bias"}
    if name != "head":
        assert set(other.isomorph_record.start.partition("; new: ")[2].split(", ")) == heads


def test_weights_of_neither_form_are_said_for_both(tmp_path):
    iso.save(trained(PARTS["AttentionToGPSA"], 5), path := tmp_path / "gated.safetensors")
    part = ModelPart(**PARTS["AttentionToRefined"], weights=path)
    with pytest.raises(iso.UserError, match=r"unexpected \(.*; nor does it fit the recast model: tensors") as caught:
        build_model(part, 5)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count(str(path)) == 1


def test_a_late_recast_wants_weights_of_before_it(tmp_path):
    part = PARTS["ConvToGPSA"] | dict(recast_epoch=2)
    iso.save(trained(PARTS["ConvToGPSA"], 5), tmp_path / "after.safetensors")
    iso.save(timm.create_model("cifar_resnet20", num_classes=5), tmp_path / "before.safetensors")
    model = build_model(ModelPart(**part, weights=tmp_path / "before.safetensors"), 5, recast_now=False)
    assert not iso.edits(model)
    assert "before its recast" in model.isomorph_record.start
    with pytest.raises(
        iso.UserError, match=r"is recast already, but model.recast_epoch is 2; set model.recast_epoch to"
    ):
        build_model(ModelPart(**part, weights=tmp_path / "after.safetensors"), 5, recast_now=False)


def test_a_run_trains_on_from_its_own_weights(ended, tmp_path, capsys):
    folder, first = ended
    path, model = folder / "model.safetensors", TINY["model"]
    iso.train(tiny(tmp_path / "on", model=model | dict(weights=str(path)), epochs=1), show=True)
    printed = capsys.readouterr().out
    assert f"tensors from {path} (of the recast model), whose gates and other start values replace" in printed
    assert iso.edits(iso.load(tmp_path / "on/model.safetensors")) == iso.edits(first.model)
    with pytest.raises(iso.UserError, match=r"model.weights: .* is a folder; .*model.safetensors"):
        check_files(tiny(tmp_path, model=model | dict(weights=str(folder))))
