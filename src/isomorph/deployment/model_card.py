"""The model card of a shared model: what it is, how to load it, what it was measured to do, and how it was trained."""

import json
import re
from importlib.metadata import version
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from torch import nn

import isomorph.models as own_models
from isomorph.analysis.cost import count_parameters
from isomorph.checkpoints.model import describe_data, describe_edits
from isomorph.models.input_sizes import evaluation_config, task_record
from isomorph.spec import spec_of
from isomorph.surgery import edits


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
    spec = spec_of(model)
    made = edits(model)
    architecture = spec.name.partition(".")[0]
    facts = {"architecture": spec.name or type(model).__name__, "isomorph": version("isomorph")}
    facts |= {"parameters": count_parameters(model), "classes": getattr(model, "num_classes", None)}
    expected = evaluation_config(model) if spec.config and not hasattr(model, "example_inputs") else {}
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
    classifies = bool(spec.config) and not (recipe or {}).get("mask")  # masked pre-training does not train the head
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
