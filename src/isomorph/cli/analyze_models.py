"""The models and test images of `isomorph analyze`, and its page."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from isomorph.analysis import feature_evolution
from isomorph.analysis.evolution import random_draw_indices
from isomorph.checkpoints.open import is_checkpoint_or_run
from isomorph.cli.open_models import open_given
from isomorph.cli.options import CheckpointOptions, display_name
from isomorph.cli.page_output import page_footer, save_figures_and_print
from isomorph.cli.progress import spinner
from isomorph.data.loaders import eval_loader
from isomorph.data.sources import Source
from isomorph.distributed import open_runtime
from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import evaluation_config, fit_to_size
from isomorph.evaluation.suites.robustness.cells import read_results, weights_hash
from isomorph.evaluation.suites.test_data import default_data, images_on_device, open_test_images, sample_images
from isomorph.report.analyze_page import AnalyzeOptions, analyze_sections, evolution_table, lead_text
from isomorph.report.html import Section, write_page
from isomorph.report.page_images import open_images
from isomorph.report.page_models import PageModel, find_recipe, unique_names

_CROP_KEYS = ("crop_pct", "crop_mode", "interpolation")
"""Keys of a data config that decide which pixels a model gets, besides the size; the others normalise them."""


class ModelImages(NamedTuple):
    """Test images to compare features on: a data source and its folder, how many; and if to plot their evolution."""

    data: str | None
    root: Path | None
    max_images: int
    evolution: bool

    @property
    def given(self) -> bool:
        """True if features are to be compared."""
        return bool(self.data or self.root)


def open_page_models(
    names: Sequence[str], checkpoint: CheckpointOptions, weights: Path | None, pretrained: bool, device: str
) -> list[PageModel]:
    """Open the models of a page; `weights` are those of the first.

    Raises: UserError for models of different numbers of image channels.
    """
    named = zip(names, unique_names(names), [weights, None], strict=False)
    models = [open_page_model(name, title, checkpoint, own, pretrained, device, names) for name, title, own in named]
    _check_same_channels(models)
    return models


def open_page_model(
    name: str,
    title: str,
    checkpoint: CheckpointOptions,
    weights: Path | None,
    pretrained: bool,
    device: str,
    among: Sequence[str] = (),
) -> PageModel:
    """Open a model by name, checkpoint or run folder, with its data config and recipe; `among`, see `open_given`."""
    path = Path(name)
    model = open_given(name, checkpoint, weights, pretrained, among)
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
    source = open_test_images(models[0].model, data, root, test_fraction=1)
    return _same_image_loaders(models, sample_images(source, samples))


def _same_image_loaders(models: list[PageModel], source: Source) -> dict[str, Iterable[Any]]:
    """Return a loader of the source for each model, in batches of 32."""
    crop = {key: models[0].config[key] for key in _CROP_KEYS}
    return {m.name: eval_loader(source, {**m.config, **crop}, 32) for m in models}


def _feature_evolutions(models: list[PageModel], data: str | None, root: Path | None) -> dict[str, dict[str, float]]:
    """Return F_k of every layer of each model, on the same random batches of test images."""
    source = open_test_images(models[0].model, data, root, test_fraction=1)
    loaders = _same_image_loaders(models, source.subset(random_draw_indices(len(source)).tolist()))
    return {m.name: feature_evolution(m.model, images_on_device(loaders[m.name], m.model)) for m in models}


def _check_same_channels(models: list[PageModel]) -> None:
    """Raise UserError unless all models take images of the same number of channels."""
    channels = [entry.config["input_size"][0] for entry in models]
    if len(set(channels)) > 1:
        counts = ", ".join(f"{m.name}: {n}" for m, n in zip(models, channels, strict=True))
        raise UserError(f"the models differ in image channels ({counts}); give models with the same number")


def measure_models(
    models: list[PageModel],
    image: Sequence[Path],
    size: tuple[int, int] | None,
    layers: Sequence[str] | None,
    test_images: ModelImages,
    robustness: Sequence[Path] | None,
    speed: bool,
    megabytes: float,
) -> tuple[list[Section], dict[str, dict[str, float]]]:
    """Return the sections of the page, and F_k of every layer of each model if asked for."""
    results = read_results(robustness, {m.name: weights_hash(m.model) for m in models}) if robustness else None
    common = size or models[0].config["input_size"][-2:]
    models = [_resize(m, common) if m.config["input_size"][-2:] != common else m for m in models]
    images = open_images(image, dict(models[0].config))
    data, root, max_images, evolution = test_images
    batches = open_image_loaders(models, data, root, max_images) if test_images.given else {}
    with spinner("analyzing") as show_step:
        sampled = f"{max_images} images of {data or default_data(models[0].model)}, drawn at random"
        evolutions = _feature_evolutions(models, data, root) if evolution else {}
        options = AnalyzeOptions(batches, sampled, evolutions, results, speed, int((megabytes - 0.4) * 1e6), show_step)
        return analyze_sections(models, images, layers, options), evolutions


def write_analysis(
    models: Sequence[PageModel],
    sections: list[Section],
    evolutions: dict[str, dict[str, float]],
    out: Path,
    figures: Path | None,
    json_: bool,
) -> None:
    """Write the page and its figures, and print what was measured."""
    title = " and ".join(m.name for m in models)
    written = write_page(out, title, lead_text(sections), sections, page_footer())
    tables = [evolution_table(evolutions)] if evolutions else []
    measured = {"evolution": evolutions} if evolutions else None
    save_figures_and_print(out, written, sections, figures, json_, measured, tables)
