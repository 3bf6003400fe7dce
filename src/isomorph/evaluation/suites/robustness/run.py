"""Evaluation of a classifier on corrupted images: the 15 (+4) corruptions of ImageNet-C at 5 severities."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from isomorph.data.corruptions.cache import CachedImages, CellWriter, CorruptionCache
from isomorph.data.corruptions.corrupt import corruption_functions
from isomorph.data.corruptions.dataset import CLEAN, CorruptedImages, image_loader
from isomorph.data.sources import Source
from isomorph.distributed import ALONE, Runtime
from isomorph.errors import UserError
from isomorph.evaluation.accuracy import PredictionCounts, sum_counts
from isomorph.evaluation.input_sizes import fit_to_size
from isomorph.evaluation.suites.robustness.cells import CellFile, CellOptions, open_cells, weights_hash
from isomorph.evaluation.suites.robustness.images import (
    PUBLISHED_SIZE,
    RobustnessInputs,
    open_published,
    prepare_inputs,
)
from isomorph.layers.eval_mode import eval_mode

_Job = tuple[str, tuple[int, ...], Dataset[Any], CellWriter | None]
"""A corruption, the severities evaluated together, their images, and the writer that caches them."""


def measure_classifier(
    model: nn.Module,
    source: Source | None,
    suite: str,
    cells: CellOptions,
    name: str,
    *,
    folder: str | Path | None = None,
    size: tuple[int, int] | None = None,
    seed: int = 0,
    limit: int | None = None,
    partial: bool = False,
    batch_size: int = 100,
    workers: int = 0,
    cache: str | Path | None = None,
    runtime: Runtime = ALONE,
) -> dict[str, Any]:
    """Measure the accuracy of an image classifier under corruptions. Arguments, result and errors: `iso.robustness`."""
    if batch_size < 1 or workers < 0 or (limit is not None and limit < 1):
        raise UserError("batch_size and limit must be at least 1 and workers at least 0")
    wanted = cells.wanted()
    published = open_published(suite, Path(folder).expanduser() if folder else None)
    inputs = prepare_inputs(model, source, published, size, seed, limit, partial)
    if published:
        published.check_files(wanted)
    else:
        corruption_functions()  # raises now, not after hours, if their package is missing
    fitted = fit_to_size(model, inputs.size)
    identity = {"model": name, "weights": weights_hash(model), **inputs.identity()}
    state = open_cells(identity, wanted, cells, runtime)
    opened_cache = _open_cache(Path(cache), inputs, runtime) if cache else None
    for job in _jobs(inputs, state.missing, opened_cache):
        _measure_cells(fitted, inputs, job, state, batch_size, workers, runtime)
    return state.result(inputs.imagenet and inputs.size == PUBLISHED_SIZE)


def _open_cache(top: Path, inputs: RobustnessInputs, runtime: Runtime) -> CorruptionCache:
    """Open the cache of corrupted images. Raises: UserError for a published data set, which needs none."""
    if inputs.published:
        raise UserError("--cache stores images that isomorph corrupts; those of --folder are on disk already")
    crop = {key: inputs.config.get(key) for key in ("crop_pct", "crop_mode", "interpolation")}
    return CorruptionCache(top, inputs.identity() | crop, len(inputs.clean), inputs.size, runtime)


def _jobs(
    inputs: RobustnessInputs, missing: Mapping[str, tuple[int, ...]], cache: CorruptionCache | None
) -> Iterator[_Job]:
    """Iterate over the work: cached cells as they are, others corrupted after decoding each image once."""
    for name, severities in missing.items():
        if name == CLEAN:
            if inputs.source is not None:
                yield CLEAN, (0,), CorruptedImages(inputs.source, inputs.crop), None
            continue
        cached = cache.load_complete(name, severities) if cache else {}
        if cached:
            yield name, tuple(cached), CachedImages(list(cached.values()), inputs.clean.labels), None
        left = tuple(s for s in severities if s not in cached)
        for group, images in inputs.groups(name, left) if left else ():
            if cache:
                cache.check_free_space(len(group))
            yield name, group, images, CellWriter(cache, name, group) if cache else None


def _measure_cells(
    model: nn.Module,
    inputs: RobustnessInputs,
    job: _Job,
    state: CellFile,
    batch_size: int,
    workers: int,
    runtime: Runtime,
) -> None:
    """Measure the cells of a job in one pass, and save them once all processes have evaluated their images."""
    name, severities, images, writer = job
    loader = image_loader(images, max(1, batch_size // len(severities)), workers, runtime.share)
    state.update(name, severities)
    counts: list[PredictionCounts] = []
    try:
        for done, (logits, labels) in enumerate(_predict(model, loader, inputs.config, writer), 1):
            counts = counts or [PredictionCounts(logits.shape[-1]) for _ in severities]
            for severity_counts, severity_logits in zip(counts, logits.unbind(1), strict=True):
                severity_counts.add(severity_logits, labels)
            state.update(name, severities, done / len(loader))
        shares = [share for share in runtime.gather(counts) if share]  # of fewer batches than processes, some are empty
        if writer:
            writer.finish()
    except BaseException:
        if writer:
            writer.discard()
        raise
    for severity, parts in zip(severities, zip(*shares, strict=True), strict=True):
        state.add(name, severity, sum_counts(list(parts)).metrics())


@torch.no_grad()
def _predict(
    model: nn.Module, loader: DataLoader[Any], config: Mapping[str, Any], writer: CellWriter | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over logits and labels of a job's images, normalised as the data config says.

    Shape: -> (B, severities, K), (B,)
    """
    parameter = next(model.parameters())
    mean, std = (torch.tensor(config[key], device=parameter.device)[:, None, None] for key in ("mean", "std"))
    with eval_mode(model):
        for indices, (images, labels) in zip(loader.batch_sampler, loader, strict=True):  # type: ignore[arg-type]
            if writer:
                writer.add(images, first=indices[0])
            pixels = images.flatten(0, 1).to(parameter.device, non_blocking=True)  # (B * severities, 3, H, W)
            logits = model(((pixels / 255 - mean) / std).to(parameter.dtype)).float()
            yield logits.unflatten(0, images.shape[:2]), labels  # (B, severities, K)
