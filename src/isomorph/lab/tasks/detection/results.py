"""Detections of a trained network: their average precision, by pycocotools, and a picture of them."""

import contextlib
import io
from collections.abc import Mapping, Sequence
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

from isomorph.distributed import Runtime
from isomorph.errors import UserError
from isomorph.lab.data.sources import read_image
from isomorph.lab.tasks.detection.data import (
    DetectionSource,
    FitTransform,
    ImageRecord,
    encode_outline,
    fitted_size,
    pycocotools,
)
from isomorph.lab.training.task import Prediction
from isomorph.layers.modes import eval_mode, require_finite
from isomorph.models.input_sizes import evaluation_config, label_names

KINDS = {"bbox": "box", "segm": "mask"}
# The first of pycocotools' numbers: AP over IoU .5 to .95, at .5, at .75, and by size of the objects.
STATISTICS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
# Colours of classes, which people with a colour deficiency can tell apart (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999")
# Detections below this score are in the JSON and not in the picture.
SHOWN_SCORE = 0.3


class FittedImages(Dataset[tuple[Tensor, int]]):
    """Images as the network reads them, with their indices in the source. Shape: -> (3, H, W), index"""

    def __init__(self, source: DetectionSource, config: Mapping[str, Any]) -> None:
        self.source = source
        self.transform = FitTransform(config)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform.fit(self.source.image(index))[0], index


class Results(NamedTuple):
    """Detections in COCO's format for results, and the numbers of the images that were processed, of all processes."""

    entries: list[dict[str, Any]]
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
            inside: Any = [tuple(fitted_size((r.height, r.width), images.transform.size)) for r in records]
            found = model.detect(batch.to(device), inside)  # type: ignore[operator]
            for index, record, height_width, each in zip(indices, records, inside, found, strict=True):
                if index >= 0:  # the others fill up a batch
                    own.entries.extend(as_results(to_image(each, record, height_width), record, source.category_ids))
                    own.image_ids.append(record.id)
    gathered = runtime.gather(tuple(own))
    return Results([each for part, _ in gathered for each in part], [i for _, part in gathered for i in part])


def to_image(found: dict[str, Tensor], record: ImageRecord, inside: tuple[int, int]) -> dict[str, Tensor]:
    """Return detections in pixels of the image itself; `inside` is its size in the input. Masks: -> (n, H, W) bool"""
    found = {name: value.cpu() for name, value in found.items()}
    found["boxes"] = found["boxes"] * torch.tensor([record.width / inside[1], record.height / inside[0]] * 2)
    if "masks" in found:
        pasted = paste_masks_in_image(found["masks"], found["boxes"], (record.height, record.width))
        found["masks"] = pasted[:, 0] > 0.5
    return found


def as_results(found: dict[str, Tensor], record: ImageRecord, category_ids: Sequence[int]) -> list[dict[str, Any]]:
    corners = found["boxes"].double()
    boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()
    entries: list[dict[str, Any]] = [
        {"image_id": record.id, "category_id": category_ids[label], "bbox": box, "score": score}
        for box, label, score in zip(boxes, found["labels"].tolist(), found["scores"].tolist(), strict=True)
    ]
    for entry, mask in zip(entries, found.get("masks", ()), strict=False):
        entry["segmentation"] = encode_mask(mask)
    return entries


def encode_mask(mask: Tensor) -> dict[str, Any]:
    """Return a mask as COCO's RLE, size and counts. Shape: (H, W) bool"""
    return pycocotools("mask").encode(np.asfortranarray(mask.numpy().astype(np.uint8)))


def metric_rows(source: DetectionSource, results: Results) -> list[dict[str, Any]]:
    """Return average precision in percent, first of all classes, then of every class that the images have.

    All classes: box_ap, box_ap50, ..., and mask_ap, ... where the source has masks; and images. A size of objects that
    the data does not have has no number.

    Raises: UserError when there is no image, NotFinite for scores or boxes that are NaN or infinite.
    """
    if not results.image_ids:
        raise UserError("there is nothing to evaluate: the data has no images")
    require_finite(torch.tensor([(each["score"], *each["bbox"]) for each in results.entries]))
    truth = ground_truth(source)
    masks = source.masks and all("segmentation" in each for each in results.entries)
    overall: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    for kind, name in KINDS.items() if masks else [("bbox", "box")]:
        run = _evaluate(truth, results, kind)
        overall |= {f"{name}_{key}": 100 * float(n) for key, n in zip(STATISTICS, run.stats, strict=False) if n >= 0}
        precision = run.eval["precision"][:, :, :, 0, -1]  # (IoU, recall, class), all sizes, most detections
        for label, title in enumerate(source.classes):
            found = precision[:, :, label]
            if (found >= 0).any():
                means = {f"{name}_ap": 100 * found.mean(), f"{name}_ap50": 100 * found[0].mean()}
                rows.setdefault(title, {"class": title}).update({key: float(n) for key, n in means.items()})
    return [{**overall, "images": len(results.image_ids)}, *rows.values()]


def ground_truth(source: DetectionSource) -> Any:
    """Return the objects of a source as pycocotools' COCO, with ids from 1 (it takes 0 for no match)."""
    codec = pycocotools("mask")
    objects = list[dict[str, Any]]()
    for record in source.samples:
        for each in record.objects:
            area = each["area"]
            if area is None and each["segmentation"] is not None:  # COCO's own definition
                area = float(codec.area(encode_outline(each["segmentation"], record.height, record.width)))
            elif area is None:
                area = each["bbox"][2] * each["bbox"][3]
            objects.append({**each, "image_id": record.id, "id": len(objects) + 1, "area": area})
    coco = pycocotools("coco").COCO()
    coco.dataset = {
        "info": {},
        "images": [{"id": r.id, "height": r.height, "width": r.width} for r in source.samples],
        "annotations": objects,
        "categories": [{"id": i, "name": name} for i, name in zip(source.category_ids, source.classes, strict=True)],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
    return coco


def _evaluate(truth: Any, results: Results, kind: str) -> Any:
    other = "bbox" if kind == "segm" else "segmentation"  # pycocotools would take the size of a mask from its box
    given = [{key: value for key, value in each.items() if key != other} for each in results.entries]
    with contextlib.redirect_stdout(io.StringIO()):
        if given:
            found = truth.loadRes(given)
        else:  # it takes no empty list
            found = pycocotools("coco").COCO()
            found.dataset = {**truth.dataset, "annotations": []}
            found.createIndex()
        run = pycocotools("cocoeval").COCOeval(truth, found, kind)
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
        found = model.detect(inputs[None].to(next(model.parameters()).device), [inside])[0]  # type: ignore[operator]
    found = to_image(found, ImageRecord(0, "", image.height, image.width), inside)
    names = label_names(model) or list(map(str, range(model.num_classes)))  # type: ignore[arg-type]
    listed = zip(found["labels"].tolist(), found["scores"].tolist(), found["boxes"].tolist(), strict=True)
    entries: list[dict[str, Any]] = [
        {"label": i, "name": names[i], "score": round(score, 4), "box": [round(n, 1) for n in box]}
        for i, score, box in listed
    ]
    for entry, mask in zip(entries, found.get("masks", ()), strict=False):
        coded = encode_mask(mask)
        entry["segmentation"] = {
            "size": list(coded["size"]),
            "counts": coded["counts"].decode("ascii"),
        }
    rows = [
        {
            "class": each["name"],
            "probability": 100 * each["score"],
            "box": " ".join(f"{n:g}" for n in each["box"]),
        }
        for each in entries
        if each["score"] >= SHOWN_SCORE
    ]
    return Prediction(rows, {".png": draw_objects(image, found, names), ".json": entries})


def draw_objects(image: Image.Image, found: Mapping[str, Tensor], names: Sequence[str]) -> Image.Image:
    """Draw boxes with class and score, and outlines filled in half-transparent colours, from a score of .3."""
    shown = found["scores"] >= SHOWN_SCORE
    found = {name: value[shown] for name, value in found.items()}
    labels = found["labels"].tolist()
    colours: list[Any] = [COLOURS[label % len(COLOURS)] for label in labels]
    canvas = V.pil_to_tensor(image.convert("RGB"))
    if labels and "masks" in found:
        canvas = draw_segmentation_masks(canvas, found["masks"].bool(), alpha=0.45, colors=colours)
    if labels:
        texts = [f"{names[label]} {score:.2f}" for label, score in zip(labels, found["scores"].tolist(), strict=True)]
        corners = found["boxes"].clamp(min=0).minimum(torch.tensor([image.width - 1, image.height - 1] * 2))
        width = max(2, round(max(image.size) / 200))
        canvas = draw_bounding_boxes(canvas, corners, texts, colors=colours, width=width)
    return V.to_pil_image(canvas)
