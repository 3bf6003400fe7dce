"""Pre-training without labels, as timm tasks: paint the hidden patches, or describe every patch as a teacher does."""

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
from isomorph.models.masked import MaskedAutoencoder, reconstruction_error
from isomorph.training.recipe.mask_fields import MaskPart

SMOOTH_L1_BETA = 2.0
"""Where smooth L1 turns from a square into a line: as published with G2SD; TDRL does not name its loss."""


class PretrainingTask(TrainingTask):
    """What both tasks share: one trainable module, called as (images, noise), and no labels."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__(device=device, verbose=False)
        self.trainable_module: nn.Module = module.to(device)

    def prepare_distributed(self, device_ids: list[int] | None = None, **arguments: Any) -> "PretrainingTask":
        """Wraps the trainable module, and nothing else, in DistributedDataParallel."""
        self.trainable_module = DistributedDataParallel(self.trainable_module, device_ids=device_ids, **arguments)
        return self

    def compile(self, backend: str = "inductor", mode: str | None = None, **arguments: Any) -> nn.Module:
        """Compiles the trainable module, before it is wrapped."""
        self.trainable_module = torch.compile(self.trainable_module, backend=backend, mode=mode, **arguments)  # type: ignore[assignment]
        return self.trainable_module


class MaskedTask(PretrainingTask):
    """Mean squared error of the hidden patches.

    Source: MAE (He et al., 2022) section 3
    """

    def __init__(self, autoencoder: MaskedAutoencoder, device: torch.device) -> None:
        super().__init__(autoencoder, device)

    def forward(self, input: Tensor, target: Tensor | None = None, noise: Tensor | None = None) -> dict[str, Tensor]:
        autoencoder = unwrap_model(self.trainable_module)
        noise = autoencoder.draw(input) if noise is None else noise
        prediction, mask = self.trainable_module(input, noise)
        return {"loss": reconstruction_error(prediction, autoencoder.target(input), mask), "output": prediction}


class AlignedStudent(nn.Module):
    """A student and the one linear layer from the features of its decoder to those of the teacher's.

    What the student does with these features otherwise, norm and pixels, is not trained here and frozen.

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
        """The student's layers, then the linear one."""
        layer_of = self.student.group_matcher(coarse=coarse)
        last = max(layer_of(name) for name, _ in self.student.named_parameters())
        return lambda name: layer_of(name.removeprefix("student.")) if name.startswith("student.") else last + 1

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.student.set_grad_checkpointing(enable)


class GenericDistillationTask(PretrainingTask):
    """The student's decoder describes every patch, visible or hidden, as a block of the teacher's decoder does.

    loss = smoothL1(linear(student's last decoder features), LayerNorm(teacher's features after `block`)), the same
    patches hidden from both, the class token left out. The norm has no weights of its own, eps 1e-6. The teacher is
    frozen and in eval mode throughout; it hides what the student hides, and sees images normalised as it is used to.

    Source: TDRL section 4.1, after G2SD (Huang et al., 2023); the loss, features before the decoders' norms and beta 2,
    which TDRL leaves open, are as published with G2SD; differs: its code aligns the class token too, TDRL does not
    Raises: UserError when the teacher cannot see the student's images patch by patch, lacks the block, or is trained.
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
    def goal(self, images: Tensor, noise: Tensor) -> Tensor:
        """What the teacher makes of the images. Shape: (B, C, h, w), (B, N) -> (B, N, teacher's width)"""
        features = self.teacher.decoder_features(images * self.scale + self.shift, noise, self.block)
        return F.layer_norm(features, features.shape[-1:], eps=1e-6)

    def forward(self, input: Tensor, target: Tensor | None = None, noise: Tensor | None = None) -> dict[str, Tensor]:
        noise = unwrap_model(self.trainable_module).student.draw(input) if noise is None else noise
        output = self.trainable_module(input, noise)
        return {"loss": _alignment_loss(output, self.goal(input, noise)), "output": output}


def _alignment_loss(output: Tensor, goal: Tensor) -> Tensor:
    """Smooth L1: d^2 / 2 beta within beta, |d| - beta / 2 beyond, in the mean."""
    return F.smooth_l1_loss(output.to(goal.dtype), goal, beta=SMOOTH_L1_BETA)


def _check_pair(student: MaskedAutoencoder, teacher: MaskedAutoencoder, block: int) -> None:
    """Raises: UserError when a teacher cannot teach this student."""
    blocks, size = len(teacher.decoder_blocks), tuple(student.encoder.patch_embed.img_size)
    if block < 1 or block > blocks:
        raise UserError(f"the teacher's decoder has blocks 1 to {blocks}, not {block}; choose one (mask.block)")
    shared = {id(p) for p in student.parameters()} & {id(p) for p in teacher.parameters()}
    if shared:
        raise UserError(
            "student and teacher share parameters: the teacher would be trained; give it weights of its own"
        )
    if student.encoder.in_chans != teacher.encoder.in_chans:
        channels = student.encoder.in_chans, teacher.encoder.in_chans
        raise UserError("the student's images have {} channels, the teacher's {}".format(*channels))
    try:
        grids = student.grid_of(size), teacher.grid_of(size)
    except UserError as error:
        raise UserError(f"the teacher cannot see the student's images: {error}") from None
    if student.patch_size != teacher.patch_size:
        sizes = ["x".join(map(str, grid)) for grid in grids]
        raise UserError(
            f"the student cuts images into {sizes[0]} patches, the teacher into {sizes[1]}: give both one patch_size"
        )


def _renormalisation(student: MaskedAutoencoder, teacher: MaskedAutoencoder) -> tuple[Tensor, Tensor]:
    """What turns the student's images into the teacher's: scale std_s / std_t, shift (mean_s - mean_t) / std_t.

    Shape: -> (1, C, 1, 1) each, or of one channel where nothing changes
    Raises: UserError when a config tells the mean of other channels than the images have.
    """
    known = [torch.tensor([m.pretrained_cfg[key] for key in ("mean", "std")]) for m in (student, teacher)]
    if torch.equal(*known):
        return torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    channels = student.encoder.in_chans
    if any(stats.shape[1] != channels for stats in known):
        raise UserError(f"images of {channels} channels need a mean and std of as many, in both pretrained_cfg")
    (mean_s, std_s), (mean_t, std_t) = (stats.view(2, 1, channels, 1, 1) for stats in known)  # (1, C, 1, 1) each
    return std_s / std_t, (mean_s - mean_t) / std_t


def build_pretraining(part: MaskPart, encoder: nn.Module, device: torch.device) -> PretrainingTask:
    """The task that the fields describe, for a ViT that shall be pre-trained.

    Raises: UserError when the encoder cannot be, or the teacher cannot be read or teach it.
    """
    depth, width, heads = part.decoder
    autoencoder = MaskedAutoencoder(encoder, depth, width, heads, part.ratio, part.normalise)
    if part.teacher is None:
        return MaskedTask(autoencoder, device)
    teacher = load_autoencoder(part.teacher, part.teacher_model, part.teacher_heads, part.ratio)
    return GenericDistillationTask(autoencoder, teacher, device, part.block)


def _fixed_noise(places: Iterable[int], patches: int, seed: int) -> Tensor:
    """Noise that depends on the seed and each image's place in the data alone. Shape: -> (images, patches)"""
    seeds = ((seed * 1_000_003 + place) % 2**32 for place in places)  # a generator reads 32 bits only
    generators = (torch.Generator().manual_seed(each) for each in seeds)
    return torch.stack([torch.rand(patches, generator=generator) for generator in generators])  # (images, patches)


def _count_images(images: Tensor, labels: Any = None, *_: Any) -> int:
    """Images of a batch that count: all, but for those labelled -1."""
    return int((labels >= 0).sum()) if isinstance(labels, Tensor) else len(images)


def _masked_batches(
    autoencoder: MaskedAutoencoder, loader: Iterable[Any], seed: int, places: Iterator[int]
) -> Iterable[tuple[Tensor, Tensor, int]]:
    """Images with their fixed noise, on the model's device, and how many count (those labelled -1 only fill up).

    `places` are those of the loader's images in the data.

    Raises: UserError when there are none.
    """
    device, images = autoencoder.mask_token.device, None
    for images, *labels in loader:
        height, width = autoencoder.grid_of(tuple(images.shape[-2:]))
        noise = _fixed_noise(islice(places, len(images)), height * width, seed)
        yield images.to(device, non_blocking=True), noise.to(device, non_blocking=True), _count_images(images, *labels)
    if images is None:
        raise UserError("there is nothing to evaluate: the loader gave no batch")


@torch.no_grad()
def evaluate_reconstruction(
    model: MaskedAutoencoder, loader: Iterable[Any], seed: int = 0, places: Iterator[int] | None = None
) -> dict[str, float]:
    """How well hidden patches are painted: the mean loss, in eval mode; an image's mask follows from its place.

    `places` are those of the loader's images in the data, by default 0, 1, 2 ...

    Raises: UserError when the loader gave no batch.
    """
    total, seen = 0.0, 0
    with eval_mode(model):
        for images, noise, real in _masked_batches(model, loader, seed, places or count(0)):
            total += model.loss(images, noise).item() * real
            seen += real
    return {"reconstruction": total / seen, "images": seen}


@torch.no_grad()
def evaluate_alignment(
    module: AlignedStudent,
    task: GenericDistillationTask,
    loader: Iterable[Any],
    seed: int = 0,
    places: Iterator[int] | None = None,
) -> dict[str, float]:
    """How well patches are described: the mean distillation loss in eval mode, of trained or averaged weights.

    Raises: UserError when the loader gave no batch.
    """
    total, seen = 0.0, 0
    with eval_mode(module):
        for images, noise, real in _masked_batches(module.student, loader, seed, places or count(0)):
            total += _alignment_loss(module(images, noise), task.goal(images, noise)).item() * real
            seen += real
    return {"alignment": total / seen, "images": seen}
