"""The cells of a robustness evaluation, a corruption at a severity each: wanted, measured, and kept in a result file.

A result file has a line that identifies the evaluation, then one for every finished cell, so that an evaluation
resumes. Results are compared only if they were measured on the same images.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor, nn

from isomorph.data.corruptions.corrupt import (
    CLEAN,
    EXTRA_CORRUPTIONS,
    IMAGENET_C_CORRUPTIONS,
    SEVERITIES,
    check_corruption,
    corruption_functions,
)
from isomorph.data.loaders import batch_ranges, ordered_loader
from isomorph.data.sources import Source
from isomorph.distributed import ALONE, Runtime
from isomorph.errors import UserError
from isomorph.evaluation.accuracy import PredictionCounts, class_logits, sum_counts
from isomorph.evaluation.input_sizes import fit_to_size
from isomorph.evaluation.robustness.images import PUBLISHED_SIZE, open_published, prepare_inputs
from isomorph.evaluation.robustness.scores import (
    Cell,
    Cells,
    common_cells,
    compare_to_baseline,
    inputs_line,
    metric_of,
    robustness_summary,
)
from isomorph.layers.eval_mode import eval_mode

_KIND = "isomorph robustness"
_IDENTITY_KEYS = ("suite", "version", "source", "limit", "size", "seed", "pictures")
"""Keys that must be equal in two results that are compared."""
_OTHER_KEYS = ("weights", "data", "constants", "metric")
_KEY_LABELS = {"version": "corruptions of version", "source": "data:"}
"""Labels of keys in messages about results that differ."""
_PARSE_ERRORS = (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError)
"""Errors raised while parsing a file that is not a result file."""
ProgressCallback = Callable[[float, int, str], None]
"""Takes the number of finished cells, the number of all cells, and the name of the current corruption."""


@dataclass(frozen=True)
class RobustnessOptions:
    """What to measure, how, and the files of results; the fields are described at `iso.robustness`.

    >>> from isomorph.evaluation.robustness.cells import RobustnessOptions
    >>> RobustnessOptions(corruptions=["fog"], severities=[1, 3]).wanted()
    {'fog': (1, 3)}
    """

    suite: str = "imagenet-c"
    folder: str | Path | None = None
    corruptions: Sequence[str] | None = None
    severities: Sequence[int] = SEVERITIES
    extra: bool = False
    size: tuple[int, int] | None = None
    seed: int = 0
    limit: int | None = None
    partial: bool = False
    batch_size: int = 100
    workers: int = 0
    out: str | Path | None = None
    baseline: str | Path | None = None
    name: str | None = None
    progress: ProgressCallback | None = None
    runtime: Runtime = ALONE

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


Measure = Callable[[str, tuple[int, ...], Callable[[float], None]], Iterable[tuple[int, Mapping[str, Any]]]]
"""Measures the severities of a corruption: yields each with its metrics, and reports how many of them are done."""


def measure_cells(
    model: nn.Module, identity: Mapping[str, Any], options: RobustnessOptions, measure: Measure, imagenet: bool = False
) -> dict[str, Any]:
    """Measure the cells that are not in the result file yet, and return the result; `imagenet` as in the summary.

    Raises: UserError when a file cannot be read, is of another model or other images, or has no cell to compare, or the
    processes differ.
    """
    runtime, severities = options.runtime, options.wanted()
    wanted = [(name, severity) for name in severities for severity in severities[name]]
    identity = {"model": options.name or type(model).__name__, "weights": weights_hash(model), **identity}
    metric = metric_of(identity)
    base = read_result(Path(options.baseline).expanduser()) if options.baseline else None
    if base:
        check_same_inputs(str(options.baseline), base.identity, identity)
        common_cells(wanted, base.cells, base.identity["model"])
    out = Path(options.out).expanduser() if options.out and runtime.is_main else None
    with closing(CellFile(out, identity)) as file:
        cells: dict[tuple[str, int], Cell] = runtime.gather(file.cells)[0]  # of the process with the file
        resumed = sum(key in cells for key in wanted)
        for name, own in {CLEAN: (0,), **severities}.items():
            left = tuple(severity for severity in own if (name, severity) not in cells)

            def report(done: float, name: str = name) -> None:
                if options.progress:
                    finished = sum(key in cells for key in wanted)
                    options.progress(finished + done * (name != CLEAN), len(wanted), name)

            for severity, metrics in measure(name, left, report) if left else ():
                cells[name, severity] = {"corruption": name, "severity": severity, **metrics}
                file.append(cells[name, severity])
    found, clean = {key: cells[key] for key in wanted if key in cells}, cells.get((CLEAN, 0))
    images = min(int(cell.get("images", 0)) for cell in found.values())
    result = {**identity, "images": images, "clean": clean, "cells": list(found.values())}
    result |= robustness_summary(found, clean, imagenet, metric) | {"resumed": resumed}
    if base:
        result["against"] = compare_to_baseline(found, base.cells, base.identity["model"], metric)
    return result


def measure_classifier(model: nn.Module, source: Source | None, options: RobustnessOptions) -> dict[str, Any]:
    """Measure the accuracy of an image classifier under corruptions. Result and errors: `iso.robustness`."""
    if options.batch_size < 1 or options.workers < 0 or (options.limit is not None and options.limit < 1):
        raise UserError("batch_size and limit must be at least 1 and workers at least 0")
    published = open_published(options.suite, options.folder, options.wanted())
    inputs = prepare_inputs(model, source, published, options.size, options.seed, options.limit, options.partial)
    if not published:
        corruption_functions()  # raises now, not after hours, if their package is missing
    fitted, runtime = fit_to_size(model, inputs.size), options.runtime
    if options.workers:
        _limit_opencv_threads()

    def measure(
        name: str, severities: tuple[int, ...], report: Callable[[float], None]
    ) -> Iterator[tuple[int, dict[str, float]]]:
        for images in inputs.groups(None if name == CLEAN else name, severities):
            together = len(images.severities)
            batches = batch_ranges(len(images), max(1, options.batch_size // together))[runtime.share]
            report(0)
            counts: list[PredictionCounts] = []
            loader = ordered_loader(images, batches, options.workers)
            for done, (logits, labels) in enumerate(_predict(fitted, loader, inputs.config), 1):
                counts = counts or [PredictionCounts(logits.shape[-1]) for _ in images.severities]
                for own, own_logits in zip(counts, logits.unbind(1), strict=True):
                    own.add(own_logits, labels)
                report(together * done / len(batches))
            shares = [share for share in runtime.gather(counts) if share]  # some are empty if batches are few
            for severity, parts in zip(images.severities, zip(*shares, strict=True), strict=True):
                yield severity, sum_counts(list(parts)).metrics()

    return measure_cells(
        model, inputs.identity(), options, measure, inputs.num_classes == 1000 and inputs.size == PUBLISHED_SIZE
    )


@torch.no_grad()
def _predict(model: nn.Module, loader: Iterable[Any], config: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and labels of batches of images, normalised as the data config says.

    Shape: (B, severities, 3, H, W) uint8 -> (B, severities, K), (B,)
    """
    parameter = next(model.parameters())
    mean, std = (torch.tensor(config[key], device=parameter.device)[:, None, None] for key in ("mean", "std"))
    with eval_mode(model):
        for images, labels in loader:
            pixels = images.flatten(0, 1).to(parameter.device, non_blocking=True)  # (B * severities, 3, H, W)
            logits = class_logits(model(((pixels / 255 - mean) / std).to(parameter.dtype)))
            yield logits.unflatten(0, images.shape[:2]), labels  # (B, severities, K)


def _limit_opencv_threads() -> None:
    """Limit OpenCV to one thread: workers already use all cores, and one forked next to OpenCV's threads hangs."""
    with suppress(ImportError):  # published images do not need it
        import cv2

        cv2.setNumThreads(1)


def weights_hash(model: nn.Module) -> str:
    """Return a hash of the names, types, shapes and bytes of a model's state."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().data if values.numel() else b"")
    return digest.hexdigest()[:16]


class CellFile:
    """The finished cells of one evaluation, appended to a file one by one; without a path in memory only.

    Every line is on disk before the next cell begins; an incomplete last line, which a killed process leaves, is cut
    off. One command at a time writes a file.

    Raises: UserError when the file holds cells of another model or other images, is not a result file, or cannot be
        written.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any]) -> None:
        self.path, self.cells = path, dict[tuple[str, int], Cell]()
        self.file: TextIO | None = None
        if path is None:
            return
        with ExitStack() as if_refused:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self.file = if_refused.enter_context(path.open("a"))
                _lock(path, self.file.fileno())
                if path.stat().st_size:
                    saved = read_result(path)
                    _check_same_model(path, saved, identity)
                    self.cells.update(saved.cells)
                    os.truncate(path, saved.complete)
            except OSError as error:
                raise UserError(f"cannot write {path}: {error.strerror}; give another file") from None
            if not path.stat().st_size:
                self.append({"kind": _KIND, **identity})
            if_refused.pop_all()

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line to disk."""
        if self.file is None:
            return
        try:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; give another file") from None

    def close(self) -> None:
        """Let other commands write the file."""
        if self.file:
            self.file.close()


def _lock(path: Path, descriptor: int) -> None:
    """Keep other commands from writing an open file. Raises: UserError when one does already."""
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock

        flock(descriptor, LOCK_EX | LOCK_NB)
    except ImportError:  # on Windows
        pass
    except BlockingIOError:
        raise UserError(f"another command writes {path} now; wait for it, or give another --out") from None


class SavedResult(NamedTuple):
    """The identity of an evaluation, its finished cells with the clean one, and the bytes in complete lines."""

    identity: dict[str, Any]
    cells: Cells
    complete: int


def read_result(path: Path) -> SavedResult:
    """Read an --out file, or saved --json output, whose `complete` is 0.

    Raises: UserError when the file cannot be read, or is neither of them.
    """
    try:
        content = path.read_bytes()
        complete = content.rfind(b"\n") + 1 if content.startswith(b'{"kind"') else 0
        if complete:
            found, *cells = [json.loads(line) for line in content[:complete].splitlines()]
            complete *= found["kind"] == _KIND
        else:
            found = json.loads(content)
            cells = [*found["cells"], *([found["clean"]] if found["clean"] else [])]
        identity = {key: found[key] for key in _OTHER_KEYS if key in found} | {"model": str(found["model"])}
        identity |= {key: found[key] for key in _IDENTITY_KEYS}
        metric = metric_of(identity)
        parsed = {(str(cell["corruption"]), int(cell["severity"])): _parse_cell(cell, metric) for cell in cells}
        return SavedResult(identity, parsed, complete)
    except OSError as error:
        what = "give a result file of isomorph robustness"
        raise UserError(f"cannot read results {path}: {error.strerror}; {what}") from None
    except _PARSE_ERRORS:
        raise UserError(f"{path} is not a result file of {_KIND}, or is damaged") from None


def _parse_cell(line: Cell, metric: str) -> Cell:
    """Return a cell with numbers. Raises: one of _PARSE_ERRORS for other values."""
    numbers = {metric: float(line[metric])} | ({"images": int(line["images"])} if "images" in line else {})
    if not 0 <= numbers[metric] <= 100 or not 0 <= numbers.get("images", 0) < 2**62:
        raise ValueError
    return {**line, **numbers}


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
    problems, measured, first = list[str](), "", None
    for path in paths:
        identity, cells, complete = read_result(path)
        if not set(cells) - {(CLEAN, 0)}:
            raise UserError(f"{path} has no finished cells; run isomorph robustness with this --out again")
        check_same_inputs(str(path), identity, first := first or identity)
        owners = [name for name, weights in models.items() if weights == identity.get("weights") and name not in top1]
        if not owners:
            others = f"with other weights than {' and '.join(models)}"
            raise UserError(f"{path} holds the results of {identity['model']}, {others}; give one file per model")
        top1[owners[0]] = {key: cell[metric_of(identity)] for key, cell in cells.items()}
        measured = measured or inputs_line(identity, max(int(cell.get("images", 0)) for cell in cells.values()))
        if 0 < complete < path.stat().st_size:
            problems.append(f"{path.name}: its last line is incomplete and was ignored.")
    return Results({name: top1[name] for name in models if name in top1}, measured, problems)


def _check_same_model(path: Path, saved: SavedResult, wanted: Mapping[str, Any]) -> None:
    """Raise UserError if the cells of a file belong to another model, or were measured on other images."""
    if not saved.complete:
        raise UserError(f"{path} is not a result file of {_KIND}, but its --json output; give another --out")
    held = f"{path} holds cells of {saved.identity['model']} with"
    if "weights" in wanted and saved.identity.get("weights") != wanted["weights"]:
        raise UserError(f"{held} other weights; give another --out")
    first, second = _describe_differences(saved.identity, wanted)
    if first:
        raise UserError(f"{held} {first}, but this run has {second}; give another --out")


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
