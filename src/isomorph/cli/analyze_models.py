"""The models and test images of `isomorph analyze`."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from isomorph.analysis import feature_evolution
from isomorph.analysis.evolution import random_draw_indices
from isomorph.checkpoints.open import is_checkpoint_or_run
from isomorph.cli.open_models import open_given
from isomorph.cli.options import CheckpointOptions, display_name
from isomorph.data.loaders import eval_loader
from isomorph.data.sources import Source
from isomorph.distributed import open_runtime
from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import evaluation_config, fit_to_size
from isomorph.report.page_models import PageModel, find_recipe
from isomorph.suites.test_data import images_on_device, open_test_images, sample_images

_CROP_KEYS = ("crop_pct", "crop_mode", "interpolation")
"""Keys of a data config that decide which pixels a model gets, besides the size; the others normalise them."""


def open_page_model(
    name: str, title: str, checkpoint: CheckpointOptions, weights: Path | None, pretrained: bool, device: str
) -> PageModel:
    """Open a model by name, checkpoint or run folder, with its data config and recipe."""
    path = Path(name)
    model = open_given(name, checkpoint, weights, pretrained)
    recipe = find_recipe(path) if path.is_dir() or path.suffix == ".safetensors" else None
    title = display_name(title, pretrained or is_checkpoint_or_run(name) or weights is not None)
    return PageModel(title, model.to(open_runtime(device).device), evaluation_config(model), recipe)


def resize(entry: PageModel, size: tuple[int, int]) -> PageModel:
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


def feature_evolutions(models: list[PageModel], data: str | None, root: Path | None) -> dict[str, dict[str, float]]:
    """Return F_k of every layer of each model, on the same random batches of test images."""
    source = open_test_images(models[0].model, data, root, test_fraction=1)
    loaders = _same_image_loaders(models, source.subset(random_draw_indices(len(source)).tolist()))
    return {m.name: feature_evolution(m.model, images_on_device(loaders[m.name], m.model)) for m in models}


def check_same_channels(models: list[PageModel]) -> None:
    """Raise UserError unless all models take images of the same number of channels."""
    channels = [entry.config["input_size"][0] for entry in models]
    if len(set(channels)) > 1:
        counts = ", ".join(f"{m.name}: {n}" for m, n in zip(models, channels, strict=True))
        raise UserError(f"the models differ in image channels ({counts}); give models with the same number")
