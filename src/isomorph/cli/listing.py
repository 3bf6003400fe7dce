"""What there is: the models, recipes, coverage and doctor commands."""

import json
import platform
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cyclopts import App

import isomorph as iso
from isomorph.cli import options as opt
from isomorph.cli.output import progress_bar, show
from isomorph.cli.tables import tables
from isomorph.errors import UserError
from isomorph.lab.recipes import RECIPES, recipe_values
from isomorph.process import returns_freed_memory
from isomorph.terminal_tables import print_text_table, say


@opt.command
def models_(pattern: str = "*", /, *, json_: opt.Json = False) -> None:
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
        return
    body = [[r["name"], f"{r['parameters']:,}", r["input"], r["weights"]] for r in rows]
    print_text_table([["model", "parameters", "input", "public weights"], *body])


recipes = App(name="recipes", help="List the recipes; `isomorph recipes show NAME` prints one as YAML.")
opt.app.command(recipes)


@recipes.default
def list_recipes(pattern: str = "*", /, *, json_: opt.Json = False) -> None:
    """List recipes with their source and the result they should reach.

    Example: isomorph recipes "tcnn_*"

    Parameters
    ----------
    pattern
        Part of a name, or a glob, for example 'tcnn_*'.
    """
    matching = {name: recipe for name, recipe in RECIPES.items() if pattern in name or fnmatchcase(name, pattern)}
    if not matching:
        raise UserError(f"no recipe matches {pattern!r}; give a part of a name, or a glob like 'tcnn_*'")
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
def coverage(*models: str, norms: bool = False, json_: opt.Json = False) -> None:
    """Count which modules of timm's models each rule accepts, and the reasons for the others; nothing is downloaded.

    Example: isomorph coverage resnet50 "swin_*"

    Parameters
    ----------
    models
        Names of timm models, or globs; by default all of timm, which takes minutes.
    norms
        Count the BatchNorms that fuse merges instead, and why not the others; the models are run, which takes longer.
    """
    with opt.loading():
        from isomorph.surgery.coverage import cover_models, merge_norms, summarise_coverage, timm_models
        from isomorph.surgery.rule import RULES
    names = timm_models(models)
    rows: list[dict[str, Any]] = []
    with progress_bar("counting") as update:
        for row in merge_norms(names) if norms else cover_models(names, {name: rule() for name, rule in RULES.items()}):
            rows.append(row)
            update(len(rows), len(names), row["model"])
    if json_:
        show(True, {"models": rows} | ({} if norms else {"families": summarise_coverage(rows)}))
        return
    print_text_table(_norm_table(rows) if norms else _rule_table(rows if models else summarise_coverage(rows)))
    for row in rows:
        if "error" in row:
            say(f"{row['model']} cannot be created: {row['error']}")


def _describe_reasons(reasons: dict[str, int]) -> str:
    return "; ".join(f"{count} x {reason}" for reason, count in list(reasons.items())[:2])


def _norm_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    body = [
        [r["model"], f"{r['merged']} of {r['norms']}", f"{r['difference']:.0e}", _describe_reasons(r["reasons"])]
        for r in rows
        if "error" not in r
    ]
    return [["model", "merged", "max |diff|", "why not the others"], *body]


def _rule_table(counted: list[dict[str, Any]] | dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return a table with a line for every rule and model, or family, by whose name the counts are then."""
    named = counted.items() if isinstance(counted, dict) else [(row["model"], row) for row in counted]
    table = [["", "rule", "accepted", "why not the others"]]
    for name, found in named:
        for rule, counts in found.get("rules", {}).items():
            accepted, modules, reasons = (
                (counts[key] for key in ("accepted", "modules", "reasons")) if isinstance(counts, dict) else counts
            )
            if modules:
                table.append([name, rule, f"{accepted} of {modules}", _describe_reasons(reasons)])
    return table


# What glibc costs by default, and the environment that cures it.
_ALLOCATOR = (
    "returns freed memory to the system: a step of your own code on a CPU may take twice as long; set "
    "MALLOC_TRIM_THRESHOLD_=2147483647 and MALLOC_MMAP_THRESHOLD_=1073741824, or call iso.keep_freed_memory()"
)
_PACKAGES = ("isomorph", "torch", "torchvision", "timm", "numpy", "safetensors", "pydantic", "cyclopts")


@opt.command
def doctor(*, json_: opt.Json = False) -> None:
    """Check versions and devices, and that torchvision matches torch; exit with 1 on a problem."""
    lines = list(_examine_environment())
    table = [["", "", ""], *([what, finding, "" if ok else "PROBLEM"] for what, finding, ok in lines)]
    show(json_, {what: {"finding": finding, "ok": ok} for what, finding, ok in lines}, table)
    if not all(ok for _, _, ok in lines):
        sys.exit(1)


def _examine_environment() -> Iterator[tuple[str, str, bool]]:
    yield "python", platform.python_version(), True
    for package in _PACKAGES:
        try:
            yield package, version(package), True
        except PackageNotFoundError:
            yield package, "missing: pip install -e .", False
    try:
        iso.prepare()
    except ImportError as error:
        yield "torchvision operators", str(error), False
        return
    import torch

    yield "torchvision operators", "work", True
    yield "threads", str(torch.get_num_threads()), True
    yield "allocator", _ALLOCATOR if returns_freed_memory() else "keeps freed memory, or is not glibc's", True
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        yield f"GPU {i}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB", True
