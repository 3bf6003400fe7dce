"""A recipe: everything a run depends on, as plain checked values.

Files are YAML or TOML; every field is documented here and is a flag of `isomorph train`. A recipe is checked as a
whole: all problems are reported at once, an unknown field with the closest known one.
"""

import difflib
import tomllib
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import timm
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from timm.data import create_transform

from isomorph.data import SOURCES
from isomorph.errors import UserError
from isomorph.models import refuse_unknown
from isomorph.surgery import Anneal, ConvToGPSA

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
File = Annotated[Path, BeforeValidator(lambda value: str(value) if isinstance(value, int | float) else value)]
Count = Annotated[int, Field(ge=1)]


class Part(BaseModel):
    """One group of fields."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )


class RecastPart(Part):
    """Convolutions to recast as gated positional self-attention before training (ConvToGPSA)."""

    where: str
    """Glob over module names, e.g. layer4.*.conv2."""
    init: Literal["exact", "paper"] = "exact"
    """exact: the CNN's function; paper: locality 1, gate 1."""
    locality: Positive | None = None
    """Overrides the init's locality."""
    gate: float | None = None
    """Overrides the init's gate (lambda, before the sigmoid)."""

    def rule(self) -> ConvToGPSA:
        """The rule these fields describe."""
        return ConvToGPSA(self.init, self.locality, self.gate)


class ModelPart(Part):
    """What is trained."""

    name: str
    """A timm model, isomorph's included."""
    pretrained: bool = False
    """Start from the model's public weights."""
    weights: File | None = None
    """Start from this checkpoint of the base model instead."""
    num_classes: Count | None = None
    """Classes of the head; by default those of the data."""
    kwargs: dict[str, Any] = {}
    """Further arguments of timm.create_model."""
    unstride: str | None = None
    """Glob of stages that keep their input's resolution, e.g. layer4 for a T-ResNet."""
    recast: RecastPart | None = None

    @field_validator("name")
    @classmethod
    def known(cls, name: str) -> str:
        refuse_unknown(name)
        return name


class DataPart(Part):
    """What it is trained on."""

    source: str = "imagefolder"
    """imagefolder, cifar10 or digits."""
    root: File | None = None
    """Folder of the data; by default $ISOMORPH_DATA, else ./data."""
    fraction: Share = 1.0
    """Share of every class to train on, drawn with `seed`."""
    size: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None
    """Height and width of the input; by default the model's own."""
    batch_size: Annotated[int, Field(ge=2)] = 128
    """Images per step (an even number when mixing)."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that prepare images; 0 does it in the main one."""

    @field_validator("source")
    @classmethod
    def known(cls, source: str) -> str:
        if source not in SOURCES:
            raise ValueError(f"{source!r} is unknown; choose one of {', '.join(SOURCES)}")
        return source


class AugmentPart(Part):
    """How training images are varied (timm's transforms)."""

    crop_padding: Annotated[int, Field(ge=0)] = 0
    """Random crops from the image padded by so many pixels (CIFAR); 0 crops and resizes instead."""
    scale: tuple[Share, Share] = (0.08, 1.0)
    """Area of a resized crop, smallest and largest."""
    hflip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of a horizontal flip."""
    auto_augment: str | None = None
    """timm's policy string, e.g. rand-m9-mstd0.5-inc1."""
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

    @field_validator("auto_augment")
    @classmethod
    def understood(cls, policy: str | None) -> str | None:
        try:
            create_transform(32, is_training=True, auto_augment=policy)
        except Exception as error:  # timm asserts, or fails on a number, depending on where the policy is wrong
            raise ValueError("timm does not understand the policy; try rand-m9-mstd0.5-inc1 or augmix-m5-w3") from error
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
    gate_lr: Positive = 0.1
    """Peak learning rate of the gates, on the same schedule, without decay."""
    position_lr: Positive | None = None
    """Peak learning rate of centres and localities; by default lr. A short run wants it higher: they start far away."""
    momentum: Rate = 0.9
    """For optimisers that have one."""
    clip_grad: Positive | None = None
    """Largest norm of the whole gradient."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_epochs: NotNegative = 0.0
    """Linear warm-up; fractions are fine."""
    min_lr: NotNegative = 0.0
    """Where the cosine ends."""

    @field_validator("name")
    @classmethod
    def known(cls, name: str) -> str:
        names = timm.optim.list_optimizers()
        if name.lower() not in names:
            close = difflib.get_close_matches(name, names, n=3)
            raise ValueError(f"no optimiser {name!r}" + (f"; did you mean {', '.join(close)}?" if close else ""))
        return name


class AnnealPart(Part):
    """Carries every gated attention layer from one pair of dials to another while training starts."""

    epochs: Positive
    """Length of the anneal."""
    start: tuple[Positive, float] = (20.0, 15.0)
    """Locality and gate at the first step (exact)."""
    stop: tuple[Positive, float] = (1.0, 1.0)
    """Locality and gate at the end (paper); then the optimiser has them."""

    def schedule(self, steps_per_epoch: int) -> Anneal:
        return Anneal(max(1, round(self.epochs * steps_per_epoch)), self.start, self.stop)


class Recipe(Part):
    """One run."""

    name: str = "run"
    """Name of the run; its folder is runs/NAME unless `out` says otherwise."""
    model: ModelPart
    data: DataPart = DataPart()
    augment: AugmentPart = AugmentPart()
    optim: OptimPart = OptimPart()
    anneal: AnnealPart | None = None
    epochs: Count = 50
    """Passes over the training data."""
    drop_path: Rate = 0.0
    """Stochastic depth at the last block."""
    ema: Rate | None = None
    """Decay of the averaged weights; they are then what is evaluated and kept."""
    amp: Literal["none", "bf16"] = "none"
    """Precision of the forward pass."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds initialisation, order, augmentation and the class fraction."""
    device: str = "auto"
    """auto takes a GPU when there is one."""
    out: File | None = None
    """Folder of the run."""
    source: str = ""
    """Where the recipe comes from (paper, table)."""
    expected: str = ""
    """The number it should give, as published."""

    @model_validator(mode="after")
    def coherent(self) -> "Recipe":
        if self.optim.warmup_epochs >= self.epochs:
            raise ValueError(
                f"optim.warmup_epochs {self.optim.warmup_epochs:g} must be below epochs {self.epochs}; lower it too"
            )
        if self.augment.mixes and self.data.batch_size % 2:
            raise ValueError(f"data.batch_size {self.data.batch_size} must be even when mixup or cutmix is on")
        if self.augment.scale[0] > self.augment.scale[1]:
            raise ValueError("augment.scale must give the smaller share first")
        if self.anneal and self.anneal.epochs > self.epochs:
            raise ValueError(f"anneal.epochs {self.anneal.epochs:g} must be at most epochs {self.epochs}")
        return self

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / self.name


def check(values: dict[str, Any]) -> Recipe:
    """A Recipe from plain values. Raises: UserError listing every problem on one line."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        problems = [describe(problem) for problem in error.errors()]
        count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        raise UserError(f"the recipe has {count}: {'; '.join(problems)}") from None


def describe(problem: Any) -> str:
    """One problem in words: the field, what was given, what is allowed, the closest name."""
    *groups, last = [str(part) for part in problem["loc"]] or ["recipe"]
    field = ".".join([*groups, last])
    if problem["type"] == "extra_forbidden":
        known = list(fields_of(groups))
        close = difflib.get_close_matches(last, known, n=1)
        return f"{field} is not a field" + (
            f" (did you mean {close[0]}?)" if close else f" (known: {', '.join(known)})"
        )
    if problem["type"] == "missing":
        return f"{field} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return (
        message
        if problem["type"] == "value_error" and not problem["loc"]
        else f"{field}: {message} (given {problem['input']!r})"
    )


def fields_of(groups: list[str]) -> dict[str, Any]:
    """Fields of a nested part, by the names that lead to it."""
    part: Any = Recipe
    for group in groups:
        kinds = typing.get_args(part.model_fields[group].annotation) or (part.model_fields[group].annotation,)
        part = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Part)), Part)
    return part.model_fields


def read_file(path: Path) -> dict[str, Any]:
    """The values of a YAML or TOML recipe. Raises: UserError when it is missing, unreadable or no mapping."""
    try:
        text = path.read_text()
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read recipe {path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"recipe {path} must be a mapping of fields, like 'epochs: 10'")
    return values


def override(values: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """Values with dotted assignments `group.field=value` (value as YAML) laid over them. Raises: UserError."""
    result = yaml.safe_load(yaml.safe_dump(values))
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise UserError(f"override {assignment!r} must have the form field=value, like optim.lr=1e-4")
        *groups, last = path.split(".")
        group = result
        for name in groups:
            group = (
                group.setdefault(name, {}) if group.get(name) is not None else group.update({name: {}}) or group[name]
            )
            if not isinstance(group, dict):
                raise UserError(f"override {assignment!r}: {name} is not a group of fields")
        group[last] = parse(text)
    return result


def parse(text: str) -> Any:
    """A value as YAML reads it, and numbers like 1e-4 too, which YAML 1.1 takes for text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:  # a glob like *.conv2 is no YAML: it is text
        return text
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def document_fields(part: type[Part] = Recipe, prefix: str = "--") -> str:
    """One line per field: its flag, what it is, its default."""
    lines = []
    for name, field in part.model_fields.items():
        kinds = [field.annotation, *typing.get_args(field.annotation)]
        group = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Part)), None)
        if group:
            lines.append(document_fields(group, f"{prefix}{name}."))
        else:
            default = "" if field.is_required() else f" [{field.default}]"
            lines.append(f"* `{prefix}{name}` {field.description or ''}{default}")
    return "\n".join(lines)
