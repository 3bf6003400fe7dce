"""The GLUE tasks as published: columns, labels and metrics, and reading of their TSV files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isomorph.errors import UserError

Column = str | int
"""A column by its name in the header, or by its number in a file without header."""


@dataclass(frozen=True)
class GlueTask:
    """A task: its folder, the columns of its texts and label, the labels in the file, the files to test on, metrics.

    Without `classes` labels are numbers (a regression). The first metric decides which epoch is best. `tolerant`: lines
    with too few columns are left out, which the published file has.
    """

    folder: str
    texts: tuple[Column, ...]
    label: Column
    labels: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    test: str = "dev"
    metrics: tuple[str, ...] = ("accuracy",)
    tolerant: bool = False

    @property
    def has_header(self) -> bool:
        """True if the first line of a file names its columns."""
        return isinstance(self.label, str)


_ENTAILMENT = ("entailment", "not_entailment")
_PARAPHRASE = ("different", "paraphrase")

GLUE: dict[str, GlueTask] = {
    "cola": GlueTask("CoLA", (3,), 1, ("0", "1"), ("unacceptable", "acceptable"), metrics=("matthews", "accuracy")),
    "sst2": GlueTask("SST-2", ("sentence",), "label", ("0", "1"), ("negative", "positive")),
    "mrpc": GlueTask(
        "MRPC", ("#1 String", "#2 String"), "Quality", ("0", "1"), _PARAPHRASE, metrics=("accuracy", "f1")
    ),
    "stsb": GlueTask(
        "STS-B", ("sentence1", "sentence2"), "score", classes=("similarity",), metrics=("spearman", "pearson")
    ),
    "qqp": GlueTask(
        "QQP",
        ("question1", "question2"),
        "is_duplicate",
        ("0", "1"),
        _PARAPHRASE,
        metrics=("accuracy", "f1"),
        tolerant=True,
    ),
    "mnli": GlueTask(
        "MNLI",
        ("sentence1", "sentence2"),
        "gold_label",
        ("entailment", "neutral", "contradiction"),
        ("entailment", "neutral", "contradiction"),
        "dev_matched",
    ),
    "qnli": GlueTask("QNLI", ("question", "sentence"), "label", _ENTAILMENT, _ENTAILMENT),
    "rte": GlueTask("RTE", ("sentence1", "sentence2"), "label", _ENTAILMENT, _ENTAILMENT),
}
"""The eight tasks of the paper's table, by name; WNLI is left out, as usual."""

Row = tuple[tuple[str, ...], float]
"""The texts of an example, and its label: the number of its class, or a score."""


def find_file(root: Path, task: GlueTask, name: str) -> Path | None:
    """Return a task's file below a folder of all tasks, or in its own folder; None if there is none."""
    candidates = (root / task.folder / f"{name}.tsv", root / "glue" / task.folder / f"{name}.tsv")
    own = (root / f"{name}.tsv",) if root.name.lower() == task.folder.lower() else ()
    return next((path for path in (*candidates, *own) if path.is_file()), None)


def require_file(root: Path, task: GlueTask, name: str) -> Path:
    """Return a task's file. Raises: UserError if there is none."""
    path = find_file(root, task, name)
    if path is None:
        raise UserError(
            f"there is no {task.folder}/{name}.tsv in {root}; give data.root, the folder with the published TSV files"
        )
    return path


def read_tsv(path: Path, task: GlueTask) -> list[Row]:
    """Return the examples of a file.

    Raises: UserError, with file and line, for missing columns, unknown labels or an empty file.
    """
    lines = _lines(path)
    if task.has_header:
        columns = _find_columns(path, next(lines, (1, ""))[1].split("\t"), task)
    else:
        columns = [int(column) for column in (*task.texts, task.label)]
    rows: list[Row] = []
    for number, line in lines:
        cells = line.split("\t")
        if len(cells) <= max(columns):
            if task.tolerant:
                continue
            raise UserError(f"{path}, line {number}: {len(cells)} columns, and {max(columns) + 1} are needed")
        *texts, label = (cells[column].strip() for column in columns)
        rows.append((tuple(texts), _parse_label(label, task, path, number)))
    if not rows:
        raise UserError(f"{path} is empty: it has no examples of {task.folder}")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, without empty ones. Raises: UserError if it is not text."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r")


def _find_columns(path: Path, header: list[str], task: GlueTask) -> list[int]:
    """Return the numbers of the columns of texts and label. Raises: UserError for a header without one of them."""
    named = [name.strip() for name in header]
    for column in (*task.texts, task.label):
        if column not in named:
            what = "is empty" if named == [""] else f"has the columns {', '.join(named)}"
            raise UserError(f"{path} {what}, and {task.folder} needs the column {column!r}; give the published file")
    return [named.index(str(column)) for column in (*task.texts, task.label)]


def _parse_label(label: str, task: GlueTask, path: Path, number: int) -> float:
    """Return the number of a class, or a score. Raises: UserError for another label."""
    if task.labels:
        if label not in task.labels:
            raise UserError(f"{path}, line {number}: label {label!r} is unknown; use {', '.join(task.labels)}")
        return task.labels.index(label)
    try:
        return float(label)
    except ValueError:
        raise UserError(f"{path}, line {number}: {label!r} is not a score; give a number") from None


def training_sentences(root: Path) -> list[str]:
    """Return the sentences of the training files of all tasks in a folder. Raises: UserError if there is none."""
    found = {name: find_file(root, task, "train") for name, task in GLUE.items()}
    texts = [text for name, path in found.items() if path for row in read_tsv(path, GLUE[name]) for text in row[0]]
    if not texts:
        raise UserError(f"there is no train.tsv of a GLUE task in {root}; give data.root")
    return texts
