"""The command line: parses, calls, prints."""

import json
import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

import timm
import torch
import yaml
from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.progress import track
from timm.data import resolve_data_config

import isomorph as iso
from isomorph import doctor as machine
from isomorph.data import eval_loader, open_source
from isomorph.errors import UserError
from isomorph.evaluation import count_parameters, evaluate, measure_cost
from isomorph.recipes import RECIPES, as_assignments, load_recipe, recipe_values
from isomorph.report import metric_rows, show
from isomorph.surgery import build_rule, compare, edits_since
from isomorph.training.build import evaluation_data, open_model, standard_normal
from isomorph.training.recipe import document_fields
from isomorph.training.runtime import open_runtime

app = App(
    name="isomorph",
    help="Change the form of a vision model, keep its function.",
    version=iso.__version__,
    exit_on_error=False,
    print_error=False,
)
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print plain JSON for machines.")]
Weights = Annotated[Path | None, Parameter(help="Checkpoint of the base model instead of its public weights.")]
Device = Annotated[str, Parameter(help="auto, cpu, cuda, cuda:1, ...")]


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


@app.command
def recast(
    model: str,
    /,
    *,
    where: list[str],
    out: Path,
    rule: Literal["ConvToGPSA", "AttentionToGPSA", "LinearToPyramid"] = "ConvToGPSA",
    init: Literal["exact", "same-function", "paper"] | None = None,
    locality: float | None = None,
    gate: float | None = None,
    layout: str | None = None,
    rectify: Literal["paper", "batchnorm", "rescale", "none"] | None = None,
    unstride: str | None = None,
    weights: Weights = None,
    pretrained: bool = True,
    size: tuple[int, int] | None = None,
    json_: Json = False,
) -> None:
    """Recast modules of a model as gated positional self-attention or as pyramids, verify, and save it.

    Parameters
    ----------
    model
        A timm model, or a checkpoint written by isomorph.
    where
        Glob over module names, like `layer4.*.conv2` or `blocks.*.attn`; may be given several times.
    out
        The new checkpoint (.safetensors).
    rule
        ConvToGPSA for the convolutions of a CNN, AttentionToGPSA for the attention of a ViT, LinearToPyramid for linear
        layers and convolutions.
    init
        exact (of pyramids: same-function) keeps the function, verified; paper starts as the paper does, to be trained.
    locality
        Overrides the init's locality (attention).
    gate
        Overrides the init's gate (attention).
    layout
        P-W2S, R-D2W1S, naive-W8 and the like (pyramids).
    rectify
        What tames the sum of a pyramid's branches (pyramids).
    unstride
        Glob of stages to keep at their input's resolution first; this changes the function.
    pretrained
        Use the model's public weights.
    size
        Height and width to verify at; by default the model's own.
    """
    if out.suffix != ".safetensors":
        raise UserError(f"--out {out} must end in .safetensors")
    if out.exists() and out.samefile(Path(model) if Path(model).exists() else out.parent):
        raise UserError(f"--out {out} is the model to recast; give another name")
    base = open_model(model, weights, pretrained)
    if unstride:
        base = iso.unstride(base, unstride)
    made = build_rule(rule, init=init, locality=locality, gate=gate, layout=layout, rectify=rectify)
    new = iso.recast(base, made, where)
    report = compare(base, new, [standard_normal(1, base, size)])
    if not report.passed and init != "paper" and (locality, gate) == (None, None):
        raise UserError(str(report).splitlines()[0])
    iso.save(new, out)
    names = [name for edit in edits_since(new, base) for name in edit.names]
    if json_:
        print(json.dumps({"recast": names, "out": str(out), "report": report.as_dict()}))
    else:
        note = "" if report.passed else "\n(such dials do not keep the function: fine-tune it)"
        print(f"{iso.edits(new)[-1].rule} on {len(names)} modules\n{report}{note}\nwrote {out}")


@app.command
def verify(
    original: str,
    other: str,
    /,
    *,
    weights: Weights = None,
    size: list[tuple[int, int]] | None = None,
    batch: int = 2,
    seeds: list[int] | None = None,
    data: str | None = None,
    root: Path | None = None,
    atol: float | None = None,
    json_: Json = False,
) -> None:
    """Compare two models on the same inputs, in float32 and float64; exit 2 when they differ.

    Parameters
    ----------
    original
        A timm model or a checkpoint written by isomorph.
    other
        The model made from it.
    weights
        Weights of `original`.
    size
        Height and width of an input; may be given several times. By default the model's own.
    batch
        Images per input.
    seeds
        Further standard normal inputs of every size.
    data
        Verify on the first test images of this source instead of noise.
    root
        Folder of the data.
    atol
        Largest difference allowed; by default the rule's.
    """
    a, b = open_model(original, weights), open_model(other)
    if data:
        config = resolve_data_config(model=a, use_test_size=False)
        inputs = [next(iter(eval_loader(open_source(data, "test", root), config, max(batch, 1))))[0]]
    else:
        inputs = [standard_normal(batch, a, hw) for hw in size] if size else [standard_normal(batch, a)]
    report = compare(a, b, inputs, atol=atol, seeds=seeds or [1])
    print(json.dumps(report.as_dict()) if json_ else report)
    if not report.passed:
        raise UserError(str(report).splitlines()[0])


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
    cost
        Measure MACs and throughput too.
    """
    if batch_size < 1 or workers < 0:
        raise UserError("--batch-size must be at least 1 and --workers at least 0")
    net = open_model(model, weights)
    source, config = evaluation_data(net, data, root, size, classes)
    net.to(open_runtime(device).device)
    loader = eval_loader(source, config, batch_size, workers)
    bar, quiet = Console(stderr=True), not sys.stderr.isatty()
    metrics = evaluate(net, track(loader, "evaluating", len(loader), console=bar, transient=True, disable=quiet))
    metrics |= measure_cost(net, config["input_size"]) if cost else {}
    if json_:
        print(json.dumps({"model": model, **metrics}))
    else:
        show(metric_rows(model, metrics))


@app.command(
    help=f"Train as a recipe says; resumes by itself.\n\nEvery field of the recipe is a flag:\n\n{document_fields()}"
)
def train(
    recipe: Annotated[str, Parameter(help="Name of a recipe (see `isomorph recipes`) or a .yaml or .toml file.")],
    /,
    *fields: Annotated[str, Parameter(allow_leading_hyphen=True, help="--FIELD VALUE, --FIELD=VALUE or FIELD=VALUE.")],
) -> None:
    result = iso.train(load_recipe(recipe, as_assignments(fields)))
    show(metric_rows("final", result.metrics))
    print(f"wrote {result.folder / 'model.safetensors'}")


@app.command(name="models")
def models_(pattern: str = "*", /, *, json_: Json = False) -> None:
    """List the models that isomorph adds to timm, with their sizes.

    Parameters
    ----------
    pattern
        Glob over names.
    """
    names = [name for name in iso.models.names() if fnmatchcase(name, pattern)]
    if not names:
        raise UserError(f"no model of isomorph matches {pattern!r}; it has {', '.join(iso.models.names())}")
    rows = []
    for name in names:
        with torch.device("meta"):
            model = timm.create_model(name)
        size = "x".join(map(str, model.pretrained_cfg["input_size"][1:]))
        rows.append(
            {
                "name": name,
                "parameters": count_parameters(model),
                "input": size,
                "weights": model.pretrained_cfg.get("tag", ""),
            }
        )
    if json_:
        print(json.dumps(rows))
    else:
        show(
            [
                ["model", "parameters", "input", "weights"],
                *([r["name"], f"{r['parameters']:,}", r["input"], r["weights"]] for r in rows),
            ]
        )


recipes = App(name="recipes", help="List the recipes, or show one as an editable file.")
app.command(recipes)


@recipes.default
def list_recipes(*, json_: Json = False) -> None:
    """List every recipe with its source and the number it should give."""
    if json_:
        print(json.dumps(RECIPES, default=str))
    else:
        show(
            [
                ["recipe", "source", "expected"],
                *([name, r.get("source", ""), r.get("expected", "")] for name, r in RECIPES.items()),
            ]
        )


@recipes.command(name="show")
def show_recipe(name: str, /) -> None:
    """Print a recipe as YAML: redirect it to a file and edit it."""
    load_recipe(name)
    values = json.loads(json.dumps(recipe_values(name), default=str))
    print(yaml.safe_dump(values, sort_keys=False), end="")


@app.command
def doctor(*, json_: Json = False) -> None:
    """Versions, devices, a torchvision that does not fit its torch, free disk."""
    lines = list(machine.examine())
    if json_:
        print(json.dumps({what: {"finding": finding, "ok": ok} for what, finding, ok in lines}))
    else:
        show([["", "", ""], *([what, finding, "" if ok else "PROBLEM"] for what, finding, ok in lines)])
    if not all(ok for _, _, ok in lines):
        sys.exit(1)


def one_line(error: Exception) -> str:
    """The message without the traceback that a worker process wraps around it."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    wrapped = any(line.startswith("Original Traceback") for line in lines)
    return lines[-1].partition("UserError: ")[2] if wrapped else "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; a problem with the request is printed in a line and exits 2, an interruption exits 130.

    ISOMORPH_DEBUG=1 lets errors through with their traceback.
    """
    try:
        app(arguments)
    except (UserError, CycloptsError, OSError, RuntimeError, ValueError, AssertionError) as error:
        if os.environ.get("ISOMORPH_DEBUG"):
            raise
        expected = isinstance(error, UserError | CycloptsError)
        said = one_line(error) if expected else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"isomorph: {said}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("isomorph: interrupted; a run resumes from its last checkpoint", file=sys.stderr)
        sys.exit(130)
