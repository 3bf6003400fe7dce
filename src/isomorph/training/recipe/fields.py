"""The groups of fields of a recipe: what is trained, on what, how images vary, how weights move."""

import difflib
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from timm.data import create_transform
from timm.optim import get_optimizer_info, list_optimizers

from isomorph.data import SOURCES, STREAMS
from isomorph.models import refuse_unknown
from isomorph.models.arguments import check_arguments
from isomorph.surgery import Anneal, Rule, build_rule

Positive = Annotated[float, Field(gt=0)]
PartRate = Annotated[float, Field(gt=0, validate_default=True)]
"""A learning rate of some parameters; also given as a multiple of lr (`OptimPart.multiplied`)."""
NotNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
File = Annotated[Path, BeforeValidator(lambda value: str(value) if isinstance(value, int | float) else value)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Epochs = Annotated[int, Field(ge=1, le=100_000)]
Side = Annotated[int, Field(ge=1, le=2**14)]


class Part(BaseModel):
    """One group of fields."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )


def _as_list(value: Any) -> Any:
    """One name as a list of one."""
    return [value] if isinstance(value, str) else value


Globs = Annotated[list[str], BeforeValidator(_as_list)]


class RecastPart(Part):
    """Modules to recast before training: as gated positional self-attention, or as pyramids."""

    where: Globs
    """Glob, or a list of globs, over module names, e.g. layer4.*.conv2, blocks.[0-9].attn or blocks.*.mlp.fc?. For
    pyramids the parts of a joint qkv have names too: blocks.[0-3].attn.v."""
    rule: Literal["ConvToGPSA", "AttentionToGPSA", "LinearToPyramid", "AttentionToRefined"] = "ConvToGPSA"
    """Convolutions, or a ViT's attention, become attention with places; linear layers, convolutions become pyramids;
    a ViT's attention becomes refined attention."""
    init: Literal["exact", "same-function", "paper"] | None = None
    """exact keeps the function (of pyramids and refined attention: same-function); paper is the paper's start."""
    locality: Positive | None = None
    """Overrides the init's locality (attention with places)."""
    gate: float | None = None
    """Overrides the init's gate, lambda before the sigmoid (attention with places)."""
    layout: str | None = None
    """P-W2S, R-D2W1S, naive-W8 and the like (pyramids)."""
    rectify: str | dict[str, str] | None = None
    """paper (batchnorm on queries and keys, rescale elsewhere), batchnorm, rescale or none; or one for each layer by
    its last name, as in {q: none, v: rescale} (pyramids)."""
    rescale_by: Positive | None = None
    """N of the division by sqrt(N), by default the number of branches (pyramids)."""
    ratio: int | None = None
    """Maps for every head; 1 is talking heads, 0 no expansion (refined attention)."""
    kernel: int | None = None
    """Size of the kernel on the maps, odd; 1 is none (refined attention)."""
    reduce: bool | None = None
    """Whether the maps are reduced to one for every head again (refined attention)."""
    span: Literal["map", "spatial", "row+column"] | None = None
    """Where the kernel runs (refined attention)."""
    recompute: bool | None = None
    """Compute the maps again in the backward pass instead of keeping them (refined attention)."""

    @model_validator(mode="after")
    def coherent(self) -> "RecastPart":
        self.build_rule()
        return self

    def build_rule(self) -> Rule:
        """The rule these fields describe. Raises: UserError for a field that the rule does not have."""
        return build_rule(self.rule, **self.model_dump(exclude={"where", "rule"}))


class ModelPart(Part):
    """What is trained."""

    name: str
    """A timm model, isomorph's included."""
    pretrained: bool = False
    """Start from the model's public weights."""
    weights: File | None = None
    """Start from this checkpoint instead, of the model before its recast or after it; a head of other classes, or none,
    starts afresh."""
    num_classes: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Classes of the head; by default those of the data."""
    kwargs: dict[str, Any] = {}
    """Further arguments of timm.create_model, e.g. {img_size: 32}, or --model.kwargs.img_size 32."""
    start: Literal["weights", "random"] = "random"
    """weights: the run must be given trained ones (weights, or pretrained true); random: without them, it begins at
    random ones."""
    unstride: str | None = None
    """Glob of stages that keep their input's resolution, e.g. layer4 for a T-ResNet."""
    recast: RecastPart | None = None
    recast_epoch: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Unstride and recast after so many epochs; the optimiser goes on with what it knows of the kept parameters."""
    freeze: Globs = []
    """Glob, or a list of globs, over parameters that stay as they are, e.g. blocks.*.attn.gate."""

    @field_validator("name")
    @classmethod
    def known(cls, name: str) -> str:
        refuse_unknown(name)
        return name

    @field_validator("kwargs")
    @classmethod
    def plain(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        check_arguments(kwargs)
        return kwargs

    @model_validator(mode="after")
    def coherent(self) -> "ModelPart":
        if self.num_classes and "num_classes" in self.kwargs:
            raise ValueError("num_classes and kwargs.num_classes are the same; give num_classes alone")
        return self


class DataPart(Part):
    """What it is trained on."""

    source: str = "imagefolder"
    """imagefolder, tar, webdataset, huggingface, huggingface-stream (never kept), cifar10, cifar100 or digits."""
    root: File | None = None
    """Folder of the data, or its name on the Hugging Face hub; by default $ISOMORPH_DATA, else ./data."""
    images: Count | None = None
    """Images of the training split, where a stream does not tell."""
    fraction: Share = 1.0
    """Share of every class to train on."""
    draw: Literal["seeded", "first"] = "seeded"
    """Which images a fraction keeps: a draw with `seed`, or the first in sorted order (as ConViT's code does)."""
    classes: Count | None = None
    """Train and test on the first so many classes only."""
    size: Annotated[list[Side], Field(min_length=2, max_length=2)] | None = None
    """Height and width of the input, e.g. [224, 320]; by default the model's own."""
    test_crop: Literal["center", "whole"] | None = None
    """What of a test image is seen: its middle, or all of it, squashed; by default as the model's config says."""
    crop_pct: Share | None = None
    """Side of the test image's middle that is seen, as a share of the shorter side; by default as the model's config
    says. Give networks that are compared the same."""
    batch_size: Annotated[int, Field(ge=2, le=2**20)] = 128
    """Images per step, over all processes (an even number in each part when mixing)."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes that prepare images, for each one that trains; 0 does it there."""
    unreadable: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Images that may be unreadable, each replaced by another, before the run stops."""
    shuffle_shards: Count | None = None
    """Shuffle images within so many shards at a time (tar, webdataset), to read a slow disk in long runs."""

    @field_validator("source")
    @classmethod
    def known(cls, source: str) -> str:
        if source not in (*SOURCES, *STREAMS):
            raise ValueError(f"{source!r} is unknown; choose one of {', '.join([*SOURCES, *STREAMS])}")
        return source

    @property
    def streamed(self) -> bool:
        return self.source in STREAMS

    @model_validator(mode="after")
    def coherent(self) -> "DataPart":
        if self.streamed and (self.fraction < 1 or self.classes or self.shuffle_shards):
            raise ValueError(
                f"{self.source} is read in passing: no fraction, classes or shuffle_shards; use huggingface"
            )
        if self.images and not self.streamed:
            raise ValueError(f"images is for {', '.join(STREAMS)}; {self.source} counts its own")
        if self.crop_pct and self.test_crop == "whole":
            raise ValueError("crop_pct is the side of the middle; test_crop whole shows all: give one of them")
        return self


def magnitudes(transform: Any) -> list[tuple[float, float]]:
    """The magnitude of every operation of a policy, and the largest that timm applies."""
    operations = [operation for step in transform.transforms for operation in getattr(step, "ops", ())]
    return [(op.magnitude, op.magnitude_max or 10) for op in operations if hasattr(op, "magnitude_max")]


class AugmentPart(Part):
    """How training images are varied (timm's transforms)."""

    crop_padding: Annotated[int, Field(ge=0, le=2**14)] = 0
    """Random crops from the image padded by so many pixels (CIFAR); 0 crops and resizes instead."""
    scale: tuple[Share, Share] = (0.08, 1.0)
    """Area of a resized crop, smallest and largest."""
    hflip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of a horizontal flip."""
    auto_augment: str | None = None
    """timm's policy string, e.g. rand-m9-mstd0.5-inc1; a magnitude m above 10 needs a bound as high, e.g. -mmax30."""
    color_jitter: NotNegative = 0.0
    """Colour jitter; timm ignores it under auto_augment."""
    erasing: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability of random erasing."""
    mixup: NotNegative = 0.0
    """Mixup alpha; 0 is off."""
    cutmix: NotNegative = 0.0
    """Cutmix alpha; 0 is off."""
    smoothing: Rate = 0.0
    """Label smoothing."""
    repeats: Annotated[int, Field(ge=1, le=1024)] = 1
    """Repeated augmentation: an epoch has as many samples as ever, of fewer images, each so many times (DeiT: 3)."""

    @field_validator("auto_augment")
    @classmethod
    def understood(cls, policy: str | None) -> str | None:
        try:
            transform = create_transform(32, is_training=True, auto_augment=policy)
        except Exception as error:  # timm asserts, or fails on a number, depending on where the policy is wrong
            raise ValueError("timm does not understand the policy; try rand-m9-mstd0.5-inc1 or augmix-m5-w3") from error
        for wanted, largest in magnitudes(transform):
            if wanted > largest:
                more = f"add -mmax{wanted:g} to have it, or " if str(policy).startswith("rand") else ""
                raise ValueError(f"timm clamps the magnitude {wanted:g} to {largest:g}; {more}write m{largest:g}")
        return policy

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0


class OptimPart(Part):
    """How the weights move."""

    name: str = "adamw"
    """Any optimiser of timm."""
    lr: Positive = 1e-4
    """Peak learning rate."""
    weight_decay: NotNegative = 0.05
    """Decay of matrices and filters; never of biases, norms, gates, centres and localities."""
    gate_lr: PartRate = "1000x"  # type: ignore[assignment]
    """Peak learning rate of the gates, on the same schedule, without decay: a number, or 1000x for 1000 times lr."""
    position_lr: PartRate = "1x"  # type: ignore[assignment]
    """Peak learning rate of centres and localities, likewise. A short run wants it higher: they start far away."""
    branch_lr: Positive | None = None
    """Peak learning rate of the layers before a BatchNorm inside pyramids, likewise; by default lr. They are free of
    scale, and Adam turns them by about lr a step whatever they are: 0.1x served short runs."""
    layer_decay: Share = 1.0
    """Each layer's rate is this share of the rate of the layer after it; the head has the full rate."""
    momentum: Rate = 0.9
    """For optimisers that have one."""
    betas: tuple[Rate, Rate] | None = None
    """Adam's two moving averages, e.g. [0.9, 0.95] as MAE pre-trains; by default the optimiser's own."""
    clip_grad: Positive | None = None
    """Largest norm of the whole gradient."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    schedule_from: Literal["peak", "start"] = "peak"
    """Where the cosine or the line begins: at the peak, when the warm-up ends; or at the first step, underneath the
    warm-up, so that the peak is never quite reached (timm's default, as DeiT was trained)."""
    warmup_epochs: NotNegative = 0.0
    """Linear warm-up; fractions are fine."""
    min_lr: NotNegative = 0.0
    """Where the cosine or the line ends."""

    @field_validator("gate_lr", "position_lr", "branch_lr", mode="before")
    @classmethod
    def multiplied(cls, rate: Any, info: ValidationInfo) -> Any:
        """A multiple of lr as the rate it is; where lr itself is wrong, any rate, since only lr is reported."""
        if rate is None and info.field_name == "position_lr":
            rate = "1x"
        if not isinstance(rate, str):
            return rate
        try:
            factor = float(rate.removesuffix("x"))
        except ValueError:
            factor = 0.0
        if not 0 < factor < math.inf:
            raise ValueError("must be a number above 0, or a multiple of optim.lr like 1000x")
        return factor * info.data.get("lr", 1.0) if rate.endswith("x") else factor

    @field_validator("name")
    @classmethod
    def known(cls, name: str) -> str:
        names = list_optimizers()
        if name.lower().startswith("kron"):
            raise ValueError(f"{name} keeps lists of matrices, which snapshots do not hold; choose another")
        if name.lower() not in names:
            close = difflib.get_close_matches(name, names, n=3)
            raise ValueError(f"no optimiser {name!r}" + (f"; did you mean {', '.join(close)}?" if close else ""))
        return name

    @model_validator(mode="after")
    def coherent(self) -> "OptimPart":
        known = get_optimizer_info(self.name)
        if self.betas and not (known.has_betas and known.num_betas == 2):
            raise ValueError(f"betas are Adam's; {self.name} does not have two: leave optim.betas out")
        return self


class AnnealPart(Part):
    """Carries every gated attention layer from one pair of dials to another while training starts, and the annealed
    ReLUs of a vanillanet_* from ReLU to the identity."""

    epochs: Positive
    """Length of the anneal."""
    start: tuple[Positive, float] | None = None
    """Locality and gate at the first step; by default exact: (20, 15) from a CNN, (1, -15) from a ViT."""
    stop: tuple[Positive, float] = (1.0, 1.0)
    """Locality and gate at the end (paper); then the optimiser has them."""

    @model_validator(mode="after")
    def coherent(self) -> "AnnealPart":
        self.schedule(1)
        return self

    def schedule(self, steps_per_epoch: int) -> Anneal:
        return Anneal(max(1, round(self.epochs * steps_per_epoch)), self.start, self.stop)


class ScalePart(Part):
    """How the work is spread over processes (torchrun starts them) and memory. None of it changes what is computed."""

    accumulate: Annotated[int, Field(ge=1, le=2**20)] = 1
    """Gradient accumulation: each process works through its share of a batch in so many parts, to save memory."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp: every process holds the model; fsdp: each holds a shard of weights, averages and optimiser state."""
    sync_batch_norm: bool = False
    """BatchNorm statistics of all processes together (GPUs only), those of pyramids too."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    compile: bool = False
    """torch.compile the model."""
