"""Losses of masked pre-training: reconstruct hidden patches (MAE), or match a teacher's features (G2SD)."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.task import TrainingTask
from timm.utils import unwrap_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isomorph.checkpoints.autoencoder import load_autoencoder
from isomorph.errors import UserError
from isomorph.lab.distributed import ALONE, Runtime
from isomorph.lab.training.objectives.distillation import FrozenTeacher
from isomorph.lab.training.recipe.fields import MaskPart
from isomorph.lab.training.task import Losses, Objective
from isomorph.layers.modes import eval_mode
from isomorph.models import create
from isomorph.models.input_sizes import training_config
from isomorph.models.masked_autoencoder import MaskedAutoencoder, reconstruction_error
from isomorph.operations import copy_module
from isomorph.terminal_tables import Metrics

# Beta of the smooth L1 loss, as published with G2SD; TDRL does not name its loss.
SMOOTH_L1_BETA = 2.0


class LossModule(TrainingTask):
    """Base class of losses around one trainable module, whose inputs and targets are the subclass's."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__(device=device, verbose=False)
        self.trainable_module: nn.Module = module.to(device)

    def prepare_distributed(
        self, device_ids: list[int] | None = None, **arguments: Any
    ) -> "LossModule":
        """Wrap the trainable module, without the teacher, in DistributedDataParallel."""
        self.trainable_module = DistributedDataParallel(
            self.trainable_module, device_ids=device_ids, **arguments
        )
        return self


class _HiddenPatches(LossModule):
    """Base class of the losses of hidden patches, which hides by noise that is drawn unless it is given."""

    metric: ClassVar[str]

    def autoencoder(self, module: nn.Module) -> MaskedAutoencoder:
        raise NotImplementedError

    def loss(self, module: nn.Module, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def forward(
        self, input: Tensor, target: Tensor | None = None, noise: Tensor | None = None
    ) -> Losses:
        if noise is None:
            noise = self.autoencoder(unwrap_model(self.trainable_module)).draw_noise(input)
        loss, output = self.loss(self.trainable_module, input, noise)
        return {"loss": loss, "output": output}


class ReconstructionLoss(_HiddenPatches):
    """MAE pre-training: mean squared error of the pixels of hidden patches. Source: MAE (He et al., 2022) section 3"""

    metric = "reconstruction"

    def autoencoder(self, module: nn.Module) -> MaskedAutoencoder:
        return module  # type: ignore[return-value]

    def loss(self, module: nn.Module, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        prediction, mask = module(images, noise)
        target = unwrap_model(module).target(images)
        return reconstruction_error(prediction, target, mask), prediction


class AlignedStudent(nn.Module):
    """A student, and a linear layer from its decoder's features to the teacher's; its unused norm and head are frozen.

    Shape: images (B, C, h, w), noise (B, N) -> (B, N, teacher's width)
    """

    def __init__(self, student: MaskedAutoencoder, width: int) -> None:
        super().__init__()
        self.student = student
        self.align = nn.Linear(student.width, width).to(student.mask_token)
        nn.init.xavier_uniform_(self.align.weight)
        nn.init.zeros_(self.align.bias)
        for unused in (student.decoder_norm, student.decoder_pred):
            unused.requires_grad_(False)

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        return self.align(self.student.decoder_features(images, noise))

    def no_weight_decay(self) -> set[str]:
        return {f"student.{name}" for name in self.student.no_weight_decay()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.student.set_grad_checkpointing(enable)


class GenericDistillationLoss(_HiddenPatches):
    """Match the student's decoder features to those of a block of the teacher's decoder, at all patches.

    loss = smoothL1(linear(student's last decoder features), LayerNorm(teacher's features after `block`)), with the same
    patches hidden from both, without the class token. The norm has no parameters; its eps is 1e-6. The teacher is
    frozen and always in eval mode, and gets images in its own normalisation.

    Source: TDRL section 4.1, after G2SD (Huang et al., 2023). TDRL does not specify the loss, beta 2 and the use of
    features before the decoders' norms; these are G2SD's. Differs: G2SD's code aligns the class token too
    Raises: UserError when the teacher's patches differ from the student's, or it lacks the block.
    """

    metric = "alignment"

    def __init__(
        self,
        student: MaskedAutoencoder,
        teacher: MaskedAutoencoder,
        device: torch.device,
        block: int = 4,
    ) -> None:
        _check_pair(student, teacher, block)
        super().__init__(AlignedStudent(student, teacher.width), device)
        own = training_config(student.encoder)
        theirs = training_config(teacher.encoder)
        self.teacher = FrozenTeacher(teacher, own, theirs, device)
        self.block = block
        teacher.ratio = student.ratio

    @torch.no_grad()
    def teacher_features(self, images: Tensor, noise: Tensor) -> Tensor:
        """Return the normalised features of the teacher. Shape: (B, C, h, w), (B, N) -> (B, N, teacher's width)"""
        features = self.teacher.model.decoder_features(
            self.teacher.images(images), noise, self.block
        )
        return F.layer_norm(features, features.shape[-1:], eps=1e-6)

    def autoencoder(self, module: nn.Module) -> MaskedAutoencoder:
        return module.student  # type: ignore[return-value]

    def loss(self, module: nn.Module, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        output = module(images, noise)
        target = self.teacher_features(images, noise)
        return F.smooth_l1_loss(output.to(target.dtype), target, beta=SMOOTH_L1_BETA), output


def _check_pair(student: MaskedAutoencoder, teacher: MaskedAutoencoder, block: int) -> None:
    blocks = len(teacher.decoder_blocks)
    size = tuple(student.encoder.patch_embed.img_size)
    if block < 1 or block > blocks:
        raise UserError(
            f"mask.block {block} must be a block of the teacher's decoder, from 1 to {blocks}"
        )
    try:
        own_grid = student.grid_of(size)
        their_grid = teacher.grid_of(size)
    except UserError as error:
        raise UserError(f"the teacher cannot process the student's images: {error}") from None
    if student.patch_size != teacher.patch_size:
        own = "{}x{}".format(*own_grid)
        theirs = "{}x{}".format(*their_grid)
        raise UserError(
            f"the student has {own} patches per image, the teacher {theirs}; give both the same patch_size"
        )


def untrained_teacher(part: MaskPart, encoder: nn.Module) -> MaskedAutoencoder:
    """Return a teacher with random weights and MAE's decoder; without a name, as large as the student."""
    theirs: Any = encoder
    if part.teacher_model:
        theirs = create(part.teacher_model, pretrained=False)
    theirs = copy_module(theirs)  # an autoencoder changes its encoder's positions
    return MaskedAutoencoder(theirs, heads=part.teacher_heads, mask=part.ratio)


def build_pretraining(
    part: MaskPart, encoder: nn.Module, device: torch.device, rehearses: bool = False
) -> ReconstructionLoss | GenericDistillationLoss:
    """Return the loss of pre-training. If it `rehearses`, a teacher that is not there has random weights.

    Raises: UserError for an unsupported encoder, or an unfit teacher.
    """
    depth, width, heads = part.decoder
    autoencoder = MaskedAutoencoder(encoder, depth, width, heads, part.ratio, part.normalise)
    if part.teacher is None:
        return ReconstructionLoss(autoencoder, device)
    if rehearses and not part.teacher.is_file():
        teacher = untrained_teacher(part, encoder)
    else:
        teacher = load_autoencoder(part.teacher, part.teacher_model, part.teacher_heads, part.ratio)
    return GenericDistillationLoss(autoencoder, teacher, device, part.block)


def pretraining_objective(
    part: MaskPart, encoder: nn.Module, device: torch.device, rehearses: bool = False
) -> Objective:
    """Return the objective of masked pre-training; its result is the encoder. Raises: as `build_pretraining`."""
    loss = build_pretraining(part, encoder, device, rehearses)
    return Objective(
        loss,
        measure=lambda module, loader, runtime: evaluate_pretraining(loss, module, loader, runtime),
        score=lambda metrics: -metrics[loss.metric],
        result=lambda module: loss.autoencoder(module).encoder,
        autoencoder=loss.autoencoder,
    )


@torch.no_grad()
def evaluate_pretraining(
    loss: _HiddenPatches,
    module: nn.Module,
    loader: Iterable[Any],
    runtime: Runtime = ALONE,
) -> Metrics:
    """Return the mean loss in eval mode over the images of all processes; those with the label -1 do not count.

    An image's mask depends only on its position in the data. Raises: UserError when the loader is empty.
    """
    autoencoder = loss.autoencoder(module)
    position = runtime.rank
    total = 0.0
    seen = 0
    device = autoencoder.mask_token.device
    with eval_mode(module):
        for images, labels in runtime.pad_batches(loader):
            height, width = autoencoder.grid_of(tuple(images.shape[-2:]))
            noise = []
            for _ in range(len(images)):
                noise.append(_noise(height * width, position))
                position += runtime.world
            real = len(images)
            if isinstance(labels, Tensor):
                real = int((labels >= 0).sum())
            mean, _ = loss.loss(module, images.to(device), torch.stack(noise).to(device))
            total += mean.item() * real
            seen += real
    parts = runtime.gather((total, seen))
    if not seen:
        raise UserError("the loader has no batches; give it images to evaluate")
    images = sum(images for _, images in parts)
    return {loss.metric: sum(total for total, _ in parts) / images, "images": images}


def _noise(patches: int, position: int) -> Tensor:
    generator = torch.Generator().manual_seed(position)
    return torch.rand(patches, generator=generator)
