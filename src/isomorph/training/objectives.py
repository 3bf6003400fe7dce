"""What a run minimises, as timm tasks: a task owns the model, its loss and its averaged weights."""

import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.task import ClassificationTask
from torch import nn

from isomorph.training.recipe import AugmentPart


def classification(model: nn.Module, augment: AugmentPart, device: torch.device) -> ClassificationTask:
    """Cross-entropy: smoothed for plain labels, soft where images are mixed."""
    if augment.mixes:
        return ClassificationTask(model, criterion=SoftTargetCrossEntropy(), device=device, verbose=False)
    return ClassificationTask(
        model, criterion=nn.CrossEntropyLoss(label_smoothing=augment.smoothing), device=device, verbose=False
    )


def build_mixup(augment: AugmentPart, num_classes: int) -> Mixup | None:
    """timm's mixup and cutmix, or None where neither is on."""
    if not augment.mixes:
        return None
    return Mixup(augment.mixup, augment.cutmix, label_smoothing=augment.smoothing, num_classes=num_classes)
