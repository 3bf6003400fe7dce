"""Recipes: all fields of a run, validation that reports all problems at once, and their documentation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import timm
from pydantic import (
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from isomorph.checkpoints.paths import HUB
from isomorph.errors import describe_value, invalid_fields, unknown_field
from isomorph.json_values import flatten
from isomorph.lab.data.streams import IMAGE_SOURCES
from isomorph.lab.training.recipe import fields
from isomorph.lab.training.recipe.fields import Part, part_of
from isomorph.lab.training.recipe.model_fields import ModelPart
from isomorph.lab.training.recipe.tasks import task_names

P = TypeVar("P", bound=Part)

PLAIN = {"int", "float", "bool", "literal"}
"""Types of pydantic's schemas that a table can hold."""


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
    task: fields.TaskPart | None = None
    data: fields.DataPart = fields.DataPart()
    augment: fields.AugmentPart = fields.AugmentPart()
    optim: fields.OptimPart = fields.OptimPart()
    scale: fields.ScalePart = fields.ScalePart()
    anneal: fields.AnnealPart | None = None
    distill: fields.DistillPart | None = None
    token_labels: fields.TokenLabelPart | None = None
    map_similarity: fields.MapSimilarityPart | None = None
    mask: fields.MaskPart | None = None
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Softmax cross-entropy, or sigmoid cross-entropy summed over classes (for large label sets)."""
    epochs: fields.Epochs = 50
    """Passes over the training data."""
    iterations: fields.Count | None = None
    """Training steps, instead of epochs; the last pass over the data may end before all images were seen."""
    evaluate_every: fields.Count = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    keep_every: fields.KeptEpochs | None = None
    """Epochs between checkpoints epoch-N.safetensors, or a list of epochs, e.g. [1, 2, 5, 10]; by default none."""
    monitor_every: fields.Count | None = None
    """Steps between lines of monitor.jsonl: attention logits and entropy, similarity of pyramid branches, by layer."""
    log_every: fields.Count = 50
    """Steps between lines of steps.jsonl: loss, learning rate, images per second, fraction of time spent loading."""
    checkpoint_minutes: fields.NotNegative = 10.0
    """Minutes between snapshots within an epoch, 0 for one after every step; every epoch ends with one."""
    tensorboard: bool = False
    """Write the curves of the run for TensorBoard too (pip install tensorboard)."""
    drop_path: fields.Rate = 0.0
    """Drop-path rate (stochastic depth) of the last block."""
    ema: fields.Rate | None = None
    """Decay of an exponential moving average of the weights, which is then evaluated and saved."""
    amp: Literal["none", "bf16"] = "none"
    """Automatic mixed precision of the forward pass."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of initialisation, image order, augmentation and data.fraction."""
    device: str = "auto"
    """Device, e.g. cpu or cuda; auto takes a GPU if there is one."""
    out: fields.File | None = None
    """Folder of the run; by default runs/NAME."""
    dataset: str = ""
    """Data set of the published run if it is not the usual one of `data.source`; for information, and dry runs."""
    source: str = ""
    """Source of the recipe (paper, table); for information only."""
    expected: str = ""
    """Published result; for information only."""
    _shortened: str = PrivateAttr("")

    @field_validator("name")
    @classmethod
    def check_name(cls, name: str) -> str:
        parts = name.replace("\\", "/").split("/")
        if {"", ".", ".."} & set(parts) or ":" in name or not name.isprintable():
            raise ValueError(
                "must be a plain name: its folder is runs/NAME; give another folder as out"
            )
        return name

    @model_validator(mode="after")
    def check_fields(self) -> "Recipe":
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        if self.iterations and (self.optim.warmup_epochs or self.anneal or self.model.recast_epoch):
            yield (
                "a run with iterations has no schedules in epochs; leave out "
                "optim.warmup_epochs (but optim.warmup_iterations), anneal and "
                "model.recast_epoch, or give epochs instead"
            )
        if not self.iterations and self.optim.warmup_epochs >= self.epochs:
            yield f"optim.warmup_epochs {self.optim.warmup_epochs:g} must be below epochs {self.epochs}; lower it"
        if self.augment.mixes and self.data.batch_size % 2:
            yield f"data.batch_size {self.data.batch_size} must be even when mixup or cutmix is on"
        if self.model.recast_epoch > self.epochs:
            yield f"model.recast_epoch {self.model.recast_epoch} must be at most epochs {self.epochs}"
        if self.model.recast_epoch and (
            self.scale.parallel == "fsdp" or self.scale.sync_batch_norm
        ):
            yield "model.recast_epoch needs scale.parallel ddp and scale.sync_batch_norm false"
        if self.model.recast_epoch and self.mask:
            yield "model.recast_epoch is for runs with labels; leave it at 0 to recast before masked pre-training"
        if self.mask and self.monitor_every and self.scale.parallel == "fsdp":
            yield "monitor_every does not work with mask and fsdp; leave it out, or set scale.parallel ddp"
        if self.optim.name.lower().startswith("adafactor") and self.scale.parallel == "fsdp":
            yield f"optim.name {self.optim.name} does not work with fsdp; set scale.parallel ddp, or choose adamw"
        if self.augment.repeats > 1 and self.data.streamed:
            yield f"augment.repeats does not work with {self.data.source}, a stream; leave it at 1"
        after = self.model.recast_epoch
        if self.anneal and self.anneal.epochs > self.epochs - after:
            length = f"epochs {self.epochs}"
            if after:
                length += f" - model.recast_epoch {after}"
            yield f"anneal.epochs {self.anneal.epochs:g} must be at most {length}"
        objectives = [name for name in ("token_labels", "distill", "mask") if getattr(self, name)]
        if len(objectives) > 1:
            yield f"{' and '.join(objectives)} exclude each other; give one of them"
        if self.map_similarity and (self.distill or self.mask):
            yield "map_similarity does not work with distill or mask; leave it out"
        if self.mask and self.augment.mixes:
            yield "mask trains without labels to mix; leave augment.mixup and augment.cutmix at 0"
        if self.mask and (self.augment.smoothing or self.loss != "softmax"):
            yield "mask trains without labels; leave augment.smoothing at 0 and loss at softmax"
        if self.token_labels and self.loss == "sigmoid":
            yield "token_labels works with the softmax loss only; leave loss at softmax"
        if self.token_labels and self.token_labels.maps and self.data.streamed:
            yield f"token_labels.maps needs images with file names; {self.data.source} has none"
        if self.token_labels and self.token_labels.maps and self.augment.crop_padding:
            yield "token_labels.maps supports random resized crops only; leave augment.crop_padding at 0"
        source = self.data.source
        if self.task is None:
            if source not in IMAGE_SOURCES:
                yield f"data.source {source} needs a task; give task.name={' or '.join(task_names(source))}"
            return
        task = self.task.task
        name = self.task.name
        if source not in task.sources:
            yield f"data.source {source} is not for {name}; choose one of {', '.join(task.sources)}"
        yield from (
            f"{field} does not apply to {name}; leave it out"
            for field in task.unused
            if self._sets(field)
        )
        task.check_recipe(self)

    def _sets(self, field: str) -> bool:
        part: Part = self
        *groups, name = field.split(".")
        for group in groups:
            part = getattr(part, group)
        return getattr(part, name) != type(part).model_fields[name].get_default()

    @property
    def draw_seed(self) -> int | None:
        """Seed that draws `data.fraction`; None for the first images."""
        if self.data.draw == "first":
            return None
        return self.seed

    @property
    def shortened(self) -> str:
        return self._shortened

    def keeps(self, epoch: int) -> bool:
        every = self.keep_every
        if isinstance(every, list):
            return epoch in every
        return every is not None and epoch % every == 0

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / self.name


# Fields that may change when a run is resumed.
CHANGEABLE: fields.Fields = {
    "out": True,
    "device": True,
    "dataset": True,
    "source": True,
    "expected": True,
    "log_every": True,
    "checkpoint_minutes": True,
    "tensorboard": True,
    "scale": {"accumulate", "parallel", "activation_checkpointing", "compile"},
    "data": {"workers", "root", "unreadable"},
    "model": {"start"},
}


def identity_json(recipe: Recipe) -> str:
    """Return the recipe as JSON, without the fields that may change when a run is resumed."""
    return recipe.model_dump_json(exclude=CHANGEABLE)


def changed_fields(old: fields.Fields, new: fields.Fields) -> list[str]:
    """Return the fields that differ, each with both values, e.g. "epochs was 5, is now 10"."""
    before = flatten(old)
    now = flatten(new)
    changed = []
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            changed.append(f"{name} was {before.get(name)}, is now {now.get(name)}")
    return changed


def validate(values: fields.Fields) -> Recipe:
    """Return a Recipe from plain values. Raises: UserError with all problems in one line."""
    return check_part(Recipe, "the recipe", values)


def check_part(part: type[P], title: str, values: fields.Fields) -> P:
    """Return a group of fields from plain values. Raises: UserError with all problems in one line."""
    try:
        return part.model_validate(values)
    except ValidationError as error:
        problems = [_describe_problem(problem, part) for problem in error.errors()]
        raise invalid_fields(title, problems) from None


def _describe_problem(problem: Any, part: type[Part]) -> str:
    """Return the message of a problem: the field, what is allowed, what was given, the closest name."""
    place = [str(name) for name in problem["loc"] if not str(name).startswith("~")]
    *groups, last = place or ["recipe"]
    field = ".".join([*groups, last])
    if problem["type"] == "extra_forbidden":
        return unknown_field(field, list(_fields_of(groups, part)))
    if problem["type"] == "model_type":
        names = list(_fields_of([*groups, last], part))
        return f"{field} is a group of fields: {', '.join(names)}; give these, like {field}.{names[0]}=VALUE"
    if not problem["loc"]:  # of all fields together
        return problem["msg"].removeprefix("Value error, ")
    return describe_value(field, problem)


def _fields_of(groups: list[str], part: type[Part]) -> fields.Fields:
    for group in groups:
        part = part_of(part.model_fields[group].annotation) or Part
    return part.documented_fields()


def closed_groups(part: type[Part] = Recipe, path: str = "") -> dict[str, fields.Fields]:
    """Return the fields of every group that has no others, by the path of the group; the recipe itself is "".

    A field of numbers, flags or choices alone has pydantic's schema, others None.
    """
    if part.model_config.get("extra") == "allow":  # fields of a task, or of a rule
        return {}
    checks = part.__pydantic_decorators__.field_validators.values()
    checked = {name for check in checks for name in check.info.fields}
    schemas: fields.Fields = dict.fromkeys(part.model_fields)
    groups = {path: schemas}
    for name, field in part.model_fields.items():
        group = part_of(field.annotation)
        if group:
            groups |= closed_groups(group, f"{path}.{name}".lstrip("."))
        elif name not in checked:
            annotation: Any = Annotated[field.annotation, *field.metadata, None]
            schema: Any = TypeAdapter(annotation).core_schema
            if schema.get("schema", schema)["type"] in PLAIN:
                schemas[name] = schema
    return groups


def document_fields(part: type[Part] = Recipe, prefix: str = "--") -> str:
    """Return Markdown with a line per field: option, description, default; groups follow under their names."""
    lines = []
    groups = []
    for name, field in part.documented_fields().items():
        group = part_of(field.annotation)
        if group:
            paragraph = (group.__doc__ or "").split("\n\n")[0]
            title = " ".join(paragraph.split())
            inside = document_fields(group, f"{prefix}{name}.")
            groups.append(f"\n**{prefix.removeprefix('--')}{name}** {title}\n\n{inside}")
        else:
            default = "" if field.is_required() else f" [{field.default}]"
            # the help is Markdown, and globs are not emphasis
            text = (field.description or "").replace("*", r"\*")
            lines.append(f"* `{prefix}{name}` {text}{default}")
    return "\n".join([*lines, *groups])


def task_teacher_file(recipe: Recipe) -> Path | None:
    """Return the file or run of the teacher of a recipe's task; None without one, or if timm or the hub has it."""
    teacher = getattr(recipe.task, "teacher", None)
    if not teacher or teacher.startswith(HUB) or timm.is_model(teacher):
        return None
    return Path(teacher)
