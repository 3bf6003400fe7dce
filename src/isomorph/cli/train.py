"""The demo and train commands."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from pydantic_core import SchemaValidator, ValidationError

from isomorph.cli import options as opt
from isomorph.cli.output import show
from isomorph.cli.tables import tables
from isomorph.errors import UserError, describe_value, invalid_fields, unknown_field
from isomorph.json_values import flatten
from isomorph.lab.recipes import load_recipe, recipe_values
from isomorph.process import is_main_process
from isomorph.terminal_tables import metric_table, print_table, print_text_table
from isomorph.yaml_values import parse_value

_GRID_SIZE = re.compile(r"^(model\.recast\.grid_size)=(\d+)(?:x(\d+))?$")  # 14 or 14x12

# Options of other commands, and the recipe fields that they are.
_OTHER_NAMES = {
    "split": "data.split",
    "size": "data.size",
    "root": "data.root",
    "classes": "data.classes",
    "batch_size": "data.batch_size",
    "workers": "data.workers",
    "weights": "model.weights",
    "arch": "model.name",
    "num_classes": "model.num_classes",
}


@opt.command
def demo(*, out: Path = Path("isomorph-demo.html"), overwrite: opt.Overwrite = False) -> None:
    """Train a small CNN on digits, recast it as attention, verify that both are equal, and train a ViT in two forms.

    Takes about three minutes on a CPU, downloads nothing, and writes a page with the results. Example: isomorph demo

    Parameters
    ----------
    out
        File for the page. The models go to a folder next to it, NAME-models.
    """
    opt.check_out(out, overwrite, suffixes=(".html",))
    with opt.loading():
        from isomorph.lab.demo import next_commands, run_demo, write_demo_page

    folder = out.with_name(out.stem + "-models")
    result = run_demo(folder)
    write_demo_page(result, out)
    print()
    print_table(result.table())
    print(
        f"\n{result.start}\n\npage: {out}  ({result.seconds:.0f} s; the models are in {folder})\n\nTry next:"
    )
    for what, line in next_commands(folder):
        print(f"  {line}  # {what}")


@opt.app.command(
    help="Train a model with a recipe, or resume its run. Example: isomorph train digits_cnn --epochs 3\n\n"
    f"Every field of the recipe is an option:\n\n{tables()['recipe_help']}"
)
def train(
    recipe: Annotated[
        str, Parameter(help="Name of a recipe (see `isomorph recipes`), or a .yaml or .toml file.")
    ],
    /,
    *fields: Annotated[
        str,
        Parameter(
            allow_leading_hyphen=True,
            help="Fields to change: --FIELD VALUE, --FIELD=VALUE or FIELD=VALUE.",
        ),
    ],
    dry_run: Annotated[
        opt.Flag,
        Parameter(
            help="Train nothing: build the network, train two steps on random samples, and print steps, parameter "
            "groups, memory, hours, what has to be downloaded and the published result."
        ),
    ] = False,
    json_: opt.Json = False,
) -> None:
    overrides = list(map(_spell_out_grid, parse_overrides(fields)))
    values = recipe_values(recipe)
    given = [assignment.partition("=")[0] for assignment in overrides]
    check_names([*flatten(values), *given])
    check_values(overrides)
    with opt.loading():
        from isomorph.lab.recipes.tables import published_rows
        from isomorph.lab.training import dry_run as try_recipe
        from isomorph.lab.training import train as train_recipe
    loaded = load_recipe(recipe, overrides)
    if dry_run:
        plan = try_recipe(loaded)
        if not is_main_process():
            return
        published = published_rows(recipe)
        if json_:
            show(json_, plan.as_dict() | {"published": published})
            return
        head, source, *rest = plan.table()
        print_text_table([head, source, *[["published", text] for text in published], *rest])
        return
    result = train_recipe(loaded, show=not json_)  # whose messages are on standard output
    if not result.is_main:
        return
    path = result.folder / "model.safetensors"
    facts = {"recipe": loaded.name, "out": str(path), **result.metrics}
    show(json_, facts, metric_table("final", result.metrics), f"wrote {path}")


def check_names(paths: Iterable[str]) -> None:
    """Raise UserError for fields that no recipe has; those of tasks and rules are checked when the recipe is loaded."""
    groups = tables()["recipe_fields"]
    unknown: dict[str, None] = {}
    for path in paths:
        group = ""
        for name in path.replace("-", "_").split("."):
            field = f"{group}.{name}".lstrip(".")
            if group in groups and name not in groups[group]:
                unknown[unknown_field(field, list(groups[group]))] = None
                break
            group = field
    if unknown:
        raise UserError("; ".join(unknown))


def check_values(assignments: Iterable[str]) -> None:
    """Raise UserError for numbers, flags and choices that their field does not take; loading the recipe checks all."""
    groups = tables()["recipe_fields"]
    problems: list[str] = []
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        field = name.replace("-", "_")
        group, _, last = field.rpartition(".")
        schema = groups.get(group, {}).get(last)
        if schema is None:
            continue
        try:
            SchemaValidator(schema).validate_python(parse_value(text))
        except ValidationError as error:
            wrong = error.errors(include_url=False)
            problems += [describe_value(field, problem) for problem in wrong]
    if problems:
        raise invalid_fields("the recipe", problems)


def _spell_out_grid(assignment: str) -> str:
    """Return an assignment with a grid such as 14 or 14x12 as a list of two numbers, others as they are."""
    match = _GRID_SIZE.match(assignment)
    if match is None:
        return assignment
    name, height, width = match.groups()
    return f"{name}=[{height}, {width or height}]"


def parse_overrides(tokens: Sequence[str]) -> list[str]:
    """Return `--field value`, `--field=value` and `field=value` of a command line as `field=value`.

    Names that other commands use are fields: `--size` is data.size, `--weights` is model.weights.

    Raises: UserError for a field without a value, or one that is given twice.
    """
    assignments = []
    rest = list(tokens)
    given = set[str]()
    before: list[str] = []  # an option and its value
    while rest:
        token = rest.pop(0)
        field = token.removeprefix("--")
        if "=" not in token:
            if token.startswith("--") and (not rest or rest[0].startswith("--")):
                raise UserError(f"{token} has no value; write {token} VALUE")
            if not token.startswith("--"):
                raise UserError(_stray(token, before))
            before = [token, rest.pop(0)]
            field = f"{field}={before[1]}"
        name = field.partition("=")[0].replace("-", "_")
        option = token.partition("=")[0]
        if name in _OTHER_NAMES:
            name = _OTHER_NAMES[name]
            field = f"{name}={field.partition('=')[2]}"
        if name in given:
            raise UserError(f"{option} is given twice; give it one value")
        given.add(name)
        assignments.append(field)
    return assignments


def _stray(token: str, before: Sequence[str]) -> str:
    """Return what to write for a token that is neither an option nor its value, after an option and its value."""
    if not before:
        return f"{token!r} is not an option; write a field of the recipe as --{token} VALUE"
    option, value = before
    return f"{option} takes one value, not {value} and {token}; write {option} '[{value}, {token}]' for a list"
