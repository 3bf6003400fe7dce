"""The survey command."""

from pathlib import Path
from typing import Literal

from isomorph.cli.app import app, loading
from isomorph.cli.options import (
    CheckpointOptions,
    Device,
    Json,
    Model,
    Overwrite,
    Pretrained,
    Root,
    Split,
    Weights,
    WholeNumber,
    check_figures,
    check_limits,
    choose_page,
    display_name,
)
from isomorph.cli.sizes import Size
from isomorph.errors import UserError


@app.command
@check_limits
def survey(
    model: Model,
    /,
    *,
    data: str | None = None,
    root: Root = None,
    split: Split = None,
    classes: WholeNumber | None = None,
    where: tuple[str, ...] = ("*",),
    setting: list[tuple[float, float]] | None = None,
    content: Literal["global", "window", "pooled", "similar", "none"] = "global",
    loss: float = 1.0,
    max_images: WholeNumber = 500,
    out: Path | None = None,
    results: Path | None = None,
    size: Size | None = None,
    seconds: float = 0.2,
    batch_size: WholeNumber = 50,
    weights: Weights = None,
    checkpoint: CheckpointOptions = CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    pretrained: Pretrained = True,
    figures: Path | None = None,
    overwrite: Overwrite = False,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Measure which convolutions of a model can become attention, and how soft, before accuracy is lost.

    Each convolution is recast alone, then the last ones together, at each setting; nothing is trained. Writes a page
    with the losses, the cost of every layer and what to recast.

    Example: isomorph survey cifar_resnet20 --data cifar10 --where 'layer3.*'

    Parameters
    ----------
    data
        A folder of images with one folder per class, or a data source: cifar10, cifar100, digits or imagefolder; by
        default the one the model was trained on.
    classes
        Use only the first N classes of the data, as data.classes does in training.
    where
        Globs over the convolutions, for example 'layer4.*'. May be given several times; by default all.
    setting
        Locality and gate (the logit of the share of positional attention) to try, from hard to soft, for example
        --setting 5 6 --setting 2 3; by default seven from 8 8 to 1 1.
    content
        What heads attend to by content: the whole feature map (global), a window around the query, averages over cells
        of the map (pooled), positions similar to the one under their tap (similar), or nothing (none). All but global
        are fast enough for early layers. The sharpness of similar is fitted to what each layer reads.
    loss
        Points of top-1 that may be lost in the advice.
    max_images
        Number of test images, drawn at random. They are held in memory.
    out
        File for the page, which needs no other file and no network; by default isomorph-survey.html, with a number if
        it exists.
    results
        File for the finished measurements, one per line. The command resumes from it.
    size
        Height and width of the input; by default the model's own.
    seconds
        Time spent on timing each form of a layer; 0 skips timing.
    batch_size
        Images per batch.
    figures
        Folder to save every chart in as PDF and SVG.
    """
    if batch_size < 1 or max_images < 1:
        raise UserError("--batch-size and --max-images must be at least 1")
    if loss < 0 or seconds < 0:
        raise UserError("--loss and --seconds must be at least 0")
    out = choose_page(out, "isomorph-survey.html", overwrite)
    check_figures(figures, overwrite)
    with loading():
        from isomorph.cli.open_models import open_classifier
        from isomorph.cli.survey_run import measure, write_survey
        from isomorph.distributed import open_runtime
        from isomorph.suites.survey import SETTINGS, conv_rules
    rules = conv_rules(SETTINGS if setting is None else setting, content=content)
    net = open_classifier(model, checkpoint, weights, pretrained, open_runtime(device).device)
    images = (data, root, split, classes, max_images, size, batch_size)
    result = measure(net, images, rules, where, loss, seconds, results, display_name(model, pretrained))
    write_survey(result, out, figures, json_)
