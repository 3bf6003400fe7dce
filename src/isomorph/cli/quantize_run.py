"""What `isomorph quantize` opens, quantises and measures."""

from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

import isomorph as iso
from isomorph.cli.progress import spinner, track_steps
from isomorph.data.loaders import eval_loader
from isomorph.data.sources import spaced_images
from isomorph.deployment import QuantizeReport, open_artefact
from isomorph.evaluation.suites.test_data import evaluation_data, open_training_images, sample_images


def open_images(
    model: nn.Module, data: str | None, root: Path | None, images: int, max_images: int | None, batch_size: int
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of random training images to calibrate on, and of test images, prepared as for a test.

    Raises: UserError when there are no such images, or the data has other classes than the model.
    """
    test, config = evaluation_data(model, data, root)
    train = sample_images(open_training_images(model, data, root), images)
    if max_images is not None:
        test = spaced_images(test, max_images)
    return eval_loader(train, config, batch_size), eval_loader(test, config, batch_size)


def quantize_and_test(
    model: nn.Module, calibration: DataLoader[Any], test: DataLoader[Any], path: Path, **options: Any
) -> tuple[QuantizeReport, dict[str, dict[str, float]]]:
    """Quantise a model, and return the report, and the accuracy of both models on the test images."""
    with spinner("quantize") as show_step:
        report = iso.quantize(model, calibration, path, progress=show_step, **options)
    accuracy = {}
    for name, net in (("float", model), ("int8", open_artefact(path))):
        found = iso.evaluate(net, track_steps(test, f"{name} on test images", len(test)))
        accuracy[name] = {key: round(found[key], 4) for key in ("top1", "nll", "images")}
    return report, accuracy
