"""Finding and reading the examples of GLUE tasks: published TSV files, or parquet files as on the hub."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from isomorph.errors import UserError
from isomorph.tasks.language.glue import GLUE, GlueTask, Row
from isomorph.tasks.language.glue_parquet import HUB_NAME, fetch, is_hub_name, read_parquet
from isomorph.tasks.language.glue_tsv import read_tsv

Split = Literal["train", "test"]
"""Examples to train on, or the development set."""


def open_root(root: Path, tasks: Sequence[str] = tuple(GLUE)) -> Path:
    """Return the folder of the files: the given one, or that of a name on the hub, such as nyu-mll/glue."""
    return fetch(root.as_posix(), tasks) if is_hub_name(root) else root


def _split_names(task: GlueTask, split: Split) -> tuple[str, str]:
    """Return the name of a split in the published files, and on the hub."""
    return ("train", "train") if split == "train" else (task.test, task.hub_test)


def find_files(root: Path, name: str, split: Split) -> list[Path]:
    """Return the files of a task's split, below a folder of all tasks or in its own folder; none if there are none."""
    task = GLUE[name]
    published, on_hub = _split_names(task, split)
    for folder, pattern in ((task.folder, f"{published}.tsv"), (name, f"{on_hub}-*.parquet")):
        own = (root,) if root.name.lower() == folder.lower() else ()
        for place in (root / folder, root / "glue" / folder, *own):
            if files := sorted(place.glob(pattern)):
                return files
    return []


def read_examples(root: Path, name: str, split: Split) -> list[Row]:
    """Return the examples of a task's split. Raises: UserError if there are none, or the files are damaged."""
    task, files = GLUE[name], find_files(root, name, split)
    if not files:
        published, on_hub = _split_names(task, split)
        other = "" if split == "train" else "; or data.split, the part of the training examples to test on"
        raise UserError(
            f"there is no {task.folder}/{published}.tsv in {root}, nor {name}/{on_hub}-*.parquet; give data.root, the "
            f"folder with GLUE's published files or the hub's, or {HUB_NAME}, which downloads them{other}"
        )
    return read_tsv(files[0], task) if files[0].suffix == ".tsv" else read_parquet(files, task)


def training_sentences(root: Path) -> list[str]:
    """Return the sentences of the training files of all tasks in a folder. Raises: UserError if there is none."""
    names = [name for name in GLUE if find_files(root, name, "train")]
    texts = [text for name in names for row in read_examples(root, name, "train") for text in row[0]]
    if not texts:
        raise UserError(
            f"there is no train.tsv or train-*.parquet of a GLUE task in {root}; give data.root, or {HUB_NAME}"
        )
    return texts
