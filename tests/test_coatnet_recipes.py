"""Every run of the CoAtNet paper builds the network it names, under the column of Table 10 it belongs to."""

import pytest
import timm
import torch
import torch.nn.functional as F

import isomorph as iso
from isomorph.layers import LayerNormMBConv, MBConv, RelativeAttention
from isomorph.recipes import coatnet
from isomorph.training.build import build_model, data_config
from isomorph.training.loop import open_run, train_epoch
from isomorph.training.objectives import criterion
from isomorph.training.optim import build_optimizer, build_scheduler
from isomorph.training.parts import AugmentPart, OptimPart
from isomorph.training.recipe import check

TINY = dict(
    model=dict(
        name="coatnet_0", kwargs=dict(depths=[2, 1, 1, 1, 1], widths=[8, 8, 16, 16, 32], head_dim=8, img_size=32)
    ),
    data=dict(source="digits", size=[32, 32], fraction=0.1, batch_size=32),
    epochs=1,
)


@pytest.mark.parametrize("name", coatnet.RECIPES)
def test_is_built_as_the_table_says(name):
    recipe = iso.load_recipe(name)
    with torch.device("meta"):
        model = build_model(recipe.model, 1000, recipe.drop_path)
    kinds = [type(module) for module in model.modules()]
    assert (RelativeAttention in kinds) == ("placeblind" not in name and "c_c_c_c" not in name)
    assert (LayerNormMBConv in kinds) == ("layernorm" in name)
    assert (MBConv in kinds) == ("layernorm" not in name and "vit_rel" not in name)
    if MBConv in kinds:
        strided = [m for m in model.modules() if isinstance(m, MBConv) and m.depthwise.stride == (2, 2)]
        assert bool(strided) == ("strided" in name or name.startswith("coatnet_3_jft"))


def columns():
    for name in coatnet.RECIPES:
        if not name.startswith("cifar") and "layout" not in name:
            yield name, iso.load_recipe(name)


def test_table_10():
    for name, recipe in columns():
        tuned = recipe.data.size != [224, 224]
        assert recipe.optim.clip_grad == 1.0
        assert recipe.ema == (0.9999 if tuned else None)
        assert recipe.epochs == (30 if tuned else 150 if name.endswith("150ep") else 14 if "jft" in name else 90) or (
            recipe.epochs == 300 and "in21k" not in name
        )
        assert recipe.loss == ("sigmoid" if not tuned and ("in21k" in name or "jft" in name) else "softmax")
        assert recipe.data.batch_size == (4096 if not tuned else 1024 if "in21k" in name else 512)
        assert recipe.data.test_crop == ("whole" if tuned else "center")
        assert recipe.optim.schedule == ("constant" if tuned else "linear" if recipe.loss == "sigmoid" else "cosine")
        assert (recipe.augment.mixup > 0) == (not ("in21k" in name or "jft" in name))
        if "jft" in name:
            assert "not public" in recipe.expected


def test_every_row_of_tables_4_and_5_is_there():
    published = [recipe.expected.partition(" ")[0] for _, recipe in columns() if "Table" in recipe.source]
    table_4 = ["81.6", "83.3", "84.1", "84.5", "83.9", "85.1", "85.7", "85.8", "85.9", "86.0"]
    table_4 += ["87.1", "87.6", "87.9", "88.3", "88.4", "87.3", "87.9", "88.1", "88.4", "88.56"]
    table_5 = ["88.52", "88.81", "89.11", "89.77", "90.45", "90.88"]
    for top1 in {*table_4, *table_5}:
        assert published.count(top1) >= [*table_4, *table_5].count(top1), top1


class TestLoss:
    def test_sigmoids_sum_over_classes(self):
        torch.manual_seed(0)
        logits, labels = torch.randn(4, 7), torch.tensor([1, 0, 6, 3])
        loss = criterion(AugmentPart(), "sigmoid")
        hot = F.one_hot(labels, 7).float()
        wanted = -(hot * F.logsigmoid(logits) + (1 - hot) * F.logsigmoid(-logits)).sum(1).mean()
        torch.testing.assert_close(loss(logits, labels), wanted)
        soft = torch.rand(4, 7)
        wanted = -(soft * F.logsigmoid(logits) + (1 - soft) * F.logsigmoid(-logits)).sum(1).mean()
        torch.testing.assert_close(loss(logits, soft), wanted)

    @pytest.mark.parametrize("mixup", [0.0, 0.8])
    def test_trains(self, mixup, tmp_path):
        recipe = check({**TINY, "loss": "sigmoid", "augment": dict(mixup=mixup, smoothing=1e-4), "out": str(tmp_path)})
        found = iso.train(recipe, show=False).metrics
        assert 0 < found["loss"] < 20

    def test_token_labels_have_their_own(self):
        with pytest.raises(iso.UserError, match="leave loss at softmax"):
            check({**TINY, "loss": "sigmoid", "token_labels": {}})


def test_the_linear_schedule_is_a_line():
    optim = OptimPart(lr=1e-3, schedule="linear", min_lr=1e-5)
    optimizer = build_optimizer(torch.nn.Linear(2, 2), optim)
    scheduler = build_scheduler(optimizer, optim, epochs=10, steps_per_epoch=10)
    rates = []
    for step in range(100):
        scheduler.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    steps = torch.tensor(rates).diff()
    torch.testing.assert_close(steps, torch.full_like(steps, -(1e-3 - 1e-5) / 100), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize(("crop", "mode"), [("whole", "squash"), ("center", "center"), (None, "center")])
def test_what_of_a_test_image_is_seen(crop, mode):
    recipe = check({**TINY, "data": TINY["data"] | (dict(test_crop=crop) if crop else {})})
    config = data_config(recipe, timm.create_model("coatnet_0", **TINY["model"]["kwargs"]))
    assert config["crop_mode"] == mode
    assert config["crop_pct"] == (1.0 if crop == "whole" else 0.875)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["coatnet_0", "coatnet_0_384", "coatnet_2_in21k", "coatnet_layout_vit_rel", "coatnet_3_jft"]
)
def test_recipes_run_two_steps(name, tmp_path):
    """The paper's settings on networks of one block a stage."""
    small = dict(depths=[1, 1] if "vit_rel" in name else [2, 1, 1, 1, 1])
    small["widths"] = [32, 32] if "vit_rel" in name else [8, 8, 16, 32, 32]
    fields = [f"model.kwargs.{key}={value}" for key, value in small.items()]
    data = ["data.source=digits", "data.batch_size=20", "data.workers=0", "data.fraction=0.03", "data.size=[64,64]"]
    brief = ["epochs=1", "optim.warmup_epochs=0", f"out={tmp_path}"]
    run = open_run(iso.load_recipe(name, [*fields, *data, *brief]))
    assert len(run.train) == 2
    assert train_epoch(run, 0, lambda: None) > 0


def test_a_run_goes_on_to_a_larger_image(tmp_path):
    """Train small, then fine-tune at another size from its weights: tables are resized on the way."""
    first = check({**TINY, "out": str(tmp_path / "a")})
    iso.train(first, show=False)
    kwargs = TINY["model"]["kwargs"] | dict(img_size=64)
    weights = str(tmp_path / "a/model.safetensors")
    model = dict(name="coatnet_0", kwargs=kwargs, weights=weights)
    second = check({**TINY, "model": model, "data": TINY["data"] | dict(size=[64, 64]), "out": str(tmp_path / "b")})
    before = iso.load(weights)
    run = open_run(second)
    table = run.eval_model.stages[3][0].attn.relative_bias
    assert table.shape[1:] == (7, 7)
    torch.testing.assert_close(table[:, 3, 3], before.stages[3][0].attn.relative_bias[:, 1, 1])
