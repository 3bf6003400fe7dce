"""Distillation from a teacher on the same images (DeiT), as loss modules; images in another model's normalisation."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.task import (
    DistillationTeacher,
    LogitDistillationTask,
    TokenDistillationTask,
    TrainingTask,
)
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.lab.data.loaders import mean_and_std
from isomorph.lab.evaluation.classes import check_image_size, class_count, named_logits
from isomorph.lab.training.open import is_checkpoint_or_run, open_model
from isomorph.lab.training.recipe.fields import DistillPart
from isomorph.lab.training.task import Losses
from isomorph.models import create


class FrozenTeacher(nn.Module):
    """A network without gradients that stays in eval mode, and the student's images in its normalisation.

    `own` and `theirs` are data configs with the `mean` and `std` of student and teacher.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        model: nn.Module,
        own: Mapping[str, Any],
        theirs: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.model: Any = model
        mean, std = mean_and_std(own)
        their_mean, their_std = mean_and_std(theirs)
        self.register_buffer("scale", std / their_std, persistent=False)
        self.register_buffer("shift", (mean - their_mean) / their_std, persistent=False)
        super().train(False)
        self.requires_grad_(False).to(device)

    def train(self, mode: bool = True) -> "FrozenTeacher":
        return self

    def images(self, x: Tensor) -> Tensor:
        """Return images in the teacher's normalisation. Shape: (B, C, h, w) -> the same"""
        return x * self.scale + self.shift


def open_teacher(part: DistillPart, rehearses: bool) -> nn.Module:
    """Return the teacher; in a dry run a timm model with random weights, or a checkpoint, which is there."""
    is_file = is_checkpoint_or_run(part.teacher)
    if part.kwargs and is_file:
        raise UserError(
            f"distill.teacher {part.teacher} is a checkpoint with its own arguments; omit distill.kwargs"
        )
    if rehearses and not is_file:
        return create(part.teacher, pretrained=False, **part.kwargs)
    return open_model(part.teacher, part.weights, **part.kwargs)


class _Teacher(DistillationTeacher):
    def normalize_input(
        self, input: Tensor, student_mean: Any = None, student_std: Any = None
    ) -> Tensor:
        # timm's waits for the GPU to compare
        return (input * student_std + student_mean - self.mean_kd) / self.std_kd


class SoftDistillationLoss(LogitDistillationTask):
    """Soft distillation: (1 - share) CE(student, label) + share T^2 KL(teacher / T, student / T), on the same images.

    Source: DeiT (Touvron et al., 2020) eq. 2, without the distillation token
    """

    def divergence(self, logits: Tensor, teacher: Tensor) -> Tensor:
        own = (logits / self.temperature).log_softmax(-1)
        theirs = (teacher / self.temperature).log_softmax(-1)
        divergence = F.kl_div(own, theirs, reduction="batchmean", log_target=True)
        return divergence * self.temperature**2

    def forward(self, input: Tensor, target: Tensor) -> Losses:
        logits = named_logits(self.trainable_module(input))
        with torch.no_grad():
            images = self.teacher.normalize_input(input, self.student_mean, self.student_std)
            teacher = named_logits(self.teacher(images))
        label = self.criterion(logits, target)
        distance = self.divergence(logits, teacher)
        loss = self.task_loss_weight * label + self.distill_loss_weight * distance
        return {"loss": loss, "output": logits, "task_loss": label, "kd_loss": distance}


class HardDistillationLoss(SoftDistillationLoss):
    """Hard distillation: (1 - share) CE(student, label) + share CE(student, teacher's top class), on the same images.

    Source: DeiT eq. 3, without the distillation token; ConViT section 3, ConViT-S+
    """

    def divergence(self, logits: Tensor, teacher: Tensor) -> Tensor:
        return F.cross_entropy(logits, teacher.argmax(-1))


def build_distillation(
    model: nn.Module,
    part: DistillPart,
    criterion: nn.Module,
    device: torch.device,
    rehearses: bool = False,
    small_sizes: Sequence[int] = (),
) -> TrainingTask:
    """Return a loss with labels and a frozen teacher, which is in eval mode and gets images in its normalisation.

    If it `rehearses`, a teacher of timm has random weights: nothing is downloaded. `small_sizes` are the sides of the
    images of earlier epochs.

    Raises: UserError when the teacher cannot be opened or process the images, or has another number of classes, or the
    model lacks the distillation token.
    """
    teacher = open_teacher(part, rehearses).eval()
    size: Any = model.pretrained_cfg["input_size"]  # type: ignore[index]
    check_image_size(teacher, size, "the teacher")
    for side in small_sizes:
        check_image_size(teacher, (size[0], side, side), "the teacher, with augment.small_sizes,")
    theirs = class_count(teacher)
    own = class_count(model)
    if theirs != own:
        raise UserError(
            f"distill.teacher {part.teacher} has {theirs} classes, the model has {own}; give one of the same classes"
        )
    teacher = _Teacher(teacher.requires_grad_(False).to(device), device=device)
    shared: dict[str, Any] = dict(
        criterion=criterion,
        task_loss_weight=1 - part.share,
        temperature=part.temperature,
        device=device,
        verbose=False,
    )
    if not part.token:
        loss = HardDistillationLoss if part.kind == "hard" else SoftDistillationLoss
        return loss(model, teacher, **shared)
    if not hasattr(model, "set_distilled_training"):
        raise UserError(
            f"{type(model).__name__} has no distillation token; set distill.token false, or train a "
            "deit_*_distilled_* or tdrl_vit_ti_distilled"
        )
    return TokenDistillationTask(
        model, teacher, distill_type=part.kind, distill_loss_weight=part.share, **shared
    )
