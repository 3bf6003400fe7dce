"""`isomorph table`: measured results beside the expected ones, by recipe, and the chart that the paper has."""

import json

import pytest

from isomorph.recipes import RECIPES
from isomorph.report.published_table import published_charts, published_rows, published_table
from isomorph.report.run_files import read_run_logs
from refusals import refused


def write_run(folder, recipe, *epochs, **fields):
    folder.mkdir()
    (folder / "recipe.json").write_text(json.dumps({"name": recipe, **RECIPES.get(recipe, {}), **fields}))
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in epochs))
    return folder


@pytest.fixture
def logs(tmp_path):
    def done(top1):
        before = {"epoch": 0, "loss": None, "top1": 0.1}
        return (
            before,
            {"epoch": 1, "loss": 2.0, "top1": top1, "top5": 70.0, "images": 100, "train_top1": 30.0, "seconds": 7200},
        )

    tenth = RECIPES["convit_s_10pct"]
    folders = [
        write_run(tmp_path / "a", "convit_s_10pct", *done(50.0)),
        write_run(tmp_path / "b", "deit_s_10pct", *done(40.0)),
        write_run(tmp_path / "seed1", "mine", *done(52.0), source=tenth["source"], data=tenth["data"]),
        write_run(tmp_path / "other", "coatnet_0", *done(80.0)),
    ]
    return read_run_logs(folders)


def test_measured_beside_expected_with_a_chart_by_fraction(logs):
    rows = {row["run"] or row["recipe"]: row for row in published_rows("convit Table 2", RECIPES, logs)}
    assert len(rows) == 11  # ten recipes, one of them with two runs; a run of another table is left out
    assert rows["a"] | {"fraction": 0.1, "expected_top1": 59.6, "expected_top5": 80.3, "top1": 50.0} == rows["a"]
    assert (rows["a"]["hours"], rows["a"]["train_top1"], rows["seed1"]["top1"]) == (2, 30, 52)
    head, *body = published_table(list(rows.values()))
    assert head[2:6] == ["top-1 (%), expected", "measured (95% interval)", "top-5 (%), expected", "measured"]
    assert ["convit_s_10pct", "a", "59.60", "50.00 (40.4 to 59.6)", "80.30", "70.00"] in [line[:6] for line in body]
    (chart,) = published_charts("ConViT Table 2", list(rows.values()))
    assert chart.lines["convit_s, expected"].x == [5, 10, 30, 50, 100]
    assert (chart.lines["deit_s, measured"].x, chart.lines["deit_s, measured"].y) == ([10], [40.0])


def test_time_of_training_where_the_data_is_the_same():
    rows = published_rows("T-CNN Table 1", RECIPES, [])
    (chart,) = published_charts("T-CNN Table 1", rows)
    assert chart.series["expected"]["tcnn_resnetrs50"] == (1.30, 81.0)
    assert {row["recipe"] for row in rows} >= {"tcnn_resnetrs350", "finetune_resnetrs50_unstrided"}


@pytest.mark.parametrize("table", ["Refiner Table 1", "Refiner Table 11", "TDRL B.8", "ConViT Fig. 8"])
def test_a_table_is_not_another_whose_number_begins_like_its(table):
    sources = {RECIPES[row["recipe"]]["source"] for row in published_rows(table, RECIPES, [])}
    assert all(table.partition(" ")[2] in source.replace(",", "").split("Refiner ")[-1] for source in sources)
    assert ("Table 11" in " ".join(sources)) == (table == "Refiner Table 11")


def test_unknown_tables():
    for name in ("ConViT", "ConViT Table 22", "nothing", ""):
        refused("no recipe is of .*; give a paper and its table, for example ", published_rows, name, RECIPES, [])
