"""Write tables.json from the library: run `python -m isomorph.cli.write_tables` after a change of models or fields."""

import json
from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import timm
import torch

import isomorph as iso
from isomorph.analysis.cost import count_parameters
from isomorph.cli.tables import PATH
from isomorph.json_values import JsonObject
from isomorph.lab.data.streams import IMAGE_SOURCES
from isomorph.lab.recipes.tables import published_tables
from isomorph.lab.training.recipe.recipe import closed_groups, document_fields
from isomorph.lab.training.recipe.rule_options import rule_options, rule_texts
from isomorph.lab.training.recipe.tasks import TASKS, find_task


def library_tables() -> JsonObject:
    """Return what tables.json has to contain."""
    sources = set(IMAGE_SOURCES)
    for task in TASKS:
        sources.update(find_task(task).sources)
    return {
        "models": [_model_row(name) for name in iso.models.names()],
        "rules": rule_texts(),
        "rule_options": rule_rows(),
        "recipe_help": document_fields(),
        "recipe_fields": closed_groups(),
        "sources": sorted(sources),
        "published": [{"name": x.name, "title": x.title} for x in published_tables().values()],
    }


def _model_row(name: str) -> JsonObject:
    with torch.device("meta"):
        model = timm.create_model(name)
    config = timm.get_pretrained_cfg(name)
    return {
        "name": name,
        "parameters": count_parameters(model),
        "input": "x".join(map(str, config.input_size[1:])),
        "weights": config.hf_hub_id or config.url or "none",
    }


def rule_rows() -> list[JsonObject]:
    """Return the options of rules as plain values: their choices and other types by name."""
    rows = []
    for option in rule_options().values():
        choices: list[Any] = []
        names = []
        for kind in get_args(option.type):
            if get_origin(kind) is Literal:
                choices += get_args(kind)
            elif kind is not NoneType and get_origin(kind) is not Mapping:
                names.append(str(kind) if get_args(kind) else kind.__name__)
        rows.append({"name": option.name, "choices": choices, "types": names, "help": option.help})
    return rows


if __name__ == "__main__":
    PATH.write_text(json.dumps(library_tables(), indent=1) + "\n")
    print(f"wrote {PATH}")
