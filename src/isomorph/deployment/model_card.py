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
from isomorph.json_values import JsonObject
from isomorph.models.input_sizes import evaluation_config
from isomorph.spec import ModelSpec, spec_of
from isomorph.surgery import edits


def recipe_text(values: Any) -> str:
    """Return plain values as YAML, control characters escaped; `isomorph train` takes those of a recipe."""
    plain = json.loads(json.dumps(values, default=str))
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def _block(text: str, language: str = "yaml") -> str:
    """Return a text as a block of code, between more backticks than it has in a row."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def model_card(
    model: nn.Module,
    name: str,
    recipe: JsonObject | None,
    metrics: JsonObject,
    in_timm: bool,
) -> str:
    """Return the text of a model card with its metadata; names that others chose stand in blocks of code."""
    spec = spec_of(model)
    architecture = spec.name.partition(".")[0]
    all_edits = edits(model)
    sections = _facts(model, spec)
    if all_edits:
        sections += [
            "## Changes to the architecture",
            _block(recipe_text(describe_edits(all_edits))),
        ]
    sections += ["## Use", _loading_code(model, name, architecture)]
    if in_timm:
        sections += ["Or with timm:", _timm_code(name, architecture)]
    if metrics:
        rounded = dict(metrics)
        for key, value in metrics.items():
            if isinstance(value, float):
                rounded[key] = round(value, 4)
        sections += ["## Results", _block(recipe_text(rounded))]
    if recipe:
        sections += ["## Training", "Save as recipe.yaml, for `isomorph train recipe.yaml`:"]
        sections.append(_block(recipe_text(recipe)))
    head = f"---\n{_card_data(model, name, recipe, metrics, in_timm).to_yaml()}\n---"
    title = f"# {name.rpartition('/')[2]}"
    return "\n\n".join([head, title, *sections]) + "\n"


def _facts(model: nn.Module, spec: ModelSpec) -> list[str]:
    facts = {
        "architecture": spec.name or type(model).__name__,
        "isomorph": version("isomorph"),
        "parameters": count_parameters(model),
        "classes": getattr(model, "num_classes", None),
    }
    about = "The model:"
    if spec.config and not hasattr(model, "example_inputs"):
        about = "The model, and the images that it expects:"
        facts |= evaluation_config(model)
    return [about, _block(recipe_text(facts))]


def _loading_code(model: nn.Module, name: str, architecture: str) -> str:
    load = f'model = iso.load("hf-hub:{name}")'
    if not architecture:
        load = f'model = iso.load("hf-hub:{name}", base=...)  # a {type(model).__name__} before its changes'
    return _block(f"import isomorph as iso\n\n{load}", "python")


def _timm_code(name: str, architecture: str) -> str:
    lines = ["import timm", "", f'model = timm.create_model("hf-hub:{name}", pretrained=True)']
    if architecture in {full.partition(".")[0] for full in own_models.names()}:
        lines.insert(0, "import isomorph  # registers the architecture")
    return _block("\n".join(lines), "python")


def _classifies(model: nn.Module, recipe: JsonObject | None) -> bool:
    spec = spec_of(model)
    if not spec.config or spec_of(model).task:
        return False
    if recipe and recipe.get("mask"):  # masked pre-training does not train the head
        return False
    return spec.name.partition(".")[0] not in own_models.networks()


def _card_data(
    model: nn.Module,
    name: str,
    recipe: JsonObject | None,
    metrics: JsonObject,
    in_timm: bool,
) -> ModelCardData:
    task = "image-classification"
    classifies = _classifies(model, recipe)
    tags = ["isomorph"]
    if classifies:
        tags.insert(0, task)
    if in_timm:
        tags.append("timm")
    accuracy = None
    model_name = None
    if "top1" in metrics and classifies:
        model_name = name.rpartition("/")[2]
        data = describe_data(model).get("source") or "test images"
        accuracy = [
            EvalResult(
                task, data, data, "accuracy", round(metrics["top1"], 2), metric_name="top-1 (%)"
            )
        ]
    return ModelCardData(
        library_name="timm" if in_timm else "isomorph",
        pipeline_tag=task if classifies else None,
        tags=tags,
        model_name=model_name,
        eval_results=accuracy,
    )
