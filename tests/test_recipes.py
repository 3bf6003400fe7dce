"""Recipes: every one is valid and builds, and says what its paper says; wrong fields are named, all at once."""

import math
import re
from collections import Counter
from functools import reduce
from pathlib import Path

import pytest
import timm
import torch
import yaml
from timm.data import create_transform
from torch import nn

import isomorph as iso
from isomorph.analysis.cost import count_parameters
from isomorph.lab import recipes
from isomorph.lab.recipes import RECIPES
from isomorph.lab.training.build import build_model
from isomorph.lab.training.optim import build_optimizer, build_scheduler
from isomorph.lab.training.recipe.fields import OptimPart, magnitudes
from isomorph.lab.training.recipe.recipe import validate
from isomorph.lab.training.run.state import Run
from refusals import refused

CONVITS = [name for name in RECIPES if name.startswith(("convit_", "vit_"))]
REFINERS = [name for name in RECIPES if name.startswith(("refiner_", "refined_"))]


def field(recipe, name):
    return reduce(getattr, name.split("."), recipe)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_valid_and_has_a_short_run(name):
    recipe = iso.load_recipe(name)
    assert recipe.name == name
    assert recipe.source
    if "weights" in recipe.expected:
        assert recipe.model.start == "weights"
    if recipe.model.name:
        unit = "iterations" if recipe.iterations else "epochs"
        assert field(iso.load_recipe(name, [f"{unit}=2"]), unit) == 2


def named_entries():
    """The entries of all files of named recipes, bases among them, as they are written."""
    entries = {}
    for path in sorted(Path(recipes.__file__).parent.glob("named/*.yaml")):
        here = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert entries.keys().isdisjoint(here), path.name
        entries |= here
    return entries


def test_an_entry_says_only_what_its_base_does_not():
    entries = named_entries()
    bases = {entry["base"] for entry in entries.values() if "base" in entry}
    assert {name for name in entries if name.startswith(".")} <= bases <= entries.keys()
    for name, entry in entries.items():
        if "base" not in entry:
            continue
        inherited = recipes._fields_of(entry["base"], entries)
        for path, value in entry.items():
            old = inherited
            for part in path.split("."):
                old = (old or {}).get(part, recipes)  # a value that no field has
                if old is recipes:
                    break
            assert value != old, (name, path)


def test_an_entry_changes_its_base_for_itself_alone():
    assert iso.load_recipe("tcnn_late_0").model.recast_epoch == 0
    assert iso.load_recipe("tcnn_late_100").model.recast_epoch == 100
    assert "recast" not in RECIPES["finetune_resnetrs50"]["model"]
    assert RECIPES["tcnn_resnetrs152"]["data"]["size"] == [320, 320]
    assert RECIPES["tcnn_resnetrs50"]["data"]["size"] == [224, 224]


PEAK = {"optim.schedule_from": "peak"}
START = {"optim.schedule_from": "start"}
REPEATED = START | {"augment.repeats": 3}
PUBLISHED = {
    "tdrl_vit_ti_g2sd": PEAK  # G2SD's code
    | {
        "optim.lr": 2.4e-3,
        "optim.betas": (0.9, 0.95),
        "optim.warmup_epochs": 10,
        "optim.min_lr": 2.5e-6,
    }
    | {"optim.clip_grad": 3.0, "optim.weight_decay": 0.05},
    # MAE's, then Swin's
    "tdrl_vit_s_100ep": {
        "optim.lr": 2e-3,
        "data.batch_size": 1024,
        "optim.layer_decay": 0.65,
        "drop_path": 0.1,
    },
    "tdrl_vit_ti_100ep": PEAK,
    "tdrl_swin_t": {
        "optim.warmup_epochs": 20,
        "optim.clip_grad": 5.0,
        "optim.lr": 1e-3,
        "optim.min_lr": 1e-5,
    },
    "tdrl_deit_b": REPEATED,
    "tdrl_vit_ti_300ep_distilled": {"model.name": "tdrl_vit_ti_distilled", "distill.token": True}
    | {
        "distill.kind": "hard",
        "distill.share": 0.5,
        "distill.kwargs": {"global_pool": "avg", "num_classes": 1000},
    },
    "coatnet_0": PEAK,  # "peak learning rate"
    "convit_s": REPEATED | {"optim.gate_lr": 1e-3},  # timm's default
    "deit_s_10pct": START,
    "tcnn_resnetrs50": REPEATED | {"optim.gate_lr": 0.1},
    "tcnn_resnetrs270": {"keep_every": 2},
    "tcnn_late_100": REPEATED  # Table 3; docs/guides/readings.md says what is a reading
    | {"optim.name": "sgd", "optim.lr": 0.4, "optim.momentum": 0.9, "optim.weight_decay": 1e-4},
    "upernet_plain_ti": {
        "expected": "41.4 mIoU on ADE20K, from pre-trained --model.weights"
    },  # Table 2, and the plain arm of B.9
    "upernet_batchnorm_ti": {"expected": "37.8 mIoU on ADE20K, from pre-trained --model.weights"},
    "finetune_resnetrs50": {"augment.repeats": 3},
    "refiner_b_deit": {"augment.repeats": 3},
    "refined_vit_s": START,
    "refined_vit_m_released_384": START  # DeiT's fine-tuning
    | {
        "optim.lr": 5e-6,
        "optim.min_lr": 5e-6,
        "optim.weight_decay": 1e-8,
        "epochs": 30,
        "data.batch_size": 512,
    }
    | {"augment.repeats": 3, "augment.mixup": 0.8, "augment.cutmix": 1.0},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_fields_are_those_of_the_papers_and_their_code(name):
    recipe = iso.load_recipe(name)
    assert {key: field(recipe, key) for key in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize(("letter", "with_maps", "without"), [("s", 0.2, 0.1), ("l", 0.25, 0.2)])
def test_refiner_as_released_is_what_the_scripts_say(letter, with_maps, without):
    for name, drop_path, pairs in (
        ("released", with_maps, 12),
        ("released_image_labels", without, 2),
    ):
        recipe = iso.load_recipe(f"refined_vit_{letter}_{name}")
        assert recipe.augment.mixup == 0.8
        assert recipe.augment.cutmix == 1.0
        assert recipe.augment.repeats == 1
        assert recipe.optim.lr == 5e-4
        assert recipe.drop_path == drop_path
        assert recipe.ema == 0.99996
        assert recipe.map_similarity.weight == 0.1
        assert recipe.map_similarity.pairs == pairs
        assert (
            bool(recipe.token_labels)
            == recipe.model.kwargs.get("dense_head", True)
            == (pairs == 12)
        )


def test_figure_8_of_convit_is_a_grid():
    """Every number of GPSA layers with every strength of locality, once; a plain ViT has no strength."""
    cells = []
    for name in CONVITS:
        if "Fig. 8" in RECIPES[name]["source"]:
            kwargs = RECIPES[name]["model"]["kwargs"]
            layers = kwargs.get("local_up_to_layer", 10)
            cells.append((layers, kwargs.get("locality_strength", 1.0)))
    assert sorted(cells) == [
        (0, 1.0),
        *((n, alpha) for n in (3, 6, 9, 10) for alpha in (0.5, 1.0, 2.0)),
    ]


# networks

BUILT = [name for name in RECIPES if "resnet" in name or name in (*CONVITS, *REFINERS)]


@pytest.mark.parametrize("name", BUILT)
def test_every_network_is_built(name):
    recipe = iso.load_recipe(name, ["model.pretrained=false"])
    with torch.device("meta"):
        model = build_model(recipe.model, 1000, recipe.drop_path)
    count = Counter(type(module) for module in model.modules())
    frozen = {n.rpartition(".")[2] for n, p in model.named_parameters() if not p.requires_grad}
    if "resnet" in name:
        layers = (
            0
            if recipe.model.recast is None
            else 4
            if recipe.model.name in ("resnetrs270", "resnetrs350")
            else 3
        )
        assert count[iso.layers.GPSA2d] == layers
    elif name in CONVITS:
        layers = 0 if name.startswith("vit") else recipe.model.kwargs.get("local_up_to_layer", 10)
        assert count[iso.layers.PSA if "psa" in name else iso.layers.GPSA] == layers
        row = name.removeprefix("convit_ablation_")[:1] if "ablation" in name else ""
        all_of_it = {"gate", "position", "weight", "bias"}
        assert frozen == dict(b={"gate"}, d={"gate"}, f=all_of_it, g=all_of_it).get(row, set())
    else:
        published = {
            "refiner_vit_12b": 86,
            "refiner_vit_16b": 24,
            "refiner_vit_24b": 36,
            "refiner_vit_32b": 48,
        }
        wanted = published.get(name.removesuffix("_dla"))
        assert wanted is None or count_parameters(model) / 1e6 == pytest.approx(wanted, rel=0.03)


# schedules and policies


def test_coatnet_rotates_as_far_as_google_does():
    policy = iso.load_recipe("coatnet_3_512").augment.auto_augment
    transform = create_transform(32, is_training=True, auto_augment=policy)
    assert set(magnitudes(transform)) == {(20, 30)}
    (operations,) = [step for step in transform.transforms if hasattr(step, "ops")]
    assert operations.num_layers == 2
    assert {operation.prob for operation in operations.ops} == {1.0}
    (rotate,) = [operation for operation in operations.ops if operation.name == "Rotate"]
    seen = []
    rotate.aug_fn = lambda image, angle, **_: seen.append(abs(angle))
    rotate(None)
    assert seen == [60.0]


SHAPES = {
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
    "linear": lambda t: 1 - t,
    "constant": lambda t: 1,
}


@pytest.mark.parametrize("begin", ["peak", "start"])
@pytest.mark.parametrize("schedule", SHAPES)
def test_rates_follow_the_formula(schedule, begin):
    """MAE's, from the peak: min + (peak - min) (1 + cos(pi (epoch - warm-up) / (epochs - warm-up))) / 2."""
    low = 0.0 if schedule == "constant" else 1e-5
    warmup = 2.5
    optim = OptimPart(
        lr=1e-3,
        min_lr=low,
        schedule=schedule,
        warmup_epochs=warmup,
        schedule_from=begin,
        betas=(0.9, 0.8),
    )
    optimizer = build_optimizer(nn.Linear(2, 2), optim)
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.8)}
    scheduler = build_scheduler(optimizer, optim, 50, 8)
    first = warmup if begin == "peak" else 0
    for step in range(400):
        scheduler.step_update(step)
        epoch = step / 8
        wanted = low + (1e-3 - low) * SHAPES[schedule]((epoch - first) / (50 - first))
        wanted = wanted if epoch >= warmup else 1e-5 + (1e-3 - 1e-5) * epoch / warmup
        assert optimizer.param_groups[0]["lr"] == pytest.approx(wanted, rel=1e-9)


# fewer epochs


def test_a_warm_up_takes_at_least_a_step():
    """However few steps a shortened run has: the first is at the warm-up's start, the second at the peak."""
    optim = OptimPart(lr=1e-3, warmup_epochs=0.01, schedule="cosine")
    optimizer = build_optimizer(nn.Linear(2, 2), optim)
    scheduler = build_scheduler(optimizer, optim, 2, 10)
    rates = []
    for step in range(3):
        scheduler.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == pytest.approx(1e-5)
    assert rates[1] == pytest.approx(1e-3)
    build_scheduler(optimizer, optim, 1, 1)  # a run of one step
    assert 0.9e-3 < rates[2] < 1e-3


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("digits_annealed", ["epochs=1"], {"optim.warmup_epochs": 0.1667, "anneal.epochs": 0.5}),
        ("tcnn_late_200", ["epochs=160"], {"model.recast_epoch": 80, "optim.warmup_epochs": 2}),
        (
            "digits_annealed",
            ["epochs=1", "optim.warmup-epochs=0.25", "anneal={epochs: 1, start: [20, 15]}"],
            {"optim.warmup_epochs": 0.25, "anneal.epochs": 1, "shortened": ""},
        ),
        ("digits_annealed", ["epochs=30"], {"anneal.epochs": 1.5, "shortened": ""}),
        ("tcnn_late_0", ["epochs=2"], {"model.recast_epoch": 0}),
        (
            "tcnn_late_100",
            ["epochs=2"],
            {"model.recast_epoch": 1},
        ),  # a recast stays one in the middle
        ("tcnn_late_100", ["epochs=1"], {"model.recast_epoch": 0}),
        ("tcnn_late_300", ["epochs=2"], {"model.recast_epoch": 1}),
        ("tcnn_late_300", ["epochs=1"], {"model.recast_epoch": 0}),
        ("tcnn_late_400", ["epochs=2"], {"model.recast_epoch": 2}),  # which is never
        (
            "convit_s",
            ["epochs=1"],
            {"evaluate_every": 1, "keep_every": [1], "optim.warmup_epochs": 0.01667},
        ),
    ],
)
def test_fewer_epochs_shorten_the_schedules_that_are_not_given(name, given, wanted):
    recipe = iso.load_recipe(name, given)
    assert {key: field(recipe, key) for key in wanted} == wanted


# files and fields


def test_all_problems_at_once_with_the_closest_name():
    wrong = ["optim.weigth_decay=0", "optim.lr=-1", "data.source=cifar", "epochs=x", "modle.name=a"]
    said = refused("5 problems", iso.load_recipe, "cifar_exact", wrong)
    for words in (
        "did you mean weight_decay?",
        "did you mean model?",
        "optim.lr: ",
        "'cifar' is not a",
    ):
        assert words in said


def test_overrides_are_yaml_and_reach_groups_that_are_off():
    for assignment, value in {
        "model.recast.where=*.conv2": ["*.conv2"],
        "model.recast.where=[*.conv1, *.conv2]": ["*.conv1", "*.conv2"],
        "data.size=32": [32, 32],
        "data.size=32,40": [32, 40],
        "augment.crop_padding=auto": "auto",
        "name=123": "123",
        "out=2024": Path("2024"),
        "optim.lr=1e-4": 1e-4,
        "data.batch-size=64": 64,
    }.items():
        name = assignment.partition("=")[0].replace("-", "_")
        assert field(iso.load_recipe("cifar_cnn", [assignment]), name) == value
    assert iso.load_recipe("cifar_exact", ["model.recast=null"]).model.recast is None


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".yaml", "model: {name: cifar_resnet20}\nepochs: 3\n"),
        (".toml", "epochs = 3\n[model]\nname = 'cifar_resnet20'\n"),
    ],
)
def test_files(suffix, text, tmp_path):
    path = tmp_path / f"mine{suffix}"
    path.write_text(text)
    recipe = iso.load_recipe(str(path))
    assert recipe.name == "mine"
    assert recipe.epochs == 3
    for other, content in (("none", None), ("broken", "]broken["), ("deep", "a = " + "[" * 40_000)):
        path = tmp_path / f"{other}{suffix}"
        if content:
            path.write_text(content)
        refused("recipe", iso.load_recipe, str(path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "has no aliases"),
        ("a: " + "[" * 500, "cannot read recipe"),
        ("epochs: " + "1" * 6000, "cannot read recipe"),
        ("name: 2024-13-45", "month must be in 1..12"),
        (b"\xff", "cannot read recipe"),
        (
            "model: {name: cifar_resnet20}\nepochs: ten\noptim: {warmup_epochs: two}\nanneal: 3\n",
            "3 problems",
        ),
    ],
)
def test_text_that_no_recipe_has(text, expected, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(expected, iso.load_recipe, str(path))


WRONG = {
    "augment.auto_augment=rand-m15-n2": "augment.auto_augment: .*magnitude 15 to 10",
    "augment.auto_augment=rubbish": "augment.auto_augment",
    "optim.betas=[0.9]": "optim.betas",
    "optim.betas=[0.9,1.0]": "optim.betas",
    "optim.gate_lr=2 times": "optim.gate_lr: .*2 times",
    "optim.gate_lr=0x": "optim.gate_lr: .*0x",
    "optim.gate_lr=1000": "optim.gate_lr: would be a learning rate of 1000; .*write 1000x",
    "optim.min_lr=1": "min_lr 1 is above lr",
    "augment.scale=[0.9,0.1]": "augment.scale: .*smallest area first",
    "optim.name=adamv": "'adamv'.*close: adam",
    "optim.warmup_epochs=10": "optim.warmup_epochs 10.*epochs 10",
    "augment.mixup=0.8 data.batch_size=33": "data.batch_size 33.*even",
    "augment.scale=1": "augment.scale: .*given 1",
    "anneal.epochs=11": "anneal.epochs 11.*epochs 10",
    "data.size=[32]": "data.size",
    "data.crop_pct=0.9 data.test_crop=whole": "crop_pct has no effect with test_crop=whole",
    "model=cifar_resnet20": "model is a group of fields: name, .*model.name=VALUE",
    "loss=hinge": "loss: .*'softmax' or 'sigmoid'",
    "model.name=cifar_resnet2": "did you mean.*cifar_resnet20",
    "model.name=facebook/dinov2-small": "did you mean vit_small_patch14_dinov2",
    "model.kwargs.pretrained=true": "model.kwargs: pretrained.*model.pretrained",
    "model.kwargs.in_chans=abc": "model.kwargs: in_chans",
    "model.kwargs.x=[[[[[[[[[[1]]]]]]]]]]": "model.kwargs: x .*8 levels",
    "model.kwargs.x=[{y: .nan}]": "model.kwargs: x ",
    "model.recast_epoch=11": "model.recast_epoch 11.*epochs 10",
    "model.recast_epoch=1 scale.parallel=fsdp": "model.recast_epoch.*scale.parallel ddp",
    "optim.name=adafactor scale.parallel=fsdp": "adafactor does not work with fsdp",
    "token_labels.weight=0.5 distill.teacher=resnet18": "exclude each other",
    "model.recast_epoch=1 mask={}": "model.recast_epoch.*masked",
    "loss=sigmoid token_labels={}": "token_labels",
    "mask={} distill.teacher=a": "distill and mask",
    "mask={} augment.mixup=0.8": "augment.mixup",
    "mask.teacher_model=vit_base_patch16_224": "mask: mask.teacher_model has no effect without mask.teacher; give",
    "mask.block=2": "mask: mask.block has no effect",
    "mask={} augment.smoothing=0.1": "without labels; leave augment.smoothing",
    "mask={} loss=sigmoid": "leave augment.smoothing at 0 and loss",
    "data.source=huggingface-stream data.fraction=0.5": "huggingface-stream is a stream",
    "data.images=1000": "images is for a stream",
    "optim.lr": "'optim.lr'",
    "optim.lr=[1": "optim.lr",
}


@pytest.mark.parametrize("given", WRONG)
def test_wrong_fields_are_named(given):
    assignments = [given] if "{y:" in given or "2 times" in given else given.split()
    refused(WRONG[given], iso.load_recipe, "cifar_exact", assignments)


def test_epochs_do_not_shorten_a_run_of_iterations():
    words = (
        "160000 iterations, so epochs=3 has no effect; give iterations=NUMBER, or iterations=null"
    )
    refused(words, iso.load_recipe, "upernet_tdrl_ti", ["epochs=3"])
    assert iso.load_recipe("upernet_tdrl_ti", ["epochs=3", "iterations=null"]).epochs == 3
    assert iso.load_recipe("upernet_tdrl_ti", ["epochs=3", "iterations=40"]).iterations == 40


WHOLE = (
    "epochs evaluate_every keep_every monitor_every log_every seed data.workers data.batch_size data.classes"
    " data.images data.unreadable scale.accumulate augment.repeats augment.crop_padding"
    " model.num_classes model.recast_epoch mask.depth mask.width mask.heads mask.block mask.teacher_heads data.size.0"
)
REAL = (
    "optim.lr optim.gate_lr optim.weight_decay optim.momentum optim.min_lr optim.clip_grad optim.warmup_epochs"
    " augment.mixup augment.smoothing checkpoint_minutes ema drop_path data.fraction mask.ratio"
)
NUMBERS = [(WHOLE, value) for value in ("1e30", "9" * 400)] + [
    (REAL, value) for value in (".nan", "-.inf", "inf")
]


@pytest.mark.parametrize(("fields", "value"), NUMBERS)
def test_numbers_have_bounds_and_are_finite(fields, value):
    for name in fields.split():
        given = f"data.size=[{value},8]" if name == "data.size.0" else f"{name}={value}"
        refused(f"{re.escape(name)}: ", iso.load_recipe, "cifar_cnn", [given])


def test_unknown_names_and_rates_of_the_public_groups():
    refused(
        "there is no recipe 'cifar_exat'; did you mean cifar_exact", iso.load_recipe, "cifar_exat"
    )
    refused(
        "gate_lr.* 100.* 100x",
        iso.training.parameter_groups,
        timm.create_model("cifar_resnet20"),
        gate_lr="100",
    )
    recipe = validate(
        dict(model=dict(name="cifar_resnet20"), optim=dict(name="sgd", lr=0.1, gate_lr="1000x"))
    )
    # a result may be that large, and a stored recipe is read again
    assert recipe.optim.gate_lr == 100
    assert validate(recipe.model_dump()) == recipe


def test_weights_are_asked_for_before_anything_is_written(tmp_path):
    for name in (
        "tcnn_resnet50_224",
        "refined_vit_s_384",
        "coatnet_0_384",
        "tdrl_fused_100ep",
        "digits_exact",
    ):
        with pytest.raises(iso.UserError, match=f"{name} .*model.weights=FILE"):
            iso.train(
                iso.load_recipe(name, [f"out={tmp_path / name}", "data.source=digits"]), show=False
            )
    assert not list(tmp_path.iterdir())
    for name in (
        "tdrl_vit_ti_scratch",
        "digits_cnn",
        "refined_vit_s",
        "coatnet_0",
        "tcnn_late_400",
    ):
        assert iso.load_recipe(name).model.start == "random"


def test_label_maps_need_a_model_that_classifies_its_patches(tmp_path):
    changes = [
        "token_labels.weight=0.5",
        "data.source=digits",
        f"out={tmp_path}",
        "model.kwargs.depth=2",
    ]
    changes += [
        "data.size=[32,32]",
        "model.kwargs.img_size=32",
        "data.crop_pct=null",
        "data.workers=0",
    ]
    refused("classifies its patches", Run, iso.load_recipe("refiner_plain_b", changes))


def test_a_key_that_is_given_twice_is_named(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text(
        "model: {name: cifar_resnet20}\noptim: {lr: 0.01}\noptim: {weight_decay: 0.0}\n"
    )
    refused("optim is given twice", iso.load_recipe, str(path))


def test_an_empty_path_is_no_folder():
    with pytest.raises(ValueError, match="is empty; give a path, or null"):
        iso.Recipe(model={"name": "cifar_resnet20"}, out="")
