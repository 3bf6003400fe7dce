"""Recipes of the papers' runs by name, in all tasks, each with the result to expect.

docs/recipes.md lists the published runs that are not included.
"""

import copy
import difflib
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from isomorph.checkpoints.paths import is_function
from isomorph.errors import UserError, one_line
from isomorph.yaml_values import load_yaml

if TYPE_CHECKING:
    from isomorph.lab.training import Recipe

# Nested dicts of the fields of a recipe that differ from their defaults.
Fields = dict[str, Any]

# All recipes by name, which are read when they are first asked for.
RECIPES: dict[str, Fields]

# Groups that are shown before all other fields.
_FIRST = ("task", "model", "data")

_FOLDER = Path(__file__).with_name("named")
_PAPERS = ("tcnn", "convit", "deit", "tdrl", "refiner", "coatnet")
_FILES = (*_PAPERS, "cifar", "diffusion", "language", "segmentation", "detection", "finetune")


@cache
def _named_recipes() -> dict[str, Fields]:
    """Return all recipes by name, read from named/*.yaml.

    An entry has the fields of its `base`, and changes some; `optim.lr` is a field of a group. Names that begin with a
    dot are bases only.
    """
    entries: dict[str, Fields] = {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for file in _FILES:
        text = (_FOLDER / f"{file}.yaml").read_text(encoding="utf-8")
        entries |= yaml.load(text, loader)
    recipes: dict[str, Fields] = {}
    for name in entries:
        if not name.startswith("."):
            fields = _fields_of(name, entries)
            first = {group: fields[group] for group in _FIRST if group in fields}
            recipes[name] = first | fields
    return recipes


def _fields_of(name: str, entries: Mapping[str, Fields]) -> Fields:
    fields: Fields = {}
    for path, value in entries[name].items():
        if path == "base":
            fields = _fields_of(value, entries)
            continue
        *groups, last = path.split(".")
        group = fields
        for part in groups:
            group = group.setdefault(part, {})
        group[last] = copy.deepcopy(value)
    return fields


def __getattr__(name: str) -> Any:
    if name == "RECIPES":
        return _named_recipes()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def recipe_values(name: str) -> Fields:
    """Return the values in a named recipe, or in a YAML or TOML file.

    Raises: UserError with the closest names if there is no such recipe.
    """
    recipes = _named_recipes()
    if name in recipes:
        return {"name": name, **recipes[name]}
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".toml"):
        return {"name": path.stem, **_read_recipe(path)}
    if path.is_file():
        raise UserError(f"{name} is not a recipe file; its name must end in .yaml, .yml or .toml")
    completions = [known for known in recipes if known.startswith(name)]
    close = difflib.get_close_matches(name, completions or recipes, n=3)
    names = list(dict.fromkeys([*close, *completions]))
    hint = "; see `isomorph recipes`, or give a .yaml or .toml file"
    if names:
        hint = f"; did you mean {', '.join(names[:3])}?"
    raise UserError(f"there is no recipe {name!r}{hint}")


def _read_recipe(path: Path) -> Fields:
    """Return the values of a YAML or TOML file. Raises: UserError when it is missing, unreadable or not a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            values: Any = tomllib.loads(text)
        else:
            values = load_yaml(text)
    except FileNotFoundError:
        raise UserError(f"cannot read recipe {path}: there is no such file") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"cannot read recipe {path}: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"recipe {path} must be a mapping of fields, like 'epochs: 10'")
    model = values.get("model")
    name = str(model.get("name")) if isinstance(model, dict) else ""
    if is_function(name):
        raise UserError(
            f"recipe {path}: model.name {name} would run code that a file names; leave it out, and give "
            f"model.name={name} besides the file"
        )
    return values


def load_recipe(name: str, overrides: list[str] | None = None) -> "Recipe":
    """Load and check a recipe for `iso.train`.

    `name` is that of one of isomorph's recipes (`isomorph recipes` lists them) or the path of a .yaml or .toml file.
    `overrides` are assignments to its fields, such as `optim.lr=1e-4`. With fewer `epochs` than the recipe has, the
    schedules that are measured in epochs (warm-up, anneal, recast, evaluations, saved models) become shorter in
    proportion, unless they are given too; `recipe.shortened` says which.

    Raises: UserError for an unknown recipe or an unreadable file; for invalid fields it lists every problem at once.

    >>> recipe = iso.load_recipe("digits_cnn", ["epochs=3", "optim.lr=1e-3"])
    >>> recipe.model.name, recipe.epochs, recipe.optim.lr
    ('cifar_resnet20', 3, 0.001)
    >>> recipe.shortened
    '3 of 6 epochs, so optim.warmup_epochs 1 -> 0.5'
    """
    from isomorph.lab.training.recipe.read import override_recipe

    return override_recipe(recipe_values(name), overrides or [])


__all__ = ["RECIPES", "load_recipe"]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
