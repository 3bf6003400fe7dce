"""The page of a detector's test: AP, AP of every class, and images with truth and detections, the worst first."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchvision.ops import box_iou

from isomorph.report.html import ImageCard, Section, write_page
from isomorph.report.image_uris import image_uri, stack_images
from isomorph.tasks.detection.dataset import DetectionSource
from isomorph.tasks.detection.extra import decode_masks
from isomorph.tasks.detection.metrics import Results
from isomorph.tasks.detection.predict import SHOWN_SCORE, draw_objects
from isomorph.terminal_tables import row_table

SHOWN_IMAGES = 24
"""Images on the page."""
_WIDTH = 420
"""Largest width of each of the two pictures of an image, in pixels."""
_IOU = 0.5
"""Overlap from which a detection of the right class has found an object."""


class ImageScore(NamedTuple):
    """What was found in an image: objects found, missed, and detections of nothing, or of an object found already."""

    image: int
    found: int
    missed: int
    wrong: int

    @property
    def f1(self) -> float:
        """Share of what is right, of objects and detections together; 1 for an image without either."""
        total = 2 * self.found + self.missed + self.wrong
        return 2 * self.found / total if total else 1.0


def write_detections(path: Path, source: DetectionSource, results: Results, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the page of a test. `rows` are the metrics of all images, and then of every class.

    Raises: UserError when it cannot be written, or an image cannot be read.
    """
    by_image = group_results(source, results)
    index_of = {record.id: index for index, record in enumerate(source.images)}
    scores = [score_image(source, index_of[number], by_image[number]) for number in results.image_ids]
    worst = sorted(scores, key=lambda score: (score.f1, -score.missed - score.wrong, score.image))[:SHOWN_IMAGES]
    cards = [_card(source, score, by_image[source.images[score.image].id]) for score in worst]
    overall, classes = rows[0], rows[1:]
    found, objects = sum(s.found for s in scores), sum(s.found + s.missed for s in scores)
    wrong = sum(s.wrong for s in scores)
    lead = (
        f"Box AP50 is {overall.get('box_ap50', 0):.1f} on {len(scores)} images. From a score of {SHOWN_SCORE}, "
        f"{found} of {objects} objects are found, and {wrong} detections are wrong."
    )
    sections = [
        Section("Precision", "Average precision over all images.", table=row_table([overall])),
        Section("By class", "Average precision of every class.", table=row_table(classes)),
        Section(
            "Images, the worst first",
            f"Above the truth, below the detections from a score of {SHOWN_SCORE}. An object is found by a "
            f"detection of its class that overlaps it by half (IoU {_IOU}).",
            images=cards,
        ),
    ]
    write_page(path, "Detections", lead, sections)


def group_results(source: DetectionSource, results: Results) -> dict[int, dict[str, Tensor]]:
    """Return the detections of every image, by its number: boxes, labels, scores, and masks where there are any."""
    entries: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for entry in results.entries:
        entries[entry["image_id"]].append(entry)
    return {number: _as_tensors(source, entries[number]) for number in results.image_ids}


def _as_tensors(source: DetectionSource, entries: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    boxes = torch.tensor([each["bbox"] for each in entries], dtype=torch.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    labels = torch.tensor([source.annotations.label_of[e["category_id"]] for e in entries], dtype=torch.int64)
    found = {"boxes": boxes, "labels": labels, "scores": torch.tensor([float(e["score"]) for e in entries])}
    if entries and "segmentation" in entries[0]:
        found["masks"] = torch.from_numpy(decode_masks([each["segmentation"] for each in entries])).bool()
    return found


def score_image(source: DetectionSource, index: int, detections: Mapping[str, Tensor]) -> ImageScore:
    """Match the detections of an image with its objects, best first, each object once."""
    truth = source.objects(index)
    shown = torch.where(detections["scores"] >= SHOWN_SCORE)[0]
    shown = shown[detections["scores"][shown].argsort(descending=True)]
    free = torch.ones(len(truth["labels"]), dtype=torch.bool)
    overlaps = box_iou(detections["boxes"], truth["boxes"])
    for number in shown.tolist():
        fits = free & (truth["labels"] == detections["labels"][number]) & (overlaps[number] >= _IOU)
        if fits.any():
            free[torch.where(fits, overlaps[number], -1).argmax()] = False
    found = int((~free).sum())
    return ImageScore(index, found, int(free.sum()), len(shown) - found)


def _card(source: DetectionSource, score: ImageScore, detections: dict[str, Tensor]) -> ImageCard:
    """Return an image twice, with the truth and with the detections, and what was found in it."""
    image, names = source.image(score.image), list(source.classes)
    pictures = [draw_objects(image, each, names) for each in (source.objects(score.image), detections)]
    total = score.found + score.missed
    lines = [f"found {score.found} of {total}, wrong {score.wrong}"]
    return ImageCard(image_uri(stack_images(pictures, _WIDTH)), source.images[score.image].file, lines)
