"""Semantic segmentation as a task of the training loop: its losses, data, metrics and predictions."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.task import ClassificationTask
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.transforms.v2.functional import pil_to_tensor

from isomorph.errors import UserError
from isomorph.lab.data.formats.registry import data_root
from isomorph.lab.data.loaders import ImageConfig, loader_of_share, train_loader, transformed
from isomorph.lab.data.sampler import TrainSampler
from isomorph.lab.data.sources import drawn_fraction, drawn_once, read_image
from isomorph.lab.distributed import Runtime, torchrun_place
from isomorph.lab.evaluation.classes import check_same_classes
from isomorph.lab.tasks.segmentation.augment import SegmentationPart, TestTransform, TrainTransform
from isomorph.lab.tasks.segmentation.data import (
    FORMATS,
    IGNORE,
    MAX_CLASSES,
    MaskedImages,
    open_splits,
    open_test_pairs,
)
from isomorph.lab.tasks.segmentation.results import (
    class_colours,
    draw_prediction,
    index_image,
    measure,
    predict_mask,
)
from isomorph.lab.training.build import build_model
from isomorph.lab.training.dry_run.synthetic import random_images
from isomorph.lab.training.objectives.distillation import FrozenTeacher
from isomorph.lab.training.open import is_missing, open_model
from isomorph.lab.training.recipe.recipe import Recipe
from isomorph.lab.training.task import EvaluationOptions, Losses, Objective, Prediction, Task
from isomorph.models.input_sizes import (
    class_names,
    evaluation_config,
    input_size_problem,
    training_config,
)
from isomorph.models.task_networks.upernet import CoarseLogits, UPerNet, resize_map
from isomorph.spec import spec_of
from isomorph.terminal_tables import Metrics, Rows


def pixel_cross_entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the mean cross-entropy over the pixels that have a class, 0 if none has one; logits are enlarged first.

    Shape: logits (B, K, H', W'), mask (B, H, W) -> ()
    """
    enlarged = resize_map(logits, mask.shape[-2:]).float()
    total = F.cross_entropy(enlarged, mask, ignore_index=IGNORE, reduction="sum")
    return total / (mask != IGNORE).sum().clamp_min(1)


def channel_distillation(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Return how far the student's distribution of each class over the positions is from the teacher's.

    - sum softmax(T / t) log softmax(S / t) t^2 / (K B), the softmax over positions. The teacher's logits are resized
    to the student's.

    Shape: (B, K, H, W), (B, K, H', W') -> ()
    Source: channel-wise distillation (Shu et al., 2021) as in G2SD's code, where t is 1
    """
    B, K = student.shape[:2]
    if teacher.shape != student.shape:
        teacher = resize_map(teacher, student.shape[-2:])
    log_own = (student.float().flatten(2) / temperature).log_softmax(-1)  # (B, K, H W)
    target = (teacher.float().flatten(2) / temperature).softmax(-1)  # (B, K, H W)
    return -(target * log_own).sum() * temperature**2 / (K * B)


class SegmentationLoss(ClassificationTask):
    """loss = CE(head) + w CE(auxiliary head) + d distillation; the last two where there is such a head, a teacher."""

    def __init__(
        self,
        model: nn.Module,
        part: SegmentationPart,
        device: torch.device,
        teacher: nn.Module | None = None,
    ) -> None:
        super().__init__(model, criterion=pixel_cross_entropy, device=device, verbose=False)
        self.part = part
        self.teacher: FrozenTeacher | None = None
        if teacher is not None:
            own_images: Any = model.pretrained_cfg
            images: Any = teacher.pretrained_cfg
            self.teacher = FrozenTeacher(teacher, own_images, images, device)

    def forward(self, input: Tensor, target: Tensor) -> Losses:
        coarse: CoarseLogits = self.trainable_module(input, coarse=True)
        task = self.criterion(coarse.logits, target)
        losses = {"task_loss": task, "loss": task}
        if coarse.auxiliary is not None:
            losses["auxiliary_loss"] = self.criterion(coarse.auxiliary, target)
            losses["loss"] = losses["loss"] + self.part.auxiliary_weight * losses["auxiliary_loss"]
        if self.teacher is not None:
            with torch.no_grad():
                known = self.teacher.model(self.teacher.images(input), coarse=True).logits
            losses["kd_loss"] = channel_distillation(coarse.logits, known, self.part.temperature)
            losses["loss"] = losses["loss"] + self.part.distill_weight * losses["kd_loss"]
        return {**losses, "output": coarse.logits}


def open_teacher(
    part: SegmentationPart, model: nn.Module, rehearses: bool = False
) -> nn.Module | None:
    """Return the teacher of a recipe, or None; if it `rehearses`, None also for one that is not there.

    Raises: UserError when it cannot be opened, or has other classes.
    """
    if part.teacher is None or (rehearses and is_missing(part.teacher)):
        return None
    teacher = open_model(part.teacher, part.teacher_weights)
    if not isinstance(teacher, UPerNet):
        raise UserError(
            f"task.teacher {part.teacher} is a {type(teacher).__name__}, not a network for segmentation"
        )
    if teacher.num_classes != model.num_classes:
        raise UserError(
            f"task.teacher {part.teacher} has {teacher.num_classes} classes, the model has "
            f"{model.num_classes}; give one of the same classes"
        )
    return teacher


class Segmentation(Task):
    """Semantic segmentation with UPerNet around any backbone; the score is the mean IoU of the test images."""

    fields = SegmentationPart
    sources = tuple(FORMATS)
    printed = {"miou": ".2f", "pixel_accuracy": ".2f"}
    options: SegmentationPart

    def check_recipe(self, recipe: Recipe) -> None:
        if recipe.scale.parallel == "fsdp":
            raise ValueError(
                "segmentation is tested image by image, which fsdp does not support; use ddp"
            )
        if recipe.data.batch_size // recipe.scale.accumulate < 2:
            raise ValueError(
                "segmentation needs two images at once for its BatchNorms; lower scale.accumulate"
            )
        if recipe.data.classes or recipe.data.size or recipe.data.test_crop or recipe.data.crop_pct:
            raise ValueError(
                "data.classes, size, test_crop and crop_pct do not apply to segmentation; see task.crop"
            )

    def open_data(self, recipe: Recipe) -> tuple[MaskedImages, MaskedImages]:
        data = recipe.data
        train, test = open_splits(data.source, data_root(data.root), data.split)
        test = drawn_once(test, data.test_images)
        train = drawn_fraction(train, data.fraction, recipe.draw_seed)
        train.check(data.unreadable)
        test.check()
        if len(train.classes) > MAX_CLASSES:
            raise UserError(
                f"{len(train.classes)} classes are too many; masks can have {MAX_CLASSES}"
            )
        return train, test

    def build_model(self, recipe: Recipe, train: MaskedImages, recast_now: bool) -> nn.Module:
        part = recipe.model
        if part.name == "upernet":  # positions are created for the crops
            kwargs = {"img_size": list(self.options.crop), **part.kwargs}
            part = part.model_copy(update={"kwargs": kwargs})
        return build_model(part, len(train.classes), recipe.drop_path, recast_now)

    def data_config(self, recipe: Recipe, model: nn.Module) -> ImageConfig:
        return training_config(model, self.options.crop, {})

    def check_model(self, recipe: Recipe, model: nn.Module, config: ImageConfig) -> None:
        if not isinstance(model, UPerNet):
            raise UserError(
                f"{type(model).__name__} does not classify pixels; give model.name=upernet, and "
                "the network inside it as model.kwargs.backbone=NAME"
            )
        _, processes, _ = torchrun_place()
        at_once = recipe.data.batch_size // (recipe.scale.accumulate * processes)
        is_synchronised = recipe.scale.sync_batch_norm and processes > 1
        if at_once < 2 and not is_synchronised:
            raise UserError(
                f"segmentation needs two images at once in each of {processes} processes for its BatchNorms; raise "
                "data.batch_size, or set scale.sync_batch_norm true on GPUs"
            )
        reason = input_size_problem(model, config["input_size"])
        if reason:
            raise UserError(
                f"the network cannot take crops of {self.options.crop}: {reason}; give another task.crop"
            )

    def train_loader(
        self, recipe: Recipe, config: ImageConfig, train: Any, sampler: TrainSampler
    ) -> Any:
        transform: Any = TrainTransform(self.options, config["mean"], config["std"])
        return train_loader(
            transformed(train, transform), sampler, recipe.data.workers, recipe.data.unreadable
        )

    def test_loader(
        self, recipe: Recipe, config: ImageConfig, test: Any, runtime: Runtime
    ) -> Iterable[Any]:
        return self._image_loader(config, test, recipe.data.workers, runtime)

    def _image_loader(
        self, config: ImageConfig, test: MaskedImages, workers: int, runtime: Runtime
    ) -> Any:
        """Return this process's share of whole images, one by one. Shape: yields (1, 3, h, w), (1, H, W)"""
        transform: Any = TestTransform(self.options.resize, config["mean"], config["std"])
        return loader_of_share(transformed(test, transform), 1, workers, runtime)

    def objective(self, recipe: Recipe, model: nn.Module, device: torch.device) -> Objective:
        def measure_masks(module: nn.Module, loader: Iterable[Any], runtime: Runtime) -> Metrics:
            counts, images = measure(module, loader, self.options, runtime)
            return {**counts.metrics(), "images": images}

        teacher = open_teacher(self.options, model, self.rehearses)
        loss = SegmentationLoss(model, self.options, device, teacher)
        return Objective(loss, measure_masks, lambda metrics: metrics["miou"])

    def synthetic_batch(
        self,
        recipe: Recipe,
        model: nn.Module,
        config: ImageConfig,
        samples: int,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        classes = getattr(model, "num_classes", 2)
        mask = torch.randint(classes, (samples, *config["input_size"][-2:]), device=device)
        return random_images(config, samples, device), mask

    def _test_images(self, model: nn.Module, options: EvaluationOptions) -> MaskedImages:
        recorded: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
        source = options.data or recorded["source"]
        root = options.root
        if options.data is not None and options.data not in FORMATS:
            source = "masks"
            root = Path(options.data)
            if not root.is_dir():
                raise UserError(
                    f"{root} is neither a folder nor one of the data sources {', '.join(FORMATS)}"
                )
        fraction, images = spec_of(model).split
        pairs = open_test_pairs(source, data_root(root), fraction, options.max_images, images)
        check_same_classes(model, pairs.classes)
        pairs.check()
        return pairs

    def evaluate(self, model: nn.Module, options: EvaluationOptions, runtime: Runtime) -> Rows:
        if options.size:
            raise UserError(
                "`size` does not apply to segmentation, which resizes images as in training; leave it out"
            )
        images = self._test_images(model, options)
        loader = self._image_loader(evaluation_config(model), images, options.workers, runtime)
        counts, number = measure(model.to(runtime.device), loader, self.options, runtime)
        return [{**counts.metrics(), "images": number}, *counts.rows(images.classes)]

    def predict(self, model: nn.Module, path: Path) -> Prediction:
        image = read_image(path)
        config = evaluation_config(model)
        reader = TestTransform(self.options.resize, config["mean"], config["std"])
        tensor = reader.image(tv_tensors.Image(pil_to_tensor(image)))[None]
        size = (image.height, image.width)
        mask = predict_mask(model, tensor, self.options, size).cpu().numpy()
        names = class_names(model)
        colours = class_colours(len(names))
        counts = np.bincount(mask.flatten(), minlength=len(names))
        rows = []
        for i in np.argsort(-counts):
            if counts[i]:
                rows.append({"class": names[i], "share": 100 * counts[i] / mask.size})
        drawn = draw_prediction(image, mask, names, colours)
        return Prediction(rows, {".png": drawn, "-mask.png": index_image(mask, colours)})
