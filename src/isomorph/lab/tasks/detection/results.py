"""Detections of a trained network: their average precision, by pycocotools, and a picture of them."""

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.transforms.v2 import functional as V
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from isomorph.errors import UserError
from isomorph.json_values import JsonObject
from isomorph.lab.data.loaders import ImageConfig
from isomorph.lab.data.sources import read_image
from isomorph.lab.distributed import Runtime
from isomorph.lab.tasks.detection.data import (
    DetectionSource,
    FitTransform,
    ImageRecord,
    Objects,
    encode_outline,
    fitted_size,
    pycocotools,
)
from isomorph.lab.training.task import Prediction
from isomorph.layers.modes import eval_mode, require_finite
from isomorph.models.input_sizes import class_names, evaluation_config
from isomorph.spec import ImageSize
from isomorph.terminal_tables import Row, Rows

# The first of pycocotools' numbers: AP over IoU .5 to .95, at .5, at .75, and by size of the objects.
STATISTICS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
# Colours of classes, which people with a colour deficiency can tell apart (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999")
# Detections below this score are in the JSON and not in the picture.
SHOWN_SCORE = 0.3


class FittedImages(Dataset[tuple[Tensor, int]]):
    """Images as the network reads them, with their indices in the source. Shape: -> (3, H, W), index"""

    def __init__(self, source: DetectionSource, config: ImageConfig) -> None:
        self.source = source
        self.transform = FitTransform(config)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform.fit(self.source.image(index))[0], index


class Results(NamedTuple):
    """Detections in COCO's format for results, and the numbers of the images that were processed, of all processes."""

    entries: Rows
    image_ids: list[int]


@torch.no_grad()
def collect_detections(model: nn.Module, loader: DataLoader[Any], runtime: Runtime) -> Results:
    """Return a model's detections in the images of all processes. `loader` is that of this process's FittedImages.

    Raises: NotFinite for a network whose outputs are not finite.
    """
    images: Any = loader.dataset
    source: DetectionSource = images.source
    own = Results([], [])
    device = next(model.parameters()).device
    with eval_mode(model):
        for batch, indices in runtime.pad_batches(loader):
            records = [source.samples[max(int(i), 0)] for i in indices]
            inside: Any = []
            for record in records:
                size = fitted_size((record.height, record.width), images.transform.size)
                inside.append(tuple(size))
            detected = model.detect(batch.to(device), inside)  # type: ignore[operator]
            for index, record, size, detections in zip(
                indices, records, inside, detected, strict=True
            ):
                if index < 0:  # it fills up a batch
                    continue
                detections = to_image(detections, record, size)
                own.entries.extend(as_results(detections, record, source.category_ids))
                own.image_ids.append(record.id)
    everything = Results([], [])
    for entries, image_ids in runtime.gather(tuple(own)):
        everything.entries.extend(entries)
        everything.image_ids.extend(image_ids)
    return everything


def to_image(detections: Objects, record: ImageRecord, inside: ImageSize) -> Objects:
    """Return detections in pixels of the image itself; `inside` is its size in the input. Masks: -> (n, H, W) bool"""
    detections = {name: value.cpu() for name, value in detections.items()}
    height, width = inside
    across = record.width / width
    down = record.height / height
    detections["boxes"] = detections["boxes"] * torch.tensor([across, down, across, down])
    if "masks" in detections:
        size = (record.height, record.width)
        pasted = paste_masks_in_image(detections["masks"], detections["boxes"], size)
        detections["masks"] = pasted[:, 0] > 0.5
    return detections


def as_results(
    detections: Objects, record: ImageRecord, category_ids: Sequence[int]
) -> Iterator[Row]:
    """Yield detections in COCO's format, with boxes as left, top, width, height."""
    for label, score, (left, top, right, bottom), mask in _each(detections):
        box = [left, top, right - left, bottom - top]
        category = category_ids[label]
        entry = {"image_id": record.id, "category_id": category, "bbox": box, "score": score}
        if mask is not None:
            entry["segmentation"] = encode_mask(mask)
        yield entry


def _each(detections: Objects) -> Iterator[tuple[int, float, list[float], Tensor | None]]:
    """Yield label, score, box, and mask if there are masks, of each detection."""
    columns = [detections[name].tolist() for name in ("labels", "scores", "boxes")]
    masks = detections.get("masks", [None] * len(columns[0]))
    yield from zip(*columns, masks, strict=True)


def encode_mask(mask: Tensor) -> JsonObject:
    """Return a mask as COCO's RLE, size and counts. Shape: (H, W) bool"""
    return pycocotools("mask").encode(np.asfortranarray(mask.numpy().astype(np.uint8)))


def metric_rows(source: DetectionSource, results: Results) -> Rows:
    """Return average precision in percent, first of all classes, then of every class that the images have.

    All classes: box_ap, box_ap50, ..., and mask_ap, ... where the source has masks; and images. A size of objects that
    the data does not have has no number.

    Raises: UserError when there is no image, NotFinite for scores or boxes that are NaN or infinite.
    """
    if not results.image_ids:
        raise UserError("there is nothing to evaluate: the data has no images")
    require_finite(torch.tensor([(entry["score"], *entry["bbox"]) for entry in results.entries]))
    truth = ground_truth(source)
    names = {"bbox": "box"}
    if source.masks and all("segmentation" in entry for entry in results.entries):
        names["segm"] = "mask"
    overall: JsonObject = {}
    rows: dict[str, JsonObject] = {}
    for iou_type, name in names.items():
        run = _evaluate(truth, results, iou_type)
        for statistic, share in zip(STATISTICS, run.stats, strict=False):
            if share >= 0:
                overall[f"{name}_{statistic}"] = 100 * float(share)
        # (IoU, recall, class), all sizes, most detections
        precision = run.eval["precision"][:, :, :, 0, -1]
        for label, title in enumerate(source.classes):
            of_class = precision[:, :, label]
            if (of_class >= 0).any():
                row = rows.setdefault(title, {"class": title})
                row[f"{name}_ap"] = float(100 * of_class.mean())
                row[f"{name}_ap50"] = float(100 * of_class[0].mean())
    return [{**overall, "images": len(results.image_ids)}, *rows.values()]


def ground_truth(source: DetectionSource) -> Any:
    """Return the objects of a source as pycocotools' COCO, with ids from 1 (it takes 0 for no match)."""
    codec = pycocotools("mask")
    objects = list[dict[str, Any]]()
    for record in source.samples:
        for thing in record.objects:
            area = thing["area"]
            if area is None and thing["segmentation"] is not None:  # COCO's own definition
                outline = encode_outline(thing["segmentation"], record.height, record.width)
                area = float(codec.area(outline))
            elif area is None:
                _, _, width, height = thing["bbox"]
                area = width * height
            number = len(objects) + 1
            objects.append({**thing, "image_id": record.id, "id": number, "area": area})
    coco = pycocotools("coco").COCO()
    coco.dataset = {
        "info": {},
        "images": [{"id": r.id, "height": r.height, "width": r.width} for r in source.samples],
        "annotations": objects,
        "categories": [
            {"id": i, "name": name}
            for i, name in zip(source.category_ids, source.classes, strict=True)
        ],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
    return coco


def _evaluate(truth: Any, results: Results, iou_type: str) -> Any:
    # pycocotools would take the size of a mask from its box
    other = "bbox" if iou_type == "segm" else "segmentation"
    given = [
        {key: value for key, value in entry.items() if key != other} for entry in results.entries
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        if given:
            detections = truth.loadRes(given)
        else:  # it takes no empty list
            detections = pycocotools("coco").COCO()
            detections.dataset = {**truth.dataset, "annotations": []}
            detections.createIndex()
        run = pycocotools("cocoeval").COCOeval(truth, detections, iou_type)
        run.params.imgIds = sorted(results.image_ids)
        run.evaluate()
        run.accumulate()
        run.summarize()
    return run


def predict_file(model: nn.Module, path: Path) -> Prediction:
    """Return the objects in an image file: rows of those shown, the image with them, and all of them as JSON.

    An entry of the JSON has label, name, score, and box as left, top, right, bottom in pixels; with masks also the
    outline as COCO's RLE.

    Raises: UserError when it cannot be read, NotFinite as `collect_detections`.
    """
    image = read_image(path)
    inputs, inside = FitTransform(evaluation_config(model)).fit(image)
    with eval_mode(model):
        device = next(model.parameters()).device
        detections = model.detect(inputs[None].to(device), [inside])[0]  # type: ignore[operator]
    detections = to_image(detections, ImageRecord(0, "", image.height, image.width), inside)
    names = class_names(model)
    entries = _json_entries(detections, names)
    rows = []
    for entry in entries:
        if entry["score"] >= SHOWN_SCORE:
            box = " ".join(f"{side:g}" for side in entry["box"])
            rows.append({"class": entry["name"], "probability": 100 * entry["score"], "box": box})
    return Prediction(rows, {".png": draw_objects(image, detections, names), ".json": entries})


def _json_entries(detections: Objects, names: Sequence[str]) -> Rows:
    entries: Rows = []
    for label, score, corners, mask in _each(detections):
        box = [round(side, 1) for side in corners]
        entry = {"label": label, "name": names[label], "score": round(score, 4), "box": box}
        if mask is not None:
            coded = encode_mask(mask)
            counts = coded["counts"].decode("ascii")
            entry["segmentation"] = {"size": list(coded["size"]), "counts": counts}
        entries.append(entry)
    return entries


def draw_objects(image: Image.Image, detections: Objects, names: Sequence[str]) -> Image.Image:
    """Draw boxes with class and score, and outlines filled in half-transparent colours, from a score of .3."""
    canvas = V.pil_to_tensor(image.convert("RGB"))
    is_shown = detections["scores"] >= SHOWN_SCORE
    shown = {name: value[is_shown] for name, value in detections.items()}
    labels = shown["labels"].tolist()
    if not labels:
        return V.to_pil_image(canvas)
    colours: list[Any] = [COLOURS[label % len(COLOURS)] for label in labels]
    if "masks" in shown:
        canvas = draw_segmentation_masks(canvas, shown["masks"].bool(), alpha=0.45, colors=colours)
    scores = shown["scores"].tolist()
    texts = [f"{names[label]} {score:.2f}" for label, score in zip(labels, scores, strict=True)]
    limits = torch.tensor([image.width - 1, image.height - 1] * 2)
    corners = shown["boxes"].clamp(min=0).minimum(limits)
    width = max(2, round(max(image.size) / 200))
    canvas = draw_bounding_boxes(canvas, corners, texts, colors=colours, width=width)
    return V.to_pil_image(canvas)
