"""What `isomorph robustness` checks, measures, prints and draws."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from isomorph.cli.evaluate_task import reject_classifier_options
from isomorph.cli.json_output import print_json
from isomorph.cli.page_output import page_footer
from isomorph.cli.progress import progress_bar
from isomorph.data.corruptions.corrupt import SEVERITIES
from isomorph.data.corruptions.dataset import CLEAN
from isomorph.distributed import Runtime
from isomorph.evaluation.suites.robustness import measure_classifier
from isomorph.evaluation.suites.robustness.cells import CellOptions, read_result
from isomorph.evaluation.suites.robustness.images import open_published
from isomorph.evaluation.suites.robustness.scores import Cells, metric_name, metric_of, severity_table, summary_lines
from isomorph.evaluation.suites.test_data import open_test_images
from isomorph.report.robustness_page import write_robustness
from isomorph.tasks.robustness import measure_task
from isomorph.terminal_tables import print_table
from isomorph.training.task import EvaluationOptions, task_of


def check_published_files(
    suite: str, folder: Path | None, corruptions: Sequence[str], severities: Sequence[int], extra: bool
) -> None:
    """Raise UserError if published corrupted images are asked for, and files of them are missing."""
    if published := open_published(suite, folder and folder.expanduser()):
        published.check_files(choose_cells(corruptions, severities, extra, None, None).wanted())


def choose_cells(
    corruptions: Sequence[str], severities: Sequence[int], extra: bool, out: Path | None, baseline: Path | None
) -> CellOptions:
    """Return the cells that the options ask for: without any, those of the suite."""
    return CellOptions(corruptions or None, severities or SEVERITIES, extra, out, baseline)


class Given(NamedTuple):
    """The name of a model and the options: `loaded` of `EvaluationOptions`, `classifiers` only for classifiers."""

    name: str
    suite: str
    seed: int
    loaded: Mapping[str, Any]
    classifiers: Mapping[str, Any]


def measure(model: nn.Module, given: Given, cells: CellOptions, runtime: Runtime) -> dict[str, Any]:
    """Return the result of a model, as `iso.robustness`; the main process shows the progress."""
    options = EvaluationOptions(**given.loaded)
    task = task_of(model)
    if task:
        reject_classifier_options(given.classifiers)
    with progress_bar("cells", show=runtime.is_main) as progress:
        shown = cells._replace(progress=progress)
        if task:
            return measure_task(model, task, options, shown, given.name, given.seed, runtime)
        return _measure_classifier(model, given, options, shown, runtime)


def _measure_classifier(
    model: nn.Module, given: Given, options: EvaluationOptions, cells: CellOptions, runtime: Runtime
) -> dict[str, Any]:
    """Return the result of a classifier on published images, or on those of its data source."""
    own = dict(given.classifiers)
    classes, split = own.pop("classes"), own.pop("split")
    published_only = own["folder"] and options.data is None
    source = None if published_only else open_test_images(model, options.data, options.root, classes, split)
    own |= dict(seed=given.seed, limit=options.max_images, batch_size=options.batch_size, workers=options.workers)
    return measure_classifier(model, source, given.suite, cells, given.name, runtime=runtime, **own)


def show_result(result: Mapping[str, Any], page: Path | None, baseline: Path | None, json_: bool) -> None:
    """Write the page if there is one, and print the metric by corruption and severity, or all of it as JSON."""
    if page:
        write_result_page(page, result, baseline)
    if json_:
        print_json(result)
        return
    print_table(severity_table(result))
    print("\n" + "\n".join(summary_lines(result)))
    if page:
        print(f"page: {page}")


def write_result_page(page: Path, result: Mapping[str, Any], baseline: Path | None) -> None:
    """Write the page of a result, with the baseline's if there is one. Raises: UserError when it cannot be written."""
    metric, name = metric_of(result), result["model"]
    clean = [{"corruption": CLEAN, "severity": 0, **result["clean"]}] if result["clean"] else []
    own = {(cell["corruption"], cell["severity"]): cell for cell in [*clean, *result["cells"]]}
    results = {name: own}
    if baseline:
        identity, base = read_result(baseline.expanduser())
        first = identity["model"] if identity["model"] != name else f"{name} (baseline)"
        results = {first: {key: base[key] for key in base if key in own}, name: own}
    values = {model: _values(cells, metric) for model, cells in results.items()}
    measured = [f"{line[:1].upper()}{line[1:]}." for line in summary_lines(result)]
    write_robustness(page, values, metric_name(result), measured, severity_table(result), page_footer())


def _values(cells: Cells, metric: str) -> dict[tuple[str, int], float]:
    """Return the metric of every cell."""
    return {key: float(cell[metric]) for key, cell in cells.items()}
