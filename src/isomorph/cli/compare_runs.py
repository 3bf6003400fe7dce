"""What `isomorph compare` reads and measures of runs."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from isomorph.analysis import GatingHistory
from isomorph.data.formats.registry import open_source
from isomorph.data.sources import Source, first_classes
from isomorph.distributed import open_runtime
from isomorph.errors import UserError
from isomorph.evaluation.suites.test_data import sample_images
from isomorph.report.compare_page import MEASURES, MeasureHistories, MeasureHistory
from isomorph.report.run_files import AccuracyPoint, RunLog, best_top1, read_points
from isomorph.training import gating_history
from isomorph.training.history import attention_history, run_cost


def gating_histories(folders: Iterable[Path], logs: Iterable[RunLog]) -> dict[str, GatingHistory]:
    """Return gates, centres and spans along each run that saved a model with gated layers; other runs are left out.

    Checkpoints that cannot be read are added to the problems of the run's log.
    """
    histories = {}
    for folder, log in zip(folders, logs, strict=True):
        with suppress(UserError):  # no saved checkpoint, or no gated layer in it
            histories[log.name] = gating_history(folder, damaged=log.problems)
    return histories


class TestImages(NamedTuple):
    """The test images to measure on: a data source and its folder, by default each run's own."""

    data: str | None
    root: Path | None
    samples: int

    def open_for(self, log: RunLog) -> Source:
        """Open the images for a run. Raises: UserError when its data is unknown or missing."""
        own = log.recipe.get("data") or {}
        name, root = self.data or own.get("source"), self.root or own.get("root")
        if not name:
            raise UserError("recipe.json does not name its data source; give --data")
        split = None if self.data else own.get("split")
        source = open_source(name, "test", root and Path(root), split)
        if not self.data and own.get("classes"):
            source = first_classes(source, own["classes"])
        return sample_images(source, self.samples)


def measure_along(
    folders: Sequence[Path],
    logs: Sequence[RunLog],
    keys: Sequence[str],
    images: TestImages,
    device: str,
    show_step: Callable[[str], None],
) -> MeasureHistories:
    """Measure attention on every saved checkpoint of each run; failures are added to the problems of the run's log.

    Raises: UserError when nothing can be measured of any run.
    """
    if not logs:
        raise UserError("--along measures runs; give the folder of at least one run")
    histories: dict[str, dict[str, MeasureHistory]] = {key: {} for key in keys}
    measures = {key: MEASURES[key].of for key in keys}
    device = str(open_runtime(device).device)
    for folder, log in zip(folders, logs, strict=True):
        show_step(log.name)
        try:
            epochs, values = attention_history(folder, measures, images.open_for(log), device, log.problems)
        except UserError as error:
            log.problems.append(f"no {' and no '.join(keys)} along training: {error}")
            continue
        for key, layers in values.items():
            histories[key][log.name] = MeasureHistory(epochs, layers)
    if not any(histories.values()):
        raise UserError(f"{logs[0].name}: {logs[0].problems[-1]}")
    return histories


def all_points(folders: Sequence[Path], logs: Sequence[RunLog], evaluated: Sequence[Path]) -> list[AccuracyPoint]:
    """Return accuracy and cost of runs and of evaluated models; of evaluated ones alone if there is only one model.

    Raises: UserError for two points of one name.
    """
    points = read_points(evaluated)
    if len(logs) + len(points) > 1:
        points = [*_run_points(folders, logs), *points]
        _check_unique_names([point.name for point in points])
    return points


def _run_points(folders: Sequence[Path], logs: Sequence[RunLog]) -> list[AccuracyPoint]:
    """Return accuracy and cost of the runs' models; failures are added to the problems of the run's log."""
    points = []
    for folder, log in zip(folders, logs, strict=True):
        top1, data = best_top1(log), log.recipe.get("data") or {}
        if top1 is None:
            continue
        try:
            points.append(AccuracyPoint(log.name, str(data.get("source", "test set")), top1, **run_cost(folder)))
        except UserError as error:
            log.problems.append(f"its cost was not counted: {error}")
    return points


def _check_unique_names(names: Sequence[str]) -> None:
    """Raise UserError if two points of a chart have the same name."""
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{repeated[0]} is given twice; give it once, as a run or in --evaluated")
