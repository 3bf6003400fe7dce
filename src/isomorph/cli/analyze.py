"""The analyze command."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from isomorph.analysis import feature_evolution
from isomorph.analysis.evolution import random_draw_indices
from isomorph.checkpoints.open import is_checkpoint_or_run, open_model
from isomorph.cli.app import Device, Json, Model, Weights, WholeNumber, app, check_limits, display_name, spinner
from isomorph.cli.page_output import page_footer, save_figures_and_print
from isomorph.data.loaders import eval_loader
from isomorph.data.sources import Source
from isomorph.distributed import open_runtime
from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import evaluation_config, fit_to_size
from isomorph.report.analyze_page import AnalyzeOptions, analyze_sections, lead_text
from isomorph.report.cka_charts import evolution_table
from isomorph.report.html import write_page
from isomorph.report.page_images import open_images
from isomorph.report.page_models import PageModel, find_recipe, unique_names
from isomorph.suites.robustness.results import read_results, weights_hash
from isomorph.suites.test_data import (
    default_data,
    images_on_device,
    open_test_images,
    sample_images,
)

_CROP_KEYS = ("crop_pct", "crop_mode", "interpolation")
"""Keys of a data config that decide which pixels a model gets, besides the size; the others normalise them."""


def open_page_model(name: str, title: str, weights: Path | None, pretrained: bool, device: str) -> PageModel:
    """Open a model by name, checkpoint or run folder, with its data config and recipe."""
    path = Path(name)
    model = open_model(name, weights, pretrained)
    recipe = find_recipe(path) if path.is_dir() or path.suffix == ".safetensors" else None
    title = display_name(title, pretrained or is_checkpoint_or_run(name) or weights is not None)
    return PageModel(title, model.to(open_runtime(device).device), evaluation_config(model), recipe)


def _resize(entry: PageModel, size: tuple[int, int]) -> PageModel:
    """Return the model for images of a size (height, width). Raises: UserError when it cannot take that size."""
    return replace(entry, model=fit_to_size(entry.model, size), config=evaluation_config(entry.model, size))


def open_image_loaders(
    models: list[PageModel], data: str | None, root: Path | None, samples: int
) -> dict[str, Iterable[Any]]:
    """Return a loader for each model of the same random test images, which are the same at every call.

    All models get the crop of the first one (their image sizes are equal, see `analyze`), each its own mean and std.
    """
    source = open_test_images(models[0].model, data, root)
    return _same_image_loaders(models, sample_images(source, samples))


def _same_image_loaders(models: list[PageModel], source: Source) -> dict[str, Iterable[Any]]:
    """Return a loader of the source for each model, in batches of 32."""
    crop = {key: models[0].config[key] for key in _CROP_KEYS}
    return {m.name: eval_loader(source, {**m.config, **crop}, 32) for m in models}


def _feature_evolutions(models: list[PageModel], data: str | None, root: Path | None) -> dict[str, dict[str, float]]:
    """Return F_k of every layer of each model, on the same random batches of test images."""
    source = open_test_images(models[0].model, data, root)
    loaders = _same_image_loaders(models, source.subset(random_draw_indices(len(source)).tolist()))
    return {m.name: feature_evolution(m.model, images_on_device(loaders[m.name], m.model)) for m in models}


def _check_same_channels(models: list[PageModel]) -> None:
    """Raise UserError unless all models take images of the same number of channels."""
    channels = [entry.config["input_size"][0] for entry in models]
    if len(set(channels)) > 1:
        counts = ", ".join(f"{m.name}: {n}" for m, n in zip(models, channels, strict=True))
        raise UserError(f"the models differ in image channels ({counts}); give models with the same number")


@app.command
@check_limits
def analyze(
    model: Model,
    /,
    *,
    image: list[Path],
    against: str | None = None,
    out: Path = Path("isomorph-analysis.html"),
    layers: list[str] | None = None,
    data: str | None = None,
    root: Path | None = None,
    samples: WholeNumber = 256,
    evolution: Annotated[bool, Parameter(negative="")] = False,
    robustness: Annotated[list[Path] | None, Parameter(consume_multiple=True)] = None,
    weights: Weights = None,
    pretrained: bool = True,
    size: tuple[WholeNumber, WholeNumber] | None = None,
    figures: Path | None = None,
    megabytes: float = 7.5,
    speed: bool = False,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Write an HTML page about a model, or two next to each other: attention maps of images, statistics, CKA, cost.

    Parameters
    ----------
    image
        Image file whose attention maps are shown; may be given several times.
    against
        Second model to compare with, for example the same model after recasting or fine-tuning.
    out
        File for the page, which needs no other file and no network.
    layers
        Globs over attention layers to show, for example `blocks.1?.attn`; by default all.
    data
        Data source of test images for CKA between layers. With --root alone: the source the model was trained on.
    root
        Folder of that data.
    samples
        Number of images for CKA, at least 4.
    evolution
        With --data or --root: print and plot how fast features approach those of the last layer (F_k of Refiner eq. 2:
        linear CKA, mean of 10 random batches of 32 images).
    robustness
        Results of `isomorph robustness` (its --out file or its --json output) of MODEL, of --against, or of both.
    pretrained
        Load the models' public weights; --no-pretrained analyzes random ones.
    size
        Height and width of the input; by default the model's own.
    figures
        Folder to save every chart in as PDF and SVG.
    megabytes
        Target size of the page in megabytes; attention maps are subsampled to fit.
    speed
        Also measure images per second and peak memory.
    """
    if samples < 4 or megabytes < 0.5:
        raise UserError("--samples must be at least 4 and --megabytes at least 0.5")
    if evolution and not (data or root):
        raise UserError("--evolution compares features of test images; give --data or --root too")
    given = [model, *([against] if against else [])]
    named = zip(given, unique_names(given), [weights, None], strict=False)
    models = [open_page_model(name, title, own, pretrained, device) for name, title, own in named]
    _check_same_channels(models)
    results = read_results(robustness, {m.name: weights_hash(m.model) for m in models}) if robustness else None
    common = size or models[0].config["input_size"][-2:]
    models = [_resize(m, common) if m.config["input_size"][-2:] != common else m for m in models]
    images = open_images(image, dict(models[0].config))
    batches = open_image_loaders(models, data, root, samples) if data or root else {}
    with spinner("analyzing") as show_step:
        sampled = f"{samples} images of {data or default_data(models[0].model)}, drawn at random"
        evolutions = _feature_evolutions(models, data, root) if evolution else {}
        options = AnalyzeOptions(batches, sampled, evolutions, results, speed, int((megabytes - 0.4) * 1e6), show_step)
        sections = analyze_sections(models, images, layers, options)
    title = " and ".join(m.name for m in models)
    written = write_page(out, title, lead_text(models, sections), sections, page_footer())
    tables = [evolution_table(evolutions)] if evolutions else []
    measured = {"evolution": evolutions} if evolutions else None
    save_figures_and_print(out, written, sections, figures, json_, measured, tables)
