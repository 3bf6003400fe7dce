"""The losses of Mask R-CNN as a task of timm, alone or with a teacher of its proposals."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.utils import unwrap_model
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.models.task_networks.detection_heads import Target
from isomorph.training.objectives.distillation import FrozenTeacher
from isomorph.training.objectives.masked import PretrainingTask


class DetectionTask(PretrainingTask):
    """The sum of the losses of Mask R-CNN: objectness and boxes of proposals; classes, boxes and masks of regions."""

    def forward(self, input: Tensor, target: Sequence[Target]) -> dict[str, Tensor]:
        losses = self.trainable_module(input, target)
        return {"loss": sum(losses.values()), **losses}


class GuidedDetector(nn.Module):
    """A detector, and a 3 x 3 convolution for every map of its pyramid, whose result is compared with a teacher's map.

    Shape: x (B, C, H, W), targets -> losses of the detector, with its adapted maps and objectness
    """

    passes: Tensor

    def __init__(self, student: nn.Module, channels: int, teacher_channels: int, levels: int) -> None:
        super().__init__()
        self.student = student
        self.adapt = nn.ModuleList(nn.Conv2d(channels, teacher_channels, 3, padding=1) for _ in range(levels))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))  # resumes with the run

    def forward(self, x: Tensor, targets: Sequence[Target] | None = None) -> dict[str, Any]:
        if targets is None:
            return self.student(x)
        losses = self.student(x, targets, keep_maps=True)
        self.passes += 1
        losses["maps"] = [adapt(each) for adapt, each in zip(self.adapt, losses["maps"], strict=True)]
        return losses

    def detect(self, x: Tensor, sizes: Sequence[tuple[int, int]] | None = None) -> list[dict[str, Tensor]]:
        """Return the student's detections."""
        return self.student.detect(x, sizes)  # type: ignore[operator]

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """Return the layers of the student; the convolutions belong to its last."""
        layer_of = self.student.group_matcher(coarse)  # type: ignore[operator]
        return lambda name: layer_of(name.removeprefix("student."))


class ProposalDistillationTask(PretrainingTask):
    """Losses of Mask R-CNN, and those of matching the maps and the objectness of a frozen teacher.

    With m the teacher's largest probability of an object at a position, over its anchors, on each map of the pyramid:

        features: sum m (T - adapt(S))^2 / sum m,    objectness: sum m BCE(sigmoid(S), sigmoid(T)) / sum m

    Both are summed over maps and weighted; the weights grow from 0 over the first `ramp` passes. The teacher is in eval
    mode, gets images in its own normalisation, and computes its proposals' head only.

    Source: G2SD (Huang et al., 2023), specific distillation for detection, as TDRL uses it; differs: the teacher's
    drop path is off
    Raises: UserError if the teacher has another number of maps or anchors.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        device: torch.device,
        weights: tuple[float, float] = (0.001, 0.1),
        ramp: int = 500,
    ) -> None:
        check_teacher(student, teacher)
        widths = [model.rpn.head.cls_logits.in_channels for model in (student, teacher)]  # type: ignore[union-attr]
        super().__init__(GuidedDetector(student, widths[0], widths[1], len(teacher.strides)), device)  # type: ignore[arg-type]
        own, theirs = student.pretrained_cfg, teacher.pretrained_cfg
        self.teacher = FrozenTeacher(teacher, own, theirs, device)  # type: ignore[arg-type]
        self.weights, self.ramp = weights, ramp

    def forward(self, input: Tensor, target: Sequence[Target]) -> dict[str, Tensor]:
        losses = self.trainable_module(input, target)
        maps, objectness = losses.pop("maps"), losses.pop("objectness")
        with torch.no_grad():
            teacher = self.teacher.model
            theirs = list(teacher.pyramid_maps(self.teacher.images(input)).values())
            their_objectness = teacher.rpn.head(theirs)[0]
        pairs = [guided_losses(*each) for each in zip(maps, objectness, theirs, their_objectness, strict=True)]
        features, scores = zip(*pairs, strict=True)
        passed = unwrap_model(self.trainable_module).passes - 1
        share = (passed / max(self.ramp, 1)).clamp(max=1.0) if self.ramp else 1.0
        losses["loss_features"] = share * self.weights[0] * torch.stack(features).sum()
        losses["loss_teacher_objectness"] = share * self.weights[1] * torch.stack(scores).sum()
        return {"loss": sum(losses.values()), **losses}


def guided_losses(
    adapted: Tensor, objectness: Tensor, theirs: Tensor, their_objectness: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the losses of one map, weighted by where the teacher sees objects.

    Shape: maps (B, C, H, W), objectness (B, anchors, H, W) -> two numbers
    """
    wanted = their_objectness.float().sigmoid()
    m = wanted.amax(1, keepdim=True)  # (B, 1, H, W)
    features = (m * (theirs.float() - adapted.float()).square()).sum() / m.sum()
    scores = (m * F.binary_cross_entropy_with_logits(objectness.float(), wanted, reduction="none")).sum() / m.sum()
    return features, scores


def check_teacher(student: Any, teacher: Any) -> None:
    """Raise UserError if a teacher is not a detector, or has other maps or anchors than the student."""
    if not hasattr(teacher, "rpn") or not hasattr(teacher, "pyramid_maps"):
        raise UserError(f"task.teacher is a {type(teacher).__name__}; give a Mask R-CNN that was trained on the data")
    if tuple(student.strides) != tuple(teacher.strides):
        raise UserError(
            f"task.teacher has maps with strides {teacher.strides}, the model {student.strides}; give a teacher with "
            "the same patch size"
        )
