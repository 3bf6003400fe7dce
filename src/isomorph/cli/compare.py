"""The compare command."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from isomorph.cli.app import app, loading
from isomorph.cli.options import Device, Json, Overwrite, WholeNumber, check_figures, check_limits, choose_page
from isomorph.errors import UserError

Along = Literal["nonlocality", "entropy"]


@app.command(name="compare")
@check_limits
def compare_(
    runs: list[Path] | None = None,
    /,
    *,
    along: Annotated[list[Along] | None, Parameter(consume_multiple=True)] = None,
    data: str | None = None,
    root: Path | None = None,
    max_images: WholeNumber = 256,
    evaluated: Annotated[list[Path] | None, Parameter(consume_multiple=True)] = None,
    out: Path | None = None,
    overwrite: Overwrite = False,
    figures: Path | None = None,
    device: Device = "auto",
    json_: Json = False,
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
    data
        Data source of the test images for --along; by default each run's own.
    root
        Folder of that data; by default the one in each run's recipe.
    max_images
        Number of images for --along, drawn at random, the same for all runs.
    evaluated
        Files with the output of `isomorph evaluate --json`; their models are added to the accuracy-cost chart.
    out
        File for the page, which needs no other file and no network; by default isomorph-comparison.html, with a number
        if it exists.
    figures
        Folder to save every chart in as PDF and SVG.
    """
    folders = runs or []
    if not folders and not evaluated:
        raise UserError("there is nothing to compare; give folders of runs, or --evaluated")
    if (data or root) and not along:
        raise UserError("--data and --root choose the images of --along; give --along nonlocality or entropy too")
    out = choose_page(out, "isomorph-comparison.html", overwrite)
    check_figures(figures, overwrite)
    with loading():
        from isomorph.cli.compare_runs import TestImages, all_points, gating_histories, measure_along
        from isomorph.cli.page_output import page_footer, save_figures_and_print
        from isomorph.cli.progress import spinner
        from isomorph.report.compare_page import compare_sections, histories_json, history_tables
        from isomorph.report.html import write_page
        from isomorph.report.run_files import read_run_logs
    logs = read_run_logs(folders)
    points = all_points(folders, logs, evaluated or [])
    images = TestImages(data, root, max_images)
    with spinner("measuring") as show_step:
        histories = measure_along(folders, logs, along, images, device, show_step) if along else {}
    sampled = f"{max_images} test images of {data or 'the data of each run'}, drawn at random"
    sections = compare_sections(logs, gating_histories(folders, logs), histories, sampled, points)
    if not sections:
        raise UserError(f"{points[0].name} is the only model; give another one in --evaluated, or a run")
    names = [log.name for log in logs] or [point.name for point in points]
    title = names[0] if len(names) == 1 else f"{len(names)} {'runs' if logs else 'models'}"
    size = write_page(out, title, sections[0].finding, sections, page_footer())
    measured: dict[str, Any] = {"along": histories_json(histories)} if histories else {}
    measured |= {"points": [point._asdict() for point in points]} if points else {}
    save_figures_and_print(out, size, sections, figures, json_, measured, history_tables(histories))
