"""The compare command."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from isomorph.cli import options as opt
from isomorph.cli.output import page_footer, page_line, show, spinner
from isomorph.errors import UserError


@opt.group
class ImageOptions:
    """The test images of --along."""

    data: str | None = None
    """Data source of the test images for --along; by default each run's own."""
    root: Path | None = None
    """Folder of that data; by default the one in each run's recipe."""
    max_images: opt.WholeNumber = 256
    """Number of images for --along, drawn at random, the same for all runs."""


@opt.command
def compare_(
    runs: list[Path] | None = None,
    /,
    *,
    along: Annotated[list[Literal["nonlocality", "entropy"]] | None, opt.Several] = None,
    test: ImageOptions = ImageOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    evaluated: Annotated[list[Path] | None, opt.Several] = None,
    out: Path | None = None,
    overwrite: opt.Overwrite = False,
    device: opt.Device = "auto",
    json_: opt.Json = False,
) -> None:
    """Compare runs in one HTML page: learning curves, accuracy against cost, gates along training, recipes.

    Example: isomorph compare runs/cnn runs/tcnn

    Parameters
    ----------
    runs
        Folders of runs, finished or not.
    along
        Measure attention on the checkpoints saved by keep_every; print and plot it per layer along training. One or
        both of nonlocality (ConViT Fig. 5) and entropy.
    evaluated
        Files with the output of `isomorph evaluate --json`; their models are added to the accuracy-cost chart.
    out
        File for the page, which needs no other file and no network; by default isomorph-comparison.html, with a number
        if it exists.
    """
    folders = runs or []
    if not folders and not evaluated:
        raise UserError("there is nothing to compare; give folders of runs, or --evaluated")
    if (test.data or test.root) and not along:
        raise UserError("--data and --root choose the images of --along; give --along nonlocality or entropy too")
    out = opt.choose_page(out, "isomorph-comparison.html", overwrite)
    with opt.loading():
        from isomorph.report.compare_page import compare_sections, histories_json, history_tables
        from isomorph.report.html import write_page
        from isomorph.report.run_files import read_run_logs
    logs = read_run_logs(folders)
    points = _accuracy_points(folders, logs, evaluated or [])
    with spinner("measuring") as show_step:
        histories = _measure_along(folders, logs, along, test, device, show_step) if along else {}
    sampled = f"{test.max_images} test images of {test.data or 'the data of each run'}, drawn at random"
    sections = compare_sections(logs, gating_histories(folders, logs), histories, sampled, points)
    if not sections:
        raise UserError(f"{points[0].name} is the only model; give another one in --evaluated, or a run")
    names = [log.name for log in logs] or [point.name for point in points]
    title = names[0] if len(names) == 1 else f"{len(names)} {'runs' if logs else 'models'}"
    size = write_page(out, title, sections[0].finding, sections, page_footer())
    measured: dict[str, Any] = {"out": str(out), "bytes": size}
    measured |= {"along": histories_json(histories)} if histories else {}
    measured |= {"points": [point._asdict() for point in points]} if points else {}
    show(json_, measured, *(part for table in history_tables(histories) for part in (table, "")), page_line(out, size))


def gating_histories(folders: Sequence[Path], logs: Sequence[Any]) -> dict[str, Any]:
    """Return gates, centres and spans along each run of a model with gated layers; other runs are left out."""
    from isomorph.training import gating_history

    histories = {}
    for folder, log in zip(folders, logs, strict=True):
        with suppress(UserError):  # no gated layer
            histories[log.name] = gating_history(folder, damaged=log.problems)
    return histories


def _open_images(log: Any, test: ImageOptions) -> Any:
    """Open the images for a run. Raises: UserError when its data is unknown or missing."""
    from isomorph.data.formats.registry import open_source
    from isomorph.data.sources import first_classes
    from isomorph.evaluation.model_data import sample_images

    own = log.recipe.get("data") or {}
    name, root = test.data or own.get("source"), test.root or own.get("root")
    if not name:
        raise UserError("recipe.json does not name its data source; give --data")
    source = open_source(name, "test", root and Path(root), None if test.data else own.get("split"))
    if not test.data and own.get("classes"):
        source = first_classes(source, own["classes"])
    return sample_images(source, test.max_images)


def _measure_along(
    folders: Sequence[Path],
    logs: Sequence[Any],
    keys: Sequence[str],
    test: ImageOptions,
    device: str,
    show_step: Callable[[str], None],
) -> dict[str, Any]:
    """Measure attention on every saved checkpoint of each run; failures are added to the problems of the run's log.

    Raises: UserError when nothing can be measured of any run.
    """
    from isomorph.distributed import open_runtime
    from isomorph.report.compare_page import MeasureHistory
    from isomorph.report.page_models import MEASURES
    from isomorph.training.history import attention_history

    if not logs:
        raise UserError("--along measures runs; give the folder of at least one run")
    histories: dict[str, dict[str, Any]] = {key: {} for key in keys}
    measures = {key: MEASURES[key].of for key in keys}
    device = str(open_runtime(device).device)
    for folder, log in zip(folders, logs, strict=True):
        show_step(log.name)
        try:
            epochs, values = attention_history(folder, measures, _open_images(log, test), device, log.problems)
        except UserError as error:
            log.problems.append(f"no {' and no '.join(keys)} along training: {error}")
            continue
        for key, layers in values.items():
            histories[key][log.name] = MeasureHistory(epochs, layers)
    if not any(histories.values()):
        raise UserError(f"{logs[0].name}: {logs[0].problems[-1]}")
    return histories


def _accuracy_points(folders: Sequence[Path], logs: Sequence[Any], evaluated: Sequence[Path]) -> list[Any]:
    """Return accuracy and cost of runs and of evaluated models; of evaluated ones alone if there is only one model.

    Failures are added to the problems of a run's log.

    Raises: UserError for two points of one name.
    """
    from isomorph.report.run_files import AccuracyPoint, best_top1, read_points
    from isomorph.training.history import run_cost

    points = read_points(evaluated)
    if len(logs) + len(points) <= 1:
        return points
    own = []
    for folder, log in zip(folders, logs, strict=True):
        top1, data = best_top1(log), log.recipe.get("data") or {}
        if top1 is None:
            continue
        try:
            own.append(AccuracyPoint(log.name, str(data.get("source", "test set")), top1, **run_cost(folder)))
        except UserError as error:
            log.problems.append(f"its cost was not counted: {error}")
    names = [point.name for point in (*own, *points)]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{repeated[0]} is given twice; give it once, as a run or in --evaluated")
    return [*own, *points]
