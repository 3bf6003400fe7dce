"""Image classification, and its variants with a teacher, label maps or masks, as a task of the training loop."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from timm.data import Mixup
from timm.task import TrainingTask
from torch import nn

from isomorph.lab.data.label_maps import random_label_maps
from isomorph.lab.data.loaders import ImageConfig, eval_transform
from isomorph.lab.data.sources import read_image
from isomorph.lab.data.streams import IMAGE_SOURCES
from isomorph.lab.distributed import Runtime
from isomorph.lab.evaluation.accuracy import count_predictions, sum_counts
from isomorph.lab.evaluation.classes import (
    check_image_size,
    class_count,
    class_logits,
    likeliest_classes,
)
from isomorph.lab.training.build import (
    build_model,
    build_test_loader,
    build_train_loader,
    data_config,
    open_sources,
)
from isomorph.lab.training.objectives.distillation import build_distillation
from isomorph.lab.training.objectives.masked import pretraining_objective
from isomorph.lab.training.objectives.supervised import PenalisedLoss, build_criterion
from isomorph.lab.training.objectives.token_labels import LabelMapMixup, TokenLabelLoss
from isomorph.lab.training.recipe.fields import Part
from isomorph.lab.training.recipe.recipe import Recipe
from isomorph.lab.training.task import Mix, Objective, Prediction, Task
from isomorph.layers.modes import eval_mode, first_float
from isomorph.models.input_sizes import evaluation_config
from isomorph.terminal_tables import Metrics

TOP_CLASSES = 5


# Fields of recipes that `Classification.objective` reads, or that make labels which only its losses take.
_OF_OBJECTIVE = (
    "loss",
    "augment.smoothing",
    "augment.mixup",
    "augment.cutmix",
    "distill",
    "token_labels",
    "map_similarity",
    "mask",
)


class Classification(Task):
    """Classification of images, with labels, a teacher or label maps; and masked pre-training on images.

    A task of your own on images with labels derives from it and replaces what differs, such as `objective`. Its models
    are evaluated as classifiers, unless it has an `evaluate` of its own.

    >>> "cifar10" in iso.training.Classification.sources
    True
    """

    sources = IMAGE_SOURCES
    unused: ClassVar[tuple[str, ...]] = ()
    classifies = True
    open_data: Any = staticmethod(open_sources)
    data_config: Any = staticmethod(data_config)
    train_loader: Any = staticmethod(build_train_loader)
    test_loader: Any = staticmethod(build_test_loader)
    printed = {"top1": ".2f", "reconstruction": ".4f", "alignment": ".4f"}

    def __init_subclass__(cls) -> None:
        """Reject the fields that only `objective` reads, for a task with an objective of its own.

        A task whose objective calls this one's sets `unused = ()`.
        """
        super().__init_subclass__()
        derived = cls.__mro__[: cls.__mro__.index(Classification)]
        has_unused = any("unused" in vars(kind) for kind in derived)
        if "objective" in vars(cls) and not has_unused:
            cls.unused = _OF_OBJECTIVE

    def build_model(self, recipe: Recipe, train: Any, recast_now: bool) -> nn.Module:
        # without a classifier: fine-tuning would load the untrained one as if it were trained
        classes = 0 if recipe.mask else len(train.classes)
        return build_model(recipe.model, classes, recipe.drop_path, recast_now)

    def check_model(self, recipe: Recipe, model: nn.Module, config: ImageConfig) -> None:
        name = recipe.model.name or str(recipe.model.weights)
        check_image_size(model, config["input_size"], name)
        channels = config["input_size"][0]
        for side in recipe.augment.small_sizes or ():
            check_image_size(model, (channels, side, side), f"{name}, with augment.small_sizes,")

    def mix(self, recipe: Recipe, model: nn.Module) -> Mix | None:
        augment = recipe.augment
        if not augment.mixes:
            return None
        if recipe.token_labels and recipe.token_labels.maps:
            return LabelMapMixup(augment.mixup, augment.cutmix)
        smoothing = augment.smoothing
        classes = class_count(model)
        return Mixup(augment.mixup, augment.cutmix, label_smoothing=smoothing, num_classes=classes)

    def objective(self, recipe: Recipe, model: nn.Module, device: torch.device) -> Objective:
        if recipe.mask:
            return pretraining_objective(recipe.mask, model, device, self.rehearses)
        criterion = build_criterion(recipe.augment, recipe.loss)
        similarity = recipe.map_similarity
        loss: TrainingTask
        if recipe.token_labels:
            loss = TokenLabelLoss(
                model, recipe.token_labels, recipe.augment.smoothing, device, similarity
            )
        elif recipe.distill:
            small_sizes = recipe.augment.small_sizes or ()
            loss = build_distillation(
                model, recipe.distill, criterion, device, self.rehearses, small_sizes
            )
        else:
            loss = PenalisedLoss(model, criterion, device, similarity)
        return Objective(
            loss, _measure_classes, lambda metrics: metrics["top1"], accuracy=_training_accuracy
        )

    def synthetic_batch(
        self,
        recipe: Recipe,
        model: nn.Module,
        config: ImageConfig,
        samples: int,
        device: torch.device,
    ) -> tuple[Any, Any]:
        inputs, labels = super().synthetic_batch(recipe, model, config, samples, device)
        if recipe.token_labels and recipe.token_labels.maps:
            return inputs, random_label_maps(labels, class_count(model))
        return inputs, labels

    @torch.no_grad()
    def predict(self, model: nn.Module, path: Path) -> Prediction:
        image = read_image(path)
        like = first_float(model)
        config = evaluation_config(model)
        with eval_mode(model):
            x = eval_transform(config)(image)[None].to(like)
            logits = class_logits(model(x))
        rows = []
        for name, share in likeliest_classes(model, logits, TOP_CLASSES)[0]:
            rows.append({"class": name, "probability": 100 * share})
        return Prediction(rows, {".json": rows})


def _measure_classes(model: nn.Module, loader: Iterable[Any], runtime: Runtime) -> Metrics:
    counts = count_predictions(model, runtime.pad_batches(loader))
    return sum_counts(runtime.gather(counts)).metrics()


def _training_accuracy(output: Any, target: Any) -> torch.Tensor:
    """Return the share of training images whose likeliest class is that of the larger share of their label."""
    # of the class token, not of a distillation token
    logits = output[0] if isinstance(output, tuple) else output
    if target.ndim > 1:
        target = target.argmax(1)
    return (logits.argmax(1) == target).float().mean()


CLASSIFICATION = Classification(Part())


def recipe_task(recipe: Recipe) -> Task:
    if recipe.task:
        return cast(Task, recipe.task.task)
    return CLASSIFICATION
