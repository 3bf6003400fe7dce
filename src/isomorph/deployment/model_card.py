"""The model card of a shared model: what it is, how to load it, what it was measured to do, and how it was trained."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn

import isomorph.models as own_models
from isomorph.checkpoints.files import short_reason
from isomorph.checkpoints.model import describe_data, describe_edits
from isomorph.deployment.artefact import own_version
from isomorph.errors import UserError
from isomorph.evaluation.cost import count_parameters
from isomorph.evaluation.input_sizes import evaluation_config
from isomorph.surgery import edits
from isomorph.terminal_tables import printable
from isomorph.training.recipe.recipe import validate
from isomorph.training.run.log import read_log
from isomorph.training.task import task_record

_TASK = "image-classification"
_OTHER_TASKS = {
    "segmentation": "image-segmentation",
    "detection": "object-detection",
    "text_classification": "text-classification",
    "masked_lm": "fill-mask",
    "diffusion": "unconditional-image-generation",
}
"""The hub's names of isomorph's tasks."""
_METRICS = dict(top1="top-1 (%)", top5="top-5 (%)", nll="negative log-likelihood (nats)", ece="calibration error (%)")
"""Metrics of an evaluation, besides the number of images, and their names in a model card."""
_LOCAL_FIELDS: Any = {"out": True, "expected": True, "data": {"root"}}
"""Fields of a recipe that are about the machine of a run, or about the paper's result."""
_FOLDERS = re.compile(r"(?<![\w.])[/~](?=\S)[^=,;\"'\[\]{}\n]*/")
"""The folders of an absolute path, which are left out."""
_MAX_NAMES = 8
"""Names of modules that a card lists for an edit."""
_TEMPLATE = """---
{{ card_data }}
---

# {{ text(short) }}

A {{ code(kind) }} with {{ facts }}. Written by isomorph {{ version }}.
{% if edits %}
## Method

The model was made from the architecture above by these changes, in this order:
{% for rule, fields, about, names in edits %}
- **{{ rule }}**({{ text(fields) }}): {{ about }} On {{ names }}.
{% endfor %}{% endif %}
## Use

{{ block(load, "python") }}
{% if in_timm %}
Or with timm:

{{ block(timm, "python") }}
{% endif %}{% if task and architecture %}
To measure its accuracy:

{{ block("isomorph evaluate hf-hub:" ~ name, "bash") }}
{% endif %}{% if measured %}
## Results

On {{ code(data) }}{% if epoch %}, after epoch {{ epoch }} of {{ training.epochs }}{% endif %}.

| metric | value |
|---|---|
{% for title, value in measured %}| {{ text(title) }} | {{ value }} |
{% endfor %}{% endif %}{% if training %}
## Training

Recipe {{ code(training.recipe.name) }} {% if training.recipe.source %}({{ text(training.recipe.source) }}){% endif %}:
`recipe.yaml` in this repository has its fields; `isomorph train recipe.yaml` repeats it.
Run with {{ text(training.versions) }}:

{% if training.command %}{{ block(training.command, "bash") }}

{% endif %}{{ block(training.recipe_text(), "yaml") }}
{% endif %}"""


@dataclass(frozen=True)
class Training:
    """How a model was trained: fields of the recipe that differ from their defaults, command, versions and metrics."""

    recipe: Mapping[str, Any]
    epochs: int
    command: str
    versions: str
    metrics: Mapping[str, Any]

    def recipe_text(self) -> str:
        """Return the recipe as YAML, which `isomorph train` takes."""
        return yaml.safe_dump(dict(self.recipe), sort_keys=False, allow_unicode=True)


def read_training(run: Path) -> Training:
    """Return what a run's folder says about the training of a model, given the folder or one of its checkpoints.

    A file that the run did not write, such as a pruned model, has no metrics.

    Raises: UserError when there is no readable run.
    """
    folder = run if run.is_dir() else run.parent
    try:
        recipe = validate(json.loads((folder / "recipe.json").read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{run} does not belong to a run with a readable recipe.json ({short_reason(error)})") from None
    rows = [row for row in read_log(folder / "log.jsonl") if "top1" in row]
    if run.name == "best.safetensors":
        rows = sorted(rows, key=lambda row: row["top1"])
    elif run.stem.startswith("epoch-"):
        rows = [row for row in rows if f"epoch-{row.get('epoch')}" == run.stem]
    elif not (run.is_dir() or run.name == "model.safetensors"):
        rows = []
    environment = (read_log(folder / "environment.jsonl") or [{}])[-1]
    changed = recipe.model_dump(mode="json", exclude_defaults=True, exclude=_LOCAL_FIELDS)
    _, *words = _without_folders(environment.get("command")) or [""]
    command = shlex.join(["isomorph", *map(str, words)]) if words[:1] == ["train"] else ""  # none of a run from Python
    versions = ", ".join(f"{k} {environment[k]}" for k in ("python", "torch", "timm", "device") if k in environment)
    known = {"name": recipe.name, "source": "", **_without_folders(changed)}
    return Training(known, recipe.epochs, command, versions, rows[-1] if rows else {})


def _without_folders(value: Any) -> Any:
    """Return plain values with absolute paths cut to the name of their file."""
    if isinstance(value, dict):
        return {key: _without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return _FOLDERS.sub("", value) if isinstance(value, str) else value


def _text(value: object) -> str:
    """Return a text in one line without a meaning in Markdown or HTML."""
    line = " ".join(printable(value).split())
    return re.sub(r"([\\`*_{}\[\]|#~])", r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def _code(value: object) -> str:
    """Return a text as code in a line, between more backticks than it has in a row."""
    line = " ".join(printable(value).split())
    ticks = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    return f"{ticks}{line}{ticks}" if len(ticks) == 1 else f"{ticks} {line} {ticks}"


def _block(text: str, language: str) -> str:
    """Return a text as a block of code, between more backticks than it has in a row."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{printable(text).rstrip()}\n{fence}"


def model_card(
    model: nn.Module, name: str, training: Training | None, results: Mapping[str, float], in_timm: bool
) -> str:
    """Return the text of a model card, with the metadata that the hub reads at its head."""
    config = getattr(model, "pretrained_cfg", None) or {}
    architecture, recorded = (config.get("architecture") or "").partition(".")[0], task_record(model).get("name")
    task = _OTHER_TASKS.get(str(recorded)) if recorded else None if architecture in own_models.networks() else _TASK
    metrics = {**(training.metrics if training else {}), **results}
    measured = {key: value for key, value in metrics.items() if key in (*_METRICS, "images", *results)}
    data, short = describe_data(model).get("source") or "test images", name.rpartition("/")[2]
    accuracy = None
    if "top1" in measured and task == _TASK:
        top1 = round(measured["top1"], 2)
        accuracy = [EvalResult(_TASK, data, data, "accuracy", top1, metric_name="top-1 (%)")]
    card_data = ModelCardData(
        library_name="timm" if in_timm else "isomorph",
        pipeline_tag=task,
        tags=[*([task] if task else []), "isomorph", *(["timm"] if in_timm else [])],
        model_name=short if accuracy else None,
        eval_results=accuracy,
    )
    base = ")" if architecture else f", base=...)  # a {type(model).__name__} before its changes"
    own = architecture in {full.partition(".")[0] for full in own_models.names()}
    imports = "import isomorph  # registers the architecture\n" * own + "import timm"
    parts: dict[str, Any] = dict(
        name=name, short=short, architecture=architecture, task=task, in_timm=in_timm, training=training
    )
    parts |= dict(kind=config.get("architecture") or type(model).__name__, facts=_facts(model), edits=_edits(model))
    parts |= dict(version=own_version(), data=data, epoch=training and training.metrics.get("epoch"))
    shown = {key: f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" for key, value in measured.items()}
    card = ModelCard.from_template(
        card_data,
        template_str=_TEMPLATE,
        load=f'import isomorph as iso\n\nmodel = iso.load("hf-hub:{name}"{base}',
        timm=f'{imports}\n\nmodel = timm.create_model("hf-hub:{name}", pretrained=True)',
        measured=[(_METRICS.get(key, key), value) for key, value in shown.items()],
        **parts | dict(text=_text, code=_code, block=_block),
    )
    return re.sub(r"\n{3,}", "\n\n", str(card))


def _facts(model: nn.Module) -> str:
    """Return the size of a model, its classes, and the images that it expects."""
    classes, images = getattr(model, "num_classes", 0), evaluation_config(model)
    channels, height, width = images["input_size"]
    mean, deviation = (", ".join(f"{value:.3g}" for value in images[key]) for key in ("mean", "std"))
    size = f"{count_parameters(model):,} parameters" + (f" and {classes:,} classes" if classes else "")
    pixels = f"mean {mean}, standard deviation {deviation}, {images['interpolation']}, crop {images['crop_pct']:g}"
    return f"{size}, for images of {height} x {width} with {channels} channels ({pixels})"


def _edits(model: nn.Module) -> list[tuple[str, str, str, str]]:
    """Return the rule, fields, description and modules of every edit."""
    made, rows = edits(model), []
    for edit, plain in zip(made, describe_edits(made), strict=True):
        fields = ", ".join(f"{field}={value!r}" for field, value in plain["fields"].items() if value is not None)
        about = cleandoc(type(edit.rule).__doc__ or "").split("\n\n")[0].replace("\n", " ")
        more = f" and {len(edit.names) - _MAX_NAMES} more" if len(edit.names) > _MAX_NAMES else ""
        rows.append((plain["rule"], fields, about, ", ".join(map(_code, edit.names[:_MAX_NAMES])) + more))
    return rows
