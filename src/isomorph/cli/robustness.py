"""The robustness command."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from isomorph.cli import options as opt
from isomorph.cli.output import page_footer, page_line, progress_bar, show
from isomorph.errors import UserError


@opt.group
class ClassifierOptions:
    """Data and images of a classifier of images.

    Parameters
    ----------
    folder
        Folder of the published ImageNet-C (CORRUPTION/SEVERITY/WNID/*.JPEG) or CIFAR-C (CORRUPTION.npy, labels.npy),
        instead of corrupting clean images.
    partial
        Accept data with only some of ImageNet's classes; labels follow from the class names.
    classes
        Use only the first N classes of the data, as data.classes does in training.
    """

    folder: Path | None = None
    size: opt.Size = None
    partial: bool = False
    classes: opt.Count | None = None
    split: opt.Split = None


@opt.group
class Cells:
    """The cells to measure, a corruption at a severity each.

    Parameters
    ----------
    corruption
        Corruptions to use, as in --corruption fog snow; by default all 15.
    severity
        Severities to use, from 1 to 5; by default all.
    extra
        Also use the four extra corruptions speckle_noise, gaussian_blur, spatter and saturate.
    out
        File for the results of finished cells (a corruption at a severity), one per line. The command resumes from it.
    baseline
        The --out file of another model to compare with.
    """

    corruption: tuple[str, ...] = ()
    severity: tuple[opt.Severity, ...] = ()
    extra: bool = False
    out: Path | None = None
    baseline: Path | None = None


@opt.command
def robustness(
    model: opt.Model,
    /,
    *,
    suite: str = "imagenet-c",
    data: opt.Data = None,
    load: opt.LoadOptions = opt.LoadOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    of: ClassifierOptions = ClassifierOptions(),  # noqa: B008
    cells: Cells = Cells(),  # noqa: B008
    seed: opt.Seed = 0,
    opening: opt.OpenOptions = opt.OpenOptions(),  # noqa: B008
    page: Path | None = None,
    overwrite: Annotated[bool, Parameter(negative="", help="Replace --page if it exists.")] = False,
    device: opt.Device = "auto",
    json_: opt.Json = False,
) -> None:
    """Measure accuracy under the corruptions of ImageNet-C, by corruption, category and severity, and mCE.

    Example: isomorph robustness t.safetensors --data photos --max-images 200

    Parameters
    ----------
    suite
        imagenet-c, or cifar-c for the published CIFAR-10-C or CIFAR-100-C, which needs --folder.
    data
        A folder of clean images to corrupt, or a data source: cifar10, cifar100, digits or imagefolder; by default the
        one the model was trained on. With --folder: the clean images, for the relative mCE.
    seed
        Seed of the random corruptions.
    page
        File for a page (.html) with charts of the results, next to those of --baseline if it is given.
    """
    opt.check_out(page, overwrite, suffixes=(".html",), option="--page")
    given = {"root": load.root, "classes": of.classes, "split": of.split}
    for option, value in given.items():
        if of.folder and data is None and value is not None:
            raise UserError(f"--{option} is about the clean images of --data; give --data too")
    with opt.loading():
        from isomorph.cli.open_models import open_classifier
        from isomorph.lab.distributed import open_runtime
        from isomorph.lab.evaluation.model_data import open_test_images
        from isomorph.lab.evaluation.robustness.cells import measure_classifier, read_result
        from isomorph.lab.evaluation.robustness.images import (
            SEVERITIES,
            RobustnessOptions,
            open_published,
        )
        from isomorph.lab.evaluation.robustness.scores import severity_table, summary_lines
        from isomorph.lab.report.robustness_page import write_robustness
        from isomorph.lab.tasks.robustness import check_classifier
    options = RobustnessOptions(
        suite,
        corruptions=cells.corruption or None,
        severities=cells.severity or SEVERITIES,
        extra=cells.extra,
        seed=seed,
        folder=of.folder,
        size=of.size,
        partial=of.partial,
        limit=load.max_images,
        batch_size=load.batch_size,
        workers=load.workers,
        out=cells.out,
        baseline=cells.baseline,
        name=opt.display_name(model, opening.pretrained),
    )
    open_published(options)
    runtime = open_runtime(device)
    net = open_classifier(model, opening, runtime.device)
    check_classifier(net, model)
    clean = None
    if data is not None or not of.folder:
        clean = open_test_images(net, data, load.root, of.classes, of.split)
    with progress_bar("cells", show=runtime.is_main) as progress:
        result = measure_classifier(
            net, clean, replace(options, runtime=runtime, progress=progress)
        )
    if not runtime.is_main:
        return
    texts: list[Any] = [severity_table(result), "\n" + "\n".join(summary_lines(result))]
    if page:
        base = read_result(cells.baseline.expanduser()) if cells.baseline else None
        size = write_robustness(page, result, base, page_footer())
        texts.append(page_line(page, size))
    show(json_, result, *texts)
