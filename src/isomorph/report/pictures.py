"""Pictures of a page: as data: URIs, and reduced and placed below each other."""

import base64
import io
from collections.abc import Sequence
from typing import Literal

from PIL import Image

_GAP = 6
"""Pixels between pictures below each other."""
_JPEG_QUALITY = 88


def data_uri(content: bytes, kind: Literal["png", "jpeg"]) -> str:
    """Return the content of an image file as a data: URI."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def picture_uri(picture: Image.Image, kind: Literal["png", "jpeg"] = "jpeg") -> str:
    """Return a picture as a data: URI."""
    file = io.BytesIO()
    picture.save(file, kind, quality=_JPEG_QUALITY)
    return data_uri(file.getvalue(), kind)


def stack_pictures(pictures: Sequence[Image.Image], width: int) -> Image.Image:
    """Return pictures of one size below each other on white, each reduced to at most a width."""
    reduced = [_reduce(picture, width) for picture in pictures]
    step = reduced[0].height + _GAP
    canvas = Image.new("RGB", (reduced[0].width, step * len(reduced) - _GAP), "white")
    for row, picture in enumerate(reduced):
        canvas.paste(picture, (0, row * step))
    return canvas


def _reduce(picture: Image.Image, width: int) -> Image.Image:
    """Return a picture reduced to at most a width."""
    if picture.width <= width:
        return picture
    return picture.resize((width, max(1, round(picture.height * width / picture.width))), Image.Resampling.LANCZOS)
