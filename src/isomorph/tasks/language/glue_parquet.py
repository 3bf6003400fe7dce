"""The parquet files of GLUE as on the Hugging Face hub, from a folder or the hub itself."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isomorph.errors import UserError, install_hint
from isomorph.models.download import impatient_hub, is_connection_error
from isomorph.tasks.language.glue import GlueTask, Row

HUB_NAME = "nyu-mll/glue"
"""GLUE on the hub; its tasks are folders, with files such as rte/train-00000-of-00001.parquet."""


def fetch(name: str, tasks: Sequence[str]) -> Path:
    """Return the folder of a data set of the hub, with the files of these tasks, downloaded unless they are cached.

    Raises: UserError, which says how to get the files, if the hub does not answer or has no such data set.
    """
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


def is_hub_name(root: Path) -> bool:
    """True for a name like nyu-mll/glue that is no folder here."""
    return not root.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", root.as_posix()) is not None


def read_parquet(files: Sequence[Path], task: GlueTask) -> list[Row]:
    """Return the examples of a split's files.

    Raises: UserError, with the file, for missing columns, unknown labels or an empty file, or without pyarrow.
    """
    rows = [row for path in files for row in _read_file(path, task)]
    if not rows:
        raise UserError(f"{files[0]} is empty: it has no examples of {task.folder}")
    return rows


def _read_file(path: Path, task: GlueTask) -> list[Row]:
    """Return the examples of one file."""
    table, columns = _open_table(path), task.hub_columns
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        has = f"has the columns {', '.join(table.column_names)}"
        raise UserError(f"{path} {has}, and {task.folder} needs the column {missing[0]!r}; give the hub's file")
    *texts, labels = (table.column(name).to_pylist() for name in columns)
    if any(value is None for column in (*texts, labels) for value in column):
        raise UserError(f"{path} has empty cells; give the hub's file")
    _check_labels(path, task, np.array(labels))
    return [(tuple(map(str, row)), float(label)) for row, label in zip(zip(*texts, strict=True), labels, strict=True)]


def _check_labels(path: Path, task: GlueTask, labels: np.ndarray) -> None:
    """Raise UserError for labels that are not numbers, or not those of classes."""
    if labels.size and labels.dtype.kind not in "iuf":
        raise UserError(f"{path}: label {labels.tolist()[0]!r} is not a number; give the hub's file")
    unknown = [label for label in np.unique(labels) if task.labels and label not in range(len(task.labels))]
    if unknown:
        which = ", ".join(f"{number} ({name})" for number, name in enumerate(task.classes))
        hidden = "; the hub's test files have no labels" if unknown[0] == -1 else ""
        raise UserError(f"{path}: label {unknown[0]} is unknown; use {which}{hidden}")


def _open_table(path: Path) -> Any:
    """Return the table in a parquet file. Raises: UserError if it cannot be read, or without pyarrow."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError:
        raise UserError(f"{path}: reading parquet files needs pyarrow; {install_hint('data')}") from None
    try:
        return read_table(path)
    except (OSError, ArrowException) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:160]}") from None
