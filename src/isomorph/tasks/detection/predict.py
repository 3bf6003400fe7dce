"""Detections of one image: boxes, classes and outlines in its own pixels, drawn on it, and as JSON."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as V
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from isomorph.data.sources import read_image
from isomorph.evaluation.class_names import label_names
from isomorph.evaluation.input_sizes import evaluation_config
from isomorph.layers.eval_mode import eval_mode
from isomorph.tasks.detection.annotations import ImageRecord
from isomorph.tasks.detection.metrics import encode_mask, to_image
from isomorph.tasks.detection.transforms import TestTransform
from isomorph.training.task import Prediction

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999")
"""Colours of classes, which people with a colour deficiency can tell apart (Okabe and Ito)."""
SHOWN_SCORE = 0.3
"""Detections below this score are in the JSON and not in the picture."""


def detect_image(model: nn.Module, image: Image.Image) -> dict[str, Tensor]:
    """Return the detections in an image, best first, in its own pixels; masks as (n, H, W) bool."""
    transform = TestTransform(evaluation_config(model))
    inputs, inside = transform(image.convert("RGB"))
    with eval_mode(model):
        found = model.detect(inputs[None].to(next(model.parameters()).device), [inside])[0]  # type: ignore[operator]
    record = ImageRecord(0, "", image.height, image.width)
    return to_image({name: value.cpu() for name, value in found.items()}, record, inside)


def predict_file(model: nn.Module, path: Path) -> Prediction:
    """Return the objects in an image file: rows of those shown, the image with them, and all of them as JSON.

    Raises: UserError when it cannot be read.
    """
    image = read_image(path)
    found, names = detect_image(model, image), label_names(model)
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
        {
            "label": label,
            "name": class_name(label, names),
            "score": round(score, 4),
            "box": [round(n, 1) for n in box],
        }
        for label, score, box in rows
    ]
    for entry, mask in zip(entries, found.get("masks", ()), strict=False):
        coded = encode_mask(mask)
        entry["segmentation"] = {"size": list(coded["size"]), "counts": coded["counts"].decode("ascii")}
    return entries


def class_name(label: int, names: list[str]) -> str:
    """Return the name of a class, or its number where there are no names."""
    return names[label] if label < len(names) else str(label)


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
        scores = found["scores"].tolist() if "scores" in found else [None] * len(labels)
        texts = [
            class_name(label, names) + ("" if score is None else f" {score:.2f}")
            for label, score in zip(labels, scores, strict=True)
        ]
        width = max(2, round(max(image.size) / 200))
        corners = found["boxes"].clamp(min=0)
        corners = torch.minimum(corners, torch.tensor([image.width - 1, image.height - 1] * 2))
        canvas = draw_bounding_boxes(canvas, corners, texts, colors=colours, width=width)
    return V.to_pil_image(canvas)
