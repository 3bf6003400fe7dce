"""TDRL's recipes: fine-tuning as in MAE and G2SD, BatchNorm alone, MobileOne's growing images and falling decay."""

import math
from pathlib import Path

import pytest
import timm
import torch
from timm.layers import DropPath
from torch import nn

import isomorph as iso
from isomorph.lab.recipes import RECIPES
from isomorph.lab.training.build import build_model
from isomorph.lab.training.optim import (
    build_optimizer,
    learning_rate_scales,
    set_weight_decay,
)
from isomorph.lab.training.recipe.model_fields import ModelPart
from isomorph.lab.training.recipe.recipe import validate
from isomorph.lab.training.run.loop import train_step
from isomorph.lab.training.run.state import Run
from isomorph.models.masked_autoencoder import MaskedAutoencoder
from refusals import refused
from tiny_runs import tiny

SMALL = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)
FINE_TUNED = [
    name for name in RECIPES if name.startswith("tdrl_") and "ep" in name.rpartition("_")[2]
]
FINE_TUNED += [
    name for name in RECIPES if name.startswith("tdrl_") and name.endswith("ep_distilled")
]


@pytest.mark.parametrize("name", FINE_TUNED)
def test_fine_tuning_averages_over_patches_unless_it_distils(name):
    recipe = iso.load_recipe(name)
    assert (recipe.model.kwargs.get("global_pool") == "avg") == (recipe.distill is None)
    assert recipe.model.head_std == 2e-5
    assert recipe.model.start == "weights"


def pretrained(path, **kwargs):
    """An encoder of masked pre-training, whose last norm was trained on all tokens."""
    encoder = timm.create_model("tdrl_vit_ti", num_classes=10, **SMALL, **kwargs)
    MaskedAutoencoder(encoder, depth=1, width=16, heads=2)
    nn.init.normal_(encoder.norm.weight)
    iso.save(encoder, path)
    return encoder


@pytest.mark.parametrize("layout", ["plain", "P-W2S"])
@pytest.mark.parametrize("source", ["own", "plain ViT"])
def test_pre_trained_weights_load_into_an_averaging_network(layout, source, tmp_path):
    """The norm after pooling is new, as in MAE's fine-tuning, and all other tensors are the checkpoint's."""
    path = tmp_path / "encoder.safetensors"
    if source == "own":
        encoder = pretrained(path, layout=layout)
    else:
        encoder = timm.create_model("vit_tiny_patch16_224", num_classes=10, **SMALL)
        path = tmp_path / "encoder.pth"
        torch.save(encoder.state_dict(), path)
    kwargs = SMALL | dict(layout=layout, global_pool="avg")
    model = build_model(
        ModelPart(name="tdrl_vit_ti", weights=path, kwargs=kwargs, head_std=2e-5), 7
    )
    assert isinstance(model.norm, nn.Identity)
    assert torch.equal(model.fc_norm.weight, torch.ones(24))
    assert torch.equal(model.blocks[1].norm2.weight, encoder.blocks[1].norm2.weight)
    assert 1e-5 < model.head.weight.std() < 3e-5
    x = torch.randn(2, 3, 32, 32)
    tokens = model.eval().forward_features(x)
    pooled = model.fc_norm(tokens[:, 1:].mean(1))
    torch.testing.assert_close(model(x), model.head(pooled))


def test_a_trained_classifier_is_kept_and_a_new_one_starts_as_told(tmp_path):
    path = tmp_path / "tuned.safetensors"
    tuned = timm.create_model("tdrl_vit_ti", num_classes=7, global_pool="avg", **SMALL)
    iso.save(tuned, path)
    kwargs = SMALL | dict(global_pool="avg")
    for classes in (7, 5):
        part = ModelPart(name="tdrl_vit_ti", weights=path, kwargs=kwargs, head_std=2e-5)
        head = build_model(part, classes).head
        assert torch.equal(head.weight, tuned.head.weight) == (classes == 7)
        assert (head.weight.std() < 3e-5) == (classes == 5)
    distilled = build_model(ModelPart(name="tdrl_vit_ti_distilled", kwargs=SMALL, head_std=2e-5), 7)
    assert max(head.weight.std() for head in distilled.get_classifier()) < 3e-5
    refused("head_std", build_model, ModelPart(weights=path, head_std=2e-5), 7)


def test_batch_norm_alone_is_pre_trained_as_it_is_fine_tuned():
    """B.9: one Linear and BatchNorm in queries, keys, values and both layers of the MLP, from pre-training on."""
    before = iso.load_recipe("tdrl_batchnorm_g2sd").model.kwargs
    after = iso.load_recipe("upernet_batchnorm_ti").model.kwargs["backbone_kwargs"]
    assert {key: after[key] for key in ("layout", "rectify")} == {
        key: before[key] for key in ("layout", "rectify")
    }
    model = timm.create_model(
        "tdrl_vit_ti", layout=before["layout"], rectify=before["rectify"], **SMALL
    )
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm1d)]
    assert len(norms) == 2 * 5


def test_images_grow_and_weight_decay_falls():
    recipe = iso.load_recipe("tdrl_mobileone_s0")
    sides = {epoch: recipe.augment.side_at(epoch) for epoch in (0, 36.9, 37, 111, 112, 299)}
    assert sides == {0: 160, 36.9: 160, 37: 192, 111: 192, 112: None, 299: None}
    optimizer = build_optimizer(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), recipe.optim)
    for progress in (0.0, 0.25, 1.0):
        set_weight_decay(optimizer, recipe.optim, progress)
        decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
        wanted = 1e-5 + (1e-4 - 1e-5) * (1 + math.cos(math.pi * progress)) / 2
        assert decays == {"decayed": pytest.approx(wanted), "undecayed": 0.0}
    shorter = iso.load_recipe("tdrl_mobileone_s0", ["epochs=30"])
    assert shorter.augment.small_epochs == [3.7, 11.2]
    refused("as many small_epochs", iso.load_recipe, "digits_cnn", ["augment.small_sizes=[8]"])
    refused(
        "min_weight_decay 1 is above", iso.load_recipe, "digits_cnn", ["optim.min_weight_decay=1"]
    )


def test_the_network_sees_the_smaller_images(tmp_path):
    changes = [
        "augment.small_sizes=[12]",
        "augment.small_epochs=[1]",
        "optim.min_weight_decay=0.01",
    ]
    changes += ["data.batch_size=8", "data.fraction=0.02", "epochs=2", f"out={tmp_path / 'run'}"]
    run = Run(iso.load_recipe("digits_cnn", changes))
    seen = []
    run.trained.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[-1]))
    decays = []
    for _ in range(run.iterations):
        train_step(run)
        decays.append(run.optimizer.param_groups[0]["weight_decay"])
        run.progress.step += 1
    half = run.order.steps
    assert seen == [12] * half + [24] * half
    assert decays == sorted(decays, reverse=True)
    assert decays[0] == 0.05


def test_a_public_classifier_is_kept_and_a_new_one_starts_as_told(monkeypatch):
    def create(name, pretrained=False, **arguments):
        return timm.create_model(name, **arguments)  # as if its weights were there

    monkeypatch.setattr("isomorph.lab.training.build.create", create)
    part = ModelPart(name="cifar_resnet20", pretrained=True, head_std=2e-5)
    assert build_model(part, 10).linear.weight.std() > 1e-2
    assert build_model(part, 7).linear.weight.std() < 3e-5


def test_the_classifier_starts_as_told_after_maes_rule():
    part = ModelPart(name="tdrl_vit_ti", kwargs=SMALL, weight_init="mae", head_std=2e-5)
    assert build_model(part, 7).head.weight.std() < 3e-5


def test_smaller_images_are_tried_before_the_run(tmp_path):
    kwargs = dict(img_size=16, patch_size=4, depth=1, embed_dim=12, num_heads=2)
    vit = dict(name="vit_tiny_patch16_224", kwargs=kwargs)
    small = dict(small_sizes=[12], small_epochs=[1])
    refused("augment.small_sizes", Run, tiny(tmp_path, model=vit, augment=small))


@pytest.mark.parametrize("name", ["tdrl_vit_ti", "tdrl_vit_ti_distilled"])
def test_the_last_norm_has_the_rate_of_the_head(name):
    scales = learning_rate_scales(timm.create_model(name, **SMALL), 0.5)
    assert scales["norm.weight"] == scales["head.weight"] == 1
    assert scales["blocks.1.norm2.weight"] == 0.5


def test_pre_training_leaves_no_classifier_to_its_fine_tuning(tmp_path):
    """The classifier of fine-tuning is drawn near zero also where both have the same classes."""
    kwargs = {key: value for key, value in SMALL.items() if key != "num_classes"}
    data = dict(source="digits", fraction=0.1, test_images=20, size=[32, 32], batch_size=32)
    values = dict(data=data, epochs=1, out=str(tmp_path / "pre"), device="cpu")
    mask = dict(depth=1, width=16, heads=2)
    iso.train(validate(values | dict(model=dict(name="tdrl_vit_ti", kwargs=kwargs), mask=mask)))
    weights = tmp_path / "pre/model.safetensors"
    assert not [name for name in iso.load(weights).state_dict() if name.startswith("head")]
    part = ModelPart(name="tdrl_vit_ti", weights=weights, kwargs=kwargs, head_std=2e-5)
    assert build_model(part, 10).head.weight.std() < 3e-5


def test_drop_path_is_that_of_the_run_and_not_of_its_weights(tmp_path):
    weights = tmp_path / "trained.safetensors"
    iso.save(timm.create_model("tdrl_vit_ti", num_classes=10, drop_path_rate=0.3, **SMALL), weights)
    for rate in (0.0, 0.1):
        model = build_model(ModelPart(weights=weights), 10, rate)
        rates = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
        assert max(rates, default=0.0) == pytest.approx(rate)


@pytest.mark.parametrize("name", ["upernet_tdrl_ti_distilled", "vitdet_plain_ti_distilled"])
def test_a_distilled_task_needs_its_teacher(name, tmp_path):
    weights = tmp_path / "w.safetensors"
    weights.touch()
    given = [f"model.weights={weights}", f"out={tmp_path / 'run'}", "device=cpu"]
    teacher = iso.load_recipe(name).task.task.options.teacher
    assert Path(teacher).parts[1] in RECIPES
    words = f"task.teacher: {teacher} does not exist; if .* creates it"
    refused(words, Run, iso.load_recipe(name, given))


def test_smaller_images_are_tried_on_the_teacher(tmp_path):
    kwargs = dict(img_size=16, patch_size=4, depth=1, embed_dim=12, num_heads=2, num_classes=10)
    path = tmp_path / "teacher.safetensors"
    iso.save(timm.create_model("vit_tiny_patch16_224", **kwargs), path)
    small = dict(small_sizes=[12], small_epochs=[1])
    recipe = tiny(tmp_path / "run", augment=small, distill=dict(teacher=str(path)))
    refused("the teacher, with augment.small_sizes", Run, recipe)
