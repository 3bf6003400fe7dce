"""Result files of `isomorph robustness`, written and read: a line that identifies the evaluation, then one per cell.

A cell is one corruption at one severity. Results are compared only if they were measured on the same images.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from isomorph.data.corruptions.dataset import CLEAN
from isomorph.distributed import Runtime
from isomorph.errors import UserError
from isomorph.evaluation.suites.result_file import PARSE_ERRORS, ResultFile, read_result_file
from isomorph.evaluation.suites.robustness.scores import Cell, Cells, inputs_line, metric_of

_KIND = "isomorph robustness"
_IDENTITY_KEYS = ("suite", "version", "source", "limit", "size", "seed", "pictures")
"""Keys that must be equal in two results that are compared."""
_KEY_LABELS = {"version": "corruptions of version", "source": "data:"}
"""Labels of keys in messages about results that differ."""


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
        self._file = ResultFile(path, _KIND, self.identity, self._resume)

    def _resume(self, identity: Mapping[str, Any], lines: Sequence[Cell]) -> None:
        """Take the cells of a file. Raises: UserError for those of another model, or one of PARSE_ERRORS."""
        saved = _parse_identity(identity)
        cells = _cells_by_key(lines, metric_of(saved))
        _check_same_model(self.path, saved, self.identity)
        self.cells.update(cells)

    def add(self, corruption: str, severity: int, metrics: Mapping[str, Any]) -> None:
        """Add a finished cell and flush it to disk."""
        cell = {"corruption": corruption, "severity": severity, **metrics}
        self.cells[corruption, severity] = cell
        self._file.add(cell)


def open_cell_file(path: Path | None, identity: Mapping[str, Any], runtime: Runtime) -> CellFile:
    """Open a file of cells in the main process; the others get its cells, and write to no file. Raises: as CellFile."""
    opened = CellFile(path if runtime.is_main else None, identity)
    opened.cells = runtime.gather(opened.cells)[0]
    return opened


def _cells_by_key(lines: Iterable[Cell], metric: str) -> dict[tuple[str, int], Cell]:
    """Return cells by corruption and severity. Raises: one of PARSE_ERRORS for a line that is not a cell."""
    return {(str(line["corruption"]), int(line["severity"])): _parse_cell(line, metric) for line in lines}


def _parse_cell(line: Cell, metric: str) -> Cell:
    """Return a cell with its metric and count as numbers. Raises: one of PARSE_ERRORS for an invalid one."""
    if not 0 <= float(line[metric]) <= 100 or not 0 <= int(line.get("images", 0)) < 2**62:
        raise ValueError
    return {**line, metric: float(line[metric])} | ({"images": int(line["images"])} if "images" in line else {})


def _parse_identity(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model and the images that the results are for. Raises: one of PARSE_ERRORS when they are missing."""
    optional = {key: line[key] for key in ("weights", "data", "constants", "metric") if key in line}
    return optional | {key: line[key] for key in _IDENTITY_KEYS} | {"model": str(line["model"])}


def read_result(path: Path) -> tuple[dict[str, Any], Cells]:
    """Return the identity and the cells, including the clean one, from an --out file or saved --json output.

    Raises: UserError when the file cannot be read, or is neither of them.
    """
    try:
        result = json.loads(path.read_text())
        clean = result["clean"]
        identity = _parse_identity(result)
        return identity, _cells_by_key([*result["cells"], *([clean] if clean else [])], metric_of(identity))
    except OSError as error:
        raise UserError(
            f"cannot read results {path}: {error.strerror}; give a result file of isomorph robustness"
        ) from None
    except PARSE_ERRORS:
        return read_result_file(path, _KIND, _parse_lines)[0]


def _parse_lines(saved: Mapping[str, Any], lines: Sequence[Cell]) -> tuple[dict[str, Any], Cells]:
    """Return the identity and the cells of a result file. Raises: one of PARSE_ERRORS for other lines."""
    identity = _parse_identity(saved)
    return identity, _cells_by_key(lines, metric_of(identity))


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
    differing = [key for key in differing if key not in _dependent_keys(differing)]
    if differing == ["source"] and a.get("data") == b.get("data"):
        return "other images" + (f" ({a['data']}, as here)" if a.get("data") else ""), "these"
    pairs = [(key, _value_text(key, a), _value_text(key, b)) for key in differing]
    single = len(pairs) == 1
    return (
        " and ".join(f"{_KEY_LABELS.get(key, key)} {first}" for key, first, _ in pairs),
        " and ".join(second if single else f"{_KEY_LABELS.get(key, key)} {second}" for key, _, second in pairs),
    )


def _dependent_keys(differing: Sequence[str]) -> list[str]:
    """Return the keys that differ only because other keys differ."""
    return ["source"] * bool({"limit", "pictures"} & set(differing)) + ["pictures"] * ("size" in differing)


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
