"""The analyze command."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from isomorph.cli.app import app, loading
from isomorph.cli.options import (
    CheckpointOptions,
    Device,
    Json,
    Model,
    Overwrite,
    Pretrained,
    Weights,
    WholeNumber,
    check_figures,
    check_limits,
    choose_page,
)
from isomorph.cli.sizes import Size
from isomorph.errors import UserError


@app.command
@check_limits
def analyze(
    model: Model,
    /,
    *,
    image: list[Path],
    against: str | None = None,
    out: Path | None = None,
    overwrite: Overwrite = False,
    layers: list[str] | None = None,
    data: str | None = None,
    root: Path | None = None,
    max_images: WholeNumber = 256,
    evolution: Annotated[bool, Parameter(negative="")] = False,
    robustness: Annotated[list[Path] | None, Parameter(consume_multiple=True)] = None,
    weights: Weights = None,
    checkpoint: CheckpointOptions = CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    pretrained: Pretrained = True,
    size: Size | None = None,
    figures: Path | None = None,
    megabytes: float = 7.5,
    speed: bool = False,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Write an HTML page about a model, or two next to each other: attention maps of images, statistics, CKA, cost.

    Example: isomorph analyze t.safetensors --against resnet18 --image cat.jpg

    Parameters
    ----------
    image
        Image file whose attention maps are shown; may be given several times.
    against
        Second model to compare with, for example the same model after recasting or fine-tuning.
    out
        File for the page, which needs no other file and no network; by default isomorph-analysis.html, with a number if
        it exists.
    layers
        Globs over attention layers to show, for example `blocks.1?.attn`; by default all.
    data
        Folder or data source of test images for CKA between layers. With --root alone: the source the model was
        trained on.
    root
        Folder of that data.
    max_images
        Number of images for CKA, at least 4.
    evolution
        With --data or --root: print and plot how fast features approach those of the last layer (F_k of Refiner eq. 2:
        linear CKA, mean of 10 random batches of 32 images).
    robustness
        Results of `isomorph robustness` (its --out file or its --json output) of MODEL, of --against, or of both.
    size
        Height and width of the input; by default the model's own.
    figures
        Folder to save every chart in as PDF and SVG.
    megabytes
        Target size of the page in megabytes; attention maps are subsampled to fit.
    speed
        Also measure images per second and peak memory.
    """
    if max_images < 4 or megabytes < 0.5:
        raise UserError("--max-images must be at least 4 and --megabytes at least 0.5")
    if evolution and not (data or root):
        raise UserError("--evolution compares features of test images; give --data or --root too")
    out = choose_page(out, "isomorph-analysis.html", overwrite)
    check_figures(figures, overwrite)
    with loading():
        from isomorph.cli.analyze_models import ModelImages, measure_models, open_page_models, write_analysis
    given = [model, *([against] if against else [])]
    models = open_page_models(given, checkpoint, weights, pretrained, device)
    test_images = ModelImages(data, root, max_images, evolution)
    sections, evolutions = measure_models(models, image, size, layers, test_images, robustness, speed, megabytes)
    write_analysis(models, sections, evolutions, out, figures, json_)
