"""The cells of a robustness evaluation, a corruption at a severity each: wanted, measured, and kept in a result file.

A result file has a line that identifies the evaluation, then one for every finished cell, so that an evaluation
resumes. Results are compared only if they were measured on the same images.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from isomorph.data.corruptions.corrupt import (
    EXTRA_CORRUPTIONS,
    IMAGENET_C_CORRUPTIONS,
    SEVERITIES,
    check_corruption,
)
from isomorph.data.corruptions.dataset import CLEAN
from isomorph.distributed import Runtime
from isomorph.errors import UserError
from isomorph.evaluation.suites.robustness.scores import (
    Cell,
    Cells,
    common_cells,
    compare_to_baseline,
    inputs_line,
    metric_of,
    robustness_summary,
)

_KIND = "isomorph robustness"
_IDENTITY_KEYS = ("suite", "version", "source", "limit", "size", "seed", "pictures")
"""Keys that must be equal in two results that are compared."""
_KEY_LABELS = {"version": "corruptions of version", "source": "data:"}
"""Labels of keys in messages about results that differ."""
_PARSE_ERRORS = (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError)
"""Errors raised while parsing a file that is not a result file."""
Result = tuple[dict[str, Any], Cells]
"""The identity of an evaluation, and its finished cells."""
ProgressCallback = Callable[[float, int, str], None]
"""Takes the number of finished cells, the number of all cells, and the name of the current corruption."""


def weights_hash(model: nn.Module) -> str:
    """Return a hash of the names, types, shapes and bytes of a model's state."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().data if values.numel() else b"")
    return digest.hexdigest()[:16]


class CellFile:
    """The cells of one evaluation: wanted, finished, and missing; appended to a file one by one as they are finished.

    Every line is on disk before the next cell begins; an incomplete last line, which a killed process leaves, is cut
    off. `base` are the results to compare with; without a `path` the cells are in memory only.

    Raises: UserError when the file holds cells of another model or other images, is not a result file, or cannot be
        written.
    """

    def __init__(
        self,
        path: Path | None,
        identity: Mapping[str, Any],
        wanted: Mapping[str, tuple[int, ...]],
        progress: ProgressCallback | None = None,
        base: Result | None = None,
    ) -> None:
        self.path, self.identity, self.wanted, self.base = path, dict(identity), wanted, base
        self.cells: dict[tuple[str, int], Cell] = {}
        self.progress = progress or (lambda done, total, step: None)
        if path and path.exists() and path.stat().st_size:
            (saved, cells), complete = _read_lines(path)
            _check_same_model(path, saved, self.identity)
            self.cells.update(cells)
            os.truncate(path, complete)
        else:
            self._append({"kind": _KIND, **self.identity})
        self.resumed = len(self._finished())

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; give another file") from None

    def _finished(self) -> dict[tuple[str, int], Cell]:
        """Return the finished cells among the wanted ones, in order."""
        wanted = [(name, severity) for name, severities in self.wanted.items() for severity in severities]
        return {key: self.cells[key] for key in wanted if key in self.cells}

    @property
    def missing(self) -> dict[str, tuple[int, ...]]:
        """Severities to be measured, by corruption; the clean images come first."""
        wanted = {CLEAN: (0,), **self.wanted}
        left = {name: tuple(s for s in each if (name, s) not in self.cells) for name, each in wanted.items()}
        return {name: severities for name, severities in left.items() if severities}

    def update(self, name: str, severities: Sequence[int], fraction: float = 0) -> None:
        """Report that a fraction of the severities of a corruption is done."""
        done = len(self._finished()) + fraction * len(severities) * (name != CLEAN)
        self.progress(done, sum(map(len, self.wanted.values())), name)

    def add(self, corruption: str, severity: int, metrics: Mapping[str, Any]) -> None:
        """Add a finished cell and flush it to disk."""
        cell = {"corruption": corruption, "severity": severity, **metrics}
        self.cells[corruption, severity] = cell
        self._append(cell)

    def result(self, imagenet: bool = False) -> dict[str, Any]:
        """Return the identity of the evaluation, every cell, and the means over cells; `imagenet` as in the summary."""
        cells, clean, metric = self._finished(), self.cells.get((CLEAN, 0)), metric_of(self.identity)
        images = min(int(cell.get("images", 0)) for cell in cells.values())
        result = {**self.identity, "images": images, "clean": clean, "cells": list(cells.values())}
        result |= robustness_summary(cells, clean, imagenet, metric) | {"resumed": self.resumed}
        if self.base:
            result["against"] = compare_to_baseline(cells, self.base[1], self.base[0]["model"], metric)
        return result


def _read_lines(path: Path) -> tuple[Result, int]:
    """Return what a result file holds, and the number of bytes in its complete lines.

    Raises: UserError when the file cannot be read, is not a result file, or is damaged before its last line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    complete = content.rfind(b"\n") + 1
    try:
        first, *cells = [json.loads(line) for line in content[:complete].splitlines()]
        if first["kind"] != _KIND:
            raise ValueError
        return _parse_result(first, cells), complete
    except _PARSE_ERRORS as error:
        raise UserError(f"{path} is not a result file of {_KIND}, or is damaged") from error


def _parse_result(identity: Mapping[str, Any], cells: Iterable[Cell]) -> Result:
    """Return the model and the images of results, and their cells. Raises: one of _PARSE_ERRORS for other values."""
    known = {key: identity[key] for key in ("weights", "data", "constants", "metric") if key in identity}
    known |= {key: identity[key] for key in _IDENTITY_KEYS} | {"model": str(identity["model"])}
    metric = metric_of(known)
    return known, {(str(cell["corruption"]), int(cell["severity"])): _parse_cell(cell, metric) for cell in cells}


def _parse_cell(line: Cell, metric: str) -> Cell:
    if not 0 <= float(line[metric]) <= 100 or not 0 <= int(line.get("images", 0)) < 2**62:
        raise ValueError
    return {**line, metric: float(line[metric])} | ({"images": int(line["images"])} if "images" in line else {})


def read_result(path: Path) -> Result:
    """Return the identity and the cells, including the clean one, from an --out file or saved --json output.

    Raises: UserError when the file cannot be read, or is neither of them.
    """
    try:
        result = json.loads(path.read_text())
        return _parse_result(result, [*result["cells"], *([result["clean"]] if result["clean"] else [])])
    except OSError as error:
        raise UserError(
            f"cannot read results {path}: {error.strerror}; give a result file of isomorph robustness"
        ) from None
    except _PARSE_ERRORS:
        return _read_lines(path)[0]


class Results(NamedTuple):
    """Results of several models: top-1 (%) by model and cell, the images they were measured on, and problems.

    `cells` is {model: {(corruption, severity): top-1}}, `measured` describes the images, `problems` are sentences.
    """

    cells: dict[str, dict[tuple[str, int], float]]
    measured: str
    problems: list[str]


def read_results(paths: Sequence[Path], models: Mapping[str, str]) -> Results:
    """Read the results of models, given as {name: `weights_hash`}, from one file per model, in the order of the models.

    Raises: UserError when a file is not a result file, has no finished cells, belongs to another model, or was
    measured on other images than the first file.
    """
    top1: dict[str, dict[tuple[str, int], float]] = {}
    identities, problems, measured = [], list[str](), ""
    for path in paths:
        identity, cells = read_result(path)
        if not set(cells) - {(CLEAN, 0)}:
            raise UserError(f"{path} has no finished cells; run isomorph robustness with this --out again")
        identities.append(identity)
        check_same_inputs(str(path), identity, identities[0])
        owners = [name for name, weights in models.items() if weights == identity.get("weights") and name not in top1]
        if not owners:
            description = f"{path} holds the results of {identity['model']}, with other weights than "
            raise UserError(f"{description}{' and '.join(models)}; give one file per model")
        top1[owners[0]] = {key: cell[metric_of(identity)] for key, cell in cells.items()}
        measured = measured or inputs_line(identity, max(int(cell.get("images", 0)) for cell in cells.values()))
        content = path.read_bytes()
        if content.startswith(b'{"kind"') and not content.endswith(b"\n"):
            problems.append(f"{path.name}: its last line is incomplete and was ignored.")
    return Results({name: top1[name] for name in models if name in top1}, measured, problems)


def _check_same_model(path: Path | None, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise UserError if the saved cells belong to another model, or were measured on other images."""
    if "weights" in wanted and saved.get("weights") != wanted["weights"]:
        raise UserError(f"{path} holds cells of {saved.get('model')} with other weights; give another --out")
    first, second = _describe_differences(saved, wanted)
    if first:
        raise UserError(
            f"{path} holds cells of {saved.get('model')} with {first}, but this run has {second}; give another --out"
        )


def check_same_inputs(path: str, saved: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise UserError if the results saved in a file were measured on other images than the other results."""
    first, second = _describe_differences(saved, other)
    if first:
        raise UserError(
            f"{path} was measured with {first}, {other.get('model')} with {second}; measure both on the same images"
        )


def _describe_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, str]:
    """Describe how two results differ: the differing values of the first, then of the second; "" if there are none."""
    differing = [key for key in _IDENTITY_KEYS if a.get(key) != b.get(key)]
    # the limit and the pictures determine the source, the size determines the pictures: report only the cause
    caused = ["source"] * bool({"limit", "pictures"} & set(differing)) + ["pictures"] * ("size" in differing)
    differing = [key for key in differing if key not in caused]
    if differing == ["source"] and a.get("data") == b.get("data"):
        return "other images" + (f" ({a['data']}, as here)" if a.get("data") else ""), "these"
    first, second = ([f"{_KEY_LABELS.get(key, key)} {_value_text(key, each)}" for key in differing] for each in (a, b))
    if len(differing) == 1:
        second = [_value_text(differing[0], b)]
    return " and ".join(first), " and ".join(second)


def _value_text(key: str, identity: Mapping[str, Any]) -> str:
    """Return a value of an identity as text for a message."""
    value = identity.get(key)
    if key == "limit" and value is None:
        return "none (all images)"
    if key == "size" and isinstance(value, Sequence):
        return " x ".join(map(str, value))
    if key == "source" and not str(value).startswith("published "):
        return identity.get("data") or "other images"
    return str(value)


class CellOptions(NamedTuple):
    """Which cells to measure, and the files of results: that of this evaluation, and that of a model to compare with.

    >>> CellOptions(corruptions=["fog"], severities=[1, 3]).wanted()
    {'fog': (1, 3)}
    """

    corruptions: Sequence[str] | None = None
    severities: Sequence[int] = SEVERITIES
    extra: bool = False
    out: str | Path | None = None
    baseline: str | Path | None = None
    progress: ProgressCallback | None = None

    def wanted(self) -> dict[str, tuple[int, ...]]:
        """Return the severities of each corruption. Raises: UserError for an unknown one, or none."""
        names = list(IMAGENET_C_CORRUPTIONS if self.corruptions is None else self.corruptions)
        names += EXTRA_CORRUPTIONS if self.extra else ()
        if not names or not self.severities:
            raise UserError("there is nothing to do: give at least one corruption and one severity")
        for corruption in names:
            for severity in self.severities:
                check_corruption(corruption, severity)
        return dict.fromkeys(names, tuple(sorted(set(self.severities))))


def open_cells(
    identity: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]], options: CellOptions, runtime: Runtime
) -> CellFile:
    """Open the results of an evaluation and of the model to compare with, for all processes.

    Raises: UserError when a file cannot be read, is of another model or other images, or has no cell to compare, or the
    processes differ.
    """
    base = read_result(Path(options.baseline).expanduser()) if options.baseline else None
    if base:
        check_same_inputs(str(options.baseline), base[0], identity)
        common_cells([(name, severity) for name in wanted for severity in wanted[name]], base[1], base[0]["model"])
    runtime.require_equal(dict(identity), "weights or images")
    out = Path(options.out).expanduser() if options.out and runtime.is_main else None
    opened = CellFile(out, identity, wanted, options.progress, base)
    opened.cells, opened.resumed = runtime.gather((opened.cells, opened.resumed))[0]  # of the one with the file
    return opened
