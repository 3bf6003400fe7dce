"""pycocotools, which is an optional package."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from isomorph.errors import UserError, install_hint


def mask_codec() -> Any:
    """Return pycocotools' functions on masks. Raises: UserError if it is not installed."""
    _require()
    from pycocotools import mask

    return mask


def decode_masks(coded: Sequence[Any]) -> np.ndarray:
    """Return masks from COCO's RLE. Shape: n masks -> (n, H, W) uint8"""
    codec = mask_codec()
    with warnings.catch_warnings():  # of NumPy 2, about pycocotools' own arrays
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        return np.stack([codec.decode(each) for each in coded])


def evaluator() -> tuple[Any, Any]:
    """Return pycocotools' classes COCO and COCOeval. Raises: UserError if it is not installed."""
    _require()
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    return COCO, COCOeval


def _require() -> None:
    """Raise UserError if pycocotools is not installed."""
    try:
        import pycocotools  # noqa: F401
    except ImportError:
        raise UserError(f"detection needs pycocotools, which is not installed; {install_hint('dense')}") from None
