"""Recipes say what the papers and their code say, and nothing that a library would quietly change."""

import inspect
import json
import math
import re
from pathlib import Path

import pytest
import torch
from timm.data import create_transform
from torch import nn

import isomorph as iso
from isomorph.models import refined_vit
from isomorph.models.refined_vit import RefinedViT
from isomorph.recipes import RECIPES, refiner
from isomorph.training.build import build_model, data_config
from isomorph.training.optim import build_optimizer, build_scheduler
from isomorph.training.recipe.fields import OptimPart, magnitudes
from isomorph.training.recipe.recipe import add_defaults, changed_fields, identity_json


class TestPolicies:
    @pytest.mark.parametrize(
        ("policy", "said"),
        [
            ("rand-m15-n2", "timm clamps the magnitude 15 to 10; add -mmax15 to have it, or write m10"),
            ("rand-mstd0.5-n2-m11", "timm clamps the magnitude 11 to 10; add -mmax11"),
            ("rand-m9-mmax5", "timm clamps the magnitude 9 to 5; add -mmax9 to have it, or write m5"),
            ("augmix-m12-w3", "timm clamps the magnitude 12 to 10; write m10"),
        ],
    )
    def test_a_clamped_policy_is_rejected_with_the_fix(self, policy, said):
        with pytest.raises(iso.UserError, match=said) as caught:
            iso.load_recipe("cifar_cnn", [f"augment.auto_augment={policy}"])
        assert "augment.auto_augment" in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("policy", ["rand-m10-mstd0.5-inc1", "rand-m15-n2-mmax15", "augmix-m10", "original", "3a"])
    def test_others_are_taken_as_they_are(self, policy):
        assert iso.load_recipe("cifar_cnn", [f"augment.auto_augment={policy}"]).augment.auto_augment == policy

    @pytest.mark.parametrize(
        ("name", "magnitude", "degrees"), [("coatnet_2_384", 15, 45.0), ("coatnet_3_512", 20, 60.0)]
    )
    def test_coatnet_rotates_as_far_as_google_does(self, name, magnitude, degrees):
        policy = iso.load_recipe(name).augment.auto_augment
        transform = create_transform(32, is_training=True, auto_augment=policy)
        assert set(magnitudes(transform)) == {(magnitude, 30)}
        (operations,) = [step for step in transform.transforms if hasattr(step, "ops")]
        assert operations.num_layers == 2
        assert {operation.prob for operation in operations.ops} == {1.0}
        (rotate,) = [operation for operation in operations.ops if operation.name == "Rotate"]
        seen = []
        rotate.aug_fn = lambda image, angle, **_: seen.append(abs(angle))
        rotate(None)
        assert seen == [degrees]


def rates(optim, epochs, steps):
    """The learning rate of every step."""
    optimizer = build_optimizer(nn.Linear(2, 2), optim)
    scheduler = build_scheduler(optimizer, optim, epochs, steps)
    found = []
    for step in range(epochs * steps):
        scheduler.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


class TestSchedules:
    @pytest.mark.parametrize("warmup", [0, 1, 2.5, 20])
    @pytest.mark.parametrize(
        ("schedule", "shape"), [("cosine", lambda t: (1 + math.cos(math.pi * t)) / 2), ("linear", lambda t: 1 - t)]
    )
    def test_the_rate_falls_from_the_peak_when_the_warm_up_ends(self, schedule, shape, warmup):
        """MAE's formula: min + (peak - min) (1 + cos(pi (epoch - warm-up) / (epochs - warm-up))) / 2."""
        optim = OptimPart(lr=1e-3, min_lr=1e-5, schedule=schedule, warmup_epochs=warmup)
        found = rates(optim, 50, 8)
        for step, rate in enumerate(found):
            epoch = step / 8
            if epoch < warmup:
                wanted = 1e-5 + (1e-3 - 1e-5) * epoch / warmup
            else:
                wanted = 1e-5 + (1e-3 - 1e-5) * shape((epoch - warmup) / (50 - warmup))
            assert rate == pytest.approx(wanted, rel=1e-9)
        assert max(found) == pytest.approx(1e-3, rel=1e-9)

    @pytest.mark.parametrize(
        ("schedule", "shape"), [("cosine", lambda t: (1 + math.cos(math.pi * t)) / 2), ("linear", lambda t: 1 - t)]
    )
    def test_from_the_start_it_runs_underneath_the_warm_up(self, schedule, shape):
        optim = OptimPart(lr=1e-3, min_lr=1e-5, schedule=schedule, warmup_epochs=5, schedule_from="start")
        for step, rate in enumerate(rates(optim, 50, 8)):
            under = 1e-5 + (1e-3 - 1e-5) * shape(step / 400)
            assert rate == pytest.approx(1e-5 + (1e-3 - 1e-5) * step / 40 if step < 40 else under, rel=1e-9)

    def test_constant_stays_at_the_peak(self):
        for beginning in ("peak", "start"):
            optim = OptimPart(lr=1e-3, schedule="constant", warmup_epochs=1, schedule_from=beginning)
            assert rates(optim, 3, 8)[8:] == pytest.approx([1e-3] * 16)

    @pytest.mark.parametrize(
        ("name", "beginning"),
        [
            ("tdrl_vit_ti_100ep", "peak"),  # MAE's and G2SD's code
            ("tdrl_vit_ti_g2sd", "peak"),
            ("tdrl_swin_t", "peak"),  # Swin's code
            ("tdrl_deit_b", "start"),  # DeiT's
            ("coatnet_0", "peak"),  # "peak learning rate"
            ("coatnet_3_in21k", "peak"),
            ("convit_s", "start"),  # timm's default, by DeiT's code
            ("deit_s_10pct", "start"),
            ("tcnn_resnetrs50", "start"),
            ("tcnn_late_100", "start"),
            ("refined_vit_s", "start"),
            ("refined_vit_s_released", "start"),
            ("refined_vit_l_448", "start"),
        ],
    )
    def test_each_family_has_its_own_code_s(self, name, beginning):
        assert iso.load_recipe(name).optim.schedule_from == beginning

    LATER = ("digits_vit", "digits_convit")

    @pytest.mark.parametrize("name", sorted({n for n in RECIPES if n.startswith(("cifar_", "digits_"))} - {*LATER}))
    def test_studies_stay_what_was_run(self, name):
        """Their figures in the docs were made with a schedule from the first step; those of later ones were not."""
        assert iso.load_recipe(name).optim.schedule_from == "start"

    def test_a_run_begun_before_goes_on_as_it_was_begun(self):
        new = iso.load_recipe("coatnet_0")
        kept = json.loads(identity_json(new))
        kept["augment"]["auto_augment"] = "rand-m15-n2"
        del kept["optim"]["schedule_from"]
        assert changed_fields(add_defaults(kept), json.loads(identity_json(new))) == [
            "augment.auto_augment was rand-m10-n2, is now rand-m15-n2-p1.0-mmax30",
            "optim.schedule_from was start, is now peak",
        ]
        same = iso.load_recipe("coatnet_0", ["augment.auto_augment=rand-m10-n2", "optim.schedule_from=start"])
        assert not changed_fields(add_defaults(kept), json.loads(identity_json(same)))


class TestBetas:
    def test_reach_the_optimiser(self):
        optimizer = build_optimizer(nn.Linear(2, 2), OptimPart(betas=(0.9, 0.95)))
        assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}
        optimizer = build_optimizer(nn.Linear(2, 2), OptimPart())
        assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.999)}

    @pytest.mark.parametrize("name", ["sgd", "adan", "rmsprop"])
    def test_others_have_none(self, name):
        with pytest.raises(iso.UserError, match=f"optim: {name} does not have two betas"):
            iso.load_recipe("cifar_cnn", [f"optim.name={name}", "optim.betas=[0.9,0.95]"])

    @pytest.mark.parametrize("betas", ["[0.9]", "[0.9,1.0]", "0.9", "[0.9,0.95,0.99]"])
    def test_are_two_numbers_below_one(self, betas):
        with pytest.raises(iso.UserError, match=r"optim\.betas"):
            iso.load_recipe("cifar_cnn", [f"optim.betas={betas}"])


class TestTDRL:
    """The settings of MAE, G2SD and Swin, which the paper follows (Tables 3, 4, A.1, A.4)."""

    def test_pre_training_is_g2sd_s(self):
        optim = iso.load_recipe("tdrl_vit_ti_g2sd").optim
        assert (optim.lr, optim.betas, optim.warmup_epochs) == (2.4e-3, (0.9, 0.95), 10)
        assert (optim.min_lr, optim.clip_grad, optim.weight_decay) == (2.5e-6, 3.0, 0.05)

    @pytest.mark.parametrize("name", ["tdrl_vit_s_100ep", "tdrl_plain_s_100ep"])
    def test_vit_s_is_fine_tuned_as_mae(self, name):
        recipe = iso.load_recipe(name)
        assert recipe.optim.lr == 5e-4 * recipe.data.batch_size / 256
        assert (recipe.optim.layer_decay, recipe.drop_path, recipe.optim.warmup_epochs) == (0.65, 0.1, 5)

    @pytest.mark.parametrize("name", ["tdrl_swin_t", "tdrl_plain_swin_t"])
    def test_swin_is_trained_as_swin(self, name):
        optim = iso.load_recipe(name).optim
        assert (optim.warmup_epochs, optim.clip_grad, optim.lr, optim.min_lr) == (20, 5.0, 1e-3, 1e-5)


def crop_of(name):
    """Mode and share of a recipe's test crop."""
    recipe = iso.load_recipe(name, ["model.pretrained=false"])
    with torch.device("meta"):
        config = data_config(recipe, build_model(recipe.model, 1000, 0.0))
    return config["crop_mode"], config["crop_pct"]


class TestCrops:
    @pytest.mark.parametrize(
        ("first", "second", "wanted"),
        [
            ("convit_s_10pct", "deit_s_10pct", 0.875),
            ("convit_s_plus", "vit_s_plus", 0.875),
            ("refined_vit_s", "refined_vit_s_released", 0.9),
            ("refined_vit_m", "refined_vit_m_released", 1.0),
            ("refined_vit_l", "refined_vit_l_released", 1.0),
            ("refined_vit_l_384", "refined_vit_l_released_384", 1.0),
            ("refined_vit_l_448", "refined_vit_l_released_448", 1.0),
            ("refiner_vit_16b", "refiner_vit_16b_dla", 0.9),
            ("refiner_b_deit", "refiner_plain_b_deit", 0.9),
        ],
    )
    def test_are_equal_where_networks_are_compared(self, first, second, wanted):
        assert crop_of(first) == crop_of(second) == ("center", wanted)

    @pytest.mark.parametrize("name", [name for name in refiner.RECIPES if not name.startswith("cifar_")])
    def test_no_row_is_calibrated(self, name):
        """Sections 4.2 and 4.3 apply no receptive-field calibration: no crop beyond the image."""
        assert iso.load_recipe(name).data.crop_pct <= 1

    def test_the_middle_or_the_whole(self):
        with pytest.raises(
            iso.UserError, match="data: crop_pct sets the centre crop, and test_crop whole does not crop"
        ):
            iso.load_recipe("cifar_cnn", ["data.crop_pct=0.9", "data.test_crop=whole"])
        with pytest.raises(iso.UserError, match=r"data\.crop_pct"):
            iso.load_recipe("cifar_cnn", ["data.crop_pct=1.13"])


def form_of(recipe):
    """Everything that decides what a Refined-ViT's run computes, arguments left at their defaults included."""
    values = json.loads(identity_json(recipe))
    defaults = {name: p.default for name, p in inspect.signature(RefinedViT).parameters.items() if name != "kwargs"}
    model = values["model"]
    model["kwargs"] = defaults | getattr(refined_vit.VARIANTS.get(model["name"]), "arguments", {}) | model["kwargs"]
    del values["name"]
    return json.dumps(values, sort_keys=True)


class TestRefiner:
    def test_one_run_has_one_expected_number(self):
        """Two names may be one run (a row of two tables), but not with two numbers further apart than rounding."""
        runs = {}
        for name in refiner.RECIPES:
            recipe = iso.load_recipe(name)
            runs.setdefault(form_of(recipe), {})[name] = recipe.expected.partition(" ")[0]
        for names in runs.values():
            numbers = [float(number) for number in names.values() if number.replace(".", "").isdigit()]
            assert not numbers or max(numbers) - min(numbers) < 0.06, names

    @pytest.mark.parametrize("name", ["refined_vit_s_384", "refined_vit_l_448", "refined_vit_m_released_384"])
    def test_fine_tuning_is_deit_s(self, name):
        recipe = iso.load_recipe(name)
        assert (recipe.optim.lr, recipe.optim.min_lr, recipe.optim.weight_decay) == (5e-6, 5e-6, 1e-8)
        assert (recipe.epochs, recipe.data.batch_size, recipe.augment.repeats) == (30, 512, 3)
        assert (recipe.augment.mixup, recipe.augment.cutmix) == (0.8, 1.0)

    def test_the_numbers_of_cait_are_not_expected_here(self):
        assert iso.load_recipe("refiner_plain_heads_8").expected == "not published; CaiT has 79.9 by its own training"

    @pytest.mark.parametrize(("letter", "with_maps", "without"), [("s", 0.2, 0.1), ("m", 0.25, 0.2), ("l", 0.25, 0.2)])
    def test_as_released_is_what_the_scripts_say(self, letter, with_maps, without):
        for name, drop_path, pairs in (("released", with_maps, 12), ("released_image_labels", without, 2)):
            recipe = iso.load_recipe(f"refined_vit_{letter}_{name}")
            assert (recipe.augment.mixup, recipe.augment.cutmix, recipe.augment.repeats) == (0.8, 1.0, 1)
            assert (recipe.optim.lr, recipe.drop_path, recipe.ema) == (5e-4, drop_path, 0.99996)
            assert (recipe.map_similarity.weight, recipe.map_similarity.pairs) == (0.1, pairs)
            assert bool(recipe.token_labels) == recipe.model.kwargs.get("dense_head", True) == (pairs == 12)


def test_the_page_names_recipes_that_exist():
    text = (Path(__file__).parent.parent / "docs/recipes.md").read_text()
    named = set(re.findall(r"`((?:tcnn|finetune|convit|vit|deit|tdrl|coatnet|refiner|refined_vit)_[a-z0-9_]+)`", text))
    assert len(named) > 25
    assert named <= RECIPES.keys()
