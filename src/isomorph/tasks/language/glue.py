"""GLUE: its tasks, and their examples from the published TSV files or from parquet files as on the Hugging Face hub."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from isomorph.errors import UserError, optional_module
from isomorph.models.download import impatient_hub, is_connection_error

Column = str | int
"""A column by its name in the header, or by its number in a file without header."""
Row = tuple[tuple[str, ...], float]
"""The texts of an example, and its label: the number of its class, or a score."""
Split = Literal["train", "test"]
"""Examples to train on, or the development set."""
HUB_NAME = "nyu-mll/glue"
"""GLUE on the hub; its tasks are folders, with files such as rte/train-00000-of-00001.parquet."""


MAX_SCORE = 5
"""Largest score of STS-B."""


@dataclass(frozen=True)
class GlueTask:
    """A task: its folder, the columns of its texts and label, the labels in the file, metrics, the files to test on.

    Without `classes` labels are numbers (a regression). The first metric decides which epoch is best. `tolerant`: lines
    with too few columns are left out, which the published file has. On the hub, the columns of the texts are
    `hub_texts`, or have the same names; labels are numbers of classes there.
    """

    folder: str
    texts: tuple[Column, ...]
    label: Column
    labels: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    hub_texts: tuple[str, ...] = ()
    test: str = "dev"
    tolerant: bool = False


_PAIR, _BINARY = ("sentence1", "sentence2"), ("0", "1")
_ENTAILMENT, _PARAPHRASE = ("entailment", "not_entailment"), ("different", "paraphrase")
_THREE = ("entailment", "neutral", "contradiction")
_TWO_SCORES = ("accuracy", "f1")

GLUE: dict[str, GlueTask] = {
    "cola": GlueTask("CoLA", (3,), 1, _BINARY, ("unacceptable", "acceptable"), ("matthews", "accuracy"), ("sentence",)),
    "sst2": GlueTask("SST-2", ("sentence",), "label", _BINARY, ("negative", "positive")),
    "mrpc": GlueTask("MRPC", ("#1 String", "#2 String"), "Quality", _BINARY, _PARAPHRASE, _TWO_SCORES, _PAIR),
    "stsb": GlueTask("STS-B", _PAIR, "score", (), ("similarity",), ("spearman", "pearson")),
    "qqp": GlueTask(
        "QQP", ("question1", "question2"), "is_duplicate", _BINARY, _PARAPHRASE, _TWO_SCORES, tolerant=True
    ),
    "mnli": GlueTask(
        "MNLI", _PAIR, "gold_label", _THREE, _THREE, hub_texts=("premise", "hypothesis"), test="dev_matched"
    ),
    "qnli": GlueTask("QNLI", ("question", "sentence"), "label", _ENTAILMENT, _ENTAILMENT),
    "rte": GlueTask("RTE", _PAIR, "label", _ENTAILMENT, _ENTAILMENT),
}
"""The eight tasks of the paper's table, by name; WNLI is left out, as usual."""


def read_tsv(path: Path, task: GlueTask) -> list[Row]:
    """Return the examples of a published file.

    Raises: UserError, with file and line, for missing columns, unknown labels or an empty file.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    lines = [(n, line.rstrip("\r").split("\t")) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    columns, wanted = [], (*task.texts, task.label)
    if isinstance(task.label, str):
        header = [name.strip() for name in lines[0][1]] if lines else [""]
        for column in wanted:
            if column not in header:
                what = "is empty" if header == [""] else f"has the columns {', '.join(header)}"
                raise UserError(
                    f"{path} {what}, and {task.folder} needs the column {column!r}; give the published file"
                )
        columns, lines = [header.index(str(column)) for column in wanted], lines[1:]
    else:
        columns = [int(column) for column in wanted]
    rows: list[Row] = []
    for number, cells in lines:
        if len(cells) > max(columns):
            *texts, label = (cells[column].strip() for column in columns)
            rows.append((tuple(texts), _parse_label(label, task, f"{path}, line {number}")))
        elif not task.tolerant:
            raise UserError(f"{path}, line {number}: {len(cells)} columns, and {max(columns) + 1} are needed")
    return _filled(rows, path, task)


def _parse_label(label: str, task: GlueTask, where: str) -> float:
    """Return the number of a class, or a score. Raises: UserError for another label."""
    if task.labels and label not in task.labels:
        raise UserError(f"{where}: label {label!r} is unknown; use {', '.join(task.labels)}")
    with suppress(ValueError):
        score = task.labels.index(label) if task.labels else float(label)
        if task.labels or 0 <= score <= MAX_SCORE:
            return score
    raise UserError(f"{where}: label {label!r} is not a score; give a number from 0 to {MAX_SCORE}")


def _filled(rows: list[Row], path: Path, task: GlueTask) -> list[Row]:
    if not rows:
        raise UserError(f"{path} is empty: it has no examples of {task.folder}")
    return rows


def read_parquet(files: Sequence[Path], task: GlueTask) -> list[Row]:
    """Return the examples of a split's files.

    Raises: UserError, with the file, for missing columns, unknown labels or an empty file, or without pyarrow.
    """
    return _filled([row for path in files for row in _read_table(path, task)], files[0], task)


def _read_table(path: Path, task: GlueTask) -> list[Row]:
    """Return the examples of one parquet file."""
    needs = f"{path}: reading parquet files needs pyarrow"
    pyarrow, parquet = (optional_module(name, needs, "data") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:160]}") from None
    wanted = (*(task.hub_texts or map(str, task.texts)), "label")
    missing = [name for name in wanted if name not in table.column_names]
    if missing:
        has = f"has the columns {', '.join(table.column_names)}"
        raise UserError(f"{path} {has}, and {task.folder} needs the column {missing[0]!r}; give the hub's file")
    *texts, labels = (table.column(name).to_pylist() for name in wanted)
    if any(value is None for column in (*texts, labels) for value in column):
        raise UserError(f"{path} has empty cells; give the hub's file")
    known = np.unique(labels)
    if known.size and known.dtype.kind not in "iuf":
        raise UserError(f"{path}: label {labels[0]!r} is not a number; give the hub's file")
    unknown = [label for label in known if task.labels and label not in range(len(task.labels))]
    if unknown:
        which = ", ".join(f"{number} ({name})" for number, name in enumerate(task.classes))
        hidden = "; the hub's test files have no labels" if unknown[0] == -1 else ""
        raise UserError(f"{path}: label {unknown[0]} is unknown; use {which}{hidden}")
    if not task.labels and not ((known >= 0) & (known <= MAX_SCORE)).all():
        wrong = known[~((known >= 0) & (known <= MAX_SCORE))][0]
        raise UserError(f"{path}: label {wrong} is not a score; give a number from 0 to {MAX_SCORE}")
    return [(tuple(map(str, row)), float(label)) for row, label in zip(zip(*texts, strict=True), labels, strict=True)]


def open_root(root: Path, tasks: Sequence[str] = tuple(GLUE)) -> Path:
    """Return the folder of the files: the given one, or that of a name on the hub, downloaded unless it is cached.

    Raises: UserError, which says how to get the files, if the hub does not answer or has no such data set.
    """
    name = root.as_posix()
    if root.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        return root
    import huggingface_hub

    wanted = [f"{task}/*.parquet" for task in tasks]
    command = f"hf download {name} --repo-type dataset --include {' '.join(map(repr, wanted))} --local-dir glue"
    try:
        with impatient_hub():
            return Path(huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=wanted))
    except Exception as error:  # those of the hub's client and of the network
        what = "the hub does not answer" if is_connection_error(error) else " ".join(str(error).split())[:160]
        raise UserError(
            f"data.root {name} is not a folder, and cannot be downloaded: {what}; run `{command}` where the network "
            "is, and give that folder, or one with the published TSV files"
        ) from None


def _patterns(name: str, split: Split) -> dict[str, str]:
    """Return the folders of a task, published and on the hub, and the names of a split's files there."""
    test = GLUE[name].test
    names = ("train", "train") if split == "train" else (test, test.replace("dev", "validation"))
    return {GLUE[name].folder: f"{names[0]}.tsv", name: f"{names[1]}-*.parquet"}


def find_files(root: Path, name: str, split: Split) -> list[Path]:
    """Return the files of a task's split, below a folder of all tasks or in its own folder; none if there are none."""
    for folder, pattern in _patterns(name, split).items():
        own = (root,) if root.name.lower() == folder.lower() else ()
        for place in (root / folder, root / "glue" / folder, *own):
            if files := sorted(place.glob(pattern)):
                return files
    return []


def read_examples(root: Path, name: str, split: Split) -> list[Row]:
    """Return the examples of a task's split. Raises: UserError if there are none, or the files are damaged."""
    files = find_files(root, name, split)
    if not files:
        published, on_hub = (f"{folder}/{pattern}" for folder, pattern in _patterns(name, split).items())
        other = "" if split == "train" else "; or data.split, the part of the training examples to test on"
        raise UserError(
            f"there is no {published} in {root}, nor {on_hub}; give data.root, the folder with GLUE's published files "
            f"or the hub's, or {HUB_NAME}, which downloads them{other}"
        )
    return read_tsv(files[0], GLUE[name]) if files[0].suffix == ".tsv" else read_parquet(files, GLUE[name])


def training_sentences(root: Path) -> list[str]:
    """Return the sentences of the training files of all tasks in a folder. Raises: UserError if there is none."""
    names = [name for name in GLUE if find_files(root, name, "train")]
    texts = [text for name in names for row in read_examples(root, name, "train") for text in row[0]]
    if not texts:
        raise UserError(
            f"there is no train.tsv or train-*.parquet of a GLUE task in {root}; give data.root, or {HUB_NAME}"
        )
    return texts
