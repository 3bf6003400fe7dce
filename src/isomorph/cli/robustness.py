"""The robustness command."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from isomorph.cli.evaluate import reject_classifier_options
from isomorph.cli.options import (
    Device,
    Json,
    LoadOptions,
    Model,
    OpenOptions,
    Size,
    Split,
    WholeNumber,
    check_page,
    command,
    display_name,
    group,
    loading,
)
from isomorph.cli.output import page_footer, progress_bar, show


@group
class ClassifierOptions:
    """Data and images of a classifier of images."""

    folder: Path | None = None
    """Folder of the published ImageNet-C (CORRUPTION/SEVERITY/WNID/*.JPEG) or CIFAR-C (CORRUPTION.npy, labels.npy),
    instead of corrupting clean images."""
    cache: Path | None = None
    """Folder to store corrupted images in for further models: about 150 KB per image and cell at 224 px."""
    size: Size | None = None
    """Height and width of the images; by default 224 224 for models of 1000 classes, else the model's own."""
    partial: bool = False
    """Accept data with only some of ImageNet's classes; labels follow from the class names."""
    classes: WholeNumber | None = None
    """Use only the first N classes of the data, as data.classes does in training."""
    split: Split = None


@group
class Cells:
    """The cells to measure, a corruption at a severity each."""

    corruption: tuple[str, ...] = ()
    """Corruption to use; may be given several times (--corruption fog --corruption snow). By default all 15."""
    severity: tuple[WholeNumber, ...] = ()
    """Severity to use, from 1 to 5; may be given several times. By default all."""
    extra: bool = False
    """Also use the four extra corruptions speckle_noise, gaussian_blur, spatter and saturate."""
    out: Path | None = None
    """File for the results of finished cells (a corruption at a severity), one per line. The command resumes from
    it."""
    baseline: Path | None = None
    """File of another model's results (--out or --json) to compare with."""


@command
def robustness(
    model: Model,
    /,
    *,
    suite: str = "imagenet-c",
    data: str | None = None,
    load: LoadOptions = LoadOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    of: ClassifierOptions = ClassifierOptions(),  # noqa: B008
    cells: Cells = Cells(),  # noqa: B008
    seed: WholeNumber = 0,
    opening: OpenOptions = OpenOptions(),  # noqa: B008
    page: Path | None = None,
    overwrite: Annotated[bool, Parameter(negative="", help="Replace --page if it exists.")] = False,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Measure accuracy under the corruptions of ImageNet-C, by corruption, category and severity, and mCE.

    Of a model for segmentation or detection: mean IoU or box AP.

    Example: isomorph robustness t.safetensors --data photos --max-images 200

    Parameters
    ----------
    suite
        imagenet-c, or cifar-c for the published CIFAR-10-C or CIFAR-100-C, which needs --folder.
    data
        A folder of clean images to corrupt, or a data source: cifar10, cifar100, digits or imagefolder; by default the
        one the model was trained on. With --folder: the clean images, for the relative mCE. For segmentation and
        detection: a folder with masks or annotations.
    seed
        Seed of the random corruptions.
    page
        File for a page (.html) with charts of the results, next to those of --baseline if it is given.
    """
    check_page(page, overwrite)
    with loading():
        from isomorph.cli.open_models import open_classifier
        from isomorph.data.corruptions.corrupt import SEVERITIES
        from isomorph.distributed import open_runtime
        from isomorph.evaluation.suites.robustness.cells import CellOptions
        from isomorph.evaluation.suites.robustness.images import open_published
        from isomorph.evaluation.suites.robustness.scores import severity_table, summary_lines
        from isomorph.training.task import EvaluationOptions
    wanted = CellOptions(cells.corruption or None, cells.severity or SEVERITIES, cells.extra, cells.out, cells.baseline)
    if published := open_published(suite, of.folder and of.folder.expanduser()):
        published.check_files(wanted.wanted())
    runtime = open_runtime(device)
    net = open_classifier(model, opening, runtime.device)
    given = EvaluationOptions(data, **vars(load))
    with progress_bar("cells", show=runtime.is_main) as progress:
        name = display_name(model, opening.pretrained)
        result = _measure(net, name, suite, seed, of, given, wanted._replace(progress=progress), runtime)
    if runtime.is_main:
        if page:
            _write_page(page, result, cells.baseline)
        written = [f"page: {page}"] if page else []
        show(json_, result, severity_table(result), "\n" + "\n".join(summary_lines(result)), *written)


def _measure(
    net: Any, name: str, suite: str, seed: int, of: ClassifierOptions, given: Any, cells: Any, runtime: Any
) -> dict[str, Any]:
    """Return the result of a model: of a classifier on published images, or on those of its data source."""
    from isomorph.evaluation.model_data import open_test_images
    from isomorph.evaluation.suites.robustness import measure_classifier
    from isomorph.tasks.robustness import measure_task
    from isomorph.training.task import task_of

    if task := task_of(net):
        reject_classifier_options(vars(of))
        return measure_task(net, task, given, cells, name, seed, runtime)
    published_only = of.folder and given.data is None
    source = None if published_only else open_test_images(net, given.data, given.root, of.classes, of.split)
    own = dict(folder=of.folder, cache=of.cache, size=of.size, partial=of.partial, seed=seed, limit=given.max_images)
    loaded = dict(batch_size=given.batch_size, workers=given.workers)
    return measure_classifier(net, source, suite, cells, name, runtime=runtime, **own, **loaded)


def _write_page(page: Path, result: Mapping[str, Any], baseline: Path | None) -> None:
    """Write the page of a result, with the baseline's if there is one. Raises: UserError when it cannot be written."""
    from isomorph.data.corruptions.dataset import CLEAN
    from isomorph.evaluation.suites.robustness.cells import read_result
    from isomorph.evaluation.suites.robustness.scores import metric_name, metric_of, severity_table, summary_lines
    from isomorph.report.robustness_page import write_robustness

    metric, name = metric_of(result), result["model"]
    clean = [{"corruption": CLEAN, "severity": 0, **result["clean"]}] if result["clean"] else []
    own = {(cell["corruption"], cell["severity"]): cell for cell in [*clean, *result["cells"]]}
    results = {name: own}
    if baseline:
        identity, base = read_result(baseline.expanduser())
        first = identity["model"] if identity["model"] != name else f"{name} (baseline)"
        results = {first: {key: base[key] for key in base if key in own}, name: own}
    values = {model: {key: float(cell[metric]) for key, cell in found.items()} for model, found in results.items()}
    measured = [f"{line[:1].upper()}{line[1:]}." for line in summary_lines(result)]
    write_robustness(page, values, metric_name(result), measured, severity_table(result), page_footer())
