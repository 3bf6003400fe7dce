"""Image files, cut and resized as the models take them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from isomorph.data.loaders import eval_transform
from isomorph.data.sources import read_image
from isomorph.errors import UserError
from isomorph.report.attention_viewer import PageImage


def _read_image(path: Path, channels: int) -> Image.Image:
    """Return an image file, in grey for one channel, else in colour. Raises: UserError when it cannot be read."""
    if not path.exists():
        raise UserError(f"image {path} does not exist")
    image = read_image(path)
    return image.convert("L") if channels == 1 else image


def normalise_images(images: Sequence[PageImage], config: dict[str, Any]) -> Tensor:
    """Return the images as a batch, normalised by the mean and std of the config. Shape: -> (B, C, H, W)"""
    batch = torch.stack([image.pixels for image in images])
    mean, std = (torch.tensor(config[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    return (batch - mean) / std


def open_images(paths: Sequence[Path], config: dict[str, Any]) -> list[PageImage]:
    """Read image files, resized and cropped by a model's data config, as timm's `resolve_data_config` returns it.

    >>> from PIL import Image
    >>> from pathlib import Path
    >>> Image.new("RGB", (60, 40)).save("black.png")
    >>> config = timm.data.resolve_data_config(model=timm.create_model("cifar_resnet20"))
    >>> iso.report.open_images([Path("black.png")], config)[0].pixels.shape
    torch.Size([3, 32, 32])

    Raises: UserError naming a file that cannot be read.
    """
    channels = config["input_size"][0]
    unnormalised = {**config, "mean": (0.0,) * channels, "std": (1.0,) * channels}
    transform = eval_transform(unnormalised)
    return [PageImage(path.name, transform(_read_image(path, channels))) for path in paths]
