"""The model card of a shared model: what it is, how to load it, what it was measured to do, and how it was trained."""

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from torch import nn
from torch.utils._pytree import tree_map

import isomorph.models as own_models
from isomorph.checkpoints.files import short_reason
from isomorph.checkpoints.model import describe_data, describe_edits
from isomorph.errors import UserError
from isomorph.evaluation.cost import count_parameters
from isomorph.evaluation.input_sizes import evaluation_config
from isomorph.surgery import edits
from isomorph.terminal_tables import METRIC_FORMATS
from isomorph.training.recipe.recipe import validate
from isomorph.training.run.log import read_log
from isomorph.training.task import task_record

_LOCAL_FIELDS: Any = {"out": True, "expected": True, "data": {"root"}}  # about the machine, or the paper's result


def read_training(run: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Return a run's recipe, less its defaults, and its last metrics (of the folder and its model.safetensors only).

    Raises: UserError when there is no readable run.
    """
    folder = run if run.is_dir() else run.parent
    try:
        recipe = validate(json.loads((folder / "recipe.json").read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{run} does not belong to a run with a readable recipe.json ({short_reason(error)})") from None
    changed = recipe.model_dump(mode="json", exclude_defaults=True, exclude=_LOCAL_FIELDS)
    rows = [row for row in read_log(folder / "log.jsonl") if METRIC_FORMATS.keys() & row.keys()]
    last = rows[-1] if rows and (run.is_dir() or run.name == "model.safetensors") else {}
    metrics = {key: value for key, value in last.items() if key in METRIC_FORMATS or key == "epoch"}
    # a path tells of this machine: its last name is enough
    plain = tree_map(lambda x: Path(x).name if isinstance(x, str) and x[:1] in ("/", "~") else x, changed)
    return {"name": recipe.name, **plain}, metrics


def recipe_text(values: Any) -> str:
    """Return plain values as YAML, control characters escaped; `isomorph train` takes those of a recipe."""
    plain = json.loads(json.dumps(values, default=str))
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def _block(text: str, language: str = "yaml") -> str:
    """Return a text as a block of code, between more backticks than it has in a row."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def model_card(
    model: nn.Module, name: str, recipe: dict[str, Any] | None, metrics: dict[str, Any], in_timm: bool
) -> str:
    """Return the text of a model card with its metadata; names that others chose stand in blocks of code."""
    config, made = getattr(model, "pretrained_cfg", None) or {}, edits(model)
    architecture = (config.get("architecture") or "").partition(".")[0]
    facts = {"architecture": config.get("architecture") or type(model).__name__, "isomorph": version("isomorph")}
    facts |= {"parameters": count_parameters(model), "classes": getattr(model, "num_classes", None)}
    expected = evaluation_config(model) if config and not hasattr(model, "example_inputs") else {}
    about = "The model, and the images that it expects:" if expected else "The model:"
    sections = [about, _block(recipe_text(facts | expected))]
    if made:
        sections += ["## Changes to the architecture", _block(recipe_text(describe_edits(made)))]
    base = ")" if architecture else f", base=...)  # a {type(model).__name__} before its changes"
    sections += ["## Use", _block(f'import isomorph as iso\n\nmodel = iso.load("hf-hub:{name}"{base}', "python")]
    if in_timm:
        own = architecture in {full.partition(".")[0] for full in own_models.names()}
        imports = "import isomorph  # registers the architecture\n" * own + "import timm"
        loads = f'{imports}\n\nmodel = timm.create_model("hf-hub:{name}", pretrained=True)'
        sections += ["Or with timm:", _block(loads, "python")]
    if metrics:
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in metrics.items()}
        sections += ["## Results", _block(recipe_text(rounded))]
    if recipe:
        sections += ["## Training", "Save as recipe.yaml, for `isomorph train recipe.yaml`:"]
        sections.append(_block(recipe_text(recipe)))
    classifies = bool(config) and not (recipe or {}).get("mask")  # masked pre-training does not train the head
    classifies = classifies and not task_record(model) and architecture not in own_models.networks()
    head = f"---\n{_card_data(model, name, metrics, in_timm, classifies).to_yaml()}\n---"
    return "\n\n".join([head, f"# {name.rpartition('/')[2]}", *sections]) + "\n"


def _card_data(model: nn.Module, name: str, metrics: dict[str, Any], in_timm: bool, classifies: bool) -> ModelCardData:
    task = "image-classification"
    data, accuracy = describe_data(model).get("source") or "test images", None
    if "top1" in metrics and classifies:
        accuracy = [EvalResult(task, data, data, "accuracy", round(metrics["top1"], 2), metric_name="top-1 (%)")]
    return ModelCardData(
        library_name="timm" if in_timm else "isomorph",
        pipeline_tag=task if classifies else None,
        tags=[*[task] * classifies, "isomorph", *["timm"] * in_timm],
        model_name=name.rpartition("/")[2] if accuracy else None,
        eval_results=accuracy,
    )
