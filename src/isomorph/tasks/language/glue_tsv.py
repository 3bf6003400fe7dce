"""The TSV files of GLUE as published."""

from collections.abc import Iterator
from pathlib import Path

from isomorph.errors import UserError
from isomorph.tasks.language.glue import GlueTask, Row


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
