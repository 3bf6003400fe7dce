"""Groups of recipe fields: task, data, augmentation, optimiser, annealing, scale, objectives; the types of fields."""

import difflib
import math
import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from timm.data import create_transform
from timm.optim import list_optimizers

from isomorph.lab.data.formats.registry import locate_folder
from isomorph.lab.data.streams import IMAGE_SOURCES, STREAMS
from isomorph.lab.training.recipe.tasks import TASKS, find_task, task_names
from isomorph.surgery import Anneal

# Values by name: fields of a recipe, arguments of a function.
Fields = dict[str, Any]
Positive = Annotated[float, Field(gt=0)]
# Learning rate of a parameter group: a number, or a multiple of lr like `10x` (`OptimPart.resolve_multiple`).
PartRate = Annotated[float, Field(gt=0, validate_default=True)]
NotNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
# Between 0 and 1, both excluded.
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]


def _as_path(value: Any) -> Any:
    if value == "":
        raise ValueError("is empty; give a path, or null")
    return str(value) if isinstance(value, int | float) else value


File = Annotated[Path, BeforeValidator(_as_path)]
Count = Annotated[int, Field(ge=1, le=10**9)]
# Faults to skip before the run stops.
AllowedFaults = Annotated[int, Field(ge=0, le=10**9)]
Epochs = Annotated[int, Field(ge=1, le=100_000)]
Size = Annotated[int, Field(ge=1, le=2**14)]
# A number of epochs, or a list of epochs; messages leave out parts of a place that begin with a tilde.
KeptEpochs = Annotated[
    Annotated[Count, Tag("~number")] | Annotated[list[Count], Field(min_length=1), Tag("~list")],
    Discriminator(lambda value: "~list" if isinstance(value, list) else "~number"),
]
Padding = Annotated[
    Annotated[int, Field(ge=0, le=2**14), Tag("~number")]
    | Annotated[Literal["auto"], Tag("~text")],
    Discriminator(lambda value: "~text" if isinstance(value, str) else "~number"),
]


def both_sides(size: Any) -> Any:
    """Return two sides for one number, and for text like 224,320 or 224x320."""
    if isinstance(size, str):
        sides = re.fullmatch(r"(\d+)\s*[x,]\s*(\d+)", size.strip())
        if sides:
            return [int(sides[1]), int(sides[2])]
    if isinstance(size, int) and not isinstance(size, bool):
        return [size, size]
    return size


Globs = Annotated[
    list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]

# Learning rate, and multiple of lr, above which a number is probably a multiple without its x.
MAX_WRITTEN_RATE = 10.0
MAX_MULTIPLE = 5000.0

# Optimisers of timm (beginnings of their names) that the training loop or its snapshots do not support.
UNSUPPORTED_OPTIMIZERS = ("adahessian", "kron")


class Part(BaseModel):
    """Base class of the groups of fields."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        frozen=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
    )

    @classmethod
    def documented_fields(cls) -> dict[str, FieldInfo]:
        """Return the fields by name, as `--help` lists them."""
        return cls.model_fields


def part_of(hint: Any) -> type[Part] | None:
    """Return the group of fields that a type stands for; None for the type of a single field."""
    for alternative in (hint, *get_args(hint)):
        if isinstance(alternative, type) and issubclass(alternative, Part):
            return alternative
    return None


class TaskPart(Part):
    """Task to train for, other than image classification; its fields follow."""

    model_config = ConfigDict(extra="allow")

    name: str
    """Name of the task, e.g. segmentation."""

    @model_validator(mode="before")
    @classmethod
    def check_own_fields(cls, values: Any) -> Any:
        """Check the fields of the named task, and add its defaults."""
        if not isinstance(values, dict) or not isinstance(values.get("name"), str):
            return values  # which the check of `name` reports
        name = values["name"]
        given = {field: value for field, value in values.items() if field != "name"}
        options = find_task(name).fields.model_validate(given)
        return {"name": name, **options.model_dump()}

    @cached_property
    def task(self) -> Any:
        task_class = find_task(self.name)
        return task_class(task_class.fields.model_validate(self.model_extra or {}))

    @classmethod
    def documented_fields(cls) -> dict[str, FieldInfo]:
        """Return the name, and the fields of all tasks, with each task's description."""
        fields: dict[str, FieldInfo] = dict(cls.model_fields)
        for task in TASKS:
            for name, field in find_task(task).fields.model_fields.items():
                description = f"{task}: {field.description}"
                if name in fields:
                    description = f"{fields[name].description} {description}"
                default = field.get_default(call_default_factory=True)
                fields[name] = FieldInfo(annotation=Any, default=default, description=description)
        return fields


class DataPart(Part):
    """The data to train and test on."""

    source: str = "imagefolder"
    """imagefolder, tar, webdataset, huggingface, huggingface-stream (stores nothing), cifar10, cifar100 or digits."""
    root: File | None = None
    """Folder of the data, or its name on the Hugging Face Hub; by default $ISOMORPH_DATA, else ./data."""
    images: Count | None = None
    """Number of training images, for a stream that does not report it."""
    fraction: Fraction = 1.0
    """Fraction of the images of each class to train on."""
    split: OpenFraction | None = None
    """Fraction of the images of each class to test on, for a folder without test images of its own."""
    test_images: Count | None = None
    """Number of test images to evaluate on, drawn once and the same for every seed; by default all."""
    draw: Literal["seeded", "first"] = "seeded"
    """Images of a fraction: seeded draws at random with `seed`; first takes the first in sorted order (ConViT)."""
    classes: Count | None = None
    """Train and test on the first N classes only."""
    size: (
        Annotated[list[Size], Field(min_length=2, max_length=2), BeforeValidator(both_sides)] | None
    ) = None
    """Height and width of the input, e.g. [224, 320]; by default the model's own."""
    test_crop: Literal["center", "whole"] | None = None
    """Test images: center crops them, whole squashes them to the input size; by default as in the model's config."""
    crop_pct: Fraction | None = None
    """Side of the centre crop of test images as a fraction of the shorter side; by default as in the model's config."""
    batch_size: Annotated[int, Field(ge=2, le=2**20)] = 128
    """Images per step, over all processes; even in each process and accumulation step with mixup or cutmix."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Data-loading processes per training process; 0 loads in the training process."""
    unreadable: AllowedFaults = 0
    """Unreadable images to replace by others before the run stops."""

    @classmethod
    def named(cls, data: str) -> Fields:
        """Return the fields for the name of a source, or for a folder of images. Raises: UserError for neither."""
        if data in IMAGE_SOURCES:
            return {"source": data}
        form, root = locate_folder(data)
        return {"source": form, "root": root}

    @model_validator(mode="before")
    @classmethod
    def accept_name(cls, values: Any) -> Any:
        """Accept the name of a source, or a folder of images, in place of fields."""
        if isinstance(values, str):
            return cls.named(values)
        return values

    @field_validator("source")
    @classmethod
    def check_source(cls, source: str) -> str:
        if source not in IMAGE_SOURCES and not task_names(source):
            raise ValueError(
                f"{source!r} is not a data source; choose one of {', '.join(IMAGE_SOURCES)}"
            )
        return source

    @property
    def streamed(self) -> bool:
        return self.source in STREAMS

    @model_validator(mode="after")
    def check_fields(self) -> "DataPart":
        if self.images and not self.streamed:
            raise ValueError(
                f"images is for a stream, and {self.source} is not one; to train on fewer images, give fraction"
            )
        if self.crop_pct and self.test_crop == "whole":
            raise ValueError(
                "crop_pct has no effect with test_crop=whole; give test_crop=center too, or leave crop_pct out"
            )
        if self.streamed and (self.fraction < 1 or self.split or self.classes or self.test_images):
            raise ValueError(
                f"{self.source} is a stream, without fraction, split, classes or test_images; use huggingface for these"
            )
        return self


def magnitudes(transform: Any) -> list[tuple[float, float]]:
    """Return, for every operation of an auto-augment policy, its magnitude and the largest that timm applies."""
    pairs = []
    for step in transform.transforms:
        for operation in getattr(step, "ops", ()):
            if hasattr(operation, "magnitude_max"):
                pairs.append((operation.magnitude, operation.magnitude_max or 10))
    return pairs


class AugmentPart(Part):
    """Augmentation of the training images (timm's transforms)."""

    crop_padding: Padding = 0
    """Padding in pixels before a random crop; 0 is resized crops instead; auto is size / 8 for up to 64 px, else 0."""
    scale: tuple[Fraction, Fraction] = (0.08, 1.0)
    """Smallest and largest area of a random resized crop, as fractions of the image."""
    hflip: Probability = 0.5
    """Probability of a horizontal flip."""
    auto_augment: str | None = None
    """timm's auto-augment policy, e.g. rand-m9-mstd0.5-inc1; a magnitude m above 10 needs -mmax, e.g. -mmax30."""
    color_jitter: NotNegative = 0.0
    """Strength of colour jitter; timm ignores it with auto_augment."""
    erasing: Probability = 0.0
    """Probability of random erasing."""
    mixup: NotNegative = 0.0
    """Mixup alpha; 0 is off."""
    cutmix: NotNegative = 0.0
    """Cutmix alpha; 0 is off."""
    smoothing: Rate = 0.0
    """Label smoothing."""
    repeats: Annotated[int, Field(ge=1, le=1024)] = 1
    """Repeated augmentation: N samples of each image, from 1/N of the images per epoch (DeiT: 3)."""
    small_sizes: list[Size] | None = None
    """Sides of smaller training images at first, e.g. [160, 192]; batches are resized on the device (MobileOne)."""
    small_epochs: list[Positive] | None = None
    """Epochs until which images have the sides of `small_sizes`, in ascending order, e.g. [37, 112]."""

    @model_validator(mode="after")
    def check_small_sizes(self) -> "AugmentPart":
        sizes = self.small_sizes or []
        epochs = self.small_epochs or []
        if len(sizes) != len(epochs) or epochs != sorted(epochs):
            raise ValueError("small_sizes needs as many small_epochs, in ascending order")
        return self

    def side_at(self, epoch: float) -> int | None:
        """Return the side of the training images in an epoch, from 0; None for that of the data."""
        for until, side in zip(self.small_epochs or (), self.small_sizes or (), strict=True):
            if epoch < until:
                return side
        return None

    @field_validator("scale")
    @classmethod
    def check_order(cls, scale: tuple[float, float]) -> tuple[float, float]:
        if scale[0] > scale[1]:
            raise ValueError("give the smallest area first")
        return scale

    @field_validator("auto_augment")
    @classmethod
    def check_policy(cls, policy: str | None) -> str | None:
        try:
            transform = create_transform(32, is_training=True, auto_augment=policy)
        except (
            Exception
        ) as error:  # timm asserts, or fails on a number, depending on where the policy is wrong
            raise ValueError(
                "timm cannot parse the policy; use one like rand-m9-mstd0.5-inc1 or augmix-m5-w3"
            ) from error
        for magnitude, largest in magnitudes(transform):
            if magnitude > largest:
                more = ""
                if str(policy).startswith("rand"):
                    more = f"add -mmax{magnitude:g} to have it, or "
                raise ValueError(
                    f"timm clamps the magnitude {magnitude:g} to {largest:g}; {more}write m{largest:g}"
                )
        return policy

    def padding_at(self, height: int, width: int) -> int:
        """Return `crop_padding` at an image size; auto, as resizing blurs a small image, which moves BatchNorm."""
        if self.crop_padding != "auto":
            return self.crop_padding
        if max(height, width) > 64:
            return 0
        return min(height, width) // 8

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0


class OptimPart(Part):
    """Optimiser and learning-rate schedule."""

    name: str = "adamw"
    """Name of a timm optimiser; sgd has Nesterov's momentum, momentum the plain one."""
    lr: Positive = 1e-4
    """Peak learning rate."""
    weight_decay: NotNegative = 0.05
    """Weight decay of matrices and filters; biases, norms, gates, centres and localities have none."""
    gate_lr: PartRate = "1000x"  # type: ignore[assignment]
    """Peak learning rate of the gates, without weight decay: a number, or a multiple of lr like 1000x."""
    position_lr: PartRate = "1x"  # type: ignore[assignment]
    """Peak learning rate of centres and localities, a number or a multiple of lr; a short run needs a higher one."""
    branch_lr: Positive | None = None
    """Peak learning rate of pyramid layers that a BatchNorm follows, a number or a multiple of lr; by default lr."""
    gamma_lr: PartRate = "1x"  # type: ignore[assignment]
    """Peak learning rate of the gammas of inserted blocks (iso.insert), a number or a multiple of lr."""
    min_weight_decay: NotNegative | None = None
    """Weight decay at the end of the run, to which it falls as a cosine (MobileOne); by default it stays."""
    layer_decay: Fraction = 1.0
    """Factor on the learning rate from each layer to the one before it; the head has the full rate."""
    momentum: Rate = 0.9
    """Momentum, of optimisers that have one."""
    betas: tuple[Rate, Rate] | None = None
    """Adam's two betas, e.g. [0.9, 0.95] as in MAE's pre-training; by default the optimiser's."""
    clip_grad: Positive | None = None
    """Maximum norm of the gradient of all parameters together."""
    schedule: Literal["cosine", "linear", "step", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    milestones: list[Positive] = []
    """When the schedule step divides the rate by 10: epochs, or steps in a run with iterations, from the first on."""
    schedule_from: Literal["peak", "start"] = "peak"
    """peak: the decay begins when the warm-up ends; start: at the first step (timm's default, as in DeiT)."""
    warmup_epochs: NotNegative = 0.0
    """Epochs of linear warm-up; may be a fraction."""
    warmup_iterations: Count | None = None
    """Steps of linear warm-up, instead of warmup_epochs."""
    warmup_start: Fraction = 0.01
    """Learning rate at the start of the warm-up, as a fraction of lr."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the schedule; groups with a rate of their own end at the same fraction of theirs."""

    @field_validator("gate_lr", "position_lr", "branch_lr", "gamma_lr", mode="before")
    @classmethod
    def resolve_multiple(cls, rate: Any, info: ValidationInfo) -> Any:
        """Convert a multiple of lr to a learning rate; without a valid lr, the result is unused."""
        if not isinstance(rate, str | int | float):
            return rate
        rate = str(rate)
        lr = info.data.get("lr", 1.0)
        try:
            factor = float(rate.removesuffix("x"))
        except ValueError:
            factor = 0.0
        if not 0 < factor < math.inf:
            raise ValueError("must be a number above 0, or a multiple of optim.lr like 1000x")
        if not rate.endswith("x") and factor > max(MAX_WRITTEN_RATE, MAX_MULTIPLE * lr):
            raise ValueError(
                f"would be a learning rate of {factor:g}; for a multiple of optim.lr, write {factor:g}x"
            )
        if rate.endswith("x"):
            return factor * lr
        return factor

    @field_validator("name")
    @classmethod
    def check_name(cls, name: str) -> str:
        if name.lower().startswith(UNSUPPORTED_OPTIMIZERS):
            raise ValueError(
                f"{name} cannot be used: it needs second derivatives, or its state is not of tensors"
            )
        if name.lower() not in list_optimizers():
            close = difflib.get_close_matches(name, list_optimizers(), n=3)
            hint = f"; close: {', '.join(close)}" if close else ""
            raise ValueError(f"{name!r} is not an optimiser of timm{hint}")
        return name

    @model_validator(mode="after")
    def check_fields(self) -> "OptimPart":
        if self.warmup_epochs and self.warmup_iterations:
            raise ValueError("warmup_epochs and warmup_iterations are both given; give one of them")
        if bool(self.milestones) != (self.schedule == "step") or self.milestones != sorted(
            self.milestones
        ):
            raise ValueError(
                "the schedule step, and no other, needs optim.milestones in ascending order"
            )
        if self.min_weight_decay is not None and self.min_weight_decay > self.weight_decay:
            raise ValueError(
                f"min_weight_decay {self.min_weight_decay:g} is above weight_decay "
                f"{self.weight_decay:g}, from which it falls; lower it"
            )
        if self.min_lr > self.lr:
            raise ValueError(
                f"min_lr {self.min_lr:g} is above lr {self.lr:g}, from which the rate falls; lower it"
            )
        return self


class AnnealPart(Part):
    """Locality and gate of GPSA layers move to other values; windows close; ReLUs of a vanillanet_* fade out."""

    epochs: Positive
    """Length of the schedule in epochs."""
    start: tuple[Positive, float] | None = None
    """Locality and gate at the first step; by default exact: (20, 15) from a CNN, (1, -15) from a ViT."""
    stop: tuple[Positive, float] = (1.0, 1.0)
    """Locality and gate at the end, by default the paper's; they are trained from then on."""

    @model_validator(mode="after")
    def check_fields(self) -> "AnnealPart":
        self.schedule(1)
        return self

    def schedule(self, steps_per_epoch: int) -> Anneal:
        return Anneal(max(1, round(self.epochs * steps_per_epoch)), self.start, self.stop)


class ScalePart(Part):
    """Distribution over processes (started by torchrun), memory and speed."""

    accumulate: Annotated[int, Field(ge=1, le=2**20)] = 1
    """Gradient accumulation: parts into which each process splits its share of a batch, to save memory."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp: every process has the whole model; fsdp: each has a shard of weights, averages and optimiser state."""
    sync_batch_norm: bool = False
    """Compute BatchNorm statistics over all processes, in pyramids too (GPUs only)."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass, to save memory."""
    compile: (
        bool | Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    ) = False
    """Compile the model with torch.compile, in one of its modes: reduce-overhead records CUDA graphs."""


class TokenLabelPart(Part):
    """Token labelling, for models with a dense head: a label for every patch, from label maps or the image."""

    weight: NotNegative = 0.5
    """Weight of the patches' loss; the image's loss has weight 1."""
    mix: bool = True
    """MixToken: replace a box of patches, and their labels, by those of another image."""
    beta: Positive = 1.0
    """MixToken draws the fraction of the image that stays from Beta(beta, beta)."""
    maps: File | None = None
    """Folder of label maps, class/image.pt for each training image class/image.jpg; by default the image's label."""
    class_token: Literal["label", "map"] = "label"
    """Label of the class token with maps: the image's (as in the paper), or the map's mean over the crop (the code)."""

    @model_validator(mode="after")
    def check_fields(self) -> "TokenLabelPart":
        if self.class_token == "map" and self.maps is None:
            raise ValueError("class_token map needs token_labels.maps, the folder of label maps")
        return self


class MapSimilarityPart(Part):
    """Penalty on similar attention maps in neighbouring blocks (Refiner's code), for refined_vit_*."""

    weight: Positive = 0.1
    """Weight of the similarity, the mean over block pairs, queries and keys of the cosine over heads."""
    pairs: Count | None = None
    """Number of pairs of neighbouring blocks, from the first; by default all."""


class DistillPart(Part):
    """Distillation from a teacher on the same images (DeiT), with or without a distillation token."""

    teacher: str
    """A timm model with pretrained weights, or a checkpoint written by isomorph."""
    weights: File | None = None
    """File with the weights of a teacher that is given as a timm model."""
    kwargs: Fields = {}
    """More arguments of timm.create_model for the teacher, e.g. {global_pool: avg} for MAE's fine-tuned ViT-B."""
    kind: Literal["hard", "soft"] = "hard"
    """hard: the teacher's top class is a second label; soft: its probabilities are."""
    share: Fraction = 0.5
    """Weight of the teacher's term; that of the labels is 1 - share."""
    temperature: Positive = 1.0
    """Temperature of the soft probabilities."""
    token: bool = False
    """Train the head of a distillation token on the teacher's term; evaluate the mean of both heads."""


class MaskPart(Part):
    """Pre-training without labels: reconstruct hidden patches (MAE), or match a teacher's features (G2SD)."""

    ratio: OpenFraction = 0.75
    """Fraction of the patches to hide."""
    depth: Size | None = None
    """Blocks of the decoder; by default 8, or 4 with a teacher."""
    width: Size | None = None
    """Channels of the decoder; by default 512, or 128 with a teacher."""
    heads: Size | None = None
    """Heads of the decoder; by default 16, or 4 with a teacher (from G2SD; TDRL does not specify it)."""
    normalise: bool = True
    """Normalise the target pixels of each patch by their mean and standard deviation."""
    teacher: File | None = None
    """Teacher with its decoder: an autoencoder.safetensors of isomorph, or MAE's full checkpoint."""
    teacher_model: str | None = None
    """timm name of the teacher's encoder, e.g. vit_base_patch16_224; only for MAE's checkpoints."""
    teacher_heads: Size = 16
    """Heads of the teacher's decoder; only for MAE's checkpoints, which do not store it."""
    block: Size = 4
    """Block of the teacher's decoder whose features the student learns, from 1."""

    @model_validator(mode="after")
    def check_fields(self) -> "MaskPart":
        for name in ("teacher_model", "teacher_heads", "block"):
            is_given = getattr(self, name) != type(self).model_fields[name].default
            if is_given and self.teacher is None:
                raise ValueError(
                    f"mask.{name} has no effect without mask.teacher; give mask.teacher too, or leave mask.{name} out"
                )
        return self

    @property
    def decoder(self) -> tuple[int, int, int]:
        """Depth, width and heads of the decoder, with their defaults."""
        depth, width, heads = (4, 128, 4) if self.teacher else (8, 512, 16)
        return self.depth or depth, self.width or width, self.heads or heads
