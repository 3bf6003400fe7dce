"""Classification and distillation as timm tasks, which hold the model, its loss and its averaged weights."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from timm.task import ClassificationTask, LogitDistillationTask, TokenDistillationTask, TrainingTask
from torch import Tensor, nn

from isomorph.checkpoints.open import is_checkpoint_or_run, open_model
from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import check_image_size
from isomorph.training.objectives.map_similarity import PenalisedTask
from isomorph.training.objectives.token_labels import LabelMapMixup
from isomorph.training.recipe.fields import AugmentPart
from isomorph.training.recipe.objective_fields import DistillPart, MapSimilarityPart


def build_criterion(augment: AugmentPart, loss: str = "softmax") -> nn.Module:
    """Return softmax or sigmoid cross-entropy, with label smoothing, or soft targets for mixed images."""
    if loss == "sigmoid":
        return BinaryCrossEntropy(augment.smoothing, sum_classes=True)
    return SoftTargetCrossEntropy() if augment.mixes else nn.CrossEntropyLoss(label_smoothing=augment.smoothing)


def build_classification(
    model: nn.Module,
    augment: AugmentPart,
    loss: str,
    device: torch.device,
    similarity: MapSimilarityPart | None = None,
) -> ClassificationTask:
    """Return a classification task, with a penalty on similar attention maps if `similarity` is given.

    Raises: UserError for a penalty on a model whose blocks do not pass their maps on.
    """
    return PenalisedTask(model, build_criterion(augment, loss), device, similarity)


class HardDistillationTask(LogitDistillationTask):
    """Hard distillation: (1 - share) CE(student, label) + share CE(student, teacher's top class), on the same images.

    Source: DeiT (Touvron et al., 2020) eq. 3, without the distillation token; ConViT section 3, ConViT-S+
    """

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.trainable_module(input)
        with torch.no_grad():
            images = self.teacher.normalize_input(input, self.student_mean, self.student_std)
            teacher_label = self.teacher(images).argmax(dim=-1)
        task, teacher = self.criterion(logits, target), F.cross_entropy(logits, teacher_label)
        loss = self.task_loss_weight * task + self.distill_loss_weight * teacher
        return {"loss": loss, "output": logits, "task_loss": task, "kd_loss": teacher}


def build_distillation(
    model: nn.Module, teacher: nn.Module, part: DistillPart, augment: AugmentPart, loss: str, device: torch.device
) -> TrainingTask:
    """Return a task with labels and a frozen teacher, which is in eval mode and gets images in its normalisation.

    Raises: UserError when the teacher has another number of classes, or the model lacks the distillation token.
    """
    theirs, own = (getattr(m, "num_classes", None) for m in (teacher, model))
    if theirs != own:
        raise UserError(
            f"distill.teacher {part.teacher} has {theirs} classes, the model has {own}; give one of the same classes"
        )
    teacher = teacher.requires_grad_(False).to(device)
    shared: dict[str, Any] = dict(
        criterion=build_criterion(augment, loss),
        task_loss_weight=1 - part.share,
        temperature=part.temperature,
        device=device,
        verbose=False,
    )
    if part.token:
        _require_distillation_token(model)
        return TokenDistillationTask(model, teacher, distill_type=part.kind, distill_loss_weight=part.share, **shared)
    kind = HardDistillationTask if part.kind == "hard" else LogitDistillationTask
    return kind(model, teacher, **shared)


def _require_distillation_token(model: nn.Module) -> None:
    """Raise UserError when the model has no distillation token."""
    if not hasattr(model, "set_distilled_training"):
        raise UserError(
            f"{type(model).__name__} has no distillation token; set distill.token false, or train a "
            "deit_*_distilled_* or tdrl_vit_ti_distilled"
        )


def open_teacher(part: DistillPart) -> nn.Module:
    """Return the teacher of a recipe. Raises: UserError when it cannot be opened."""
    if part.kwargs and is_checkpoint_or_run(part.teacher):
        raise UserError(
            f"distill.teacher {part.teacher} is a checkpoint with its own arguments; leave distill.kwargs out"
        )
    return open_model(part.teacher, part.weights, **part.kwargs)


@torch.no_grad()
def check_teacher(teacher: nn.Module, model: nn.Module) -> None:
    """Raise UserError when the teacher cannot process the images of the run."""
    check_image_size(teacher.eval(), model.pretrained_cfg["input_size"], "the teacher")  # type: ignore[index, arg-type]


def build_mixup(augment: AugmentPart, num_classes: int, maps: bool = False) -> Mixup | None:
    """Return timm's mixup and cutmix, or None if both are off; with `maps`, for labels that are label maps."""
    if not augment.mixes:
        return None
    if maps:
        return LabelMapMixup(augment.mixup, augment.cutmix)
    return Mixup(augment.mixup, augment.cutmix, label_smoothing=augment.smoothing, num_classes=num_classes)
