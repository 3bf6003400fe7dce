"""Recipes: all fields of a run, their validation, files and command-line overrides.

Files are YAML or TOML, and every field is an option of `isomorph train`. Validation reports all problems at once, and
suggests the closest name for an unknown field.
"""

import difflib
import json
import re
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PrivateAttr, ValidationError, model_validator

from isomorph.data.formats.registry import SOURCES
from isomorph.data.streams.stream import STREAMS
from isomorph.errors import UserError
from isomorph.training.recipe.fields import AnnealPart, AugmentPart, DataPart, OptimPart, ScalePart
from isomorph.training.recipe.mask_fields import MaskPart
from isomorph.training.recipe.model_fields import ModelPart
from isomorph.training.recipe.objective_fields import DistillPart, MapSimilarityPart, TokenLabelPart
from isomorph.training.recipe.parse import load_toml, load_yaml, read_text
from isomorph.training.recipe.part import Count, Epochs, File, NotNegative, Part, Positive, Rate
from isomorph.training.recipe.tasks import TaskPart, task_names

P = typing.TypeVar("P", bound=Part)


class Recipe(Part):
    """All settings of a training run, validated.

    The fields are those of recipe files and the options of `isomorph train`; groups such as `optim` take a mapping.

    Raises: pydantic.ValidationError for invalid fields; use `iso.load_recipe` for errors in one line (`UserError`).

    >>> recipe = iso.Recipe(model={"name": "cifar_resnet20"}, data={"source": "digits"}, epochs=5)
    >>> recipe.optim.name, recipe.folder
    ('adamw', PosixPath('runs/run'))
    """

    name: str = "run"
    """Name of the run; its folder is runs/NAME unless `out` is given."""
    model: ModelPart
    task: TaskPart | None = None
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
    """Softmax cross-entropy, or sigmoid cross-entropy summed over classes (for large label sets)."""
    epochs: Epochs = 50
    """Passes over the training data."""
    iterations: Count | None = None
    """Training steps, instead of epochs; the last pass over the data may end before all images were seen."""
    evaluate_every: Count = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    keep_every: Count | None = None
    """Epochs between checkpoints epoch-N.safetensors; by default none are saved."""
    monitor_every: Count | None = None
    """Steps between lines of monitor.jsonl: attention logits and entropy, turn and similarity of pyramids, by layer."""
    log_every: Count = 50
    """Steps between lines of steps.jsonl: loss, learning rate, images per second, fraction of time spent loading."""
    checkpoint_minutes: NotNegative = 10.0
    """Minutes between snapshots within an epoch, 0 for one after every step; every epoch ends with one."""
    track: Literal["tensorboard", "wandb"] | None = None
    """Draw the curves of the run with TensorBoard too (pip install tensorboard), or with Weights & Biases (pip install
    wandb; the project is $WANDB_PROJECT, by default isomorph)."""
    divergence: Positive | None = 10.0
    """Stop when the mean loss of ten steps exceeds this multiple of that of the first ten (at least 1)."""
    drop_path: Rate = 0.0
    """Drop-path rate (stochastic depth) of the last block."""
    ema: Rate | None = None
    """Decay of an exponential moving average of the weights, which is then evaluated and saved."""
    amp: Literal["none", "bf16"] = "none"
    """Automatic mixed precision of the forward pass."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of initialisation, image order, augmentation and data.fraction."""
    device: str = "auto"
    """Device, e.g. cpu or cuda; auto takes a GPU if there is one."""
    out: File | None = None
    """Folder of the run; by default runs/NAME."""
    source: str = ""
    """Source of the recipe (paper, table); for information only."""
    expected: str = ""
    """Published result; for information only."""
    _shortened: str = PrivateAttr("")

    @model_validator(mode="before")
    @classmethod
    def convert_old_fields(cls, values: Any) -> Any:
        """Convert `tensorboard: true` of older recipes to `track: tensorboard`."""
        if isinstance(values, dict) and isinstance(values.get("tensorboard"), bool):
            values = {**values}
            if values.pop("tensorboard"):
                values.setdefault("track", "tensorboard")
        return values

    @model_validator(mode="after")
    def check_fields(self) -> "Recipe":
        if self.iterations:
            self._check_iterations(self.iterations)
        elif self.optim.warmup_epochs >= self.epochs:
            raise ValueError(
                f"optim.warmup_epochs {self.optim.warmup_epochs:g} must be below epochs {self.epochs}; lower it"
            )
        if self.augment.mixes and self.data.batch_size % 2:
            raise ValueError(f"data.batch_size {self.data.batch_size} must be even when mixup or cutmix is on")
        if self.model.recast_epoch > self.epochs:
            raise ValueError(f"model.recast_epoch {self.model.recast_epoch} must be at most epochs {self.epochs}")
        if self.model.recast_epoch and not (self.model.recast or self.model.unstride):
            raise ValueError("model.recast_epoch needs a model.recast or model.unstride; give one, or leave it at 0")
        if self.model.recast_epoch and (self.scale.parallel == "fsdp" or self.scale.sync_batch_norm):
            raise ValueError("model.recast_epoch needs scale.parallel ddp and scale.sync_batch_norm false")
        if self.model.recast_epoch and self.mask:
            raise ValueError(
                "model.recast_epoch is for runs with labels; leave it at 0 to recast before masked pre-training"
            )
        if self.drop_path and "drop_path_rate" in self.model.kwargs:
            raise ValueError("drop_path is also given as model.kwargs.drop_path_rate; give drop_path only")
        if self.monitor_every and self.mask and self.scale.parallel == "fsdp":
            raise ValueError("monitor_every does not work with mask and fsdp; leave it out, or set scale.parallel ddp")
        if self.augment.repeats > 1 and self.data.streamed:
            raise ValueError(
                f"augment.repeats {self.augment.repeats} does not work with {self.data.source}, a stream; leave it at 1"
            )
        if self.augment.scale[0] > self.augment.scale[1]:
            raise ValueError("augment.scale must have the smaller fraction first")
        if self.anneal and self.anneal.epochs > self.epochs:
            raise ValueError(f"anneal.epochs {self.anneal.epochs:g} must be at most epochs {self.epochs}")
        objectives = [name for name in ("token_labels", "distill", "mask") if getattr(self, name)]
        if len(objectives) > 1:
            raise ValueError(f"{' and '.join(objectives)} exclude each other; give one of them")
        if self.map_similarity and (self.distill or self.mask):
            raise ValueError("map_similarity does not work with distill or mask; leave it out")
        if self.mask and self.augment.mixes:
            raise ValueError("mask trains without labels to mix; leave augment.mixup and augment.cutmix at 0")
        if self.token_labels and self.loss == "sigmoid":
            raise ValueError("token_labels works with the softmax loss only; leave loss at softmax")
        if self.token_labels and self.token_labels.maps:
            self._check_label_maps()
        _check_task(self)
        return self

    def _check_iterations(self, iterations: int) -> None:
        """Raise ValueError for schedules in epochs, or beyond the end, in a run of a given number of steps."""
        if self.optim.warmup_epochs or self.anneal or self.model.recast_epoch:
            raise ValueError(
                "a run with iterations has no schedules in epochs; give optim.warmup_iterations instead of "
                "warmup_epochs, and leave anneal and model.recast_epoch out"
            )
        if (self.optim.warmup_iterations or 0) >= iterations:
            raise ValueError(f"optim.warmup_iterations must be below iterations {iterations}; lower it")

    def _check_label_maps(self) -> None:
        """Raise ValueError for data or augmentation that label maps do not support."""
        if self.data.streamed:
            raise ValueError(f"token_labels.maps needs images with file names; {self.data.source} has none")
        if self.augment.crop_padding:
            raise ValueError("token_labels.maps supports random resized crops only; leave augment.crop_padding at 0")

    @property
    def shortened(self) -> str:
        """Which schedules `iso.load_recipe` shortened for fewer epochs than the recipe has; empty if none."""
        return self._shortened

    def with_note(self, shortened: str) -> "Recipe":
        """Return this recipe with a note on the schedules that were shortened."""
        self._shortened = shortened
        return self

    @property
    def folder(self) -> Path:
        """Folder of the run: `out`, or runs/NAME."""
        return self.out or Path("runs") / self.name


def _check_task(recipe: Recipe) -> None:
    """Raise ValueError for data or fields that the recipe's task does not take."""
    source = recipe.data.source
    if recipe.task is None:
        if source not in (*SOURCES, *STREAMS):
            raise ValueError(f"data.source {source} needs a task; give --task.name {' or '.join(task_names(source))}")
        return
    task, name = recipe.task.task, recipe.task.name
    if source not in task.sources:
        raise ValueError(f"data.source {source} is not for {name}; choose one of {', '.join(task.sources)}")
    for field in task.unused:
        if _is_changed(recipe, field):
            raise ValueError(f"{field} does not apply to {name}; leave it out")
    task.check_recipe(recipe)


def _is_changed(part: Part, field: str) -> bool:
    """True if a field such as `loss` or `data.size` differs from its default."""
    *groups, name = field.split(".")
    for group in groups:
        part = getattr(part, group)
    return getattr(part, name) != type(part).model_fields[name].get_default()


CHANGEABLE: dict[str, Any] = {
    "out": True,
    "device": True,
    "source": True,
    "expected": True,
    "log_every": True,
    "checkpoint_minutes": True,
    "track": True,
    "divergence": True,
    "scale": {"accumulate", "parallel", "activation_checkpointing", "compile"},
    "data": {"workers", "root", "unreadable"},
    "model": {"start"},
}
"""Fields that may change when a run is resumed."""


def identity_json(recipe: Recipe) -> str:
    """Return the recipe as JSON, without the fields that may change when a run is resumed."""
    return recipe.model_dump_json(exclude=CHANGEABLE)


def add_defaults(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a saved recipe with defaults for fields added since; an invalid one is returned unchanged."""
    try:
        return json.loads(identity_json(Recipe.model_validate(_convert_old_fields(recipe))))
    except ValidationError:
        return recipe


def _convert_old_fields(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a saved recipe of an older version with today's fields.

    In old versions, schedules began at the first step, and augmentation magnitudes above 10 were clamped to 10.
    """
    optim, augment = ({**(recipe.get(name) or {})} for name in ("optim", "augment"))
    if optim.get("warmup_epochs"):
        optim.setdefault("schedule_from", "start")
    policy = augment.get("auto_augment") or ""
    if policy.startswith("rand") and "-mmax" not in policy:
        augment["auto_augment"] = re.sub(r"-m\d{2,}", "-m10", policy)
    return {**recipe, "optim": optim, "augment": augment}


def changed_fields(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the fields that differ, each with both values, e.g. "epochs was 5, is now 10"."""
    changed = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            changed += changed_fields(a, b, f"{prefix}{name}.")
        elif a != b:
            changed.append(f"{prefix}{name} was {a}, is now {b}")
    return changed


def validate(values: dict[str, Any]) -> Recipe:
    """Return a Recipe from plain values. Raises: UserError with all problems in one line."""
    return check_part(Recipe, "the recipe", values)


def check_part(part: type[P], title: str, values: dict[str, Any]) -> P:
    """Return a group of fields from plain values. Raises: UserError with all problems in one line."""
    try:
        return part.model_validate(values)
    except ValidationError as error:
        problems = [_describe_problem(problem, values) for problem in error.errors()]
        count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        raise UserError(f"{title} has {count}: {'; '.join(problems)}") from None


LIST_PROBLEMS = {"list_type": "must be a list", "tuple_type": "must be a list", "too_short": "has too few values"}
"""Messages for problems with lists, by pydantic's name of the problem."""


def _describe_problem(problem: Any, values: dict[str, Any]) -> str:
    """Return the message of a problem: the field, what is allowed, what was given, the closest name."""
    *groups, last = [str(part) for part in problem["loc"]] or ["recipe"]
    field = ".".join([*groups, last])
    if problem["type"] == "extra_forbidden":
        names = list(fields_of(groups, values))
        close = difflib.get_close_matches(last, names, n=1)
        return f"{field} is not a field" + (
            f" (did you mean {close[0]}?)" if close else f" (fields: {', '.join(names)})"
        )
    if problem["type"] == "missing":
        return f"{field} is missing"
    if problem["type"] == "model_type":
        names = list(fields_of([*groups, last], values))
        return f"{field} is a group of fields: {', '.join(names)}; give these, like {field}.{names[0]}=VALUE"
    message = LIST_PROBLEMS.get(problem["type"], problem["msg"])
    own = problem["type"] == "value_error"  # pydantic's messages begin with a capital letter
    message = message.removeprefix("Value error, ") if own else message[0].lower() + message[1:]
    if problem["type"] == "int_parsing_size":
        message = "input is too large"
    if isinstance(problem["input"], dict):
        return f"{field}: {message}" if problem["loc"] else message
    given = str(problem["input"])[:80] if isinstance(problem["input"], int) else repr(problem["input"])[:80]
    return f"{field}: {message} (given {given})"


def fields_of(groups: list[str], values: Any) -> dict[str, Any]:
    """Return the fields of a nested group, given the names that lead to it, and the values of the recipe."""
    part: Any = Recipe
    for group in groups:
        values = values.get(group) if isinstance(values, dict) else None
        kinds = typing.get_args(part.model_fields[group].annotation) or (part.model_fields[group].annotation,)
        part = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Part)), Part)
    return part.documented_fields(values)


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the values of a YAML or TOML file. Raises: UserError when it is missing, unreadable or not a mapping."""
    try:
        text = read_text(path)
        values = load_toml(text) if path.suffix == ".toml" else load_yaml(text)
    except UserError as error:
        raise UserError(f"cannot read recipe {path}: {error}") from None
    except FileNotFoundError:
        raise UserError(f"cannot read recipe {path}: there is no such file") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"cannot read recipe {path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"recipe {path} must be a mapping of fields, like 'epochs: 10'")
    return values


def document_fields(part: type[Part] = Recipe, prefix: str = "--") -> str:
    """Return Markdown with a line per field: option, description, default; groups follow under their names."""
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
            text = (field.description or "").replace("*", r"\*")  # the help is Markdown, and globs are not emphasis
            lines.append(f"* `{prefix}{name}` {text}{default}")
    return "\n".join([*lines, *groups])
