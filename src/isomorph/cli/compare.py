"""The compare command."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter

from isomorph.analysis import GatingHistory
from isomorph.cli.app import Device, Json, WholeNumber, app, check_limits, spinner
from isomorph.cli.page_output import page_footer, save_figures_and_print
from isomorph.data.formats.registry import open_source
from isomorph.data.sources import Source, first_classes
from isomorph.distributed import open_runtime
from isomorph.errors import UserError
from isomorph.report.accuracy_cost import AccuracyPoint, points_json, read_points
from isomorph.report.attention_history import MEASURES, MeasureHistories, MeasureHistory, histories_json, history_tables
from isomorph.report.compare_page import RunLog, best_top1, compare_sections, read_run_logs
from isomorph.report.html import write_page
from isomorph.suites.test_data import sample_images
from isomorph.training import gating_history
from isomorph.training.history import attention_history, run_cost

Along = Literal["nonlocality", "entropy"]


def gating_histories(folders: Iterable[Path], logs: Iterable[RunLog]) -> dict[str, GatingHistory]:
    """Return gates, centres and spans along each run that saved a model with gated layers; other runs are left out.

    Checkpoints that cannot be read are added to the problems of the run's log.
    """
    histories = {}
    for folder, log in zip(folders, logs, strict=True):
        with suppress(UserError):  # no saved checkpoint, or no gated layer in it
            histories[log.name] = gating_history(folder, damaged=log.problems)
    return histories


class _TestImages(NamedTuple):
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
        source = open_source(name, "test", root and Path(root))
        if not self.data and own.get("classes"):
            source = first_classes(source, own["classes"])
        return sample_images(source, self.samples)


def _measure_along(
    folders: Sequence[Path],
    logs: Sequence[RunLog],
    keys: Sequence[str],
    images: _TestImages,
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


@app.command(name="compare")
@check_limits
def compare_(
    runs: list[Path] | None = None,
    /,
    *,
    along: Annotated[list[Along] | None, Parameter(consume_multiple=True)] = None,
    data: str | None = None,
    root: Path | None = None,
    samples: WholeNumber = 256,
    evaluated: Annotated[list[Path] | None, Parameter(consume_multiple=True)] = None,
    out: Path = Path("isomorph-comparison.html"),
    figures: Path | None = None,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Compare runs in one HTML page: learning curves, accuracy against cost, gates along training, recipes.

    Parameters
    ----------
    runs
        Folders of runs, finished or not.
    along
        Measure attention on the checkpoints saved by keep_every; print and plot it per layer along training. One or
        both of nonlocality (ConViT Fig. 5) and entropy.
    data
        Data source of the test images for --along; by default each run's own.
    root
        Folder of that data; by default the one in each run's recipe.
    samples
        Number of images for --along, drawn at random, the same for all runs.
    evaluated
        Files with the output of `isomorph evaluate --json`; these models join the chart of accuracy against cost.
    out
        File for the page, which needs no other file and no network.
    figures
        Folder to save every chart in as PDF and SVG.
    """
    folders = runs or []
    if not folders and not evaluated:
        raise UserError("there is nothing to compare; give folders of runs, or --evaluated")
    if samples < 1:
        raise UserError("--samples must be at least 1")
    if (data or root) and not along:
        raise UserError("--data and --root choose the images of --along; give --along nonlocality or entropy too")
    logs = read_run_logs(folders)
    points = read_points(evaluated or [])
    if len(logs) + len(points) > 1:
        points = [*_run_points(folders, logs), *points]
        _check_unique_names([point.name for point in points])
    images = _TestImages(data, root, samples)
    with spinner("measuring") as show_step:
        histories = _measure_along(folders, logs, along, images, device, show_step) if along else {}
    sampled = f"{samples} test images of {data or 'the data of each run'}, drawn at random"
    sections = compare_sections(logs, gating_histories(folders, logs), histories, sampled, points)
    if not sections:
        raise UserError(f"{points[0].name} is the only model; give another one in --evaluated, or a run")
    names = [log.name for log in logs] or [point.name for point in points]
    title = names[0] if len(names) == 1 else f"{len(names)} {'runs' if logs else 'models'}"
    size = write_page(out, title, ", ".join(names), sections, page_footer())
    measured: dict[str, Any] = {"along": histories_json(histories)} if histories else {}
    measured |= {"points": points_json(points)} if points else {}
    save_figures_and_print(out, size, sections, figures, json_, measured, history_tables(histories))
