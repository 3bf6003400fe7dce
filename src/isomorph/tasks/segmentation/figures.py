"""Predicted masks as pictures: colours of the classes, and masks over their image."""

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image

from isomorph.tasks.segmentation.pairs import IGNORE

OPACITY = 0.55
"""Opacity of a mask over its image."""
GOLDEN = 0.6180339887


def class_colours(classes: int, given: Sequence[tuple[int, int, int]] | None = None) -> np.ndarray:
    """Return a colour for each class, those given or else colours that differ in hue. Shape: -> (K, 3) uint8"""
    if given is not None and len(given) == classes:
        return np.array(given, np.uint8)
    shades = [(0.55 + 0.4 * (i % 2), 0.95 - 0.3 * (i // 2 % 2)) for i in range(classes)]
    colours = [colorsys.hsv_to_rgb(i * GOLDEN % 1, *shade) for i, shade in enumerate(shades)]
    return (255 * np.array(colours)).round().astype(np.uint8)


def index_image(mask: np.ndarray, colours: np.ndarray) -> Image.Image:
    """Return a mask as an image with a palette, whose pixels are the class numbers. Shape: (H, W)"""
    image = Image.fromarray(mask.astype(np.uint8), mode="P")
    palette = np.zeros((256, 3), np.uint8)
    palette[: len(colours)] = colours
    image.putpalette(palette.flatten().tolist())
    return image


def overlay(image: Image.Image, mask: np.ndarray, colours: np.ndarray, opacity: float = OPACITY) -> Image.Image:
    """Return an image with the colours of a mask over it; pixels without a class stay as they are. Shape: (H, W)"""
    pixels = np.asarray(image.convert("RGB"), np.float32)
    shown = (mask != IGNORE)[..., None] & (mask < len(colours))[..., None]
    painted = colours[np.minimum(mask, len(colours) - 1)].astype(np.float32)
    mixed = np.where(shown, (1 - opacity) * pixels + opacity * painted, pixels)
    return Image.fromarray(mixed.round().astype(np.uint8))
