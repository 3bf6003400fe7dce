"""The models and recipes commands."""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from cyclopts import App

from isomorph.cli.options import Json, app, command
from isomorph.cli.output import show
from isomorph.cli.tables import tables
from isomorph.errors import UserError
from isomorph.recipes import RECIPES, recipe_values
from isomorph.terminal_tables import print_text_table


@command
def models_(pattern: str = "*", /, *, json_: Json = False) -> None:
    """List the models that isomorph adds to timm, with their parameters, input size and public weights.

    Example: isomorph models "convit*"

    Parameters
    ----------
    pattern
        Glob over model names, for example 'tdrl_*'.
    """
    known = tables()["models"]
    rows = [row for row in known if fnmatchcase(row["name"], pattern)]
    if not rows:
        raise UserError(f"no model of isomorph matches {pattern!r}; choose from {', '.join(r['name'] for r in known)}")
    if json_:
        show(True, rows)
    else:
        _print_models(rows)


def _print_models(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of models, and the families that have no public weights."""
    body = [[r["name"], f"{r['parameters']:,}", r["input"], _describe_weights(r)] for r in rows]
    print_text_table([["model", "parameters", "input", "public weights"], *body])
    with_weights = {row["family"] for row in rows if row["weights_from"]}
    without = list(dict.fromkeys(row["family"] for row in rows if row["family"] not in with_weights))
    if without:
        print(f"\nNo public weights exist for {', '.join(without)}: train them with a recipe, or give --weights.")


def _describe_weights(row: Mapping[str, Any]) -> str:
    """Return the tag of a model's public weights and where they are."""
    return f"{row['weights']}, {row['weights_from']}" if row["weights_from"] else "none"


recipes = App(name="recipes", help="List the recipes; `isomorph recipes show NAME` prints one as YAML.")
app.command(recipes)


@recipes.default
def list_recipes(pattern: str = "*", /, *, json_: Json = False) -> None:
    """List recipes with their source and the result they should reach.

    Example: isomorph recipes "tcnn_*"

    Parameters
    ----------
    pattern
        Glob over recipe names, for example 'tcnn_*'.
    """
    matching = {name: recipe for name, recipe in RECIPES.items() if fnmatchcase(name, pattern)}
    if not matching:
        raise UserError(f"no recipe matches {pattern!r}; give a glob over names, for example 'tcnn_*'")
    if json_:
        show(True, matching)
    else:
        rows = ([name, recipe.get("source", ""), recipe.get("expected", "")] for name, recipe in matching.items())
        print_text_table([["recipe", "source", "expected"], *rows])


@recipes.command(name="show")
def show_recipe(name: str, /) -> None:
    """Print a recipe as YAML, to save to a file and edit.

    Example: isomorph recipes show digits_cnn > mine.yaml

    Parameters
    ----------
    name
        Name of the recipe, as listed by `isomorph recipes`.
    """
    import yaml

    values = json.loads(json.dumps(recipe_values(name), default=str))
    print(yaml.safe_dump(values, sort_keys=False), end="")
