"""The model card of a shared model: what it is, how to load it, what it was measured to do, and how it was trained."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from torch import nn

import isomorph.models as own_models
from isomorph.checkpoints.model import describe_data, describe_edits
from isomorph.deployment.artefact import own_version
from isomorph.errors import UserError
from isomorph.evaluation.cost import count_parameters
from isomorph.evaluation.input_sizes import evaluation_config
from isomorph.surgery import Edit, edits
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
_METRICS = {
    "top1": "top-1 (%)",
    "top5": "top-5 (%)",
    "nll": "negative log-likelihood (nats)",
    "ece": "calibration error (%)",
    "images": "images",
}
"""Metrics of an evaluation, and their names in a model card."""
_LOCAL_FIELDS: Any = {"out": True, "expected": True, "data": {"root"}}
"""Fields of a recipe that are about the machine of a run, or about the paper's result."""
_FOLDERS = re.compile(r"(?<![\w.])[/~](?=\S)[^=,;\"'\[\]{}\n]*/")
"""The folders of an absolute path, which are left out."""
_VERSIONS = ("python", "torch", "timm")
_MAX_NAMES = 8
"""Names of modules that a card lists for an edit."""


@dataclass(frozen=True)
class Training:
    """How a model was trained: fields of the recipe that differ from their defaults, command, versions and metrics."""

    recipe: Mapping[str, Any]
    epochs: int
    command: str
    environment: Mapping[str, Any]
    metrics: Mapping[str, Any]

    def recipe_text(self) -> str:
        """Return the recipe as YAML, which `isomorph train` takes."""
        return yaml.safe_dump(dict(self.recipe), sort_keys=False, allow_unicode=True)


def read_training(run: Path) -> Training:
    """Return what a run's folder says about the training of a model, given the folder or one of its checkpoints.

    Raises: UserError when there is no readable run.
    """
    folder = run if run.is_dir() else run.parent
    try:
        recipe = validate(json.loads((folder / "recipe.json").read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{run} does not belong to a run with a readable recipe.json ({' '.join(str(error).split())[:200]})"
        ) from None
    rows = [row for row in read_log(folder / "log.jsonl") if "top1" in row]
    environment = (read_log(folder / "environment.jsonl") or [{}])[-1]
    changed = recipe.model_dump(mode="json", exclude_defaults=True, exclude=_LOCAL_FIELDS)
    return Training(
        _without_folders(changed), recipe.epochs, _command(environment), environment, _chosen_row(rows, run)
    )


def _without_folders(value: Any) -> Any:
    """Return plain values with absolute paths cut to the name of their file."""
    if isinstance(value, dict):
        return {key: _without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return _FOLDERS.sub("", value) if isinstance(value, str) else value


def _chosen_row(rows: list[dict[str, Any]], run: Path) -> dict[str, Any]:
    """Return the evaluation of a checkpoint of a run: the best, that of epoch N, or the last one.

    A file that the run did not write, such as a pruned model, has none.
    """
    if run.name == "best.safetensors":
        return max(rows, key=lambda row: row["top1"], default={})
    if run.stem.startswith("epoch-"):
        return next((row for row in rows if f"epoch-{row.get('epoch')}" == run.stem), {})
    return rows[-1] if rows and (run.is_dir() or run.name == "model.safetensors") else {}


def _command(environment: Mapping[str, Any]) -> str:
    """Return the command that started a run, without the folders of its machine; empty for a run from Python."""
    _, *words = _without_folders(environment.get("command")) or [""]
    return shlex.join(["isomorph", *map(str, words)]) if words[:1] == ["train"] else ""


def model_card(
    model: nn.Module, name: str, training: Training | None, results: Mapping[str, float], in_timm: bool
) -> str:
    """Return the text of a model card, with the metadata that the hub reads at its head."""
    metrics = {**(training.metrics if training else {}), **results}
    measured = {key: value for key, value in metrics.items() if key in _METRICS or key in results}
    task, data, short = _task(model), describe_data(model).get("source") or "test images", name.rpartition("/")[2]
    accuracy = None
    if "top1" in measured and task == _TASK:
        top1 = round(measured["top1"], 2)
        accuracy = [EvalResult(_TASK, data, data, "accuracy", top1, metric_name="top-1 (%)")]
    metadata = ModelCardData(
        library_name="timm" if in_timm else "isomorph",
        pipeline_tag=task,
        tags=[*([task] if task else []), "isomorph", *(["timm"] if in_timm else [])],
        model_name=short if accuracy else None,
        eval_results=accuracy,
    )
    parts = [
        f"---\n{metadata.to_yaml()}\n---\n\n# {short}\n\n{_summary(model)}",
        _method(edits(model)),
        _usage(model, name, in_timm),
        results_section(model, measured, training, results),
        _training_section(training),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _task(model: nn.Module) -> str | None:
    """Return the hub's name of the task of a model; None if there is none, or it is unknown."""
    if recorded := task_record(model).get("name"):
        return _OTHER_TASKS.get(recorded)
    return None if _architecture(model) in own_models.networks() else _TASK


def _architecture(model: nn.Module) -> str:
    """Return the name by which timm creates the model before its changes, without that of its weights; or ""."""
    return ((getattr(model, "pretrained_cfg", None) or {}).get("architecture") or "").partition(".")[0]


def _summary(model: nn.Module) -> str:
    """Return a sentence on the architecture, its size and its images."""
    config, images = getattr(model, "pretrained_cfg", None) or {}, evaluation_config(model)
    kind, classes = config.get("architecture") or type(model).__name__, getattr(model, "num_classes", 0)
    channels, height, width = images["input_size"]
    mean, deviation = (", ".join(f"{value:.3g}" for value in images[key]) for key in ("mean", "std"))
    return (
        f"A `{kind}` with {count_parameters(model):,} parameters"
        + (f" and {classes:,} classes" if classes else "")
        + f", for images of {height} x {width} with {channels} channels (mean {mean}, standard deviation {deviation}, "
        f"{images['interpolation']}, crop {images['crop_pct']:g}). Written by isomorph {own_version()}."
    )


def _method(made: Sequence[Edit]) -> str:
    """Return what was changed in the model, edit by edit."""
    lines = ["## Method", "The model was made from the architecture above by these changes, in this order:"]
    for edit, plain in zip(made, describe_edits(tuple(made)), strict=True):
        fields = ", ".join(f"{field}={value!r}" for field, value in plain["fields"].items() if value is not None)
        about = cleandoc(type(edit.rule).__doc__ or "").split("\n\n")[0].replace("\n", " ")
        more = f" and {len(edit.names) - _MAX_NAMES} more" if len(edit.names) > _MAX_NAMES else ""
        names = ", ".join(f"`{name}`" for name in edit.names[:_MAX_NAMES])
        lines.append(f"- **{plain['rule']}**({fields}): {about} On {names}{more}.")
    return "\n\n".join(lines) if made else ""


def _usage(model: nn.Module, name: str, in_timm: bool) -> str:
    """Return how to load the model, and how to measure it again."""
    kind = _architecture(model)
    base = ")" if kind else f", base=...)  # a {type(model).__name__} before its changes"
    load = f'model = iso.load("hf-hub:{name}"{base}'
    text = f"## Use\n\n```python\nimport isomorph as iso\n\n{load}\n```"
    if in_timm:
        own = kind in {full.partition(".")[0] for full in own_models.names()}
        imports = "import isomorph  # registers the architecture\nimport timm" if own else "import timm"
        load = f'model = timm.create_model("hf-hub:{name}", pretrained=True)'
        text += f"\n\nOr with timm:\n\n```python\n{imports}\n\n{load}\n```"
    elif kind and kind not in own_models.networks():
        text += "\n\n`timm.create_model` cannot build this model and ends with an error: it does not make the changes."
    measurable = kind and _task(model) is not None
    return text + (
        f"\n\nTo measure its accuracy:\n\n```bash\nisomorph evaluate hf-hub:{name}\n```" if measurable else ""
    )


def _number(key: str, value: float) -> str:
    """Return a metric with the digits that mean something: per cents with two, whole numbers as they are."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2f}" if _METRICS.get(key, "").endswith("(%)") else f"{value:.4g}"


def results_section(
    model: nn.Module, measured: Mapping[str, float], training: Training | None, given: Mapping[str, float]
) -> str:
    """Return the measured metrics as a table."""
    if not measured:
        return ""
    data = describe_data(model).get("source")
    titles = {key: " ".join(_METRICS.get(key, key).split()).replace("|", r"\|") for key in measured}
    rows = [f"| {titles[key]} | {_number(key, value)} |" for key, value in measured.items()]
    where = f"On the test images of `{data}`" if data else "On test images"
    epoch = training.metrics.get("epoch") if training else None
    when = f", after epoch {epoch} of {training.epochs}" if training and epoch else ""
    by = " Given by the author: " + ", ".join(_METRICS.get(key, key) for key in given) + "." if given else ""
    return "\n".join([f"## Results\n\n{where}{when}.{by}\n\n| metric | value |", "|---|---|", *rows])


def _training_section(training: Training | None) -> str:
    """Return recipe, command and versions."""
    if training is None:
        return ""
    versions = ", ".join(f"{key} {training.environment[key]}" for key in _VERSIONS if key in training.environment)
    processes = training.environment.get("processes", 1)
    facts = [training.environment.get("device"), f"{processes} processes" if processes > 1 else "", versions]
    source = f" ({training.recipe['source']})" if training.recipe.get("source") else ""
    lines = [
        "## Training",
        f"Recipe `{training.recipe.get('name', 'run')}`{source}. `recipe.yaml` in this repository "
        "has its fields; `isomorph train recipe.yaml` repeats it.",
        f"Run on {', '.join(filter(None, facts))}:",
    ]
    if training.command:
        lines.append(f"```bash\n{training.command}\n```")
    return "\n\n".join([*lines, f"```yaml\n{training.recipe_text()}```"])
