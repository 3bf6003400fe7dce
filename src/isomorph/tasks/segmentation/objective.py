"""The loss of segmentation: cross-entropy of both heads, and distillation from a teacher channel by channel."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.task import ClassificationTask
from torch import Tensor, nn

from isomorph.checkpoints.open import open_model
from isomorph.errors import UserError
from isomorph.models.task_networks.upernet import CoarseLogits, UPerNet, resize_map
from isomorph.tasks.segmentation.fields import SegmentationPart
from isomorph.tasks.segmentation.images import IGNORE
from isomorph.training.objectives.distillation import FrozenTeacher


def pixel_cross_entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the mean cross-entropy over the pixels that have a class, 0 if none has one.

    The logits are enlarged to the mask first.

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
    teacher = resize_map(teacher, student.shape[-2:]) if teacher.shape != student.shape else teacher
    log_own = (student.float().flatten(2) / temperature).log_softmax(-1)  # (B, K, H W)
    target = (teacher.float().flatten(2) / temperature).softmax(-1)  # (B, K, H W)
    return -(target * log_own).sum() * temperature**2 / (K * B)


class SegmentationTask(ClassificationTask):
    """loss = CE(head) + w CE(auxiliary head) + d distillation; the last two where there is such a head, a teacher.

    The teacher is frozen and in eval mode, and gets images in its own normalisation.
    """

    def __init__(
        self, model: nn.Module, part: SegmentationPart, device: torch.device, teacher: nn.Module | None = None
    ) -> None:
        super().__init__(model, criterion=pixel_cross_entropy, device=device, verbose=False)
        self.part = part
        self.teacher: FrozenTeacher | None = None
        if teacher is not None:
            own: Any = model.pretrained_cfg
            self.teacher = FrozenTeacher(teacher, own, teacher.pretrained_cfg, device)  # type: ignore[arg-type]

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
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


def open_teacher(part: SegmentationPart, model: nn.Module) -> nn.Module | None:
    """Return the teacher of a recipe, or None. Raises: UserError when it cannot be opened, or has other classes."""
    if part.teacher is None:
        return None
    teacher = open_model(part.teacher, part.teacher_weights)
    if not isinstance(teacher, UPerNet):
        raise UserError(f"task.teacher {part.teacher} is a {type(teacher).__name__}, not a network for segmentation")
    if teacher.num_classes != model.num_classes:
        raise UserError(
            f"task.teacher {part.teacher} has {teacher.num_classes} classes, the model has {model.num_classes}; "
            "give one of the same classes"
        )
    return teacher
