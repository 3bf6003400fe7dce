"""A recipe: everything a run depends on, as plain checked values.

Files are YAML or TOML; every field is documented here and is a flag of `isomorph train`. A recipe is checked as a
whole: all problems are reported at once, an unknown field with the closest known one.
"""

import difflib
import json
import re
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from isomorph.errors import UserError
from isomorph.training.recipe.fields import (
    AnnealPart,
    AugmentPart,
    Count,
    DataPart,
    Epochs,
    File,
    ModelPart,
    NotNegative,
    OptimPart,
    Part,
    Positive,
    Rate,
    ScalePart,
)
from isomorph.training.recipe.mask_fields import MaskPart
from isomorph.training.recipe.objective_fields import DistillPart, MapSimilarityPart, TokenLabelPart
from isomorph.training.recipe.text import load_toml, load_yaml, read_text


class Recipe(Part):
    """One run."""

    name: str = "run"
    """Name of the run; its folder is runs/NAME unless `out` says otherwise."""
    model: ModelPart
    data: DataPart = DataPart()
    augment: AugmentPart = AugmentPart()
    optim: OptimPart = OptimPart()
    scale: ScalePart = ScalePart()
    anneal: AnnealPart | None = None
    distill: DistillPart | None = None
    token_labels: TokenLabelPart | None = None
    map_similarity: MapSimilarityPart | None = None
    mask: MaskPart | None = None
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Classes against each other, or each on its own, summed over classes (large label sets)."""
    epochs: Epochs = 50
    """Passes over the training data."""
    evaluate_every: Count = 1
    """Epochs between two evaluations; the last one is always evaluated."""
    keep_every: Count | None = None
    """Keep the weights too, as epoch-N.safetensors, every so many epochs."""
    monitor_every: Count | None = None
    """Steps between two lines of monitor.jsonl: largest attention logit, largest attention and entropy, by block."""
    log_every: Count = 50
    """Steps between two lines of steps.jsonl: loss, rate, images a second, share of the time spent waiting for them."""
    checkpoint_minutes: NotNegative = 10.0
    """Minutes between two snapshots within an epoch; 0 takes one after every step. One follows every epoch anyway."""
    tensorboard: bool = False
    """Write the curves for TensorBoard too (the extra `track`)."""
    divergence: Positive | None = 10.0
    """Stop when the loss of ten steps is so many times that of the first ten (at least 1)."""
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
        if self.model.recast_epoch > self.epochs:
            raise ValueError(f"model.recast_epoch {self.model.recast_epoch} must be at most epochs {self.epochs}")
        if self.model.recast_epoch and not (self.model.recast or self.model.unstride):
            raise ValueError("model.recast_epoch needs a model.recast or model.unstride to make then")
        if self.model.recast_epoch and (self.scale.parallel == "fsdp" or self.scale.sync_batch_norm):
            raise ValueError("model.recast_epoch needs scale.parallel ddp and scale.sync_batch_norm false")
        if self.model.recast_epoch and self.mask:
            raise ValueError("model.recast_epoch is for runs with labels; recast before masked pre-training (0)")
        if self.drop_path and "drop_path_rate" in self.model.kwargs:
            raise ValueError("drop_path and model.kwargs.drop_path_rate are the same; give one")
        if self.monitor_every and self.mask and self.scale.parallel == "fsdp":
            raise ValueError("monitor_every cannot look into a sharded autoencoder; leave it out, or use ddp")
        if self.augment.repeats > 1 and self.data.streamed:
            raise ValueError(
                f"augment.repeats shows images again, {self.data.source} reads each in passing; leave it at 1"
            )
        if self.augment.scale[0] > self.augment.scale[1]:
            raise ValueError("augment.scale must give the smaller share first")
        if self.anneal and self.anneal.epochs > self.epochs:
            raise ValueError(f"anneal.epochs {self.anneal.epochs:g} must be at most epochs {self.epochs}")
        objectives = [name for name in ("token_labels", "distill", "mask") if getattr(self, name)]
        if len(objectives) > 1:
            raise ValueError(f"{' and '.join(objectives)} are {len(objectives)} objectives; give one")
        if self.map_similarity and (self.distill or self.mask):
            raise ValueError("map_similarity goes with labels or token_labels; leave it out with distill or mask")
        if self.mask and self.augment.mixes:
            raise ValueError("mask knows no labels to mix: leave augment.mixup and augment.cutmix at 0")
        if self.token_labels and self.loss == "sigmoid":
            raise ValueError("token_labels has a loss of its own; leave loss at softmax")
        if self.token_labels and self.token_labels.maps:
            self.refuse_unmappable()
        return self

    def refuse_unmappable(self) -> None:
        """Raises: ValueError for what label maps cannot follow."""
        if self.data.streamed:
            raise ValueError(f"token_labels.maps needs images with file names; {self.data.source} has none")
        if self.augment.crop_padding:
            raise ValueError("token_labels.maps follow resized crops only: leave augment.crop_padding at 0")

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / self.name


CHANGEABLE: dict[str, Any] = {
    "out": True,
    "device": True,
    "source": True,
    "expected": True,
    "log_every": True,
    "checkpoint_minutes": True,
    "tensorboard": True,
    "divergence": True,
    "scale": {"accumulate", "parallel", "activation_checkpointing", "compile"},
    "data": {"workers", "root", "unreadable"},
    "model": {"start"},
}
"""Fields that may change between a run and its resumption."""


def identity_json(recipe: Recipe) -> str:
    """The recipe without what may change between a run and its resumption."""
    return recipe.model_dump_json(exclude=CHANGEABLE)


def add_defaults(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe as it was kept, with the fields that have come since; one that is none any more stays as it is."""
    try:
        return json.loads(identity_json(Recipe.model_validate(_convert_old_fields(recipe))))
    except ValidationError:
        return recipe


def _convert_old_fields(recipe: dict[str, Any]) -> dict[str, Any]:
    """A kept recipe in the words of today: schedules began at the first step, and magnitudes above 10 were 10."""
    optim, augment = ({**(recipe.get(name) or {})} for name in ("optim", "augment"))
    if optim.get("warmup_epochs"):
        optim.setdefault("schedule_from", "start")
    policy = augment.get("auto_augment") or ""
    if policy.startswith("rand") and "-mmax" not in policy:
        augment["auto_augment"] = re.sub(r"-m\d{2,}", "-m10", policy)
    return {**recipe, "optim": optim, "augment": augment}


def changed_fields(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The fields that differ, each with its value there and here."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += changed_fields(a, b, f"{prefix}{name}.")
        elif a != b:
            found.append(f"{prefix}{name} {a} there, {b} here")
    return found


def validate(values: dict[str, Any]) -> Recipe:
    """A Recipe from plain values. Raises: UserError listing every problem on one line."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        problems = [_describe_problem(problem) for problem in error.errors()]
        count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        raise UserError(f"the recipe has {count}: {'; '.join(problems)}") from None


def _describe_problem(problem: Any) -> str:
    """One problem in words: the field, what was given, what is allowed, the closest name."""
    *groups, last = [str(part) for part in problem["loc"]] or ["recipe"]
    field = ".".join([*groups, last])
    if problem["type"] == "extra_forbidden":
        known = list(_fields_of(groups))
        close = difflib.get_close_matches(last, known, n=1)
        return f"{field} is not a field" + (
            f" (did you mean {close[0]}?)" if close else f" (known: {', '.join(known)})"
        )
    if problem["type"] == "missing":
        return f"{field} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if message.partition(" ")[0].istitle():
        message = message[0].lower() + message[1:]
    if problem["type"] == "int_parsing_size":
        message = "input is far too large"
    if isinstance(problem["input"], dict):
        return f"{field}: {message}" if problem["loc"] else message
    given = str(problem["input"])[:80] if isinstance(problem["input"], int) else repr(problem["input"])[:80]
    return f"{field}: {message} (given {given})"


def _fields_of(groups: list[str]) -> dict[str, Any]:
    """Fields of a nested part, by the names that lead to it."""
    part: Any = Recipe
    for group in groups:
        kinds = typing.get_args(part.model_fields[group].annotation) or (part.model_fields[group].annotation,)
        part = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Part)), Part)
    return part.documented_fields()


def read_recipe(path: Path) -> dict[str, Any]:
    """The values of a YAML or TOML recipe. Raises: UserError when it is missing, unreadable or no mapping."""
    try:
        text = read_text(path)
        values = load_toml(text) if path.suffix == ".toml" else load_yaml(text)
    except UserError as error:
        raise UserError(f"cannot read recipe {path}: {error}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"cannot read recipe {path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"recipe {path} must be a mapping of fields, like 'epochs: 10'")
    return values


def apply_overrides(values: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """Values with dotted assignments `group.field=value` (value as YAML) laid over them. Raises: UserError."""
    result = yaml.safe_load(yaml.safe_dump(values))
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise UserError(f"override {assignment!r} must have the form field=value, like optim.lr=1e-4")
        *groups, last = path.replace("-", "_").split(".")
        group = result
        for name in groups:
            group = (
                group.setdefault(name, {}) if group.get(name) is not None else group.update({name: {}}) or group[name]
            )
            if not isinstance(group, dict):
                raise UserError(f"override {assignment!r}: {name} is not a group of fields")
        group[last] = _parse_value(text)
    return result


def _parse_value(text: str) -> Any:
    """A value as YAML reads it, and numbers like 1e-4 too, which YAML 1.1 takes for text."""
    try:
        value = load_yaml(text)
    except UserError:
        raise
    except (yaml.YAMLError, ValueError):  # a glob like *.conv2 is no YAML: it is text
        return text
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def document_fields(part: type[Part] = Recipe, prefix: str = "--") -> str:
    """One line per field: its flag, what it is, its default; groups of fields after the others, under their names."""
    lines, groups = [], []
    for name, field in part.documented_fields().items():
        kinds = [field.annotation, *typing.get_args(field.annotation)]
        group = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Part)), None)
        if group:
            title = " ".join((group.__doc__ or "").split("\n\n")[0].split())
            groups.append(
                f"\n**{prefix.removeprefix('--')}{name}** {title}\n\n{document_fields(group, f'{prefix}{name}.')}"
            )
        else:
            default = "" if field.is_required() else f" [{field.default}]"
            text = (field.description or "").replace("*", r"\*")  # globs are no emphasis: the help is Markdown
            lines.append(f"* `{prefix}{name}` {text}{default}")
    return "\n".join([*lines, *groups])
