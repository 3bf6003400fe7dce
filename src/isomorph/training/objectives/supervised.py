"""What a run minimises, as timm tasks: a task owns the model, its loss and its averaged weights."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from timm.task import ClassificationTask, LogitDistillationTask, TokenDistillationTask, TrainingTask
from torch import Tensor, nn

from isomorph.checkpoints.open import is_checkpoint_or_run, open_model
from isomorph.errors import UserError
from isomorph.training.build import check_image_size
from isomorph.training.objectives.map_similarity import PenalisedTask
from isomorph.training.objectives.token_labels import LabelMapMixup
from isomorph.training.recipe.fields import AugmentPart
from isomorph.training.recipe.objective_fields import DistillPart, MapSimilarityPart


def build_criterion(augment: AugmentPart, loss: str = "softmax") -> nn.Module:
    """Cross-entropy of softmax or sigmoids: smoothed for plain labels, soft where images are mixed."""
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
    """Labels alone, and a penalty on similar maps where one is given.

    Raises: UserError for a penalty and a network whose blocks do not hand their maps on.
    """
    return PenalisedTask(model, build_criterion(augment, loss), device, similarity)


class HardDistillationTask(LogitDistillationTask):
    """(1 - share) CE(student, label) + share CE(student, the teacher's best class), on the same augmented images.

    Source: DeiT (Touvron et al., 2020) eq. 3, without the distillation token; as ConViT-S+ was distilled (section 3)
    """

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.trainable_module(input)
        with torch.no_grad():
            seen = self.teacher.normalize_input(input, self.student_mean, self.student_std)
            second = self.teacher(seen).argmax(dim=-1)
        task, teacher = self.criterion(logits, target), F.cross_entropy(logits, second)
        loss = self.task_loss_weight * task + self.distill_loss_weight * teacher
        return {"loss": loss, "output": logits, "task_loss": task, "kd_loss": teacher}


def build_distillation(
    model: nn.Module, teacher: nn.Module, part: DistillPart, augment: AugmentPart, loss: str, device: torch.device
) -> TrainingTask:
    """Labels and a frozen teacher, in eval mode throughout, normalised as it is used to.

    Raises: UserError when the teacher knows other classes, or a token is wanted that the model does not have.
    """
    known, wanted = (getattr(m, "num_classes", None) for m in (teacher, model))
    if known != wanted:
        raise UserError(f"the teacher {part.teacher} knows {known} classes, the model has {wanted}: no common labels")
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
    """Raises: UserError when the model has no distillation token."""
    if not hasattr(model, "set_distilled_training"):
        raise UserError(
            f"{type(model).__name__} has no distillation token: leave distill.token off, or train a "
            "deit_*_distilled_* or tdrl_vit_ti_distilled"
        )


def open_teacher(part: DistillPart) -> nn.Module:
    """The teacher of a recipe. Raises: UserError when it cannot be opened."""
    if part.kwargs and is_checkpoint_or_run(part.teacher):
        raise UserError(f"{part.teacher} has arguments of its own; distill.kwargs goes with a timm model's name")
    return open_model(part.teacher, part.weights, **part.kwargs)


@torch.no_grad()
def check_teacher(teacher: nn.Module, model: nn.Module) -> None:
    """Raises: UserError when the teacher cannot see the images of the run, found out before it starts."""
    check_image_size(teacher.eval(), model.pretrained_cfg["input_size"], "the teacher")  # type: ignore[index, arg-type]


def build_mixup(augment: AugmentPart, num_classes: int, maps: bool = False) -> Mixup | None:
    """timm's mixup and cutmix, or None where neither is on; with `maps` for images whose labels are maps."""
    if not augment.mixes:
        return None
    if maps:
        return LabelMapMixup(augment.mixup, augment.cutmix)
    return Mixup(augment.mixup, augment.cutmix, label_smoothing=augment.smoothing, num_classes=num_classes)
