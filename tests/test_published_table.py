"""`isomorph table`: whole tables of the papers with the commands of their rows, and what runs of them measured."""

import json
import re
import shlex
from pathlib import Path

import pytest

from command_line import isomorph
from isomorph.cli.run import app
from isomorph.lab.recipes import RECIPES, load_recipe
from isomorph.lab.recipes.tables import (
    PAPERS,
    find_table,
    published_tables,
    table_with_evaluations,
    table_with_runs,
    tables_of,
)
from isomorph.lab.report.evaluations import read_evaluations
from isomorph.lab.report.published_table import COLUMNS, MEASURED, published_charts, published_table
from isomorph.lab.report.run_files import read_run_logs
from isomorph.lab.training.recipe.differences import describe_differences
from refusals import refused

TABLES = published_tables()


def write_run(folder, recipe, *epochs, overrides=(), **fields):
    """The files of a run of a recipe, as training writes them."""
    folder.mkdir(parents=True)
    written = load_recipe(recipe, list(overrides)).model_dump(mode="json") | fields
    (folder / "recipe.json").write_text(json.dumps(written))
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in epochs))
    return folder


def done(epochs, top1=50.0, **more):
    measured = {
        "top1": top1,
        "top5": 70.0,
        "images": 100,
        "train_top1": 30.0,
        "seconds": 7200,
    } | more
    return ({"epoch": 0, "loss": None, "top1": 0.1}, {"epoch": epochs, "loss": 2.0, **measured})


def filled(name, *folders):
    return table_with_runs(find_table(name), read_run_logs(folders))


# tables


@pytest.mark.parametrize("name", TABLES)
def test_rows_and_columns_of_every_table(name):
    table = TABLES[name]
    assert set(table.columns) <= COLUMNS.keys()
    assert table.rows
    for row in table.rows:
        assert row.values.keys() == set(table.columns) or "not in the paper" in row.label
    for chart in table.charts:
        assert {chart["x"], chart["y"], chart.get("by", chart["x"])} <= set(table.columns)
        assert published_charts(name, [chart], table.rows)
    text = published_table(table.columns, table.rows)
    assert len(text) == 1 + len(table.rows)
    assert {len(line) for line in text} == {len(text[0])}


def test_every_table_of_the_papers_is_there():
    """But those without results: CoAtNet's sizes and settings (1, 3, 10 to 12), TDRL's settings (4), diagrams."""
    numbers = {
        paper: {name.removeprefix(f"{paper} ") for name in TABLES if name.startswith(paper)}
        for paper in PAPERS.values()
    }
    for paper, last, without in (
        ("T-CNN", 5, ()),
        ("ConViT", 3, ()),
        ("CoAtNet", 14, (1, 3, 10, 11, 12)),
        ("TDRL", 10, (4,)),
        ("Refiner", 13, ()),
    ):
        for number in range(1, last + 1):
            assert (f"Table {number}" in numbers[paper]) == (number not in without), (paper, number)


@pytest.mark.parametrize("paper", PAPERS.values())
def test_every_published_recipe_has_a_row(paper):
    own = re.compile(r"in small|at CIFAR scale|Table 6 in small")
    for name, recipe in RECIPES.items():
        source = recipe.get("source", "")
        if not source.startswith(f"{paper} ") or own.search(source) or name.endswith("_g2sd"):
            continue
        rows = []
        for table in TABLES.values():
            for row in table.rows:
                if name in (row.recipe, row.before):
                    rows.append(row)
        assert rows, name
        for number in re.findall(r"(?:Table|Fig\.) \d+|B\.\d", source):
            known = f"{paper} {number}"
            if known in TABLES:
                here = [row for row in TABLES[known].rows if name in (row.recipe, row.before)]
                evaluated = [
                    row for row in TABLES[known].rows if any(name in line for line in row.commands)
                ]
                assert here or evaluated, (name, known)


def test_expected_numbers_are_those_of_the_tables():
    """What a recipe expects is printed in a row of it."""
    units = {"top-1": "top1", "top-5": "top5", "mIoU": "miou", "precision@1": "precision1"}
    checked = 0
    for name, recipe in RECIPES.items():
        if recipe.get("name") == "mean" or not tables_of(name):
            continue
        printed = {}
        for table in tables_of(name):
            for row in TABLES[table].rows:
                if row.recipe == name:
                    for column, value in row.values.items():
                        if value is not None:
                            printed.setdefault(column, set()).add(value)
        text = recipe.get("expected", "").partition(" after ")[0]
        for number, unit in re.findall(r"(\d+(?:\.\d+)?) (top-1|top-5|mIoU|precision@1)", text):
            if "not published" in recipe["expected"] or units[unit] not in printed:
                continue
            assert float(number) in printed[units[unit]], (name, number, unit)
            checked += 1
        for unit, number in re.findall(r"(box AP|mask AP|FID) (\d+(?:\.\d+)?)", text):
            assert float(number) in printed[unit.lower().replace(" ", "_")], name
            checked += 1
    assert checked > 150


def test_commands_are_commands(tmp_path, monkeypatch):
    """Every line parses: the command, its options and their values."""
    monkeypatch.chdir(tmp_path)
    lines = {line for table in TABLES.values() for row in table.rows for line in row.commands}
    seen = set()
    for line in sorted(lines):
        if line.startswith("see docs/"):
            continue
        line, _, written = line.partition(" > ")
        assert bool(written) == ("--json" in line)
        words = shlex.split(line.replace("IMAGE", "image.jpg"))
        assert words.pop(0) == "isomorph"
        shape = (words[0], *(word for word in words if word.startswith("--")))
        if shape in seen:
            continue
        seen.add(shape)
        for word in words:
            if word.endswith(".safetensors"):
                path = tmp_path / word
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        if "--out" in words:
            (tmp_path / words[words.index("--out") + 1]).unlink(missing_ok=True)
        (tmp_path / "image.jpg").touch()
        if "--data" in words:
            words[words.index("--data") + 1] = "digits"
        app.parse_args(words, print_error=False, exit_on_error=False)
    assert {shape[0] for shape in seen} >= {"train", "evaluate", "robustness", "fuse", "analyze"}


def test_each_command_starts_from_the_one_before():
    rows = {row.label: row for row in find_table("TDRL Fig. 5").rows}
    first, fuse, last = rows["-V-4"].commands
    assert first == "isomorph train tdrl_fig5_v_4_g2sd"
    assert (
        fuse
        == "isomorph fuse runs/tdrl_fig5_v_4_g2sd/model.safetensors --out tdrl_fig5_v_4_g2sd-fused.safetensors"
    )
    assert (
        last
        == "isomorph train tdrl_fused_100ep --model.weights tdrl_fig5_v_4_g2sd-fused.safetensors "
        "--out runs/tdrl_fused_100ep-from-tdrl_fig5_v_4_g2sd"
    )
    *_, own_crop, calibrated = find_table("Refiner Table 5").rows[-1].commands
    assert "--rfc" not in own_crop
    assert "--rfc 1.130 --rfc-fill black" in calibrated


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("convit table 2", "ConViT Table 2"),
        ("CoAtNet Figure 1", "CoAtNet Fig. 1"),
        ("TDRL appendix B.9", "TDRL B.9"),
        ("refiner  Tab. 13", "Refiner Table 13"),
        ("TDRL Fig. 2a", "TDRL Fig. 2"),
        ("tdrl figure 3 (c)", "TDRL Fig. 3"),
    ],
)
def test_names_are_read_in_any_spelling(name, known):
    assert find_table(name).name == known


@pytest.mark.parametrize(
    ("field", "recipes"),
    [
        (
            "keep_every",
            [
                "tcnn_resnetrs270",
                "deit_s_100pct",
                "convit_s",
                "deit_s_distilled",
                "deit_ti",
                "convit_ti",
            ],
        ),
        (
            "monitor_every",
            [
                f"tdrl_{arm}_g2sd"
                for arm in ("plain", "fig3_none", "fig3_rescale", "fig3_batchnorm")
            ],
        ),
    ],
)
def test_runs_of_figures_along_training_write_what_they_draw(field, recipes):
    page = (Path(__file__).parents[1] / "docs" / "guides" / "figures.md").read_text()
    for name in recipes:
        assert getattr(load_recipe(name), field)
        assert name in page or "fig3" in name


def test_unknown_tables():
    refused("ConViT has no 'Table 22' here; give one of Table 1, ", find_table, "ConViT Table 22")
    refused("there is no table 'nothing'; give a paper and its table", find_table, "nothing")
    refused("ConViT has no 'such table'", find_table, "ConViT")


# runs


def test_measured_next_to_expected_with_a_chart_by_fraction(tmp_path):
    source = RECIPES["convit_s_10pct"]["source"]
    table = filled(
        "ConViT Table 2",
        write_run(tmp_path / "a", "convit_s_10pct", *done(3000)),
        write_run(tmp_path / "b", "deit_s_10pct", *done(3000, 40.0)),
        write_run(
            tmp_path / "seed1",
            "convit_s_10pct",
            *done(3000, 52.0),
            name="mine",
            seed=1,
            source=source,
        ),
        write_run(tmp_path / "other", "coatnet_0", *done(300, 80.0)),
    )
    rows = {row.label: row for row in table.rows}
    assert len(rows) == 10
    assert [result.run for result in rows["ConViT-S on 10%"].runs] == ["a", "seed1"]
    assert rows["ConViT-S on 10%"].values["top1"] == 59.6
    head, *body = published_table(table.columns, table.rows)
    line = next(line for line in body if line[head.index("run")] == "a")
    assert line[head.index("measured top-1 (%)")] == "50.00 (40.4 to 59.6)"
    assert line[head.index("differs from the row")] == ""
    (chart,) = published_charts(table.name, table.charts, table.rows)
    assert chart.lines["ConViT-S, published"].x == [5, 10, 30, 50, 100]
    assert chart.lines["ConViT-S, measured"].x == [10]
    assert chart.lines["ConViT-S, measured"].y == [51.0]


DIFFERENT = {
    "CIFAR-10, 2 of 300 epochs": ["data.source=cifar10", "epochs=2"],
    "30 of 300 epochs": ["epochs=30"],
    "optim.lr": ["optim.lr=1e-4"],
    "model.kwargs.depth": ["model.kwargs.depth=4"],
    "data.size": ["data.size=[96,96]"],
    "augment.mixup, drop_path": ["drop_path=0", "augment.mixup=0"],
    "optim.clip_grad, optim.lr, optim.warmup_epochs and 1 more field": [
        *(
            "optim.clip_grad=1",
            "optim.lr=1e-4",
            "optim.weight_decay=0",
            "seed=3",
            "scale.accumulate=2",
        ),
        "optim.warmup_epochs=1",
    ],
    "": [
        "seed=3",
        "data.root=/data",
        "data.workers=2",
        "evaluate_every=5",
        "scale.accumulate=8",
        "amp=none",
    ],
}


@pytest.mark.parametrize("said", DIFFERENT)
def test_runs_that_are_not_the_row_say_why_and_do_not_count(said, tmp_path):
    folder = write_run(tmp_path / "run", "convit_s_100pct", *done(300), overrides=DIFFERENT[said])
    recipe = json.loads((folder / "recipe.json").read_text())
    assert describe_differences(recipe, load_recipe("convit_s_100pct"), recipe["epochs"]) == said
    table = filled("ConViT Table 2", folder)
    charts = published_charts(table.name, table.charts, table.rows)
    head, *body = published_table(table.columns, table.rows)
    line = next(line for line in body if "run" in line)
    assert (line[head.index("measured top-1 (%)")] == "-") == bool(said)
    assert any("measured" in name for name in charts[0].lines) == (not said)
    assert ("top-1 50.00 (40.4 to 59.6), top-5 70.00" in line[-1]) == bool(said)


@pytest.mark.parametrize("name", ["CoAtNet Fig. 1", "ConViT Fig. 8", "T-CNN Fig. 6", "TDRL Fig. 2"])
def test_runs_of_a_figure_without_numbers_have_their_accuracy(name, tmp_path):
    recipe = next(row.recipe for row in TABLES[name].rows if row.recipe)
    folder = write_run(tmp_path / "run", recipe, *done(2, 33.0), overrides=["epochs=2"])
    table = filled(name, folder)
    head, *body = published_table(table.columns, table.rows)
    assert "top-1 (%)" not in head
    line = next(line for line in body if "run" in line)
    assert "top-1 33.00" in line[-1]


def test_a_run_in_progress_is_not_the_row(tmp_path):
    table = filled("ConViT Table 1", write_run(tmp_path / "run", "convit_ti", *done(12)))
    (result,) = next(row for row in table.rows if row.runs).runs
    assert result.differs == "at epoch 12 of 300"


def test_a_recipe_has_a_row_in_every_table_of_its(tmp_path):
    assert tables_of("tdrl_plain_100ep") >= ["TDRL Fig. 2", "TDRL Fig. 3"]
    folder = write_run(tmp_path / "run", "coatnet_2", *done(300, 84.0))
    for name in (
        "CoAtNet Table 4",
        "CoAtNet Table 6",
        "CoAtNet Table 7",
        "CoAtNet Table 9",
        "CoAtNet Table 13",
    ):
        assert sum(len(row.runs) for row in filled(name, folder).rows) == 1


def test_runs_from_other_weights_are_in_their_rows(tmp_path):
    weights = "tdrl_fig5_v_8_g2sd-fused.safetensors"
    overrides = [f"model.weights={weights}"]
    table = filled(
        "TDRL Fig. 5",
        write_run(tmp_path / "run", "tdrl_fused_100ep", *done(100), overrides=overrides),
    )
    assert [row.label for row in table.rows if row.runs] == ["-V-8"]


def test_other_metrics_and_the_mean_of_glue(tmp_path):
    folders = []
    for i, task in enumerate(("mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb")):
        key = {"cola": "matthews", "stsb": "spearman"}.get(task, "accuracy")
        epochs = RECIPES[f"glue_{task}"]["epochs"]
        row = {"epoch": epochs, key: 70.0 + i, "seconds": 10}
        folders.append(write_run(tmp_path / task, f"glue_{task}", row))
    table = filled("Refiner Table 6", *folders)
    mean = next(
        row for row in table.rows if row.values["part"] == "average" and row.label == "BERT-small"
    )
    assert mean.values["score"] == 75.1
    assert [result.measured["score"] for result in mean.runs] == [73.5]
    without_one = filled("Refiner Table 6", *folders[1:])
    assert not any(row.runs for row in without_one.rows if row.values["part"] == "average")
    assert MEASURED["precision1"] == ("top1",)
    box = filled(
        "TDRL Table 2", write_run(tmp_path / "d", "vitdet_tdrl_ti", {"epoch": 100, "box_ap": 46.0})
    )
    (result,) = next(row for row in box.rows if row.runs).runs
    assert result.measured == {"box_ap": 46.0}


# evaluations

FULL = {"imagenet": 50_000, "imagenet-a": 7_500, "imagenet-r": 30_000, "imagenet-sketch": 50_889}
FULL |= {
    f"imagenet-v2-{part}": 10_000 for part in ("matched-frequency", "threshold-0.7", "top-images")
}


def write_evaluation(path, model, size=None, images=FULL, **top1):
    """A file as `isomorph evaluate --suite ... --json` prints it."""
    rows = []
    for suite, value in top1.items():
        name = suite.replace("_", "-").replace("threshold-0-7", "threshold-0.7")
        rows.append(
            {"suite": name, "top1": value, "images": images[name]}
            | ({"size": [size, size]} if size else {})
        )
    path.write_text(json.dumps({"model": model, "rows": rows, "cost": []}))
    return path


def evaluated(name, *files):
    return table_with_evaluations(find_table(name), read_evaluations(files))


def measured_rows(table):
    return {row.label: [result.measured for result in row.runs] for row in table.rows if row.runs}


@pytest.mark.parametrize(
    "model", ["runs/tcnn_resnetrs50/model.safetensors", "runs/tcnn_resnetrs50"]
)
def test_evaluations_are_in_the_rows_of_their_models(model, tmp_path):
    suites = write_evaluation(
        tmp_path / "s.json", model, 224, imagenet=80.0, imagenet_a=18.0, imagenet_r=40.0
    )
    corrupted = tmp_path / "c.json"
    cells = {"suite": "imagenet-c", "cells": [], "images": 50_000, "mean_top1": 47.0, "mce": 66.0}
    corrupted.write_text(json.dumps({"model": model} | cells))
    table = evaluated("T-CNN Table 2", suites, corrupted)
    expected = [{"top1": 80.0, "imagenet_a": 18.0, "imagenet_r": 40.0}, {"imagenet_c": 47.0}]
    assert measured_rows(table) == {"T-ResNet50-RS": expected}
    head, *body = published_table(table.columns, table.rows)
    assert "47.00" in [row[head.index("measured ImageNet-C (%)")] for row in body]
    assert not measured_rows(evaluated("ConViT Table 2", suites))


def test_evaluations_of_other_sizes_and_ratios_are_not_the_row(tmp_path):
    model = "runs/tcnn_resnetrs350/model.safetensors"
    files = [
        write_evaluation(tmp_path / f"{size}.json", model, size, imagenet=80.0 + size / 100)
        for size in (320, 416)
    ]
    assert measured_rows(evaluated("T-CNN Fig. 7", *files)) == {"T-ResNet350-RS": [{"top1": 84.16}]}
    path = tmp_path / "rfc.json"
    row = {"suite": "imagenet", "top1": 85.9, "images": 50_000, "rfc": 1.13, "rfc_fill": "black"}
    path.write_text(
        json.dumps(
            {"model": "runs/refined_vit_l_448", "rows": [row, row | {"rfc": 1.2}], "cost": []}
        )
    )
    assert measured_rows(evaluated("Refiner Table 5", path)) == {
        "Refined-ViT-448": [{"rfc_top1": 85.9}]
    }


def test_real_labels_are_added_to_what_a_run_measured(tmp_path):
    run = write_run(tmp_path / "refined_vit_s_384", "refined_vit_s_384", *done(30, 84.0))
    path = tmp_path / "refined_vit_s_384-real.json"
    row = {"suite": "real", "top1": 88.0, "images": 46_837}  # of 50,000: those with a label
    path.write_text(
        json.dumps({"model": "runs/refined_vit_s_384/model.safetensors", "rows": [row], "cost": []})
    )
    table = table_with_evaluations(filled("Refiner Table 7", run), read_evaluations([path]))
    (filled_row,) = [row for row in table.rows if row.runs]
    assert filled_row.label == "Refined-ViT-S"
    assert filled_row.values["size"] == 384
    head, *body = published_table(table.columns, table.rows)
    lines = [
        line
        for line in body
        if line[head.index("ReaL top-1 (%)")] == "88.9" and line[head.index("run")] != "-"
    ]
    measured = [
        [line[head.index(f"measured {column}")] for column in ("top-1 (%)", "ReaL top-1 (%)")]
        for line in lines
    ]
    assert measured == [["84.00 (75.6 to 89.9)", "-"], ["-", "88.00"]]
    *_, command = filled_row.commands
    assert command.startswith(
        "isomorph evaluate runs/refined_vit_s_384/model.safetensors --suite real "
    )


def test_every_printed_real_accuracy_of_a_run_has_its_command():
    for row in find_table("Refiner Table 7").rows:
        makes = any("--suite real" in line for line in row.commands)
        assert makes == bool(row.recipe and row.values.get("real_top1")), row.label


def test_robustness_of_tdrl(tmp_path):
    values = dict(imagenet=78.0, imagenet_a=14.0, imagenet_r=41.0, imagenet_sketch=28.0)
    values |= dict(
        imagenet_v2_matched_frequency=67.0,
        imagenet_v2_threshold_0_7=75.0,
        imagenet_v2_top_images=80.0,
    )
    table = evaluated(
        "TDRL Table 6", write_evaluation(tmp_path / "v.json", "runs/tdrl_vit_ti_300ep", **values)
    )
    (found,) = measured_rows(table)["TDRL"]
    assert found == dict(zip(table.columns, values.values(), strict=True))


def test_parts_of_suites_and_random_weights_do_not_count(tmp_path):
    part = write_evaluation(
        tmp_path / "p.json", "deit_s", 224, images={"imagenet": 100}, imagenet=70.0
    )
    random = write_evaluation(tmp_path / "r.json", "deit_s (random weights)", imagenet=0.1)
    found = {
        row.label: row.runs for row in evaluated("T-CNN Table 2", part, random).rows if row.runs
    }
    assert [result.differs for result in found["DeiT-S"]] == [
        "100 of 50,000 images of imagenet",
        "random weights",
    ]


def test_files_that_are_not_evaluations(tmp_path):
    path = tmp_path / "x.json"
    for text in ("[", "[" * 100_000, "[1]", '{"top1": 3}'):
        path.write_text(text)
        refused("is not a result", read_evaluations, [path])
    path.write_text('{"model": "m", "top1": 3}')
    assert read_evaluations([path]) == []
    shown = isomorph("table", "T-CNN Table 2", path)
    assert "has no result of a test suite, and is left out" in shown.stderr
    assert "T-ResNet50-RS" in shown.stdout


def test_command_line(tmp_path):
    run = write_run(tmp_path / "runs/a", "convit_s_10pct", *done(3000))
    listed = isomorph("table", folder=tmp_path)
    assert "TDRL B.9" in listed.stdout
    empty = isomorph("table", "T-CNN Table 3", folder=tmp_path)
    assert "80.84" in empty.stdout
    assert (
        "isomorph train tcnn_resnet50_320 --model.weights runs/tcnn_late_400/model.safetensors"
        in empty.stdout
    )
    page = isomorph("table", "ConViT Table 2", run, "--out", "table.html", folder=tmp_path)
    assert "50.00 (40.4 to 59.6)" in page.stdout
    assert "ConViT-S, published" in (tmp_path / "table.html").read_text()
    file = write_evaluation(
        tmp_path / "deit.json", "runs/deit_s/model.safetensors", 224, imagenet=79.0
    )
    shown = isomorph("table", "T-CNN Table 2", file, folder=tmp_path).stdout
    assert "79.00" in shown
    rows = json.loads(isomorph("table", "ConViT Table 2", run, "--json", folder=tmp_path).stdout)[
        "rows"
    ]
    assert next(row for row in rows if row["runs"])["runs"][0]["measured"]["top1"] == 50.0


@pytest.mark.parametrize(
    ("name", "count"),
    [("TDRL Table 7", 3), ("T-CNN Table 4", 8), ("T-CNN Table 3", 8), ("Refiner Table 13", 7)],
)
def test_rows_of_one_label_are_all_in_the_chart(name, count):
    table = find_table(name)
    (chart,) = published_charts(name, table.charts, table.rows)
    assert sum(map(len, chart.series.values())) == count


def test_a_run_of_iterations_in_progress_is_not_the_row(tmp_path):
    folder = write_run(tmp_path / "run", "vitdet_tdrl_ti", {"epoch": 10, "box_ap": 30.0})
    (folder / "steps.jsonl").write_text(json.dumps({"epoch": 10, "step": 18320}) + "\n")
    table = filled("TDRL Table 2", folder)
    (result,) = next(row for row in table.rows if row.runs).runs
    assert result.differs == "at step 18,320 of 184,375"


def test_calibrated_top1_is_that_of_imagenet(tmp_path):
    path = tmp_path / "rfc.json"
    row = {"suite": "imagenet", "top1": 85.9, "images": 50_000, "rfc": 1.13}
    other = {"suite": "imagenet-a", "top1": 30.0, "images": 7_500, "rfc": 1.13}
    result = {"model": "runs/refined_vit_l_448", "rows": [row, other], "cost": []}
    path.write_text(json.dumps(result))
    table = table_with_evaluations(find_table("Refiner Table 5"), read_evaluations([path]))
    measured = [result.measured for row in table.rows for result in row.runs]
    assert measured
    assert all(values == {"rfc_top1": 85.9} for values in measured)


def test_measured_points_have_measured_coordinates(tmp_path):
    model = "runs/tcnn_resnetrs50"
    suites = tmp_path / "s.json"
    row = {"suite": "imagenet", "top1": 80.0, "images": 50_000, "size": [224, 224]}
    suites.write_text(json.dumps({"model": model, "rows": [row], "cost": []}))
    corrupted = tmp_path / "c.json"
    cells = {"suite": "imagenet-c", "cells": [], "images": 50_000, "mean_top1": 47.0, "mce": 66.0}
    corrupted.write_text(json.dumps({"model": model} | cells))
    for files, points in (([corrupted], None), ([suites, corrupted], {"c": (80.0, 47.0)})):
        table = table_with_evaluations(find_table("T-CNN Table 2"), read_evaluations(files))
        chart = published_charts(table.name, table.charts, table.rows)[0]
        assert chart.series.get("T-CNNs, measured") == points
    head, *body = published_table(table.columns, table.rows)
    line = next(line for line in body if line[head.index("run")] != "-")
    assert line[head.index("hours")] == "-"  # an evaluation trains nothing


def test_the_mean_is_of_all_runs_that_count(tmp_path):
    row = {"epoch": 1, "accuracy": 10.0}
    folders = [write_run(tmp_path / "a_trial", "glue_mnli", row, overrides=["epochs=1"])]
    for task in ("mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb"):
        key = {"cola": "matthews", "stsb": "spearman"}.get(task, "accuracy")
        row = {"epoch": RECIPES[f"glue_{task}"]["epochs"], key: 70.0}
        folders.append(write_run(tmp_path / task, f"glue_{task}", row))
    table = filled("Refiner Table 6", *folders)
    means = [row for row in table.rows if row.values["part"] == "average" and row.runs]
    assert [result.measured["score"] for result in means[0].runs] == [70.0]


@pytest.mark.parametrize("group", ["distill", "augment"])
def test_a_group_that_is_switched_off_is_a_difference(group, tmp_path):
    folder = write_run(tmp_path / "run", "convit_s_plus_distilled", *done(300), **{group: None})
    results = [result for row in filled("ConViT section 3", folder).rows for result in row.runs]
    assert [result.differs for result in results] == [group]


@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        ("upernet_plain_ti_distilled", "task.teacher=null"),
        ("tdrl_plain_g2sd", "mask.teacher=null mask.teacher_model=null"),
    ],
)
def test_a_run_without_its_teacher_is_another(recipe, field):
    published = load_recipe(recipe)
    own = load_recipe(recipe, field.split()).model_dump(mode="json")
    assert field.partition("=")[0] in describe_differences(own, published)
    assert "teacher" not in describe_differences(published.model_dump(mode="json"), published)


def test_where_a_run_started_is_its_row(tmp_path):
    def start(weights):
        folder = tmp_path / Path(weights).stem
        run = write_run(folder, "tdrl_fused_100ep", *done(100))
        recipe = json.loads((run / "recipe.json").read_text())
        recipe["model"]["weights"] = weights
        (run / "recipe.json").write_text(json.dumps(recipe))
        return run

    right = start("tdrl_fig5_v_8_g2sd-fused.safetensors")
    other = start("mine.safetensors")
    counted = {row.label: row.runs for row in filled("TDRL Fig. 5", right, other).rows if row.runs}
    assert {label: [run.differs for run in runs] for label, runs in counted.items()} == {
        "-V-8": [""]
    }
    (row,) = [row for row in filled("TDRL Table 9", right, other).rows if row.runs]
    assert [run.differs for run in row.runs] == [
        f"from {name}, not {row.before}"
        for name in (f"{right.name}.safetensors", "mine.safetensors")
    ]


@pytest.mark.parametrize(
    ("fields", "differs"),
    [
        ({"images": 50_000, "mce": 66.0}, ""),
        ({"images": 200, "mce": 66.0}, "75 cells of 200 images"),
        ({"images": 50_000}, "75 cells of 50,000 images"),
        ({"images": 50_000, "size": [320, 320]}, "at 320"),
    ],
)
def test_only_complete_robustness_results_count(fields, differs, tmp_path):
    path = tmp_path / "c.json"
    result = {"model": "deit_s", "suite": "imagenet-c", "cells": [{}] * 75, "mean_top1": 47.0}
    path.write_text(json.dumps(result | {"size": [224, 224]} | fields))
    (row,) = [row for row in evaluated("T-CNN Table 2", path).rows if row.runs]
    assert [run.differs for run in row.runs] == [differs]


@pytest.mark.parametrize(
    ("table", "model", "own", "given", "is_counted"),
    [
        ("T-CNN Fig. 7", "tcnn_resnetrs350", 320, None, False),
        ("T-CNN Fig. 7", "tcnn_resnetrs350", 320, 416, True),
        ("T-CNN Table 4", "resnetrs50", 160, 160, False),
        ("T-CNN Table 4", "resnetrs50", 160, None, False),
        ("T-CNN Table 4", "resnetrs50", 160, 224, True),
        ("Refiner Table 5", "refined_vit_l_448", 448, None, True),
        ("Refiner Table 5", "refined_vit_l_448", 448, 224, False),
        ("TDRL Table 6", "tdrl_vit_ti_300ep", 224, None, True),
        ("TDRL Table 6", "tdrl_vit_ti_300ep", 224, 224, True),
        ("TDRL Table 6", "tdrl_vit_ti_300ep", 224, 320, False),
    ],
)
def test_an_evaluation_counts_at_the_size_of_its_row(
    table, model, own, given, is_counted, tmp_path
):
    path = write_evaluation(tmp_path / "s.json", model, given, imagenet=80.0)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"input_size": [own, own]}))
    assert bool(measured_rows(evaluated(table, path))) == is_counted


def test_a_rectangle_is_not_a_square(tmp_path):
    path = write_evaluation(tmp_path / "s.json", "deit_s", 224, imagenet=80.0)
    path.write_text(path.read_text().replace("[224, 224]", "[224, 320]"))
    assert not measured_rows(evaluated("T-CNN Table 2", path))


def test_calibration_with_other_padding_is_not_the_row(tmp_path):
    path = tmp_path / "rfc.json"
    row = {"suite": "imagenet", "top1": 85.9, "images": 50_000, "rfc": 1.13, "rfc_fill": "zero"}
    path.write_text(json.dumps({"model": "refined_vit_l_448", "rows": [row]}))
    (found,) = [row for row in evaluated("Refiner Table 5", path).rows if row.runs]
    assert [run.differs for run in found.runs] == ["padded with zero"]


def test_out_needs_a_table_name(tmp_path):
    said = isomorph("table", "--out", "t.html", folder=tmp_path).stderr
    assert "--out t.html is for one table; give its name" in said
