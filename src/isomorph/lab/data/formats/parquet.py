"""What parquet files of labelled images say about themselves: their columns, and the names of their classes."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isomorph.errors import UserError, first_line, optional_module
from isomorph.lab.data.formats.naming import composed

LABEL_COLUMNS = ("label", "fine_label", "labels", "cls")


@contextmanager
def parquet_reader(title: object) -> Iterator[Any]:
    """Give the module pyarrow.parquet, in a context whose errors name what it reads. Raises: UserError without it."""
    parquet = optional_module("pyarrow.parquet", f"reading {title} needs pyarrow", "data")
    from pyarrow import ArrowException

    try:
        yield parquet
    except (ArrowException, OSError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot read {title}: {first_line(error)}") from None


def label_columns(columns: Iterable[str]) -> list[str]:
    """Return the columns that may hold the labels, the one that counts first."""
    present = set(columns)
    return [name for name in LABEL_COLUMNS if name in present]


def stored_classes(files: Sequence[Path]) -> list[str]:
    """Return the names of the classes in the order of their labels, as the files store them; none if no file does.

    They are in the schema's metadata, as the `datasets` library writes them.

    Raises: UserError when a file cannot be read, or two files number the classes in different ways.
    """
    names: list[str] = []
    first = None
    for file in files:
        with parquet_reader(file) as parquet:
            own = _classes_of_schema(parquet.read_schema(file))
        if not own:
            continue
        if first is None:
            first = file
            names = own
        if own != names:
            difference = _difference(file, own, first, names)
            raise UserError(f"{difference}; write the files with the same names in the same order")
    return names


def _classes_of_schema(schema: Any) -> list[str]:
    columns = label_columns(schema.names)
    if not columns:
        return []
    metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    feature: Any = metadata
    for key in ("info", "features", columns[0]):
        feature = feature.get(key) if isinstance(feature, Mapping) else None
    names = feature.get("names") if isinstance(feature, Mapping) else None
    return [composed(str(name)) for name in names or []]


def _difference(file: Path, names: Sequence[str], other: Path, others: Sequence[str]) -> str:
    for number, (name, another) in enumerate(zip(names, others, strict=False)):
        if name != another:
            return f"class {number} is {another} in {other} and {name} in {file.name}"
    return f"{other} names {len(others)} classes and {file.name} {len(names)}"
