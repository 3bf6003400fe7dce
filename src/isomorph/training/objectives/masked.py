"""Masked pre-training as timm tasks: reconstruct hidden patches (MAE), or match a teacher's features (G2SD)."""

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

import torch
import torch.nn.functional as F
from timm.task import TrainingTask
from timm.utils import unwrap_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isomorph.checkpoints.autoencoder import load_autoencoder
from isomorph.errors import UserError
from isomorph.layers.eval_mode import eval_mode
from isomorph.models.masked_autoencoder import MaskedAutoencoder, reconstruction_error
from isomorph.training.objectives.renormalisation import renormalisation
from isomorph.training.recipe.mask_fields import MaskPart

SMOOTH_L1_BETA = 2.0
"""Beta of the smooth L1 loss, as published with G2SD; TDRL does not name its loss."""


class PretrainingTask(TrainingTask):
    """Base class of tasks without labels, with one trainable module, called as (images, noise)."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__(device=device, verbose=False)
        self.trainable_module: nn.Module = module.to(device)

    def prepare_distributed(self, device_ids: list[int] | None = None, **arguments: Any) -> "PretrainingTask":
        """Wrap the trainable module, without the teacher, in DistributedDataParallel."""
        self.trainable_module = DistributedDataParallel(self.trainable_module, device_ids=device_ids, **arguments)
        return self

    def compile(self, backend: str = "inductor", mode: str | None = None, **arguments: Any) -> nn.Module:
        """Compile the trainable module, before it is wrapped."""
        self.trainable_module = torch.compile(self.trainable_module, backend=backend, mode=mode, **arguments)  # type: ignore[assignment]
        return self.trainable_module


class MaskedTask(PretrainingTask):
    """MAE pre-training: mean squared error of the pixels of hidden patches.

    Source: MAE (He et al., 2022) section 3
    """

    def __init__(self, autoencoder: MaskedAutoencoder, device: torch.device) -> None:
        super().__init__(autoencoder, device)

    def forward(self, input: Tensor, target: Tensor | None = None, noise: Tensor | None = None) -> dict[str, Tensor]:
        autoencoder = unwrap_model(self.trainable_module)
        noise = autoencoder.draw_noise(input) if noise is None else noise
        prediction, mask = self.trainable_module(input, noise)
        return {"loss": reconstruction_error(prediction, autoencoder.target(input), mask), "output": prediction}


class AlignedStudent(nn.Module):
    """A student, and a linear layer from the features of its decoder to those of the teacher's decoder.

    The student's final norm and pixel head (`decoder_norm`, `decoder_pred`) are unused and frozen.

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

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return {f"student.{name}" for name in self.student.no_weight_decay()}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> Any:
        """Return a function from parameter names to layers: those of the student, then the linear layer."""
        layer_of = self.student.group_matcher(coarse=coarse)
        last = max(layer_of(name) for name, _ in self.student.named_parameters())
        return lambda name: layer_of(name.removeprefix("student.")) if name.startswith("student.") else last + 1

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.student.set_grad_checkpointing(enable)


class GenericDistillationTask(PretrainingTask):
    """Match the student's decoder features to those of a block of the teacher's decoder, at all patches.

    loss = smoothL1(linear(student's last decoder features), LayerNorm(teacher's features after `block`)), with the same
    patches hidden from both, without the class token. The norm has no parameters; its eps is 1e-6. The teacher is
    frozen and always in eval mode, and gets images in its own normalisation.

    Source: TDRL section 4.1, after G2SD (Huang et al., 2023). TDRL does not specify the loss, beta 2 and the use of
    features before the decoders' norms; these are G2SD's. Differs: G2SD's code aligns the class token too
    Raises: UserError when the teacher's patches differ from the student's, it lacks the block, or it shares parameters.
    """

    def __init__(
        self, student: MaskedAutoencoder, teacher: MaskedAutoencoder, device: torch.device, block: int = 4
    ) -> None:
        _check_pair(student, teacher, block)
        super().__init__(AlignedStudent(student, teacher.width), device)
        self.teacher, self.block = teacher.requires_grad_(False).eval().to(device), block
        self.teacher.ratio = student.ratio
        scale, shift = _renormalisation(student, teacher)
        self.register_buffer("scale", scale.to(device), persistent=False)
        self.register_buffer("shift", shift.to(device), persistent=False)

    def train(self, mode: bool = True) -> "GenericDistillationTask":
        super().train(mode)
        self.teacher.eval()
        return self

    @torch.no_grad()
    def teacher_features(self, images: Tensor, noise: Tensor) -> Tensor:
        """Return the normalised features of the teacher. Shape: (B, C, h, w), (B, N) -> (B, N, teacher's width)"""
        features = self.teacher.decoder_features(images * self.scale + self.shift, noise, self.block)
        return F.layer_norm(features, features.shape[-1:], eps=1e-6)

    def forward(self, input: Tensor, target: Tensor | None = None, noise: Tensor | None = None) -> dict[str, Tensor]:
        noise = unwrap_model(self.trainable_module).student.draw_noise(input) if noise is None else noise
        output = self.trainable_module(input, noise)
        return {"loss": _alignment_loss(output, self.teacher_features(input, noise)), "output": output}


def _alignment_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean smooth L1 loss: d^2 / (2 beta) for |d| < beta, else |d| - beta / 2."""
    return F.smooth_l1_loss(output.to(target.dtype), target, beta=SMOOTH_L1_BETA)


def _check_pair(student: MaskedAutoencoder, teacher: MaskedAutoencoder, block: int) -> None:
    """Raise UserError when the teacher does not fit the student."""
    blocks, size = len(teacher.decoder_blocks), tuple(student.encoder.patch_embed.img_size)
    if block < 1 or block > blocks:
        raise UserError(f"mask.block {block} must be a block of the teacher's decoder, from 1 to {blocks}")
    shared = {id(p) for p in student.parameters()} & {id(p) for p in teacher.parameters()}
    if shared:
        raise UserError(
            "student and teacher share parameters, so the teacher would be trained; give it separate weights"
        )
    if student.encoder.in_chans != teacher.encoder.in_chans:
        channels = student.encoder.in_chans, teacher.encoder.in_chans
        raise UserError("the student's images have {} channels, the teacher's {}".format(*channels))
    try:
        grids = student.grid_of(size), teacher.grid_of(size)
    except UserError as error:
        raise UserError(f"the teacher cannot process the student's images: {error}") from None
    if student.patch_size != teacher.patch_size:
        sizes = ["x".join(map(str, grid)) for grid in grids]
        raise UserError(
            f"the student has {sizes[0]} patches per image, the teacher {sizes[1]}; give both the same patch_size"
        )


def _renormalisation(student: MaskedAutoencoder, teacher: MaskedAutoencoder) -> tuple[Tensor, Tensor]:
    """Return the scale and shift from the student's to the teacher's images.

    Shape: -> (1, C, 1, 1) each, or (1, 1, 1, 1) if the normalisations are the same
    Raises: UserError when a pretrained_cfg has a mean and std of another number of channels.
    """
    configs = [torch.tensor([m.pretrained_cfg[key] for key in ("mean", "std")]) for m in (student, teacher)]
    if torch.equal(*configs):
        return torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    channels = student.encoder.in_chans
    if any(stats.shape[1] != channels for stats in configs):
        raise UserError(
            f"images have {channels} channels; give student and teacher mean and std of {channels} in pretrained_cfg"
        )
    scale, shift = renormalisation(student.pretrained_cfg, teacher.pretrained_cfg)
    return scale[None], shift[None]


def build_pretraining(part: MaskPart, encoder: nn.Module, device: torch.device) -> PretrainingTask:
    """Return the pre-training task that the fields describe, for a ViT encoder.

    Raises: UserError when the encoder is not supported, or the teacher cannot be read or does not fit.
    """
    depth, width, heads = part.decoder
    autoencoder = MaskedAutoencoder(encoder, depth, width, heads, part.ratio, part.normalise)
    if part.teacher is None:
        return MaskedTask(autoencoder, device)
    teacher = load_autoencoder(part.teacher, part.teacher_model, part.teacher_heads, part.ratio)
    return GenericDistillationTask(autoencoder, teacher, device, part.block)


def _fixed_noise(positions: Iterable[int], patches: int, seed: int) -> Tensor:
    """Return noise that depends only on the seed and each image's position in the data. Shape: -> (images, patches)"""
    seeds = ((seed * 1_000_003 + position) % 2**32 for position in positions)  # generators take 32-bit seeds
    generators = (torch.Generator().manual_seed(each) for each in seeds)
    return torch.stack([torch.rand(patches, generator=generator) for generator in generators])  # (images, patches)


def _count_images(images: Tensor, labels: Any = None, *_: Any) -> int:
    """Return the number of images in a batch, without padding (labelled -1)."""
    return int((labels >= 0).sum()) if isinstance(labels, Tensor) else len(images)


def _masked_batches(
    autoencoder: MaskedAutoencoder, loader: Iterable[Any], seed: int, positions: Iterator[int]
) -> Iterable[tuple[Tensor, Tensor, int]]:
    """Yield images with their fixed noise, on the model's device, and their number without padding (labelled -1).

    `positions` are those of the loader's images in the data.

    Raises: UserError when the loader is empty.
    """
    device, images = autoencoder.mask_token.device, None
    for images, *labels in loader:
        height, width = autoencoder.grid_of(tuple(images.shape[-2:]))
        noise = _fixed_noise(islice(positions, len(images)), height * width, seed)
        yield images.to(device, non_blocking=True), noise.to(device, non_blocking=True), _count_images(images, *labels)
    if images is None:
        raise UserError("the loader has no batches; give it images to evaluate")


@torch.no_grad()
def evaluate_reconstruction(
    model: MaskedAutoencoder, loader: Iterable[Any], seed: int = 0, positions: Iterator[int] | None = None
) -> dict[str, float]:
    """Return the mean reconstruction loss in eval mode; an image's mask depends only on its position and the seed.

    `positions` are those of the loader's images in the data, by default 0, 1, 2 ...

    Raises: UserError when the loader is empty.
    """
    total, seen = 0.0, 0
    with eval_mode(model):
        for images, noise, real in _masked_batches(model, loader, seed, positions or count(0)):
            total += model.loss(images, noise).item() * real
            seen += real
    return {"reconstruction": total / seen, "images": seen}


@torch.no_grad()
def evaluate_alignment(
    module: AlignedStudent,
    task: GenericDistillationTask,
    loader: Iterable[Any],
    seed: int = 0,
    positions: Iterator[int] | None = None,
) -> dict[str, float]:
    """Return the mean distillation loss in eval mode, of the trained or averaged module.

    Raises: UserError when the loader is empty.
    """
    total, seen = 0.0, 0
    with eval_mode(module):
        for images, noise, real in _masked_batches(module.student, loader, seed, positions or count(0)):
            total += _alignment_loss(module(images, noise), task.teacher_features(images, noise)).item() * real
            seen += real
    return {"alignment": total / seen, "images": seen}
