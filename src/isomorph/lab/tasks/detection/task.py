"""Detection and instance segmentation as a task of the training loop: Mask R-CNN's losses, and a teacher's."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.utils import unwrap_model
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from isomorph.errors import UserError
from isomorph.lab.data.formats.registry import data_root
from isomorph.lab.data.loaders import ImageConfig, loader_of_share, train_loader, transformed
from isomorph.lab.data.sampler import TrainSampler
from isomorph.lab.data.sources import drawn_fraction, drawn_once
from isomorph.lab.distributed import Runtime
from isomorph.lab.evaluation.classes import check_image_size, check_same_classes
from isomorph.lab.tasks.detection.data import (
    DetectionSource,
    TrainTransform,
    check_same_categories,
    find_annotations,
    open_annotated,
)
from isomorph.lab.tasks.detection.results import (
    FittedImages,
    collect_detections,
    metric_rows,
    predict_file,
)
from isomorph.lab.training.build import build_model
from isomorph.lab.training.dry_run.synthetic import random_images
from isomorph.lab.training.objectives.distillation import FrozenTeacher
from isomorph.lab.training.objectives.masked import LossModule
from isomorph.lab.training.open import is_missing, open_model
from isomorph.lab.training.recipe.fields import (
    AllowedFaults,
    Count,
    NotNegative,
    Part,
    Positive,
    Probability,
)
from isomorph.lab.training.recipe.recipe import Recipe
from isomorph.lab.training.task import EvaluationOptions, Losses, Objective, Prediction, Task
from isomorph.models.input_sizes import evaluation_config
from isomorph.models.task_networks.mask_rcnn import Target
from isomorph.terminal_tables import Metrics, Rows

# Test images at once: they are large.
_LARGEST_BATCH = 8


class DetectionPart(Part):
    """Fields of detection and instance segmentation."""

    masks: bool = True
    """Learn the outlines of objects as well as boxes; false for data with boxes only."""
    train: str | None = None
    """Annotations to train on, from data.root; by default annotations/instances_train2017.json, train.json ..."""
    train_images: str | None = None
    """Folder of the training images, from data.root; by default train2017, images/train, train or images."""
    test: str | None = None
    """Annotations to test on; by default annotations/instances_val2017.json, val.json ..."""
    test_images: str | None = None
    """Folder of the test images; by default val2017, images/val, val or images."""
    skip_annotations: AllowedFaults = 0
    """Annotations with a wrong box, outline or field to leave out before the run stops."""
    keep_empty: bool = False
    """Train on images without objects too."""
    scales: tuple[Positive, Positive] = (0.1, 2.0)
    """Smallest and largest scale of a training image, where 1 fits it to the input; the input is cut out of it."""
    flip: Probability = 0.5
    """Probability of a horizontal flip."""
    teacher: str | None = None
    """Checkpoint or run of a detector whose proposals are a second target (specific distillation)."""
    feature_weight: NotNegative = 0.001
    """Weight of the difference between the maps and the teacher's."""
    objectness_weight: NotNegative = 0.1
    """Weight of the difference between the objectness and the teacher's."""
    ramp: Count = 500
    """Training passes over which both weights grow from 0."""


class DetectionLoss(LossModule):
    """The sum of the losses of Mask R-CNN: objectness and boxes of proposals; classes, boxes and masks of regions."""

    def forward(self, input: Tensor, target: Sequence[Target]) -> Losses:
        losses = self.trainable_module(input, target)
        return {"loss": sum(losses.values()), **losses}


class GuidedDetector(nn.Module):
    """A detector, and a 3 x 3 convolution for every map of its pyramid, whose result is compared with a teacher's map.

    Shape: x (B, C, H, W), targets -> losses of the detector, with its adapted maps and objectness
    """

    passes: Tensor

    def __init__(
        self, student: nn.Module, channels: int, teacher_channels: int, levels: int
    ) -> None:
        super().__init__()
        self.student = student
        self.adapt = nn.ModuleList(
            nn.Conv2d(channels, teacher_channels, 3, padding=1) for _ in range(levels)
        )
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))  # resumes with the run

    def forward(self, x: Tensor, targets: Sequence[Target] | None = None) -> dict[str, Any]:
        if targets is None:
            return self.student(x)
        losses = self.student(x, targets, keep_maps=True)
        self.passes += 1
        levels = zip(self.adapt, losses["maps"], strict=True)
        losses["maps"] = [adapt(level) for adapt, level in levels]
        return losses

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """Return the layers of the student; the convolutions belong to its last."""
        layer_of = self.student.group_matcher(coarse)  # type: ignore[operator]
        return lambda name: layer_of(name.removeprefix("student."))


class GuidedDetectionLoss(DetectionLoss):
    """Losses of Mask R-CNN, and those of matching the maps and the objectness of a frozen teacher.

    With m the teacher's largest probability of an object at a position, over its anchors, on each map of the pyramid:

        features: sum m (T - adapt(S))^2 / sum m,    objectness: sum m BCE(sigmoid(S), sigmoid(T)) / sum m

    Both are summed over maps and weighted as `part` says; the weights grow from 0 over its first `ramp` passes. The
    teacher is in eval mode, gets images in its own normalisation, and computes its proposals' head only.

    Source: G2SD (Huang et al., 2023), specific distillation for detection, as TDRL uses it; differs: the teacher's
    drop path is off
    Raises: UserError if the teacher has another number of maps or anchors.
    """

    def __init__(
        self, student: Any, teacher: Any, device: torch.device, part: DetectionPart
    ) -> None:
        check_teacher(student, teacher)
        width = student.rpn.head.cls_logits.in_channels
        teacher_width = teacher.rpn.head.cls_logits.in_channels
        guided = GuidedDetector(student, width, teacher_width, len(teacher.strides))
        super().__init__(guided, device)
        self.part = part
        self.teacher = FrozenTeacher(
            teacher, student.pretrained_cfg, teacher.pretrained_cfg, device
        )

    def forward(self, input: Tensor, target: Sequence[Target]) -> Losses:
        losses = self.trainable_module(input, target)
        maps = losses.pop("maps")
        objectness = losses.pop("objectness")
        with torch.no_grad():
            teacher = self.teacher.model
            theirs = list(teacher.pyramid_maps(self.teacher.images(input)).values())
            their_objectness = teacher.rpn.head(theirs)[0]
        features = []
        scores = []
        for level in zip(maps, objectness, theirs, their_objectness, strict=True):
            of_features, of_objectness = guided_losses(*level)
            features.append(of_features)
            scores.append(of_objectness)
        share: Any = 1.0
        if self.part.ramp:
            passed = unwrap_model(self.trainable_module).passes - 1
            share = (passed / self.part.ramp).clamp(max=1.0)
        losses["loss_features"] = share * self.part.feature_weight * torch.stack(features).sum()
        losses["loss_teacher_objectness"] = (
            share * self.part.objectness_weight * torch.stack(scores).sum()
        )
        return {"loss": sum(losses.values()), **losses}


def guided_losses(
    adapted: Tensor, objectness: Tensor, theirs: Tensor, their_objectness: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the losses of one map, weighted by where the teacher sees objects.

    Shape: maps (B, C, H, W), objectness (B, anchors, H, W) -> two numbers
    """
    wanted = their_objectness.float().sigmoid()
    m = wanted.amax(1, keepdim=True)  # (B, 1, H, W)
    squares = (theirs.float() - adapted.float()).square()
    features = (m * squares).sum() / m.sum()
    entropy = F.binary_cross_entropy_with_logits(objectness.float(), wanted, reduction="none")
    scores = (m * entropy).sum() / m.sum()
    return features, scores


def check_teacher(student: Any, teacher: Any) -> None:
    """Raise UserError if a teacher is not a detector, or has other maps or anchors than the student."""
    if not hasattr(teacher, "rpn") or not hasattr(teacher, "pyramid_maps"):
        raise UserError(
            f"task.teacher is a {type(teacher).__name__}; give a Mask R-CNN that was trained on the data"
        )
    if tuple(student.strides) != tuple(teacher.strides):
        raise UserError(
            f"task.teacher has maps with strides {teacher.strides}, the model {student.strides}; "
            "give a teacher with the same patch size"
        )


class Detection(Task):
    """Find objects in images: boxes, classes and outlines, in data of COCO's format."""

    fields = DetectionPart
    sources = ("coco",)
    unused = (
        *Task.unused,
        "monitor_every",
        "data.split",
        "data.classes",
        "data.test_crop",
        "data.crop_pct",
    )
    printed = {"box_ap": ".1f", "box_ap50": ".1f", "mask_ap": ".1f"}

    def check_recipe(self, recipe: Recipe) -> None:
        if recipe.scale.parallel == "fsdp":
            raise ValueError("scale.parallel fsdp does not work for detection; leave it at ddp")
        if self.options.teacher is not None and recipe.model.recast_epoch:
            raise ValueError(
                "model.recast_epoch does not work with task.teacher; leave it at 0 to recast at the start"
            )
        if self.options.scales[0] > self.options.scales[1]:
            raise ValueError(
                "task.scales must be the smallest and the largest scale, like [0.1, 2.0]"
            )

    def open_data(self, recipe: Recipe) -> tuple[DetectionSource, DetectionSource]:
        root = data_root(recipe.data.root)
        options = self.options
        train = self._open(root, "train", options.train, options.train_images)
        test = self._open(root, "test", options.test, options.test_images)
        check_same_categories(train, test)
        if not options.keep_empty:
            train = train.with_objects()
        train = drawn_fraction(train, recipe.data.fraction, recipe.draw_seed)
        test = drawn_once(test, recipe.data.test_images)
        test.with_objects()  # raises where there is nothing to find
        return train, test

    def _open(
        self, root: Path, split: str, annotations: str | None, images: str | None
    ) -> DetectionSource:
        return open_annotated(
            root, split, self.options.masks, annotations, images, self.options.skip_annotations
        )

    def build_model(self, recipe: Recipe, train: Any, recast_now: bool) -> nn.Module:
        part = recipe.model
        if part.name == "mask_rcnn":
            kwargs: dict[str, Any] = {}
            if recipe.data.size:
                kwargs["img_size"] = list(recipe.data.size)
            kwargs["masks"] = self.options.masks
            part = part.model_copy(update={"kwargs": kwargs | part.kwargs})
        return build_model(part, len(train.classes), recipe.drop_path, recast_now)

    def check_model(self, recipe: Recipe, model: nn.Module, config: ImageConfig) -> None:
        if not hasattr(model, "detect"):
            raise UserError(
                f"{recipe.model.name or recipe.model.weights} is not a detector; set model.name mask_rcnn"
            )
        if model.has_masks != self.options.masks:
            has = "has" if model.has_masks else "has not"
            raise UserError(
                f"the model {has} a head for masks, and task.masks is {self.options.masks}; give the same"
            )
        check_image_size(model, config["input_size"], "the network")

    def train_loader(
        self, recipe: Recipe, config: ImageConfig, train: Any, sampler: TrainSampler
    ) -> Any:
        transform: Any = TrainTransform(config, self.options.scales, self.options.flip)
        examples = transformed(train, transform)
        return train_loader(examples, sampler, recipe.data.workers, recipe.data.unreadable, collate)

    def test_loader(
        self, recipe: Recipe, config: ImageConfig, test: Any, runtime: Runtime
    ) -> Iterable[Any]:
        batch = max(1, recipe.data.batch_size // runtime.world)
        return loader_of_share(FittedImages(test, config), batch, recipe.data.workers, runtime)

    def objective(self, recipe: Recipe, model: nn.Module, device: torch.device) -> Objective:
        def student(module: nn.Module) -> nn.Module:
            return getattr(module, "student", module)

        def measure(module: nn.Module, loader: Any, runtime: Runtime) -> Metrics:
            detections = collect_detections(student(module), loader, runtime)
            return metric_rows(loader.dataset.source, detections)[0]

        options = self.options
        loss = DetectionLoss(model, device)
        teacher = options.teacher
        if teacher is not None and not (self.rehearses and is_missing(teacher)):
            loss = GuidedDetectionLoss(model, open_model(teacher), device, options)
        return Objective(loss, measure, lambda metrics: metrics["box_ap"], student)

    def synthetic_batch(
        self,
        recipe: Recipe,
        model: nn.Module,
        config: ImageConfig,
        samples: int,
        device: torch.device,
    ) -> tuple[Tensor, list[Target]]:
        """Return images with one object each, in the middle."""
        H, W = config["input_size"][-2:]
        target: Target = {
            "boxes": torch.tensor([[W / 4, H / 4, 3 * W / 4, 3 * H / 4]], device=device),
            "labels": torch.zeros(1, dtype=torch.long, device=device),
        }
        if self.options.masks:
            mask = torch.zeros(1, H, W, dtype=torch.uint8, device=device)
            mask[:, H // 4 : 3 * H // 4, W // 4 : 3 * W // 4] = 1
            target["masks"] = mask
        return random_images(config, samples, device), [dict(target) for _ in range(samples)]

    def loss_without_values(self, objective: Objective, inputs: Any, targets: Any) -> Tensor:
        """Return a sum of all outputs, with fixed boxes: which boxes are proposed depends on values."""
        outputs = objective.loss_module.get_trainable_module()(inputs)
        means = []
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor):
                means.append(output.float().mean())
        return torch.stack(means).sum()

    def _test_images(self, model: nn.Module, options: EvaluationOptions) -> DetectionSource:
        given = options.data
        own = self.options
        if given is None or given in self.sources:
            source = self._open(data_root(options.root), "test", own.test, own.test_images)
        elif given.endswith(".json"):
            source = self._open(Path(given).parent, "test", Path(given).name, None)
        elif not Path(given).is_dir():
            raise UserError(
                f"{given} is neither a folder nor an annotation file that ends in .json"
            )
        else:
            if own.test is None:
                find_annotations(
                    Path(given), "test", "give such a folder, or the annotation file itself"
                )
            source = self._open(Path(given), "test", own.test, own.test_images)
        check_same_classes(model, source.classes)
        return drawn_once(source, options.max_images)

    def evaluate(self, model: nn.Module, options: EvaluationOptions, runtime: Runtime) -> Rows:
        images = self._test_images(model, options)
        config = evaluation_config(model, options.size)
        batch = min(options.batch_size, _LARGEST_BATCH)
        loader = loader_of_share(FittedImages(images, config), batch, options.workers, runtime)
        results = collect_detections(model.to(runtime.device), loader, runtime)
        return metric_rows(images, results)

    def predict(self, model: nn.Module, path: Path) -> Prediction:
        return predict_file(model, path)


def collate(examples: Sequence[Any]) -> tuple[torch.Tensor, list[Any], list[str]]:
    images, objects, problems = zip(*examples, strict=True)
    return torch.stack(images), list(objects), list(chain.from_iterable(problems))
