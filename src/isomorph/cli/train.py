"""The demo and train commands."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from isomorph.cli.options import SIZE_FIELDS, Overwrite, app, choose_page, command, loading, parse_size
from isomorph.cli.tables import recipe_fields, tables
from isomorph.errors import UserError
from isomorph.recipes import load_recipe, parse_overrides, recipe_values
from isomorph.terminal_tables import metric_table, print_table

_OWN_CHECKS = ("model.recast.", "task.")
"""Groups whose fields may come from other packages: those of rules and of tasks."""

_BOUNDS = {
    "minimum": ("greater than or equal to", float.__ge__),
    "exclusiveMinimum": ("greater than", float.__gt__),
    "maximum": ("less than or equal to", float.__le__),
    "exclusiveMaximum": ("less than", float.__lt__),
}
"""Names of bounds in a JSON schema: how a message words them, and the comparison that must hold."""


@command
def demo(*, out: Path | None = None, overwrite: Overwrite = False) -> None:
    """Train a small CNN on digits, recast it as attention, verify that both are equal, and train a ViT in two forms.

    Takes about two minutes on a CPU, downloads nothing, and writes a page with the results. Example: isomorph demo

    Parameters
    ----------
    out
        File for the page; by default isomorph-demo.html, with a number if it exists. The models go to a folder next to
        it.
    """
    out = choose_page(out, "isomorph-demo.html", overwrite, "-models")
    with loading():
        from isomorph.demo import next_commands, run_demo, write_demo_page

    folder = out.with_name(out.stem + "-models")
    result = run_demo(folder)
    write_demo_page(result, out)
    print()
    print_table(result.table())
    print(f"\n{result.gain}\n\npage: {out}  ({result.seconds:.0f} s; the models are in {folder})\n\nTry next:")
    for what, line in next_commands(folder):
        print(f"  {line}  # {what}")


@app.command(
    help="Train a model with a recipe, or resume its run. Example: isomorph train digits_cnn --epochs 3\n\n"
    f"Every field of the recipe is an option:\n\n{tables()['recipe_help']}"
)
def train(
    recipe: Annotated[str, Parameter(help="Name of a recipe (see `isomorph recipes`), or a .yaml or .toml file.")],
    /,
    *fields: Annotated[
        str, Parameter(allow_leading_hyphen=True, help="Fields to change: --FIELD VALUE, --FIELD=VALUE or FIELD=VALUE.")
    ],
) -> None:
    overrides = [_rewrite_size(assignment) for assignment in parse_overrides(fields)]
    iterations = recipe_values(recipe).get("iterations")
    given = {assignment.partition("=")[0] for assignment in overrides}
    if iterations and "epochs" in given and "iterations" not in given:
        raise UserError(
            f"the length of {recipe} is {iterations} iterations, so --epochs has no effect; give --iterations, or "
            "--iterations null as well"
        )
    check_fields(overrides)
    with loading():
        from isomorph.training import train as train_recipe
    result = train_recipe(load_recipe(recipe, overrides))
    if result.is_main:
        print_table(metric_table("final", result.metrics))
        print(f"wrote {result.folder / 'model.safetensors'}")


def _rewrite_size(assignment: str) -> str:
    """Return an assignment to a size field with the size as a list: data.size=96x128 -> data.size=[96, 128]."""
    name, _, value = assignment.partition("=")
    if name not in SIZE_FIELDS or value in ("null", "~", ""):
        return assignment
    return f"{name}={list(parse_size(f'--{name}', value))}"


def check_fields(assignments: Sequence[str]) -> None:
    """Check that the fields of assignments `field=value` exist, and that their values have the right type and size.

    Only what is wrong in any recipe is found here; the recipe checks the rest.

    Raises: UserError with all problems.
    """
    known = recipe_fields()
    problems = []
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        name = name.replace("-", "_")
        if not _is_known(name, known):
            problems.append(_unknown_field(name, known))
        elif allowed := _violated(value.strip(), tables()["recipe_values"].get(name, {})):
            problems.append(f"--{name}: input should be {allowed} (given {value[:80]})")
    if problems:
        raise UserError(f"the recipe has {len(problems)} problem{'s' * (len(problems) > 1)}: {'; '.join(problems)}")


def _is_known(name: str, known: Sequence[str]) -> bool:
    """Return True for a field, a group of fields, an entry of a field of several, or a field of a rule or a task."""
    return name.startswith(_OWN_CHECKS) or any(
        name == field or field.startswith(f"{name}.") or name.startswith(f"{field}.") for field in known
    )


def _unknown_field(name: str, known: Sequence[str]) -> str:
    """Return the message for an unknown field."""
    group = name.rpartition(".")[0]
    siblings = [field for field in known if field.rpartition(".")[0] == group] or list(known)
    close = difflib.get_close_matches(name, siblings, n=1) or difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean --{close[0]}?" if close else f"fields: {', '.join(siblings)}"
    return f"--{name} is not a field ({hint})"


def _violated(text: str, allowed: Mapping[str, Any]) -> str | None:
    """Return what a value should be, or None if it may be right; `allowed` is a JSON schema of a number or a choice."""
    if not allowed or (allowed["null"] and text in ("null", "~", "")):
        return None
    if choices := allowed.get("enum"):
        return None if text.strip("'\"") in map(str, choices) else " or ".join(map(repr, choices))
    try:
        number = float(text.removesuffix("x"))  # `10x` is a multiple of another rate
    except ValueError:
        return f"a valid {allowed['type']}"
    if text.endswith("x"):
        return None
    if allowed["type"] == "integer" and not number.is_integer():
        return "a valid integer"
    for key, (words, holds) in _BOUNDS.items():
        if key in allowed and not holds(number, float(allowed[key])):
            return f"{words} {allowed[key]:g}"
    return None
