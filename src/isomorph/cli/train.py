"""The demo and train commands."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import isomorph as iso
from isomorph.cli.app import app
from isomorph.recipes import load_recipe, parse_overrides
from isomorph.report.terminal_tables import metric_table, print_table
from isomorph.training.recipe.recipe import document_fields


@app.command
def demo(*, out: Path = Path("isomorph-demo.html")) -> None:
    """Train a small CNN on digits, recast it as attention, verify, fine-tune, and write the results to an HTML page.

    Parameters
    ----------
    out
        File for the page.
    """
    from isomorph.recipes.demo import run_demo

    result = run_demo(out)
    print_table(result.table())
    print(f"\n{str(result.report).splitlines()[0]}\npage: {out}  ({result.seconds:.0f} s)")


@app.command(
    help="Train a model with a recipe, or resume its run. Example: isomorph train digits_cnn --epochs 3\n\n"
    f"Every field of the recipe is an option:\n\n{document_fields()}"
)
def train(
    recipe: Annotated[str, Parameter(help="Name of a recipe (see `isomorph recipes`), or a .yaml or .toml file.")],
    /,
    *fields: Annotated[
        str, Parameter(allow_leading_hyphen=True, help="Fields to change: --FIELD VALUE, --FIELD=VALUE or FIELD=VALUE.")
    ],
) -> None:
    result = iso.train(load_recipe(recipe, parse_overrides(fields)))
    if result.is_main:
        print_table(metric_table("final", result.metrics))
        print(f"wrote {result.folder / 'model.safetensors'}")
