"""Semantic segmentation as a task of the training loop."""

from collections.abc import Iterable
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.transforms.v2.functional import pil_to_tensor

from isomorph.data.formats.registry import data_root
from isomorph.data.loaders import loader_of_share, train_loader
from isomorph.data.sampler import TrainSampler
from isomorph.data.sources import drawn_fraction, drawn_once, read_image
from isomorph.distributed import Runtime
from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import (
    check_own_classes,
    evaluation_config,
    input_size_problem,
    label_names,
    training_config,
)
from isomorph.models.task_networks.upernet import UPerNet
from isomorph.tasks.segmentation.augment import TestTransform, TrainTransform
from isomorph.tasks.segmentation.fields import SegmentationPart
from isomorph.tasks.segmentation.formats import FORMATS, open_splits, open_test_pairs
from isomorph.tasks.segmentation.images import MAX_CLASSES, MaskedImages
from isomorph.tasks.segmentation.objective import SegmentationTask, open_teacher
from isomorph.tasks.segmentation.page import ImageScore, class_colours, index_image, overlay, worst_images, write_masks
from isomorph.tasks.segmentation.predict import Confusion, measure, predict_mask
from isomorph.training.build import build_model
from isomorph.training.recipe.recipe import Recipe
from isomorph.training.task import EvaluationOptions, Objective, Prediction, Task


class Segmentation(Task):
    """Semantic segmentation with UPerNet around any backbone; the score is the mean IoU of the test images."""

    fields = SegmentationPart
    sources = tuple(FORMATS)
    printed = {"miou": ".2f", "pixel_accuracy": ".2f"}
    corruption_metric = "miou"
    options: SegmentationPart

    def check_recipe(self, recipe: Recipe) -> None:
        if recipe.scale.parallel == "fsdp":
            raise ValueError("segmentation is tested image by image, which fsdp does not support; use ddp")
        if recipe.data.batch_size // recipe.scale.accumulate < 2:
            raise ValueError("segmentation needs two images at once for its BatchNorms; lower scale.accumulate")
        if recipe.data.classes or recipe.data.size or recipe.data.test_crop or recipe.data.crop_pct:
            raise ValueError("data.classes, size, test_crop and crop_pct do not apply to segmentation; see task.crop")

    def open_data(self, recipe: Recipe) -> tuple[MaskedImages, MaskedImages]:
        data = recipe.data
        train, test = open_splits(data.source, data_root(data.root), data.split)
        test = drawn_once(test, data.test_images)
        train = drawn_fraction(train, data.fraction, recipe.seed if data.draw == "seeded" else None)
        train.check(data.unreadable)
        test.check()
        if len(train.classes) > MAX_CLASSES:
            raise UserError(f"{len(train.classes)} classes are too many; masks can have {MAX_CLASSES}")
        return train, test

    def build_model(self, recipe: Recipe, train: MaskedImages, recast_now: bool) -> nn.Module:
        part = recipe.model
        if part.name == "upernet":  # positions are created for the crops
            part = part.model_copy(update={"kwargs": {"img_size": list(self.options.crop), **part.kwargs}})
        return build_model(part, len(train.classes), recipe.drop_path, recast_now)

    def data_config(self, recipe: Recipe, model: nn.Module) -> dict[str, Any]:
        return training_config(model, self.options.crop, {})

    def check_model(self, recipe: Recipe, model: nn.Module, config: dict[str, Any]) -> None:
        if not isinstance(model, UPerNet):
            raise UserError(
                f"{type(model).__name__} does not classify pixels; give --model.name upernet, and the network inside "
                "it as --model.kwargs.backbone NAME"
            )
        if reason := input_size_problem(model, config["input_size"]):
            raise UserError(
                f"the network cannot process crops of {self.options.crop}: {reason}; give another task.crop"
            )

    def train_loader(
        self, recipe: Recipe, config: dict[str, Any], train: MaskedImages, sampler: TrainSampler
    ) -> DataLoader[Any]:
        transform: Any = TrainTransform(self.options, config["mean"], config["std"])
        return train_loader(train, transform, sampler, recipe.data.workers, recipe.data.unreadable)  # type: ignore[arg-type]

    def test_loader(
        self, recipe: Recipe, config: dict[str, Any], test: MaskedImages, runtime: Runtime
    ) -> Iterable[Any]:
        return self._image_loader(config, test, recipe.data.workers, runtime)

    def _image_loader(
        self, config: dict[str, Any], test: MaskedImages, workers: int, runtime: Runtime
    ) -> Iterable[Any]:
        """Return this process's share of whole images, one by one. Shape: yields (1, 3, h, w), (1, H, W)"""
        test = test.subset(range(len(test)))
        test.transform = TestTransform(self.options.resize, config["mean"], config["std"])
        return loader_of_share(test, 1, workers, runtime)

    def objective(self, recipe: Recipe, model: nn.Module, device: torch.device) -> Objective:
        def measure_masks(module: nn.Module, loader: Iterable[Any], runtime: Runtime) -> dict[str, float]:
            counts, images = measure(module, loader, self.options, runtime)
            return {**counts.metrics(), "images": images}

        task = SegmentationTask(model, self.options, device, open_teacher(self.options, model))
        return Objective(task, measure_masks, lambda metrics: metrics["miou"])

    def open_images(self, model: nn.Module, options: EvaluationOptions) -> MaskedImages:
        """Return the images and masks to evaluate a trained model on: those given, else of the kind it was trained on.

        Raises: UserError for missing data, or data of other classes.
        """
        recorded: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
        source, root = options.data or recorded["source"], options.root
        if options.data is not None and options.data not in FORMATS:
            source, root = "masks", Path(options.data)
            if not root.is_dir():
                raise UserError(f"{root} is neither a folder nor one of the data sources {', '.join(FORMATS)}")
        fraction, images = recorded.get("split") or (None, None)
        pairs = open_test_pairs(source, data_root(root), fraction, options.max_images, images)
        check_own_classes(model, pairs.classes)
        pairs.check()
        return pairs

    def evaluate(self, model: nn.Module, options: EvaluationOptions, runtime: Runtime) -> list[dict[str, Any]]:
        if options.size:
            raise UserError("--size does not apply to segmentation, which resizes images as in training; leave it out")
        return self.evaluate_images(model, self.open_images(model, options), options, runtime)

    def evaluate_images(
        self, model: nn.Module, images: MaskedImages, options: EvaluationOptions, runtime: Runtime
    ) -> list[dict[str, Any]]:
        loader = self._image_loader(evaluation_config(model), images, options.workers, runtime)
        worst, own = list[ImageScore](), count(runtime.rank, runtime.world)

        def handle(truth: Tensor, predicted: Tensor, counts: Confusion) -> None:
            score = ImageScore(next(own), counts.metrics()["miou"], counts, predicted.numpy().astype(np.uint8))
            worst[:] = worst_images([*worst, score])

        chosen = {"handle": handle} if options.page else {}
        counts, number = measure(model.to(runtime.device), loader, self.options, runtime, **chosen)
        rows = [{**counts.metrics(), "images": number}, *counts.rows(images.classes)]
        if options.page:
            gathered = runtime.gather(worst)
            if runtime.is_main:
                write_masks(options.page, images, counts, worst_images(chain(*gathered)), rows)
        return rows

    def predict(self, model: nn.Module, path: Path) -> Prediction:
        image = read_image(path)
        config = evaluation_config(model)
        reader = TestTransform(self.options.resize, config["mean"], config["std"])
        tensor = reader.image(tv_tensors.Image(pil_to_tensor(image)))[None]
        mask = predict_mask(model, tensor, self.options, (image.height, image.width)).cpu().numpy()
        names = label_names(model) or list(map(str, range(model.num_classes)))  # type: ignore[arg-type]
        colours = class_colours(len(names))
        counts = np.bincount(mask.flatten(), minlength=len(names))
        rows = [{"class": names[i], "share": 100 * counts[i] / mask.size} for i in np.argsort(-counts) if counts[i]]
        return Prediction(rows, {".png": overlay(image, mask, colours), "-mask.png": index_image(mask, colours)})
