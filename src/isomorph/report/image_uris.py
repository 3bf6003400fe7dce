"""Images of a page: as data: URIs, and reduced and placed below each other."""

import base64
import io
from collections.abc import Sequence
from typing import Literal

from PIL import Image

_GAP = 6
"""Pixels between images below each other."""
_JPEG_QUALITY = 88


def data_uri(content: bytes, kind: Literal["png", "jpeg"]) -> str:
    """Return the content of an image file as a data: URI."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def image_uri(image: Image.Image, kind: Literal["png", "jpeg"] = "jpeg") -> str:
    """Return an image as a data: URI."""
    file = io.BytesIO()
    image.save(file, kind, quality=_JPEG_QUALITY)
    return data_uri(file.getvalue(), kind)


def stack_images(images: Sequence[Image.Image], width: int) -> Image.Image:
    """Return images of one size below each other on white, each reduced to at most a width."""
    reduced = [_reduce(image, width) for image in images]
    step = reduced[0].height + _GAP
    canvas = Image.new("RGB", (reduced[0].width, step * len(reduced) - _GAP), "white")
    for row, image in enumerate(reduced):
        canvas.paste(image, (0, row * step))
    return canvas


def _reduce(image: Image.Image, width: int) -> Image.Image:
    """Return an image reduced to at most a width."""
    if image.width <= width:
        return image
    return image.resize((width, max(1, round(image.height * width / image.width))), Image.Resampling.LANCZOS)
