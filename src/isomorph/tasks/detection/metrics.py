"""Detections of a trained network in the test images, and their average precision, by pycocotools."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models.detection.roi_heads import paste_masks_in_image

from isomorph.distributed import Runtime
from isomorph.errors import UserError
from isomorph.layers.eval_mode import eval_mode
from isomorph.tasks.detection.dataset import DetectionSource, ImageRecord, pycocotools
from isomorph.tasks.detection.transforms import FitTransform, fitted_size

KINDS = {"bbox": "box", "segm": "mask"}
"""What pycocotools compares, and the names of the metrics."""
STATISTICS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
"""The first of pycocotools' numbers: AP over IoU .5 to .95, at .5, at .75, and by size of the objects."""


class FittedImages(Dataset[tuple[Tensor, int]]):
    """Images as the network reads them, with their indices in the source. Shape: -> (3, H, W), index"""

    def __init__(self, source: DetectionSource, config: Mapping[str, Any]) -> None:
        self.source, self.transform = source, FitTransform(config)

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
    """Return a model's detections in the images of all processes. `loader` is that of this process's FittedImages."""
    images: Any = loader.dataset
    source: DetectionSource = images.source
    own, device = Results([], []), next(model.parameters()).device
    with eval_mode(model):
        for batch, indices in runtime.pad_batches(loader):
            records = [source.samples[max(int(i), 0)] for i in indices]
            inside: Any = [tuple(fitted_size((r.height, r.width), images.transform.size)) for r in records]
            found = model.detect(batch.to(device), inside)  # type: ignore[operator]
            for index, record, height_width, each in zip(indices, records, inside, found, strict=True):
                if index >= 0:  # the others fill up a batch
                    in_image = to_image({k: v.cpu() for k, v in each.items()}, record, height_width)
                    own.entries.extend(as_results(in_image, record, source.category_ids))
                    own.image_ids.append(record.id)
    gathered = runtime.gather(tuple(own))
    return Results([each for part, _ in gathered for each in part], [i for _, part in gathered for i in part])


def to_image(found: dict[str, Tensor], record: ImageRecord, inside: tuple[int, int]) -> dict[str, Tensor]:
    """Return detections in pixels of the image itself; `inside` is its size in the input. Masks: -> (n, H, W) bool"""
    scale = torch.tensor([record.width / inside[1], record.height / inside[0]] * 2)
    found = {**found, "boxes": found["boxes"] * scale}
    if "masks" in found:
        pasted = paste_masks_in_image(found["masks"], found["boxes"], (record.height, record.width))
        found["masks"] = pasted[:, 0] > 0.5
    return found


def as_results(found: dict[str, Tensor], record: ImageRecord, category_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Return detections in an image as entries of COCO's format for results."""
    corners = found["boxes"].double()
    boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()
    entries: list[dict[str, Any]] = [
        {"image_id": record.id, "category_id": category_ids[label], "bbox": box, "score": score}
        for box, label, score in zip(boxes, found["labels"].tolist(), found["scores"].tolist(), strict=True)
    ]
    if "masks" in found:
        for entry, mask in zip(entries, found["masks"], strict=True):
            entry["segmentation"] = encode_mask(mask)
    return entries


def encode_mask(mask: Tensor) -> dict[str, Any]:
    """Return a mask as COCO's RLE, size and counts. Shape: (H, W) bool"""
    return pycocotools("mask").encode(np.asfortranarray(mask.numpy().astype(np.uint8)))


def metric_rows(source: DetectionSource, results: Results) -> list[dict[str, Any]]:
    """Return average precision in percent, first of all classes, then of every class that the images have.

    All classes: box_ap, box_ap50, ..., and mask_ap, ... where the source has masks; and images. A size of objects that
    the data does not have has no number.

    Raises: UserError when there is no image.
    """
    if not results.image_ids:
        raise UserError("there is nothing to evaluate: the data has no images")
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
    objects = [{**each, "image_id": record.id} for record in source.samples for each in record.objects]
    for number, each in enumerate(objects, 1):
        each |= {"id": number, "iscrowd": each.get("iscrowd", 0)}
        each.setdefault("area", each["bbox"][2] * each["bbox"][3])
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
    """Return pycocotools' evaluation of results."""
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
