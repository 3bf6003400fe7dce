"""The cells of a robustness evaluation, a corruption at a severity each: wanted, measured, and kept in a result file.

The file has a line that identifies the evaluation, which is compared with others on the same images only.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.json_values import JsonObject
from isomorph.lab.data.corruptions.corrupt import CLEAN, CorruptedImages, fingerprint
from isomorph.lab.data.loaders import ImageConfig, batch_ranges, mean_and_std, ordered_loader
from isomorph.lab.data.sources import Source
from isomorph.lab.evaluation.accuracy import PredictionCounts, sum_counts
from isomorph.lab.evaluation.classes import class_logits
from isomorph.lab.evaluation.robustness.images import (
    PUBLISHED_SIZE,
    RobustnessInputs,
    RobustnessOptions,
    open_inputs,
)
from isomorph.lab.evaluation.robustness.scores import (
    Cell,
    Cells,
    compare_to_baseline,
    robustness_summary,
)
from isomorph.layers.modes import eval_mode, first_float
from isomorph.models.input_sizes import fit_to_size
from isomorph.terminal_tables import Metrics

_KIND = "isomorph robustness"
_IDENTITY_KEYS = ("suite", "version", "source", "limit", "size", "seed", "pictures")


def measure_classifier(
    model: nn.Module, source: Source | None, options: RobustnessOptions
) -> JsonObject:
    """Measure the cells of an image classifier that are not in the result file yet, and return the result.

    Raises: UserError as `iso.robustness`, and for a file of another model or images, or without a cell to compare.
    """
    limit = 1 if options.limit is None else options.limit
    if options.batch_size < 1 or limit < 1 or options.workers < 0:
        raise UserError("batch_size and limit must be at least 1 and workers at least 0")
    runtime = options.runtime
    severities = options.wanted()
    wanted = [(name, severity) for name in severities for severity in severities[name]]
    inputs = open_inputs(model, source, options)
    fitted = fit_to_size(model, inputs.size)
    weights = weights_hash(model, tuple(inputs.config["mean"]), tuple(inputs.config["std"]))
    name_of_model = options.name or type(model).__name__
    identity = {"model": name_of_model, "weights": weights, **inputs.identity()}
    base = None
    if options.baseline:
        base = _read_baseline(options.baseline, identity, wanted)
    if options.workers:
        _limit_opencv_threads()
    out = None
    if options.out and runtime.is_main:
        out = Path(options.out).expanduser()
    file = CellFile(out, identity)
    # of the process with the file
    cells: dict[tuple[str, int], Cell] = runtime.gather(file.cells)[0]
    # the clean cell may be of other images than those given, where published ones are corrupted
    clean_images = None if inputs.source is None else fingerprint(inputs.source)
    if clean_images and cells.get((CLEAN, 0), {}).get("images_of") != clean_images:
        cells.pop((CLEAN, 0), None)
    resumed = sum(key in cells for key in wanted)
    for name, own in {CLEAN: (0,), **severities}.items():
        left = tuple(severity for severity in own if (name, severity) not in cells)

        def report(done: float, name: str = name) -> None:
            if options.progress:
                finished = sum(key in cells for key in wanted)
                options.progress(finished + done * (name != CLEAN), len(wanted), name)

        if not left:
            continue
        for images in inputs.groups(name, left):
            measured = _measure_group(fitted, images, inputs, report)
            for severity, metrics in zip(images.severities, measured, strict=True):
                cell = {"corruption": name, "severity": severity, **metrics}
                if name == CLEAN:
                    cell["images_of"] = clean_images
                cells[name, severity] = cell
                file.append(cells[name, severity])
    measured_cells = {key: cells[key] for key in wanted if key in cells}
    clean = cells.get((CLEAN, 0))
    count = min(cell.get("images", 0) for cell in measured_cells.values())
    imagenet = inputs.num_classes == 1000 and inputs.size == PUBLISHED_SIZE
    result = {
        **identity,
        "images": count,
        "clean": clean,
        "cells": list(measured_cells.values()),
        **robustness_summary(measured_cells, clean, imagenet),
        "resumed": resumed,
    }
    if base:
        result["against"] = compare_to_baseline(measured_cells, base.cells, base.identity["model"])
    return result


def _read_baseline(
    path: str | Path, identity: JsonObject, wanted: Sequence[tuple[str, int]]
) -> "SavedResult":
    base = read_result(Path(path).expanduser())
    differences = _differences(base.identity, identity)
    if differences:
        raise UserError(
            f"{path} was measured on other images: {differences}; measure both on the same images"
        )
    if base.cells.keys().isdisjoint(wanted):
        raise UserError(f"{path} has none of these cells; evaluate both with the same options")
    return base


def _measure_group(
    model: nn.Module,
    images: CorruptedImages,
    inputs: RobustnessInputs,
    report: Callable[[float], None],
) -> list[Metrics]:
    options = inputs.options
    together = len(images.severities)
    size = max(1, options.batch_size // together)
    batches = batch_ranges(len(images), size)[options.runtime.share]
    report(0)
    counts: list[PredictionCounts] = []
    loader = ordered_loader(images, batches, options.workers)
    for done, (logits, labels) in enumerate(_predict(model, loader, inputs.config), 1):
        if not counts:
            counts = [PredictionCounts(logits.shape[-1]) for _ in images.severities]
        for own, own_logits in zip(counts, logits.unbind(1), strict=True):
            own.add(own_logits, labels)
        report(together * done / len(batches))
    # some are empty if batches are few
    shares = [share for share in options.runtime.gather(counts) if share]
    return [sum_counts(list(parts)).metrics() for parts in zip(*shares, strict=True)]


@torch.no_grad()
def _predict(
    model: nn.Module, loader: Iterable[Any], config: ImageConfig
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and labels of batches of images, normalised as the data config says.

    Shape: (B, severities, 3, H, W) uint8 -> (B, severities, K), (B,)
    """
    like = first_float(model)
    mean, std = mean_and_std(config, like.device)
    with eval_mode(model):
        for images, labels in loader:
            pixels = images.flatten(0, 1).to(
                like.device, non_blocking=True
            )  # (B * severities, 3, H, W)
            normalised = (pixels / 255 - mean) / std
            logits = class_logits(model(normalised.to(like.dtype)))
            yield logits.unflatten(0, images.shape[:2]), labels  # (B, severities, K)


def _limit_opencv_threads() -> None:
    """Limit OpenCV to one thread: workers already use all cores, and one forked next to OpenCV's threads hangs."""
    with suppress(ImportError):  # published images do not need it
        import cv2

        cv2.setNumThreads(1)


def weights_hash(model: nn.Module, *more: Any) -> str:
    """Return a hash of a model's state (names, types, shapes, bytes), of its modules' numbers, and of more values."""
    digest = hashlib.sha256(repr(more).encode())
    for module in model.modules():
        digest.update(repr((type(module).__name__, _plain_values(module))).encode())
    for name, tensor in model.state_dict().items():
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        if values.numel():
            digest.update(values.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _plain_values(module: nn.Module) -> list[tuple[str, str]]:
    """Return the public numbers, strings and tuples of a module as text; without those that hold addresses."""
    texts = {}
    for name, value in vars(module).items():
        if (
            name == "training"
            or name.startswith("_")
            or not isinstance(value, int | float | str | tuple)
        ):
            continue
        text = repr(value)
        if " at 0x" not in text:
            texts[name] = text
    return sorted(texts.items())


class CellFile:
    """The finished cells of one evaluation, appended to a file one by one; without a path in memory only.

    Every line is on disk before the next cell begins; an incomplete last line, of a killed process, is cut off.

    Raises: UserError when the file is of another model or other images, is not a result file, or cannot be written.
    """

    def __init__(self, path: Path | None, identity: JsonObject) -> None:
        self.path = path
        self.cells = dict[tuple[str, int], Cell]()
        if path is None:
            return
        if path.is_file() and _has_a_line(path):
            saved = read_result(path)
            if saved.identity["weights"] != identity["weights"]:
                raise UserError(
                    f"{path} has cells of {saved.identity['model']} with other weights; use another `out`"
                )
            differences = _differences(saved.identity, identity)
            if differences:
                raise UserError(
                    f"{path} has cells of other images: {differences}; use another `out`"
                )
            self.cells.update(saved.cells)
            self._truncate(saved.complete)
        else:
            self._truncate(0)
            self.append({"kind": _KIND, **identity})

    def _truncate(self, size: int) -> None:
        """Cut off an incomplete last line."""
        assert self.path is not None
        if self.path.is_file() and self.path.stat().st_size > size:
            with self._writing():
                os.truncate(self.path, size)

    def append(self, line: Cell) -> None:
        """Write a line to disk."""
        if self.path is None:
            return
        with self._writing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}; give another file"
            ) from None


def _has_a_line(path: Path) -> bool:
    """Return False for an empty file, or one that holds only the beginning of a result's first line."""
    begin = json.dumps({"kind": _KIND})[:-1].encode()
    try:
        content = path.read_bytes()
    except OSError:
        return True  # `read_result` says why
    return b"\n" in content or not begin.startswith(content[: len(begin)])


class SavedResult(NamedTuple):
    """The identity of an evaluation, its finished cells with the clean one, and the bytes in complete lines."""

    identity: JsonObject
    cells: Cells
    complete: int


def read_result(path: Path) -> SavedResult:
    """Read a file of results, without an incomplete last line. Raises: UserError for a file that is not one."""
    try:
        content = path.read_bytes()
        complete = content.rfind(b"\n") + 1
        identity, *lines = [json.loads(line) for line in content[:complete].splitlines()]
        needed = {"model", "weights", *_IDENTITY_KEYS}
        if identity.pop("kind") != _KIND or not identity.keys() >= needed:
            raise ValueError
        cells = {}
        for cell in lines:
            key = (cell["corruption"], int(cell["severity"]))
            cells[key] = {**cell, "top1": float(cell["top1"])}
        return SavedResult(identity, cells, complete)
    except OSError as error:
        raise UserError(
            f"cannot read results {path}: {error.strerror}; give a result file of {_KIND}"
        ) from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UserError(f"{path} is not a result file of {_KIND}, or is damaged") from None


def _differences(saved: JsonObject, other: JsonObject) -> str:
    """Return in which values the images of two results differ, the first one's before the second's; "" if in none."""
    differing = [key for key in _IDENTITY_KEYS if saved[key] != other[key]]
    return ", ".join(f"{key} {saved[key]}, here {other[key]}" for key in differing)
