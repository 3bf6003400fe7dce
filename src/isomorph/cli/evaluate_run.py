"""What `isomorph evaluate` opens and measures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from isomorph.checkpoints.files import write_atomically
from isomorph.cli.progress import track_steps
from isomorph.deployment import Artefact
from isomorph.distributed import Runtime
from isomorph.evaluation import evaluation_config, throughput
from isomorph.evaluation.suites.imagenet import NUM_CLASSES, Suite, find_suites, open_located
from isomorph.evaluation.suites.locate import SuiteLocation
from isomorph.evaluation.suites.sweep import Sweep, check_csv_path, measure_costs, run_sweep, write_csv
from isomorph.evaluation.suites.test_data import evaluation_data
from isomorph.evaluation.suites.test_set import TestSet, check_num_classes, no_progress


def find_inputs(
    suites: list[str] | None, root: Path | None, data: str | None, per_class: Path | None, overwrite: bool
) -> Mapping[SuiteLocation, Sequence[Suite]]:
    """Return where the named test suites are, before a model is opened; and make the folder of `per_class`.

    Raises: UserError for a suite that is not there, or a file that exists.
    """
    check_csv_path(per_class, overwrite)
    return find_suites(suites or [], root, data)


def open_test_sets(
    model: nn.Module,
    locations: Mapping[SuiteLocation, Sequence[Suite]],
    partial: bool,
    data: str | None,
    root: Path | None,
    split: float | None,
    classes: int | None,
    sizes: Sequence[tuple[int, int]],
    max_images: int | None,
) -> list[TestSet]:
    """Open test suites, or without any the test images of a data source; or this many images of each.

    Raises: UserError for data of other classes than the model's.
    """
    if locations:
        check_num_classes(getattr(model, "num_classes", None), NUM_CLASSES)
        return [_spaced(test_set, max_images) for test_set in open_located(locations, partial)]
    source, _ = evaluation_data(model, data, root, sizes[0] if sizes else None, classes, split)
    return [_spaced(TestSet.from_source(source), max_images)]


def _spaced(test_set: TestSet, max_images: int | None) -> TestSet:
    return test_set if max_images is None else test_set.spaced(max_images)


def measure(
    model: nn.Module,
    test_sets: list[TestSet],
    sweep: Sweep,
    batch_size: int,
    workers: int,
    per_class: Path | None,
    cost: bool,
    runtime: Runtime,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a row of metrics for each point of the sweep, and the costs for each size; write those of the classes.

    The processes share the images; the main one writes, and measures the costs.
    """
    progress = track_steps if runtime.is_main else no_progress
    rows, class_rows = run_sweep(model, test_sets, sweep, batch_size, workers, progress, runtime)
    if per_class and runtime.is_main:
        write_atomically(per_class, lambda file: write_csv(file, class_rows))
    images = sum(len(test_set.source) for test_set in test_sets)
    if not (cost and runtime.is_main):
        return rows, []
    exported = isinstance(model, Artefact)
    return rows, (_measure_exported if exported else measure_costs)(model, sweep.sizes, images)


def _measure_exported(model: nn.Module, sizes: Sequence[tuple[int, int]], images: int) -> list[dict[str, Any]]:
    """Measure images per second of an exported model, whose multiply-accumulates nothing counts, at every size."""
    rows = []
    for size in sizes or (None,):
        shape = evaluation_config(model, size)["input_size"]
        head = {"size": list(size)} if size else {}
        rows.append(head | {"images_per_second": throughput(model, shape, max(1, min(images, 32)))})
    return rows
