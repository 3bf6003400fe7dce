"""pycocotools, which is an optional package."""

from typing import Any

from isomorph.errors import UserError, install_hint


def mask_codec() -> Any:
    """Return pycocotools' functions on masks. Raises: UserError if it is not installed."""
    _require()
    from pycocotools import mask

    return mask


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
