"""Detections as pictures: of one image, with JSON, and the page of a test, with AP and the worst images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.ops import box_iou
from torchvision.transforms.v2 import functional as V
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from isomorph.data.sources import read_image
from isomorph.evaluation.input_sizes import evaluation_config, label_names
from isomorph.layers.eval_mode import eval_mode
from isomorph.report.html import ImageCard, Section, write_page
from isomorph.report.page_images import image_uri, stack_images
from isomorph.tasks.detection.dataset import DetectionSource, ImageRecord, decode_masks
from isomorph.tasks.detection.metrics import Results, encode_mask, to_image
from isomorph.tasks.detection.transforms import FitTransform
from isomorph.terminal_tables import row_table
from isomorph.training.task import Prediction

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999")
"""Colours of classes, which people with a colour deficiency can tell apart (Okabe and Ito)."""
SHOWN_SCORE = 0.3
"""Detections below this score are in the JSON and not in the picture."""
SHOWN_IMAGES = 24
"""Images on the page."""
_WIDTH = 420
"""Largest width of each of the two pictures of an image, in pixels."""
_IOU = 0.5
"""Overlap from which a detection of the right class has found an object."""


def predict_file(model: nn.Module, path: Path) -> Prediction:
    """Return the objects in an image file: rows of those shown, the image with them, and all of them as JSON.

    Raises: UserError when it cannot be read.
    """
    image = read_image(path)
    inputs, inside = FitTransform(evaluation_config(model)).fit(image)
    with eval_mode(model):
        found = model.detect(inputs[None].to(next(model.parameters()).device), [inside])[0]  # type: ignore[operator]
    found = to_image({k: v.cpu() for k, v in found.items()}, ImageRecord(0, "", image.height, image.width), inside)
    names = label_names(model) or list(map(str, range(model.num_classes)))  # type: ignore[arg-type]
    entries = as_json(found, names)
    rows = [
        {"class": each["name"], "probability": 100 * each["score"], "box": " ".join(f"{n:g}" for n in each["box"])}
        for each in entries
        if each["score"] >= SHOWN_SCORE
    ]
    return Prediction(rows, {".png": draw_objects(image, found, names), ".json": entries})


def as_json(found: dict[str, Tensor], names: list[str]) -> list[dict[str, Any]]:
    """Return detections as plain values, best first.

    label, name, score, and box as left, top, right, bottom in pixels; with masks also the outline as COCO's RLE.
    """
    rows = zip(found["labels"].tolist(), found["scores"].tolist(), found["boxes"].tolist(), strict=True)
    entries: list[dict[str, Any]] = [
        {"label": i, "name": names[i], "score": round(score, 4), "box": [round(n, 1) for n in box]}
        for i, score, box in rows
    ]
    for entry, mask in zip(entries, found.get("masks", ()), strict=False):
        coded = encode_mask(mask)
        entry["segmentation"] = {"size": list(coded["size"]), "counts": coded["counts"].decode("ascii")}
    return entries


def draw_objects(image: Image.Image, found: dict[str, Tensor], names: list[str]) -> Image.Image:
    """Draw boxes with class and score, and outlines filled in half-transparent colours.

    Detections with a score are drawn from a score of .3; objects without scores are all drawn.
    """
    if "scores" in found:
        shown = found["scores"] >= SHOWN_SCORE
        found = {name: value[shown] for name, value in found.items()}
    labels = found["labels"].tolist()
    colours: list[Any] = [COLOURS[label % len(COLOURS)] for label in labels]
    canvas = V.pil_to_tensor(image.convert("RGB"))
    if len(labels) and "masks" in found:
        canvas = draw_segmentation_masks(canvas, found["masks"].bool(), alpha=0.45, colors=colours)
    if len(labels):
        scores = [f" {score:.2f}" for score in found["scores"].tolist()] if "scores" in found else [""] * len(labels)
        texts = [names[label] + score for label, score in zip(labels, scores, strict=True)]
        width = max(2, round(max(image.size) / 200))
        corners = found["boxes"].clamp(min=0)
        corners = torch.minimum(corners, torch.tensor([image.width - 1, image.height - 1] * 2))
        canvas = draw_bounding_boxes(canvas, corners, texts, colors=colours, width=width)
    return V.to_pil_image(canvas)


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
    index_of = {record.id: index for index, record in enumerate(source.samples)}
    scores = [score_image(source, index_of[number], by_image[number]) for number in results.image_ids]
    worst = sorted(scores, key=lambda score: (score.f1, -score.missed - score.wrong, score.image))[:SHOWN_IMAGES]
    cards = [_card(source, score, by_image[source.samples[score.image].id]) for score in worst]
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
    entries: dict[int, list[dict[str, Any]]] = {number: [] for number in results.image_ids}
    for entry in results.entries:
        entries[entry["image_id"]].append(entry)
    return {number: _as_tensors(source, some) for number, some in entries.items()}


def _as_tensors(source: DetectionSource, entries: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    boxes = torch.tensor([each["bbox"] for each in entries], dtype=torch.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    labels = torch.tensor([source.label_of[e["category_id"]] for e in entries], dtype=torch.int64)
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
    return ImageCard(image_uri(stack_images(pictures, _WIDTH)), source.samples[score.image].file, lines)
