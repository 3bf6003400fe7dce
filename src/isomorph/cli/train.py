"""The demo and train commands."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from isomorph.cli import options as opt
from isomorph.cli.tables import recipe_fields, tables
from isomorph.errors import UserError
from isomorph.recipes import load_recipe, parse_overrides, recipe_values
from isomorph.terminal_tables import count_of, metric_table, print_table, say

_OWN_CHECKS = ("model.recast.", "task.")
"""Groups whose fields may come from other packages: those of rules and of tasks."""


@opt.command
def demo(*, out: Path | None = None, overwrite: opt.Overwrite = False) -> None:
    """Train a small CNN on digits, recast it as attention, verify that both are equal, and train a ViT in two forms.

    Takes about two minutes on a CPU, downloads nothing, and writes a page with the results. Example: isomorph demo

    Parameters
    ----------
    out
        File for the page; by default isomorph-demo.html, with a number if it exists. The models go to a folder next to
        it.
    """
    out = opt.choose_page(out, "isomorph-demo.html", overwrite, "-models")
    with opt.loading():
        from isomorph.demo import next_commands, run_demo, write_demo_page

    folder = out.with_name(out.stem + "-models")
    result = run_demo(folder)
    write_demo_page(result, out)
    print()
    print_table(result.table())
    print(f"\n{result.gain}\n\npage: {out}  ({result.seconds:.0f} s; the models are in {folder})\n\nTry next:")
    for what, line in next_commands(folder):
        print(f"  {line}  # {what}")


@opt.app.command(
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
    with opt.loading():
        from isomorph.training import train as train_recipe
    result = train_recipe(load_recipe(recipe, overrides))
    if result.is_main:
        print_table(metric_table("final", result.metrics))
        say(f"wrote {result.folder / 'model.safetensors'}")


def describe_recipe(tokens: Sequence[str]) -> None:
    """Show in the help the values of the recipe that a command line names, in place of the defaults."""
    try:
        values = recipe_values(next(token for token in tokens if not token.startswith("-")))
    except (StopIteration, UserError):  # the general help
        return

    def value_of(found: re.Match[str]) -> str:
        group: Any = values
        for name in found[2].split("."):
            group = group.get(name) if isinstance(group, dict) else None
        text, _, default = found[1].rpartition(" [")
        return found[1] if group is None or not text else f"{text} [{group}, else {default}"

    source = f"{values.get('source', '')}. " * bool(values.get("source"))
    text = re.sub(r"^(\* `--([\w.]+)` .*)$", value_of, tables()["recipe_help"], flags=re.MULTILINE)
    opt.app["train"].help = f"{values['name']}: {source}Its values come first, then the defaults:\n\n{text}"


def _rewrite_size(assignment: str) -> str:
    """Return an assignment to a size field with the size as a list: data.size=96x128 -> data.size=[96, 128]."""
    name, _, value = assignment.partition("=")
    if name not in opt.SIZE_FIELDS or value in ("null", "~", ""):
        return assignment
    return f"{name}={list(opt.parse_size(f'--{name}', value))}"


def check_fields(assignments: Sequence[str]) -> None:
    """Raise UserError with all fields of assignments `field=value` that do not exist in any recipe.

    This needs no torch; values are checked by the recipe.
    """
    known = recipe_fields()
    names = [assignment.partition("=")[0].replace("-", "_") for assignment in assignments]
    problems = [_describe_unknown(name, known) for name in names if not _is_known(name, known)]
    if problems:
        raise UserError(f"the recipe has {count_of(len(problems), 'problem')}: {'; '.join(problems)}")


def _is_known(name: str, known: Sequence[str]) -> bool:
    """Return True for a field, a group of fields, an entry of a field of several, or a field of a rule or a task."""
    return name.startswith(_OWN_CHECKS) or any(
        name == field or field.startswith(f"{name}.") or name.startswith(f"{field}.") for field in known
    )


def _describe_unknown(name: str, known: Sequence[str]) -> str:
    group = name.rpartition(".")[0]
    siblings = [field for field in known if field.rpartition(".")[0] == group] or list(known)
    close = difflib.get_close_matches(name, siblings, n=1) or difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean --{close[0]}?" if close else f"fields: {', '.join(siblings)}"
    return f"--{name} is not a field ({hint})"
