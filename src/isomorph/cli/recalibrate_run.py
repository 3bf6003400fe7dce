"""Recalibration of BatchNorm before `isomorph fuse`."""

from pathlib import Path

from torch import nn

from isomorph.data.loaders import eval_loader
from isomorph.evaluation.input_sizes import training_config
from isomorph.evaluation.suites.test_data import images_on_device, open_training_images, sample_images
from isomorph.surgery import recalibrate


def recalibrate_on_data(
    model: nn.Module, data: str | None, root: Path | None, batches: int, batch_size: int
) -> nn.Module:
    """Return a copy with BatchNorm statistics of random training images, by default of the model's own data source."""
    source = sample_images(open_training_images(model, data, root), batches * batch_size)
    loader = eval_loader(source, training_config(model), batch_size)
    return recalibrate(model, images_on_device(loader, model))
