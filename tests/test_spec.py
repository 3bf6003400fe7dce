"""What a model says of itself: recorded when it is created, changed with it, and enough to build it again."""

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from isomorph.checkpoints.model import describe_base
from isomorph.spec import ModelSpec, record_config, spec_of
from refusals import refused


def test_a_model_says_what_it_was_created_with_and_what_it_is_now():
    model = iso.models.create("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=7)
    assert {"img_size": (32, 32), "depth": 2, "num_classes": 7}.items() <= describe_base(
        model
    ).items()
    model.reset_classifier(3, "avg")
    base = describe_base(model)
    assert base["name"] == "vit_tiny_patch16_224"
    assert base["num_classes"] == 3
    assert base["global_pool"] == "avg"
    spec = spec_of(model)
    assert spec.name == "vit_tiny_patch16_224"
    assert spec.arguments["depth"] == 2
    assert spec.classifiers == ("head",)
    assert spec.first_layers == ("patch_embed.proj",)


def test_an_own_network_says_nothing_of_itself_until_it_is_recorded():
    model = nn.Linear(2, 2)
    assert spec_of(model) == ModelSpec()
    refused("Linear does not come from timm.create_model", describe_base, model)
    record_config(model, {"input_size": [1, 8, 8], "label_names": ("a", "b")})
    assert spec_of(model).input_size == (1, 8, 8)
    assert spec_of(model).classes == ["a", "b"]
    assert model.default_cfg == model.pretrained_cfg


@pytest.mark.parametrize("change", ["nothing", "classes", "size", "pyramid", "fused"])
def test_a_changed_model_is_built_again_from_what_is_recorded(change, tmp_path):
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=1, num_classes=4, dynamic_img_size=True
    ).eval()
    if change == "classes":
        model.reset_classifier(2)
    elif change == "size":
        model.set_input_size(img_size=(48, 32))
    elif change in ("pyramid", "fused"):
        model = iso.recast(model, iso.LinearToPyramid(), where="blocks.0.mlp.fc1")
    if change == "fused":
        model = iso.fuse(model)
    iso.save(model, tmp_path / "m.safetensors")
    back = iso.load(tmp_path / "m.safetensors")
    images = torch.randn(1, 3, *((48, 32) if change == "size" else (32, 32)))
    assert torch.equal(back(images), model.eval()(images))
    assert len(iso.edits(back)) == (change == "pyramid"), (
        "a fused network is saved as the plain one that it is"
    )
