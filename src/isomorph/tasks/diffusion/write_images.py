"""Generated images as files: a grid in one PNG, or a folder of PNGs, which FID tools take."""

import math
import os
import re
import shutil
from pathlib import Path

from PIL import Image
from torch import Tensor
from torchvision.utils import make_grid

from isomorph.checkpoints.files import write_atomically
from isomorph.errors import UserError


def write_grid(images: Tensor, path: Path) -> None:
    """Write images as one PNG, in rows of a square. Shape: (N, C, H, W) uint8. Raises: UserError when it cannot."""
    grid = make_grid(images, nrow=math.ceil(math.sqrt(len(images))), padding=2, pad_value=255)  # (3, H, W)
    write_atomically(path, lambda file: to_image(grid).save(file, format="PNG"))


def write_folder(images: Tensor, folder: Path) -> None:
    """Write each image as 000000.png, ... in a new folder, which exists only once it is complete.

    Shape: (N, C, H, W) uint8
    Raises: UserError when it cannot be written, or a folder of this name, which is replaced, holds other files.
    """
    check_replaceable(folder)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        for number, image in enumerate(images):
            to_image(image).save(partial / f"{number:06d}.png")
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_replaceable(folder: Path) -> None:
    """Raise UserError for a folder that holds anything but numbered PNGs, which are those of an earlier call."""
    others = (
        [path.name for path in folder.iterdir() if not re.fullmatch(r"\d{6,}\.png", path.name)]
        if folder.is_dir()
        else []
    )
    if others:
        raise UserError(f"{folder} holds other files, such as {others[0]}, and is not replaced; give another folder")


def to_image(image: Tensor) -> Image.Image:
    """Return an image as Pillow's, in grey or RGB. Shape: (C, H, W) uint8"""
    pixels = image.movedim(0, -1).numpy()
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
