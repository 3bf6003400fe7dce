"""Image files as models see them, and as the page shows them."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from timm.data import resolve_data_config
from torch import Tensor, nn

from isomorph.data.loaders import evaluation_transform
from isomorph.errors import UserError
from isomorph.report.viewer import Picture


def read_image(path: Path, channels: int) -> Image.Image:
    """An image file, grey for one channel, else in colour. Raises: UserError when it cannot be read."""
    try:
        with Image.open(path) as image:
            return image.convert("L" if channels == 1 else "RGB")
    except FileNotFoundError:
        raise UserError(f"no image {path}") from None
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError) as error:
        raise UserError(f"{path} cannot be read as an image ({' '.join(str(error).split())[:120]})") from None


def view_config(model: nn.Module, size: tuple[int, int] | None = None) -> dict[str, Any]:
    """How the model's test images are made, at its own size or the given one; a fixed grid of patches is resized.

    Raises: UserError for a size that the model does not take.
    """
    if size and min(size) < 1:
        raise UserError(f"a size of {size[0]} x {size[1]} has no pixel; give positive sizes")
    config = resolve_data_config({"input_size": (3, *size)} if size else {}, model=model, use_test_size=True)
    resize = getattr(model, "set_input_size", None)
    if size and resize:
        try:
            resize(img_size=size)
        except (AssertionError, ValueError, RuntimeError) as error:
            raise UserError(f"the model does not take images of {size[0]} x {size[1]}: {error}") from None
    channels = getattr(model, "in_chans", config["input_size"][0])
    per_channel = {
        key: config[key] if len(config[key]) == channels else (fmean(config[key]),) * channels
        for key in ("mean", "std")
    }
    return config | per_channel | {"input_size": (channels, *config["input_size"][1:])}


def normalised(pictures: Sequence[Picture], config: dict[str, Any]) -> Tensor:
    """The pictures as the batch that a model of that config takes. Shape: -> (B, C, H, W)"""
    batch = torch.stack([picture.pixels for picture in pictures])
    mean, std = (torch.tensor(config[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    return (batch - mean) / std


def open_pictures(paths: Sequence[Path], config: dict[str, Any]) -> list[Picture]:
    """Resizes and crops image files as the config says. Raises: UserError naming a file that cannot be read."""
    channels = config["input_size"][0]
    plain = {**config, "mean": (0.0,) * channels, "std": (1.0,) * channels}
    transform = evaluation_transform(plain)
    return [Picture(path.name, transform(read_image(path, channels))) for path in paths]
