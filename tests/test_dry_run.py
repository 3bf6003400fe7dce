"""Dry runs: every recipe builds and steps without data, says what it needs and costs, and finds what does not fit."""

import json
import re
import shlex
from pathlib import Path

import pytest
import timm
import torch

import isomorph as iso
from command_line import isomorph
from isomorph.analysis.cost import count_parameters
from isomorph.lab.data.sampler import BatchOrder, BatchParts, TrainSampler
from isomorph.lab.distributed import ALONE
from isomorph.lab.recipes import RECIPES
from isomorph.lab.recipes.tables import published_rows
from isomorph.lab.training.build import plan_batches
from isomorph.lab.training.classification import recipe_task
from isomorph.lab.training.dry_run import rehearsal
from isomorph.lab.training.dry_run.meta import RememberOutlines
from isomorph.lab.training.dry_run.needs import list_needs
from isomorph.lab.training.dry_run.synthetic import PUBLISHED_SIZES
from isomorph.lab.training.run.state import Run
from isomorph.models.coatnet import VARIANTS as COATNETS
from refusals import refused


def plan_of(name, *changes, steps=0):
    return iso.training.dry_run(iso.load_recipe(name, list(changes)), steps=steps)


# What a step does not depend on but for its length and rates: texts, schedules, where weights are read from.
TEXTS = ("name", "source", "expected", "dataset", "out")
SCHEDULES = (
    "epochs",
    "iterations",
    "evaluate_every",
    "keep_every",
    "monitor_every",
    "log_every",
    "optim",
)
FILES = ("weights", "pretrained", "start")


def step_of(name):
    """What decides the network, its surgery, its objective and its samples, but for how many they are."""
    fields = iso.load_recipe(name).model_dump(mode="json")
    for key in (*TEXTS, *SCHEDULES):
        fields.pop(key)
    for key in FILES:
        fields["model"].pop(key)
    augment = fields.pop("augment")
    fields["mixes"] = bool(augment["mixup"] or augment["cutmix"])
    fields["classes"] = len(
        recipe_task(iso.load_recipe(name)).synthetic_data(iso.load_recipe(name)).classes
    )
    fields["size"] = fields.pop("data")["size"]
    return json.dumps(fields, sort_keys=True)


STEPS = {step_of(name): name for name in reversed(RECIPES)}


# Blocks that a step of each kind needs, by the beginning of a network's name: those that are equal add only time.
FEW_BLOCKS = {
    "bert": ["model.kwargs.num_hidden_layers=2"],
    "deit": ["model.kwargs.depth=2"],
    "refined_vit": ["model.kwargs.depth=4"],  # as many as share maps
    "resnet": ["model.kwargs.layers=[1, 1, 1, 2]"],
    "swin": ["model.kwargs.depths=[2, 2, 2, 2]"],
    "tdrl_vit": ["model.kwargs.depth=2"],
    "text_transformer": ["model.kwargs.num_hidden_layers=2"],
    "vit": ["model.kwargs.depth=2"],
}


def _few_blocks(model):
    """Return changes to a recipe's model that leave out blocks equal to others, but none that it numbers."""
    name = model.get("name")
    kwargs = model.get("kwargs", {})
    if name is None:
        return ["model.name=resnet18"]
    if any(re.search(r"\.\d+\.", glob) for glob in kwargs.get("where", ())):
        return []
    if name.startswith("coatnet"):
        depths = kwargs.get("depths") or COATNETS[name].arguments["depths"]
        return [f"model.kwargs.depths={[min(depth, 2) for depth in depths]}"]
    if name.startswith("convit"):
        if "local_up_to_layer" in kwargs:
            return []
        return ["model.kwargs.depth=2", "model.kwargs.local_up_to_layer=1"]
    if kwargs.get("backbone", "").startswith(("vit", "tdrl_vit")):
        return ["model.kwargs.backbone_kwargs.depth=4"]
    for family, changes in FEW_BLOCKS.items():
        if name.startswith(family):
            return changes
    return []


def small_plan_of(name):
    return plan_of(name, "data.batch_size=16", *_few_blocks(RECIPES[name]["model"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS.values())
def test_every_recipe_steps_on_the_meta_device(name):
    """Recipes that differ in texts, schedules and files alone are one case."""
    plan = small_plan_of(name)
    assert plan.parameters > 1000
    assert plan.memory > 0
    assert plan.h100.eager >= plan.h100.graph > 0
    assert plan.groups
    table = dict(plan.table()[1:])
    assert table["source"] == plan.recipe.source


@pytest.mark.parametrize("name", ["digits_cnn", "digits_convit", "ddpm_digits"])
def test_texts_and_schedules_do_not_change_a_step(name):
    """So that one case stands for recipes that differ in nothing else."""
    other = [
        "epochs=77",
        "evaluate_every=7",
        "optim.lr=1e-5",
        "optim.weight_decay=0.3",
        "optim.min_lr=0",
    ]
    other += ["optim.warmup_epochs=0.1", "source=x", "expected=y"]
    if name != "ddpm_digits":
        other.append("augment.color_jitter=0.3")
    first = plan_of(name)
    second = plan_of(name, *other)
    assert first.parameters == second.parameters
    assert first.memory == second.memory
    assert first.h100 == second.h100


def test_remembered_operations_change_no_plan(monkeypatch):
    """Outlines of repeated operations are those that PyTorch computes."""
    for name in ("digits_convit", "cifar_tdrl_g2sd", "mask_rcnn_bccd"):
        first = small_plan_of(name)
        again = small_plan_of(name)
        monkeypatch.setattr(RememberOutlines, "__torch_dispatch__", _forget)
        computed = small_plan_of(name)
        monkeypatch.undo()
        for plan in (first, again):
            assert plan.parameters == computed.parameters
            assert plan.memory == computed.memory
            assert plan.h100 == computed.h100


def _forget(self, operation, types, args=(), kwargs=None):
    return operation(*args, **(kwargs or {}))


def test_every_recipe_has_a_plan_but_for_its_network():
    """Data of a known size, a batch that can be split, and a name for everything that is not there."""
    for name in RECIPES:
        recipe = iso.load_recipe(name)
        task = recipe_task(recipe)
        data = task.synthetic_data(recipe)
        order, _ = plan_batches(recipe, data, ALONE)
        needs = "\n".join(list_needs(recipe, data.name))
        assert data.name in PUBLISHED_SIZES
        assert order.steps >= 1
        if recipe.model.start == "weights":
            assert "weights" in needs
        if recipe.mask and recipe.mask.teacher:
            assert str(recipe.mask.teacher) in needs


NARROW_VIT = ["model.kwargs.depth=2", "data.batch_size=8"]
RESNET = ["model.kwargs={layers: [1, 1, 1, 3], channels: [8, 8, 8, 16], stem_width: 8}"]
RESNET += ["data.size=[64,64]", "data.batch_size=8"]
CONVIT = ["model.kwargs.embed_dim=36", "model.kwargs.depth=11", "data.batch_size=4"]
COATNET = ["data.size=[64,64]", "model.kwargs.widths=[8, 8, 16, 32, 32]", "data.batch_size=8"]
COATNET += ["model.kwargs.depths=[2, 1, 1, 1, 1]"]
REFINED = ["model.kwargs.embed_dim=48", "model.kwargs.depth=4", "data.batch_size=4"]
TDRL = ["model.kwargs.embed_dim=48", "model.kwargs.depth=2", "data.batch_size=8"]
TEACHER = ["distill.teacher=vit_tiny_patch16_224", "distill.weights=null", "distill.kwargs={}"]
SMALL_TEACHER = [*TEACHER, "distill.kwargs={depth: 1}"]
STEPPED = {
    "tcnn_resnetrs50": RESNET,
    "finetune_resnetrs50_unstrided": RESNET,
    "tcnn_late_100": RESNET,
    "convit_ti": CONVIT,
    "convit_ablation_g": CONVIT,
    "convit_s_psa": CONVIT,
    "deit_ti": NARROW_VIT,
    "deit_s_distilled": [*NARROW_VIT, *SMALL_TEACHER],
    "coatnet_0": COATNET,
    "coatnet_0_384": COATNET,
    "coatnet_2_in21k": COATNET,
    "coatnet_layout_vit_rel": [
        *COATNET,
        "model.kwargs.depths=[1, 1]",
        "model.kwargs.widths=[32, 32]",
    ],
    "tdrl_vit_ti_100ep": TDRL,
    "tdrl_vit_ti_100ep_distilled": [*TDRL, *SMALL_TEACHER],
    "tdrl_fig3_none_g2sd": [*TDRL, "mask.teacher_model=vit_tiny_patch16_224"],
    "tdrl_mobileone_s0": [
        "data.size=[32,32]",
        "data.batch_size=4",
        "model.recast.where=[stem, stages.0.?]",
    ],
    "refined_vit_s": REFINED,
    "refined_vit_s_released": [*REFINED, "token_labels.maps=maps"],
    "cifar_annealed": ["data.batch_size=8"],
    "cifar_coatnet": ["data.batch_size=8"],
    "digits_convit": [],
    "cifar_tdrl_g2sd": ["data.batch_size=8"],
    "ddpm_digits": ["data.batch_size=8"],
    "bert_narrow_refined": ["data.batch_size=4"],
    "glue_rte_narrow": ["data.batch_size=4"],
    "upernet_camvid": [
        "task.crop=[64,64]",
        "model.kwargs.backbone_kwargs={depth: 4}",
        "data.batch_size=2",
    ],
    "mask_rcnn_bccd": ["data.size=[64,64]", "data.batch_size=2"],
}
"""The smallest of every family, narrower still."""


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPPED)
def test_the_smallest_of_each_family_really_steps(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_of(name, *STEPPED[name], steps=1)
    assert plan.seconds > 0
    assert plan.hours_here > 0
    assert not plan.notes
    assert not list(tmp_path.iterdir())


def test_a_plan_is_what_the_run_will_do(tmp_path):
    """Steps, groups and parameters of a dry run are those of the run on the data itself."""
    recipe = iso.load_recipe("digits_cnn", [f"out={tmp_path / 'run'}"])
    plan = iso.training.dry_run(recipe, steps=0)
    run = Run(recipe)
    assert plan.steps == run.iterations
    assert plan.epochs == run.epochs
    assert plan.parameters == count_parameters(run.trained)
    assert plan.groups == rehearsal.describe_groups(run.trained, run.optimizer, recipe.optim)
    assert str(len(run.train)) in plan.data.replace(",", "")
    opened = iso.training.dry_run(iso.load_recipe("digits_cnn", [f"data.root={tmp_path}"]), steps=0)
    assert opened.steps == plan.steps


def test_memory_is_what_the_backward_pass_keeps():
    """The bytes that are counted on the meta device are those that a step keeps on the CPU."""
    plan = plan_of("digits_cnn", "data.batch_size=16")
    model = timm.create_model("cifar_resnet20", num_classes=10).train()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.randn(16, 3, 24, 24)).logsumexp(1).sum().backward()
    saved = sum(size for size, _ in kept.values())
    counted = plan.memory * 2**30 - 16 * plan.parameters
    assert counted == pytest.approx(saved, rel=0.05)


def test_data_has_its_published_size():
    plans = {name: plan_of(name) for name in ("deit_ti", "cifar_cnn", "convit_layers_0")}
    whole = PUBLISHED_SIZES["ImageNet-1k"][0]
    assert plans["deit_ti"].steps == 300 * (whole // 1024)
    assert plans["cifar_cnn"].steps == 10 * (50_000 // 128)
    assert plans["convit_layers_0"].steps == 300 * (whole // 10 // 512)  # 100 of 1,000 classes


NEEDS = {
    "tcnn_resnetrs50": ["ImageNet-1k", "weights of resnetrs50: .*resnetrs50"],
    "coatnet_5_jft": ["JFT-300M"],
    "coatnet_2_in21k": ["ImageNet-21k"],
    "tdrl_vit_ti_g2sd": ["mask.teacher mae_pretrain_vit_base_full.pth"],
    "tdrl_vit_ti_100ep_distilled": [
        "--model.weights",
        "distill.weights mae_finetuned_vit_base.pth",
    ],
    "cifar_tdrl_finetuned": ["CIFAR-10", "`isomorph train cifar_tdrl_g2sd` writes"],
    "upernet_tdrl_ti_distilled": [
        "ADE20K",
        "task.teacher runs/upernet_teacher_b/model.safetensors, which `isomorph train upernet_teacher_b` writes; "
        "the predicted memory and hours leave it out",
    ],
    "vitdet_plain_ti_distilled": ["task.teacher .*`isomorph train vitdet_teacher_b` writes"],
    "glue_rte": ["GLUE", "`isomorph train bert_small` writes", "task.tokenizer google-bert"],
}


@pytest.mark.parametrize("name", NEEDS)
def test_what_has_to_be_downloaded_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = "\n".join(small_plan_of(name).needs)
    for expected in NEEDS[name]:
        assert re.search(expected, lines)


def test_weights_that_are_here_are_loaded_and_must_fit(tmp_path):
    path = tmp_path / "own.safetensors"
    iso.save(timm.create_model("cifar_resnet20", num_classes=10), path)
    plan = plan_of("digits_cnn", f"model.weights={path}", "data.batch_size=8", steps=1)
    assert plan.needs == []
    changes = [f"model.weights={path}", "model.name=cifar_resnet32"]
    with pytest.raises(iso.UserError, match="does not fit"):
        plan_of("digits_cnn", *changes, steps=1)


WRONG = {
    "data.batch_size=30 scale.accumulate=4": "data.batch_size 30 cannot be split evenly",
    "model.freeze=nothing.*": "model.freeze 'nothing.*' matches no parameter",
    "optim.layer_decay=0.5 model.name=cifar_resnet20 optim.name=muon_": "optim.name",
    "optim.warmup_iterations=1000 optim.warmup_epochs=0": "optim.warmup_iterations must be below",
    "data.root=/nowhere data.source=imagefolder": "/nowhere",
    "anneal.epochs=1": "no gated layer|anneal",
}


@pytest.mark.parametrize("given", WRONG)
def test_what_does_not_fit_is_one_error(given):
    def plan():
        return plan_of("digits_cnn", *given.split())

    refused(WRONG[given], plan)


def test_steps_without_the_memory_for_them_are_left_out(monkeypatch):
    monkeypatch.setattr(rehearsal, "_free_memory", lambda: 1.0)
    plan = plan_of("digits_cnn", steps=1)
    assert plan.seconds is None
    assert "GiB" in plan.notes[0]
    assert dict(plan.table()[1:])["hours here"] == "not measured"


def small_runs():
    """Runs on small data, as docs/guides/reproduce.md prints their commands: a recipe and its changes each."""
    page = (Path(__file__).parents[1] / "docs/guides/reproduce.md").read_text().replace("\\\n", " ")
    shared = shlex.split(re.search(r'isomorph train "\$@" (.*)', page)[1])
    for line in re.findall(r"(?m)^small ([a-z].*)", page):
        name, *own = shlex.split(line)
        options = [*shared, *own]
        names = [option.removeprefix("--") for option in options[::2]]
        yield name, [f"{field}={value}" for field, value in zip(names, options[1::2], strict=True)]


@pytest.mark.parametrize(("name", "changes"), list(small_runs()))
def test_runs_on_small_data_fit_their_networks(name, changes):
    plan = plan_of(name, *changes)
    assert plan.recipe.epochs == 2
    assert plan.steps == 20


def test_command_line(tmp_path):
    done = isomorph("train", "digits_cnn", "--data.batch_size", "8", "--dry-run", folder=tmp_path)
    assert "decayed: 20 tensors" in done.stdout
    assert "hours on 8 H100" in done.stdout
    assert not list(tmp_path.iterdir())
    done = isomorph(
        "train", "digits_cnn", "--dry-run", "--json", "data.batch_size=8", folder=tmp_path
    )
    plan = json.loads(done.stdout)
    assert plan["steps"] == 6 * (1347 // 8)
    assert plan["published"] == []
    assert "CoAtNet Table 13, CoAtNet-0 at 224: top-1 (%) 81.6" in published_rows("coatnet_0")
    assert plan["hours_here"] > 0


def test_samples_of_a_step_are_those_of_this_process():
    recipe = iso.load_recipe("digits_cnn", ["data.batch_size=16"])
    data = recipe_task(recipe).synthetic_data(recipe)
    task = rehearsal.SyntheticTask(recipe_task(recipe), data)
    task.build_model(recipe, data, True)
    sampler = TrainSampler(BatchOrder(64, 16), 1, parts=BatchParts(range(1), 2))
    config = task.data_config(recipe, task.model)
    inputs, *_ = next(task.train_loader(recipe, config, data, sampler))
    assert len(inputs) == 8


def test_a_batch_is_no_larger_than_the_data():
    assert plan_of("digits_cnn", "data.fraction=0.02").as_dict()["batch_size"] < 128
