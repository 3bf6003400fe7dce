"""Short runs of long recipes: schedules in proportion, a few test images."""

import pytest

import isomorph as iso
from isomorph.recipes import RECIPES
from isomorph.training.build import open_sources
from isomorph.training.optim import parameter_groups


def test_fewer_epochs_shorten_the_schedules():
    recipe = iso.load_recipe("digits_annealed", ["epochs=1"])
    assert (recipe.optim.warmup_epochs, recipe.anneal.epochs) == (pytest.approx(1 / 6, abs=1e-4), 0.5)
    assert recipe.shortened == "1 of 3 epochs, so optim.warmup_epochs 0.5 -> 0.1667, anneal.epochs 1.5 -> 0.5"


def test_whole_epochs_are_rounded_and_evaluation_stays_possible():
    recipe = iso.load_recipe("cifar_late_5", ["epochs=4"])
    assert (recipe.model.recast_epoch, recipe.evaluate_every, recipe.optim.warmup_epochs) == (2, 2, 0.2)
    assert iso.load_recipe("cifar_late_5", ["epochs=1"]).evaluate_every == 1


def test_given_values_stay():
    given = ["epochs=1", "optim.warmup-epochs=0.25", "anneal={epochs: 1, start: [20, 15]}"]
    recipe = iso.load_recipe("digits_annealed", given)
    assert (recipe.optim.warmup_epochs, recipe.anneal.epochs, recipe.shortened) == (0.25, 1, "")


def test_as_many_or_more_epochs_change_nothing():
    for epochs in (3, 30):
        recipe = iso.load_recipe("digits_annealed", [f"epochs={epochs}"])
        assert (recipe.anneal.epochs, recipe.shortened) == (1.5, "")


@pytest.mark.parametrize("name", [name for name, values in RECIPES.items() if "name" in values["model"]])
def test_every_recipe_can_run_for_one_epoch(name):
    assert iso.load_recipe(name, ["epochs=1"]).epochs == 1


def test_wrong_values_are_reported_as_ever(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: {name: cifar_resnet20}\nepochs: ten\noptim: {warmup_epochs: two}\nanneal: 3\n")
    with pytest.raises(iso.UserError, match=r"2 problems: optim.warmup_epochs: .* anneal is a group of fields"):
        iso.load_recipe(str(path), ["epochs=1"])


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("model=cifar_resnet20", r"model is a group of fields: name, .*; give these, like model.name=VALUE"),
        ("optim=3", r"optim is a group of fields: name, lr, .*; give these"),
        ("augment.scale=1", r"augment.scale: must be a list \(given 1\)"),
        ("data.size=[32]", r"data.size: has too few values \(given \[32\]\)"),
        ("track=tb", r"track: input should be 'tensorboard' or 'wandb' \(given 'tb'\)"),
    ],
)
def test_values_of_a_wrong_kind_are_one_plain_line(assignment, message):
    with pytest.raises(iso.UserError, match=message) as caught:
        iso.load_recipe("digits_cnn", [assignment])
    assert "\n" not in str(caught.value)


def test_what_was_shortened_is_printed(tmp_path, capsys):
    brief = ["epochs=1", "data.fraction=0.03", "data.test_images=20", "data.size=[8,8]", f"out={tmp_path}"]
    result = iso.train(iso.load_recipe("digits_cnn", brief))
    printed = capsys.readouterr().out
    assert "1 of 6 epochs, so optim.warmup_epochs 1 -> 0.1667" in printed
    assert "evaluating on 20 test images only (data.test_images)" in printed
    assert result.metrics["images"] == 20


def test_test_images_are_the_same_for_every_seed():
    def images(seed, number):
        test = open_sources(iso.load_recipe("digits_cnn", [f"seed={seed}", f"data.test_images={number}"]))[1]
        return len(test), list(test.labels)

    assert images(0, 45) == images(7, 45)
    assert images(0, 45)[0] == 45
    assert images(0, 9999)[0] == 450


def test_a_wrong_rate_of_the_public_groups_is_one_line():
    with pytest.raises(iso.UserError, match=r"parameter_groups has 1 problem: gate_lr: .*multiple of"):
        parameter_groups(iso.models, gate_lr="fast")  # type: ignore[arg-type]
