"""Result files of robustness: the identity of the evaluation on the first line, then one finished cell per line."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from isomorph.data.corruptions.dataset import CLEAN
from isomorph.errors import UserError
from isomorph.suites.robustness.scores import Cell, Cells, inputs_line

_KIND = "isomorph robustness"
_IDENTITY_KEYS = ("suite", "version", "source", "limit", "size", "seed", "pictures")
"""Keys that must be equal in two results for a comparison."""
_KEY_WORDS = {"version": "corruptions of version", "source": "data:"}
"""Words for keys in messages about differing results."""
_PARSE_ERRORS = (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError)
"""Errors raised on reading a file that does not hold results."""


def weights_hash(model: nn.Module) -> str:
    """Return a hash of the names, types, shapes and bytes of a model's state."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().data if values.numel() else b"")
    return digest.hexdigest()[:16]


class CellFile:
    """The finished cells of one evaluation, appended to a file one by one; in memory only if `path` is None.

    Raises: UserError when the file holds cells of another model or other images, or is not a result file.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any]) -> None:
        self.path, self.identity = path, dict(identity)
        self.cells: dict[tuple[str, int], Cell] = {}
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            saved_identity, cells, complete = _read_cell_file(path)
            _check_same_model(path, saved_identity, self.identity)
            self.cells.update(cells)
            os.truncate(path, complete)  # drops a last line that a killed process left incomplete
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; give another --out") from None
        self.append({"kind": _KIND, **self.identity})

    def add(self, corruption: str, severity: int, metrics: Mapping[str, Any]) -> None:
        """Add a finished cell and flush it to disk."""
        cell = {"corruption": corruption, "severity": severity, **metrics}
        self.cells[corruption, severity] = cell
        self.append(cell)

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line of JSON and flush it to disk. Raises: UserError when the file cannot be written."""
        if self.path is None:
            return
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; give another --out") from None


def _read_cell_file(path: Path) -> tuple[dict[str, Any], dict[tuple[str, int], Cell], int]:
    """Return the identity, the cells, and the number of bytes in complete lines.

    Raises: UserError when the file is not a result file, or damaged before its last line.
    """
    try:
        block = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    complete = block.rfind(b"\n") + 1
    try:
        first, *others = [json.loads(line) for line in block[:complete].splitlines()]
        if first.pop("kind") != _KIND:
            raise ValueError
        return _parse_identity(first), _cells_by_key(others), complete
    except _PARSE_ERRORS:
        raise UserError(f"{path} is not a result file of isomorph robustness, or is damaged") from None


def _cells_by_key(lines: Iterable[Cell]) -> dict[tuple[str, int], Cell]:
    """Return cells by corruption and severity. Raises: one of _PARSE_ERRORS for another line."""
    return {(str(line["corruption"]), int(line["severity"])): _parse_cell(line) for line in lines}


def _parse_cell(line: Cell) -> Cell:
    """Return a cell with its accuracy and count as numbers. Raises: one of _PARSE_ERRORS for an invalid one."""
    if not 0 <= float(line["top1"]) <= 100 or not 0 <= int(line.get("images", 0)) < 2**62:
        raise ValueError
    return {**line, "top1": float(line["top1"])} | ({"images": int(line["images"])} if "images" in line else {})


def _parse_identity(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model and the images of the results. Raises: one of _PARSE_ERRORS when they are missing."""
    optional = {key: line[key] for key in ("weights", "data", "constants") if key in line}
    return optional | {key: line[key] for key in _IDENTITY_KEYS} | {"model": str(line["model"])}


def read_result(path: Path) -> tuple[dict[str, Any], Cells]:
    """Return the identity and the cells, including the clean one, of an --out file or of --json output.

    Raises: UserError when the file is neither.
    """
    try:
        result = json.loads(path.read_text())
        clean = result["clean"]
        cells = _cells_by_key([*result["cells"], *([clean] if clean else [])])
        return _parse_identity(result), cells
    except OSError as error:
        raise UserError(f"cannot read results {path}: {error.strerror}; give a file of isomorph robustness") from None
    except _PARSE_ERRORS:
        identity, saved_cells, _ = _read_cell_file(path)
        return identity, saved_cells


class Results(NamedTuple):
    """Top-1 (%) of every model by cell, a description of the images, and problems, one per line."""

    cells: dict[str, dict[tuple[str, int], float]]
    measured: str
    problems: list[str]


def read_results(paths: Sequence[Path], models: Mapping[str, str]) -> Results:
    """Read the results of models, given as {name: `weights_hash`}, from files; in the order of the models.

    Raises: UserError when a file is not a result, has no cell, is of another model, or was measured on other images
    than the first.
    """
    found: dict[str, dict[tuple[str, int], float]] = {}
    identities, problems, measured = [], list[str](), ""
    for path in paths:
        identity, cells = read_result(path)
        if not set(cells) - {(CLEAN, 0)}:
            raise UserError(f"{path} has no finished cell; run isomorph robustness with this --out again")
        identities.append(identity)
        check_same_inputs(str(path), identity, identities[0])
        owners = [name for name, weights in models.items() if weights == identity.get("weights") and name not in found]
        if not owners:
            description = f"{path} holds the results of {identity['model']}, with other weights than "
            raise UserError(f"{description}{' and '.join(models)}; give one file per model")
        found[owners[0]] = {key: cell["top1"] for key, cell in cells.items()}
        measured = measured or inputs_line(identity, max(int(cell.get("images", 0)) for cell in cells.values()))
        block = path.read_bytes()
        if block.startswith(b'{"kind"') and not block.endswith(b"\n"):
            problems.append(f"{path.name}: its last line is incomplete and is left out.")
    return Results({name: found[name] for name in models if name in found}, measured, problems)


def _check_same_model(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise UserError if the cells of a file are of another model, or were measured on other images."""
    if "weights" in wanted and saved.get("weights") != wanted["weights"]:
        raise UserError(f"{path} holds cells of {saved.get('model')} with other weights; give another --out")
    there, here = _describe_differences(saved, wanted)
    if there:
        raise UserError(
            f"{path} holds cells of {saved.get('model')} with {there}, not {here} as for {wanted['model']} now; "
            "give another --out"
        )


def check_same_inputs(path: str, base: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise UserError if the results of a file were measured on other images."""
    there, here = _describe_differences(base, identity)
    if there:
        raise UserError(
            f"{path} was measured with {there}, {identity.get('model')} with {here}; measure both on the same images"
        )


def _describe_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, str]:
    """Return in words how two results differ: the values of the first and of the second; "" if they do not."""
    unlike = [key for key in _IDENTITY_KEYS if a.get(key) != b.get(key)]
    # the hash of the images follows from their number, and the description from the size: report the cause only
    unlike = [key for key in unlike if key not in _dependent_keys(unlike)]
    if unlike == ["source"] and a.get("data") == b.get("data"):
        return "other images" + (f" ({a['data']}, as here)" if a.get("data") else ""), "these"
    pairs = [(key, _value_text(key, a), _value_text(key, b)) for key in unlike]
    single = len(pairs) == 1
    return (
        " and ".join(f"{_KEY_WORDS.get(key, key)} {there}" for key, there, _ in pairs),
        " and ".join(here if single else f"{_KEY_WORDS.get(key, key)} {here}" for key, _, here in pairs),
    )


def _dependent_keys(unlike: Sequence[str]) -> list[str]:
    """Return the keys that differ only because others do."""
    return ["source"] * bool({"limit", "pictures"} & set(unlike)) + ["pictures"] * ("size" in unlike)


def _value_text(key: str, identity: Mapping[str, Any]) -> str:
    """Return a value of a result's identity in words."""
    value = identity.get(key)
    if key == "limit" and value is None:
        return "none (all images)"
    if key == "size" and isinstance(value, Sequence):
        return " x ".join(map(str, value))
    if key == "source" and not str(value).startswith("published "):
        return identity.get("data") or "other images"
    return str(value)
