"""The robustness command."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from isomorph.cli.app import app, loading
from isomorph.cli.options import (
    CheckpointOptions,
    Device,
    Json,
    MaxImages,
    Model,
    Pretrained,
    Root,
    Split,
    Weights,
    WholeNumber,
    check_limits,
    check_page,
    display_name,
)
from isomorph.cli.sizes import Size


@app.command
@check_limits
def robustness(
    model: Model,
    /,
    *,
    suite: str = "imagenet-c",
    data: str | None = None,
    root: Root = None,
    split: Split = None,
    folder: Path | None = None,
    corruption: tuple[str, ...] = (),
    severity: tuple[WholeNumber, ...] = (),
    extra: bool = False,
    out: Path | None = None,
    baseline: Path | None = None,
    cache: Path | None = None,
    max_images: MaxImages = None,
    page: Path | None = None,
    overwrite: Annotated[bool, Parameter(negative="", help="Replace --page if it exists.")] = False,
    partial: bool = False,
    seed: WholeNumber = 0,
    size: Size | None = None,
    classes: WholeNumber | None = None,
    weights: Weights = None,
    checkpoint: CheckpointOptions = CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    pretrained: Pretrained = True,
    batch_size: WholeNumber = 100,
    workers: WholeNumber = 0,
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
    folder
        Folder of the published ImageNet-C (CORRUPTION/SEVERITY/WNID/*.JPEG) or CIFAR-C (CORRUPTION.npy, labels.npy),
        instead of corrupting clean images.
    corruption
        Corruption to use; may be given several times (--corruption fog --corruption snow). By default all 15.
    severity
        Severity to use, from 1 to 5; may be given several times. By default all.
    extra
        Also use the four extra corruptions speckle_noise, gaussian_blur, spatter and saturate.
    out
        File for the results of finished cells (a corruption at a severity), one per line. The command resumes from it.
    baseline
        File of another model's results (--out or --json) to compare with.
    cache
        Folder to store corrupted images in for further models: about 150 KB per image and cell at 224 px.
    page
        File for a page (.html) with charts of the results, next to those of --baseline if it is given.
    partial
        Accept data with only some of ImageNet's classes; labels follow from the class names.
    seed
        Seed of the random corruptions.
    size
        Height and width of the images; by default 224 224 for models of 1000 classes, else the model's own.
    classes
        Use only the first N classes of the data, as data.classes does in training.
    batch_size
        Images per batch.
    workers
        Number of processes that load and corrupt images; 0 uses the main process.
    """
    check_page(page, overwrite)
    with loading():
        from isomorph.cli.open_models import open_classifier
        from isomorph.cli.robustness_run import Given, check_published_files, choose_cells, measure, show_result
        from isomorph.distributed import open_runtime
    check_published_files(suite, folder, corruption, severity, extra)
    runtime = open_runtime(device)
    net = open_classifier(model, checkpoint, weights, pretrained, runtime.device)
    cells = choose_cells(corruption, severity, extra, out, baseline)
    loaded: dict[str, Any] = dict(data=data, root=root, batch_size=batch_size, workers=workers, max_images=max_images)
    classifiers = dict(folder=folder, cache=cache, size=size, partial=partial, classes=classes, split=split)
    given = Given(display_name(model, pretrained), suite, seed, loaded, classifiers)
    result = measure(net, given, cells, runtime)
    if runtime.is_main:
        show_result(result, page, baseline, json_)
