"""The coverage command."""

from typing import Annotated, Any

from isomorph.cli import options as opt
from isomorph.cli.output import progress_bar, show
from isomorph.cli.tables import tables
from isomorph.errors import UserError
from isomorph.terminal_tables import print_text_table, say


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
