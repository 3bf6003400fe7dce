"""Files of GLUE: published TSV files, parquet files as on the hub, and what is said about wrong ones."""

import sys
from contextlib import nullcontext
from pathlib import Path

import huggingface_hub
import pyarrow
import pytest
from pyarrow.parquet import write_table

import isomorph as iso
from isomorph.recipes import RECIPES
from isomorph.recipes.language import TABLE_6
from isomorph.tasks.language import glue
from isomorph.tasks.language.classify import TextClassificationPart
from isomorph.tasks.language.glue import GLUE, open_root, read_examples, read_parquet, read_tsv, training_sentences

TSV = {
    "RTE/train": "index\tsentence1\tsentence2\tlabel\n0\ta b c\tb c\tentailment\n1\td e\tf g h i\tnot_entailment\n",
    "CoLA/train": 'gj04\t1\t\ta b c d\ngj04\t0\t*\tb "c\n',
    "CoLA/dev": 'gj04\t0\t*\tb "c\n',
    "STS-B/dev": "index\tgenre\tsentence1\tsentence2\tscore\n0\tnews\ta b\tc d\t2.5\n",
}
TEXTS = {
    "cola": ["sentence"],
    "sst2": ["sentence"],
    "mnli": ["premise", "hypothesis"],
    "qnli": ["question", "sentence"],
}
TEXTS["qqp"] = ["question1", "question2"]
"""Columns of the hub's files; sentence1 and sentence2 in the others."""


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder of small TSV files as published."""
    folder = tmp_path_factory.mktemp("published")
    for name, content in TSV.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.tsv").write_text(content)
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder of the parquet files of all tasks as on the hub, the training examples in two files."""
    folder = tmp_path_factory.mktemp("hub")
    for name in GLUE:
        splits = ["train-00000-of-00002", "train-00001-of-00002"]
        splits += [f"{split}{'_matched' * (name == 'mnli')}-00000-of-00001" for split in ("validation", "test")]
        for split in splits:
            write_parquet(folder / name / f"{split}.parquet", name, -1 if split.startswith("test") else 1)
    return folder


def write_parquet(path, name, first, /, **changes):
    path.parent.mkdir(exist_ok=True)
    texts = {column: [f"{column} one", f"{column} two"] for column in TEXTS.get(name, ["sentence1", "sentence2"])}
    labels = [float(first), 2.5] if name == "stsb" else [first, 0]
    columns = {**texts, "label": labels, "idx": [0, 1]} | changes
    write_table(pyarrow.table({key: value for key, value in columns.items() if value is not None}), path)


@pytest.mark.parametrize(
    ("name", "train", "dev", "first"),
    [
        ("rte", 2490, 277, 1),
        ("cola", 8551, 1043, 1),
        ("sst2", 67_349, 872, 0),
        ("mrpc", 3667, None, 1),
    ],
)
def test_counts(data_root, name, train, dev, first):
    task = GLUE[name]
    rows = read_tsv(data_root / "glue" / task.folder / "train.tsv", task)
    assert (len(rows), rows[0][1]) == (train, first)
    assert {len(texts) for texts, _ in rows} == {len(task.texts)}
    assert {label for _, label in rows} == {0, 1}
    if dev:
        assert len(read_tsv(data_root / "glue" / task.folder / "dev.tsv", task)) == dev


def test_columns_by_name_and_number(published):
    assert read_tsv(published / "CoLA" / "dev.tsv", GLUE["cola"])[0] == (('b "c',), 0)
    assert read_tsv(published / "STS-B" / "dev.tsv", GLUE["stsb"])[0] == (("a b", "c d"), 2.5)
    assert len(training_sentences(published)) == 2 * 2 + 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rte", "", "is empty, and RTE needs the column 'sentence1'"),
        (
            "rte",
            "index\tsentence1\tlabel\n",
            "has the columns index, sentence1, label, and RTE needs .*'sentence2'",
        ),
        ("rte", "index\tsentence1\tsentence2\tlabel\n", "is empty: it has no examples of RTE"),
        ("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\n", "line 2: 3 columns, and 4 are needed"),
        (
            "rte",
            "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n",
            "line 2: label 'maybe' is unknown; use ent",
        ),
        ("cola", "x\t2\t\ta\n", "line 1: label '2' is unknown; use 0, 1"),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\thigh\n", "line 2: label 'high' is not a score; give a number"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, name, content, message):
    path = tmp_path / "train.tsv"
    path.write_text(content)
    with pytest.raises(iso.UserError, match=message):
        read_tsv(path, GLUE[name])


def test_the_recipes_name_all_tasks():
    names = TextClassificationPart.model_json_schema()["properties"]["dataset"]["enum"]
    assert sorted(names) == sorted(GLUE) == sorted(TABLE_6)
    assert all(f"glue_{name}" in RECIPES and f"glue_{name}_refined" in RECIPES for name in GLUE)


@pytest.mark.parametrize("name", sorted(GLUE))
def test_files_as_on_the_hub(hub, name):
    texts = TEXTS.get(name, ["sentence1", "sentence2"])
    first = (tuple(f"{column} one" for column in texts), 1.0)
    assert read_examples(hub, name, "train")[::2] == [first, first]
    assert read_examples(hub / name, name, "test")[0] == first


@pytest.mark.parametrize(
    ("name", "label", "changes", "message"),
    [
        ("rte", 1, dict(sentence2=None), "has the columns sentence1, label, idx, and RTE needs the column 'sentence2'"),
        ("rte", 2, {}, r"label 2 is unknown; use 0 \(entailment\), 1 \(not_entailment\)"),
        ("sst2", -1, {}, "label -1 is unknown.*the hub's test files have no labels"),
        ("sst2", 1, dict(label=["good", "bad"]), "label 'good' is not a number"),
        ("sst2", 1, dict(sentence=["a", None]), "has empty cells"),
        (
            "sst2",
            1,
            dict(sentence=pyarrow.array([], "string"), label=[], idx=[]),
            "is empty: it has no examples of SST-2",
        ),
    ],
)
def test_what_is_wrong_with_parquet_files_is_said(tmp_path, name, label, changes, message):
    path = tmp_path / "data" / "train-00000-of-00001.parquet"
    write_parquet(path, name, label, **changes)
    with pytest.raises(iso.UserError, match=message):
        read_parquet([path], GLUE[name])


def test_damaged_and_missing_files(tmp_path, monkeypatch):
    path = tmp_path / "train-0.parquet"
    path.write_text("sentence\tlabel")
    with pytest.raises(iso.UserError, match=r"train-0.parquet cannot be read"):
        read_parquet([path], GLUE["sst2"])
    with pytest.raises(
        iso.UserError, match=r"no MNLI/dev_matched.tsv in .*, nor mnli/validation_matched-\*.parquet; give"
    ):
        read_examples(tmp_path, "mnli", "test")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(iso.UserError, match=r"reading parquet files needs pyarrow; run pip install -e '.\[data\]'"):
        read_parquet([path], GLUE["sst2"])


def test_a_name_on_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def download(name, **options):
        asked.append((name, options))
        return str(hub)

    monkeypatch.setattr(glue, "impatient_hub", nullcontext)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    root = open_root(Path("nyu-mll/glue"), ["rte"])
    assert read_examples(root, "rte", "test")
    assert asked == [("nyu-mll/glue", dict(repo_type="dataset", allow_patterns=["rte/*.parquet"]))]
    assert open_root(hub) == hub


def test_the_hub_does_not_answer(monkeypatch, tmp_path):
    def fail(*arguments, **options):
        raise ConnectionError("no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(glue, "impatient_hub", nullcontext)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        iso.UserError, match=r"the hub does not answer; run `hf download nyu-mll/glue .*'rte/\*.parquet'"
    ):
        open_root(Path("nyu-mll/glue"), ["rte"])
