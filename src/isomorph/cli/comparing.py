"""The command that compares runs, and models that have been evaluated."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from cyclopts import Parameter

from isomorph.analysis import Trajectory
from isomorph.cli.app import Device, Json, Whole, app, bounded, spinner
from isomorph.cli.reports import footer, say
from isomorph.data import Source, first_classes, open_source
from isomorph.distributed import open_runtime
from isomorph.errors import UserError
from isomorph.report import compare_runs, read_runs, write_page
from isomorph.report.accuracy_cost import Point, points_json, read_points
from isomorph.report.along import MEASURES, Course, Courses, course_tables, courses_json
from isomorph.report.compare_page import Log, best_top1
from isomorph.suites.test_data import draw_images
from isomorph.training import gating_history
from isomorph.training.history import attention_history, run_cost

Along = Literal["nonlocality", "entropy"]


def dials_kept(folders: Iterable[Path], logs: Iterable[Log]) -> dict[str, Trajectory]:
    """Gates, centres and spans along each run that kept a model with gated layers; other runs are left out.

    Kept checkpoints that cannot be read are said among the log's problems.
    """
    found = {}
    for folder, log in zip(folders, logs, strict=True):
        with suppress(UserError):  # nothing was kept, or nothing in it is gated
            found[log.name] = gating_history(folder, damaged=log.problems)
    return found


class Images(NamedTuple):
    """The test images of a measure along training: a source and its folder, by default each run's own."""

    data: str | None
    root: Path | None
    samples: int

    def of(self, log: Log) -> Source:
        """Those of a run. Raises: UserError when its data is unknown or missing."""
        own = log.recipe.get("data") or {}
        name, root = self.data or own.get("source"), self.root or own.get("root")
        if not name:
            raise UserError("recipe.json does not say its data; give --data")
        source = open_source(name, "test", root and Path(root))
        if not self.data and own.get("classes"):
            source = first_classes(source, own["classes"])
        return draw_images(source, self.samples)


def follow(
    folders: Sequence[Path],
    logs: Sequence[Log],
    keys: Sequence[str],
    images: Images,
    device: str,
    tell: Callable[[str], None],
) -> Courses:
    """Measures along each run; what cannot be measured of a run is said among its log's problems.

    Raises: UserError when nothing can be measured of any run.
    """
    found: dict[str, dict[str, Course]] = {key: {} for key in keys}
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
            found[key][log.name] = Course(moments, layers)
    if not logs:
        raise UserError("--along is for runs; give folders of some")
    if not any(found.values()):
        raise UserError(f"{logs[0].name}: {logs[0].problems[-1]}")
    return found


def _points_of_runs(folders: Sequence[Path], logs: Sequence[Log]) -> list[Point]:
    """Accuracy and cost of the models of runs; a run whose model cannot be read is said among its log's problems."""
    points = []
    for folder, log in zip(folders, logs, strict=True):
        top1, data = best_top1(log), log.recipe.get("data") or {}
        if top1 is None:
            continue
        try:
            points.append(Point(log.name, str(data.get("source", "test set")), top1, **run_cost(folder)))
        except UserError as error:
            log.problems.append(f"its cost was not counted: {error}")
    return points


def _refuse_named_twice(names: Sequence[str]) -> None:
    """Raises: UserError when two points of a chart would have one name."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{twice[0]} is named twice; give it once, as a run or in --evaluated")


@app.command(name="compare")
@bounded
def compare_(
    runs: list[Path] | None = None,
    /,
    *,
    along: Annotated[list[Along] | None, Parameter(consume_multiple=True)] = None,
    data: str | None = None,
    root: Path | None = None,
    samples: Whole = 256,
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
    logs = read_runs(folders)
    points = read_points(evaluated or [])
    if len(logs) + len(points) > 1:
        points = [*_points_of_runs(folders, logs), *points]
        _refuse_named_twice([point.name for point in points])
    with spinner("measuring") as tell:
        courses = follow(folders, logs, along, Images(data, root, samples), device, tell) if along else {}
    drawn = f"{samples} test images of {data or 'the data of each run'}, drawn at random"
    sections = compare_runs(logs, dials_kept(folders, logs), courses, drawn, points)
    if not sections:
        raise UserError(f"{points[0].name} has nothing beside it; give another model in --evaluated, or a run")
    names = [log.name for log in logs] or [point.name for point in points]
    title = names[0] if len(names) == 1 else f"{len(names)} {'runs' if logs else 'models'}"
    size = write_page(out, title, ", ".join(names), sections, footer())
    measured = ({"along": courses_json(courses)} if courses else {}) | (
        {"points": points_json(points)} if points else {}
    )
    say(out, size, sections, figures, json_, measured, course_tables(courses))
