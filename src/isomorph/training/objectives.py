"""What a run minimises, as timm tasks: a task owns the model, its loss and its averaged weights."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from timm.task import ClassificationTask, LogitDistillationTask, TokenDistillationTask, TrainingTask
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.models.dense_head import Box
from isomorph.training.objective_parts import DistillPart, TokenLabelPart
from isomorph.training.parts import AugmentPart


def criterion(augment: AugmentPart, loss: str = "softmax") -> nn.Module:
    """Cross-entropy of softmax or sigmoids: smoothed for plain labels, soft where images are mixed."""
    if loss == "sigmoid":
        return BinaryCrossEntropy(augment.smoothing, sum_classes=True)
    return SoftTargetCrossEntropy() if augment.mixes else nn.CrossEntropyLoss(label_smoothing=augment.smoothing)


def classification(model: nn.Module, augment: AugmentPart, loss: str, device: torch.device) -> ClassificationTask:
    """Labels alone."""
    return ClassificationTask(model, criterion=criterion(augment, loss), device=device, verbose=False)


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


def soft_labels(target: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Labels as probabilities; mixed ones are that already. Shape: (B,) or (B, num_classes) -> (B, num_classes)"""
    if target.ndim == 2:
        return target
    return F.one_hot(target, num_classes) * (1 - smoothing) + smoothing / num_classes


def draw_box(grid_size: tuple[int, int], beta: float) -> Box:
    """A box of 1 - lambda of the grid, lambda from Beta(beta, beta), its centre anywhere; cut off at the rim."""
    lam = torch.distributions.Beta(beta, beta).sample().item()
    sides = [int(size * math.sqrt(1 - lam)) for size in grid_size]
    centres = [int(torch.randint(size, ())) for size in grid_size]
    (top, bottom), (left, right) = (
        (max(centre - side // 2, 0), min(centre + side // 2, size))
        for centre, side, size in zip(centres, sides, grid_size, strict=True)
    )
    return Box(top, bottom, left, right)


class TokenLabelTask(ClassificationTask):
    """CE(class token, label) + weight mean over patches of CE(patch, label), boxes of patches mixed between images.

    A patch's label is that of the image it comes from; the class token's is mixed by area.

    Source: Jiang et al. (2021), as the Refiner code trains without label maps; differs: none are read here yet
    """

    def __init__(self, model: nn.Module, part: TokenLabelPart, smoothing: float, device: torch.device) -> None:
        super().__init__(model, criterion=SoftTargetCrossEntropy(), device=device, verbose=False)
        self.part, self.smoothing = part, smoothing
        self.num_classes: int = model.num_classes  # type: ignore[assignment]
        self.grid_of: Any = model.patch_embed.dynamic_feat_size  # type: ignore[union-attr]

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        labels = soft_labels(target, self.num_classes, self.smoothing)
        grid_size = self.grid_of(tuple(input.shape[-2:]))
        box = draw_box(grid_size, self.part.beta) if self.part.mix else Box(0, 0, 0, 0)
        logits, tokens = self.trainable_module(input, tokens=True, box=box)
        inside = box.mask(grid_size, input.device).flatten()  # (H W,)
        share = inside.float().mean()
        mixed = torch.lerp(labels, labels.flip(0), share)
        dense = torch.where(inside[:, None], labels.flip(0)[:, None], labels[:, None])  # (B, H W, num_classes)
        image, patches = self.criterion(logits, mixed), self.criterion(tokens.flatten(0, 1), dense.flatten(0, 1))
        return {"loss": image + self.part.weight * patches, "output": logits, "task_loss": image, "token_loss": patches}


def token_labelling(
    model: nn.Module, part: TokenLabelPart, augment: AugmentPart, device: torch.device
) -> TokenLabelTask:
    """Labels for the image and for each of its patches.

    Raises: UserError when the model does not classify its patches.
    """
    if getattr(model, "aux_head", None) is None:
        raise UserError("token_labels needs a model that classifies its patches: a refined_vit_* with dense_head=True")
    return TokenLabelTask(model, part, augment.smoothing, device)


def distillation(
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
        criterion=criterion(augment, loss),
        task_loss_weight=1 - part.share,
        temperature=part.temperature,
        device=device,
        verbose=False,
    )
    if part.token:
        refuse_tokenless(model)
        return TokenDistillationTask(model, teacher, distill_type=part.kind, distill_loss_weight=part.share, **shared)
    kind = HardDistillationTask if part.kind == "hard" else LogitDistillationTask
    return kind(model, teacher, **shared)


def refuse_tokenless(model: nn.Module) -> None:
    """Raises: UserError when the model has no distillation token."""
    if not hasattr(model, "set_distilled_training"):
        raise UserError(
            f"{type(model).__name__} has no distillation token: leave distill.token off, or train a deit_*_distilled_*"
        )


@torch.no_grad()
def refuse_teacher(teacher: nn.Module, model: nn.Module) -> None:
    """Raises: UserError when the teacher cannot see the images of the run, found out before it starts."""
    size = model.pretrained_cfg["input_size"]  # type: ignore[index]
    try:
        teacher.eval()(torch.zeros(1, *size))
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the teacher cannot take the run's images of {'x'.join(map(str, size))}: {reason}") from None


def build_mixup(augment: AugmentPart, num_classes: int) -> Mixup | None:
    """timm's mixup and cutmix, or None where neither is on."""
    if not augment.mixes:
        return None
    return Mixup(augment.mixup, augment.cutmix, label_smoothing=augment.smoothing, num_classes=num_classes)
