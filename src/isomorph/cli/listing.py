"""What there is: the models, recipes, coverage and doctor commands."""

import json
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from cyclopts import App

import isomorph as iso
from isomorph.cli import options as opt
from isomorph.cli.options import Json, app, command
from isomorph.cli.output import progress_bar, show
from isomorph.cli.tables import tables
from isomorph.errors import UserError
from isomorph.recipes import RECIPES, recipe_values
from isomorph.terminal_tables import print_text_table, say


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


@opt.command
def coverage(
    *models: str,
    rule: Annotated[list[str] | None, opt.Several] = None,
    family: str | None = None,
    norms: bool = False,
    json_: opt.Json = False,
) -> None:
    """Count which modules of timm's models each rule accepts, and the reasons for the others; nothing is downloaded.

    Example: isomorph coverage resnet50 "swin_*"

    Parameters
    ----------
    models
        Names of timm models, or globs; by default all of timm, which takes minutes.
    rule
        Rules to count; by default all.
    family
        Only models of one family: the name of the module of timm that defines them, for example 'swin_transformer'.
    norms
        Count the BatchNorms that fuse merges instead, and why not the others; the models are run, which takes longer.
    """
    for name in rule or []:
        if name not in tables()["rules"]:
            raise UserError(f"--rule {name} is not a rule; choose from {', '.join(tables()['rules'])}")
    with opt.loading():
        from isomorph.surgery.coverage import cover_models, merge_norms, summarise_coverage, timm_models
        from isomorph.surgery.rule import RULES
    names = timm_models(models, family)
    rows: list[dict[str, Any]] = []
    with progress_bar("counting") as update:
        for row in (
            merge_norms(names) if norms else cover_models(names, {name: RULES[name]() for name in rule or RULES})
        ):
            rows.append(row)
            update(len(rows), len(names), row["model"])
    if json_:
        show(True, {"models": rows} if norms else {"models": rows, "families": summarise_coverage(rows)})
        return
    _print_norms(rows) if norms else _print_rows(rows) if models else _print_families(summarise_coverage(rows))
    for row in rows:
        if "error" in row:
            say(f"{row['model']} cannot be created: {row['error']}")


def _describe_reasons(reasons: dict[str, int], limit: int = 2) -> str:
    """Return the most common reasons with their counts."""
    return "; ".join(f"{count} x {reason}" for reason, count in list(reasons.items())[:limit])


def _print_norms(rows: list[dict[str, Any]]) -> None:
    """Print a table with a line for every model with BatchNorm."""
    body = [
        [
            row["model"],
            f"{row['merged']} of {row['norms']}",
            f"{row['difference']:.0e}",
            _describe_reasons(row["reasons"]),
        ]
        for row in rows
        if "error" not in row
    ]
    print_text_table([["model", "merged", "max |diff|", "why not the others"], *body])


def _print_rows(rows: list[dict[str, Any]]) -> None:
    """Print a table with a line for every model and rule."""
    body = [
        [row["model"], rule, f"{accepted} of {modules}", _describe_reasons(reasons)]
        for row in rows
        for rule, (accepted, modules, reasons) in row.get("rules", {}).items()
        if modules
    ]
    print_text_table([["model", "rule", "accepted", "why not the others"], *body])


def _print_families(families: dict[str, dict[str, Any]]) -> None:
    """Print a table with a line for every family and rule."""
    body = [
        [
            family,
            f"{found['models']}",
            rule,
            f"{total['accepted']} of {total['modules']}",
            _describe_reasons(total["reasons"]),
        ]
        for family, found in families.items()
        for rule, total in found["rules"].items()
        if total["modules"]
    ]
    print_text_table([["family", "models", "rule", "accepted", "why not the others"], *body])


PACKAGES = ("isomorph", "torch", "torchvision", "timm", "numpy", "safetensors", "pydantic", "cyclopts")
EXTRAS = {"datasets": "data", "imagecorruptions-imaug": "corruptions", "tensorboard": "track"}
MIN_FREE_DISK = 10 * 2**30


@command
def doctor(*, json_: Json = False) -> None:
    """Check versions, devices, free disk space, and that torchvision matches torch; exit with 1 on a problem."""
    lines = list(_examine_environment())
    table = [["", "", ""], *([what, finding, "" if ok else "PROBLEM"] for what, finding, ok in lines)]
    show(json_, {what: {"finding": finding, "ok": ok} for what, finding, ok in lines}, table)
    if not all(ok for _, _, ok in lines):
        sys.exit(1)


def _examine_environment() -> Iterator[tuple[str, str, bool]]:
    """Yield what was checked, the result, and True if it is good enough to run isomorph."""
    yield "python", platform.python_version(), True
    for package in PACKAGES:
        installed = _installed_version(package)
        yield package, installed or "missing: pip install -e .", installed is not None
    for package, extra in EXTRAS.items():
        yield package, _installed_version(package) or f"not installed (optional: pip install -e '.[{extra}]')", True
    try:
        iso.prepare()
    except ImportError as error:
        yield "torchvision operators", str(error), False
    else:
        yield "torchvision operators", "work", True
        yield from _device_lines()
    free = shutil.disk_usage(".").free
    enough = free > MIN_FREE_DISK
    yield "free disk here", f"{free / 2**30:.1f} GiB{'' if enough else ': too little for data and checkpoints'}", enough


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_lines() -> Iterator[tuple[str, str, bool]]:
    """Yield the lines on threads and GPUs."""
    import torch

    yield "threads", str(torch.get_num_threads()), True
    if not torch.cuda.is_available():
        yield "GPU", "none: computing on the CPU", True
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        yield f"GPU {i}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB", True
