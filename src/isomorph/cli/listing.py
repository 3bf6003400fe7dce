"""Commands that list what there is: models, recipes, doctor."""

import json
import sys
from fnmatch import fnmatchcase

import timm
import torch
import yaml
from cyclopts import App

import isomorph as iso
from isomorph import doctor as machine
from isomorph.cli.app import Json, app
from isomorph.errors import UserError
from isomorph.evaluation.cost import count_parameters
from isomorph.recipes import RECIPES, load_recipe, recipe_values
from isomorph.report.terminal_tables import print_table, print_text_table


@app.command(name="models")
def models_(pattern: str = "*", /, *, json_: Json = False) -> None:
    """List the models that isomorph adds to timm, with their sizes.

    Parameters
    ----------
    pattern
        Glob over names.
    """
    names = [name for name in iso.models.names() if fnmatchcase(name, pattern)]
    if not names:
        raise UserError(f"no model of isomorph matches {pattern!r}; it has {', '.join(iso.models.names())}")
    rows = []
    for name in names:
        with torch.device("meta"):
            model = timm.create_model(name)
        size = "x".join(map(str, model.pretrained_cfg["input_size"][1:]))
        rows.append(
            {
                "name": name,
                "parameters": count_parameters(model),
                "input": size,
                "weights": model.pretrained_cfg.get("tag", ""),
            }
        )
    if json_:
        print(json.dumps(rows))
    else:
        print_table(
            [
                ["model", "parameters", "input", "weights"],
                *([r["name"], f"{r['parameters']:,}", r["input"], r["weights"]] for r in rows),
            ]
        )


recipes = App(name="recipes", help="List the recipes, or show one as an editable file.")
app.command(recipes)


@recipes.default
def list_recipes(pattern: str = "*", /, *, json_: Json = False) -> None:
    """List recipes with their source and the number they should give.

    Parameters
    ----------
    pattern
        Glob over names, e.g. 'tcnn_*'.
    """
    found = {name: recipe for name, recipe in RECIPES.items() if fnmatchcase(name, pattern)}
    if not found:
        raise UserError(f"no recipe matches {pattern!r}; a glob over names, like 'tcnn_*'")
    if json_:
        print(json.dumps(found, default=str))
    else:
        rows = ([name, recipe.get("source", ""), recipe.get("expected", "")] for name, recipe in found.items())
        print_text_table([["recipe", "source", "expected"], *rows])


@recipes.command(name="show")
def show_recipe(name: str, /) -> None:
    """Print a recipe as YAML: redirect it to a file and edit it."""
    load_recipe(name)
    values = json.loads(json.dumps(recipe_values(name), default=str))
    print(yaml.safe_dump(values, sort_keys=False), end="")


@app.command
def doctor(*, json_: Json = False) -> None:
    """Versions, devices, a torchvision that does not fit its torch, free disk."""
    lines = list(machine.examine())
    if json_:
        print(json.dumps({what: {"finding": finding, "ok": ok} for what, finding, ok in lines}))
    else:
        print_table([["", "", ""], *([what, finding, "" if ok else "PROBLEM"] for what, finding, ok in lines)])
    if not all(ok for _, _, ok in lines):
        sys.exit(1)
