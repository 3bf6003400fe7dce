"""What there is: the models, recipes, coverage and doctor commands."""

import json
import platform
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version

from cyclopts import App

import isomorph as iso
from isomorph.cli import options as opt
from isomorph.cli.output import progress_bar, show
from isomorph.cli.tables import tables
from isomorph.errors import UserError
from isomorph.json_values import JsonObject
from isomorph.lab.recipes import recipe_values
from isomorph.process import returns_freed_memory
from isomorph.terminal_tables import Rows, Table, print_text_table, say


@opt.command
def models_(pattern: str = "*", /, *, json_: opt.Json = False) -> None:
    """List the models that isomorph adds to timm, with their parameters, input size and public weights.

    Example: isomorph models "convit*"

    Parameters
    ----------
    pattern
        Glob over model names, for example 'tdrl_*'.
    """
    all_rows = tables()["models"]
    rows = [row for row in all_rows if fnmatchcase(row["name"], pattern)]
    if not rows:
        names = ", ".join(row["name"] for row in all_rows)
        raise UserError(f"no model of isomorph matches {pattern!r}; choose from {names}")
    if json_:
        show(True, rows)
        return
    table = [["model", "parameters", "input", "public weights"]]
    for row in rows:
        table.append([row["name"], f"{row['parameters']:,}", row["input"], row["weights"]])
    print_text_table(table)


recipes = App(
    name="recipes", help="List the recipes; `isomorph recipes show NAME` prints one as YAML."
)
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
    from isomorph.lab.recipes import RECIPES

    matching = {
        name: recipe
        for name, recipe in RECIPES.items()
        if pattern in name or fnmatchcase(name, pattern)
    }
    if not matching:
        raise UserError(
            f"no recipe matches {pattern!r}; give a part of a name, or a glob like 'tcnn_*'"
        )
    if json_:
        show(True, matching)
        return
    table = [["recipe", "source", "expected"]]
    for name, recipe in matching.items():
        table.append([name, recipe.get("source", ""), recipe.get("expected", "")])
    print_text_table(table)


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
        from isomorph.lab.evaluation.coverage import (
            cover_models,
            merge_norms,
            summarise_coverage,
            timm_models,
        )
        from isomorph.surgery.rule import RULES
    names = timm_models(models)
    if norms:
        counting = merge_norms(names)
    else:
        rules = {name: rule() for name, rule in RULES.items()}
        counting = cover_models(names, rules)
    rows = []
    with progress_bar("counting") as update:
        for row in counting:
            rows.append(row)
            update(len(rows), len(names), row["model"])
    results: JsonObject = {"models": rows}
    if not norms:
        results["families"] = summarise_coverage(rows)
    if json_:
        show(True, results)
        return
    if norms:
        print_text_table(_norm_table(rows))
    elif models:
        print_text_table(_rule_table({row["model"]: row for row in rows}))
    else:
        print_text_table(_rule_table(results["families"]))
    for row in rows:
        if "error" in row:
            say(f"{row['model']} cannot be created: {row['error']}")


def _describe_reasons(reasons: dict[str, int]) -> str:
    return "; ".join(f"{count} x {reason}" for reason, count in list(reasons.items())[:2])


def _norm_table(rows: Rows) -> Table:
    table = [["model", "merged", "max |diff|", "why not the others"]]
    for row in rows:
        if "error" not in row:
            merged = f"{row['merged']} of {row['norms']}"
            table.append(
                [
                    row["model"],
                    merged,
                    f"{row['difference']:.0e}",
                    _describe_reasons(row["reasons"]),
                ]
            )
    return table


def _rule_table(counted: dict[str, JsonObject]) -> Table:
    """Return a table with a line for every rule and model, or family, by whose name the counts are."""
    table = [["", "rule", "accepted", "why not the others"]]
    for name, counts_of_model in counted.items():
        for rule, counts in counts_of_model.get("rules", {}).items():
            if isinstance(counts, dict):  # of a family
                counts = counts["accepted"], counts["modules"], counts["reasons"]
            accepted, modules, reasons = counts
            if modules:
                table.append([name, rule, f"{accepted} of {modules}", _describe_reasons(reasons)])
    return table


# What glibc costs by default, and the environment that cures it.
_ALLOCATOR = (
    "returns freed memory to the system: a step of your own code on a CPU may take twice as long; set "
    "MALLOC_TRIM_THRESHOLD_=2147483647 and MALLOC_MMAP_THRESHOLD_=1073741824, or call iso.keep_freed_memory()"
)
_PACKAGES = (
    "isomorph",
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "safetensors",
    "pydantic",
    "cyclopts",
)


@opt.command
def doctor(*, json_: opt.Json = False) -> None:
    """Check versions and devices, and that torchvision matches torch; exit with 1 on a problem."""
    findings = {}
    table = [["", "", ""]]
    has_problem = False
    for subject, finding, ok in _examine_environment():
        findings[subject] = {"finding": finding, "ok": ok}
        table.append([subject, finding, "" if ok else "PROBLEM"])
        has_problem |= not ok
    show(json_, findings, table)
    if has_problem:
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
    yield (
        "allocator",
        _ALLOCATOR if returns_freed_memory() else "keeps freed memory, or is not glibc's",
        True,
    )
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        yield f"GPU {i}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB", True
