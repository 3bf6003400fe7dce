"""The papers' runs of image classification by name, each with its expected number.

docs/recipes.md says which published runs are not among them.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isomorph.training.recipe.recipe import (
    Recipe,
    apply_overrides,
    read_recipe,
    validate,
)
from isomorph.errors import UserError
from isomorph.recipes import cifar, coatnet, convit, refiner, tcnn, tdrl, tdrl_figures

RECIPES: dict[str, dict[str, Any]] = {
    **tcnn.RECIPES,
    **convit.RECIPES,
    **tdrl.RECIPES,
    **tdrl_figures.RECIPES,
    **refiner.RECIPES,
    **coatnet.RECIPES,
    **cifar.RECIPES,
}
"""Recipes by name, as plain values."""


def recipe_values(name: str) -> dict[str, Any]:
    """The values of a named recipe or of a YAML or TOML file. Raises: UserError naming the closest recipes."""
    if name in RECIPES:
        return {"name": name, **RECIPES[name]}
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".toml"):
        return {"name": path.stem, **read_recipe(path)}
    if path.is_file():
        raise UserError(f"{name} is no recipe; its file must end in .yaml, .yml or .toml")
    begun = [known for known in RECIPES if known.startswith(name)]
    close = begun[:3] or difflib.get_close_matches(name, RECIPES, n=3)
    hint = f"; did you mean {', '.join(close)}?" if close else "; see `isomorph recipes`, or give a .yaml or .toml file"
    raise UserError(f"no recipe {name!r}{hint}")


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """A checked recipe: a name or a file, with overrides like `optim.lr=1e-4` laid over it.

    Raises: UserError listing every problem at once.
    """
    return validate(apply_overrides(recipe_values(name), overrides or []))


def parse_overrides(tokens: Sequence[str]) -> list[str]:
    """`--field value`, `--field=value` and `field=value` as `field=value`."""
    assignments, rest = [], list(tokens)
    while rest:
        token = rest.pop(0)
        field = token.removeprefix("--")
        if "=" not in token:
            if token.startswith("--") and (not rest or rest[0].startswith("--")):
                raise UserError(f"{token} needs a value: write it as {token} VALUE")
            if not token.startswith("--"):
                raise UserError(f"{token!r}: write a field of the recipe as --{field} VALUE or {field}=VALUE")
            field = f"{field}={rest.pop(0)}"
        assignments.append(field)
    return assignments


__all__ = ["RECIPES", "load_recipe", "parse_overrides", "recipe_values"]
