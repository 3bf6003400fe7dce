"""Commands that run a model on data: demo, train, evaluate."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.progress import track

import isomorph as iso
from isomorph.cli.app import Device, Json, Weights, app
from isomorph.data import eval_loader
from isomorph.errors import UserError
from isomorph.evaluation import evaluate, measure_cost
from isomorph.recipes import as_assignments, load_recipe
from isomorph.report import curve_rows, metric_rows, show
from isomorph.training.build import evaluation_data, open_model
from isomorph.training.recipe import document_fields
from isomorph.training.runtime import open_runtime


@app.command
def demo(*, out: Path = Path("isomorph-demo.html")) -> None:
    """Train a small CNN on digits, recast it as attention, verify, fine-tune, and write one HTML page.

    Parameters
    ----------
    out
        The page.
    """
    from isomorph.recipes.demo import run_demo

    found = run_demo(out)
    show(found.table())
    print(f"\n{str(found.report).splitlines()[0]}\npage: {out}  ({found.seconds:.0f} s)")


@app.command(name="evaluate")
def evaluate_(
    model: str,
    /,
    *,
    data: str | None = None,
    root: Path | None = None,
    weights: Weights = None,
    batch_size: int = 100,
    workers: int = 0,
    size: tuple[int, int] | None = None,
    classes: int | None = None,
    rfc: tuple[float, ...] = (),
    rfc_fill: Literal["zero", "black"] = "zero",
    device: Device = "auto",
    cost: bool = True,
    json_: Json = False,
) -> None:
    """Accuracy, calibration and cost of a model on a test set.

    Parameters
    ----------
    model
        A timm model, or a checkpoint written by isomorph.
    data
        cifar10, cifar100, digits or imagefolder; by default what the model's weights were trained on.
    root
        Folder of the data; by default $ISOMORPH_DATA, else ./data.
    batch_size
        Images per step.
    workers
        Processes that prepare images.
    size
        Height and width of the input; by default the model's own.
    classes
        Only the first so many classes of the data, as data.classes in training.
    rfc
        Ratio of receptive-field calibration, e.g. 1.13, in place of the model's own crop: the image smaller by so much,
        padded to the input (below 1: cropped). Several ratios (--rfc 1 --rfc 1.06 --rfc 1.13) print the curve.
    rfc_fill
        zero pads what the model reads (the mean colour), black pads the picture.
    cost
        Measure MACs and throughput too.
    """
    if batch_size < 1 or workers < 0:
        raise UserError("--batch-size must be at least 1 and --workers at least 0")
    net = open_model(model, weights)
    source, config = evaluation_data(net, data, root, size, classes)
    net.to(open_runtime(device).device)
    loaders = {ratio: eval_loader(source, config, batch_size, workers, ratio, rfc_fill) for ratio in rfc or [None]}
    bar, quiet = Console(stderr=True), not sys.stderr.isatty()
    rows: list[dict[str, Any]] = []
    for ratio, loader in loaders.items():
        title = f"evaluating at rfc {ratio:g}" if ratio else "evaluating"
        metrics = evaluate(net, track(loader, title, len(loader), console=bar, transient=True, disable=quiet))
        rows.append({"model": model} | ({"rfc": ratio, "rfc_fill": rfc_fill} if ratio else {}) | metrics)
    found = measure_cost(net, config["input_size"]) if cost else {}
    if json_:
        print(json.dumps(rows[0] | found if len(rows) == 1 else {"model": model, "curve": rows, **found}))
    elif len(rows) == 1:
        title = f"{model}, rfc {rfc[0]:g} ({rfc_fill})" if rfc else model
        show(metric_rows(title, metrics | found))
    else:
        show(curve_rows(model, rows, "rfc"))
        show(metric_rows(model, found))


@app.command(
    help=f"Train as a recipe says; resumes by itself.\n\nEvery field of the recipe is a flag:\n\n{document_fields()}"
)
def train(
    recipe: Annotated[str, Parameter(help="Name of a recipe (see `isomorph recipes`) or a .yaml or .toml file.")],
    /,
    *fields: Annotated[str, Parameter(allow_leading_hyphen=True, help="--FIELD VALUE, --FIELD=VALUE or FIELD=VALUE.")],
) -> None:
    result = iso.train(load_recipe(recipe, as_assignments(fields)))
    if result.leads:
        show(metric_rows("final", result.metrics))
        print(f"the model: {result.folder / 'model.safetensors'}")
