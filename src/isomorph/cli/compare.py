"""The command that compares runs, and models that have been evaluated."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from cyclopts import Parameter

from isomorph.training import gating_history
from isomorph.training.history import attention_history, run_cost
from isomorph.analysis import Trajectory
from isomorph.cli.analyze import footer, say
from isomorph.cli.app import Device, Json, WholeNumber, app, check_limits, spinner
from isomorph.data.formats.registry import open_source
from isomorph.data.sources import Source, first_classes
from isomorph.distributed import open_runtime
from isomorph.errors import UserError
from isomorph.report.accuracy_cost import AccuracyPoint, points_json, read_points
from isomorph.report.attention_history import MEASURES, MeasureHistories, MeasureHistory, histories_json, history_tables
from isomorph.report.compare_page import RunLog, best_top1, compare_sections, read_run_logs
from isomorph.report.html import write_page
from isomorph.suites.test_data import sample_images

Along = Literal["nonlocality", "entropy"]


def gating_histories(folders: Iterable[Path], logs: Iterable[RunLog]) -> dict[str, Trajectory]:
    """Gates, centres and spans along each run that kept a model with gated layers; other runs are left out.

    Kept checkpoints that cannot be read are said among the log's problems.
    """
    found = {}
    for folder, log in zip(folders, logs, strict=True):
        with suppress(UserError):  # nothing was kept, or nothing in it is gated
            found[log.name] = gating_history(folder, damaged=log.problems)
    return found


class _TestImages(NamedTuple):
    """The test images of a measure along training: a source and its folder, by default each run's own."""

    data: str | None
    root: Path | None
    samples: int

    def of(self, log: RunLog) -> Source:
        """Those of a run. Raises: UserError when its data is unknown or missing."""
        own = log.recipe.get("data") or {}
        name, root = self.data or own.get("source"), self.root or own.get("root")
        if not name:
            raise UserError("recipe.json does not say its data; give --data")
        source = open_source(name, "test", root and Path(root))
        if not self.data and own.get("classes"):
            source = first_classes(source, own["classes"])
        return sample_images(source, self.samples)


def measure_along(
    folders: Sequence[Path],
    logs: Sequence[RunLog],
    keys: Sequence[str],
    images: _TestImages,
    device: str,
    tell: Callable[[str], None],
) -> MeasureHistories:
    """Measures along each run; what cannot be measured of a run is said among its log's problems.

    Raises: UserError when nothing can be measured of any run.
    """
    found: dict[str, dict[str, MeasureHistory]] = {key: {} for key in keys}
    measures = {key: MEASURES[key].of for key in keys}
    where = str(open_runtime(device).device)
    for folder, log in zip(folders, logs, strict=True):
        tell(log.name)
        try:
            moments, values = attention_history(folder, measures, images.of(log), where, log.problems)
        except UserError as error:
            log.problems.append(f"no {' and no '.join(keys)} along training: {error}")
            continue
        for key, layers in values.items():
            found[key][log.name] = MeasureHistory(moments, layers)
    if not logs:
        raise UserError("--along is for runs; give folders of some")
    if not any(found.values()):
        raise UserError(f"{logs[0].name}: {logs[0].problems[-1]}")
    return found


def _run_points(folders: Sequence[Path], logs: Sequence[RunLog]) -> list[AccuracyPoint]:
    """Accuracy and cost of the models of runs; a run whose model cannot be read is said among its log's problems."""
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


def _check_names_differ(names: Sequence[str]) -> None:
    """Raises: UserError when two points of a chart would have one name."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{twice[0]} is named twice; give it once, as a run or in --evaluated")


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
    """Compare runs in one HTML page: learning curves, accuracy against cost, gates along training, differing recipes.

    Parameters
    ----------
    runs
        Folders of runs, finished or not.
    along
        Measure this on every model that keep_every kept, print it and draw it along training, a line a layer:
        nonlocality (ConViT Fig. 5), entropy, or both.
    data
        Source of the test images for --along; by default each run's own.
    root
        Folder of that data; by default the one in each run's recipe.
    samples
        Images for --along, drawn at random, the same for all runs.
    evaluated
        Results of `isomorph evaluate --json` of other models, which stand beside the runs in accuracy against cost.
    out
        The page: one file, which loads nothing.
    figures
        Folder for every chart as PDF and SVG.
    """
    folders = runs or []
    if not folders and not evaluated:
        raise UserError("there is nothing to compare; give folders of runs, or --evaluated")
    if samples < 1:
        raise UserError("--samples must be at least 1")
    if (data or root) and not along:
        raise UserError("--data and --root are for the images of --along; give --along nonlocality too")
    logs = read_run_logs(folders)
    points = read_points(evaluated or [])
    if len(logs) + len(points) > 1:
        points = [*_run_points(folders, logs), *points]
        _check_names_differ([point.name for point in points])
    with spinner("measuring") as tell:
        courses = measure_along(folders, logs, along, _TestImages(data, root, samples), device, tell) if along else {}
    drawn = f"{samples} test images of {data or 'the data of each run'}, drawn at random"
    sections = compare_sections(logs, gating_histories(folders, logs), courses, drawn, points)
    if not sections:
        raise UserError(f"{points[0].name} has nothing beside it; give another model in --evaluated, or a run")
    names = [log.name for log in logs] or [point.name for point in points]
    title = names[0] if len(names) == 1 else f"{len(names)} {'runs' if logs else 'models'}"
    size = write_page(out, title, ", ".join(names), sections, footer())
    measured = ({"along": histories_json(courses)} if courses else {}) | (
        {"points": points_json(points)} if points else {}
    )
    say(out, size, sections, figures, json_, measured, history_tables(courses))
