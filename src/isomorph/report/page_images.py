"""Image files as models see them, and as the page shows them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from isomorph.data.loaders import evaluation_transform
from isomorph.errors import UserError
from isomorph.report.attention_viewer import PageImage


def _read_image(path: Path, channels: int) -> Image.Image:
    """An image file, grey for one channel, else in colour. Raises: UserError when it cannot be read."""
    try:
        with Image.open(path) as image:
            return image.convert("L" if channels == 1 else "RGB")
    except FileNotFoundError:
        raise UserError(f"no image {path}") from None
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError) as error:
        raise UserError(f"{path} cannot be read as an image ({' '.join(str(error).split())[:120]})") from None


def normalise_images(pictures: Sequence[PageImage], config: dict[str, Any]) -> Tensor:
    """The pictures as the batch that a model of that config takes. Shape: -> (B, C, H, W)"""
    batch = torch.stack([picture.pixels for picture in pictures])
    mean, std = (torch.tensor(config[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    return (batch - mean) / std


def open_images(paths: Sequence[Path], config: dict[str, Any]) -> list[PageImage]:
    """Resizes and crops image files as the config says. Raises: UserError naming a file that cannot be read."""
    channels = config["input_size"][0]
    plain = {**config, "mean": (0.0,) * channels, "std": (1.0,) * channels}
    transform = evaluation_transform(plain)
    return [PageImage(path.name, transform(_read_image(path, channels))) for path in paths]
