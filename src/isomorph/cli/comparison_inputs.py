"""The inputs on which a command compares the outputs of two models."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from isomorph.data.formats.registry import open_source
from isomorph.data.loaders import eval_loader
from isomorph.data.sources import spaced_images
from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import random_inputs, training_config
from isomorph.surgery.model_inputs import Inputs


def comparison_inputs(
    model: nn.Module,
    data: str | None,
    root: Path | None,
    batch: int,
    max_images: int | None = None,
    sizes: Sequence[tuple[int, int]] = (),
) -> list[Inputs]:
    """Return batches of test images of a data source or folder, by default one batch; without data, random inputs.

    They are of every size, or of the model's own.

    Raises: UserError for a number of images without data.
    """
    if max_images and not data:
        raise UserError("--max-images is a number of images of --data; give --data too")
    if not data:
        return [random_inputs(batch, model, size) for size in sizes or (None,)]
    batch = max(batch, 1)
    source = spaced_images(open_source(data, "test", root), max_images or batch)
    configs = [training_config(model, size) for size in sizes] or [training_config(model)]
    return [images for config in configs for images, _ in eval_loader(source, config, batch)]
