"""The page of a segmentation test: IoU of every class, confusion between classes, and images, the worst first."""

import colorsys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw

from isomorph.report.charts import Matrix
from isomorph.report.html import ImageCard, Section, write_page
from isomorph.report.page_images import image_uri, stack_images
from isomorph.tasks.segmentation.images import IGNORE, MaskedImages
from isomorph.tasks.segmentation.predict import Confusion
from isomorph.terminal_tables import row_table

SHOWN_IMAGES = 16
"""Images on the page."""
SHOWN_CLASSES = 25
"""Classes in the confusion matrix, those that are confused most."""
_WIDTH = 420
"""Largest width of each picture of an image, in pixels."""
_ROW = 28
"""Height of a row of the legend, in pixels."""
_WORST_CLASSES = 3
_OPACITY = 0.55
"""Opacity of a mask over its image."""
_GOLDEN = 0.6180339887


def class_colours(classes: int, given: Sequence[tuple[int, int, int]] | None = None) -> np.ndarray:
    """Return a colour for each class, those given or else colours that differ in hue. Shape: -> (K, 3) uint8"""
    if given is not None and len(given) == classes:
        return np.array(given, np.uint8)
    shades = [(0.55 + 0.4 * (i % 2), 0.95 - 0.3 * (i // 2 % 2)) for i in range(classes)]
    colours = [colorsys.hsv_to_rgb(i * _GOLDEN % 1, *shade) for i, shade in enumerate(shades)]
    return (255 * np.array(colours)).round().astype(np.uint8)


def index_image(mask: np.ndarray, colours: np.ndarray) -> Image.Image:
    """Return a mask as an image with a palette, whose pixels are the class numbers. Shape: (H, W)"""
    image = Image.fromarray(mask.astype(np.uint8), mode="P")
    palette = np.zeros((256, 3), np.uint8)
    palette[: len(colours)] = colours
    image.putpalette(palette.flatten().tolist())
    return image


def overlay(image: Image.Image, mask: np.ndarray, colours: np.ndarray, opacity: float = _OPACITY) -> Image.Image:
    """Return an image with the colours of a mask over it; pixels without a class stay as they are. Shape: (H, W)"""
    pixels = np.asarray(image.convert("RGB"), np.float32)
    shown = (mask != IGNORE)[..., None] & (mask < len(colours))[..., None]
    painted = colours[np.minimum(mask, len(colours) - 1)].astype(np.float32)
    mixed = np.where(shown, (1 - opacity) * pixels + opacity * painted, pixels)
    return Image.fromarray(mixed.round().astype(np.uint8))


class ImageScore(NamedTuple):
    """The mean IoU of one image, in percent, its counts, and the predicted classes. Shape: mask (H, W)"""

    number: int
    miou: float
    counts: Confusion
    mask: np.ndarray


def worst_images(scores: Iterable[ImageScore]) -> list[ImageScore]:
    """Return the images with the lowest mean IoU, the lowest first; an image without any class has none (NaN)."""
    known = (score for score in scores if score.miou == score.miou)
    return sorted(known, key=lambda score: (score.miou, score.number))[:SHOWN_IMAGES]


def write_masks(
    path: Path, pairs: MaskedImages, total: Confusion, worst: Sequence[ImageScore], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Write the page of a test. `rows` are the metrics of all images, and then of every class.

    Raises: UserError when it cannot be written, or an image cannot be read.
    """
    overall, classes = rows[0], sorted(rows[1:], key=lambda row: -1 if row["iou"] is None else row["iou"])
    known = [row for row in classes if row["iou"] is not None]
    lead = (
        f"The mean IoU over {len(known)} classes is {overall['miou']:.1f}% on {overall['images']} images, from "
        f"{known[0]['iou']:.1f}% ({known[0]['class']}) to {known[-1]['iou']:.1f}% ({known[-1]['class']})."
    )
    colours = class_colours(len(pairs.classes), pairs.colours)
    sections = [
        Section("Metrics", "Over all images together.", table=row_table([overall])),
        Section(
            "By class",
            "The lowest IoU first. The accuracy is the share of a class's pixels that were found.",
            table=row_table(classes),
        ),
        _confusion_section(total, pairs.classes),
        Section(
            "Images, the worst first",
            "Above: the truth; below: the prediction. Pixels without a class are not coloured.",
            images=[_legend(pairs.classes, colours, total), *(_card(pairs, score, colours) for score in worst)],
        ),
    ]
    write_page(path, "Segmentation", lead, sections)


def _confusion_section(total: Confusion, names: Sequence[str]) -> Section:
    """Return the shares of each true class's pixels that were predicted as each class."""
    counts = total.counts.double()
    shares = 100 * counts / counts.sum(1, keepdim=True).clamp_min(1)  # (K, K)
    wrong = counts - torch.diag(counts.diagonal())
    chosen = (wrong.sum(0) + wrong.sum(1)).argsort(descending=True)[:SHOWN_CLASSES].sort().values
    labels = [names[i] if i < len(names) else f"class {i}" for i in chosen.tolist()]
    chart = Matrix(
        "Share of a class's pixels, %", "true class", "predicted class", labels, labels,
        shares[chosen][:, chosen].tolist(), 0.0, 100.0,
    )  # fmt: skip
    which = f"The {SHOWN_CLASSES} classes that are confused most. " if len(names) > SHOWN_CLASSES else ""
    return Section("Confusion", f"{which}A row shows what the pixels of a class were taken for.", charts=[chart])


def _card(pairs: MaskedImages, score: ImageScore, colours: np.ndarray) -> ImageCard:
    """Return the truth and the prediction of an image next to each other, with its worst classes."""
    image, truth = pairs.image(score.number), pairs.mask(score.number)
    shown = np.where(truth == IGNORE, IGNORE, score.mask)
    picture = stack_images([overlay(image, mask, colours) for mask in (truth, shown)], _WIDTH)
    rows = [row for row in score.counts.rows(pairs.classes) if row["iou"] is not None and row["share"]]
    lowest = sorted(rows, key=lambda row: row["iou"])[:_WORST_CLASSES]
    text = ", ".join(f"{row['class']} {row['iou']:.0f}%" for row in lowest)
    return ImageCard(
        image_uri(picture), pairs.file_name(score.number), [f"mean IoU {score.miou:.1f}%", f"lowest: {text}"]
    )


def _legend(names: Sequence[str], colours: np.ndarray, total: Confusion) -> ImageCard:
    """Return the colours of the classes that occur, the most frequent first."""
    pixels = total.counts.sum(1)[: len(names)]
    shown = [i for i in pixels.argsort(descending=True).tolist() if pixels[i]][:SHOWN_CLASSES]
    canvas = Image.new("RGB", (_WIDTH, _ROW * len(shown)), "white")
    draw = ImageDraw.Draw(canvas)
    for row, number in enumerate(shown):
        top = _ROW * row
        draw.rectangle((0, top + 3, 2 * _ROW, top + _ROW - 3), fill=tuple(colours[number].tolist()))
        draw.text((2 * _ROW + 10, top + 3), names[number], fill="black", font_size=_ROW - 10)
    left = f" of {int((pixels > 0).sum())}" if len(shown) < int((pixels > 0).sum()) else ""
    return ImageCard(image_uri(canvas), "Colours", [f"{len(shown)}{left} classes, the most frequent first"])
