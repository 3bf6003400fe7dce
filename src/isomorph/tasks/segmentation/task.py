"""Semantic segmentation as a task of the training loop."""

from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.transforms.v2.functional import pil_to_tensor

from isomorph.data.formats.registry import data_root
from isomorph.data.sampler import TrainSampler
from isomorph.data.sources import read_image
from isomorph.distributed import Runtime
from isomorph.errors import UserError
from isomorph.evaluation.class_names import check_own_classes, label_names
from isomorph.evaluation.input_sizes import evaluation_config, input_size_problem, training_config
from isomorph.tasks.segmentation.augment import TestTransform
from isomorph.tasks.segmentation.data import (
    build_test_loader,
    build_train_loader,
    check_class_count,
    open_pairs,
    open_test_pairs,
)
from isomorph.tasks.segmentation.fields import SegmentationPart
from isomorph.tasks.segmentation.figures import class_colours, index_image, overlay
from isomorph.tasks.segmentation.formats import FORMATS
from isomorph.tasks.segmentation.metrics import Confusion
from isomorph.tasks.segmentation.objective import SegmentationTask, check_network, open_teacher
from isomorph.tasks.segmentation.page import SHOWN_IMAGES, WorstImages, write_masks
from isomorph.tasks.segmentation.pairs import MaskedImages
from isomorph.tasks.segmentation.predict import measure, predict_mask
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
        train, test = open_pairs(recipe)
        check_class_count(train)
        return train, test

    def build_model(self, recipe: Recipe, train: MaskedImages, recast_now: bool) -> nn.Module:
        part = recipe.model
        if part.name == "upernet":  # positions are created for the crops
            part = part.model_copy(update={"kwargs": {"img_size": list(self.options.crop), **part.kwargs}})
        return build_model(part, len(train.classes), recipe.drop_path, recast_now)

    def data_config(self, recipe: Recipe, model: nn.Module) -> dict[str, Any]:
        return training_config(model, self.options.crop, {})

    def check_model(self, recipe: Recipe, model: nn.Module, config: dict[str, Any]) -> None:
        check_network(model)
        if reason := input_size_problem(model, config["input_size"]):
            raise UserError(
                f"the network cannot process crops of {self.options.crop}: {reason}; give another task.crop"
            )

    def train_loader(
        self, recipe: Recipe, config: dict[str, Any], train: MaskedImages, sampler: TrainSampler
    ) -> DataLoader[Any]:
        return build_train_loader(recipe, self.options, config, train, sampler)

    def test_loader(
        self, recipe: Recipe, config: dict[str, Any], test: MaskedImages, runtime: Runtime
    ) -> Iterable[Any]:
        if len(test) < runtime.world:
            raise UserError(f"{len(test)} test images are too few for {runtime.world} processes; start fewer")
        return build_test_loader(self.options, config, test, runtime, recipe.data.workers)

    def objective(self, recipe: Recipe, model: nn.Module, device: torch.device) -> Objective:
        def measure_masks(module: nn.Module, loader: Iterable[Any], runtime: Runtime) -> dict[str, float]:
            counts, images = measure(module, loader, self.options, module.num_classes, runtime)  # type: ignore[arg-type]
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
        loader = build_test_loader(self.options, evaluation_config(model), images, runtime, options.workers)
        worst, own = WorstImages(), count(runtime.rank, runtime.world)

        def handle(truth: Tensor, predicted: Tensor, counts: Confusion) -> None:
            worst.add(next(own), predicted.numpy().astype(np.uint8), counts)

        chosen = {"handle": handle} if options.page else {}
        counts, number = measure(model.to(runtime.device), loader, self.options, model.num_classes, runtime, **chosen)  # type: ignore[arg-type]
        rows = [{**counts.metrics(), "images": number}, *counts.rows(images.classes)]
        if options.page:
            scores = [score for part in runtime.gather(worst.scores) for score in part]
            if runtime.is_main:
                write_masks(options.page, images, counts, sorted(scores, key=lambda s: s.miou)[:SHOWN_IMAGES], rows)
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
