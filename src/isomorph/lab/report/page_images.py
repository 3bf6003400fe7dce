"""Images of a page: read and resized as the models take them, as data: URIs."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from isomorph.errors import UserError
from isomorph.lab.data.loaders import ImageConfig, eval_transform, mean_and_std
from isomorph.lab.data.sources import read_image

# Images with larger sides are embedded as JPEG, others as PNG.
MAX_PNG_SIDE = 96
_JPEG_QUALITY = 88


@dataclass(frozen=True)
class PageImage:
    """An image on the page, cut and resized as the models take it.

    Shape: pixels (C, H, W) in 0..1, C 1 or 3

    >>> iso.report.PageImage("noise", torch.rand(3, 32, 48)).data_uri()[:22]
    'data:image/png;base64,'
    """

    name: str
    pixels: Tensor = field(repr=False)

    def data_uri(self) -> str:
        pixels = (self.pixels.clamp(0, 1) * 255).round().to("cpu").numpy().astype(np.uint8)
        colour = np.broadcast_to(pixels, (3, *pixels.shape[1:])).transpose(1, 2, 0)  # (H, W, 3)
        form = "png" if max(pixels.shape[1:]) <= MAX_PNG_SIDE else "jpeg"
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(colour)).save(file, form, quality=_JPEG_QUALITY)
        return f"data:image/{form};base64,{base64.b64encode(file.getvalue()).decode()}"


def normalise_images(images: Sequence[PageImage], config: ImageConfig) -> Tensor:
    """Return the images as a batch, normalised by the mean and std of the config. Shape: -> (B, C, H, W)"""
    batch = torch.stack([image.pixels for image in images])
    mean, std = mean_and_std(config)
    return (batch - mean) / std


def open_images(paths: Sequence[str | Path], config: ImageConfig) -> list[PageImage]:
    """Read image files, resized and cropped by a model's data config, as timm's `resolve_data_config` returns it.

    >>> from PIL import Image
    >>> Image.new("RGB", (60, 40)).save("black.png")
    >>> config = timm.data.resolve_data_config(model=timm.create_model("cifar_resnet20"))
    >>> iso.report.open_images(["black.png"], config)[0].pixels.shape
    torch.Size([3, 32, 32])

    Raises: UserError naming a file that cannot be read.
    """
    if not paths:
        raise UserError("give at least one image file")
    channels = config["input_size"][0]
    # pixels are shown as they are, and normalised by `normalise_images`
    unnormalised = {**config, "mean": (0.0,) * channels, "std": (1.0,) * channels}
    transform = eval_transform(unnormalised)
    return [PageImage(path.name, transform(read_image(path))) for path in map(Path, paths)]
