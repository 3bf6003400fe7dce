"""Write tables.json from the library: run `python -m isomorph.cli.write_tables` after a change of models or fields."""

import json
from typing import Any, Literal, get_args, get_origin

import timm
import torch

import isomorph as iso
from isomorph.cli.tables import PATH
from isomorph.evaluation.cost import count_parameters
from isomorph.surgery.rules.registry import RuleOption, rule_options, rule_texts
from isomorph.training.recipe.recipe import document_fields


def library_tables() -> dict[str, Any]:
    """Return what tables.json has to contain."""
    return {
        "models": [_model_row(name) for name in iso.models.names()],
        "rules": rule_texts(),
        "rule_options": [option_row(option) for option in rule_options().values()],
        "recipe_help": document_fields(),
    }


def _model_row(name: str) -> dict[str, Any]:
    """Return what `isomorph models` prints about a model."""
    with torch.device("meta"):
        model = timm.create_model(name)
    config = model.pretrained_cfg
    family = type(model).__module__.rpartition(".")[2]
    return {
        "name": name,
        "family": family,
        "parameters": count_parameters(model),
        "input": "x".join(map(str, config["input_size"][1:])),
        "weights": config.get("tag", ""),
    }


def option_row(option: RuleOption) -> dict[str, Any]:
    """Return an option of rules as plain values: its choices and other types by name."""
    choices = [choice for kind in option.kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    others = [kind for kind in option.kinds if get_origin(kind) is not Literal]
    names = [str(kind) if get_args(kind) else kind.__name__ for kind in others]
    return {"name": option.name, "choices": choices, "types": names, "help": option.help}


if __name__ == "__main__":
    PATH.write_text(json.dumps(library_tables(), indent=1) + "\n")
    print(f"wrote {PATH}")
