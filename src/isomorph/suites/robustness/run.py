"""How a classifier does on corrupted pictures: ImageNet-C's 15 (+4) corruptions at 5 severities."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from isomorph.data.corruptions.cache import CachedImages, CellWriter, CorruptionCache
from isomorph.data.corruptions.corrupt import (
    EXTRA_CORRUPTIONS,
    IMAGENET_C_CORRUPTIONS,
    SEVERITIES,
    check_corruption,
    corruption_functions,
)
from isomorph.data.corruptions.dataset import CLEAN, CorruptedImages, image_loader
from isomorph.data.sources import Source
from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import fit_to_size
from isomorph.evaluation.prediction_counts import PredictionCounts
from isomorph.layers.eval_mode import eval_mode
from isomorph.suites.robustness.inputs import PUBLISHED_SIZE, RobustnessInputs, prepare_inputs
from isomorph.suites.robustness.published import open_published
from isomorph.suites.robustness.results import (
    CellFile,
    check_same_inputs,
    read_result,
    weights_hash,
)
from isomorph.suites.robustness.scores import Cell, compare_to_baseline, robustness_summary

ProgressCallback = Callable[[float, int, str], None]
"""Told cells done, cells in all, and what is being done."""
_Job = tuple[str, tuple[int, ...], Dataset[Any], CellWriter | None]
"""A corruption, its severities side by side, their pictures, and what keeps them."""


def robustness(
    model: nn.Module,
    source: Source | None = None,
    suite: str = "imagenet-c",
    *,
    folder: str | Path | None = None,
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] = SEVERITIES,
    extra: bool = False,
    size: tuple[int, int] | None = None,
    seed: int = 0,
    limit: int | None = None,
    partial: bool = False,
    batch_size: int = 100,
    workers: int = 0,
    out: str | Path | None = None,
    cache: str | Path | None = None,
    baseline: str | Path | None = None,
    name: str | None = None,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Accuracy of a model under ImageNet-C's corruptions, by corruption, category and severity, and mCE where defined.

    The images of `source` are framed first (1000 classes: as ImageNet-C was, 224 px; others: the model's own test
    crop), then corrupted, each by a draw of its own, so that workers and order change nothing. With `folder` the
    published pictures are read instead (with the suite cifar-c the arrays of CIFAR-10-C or CIFAR-100-C), and `source`,
    if any, is for the clean error. `out` keeps finished cells: a
    second call goes on from there. `cache` keeps corrupted pictures. `baseline` is another model's `out`, or its
    result as JSON. For 1000 classes labels go by the names of the source's classes: wnids, ImageNet's numbers or
    English names; `partial` allows a part of them.

    Raises: UserError when something does not fit, is missing, or is unknown; in one line.
    """
    if batch_size < 1 or workers < 0 or (limit is not None and limit < 1):
        raise UserError("batch_size and limit must be at least 1 and workers at least 0")
    wanted = wanted_cells(corruptions, severities, extra)
    published = open_published(suite, Path(folder).expanduser() if folder else None)
    sight = prepare_inputs(model, source, published, size, seed, limit, partial)
    if published:
        published.refuse_missing(wanted)
    else:
        corruption_functions()  # refuses when their package is missing
    fitted = fit_to_size(model, sight.size)
    identity = {"model": name or type(model).__name__, "weights": weights_hash(model), **sight.identity()}
    identity |= {"data": sight.data(), "constants": sight.constants()}
    base = read_result(Path(baseline).expanduser()) if baseline else None
    if base:
        check_same_inputs(str(baseline), base[0], identity)
    journal = CellFile(Path(out).expanduser() if out else None, identity)
    stored = _open_cache(Path(cache), sight) if cache else None
    report = CellProgress(journal, wanted, progress or (lambda done, total, doing: None))
    resumed = len(report.cells)
    for job in _jobs(sight, report.missing, stored):
        _measure_cells(fitted, sight, job, report, batch_size, workers)
    found = _build_result(journal, wanted, sight) | {"resumed": resumed}
    return found | ({"against": compare_to_baseline(report.cells, base[1], base[0]["model"])} if base else {})


def wanted_cells(
    corruptions: Sequence[str] | None, severities: Sequence[int], extra: bool
) -> dict[str, tuple[int, ...]]:
    """Severities of each corruption asked for. Raises: UserError for an unknown one, or none."""
    names = [*(IMAGENET_C_CORRUPTIONS if corruptions is None else corruptions), *(EXTRA_CORRUPTIONS if extra else ())]
    if not names or not severities:
        raise UserError("there is nothing to do: give at least one corruption and one severity")
    for corruption in names:
        for severity in severities:
            check_corruption(corruption, severity)
    return dict.fromkeys(names, tuple(sorted(set(severities))))


def _open_cache(top: Path, sight: RobustnessInputs) -> CorruptionCache:
    """Raises: UserError for published pictures, which are on disk already."""
    if sight.published:
        raise UserError("a cache is for pictures corrupted on the fly; those of a folder are on disk already")
    return CorruptionCache(top, sight.identity(), len(sight.clean_source()), sight.size)


class CellProgress:
    """Which cells are wanted, done and missing; tells of progress."""

    def __init__(self, journal: CellFile, wanted: Mapping[str, tuple[int, ...]], progress: ProgressCallback) -> None:
        self.journal, self.wanted, self.progress = journal, wanted, progress
        self.total = sum(map(len, wanted.values()))

    @property
    def cells(self) -> dict[tuple[str, int], Cell]:
        return {key: cell for key, cell in self.journal.cells.items() if key[1] in self.wanted.get(key[0], ())}

    @property
    def missing(self) -> dict[str, tuple[int, ...]]:
        """Severities yet to be measured, by corruption; the clean images first."""
        done = self.journal.cells
        cells = {CLEAN: (0,), **self.wanted}
        return {name: left for name, all_ in cells.items() if (left := tuple(s for s in all_ if (name, s) not in done))}

    def tell(self, share: float, job: _Job) -> None:
        """Told while a job runs: the share of it that is done."""
        name, severities, *_ = job
        self.progress(len(self.cells) + share * len(severities) * (name != CLEAN), self.total, name)


def _jobs(
    sight: RobustnessInputs, missing: Mapping[str, tuple[int, ...]], cache: CorruptionCache | None
) -> Iterator[_Job]:
    """What is to be run: stored cells as they are, others made from one decoding of each image."""
    for name, severities in missing.items():
        if name == CLEAN:
            if sight.source is not None:
                yield CLEAN, (0,), CorruptedImages(sight.clean_source(), sight.frame), None
            continue
        found = {s: pixels for s in severities if cache and (pixels := cache.stored(name, s)) is not None}
        if found:
            yield name, tuple(found), CachedImages(list(found.values()), sight.clean_source().labels), None
        left = tuple(s for s in severities if s not in found)
        for group, pictures in sight.groups(name, left) if left else ():
            if cache:
                cache.refuse_full_disk(len(group))
            yield name, group, pictures, CellWriter(cache, name, group) if cache else None


def _measure_cells(
    model: nn.Module, sight: RobustnessInputs, job: _Job, report: CellProgress, batch_size: int, workers: int
) -> None:
    """Measures the cells of a job in one pass, and keeps them when all their images have been seen."""
    name, severities, pictures, writer = job
    loader = image_loader(pictures, max(1, batch_size // len(severities)), workers)
    report.tell(0, job)
    tallies: list[PredictionCounts] = []
    seen = 0
    try:
        for logits, labels in _predict(model, loader, sight.config, writer):
            tallies = tallies or [PredictionCounts(logits.shape[-1]) for _ in severities]
            for tally, part in zip(tallies, logits.unbind(1), strict=True):
                tally.add(part, labels)
            seen += len(labels)
            report.tell(seen / len(pictures), job)  # type: ignore[arg-type]
        if writer:
            writer.finish()
    except BaseException:
        if writer:
            writer.drop()
        raise
    for severity, tally in zip(severities, tallies, strict=True):
        report.journal.add(name, severity, tally.metrics())


@torch.no_grad()
def _predict(
    model: nn.Module, loader: Iterable[Any], config: Mapping[str, Any], writer: CellWriter | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits of a job's pictures, normalised as the model's data config says.

    Shape: -> (B, severities, K), (B,)
    """
    parameter = next(model.parameters())
    mean, std = (torch.tensor(config[key], device=parameter.device)[:, None, None] for key in ("mean", "std"))
    with eval_mode(model):
        for pictures, labels in loader:
            if writer:
                writer.add(pictures)
            levels = pictures.flatten(0, 1).to(parameter.device, non_blocking=True)  # (B * severities, 3, H, W)
            logits = model(((levels / 255 - mean) / std).to(parameter.dtype)).float()
            yield logits.unflatten(0, pictures.shape[:2]), labels  # (B, severities, K)


def _build_result(journal: CellFile, wanted: Mapping[str, tuple[int, ...]], sight: RobustnessInputs) -> dict[str, Any]:
    """The result: whose, of what, every cell, and the means over them."""
    cells = {(name, s): journal.cells[name, s] for name, severities in wanted.items() for s in severities}
    clean = journal.cells.get((CLEAN, 0))
    images = min(int(cell.get("images", 0)) for cell in cells.values())
    found = {
        **journal.identity,
        "images": images,
        "clean": clean,
        "cells": list(cells.values()),
    }
    return found | robustness_summary(cells, clean, sight.imagenet and sight.size == PUBLISHED_SIZE)
