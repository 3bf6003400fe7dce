"""The file of finished cells: whose they are on the first line, then a line a cell."""

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
"""What two models' results must share to be compared."""
_KEY_WORDS = {"version": "corruptions of version", "source": "data:"}
"""What these are called where they differ."""
_PARSE_ERRORS = (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError)
"""Errors of reading a file that holds no results."""


def weights_hash(model: nn.Module) -> str:
    """What tells a model's weights from others: names and bytes of all that its state holds."""
    known = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        kept = tensor.detach().cpu().contiguous()
        known.update(f"{name} {kept.dtype} {tuple(kept.shape)}".encode())
        known.update(kept.flatten().view(torch.uint8).numpy().data if kept.numel() else b"")
    return known.hexdigest()[:16]


class CellFile:
    """Cells of one model on one source, appended as they finish; in memory only without a path.

    Raises: UserError when the file holds another model's or source's cells, or is something else.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any]) -> None:
        self.path, self.identity = path, dict(identity)
        self.cells: dict[tuple[str, int], Cell] = {}
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            found, cells, whole = _read_cell_file(path)
            _check_same_model(path, found, self.identity)
            self.cells.update(cells)
            os.truncate(path, whole)  # a line cut short by a kill
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; give another --out") from None
        self.append({"kind": _KIND, **self.identity})

    def add(self, corruption: str, severity: int, metrics: Mapping[str, Any]) -> None:
        """Keeps a finished cell, and has it on disk before returning."""
        cell = {"corruption": corruption, "severity": severity, **metrics}
        self.cells[corruption, severity] = cell
        self.append(cell)

    def append(self, line: Mapping[str, Any]) -> None:
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
    """Identity, cells, and how many bytes of the file are whole lines.

    Raises: UserError when it is no such file, or damaged before its last line.
    """
    try:
        block = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    whole = block.rfind(b"\n") + 1
    try:
        first, *others = [json.loads(line) for line in block[:whole].splitlines()]
        if first.pop("kind") != _KIND:
            raise ValueError
        return _parse_identity(first), _cells_by_key(others), whole
    except _PARSE_ERRORS:
        raise UserError(
            f"{path} is not a file of robustness cells, or is damaged; isomorph robustness writes them"
        ) from None


def _cells_by_key(lines: Iterable[Cell]) -> dict[tuple[str, int], Cell]:
    """Cells by corruption and severity, their numbers as such. Raises: one of NOT_RESULTS for what is none."""
    return {(str(line["corruption"]), int(line["severity"])): _parse_cell(line) for line in lines}


def _parse_cell(line: Cell) -> Cell:
    """A cell with its numbers as such. Raises: one of NOT_RESULTS for an accuracy or a count that is none."""
    if not 0 <= float(line["top1"]) <= 100 or not 0 <= int(line.get("images", 0)) < 2**62:
        raise ValueError
    return {**line, "top1": float(line["top1"])} | ({"images": int(line["images"])} if "images" in line else {})


def _parse_identity(line: Mapping[str, Any]) -> dict[str, Any]:
    """Whose results these are, and of which pictures. Raises: one of NOT_RESULTS where that is not said."""
    told = {key: line[key] for key in ("weights", "data", "constants") if key in line}
    return told | {key: line[key] for key in _IDENTITY_KEYS} | {"model": str(line["model"])}


def read_result(path: Path) -> tuple[dict[str, Any], Cells]:
    """Identity and cells, the clean one too, of a file written by --out, or of what --json printed.

    Raises: UserError when it is neither.
    """
    try:
        result = json.loads(path.read_text())
        clean = result["clean"]
        cells = _cells_by_key([*result["cells"], *([clean] if clean else [])])
        return _parse_identity(result), cells
    except OSError as error:
        raise UserError(f"no results {path}: {error.strerror}; isomorph robustness writes them") from None
    except _PARSE_ERRORS:
        identity, found, _ = _read_cell_file(path)
        return identity, found


class Results(NamedTuple):
    """Top-1 (%) of models by cell, in words what was measured, and what is missing, a line each."""

    cells: dict[str, dict[tuple[str, int], float]]
    measured: str
    problems: list[str]


def read_results(paths: Sequence[Path], models: Mapping[str, str]) -> Results:
    """The results of models in files, in the order of the models: {name: `weights_hash`}.

    Raises: UserError when a file is no result, has no cell, is none of the models', or was measured on other pictures
    than the first.
    """
    found: dict[str, dict[tuple[str, int], float]] = {}
    identities, problems, measured = [], list[str](), ""
    for path in paths:
        identity, cells = read_result(path)
        if not set(cells) - {(CLEAN, 0)}:
            raise UserError(f"{path} has no finished cell yet; call isomorph robustness with it again")
        identities.append(identity)
        check_same_inputs(str(path), identity, identities[0])
        owners = [name for name, weights in models.items() if weights == identity.get("weights") and name not in found]
        if not owners:
            whose = f"{path} holds the results of {identity['model']}, with other weights than "
            raise UserError(f"{whose}{' and '.join(models)}; give a file for each model, once")
        found[owners[0]] = {key: cell["top1"] for key, cell in cells.items()}
        measured = measured or inputs_line(identity, max(int(cell.get("images", 0)) for cell in cells.values()))
        block = path.read_bytes()
        if block.startswith(b'{"kind"') and not block.endswith(b"\n"):
            problems.append(f"{path.name}: its last line is cut short and is left out.")
    return Results({name: found[name] for name in models if name in found}, measured, problems)


def _check_same_model(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises: UserError when a file's cells are another model's or were measured otherwise."""
    if "weights" in wanted and found.get("weights") != wanted["weights"]:
        raise UserError(f"{path} holds cells of {found.get('model')}, whose weights are others; give another --out")
    there, here = _describe_differences(found, wanted)
    if there:
        raise UserError(
            f"{path} holds cells of {found.get('model')} with {there}, not {here} as of this {wanted['model']}; "
            "give another --out"
        )


def check_same_inputs(path: str, base: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raises: UserError when the results of a file are of other pictures."""
    there, here = _describe_differences(base, identity)
    if there:
        raise UserError(
            f"{path} was measured with {there}, {identity.get('model')} with {here}; measure both on the same pictures"
        )


def _describe_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, str]:
    """In words what two results do not share, as it is in the one and in the other; nothing where all is alike."""
    unlike = [key for key in _IDENTITY_KEYS if a.get(key) != b.get(key)]
    # a hash of the images differs with their number, and a description with the size: the cause is what is said
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
    """Keys that differ only because others do."""
    return ["source"] * bool({"limit", "pictures"} & set(unlike)) + ["pictures"] * ("size" in unlike)


def _value_text(key: str, identity: Mapping[str, Any]) -> str:
    """A value of a result's identity in words."""
    value = identity.get(key)
    if key == "limit" and value is None:
        return "none (all images)"
    if key == "size" and isinstance(value, Sequence):
        return " x ".join(map(str, value))
    if key == "source" and not str(value).startswith("published "):
        return identity.get("data") or "other images"
    return str(value)
