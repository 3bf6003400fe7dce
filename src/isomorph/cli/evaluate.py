"""The evaluate command."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from isomorph.cli.app import app, loading
from isomorph.cli.json_output import print_json
from isomorph.cli.options import (
    CheckpointOptions,
    Device,
    Json,
    MaxImages,
    Model,
    Pretrained,
    Root,
    Split,
    Weights,
    WholeNumber,
    check_limits,
    check_page,
    display_name,
)
from isomorph.cli.sizes import Sizes
from isomorph.errors import UserError
from isomorph.terminal_tables import grid_table, metric_table, print_table, sweep_table


@app.command(name="evaluate")
@check_limits
def evaluate_(
    model: Model,
    /,
    *,
    suite: Annotated[list[str] | None, Parameter(negative="")] = None,
    data: str | None = None,
    root: Root = None,
    split: Split = None,
    partial: Annotated[bool, Parameter(negative="")] = False,
    weights: Weights = None,
    checkpoint: CheckpointOptions = CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    pretrained: Pretrained = True,
    batch_size: WholeNumber = 100,
    workers: WholeNumber = 0,
    size: Sizes = None,
    max_images: MaxImages = None,
    classes: WholeNumber | None = None,
    rfc: tuple[float, ...] = (),
    rfc_fill: Literal["zero", "black"] = "zero",
    per_class: Path | None = None,
    page: Path | None = None,
    overwrite: Annotated[bool, Parameter(negative="", help="Replace --per-class or --page if they exist.")] = False,
    device: Device = "auto",
    cost: bool = True,
    json_: Json = False,
) -> None:
    """Measure accuracy, calibration and cost of a model on a test set, or on several ImageNet test suites.

    Example: isomorph evaluate t.safetensors --data photos

    Parameters
    ----------
    suite
        imagenet, real, imagenet-v2 (the matched-frequency images; also imagenet-v2-matched-frequency,
        imagenet-v2-threshold-0.7, imagenet-v2-top-images), imagenet-a, imagenet-r, imagenet-sketch. Separate several
        with commas, or repeat the option. A suite is looked up in --root under its name (imagenet/, imagenet-v2/, ...);
        NAME=FOLDER gives its folder.
    data
        A folder of images with one folder per class (in val/ or test/, or directly), or a data source: cifar10,
        cifar100, digits or imagefolder; by default the one the model was trained on. With --suite: the format of its
        folder (imagefolder, tar, webdataset, huggingface), by default detected.
    partial
        Accept a suite with missing classes or images.
    batch_size
        Images per batch.
    workers
        Number of processes that load images; 0 loads them in the main process.
    size
        Height and width of the input; by default the model's own. May be given several times (--size 160 --size 224)
        for a row each.
    classes
        Use only the first N classes of the data, as data.classes does in training.
    rfc
        Ratio of receptive-field calibration, for example 1.13, instead of the model's own crop: the image is resized to
        1/ratio of the input and padded (below 1: enlarged and cropped). Several ratios (--rfc 1 --rfc 1.06 --rfc 1.13)
        print a row each.
    rfc_fill
        Padding of --rfc: zero after normalisation (the mean colour), or black before it.
    per_class
        File for the accuracy of every class (.csv).
    page
        File for a page (.html) of a model for segmentation or detection: its predictions next to the truth, the worst
        images first, with the metrics of every class. Of a text network: its attention.
    cost
        Also measure MACs and throughput.
    """
    _check_options(batch_size, workers, bool(suite), classes is not None, partial)
    check_page(page, overwrite)
    sizes = tuple(size or ())
    with loading():
        from isomorph.cli.evaluate_run import Sweep, find_inputs, measure, open_test_sets
        from isomorph.cli.evaluate_task import EvaluationOptions, evaluate_own_task
        from isomorph.cli.open_models import open_classifier
        from isomorph.distributed import open_runtime
    locations = find_inputs(suite, root, data, per_class, overwrite)
    runtime = open_runtime(device)
    net = open_classifier(model, checkpoint, weights, pretrained, runtime.device)
    classifiers = dict(suite=suite, split=split, classes=classes, rfc=rfc, per_class=per_class, partial=partial)
    own = EvaluationOptions(data, root, batch_size, workers, None, max_images, page)
    if evaluate_own_task(net, model, own, sizes, runtime, json_, classifiers):
        return
    test_sets = open_test_sets(net, locations, partial, data, root, split, classes, sizes, max_images)
    rows, costs = measure(net, test_sets, Sweep(sizes, rfc, rfc_fill), batch_size, workers, per_class, cost, runtime)
    if runtime.is_main:
        _print_results(_head(model, net, data, bool(suite), pretrained), suite, sizes, rows, costs, json_)


def _head(model: str, net: Any, data: str | None, suite: bool, pretrained: bool) -> dict[str, str]:
    """Return what was evaluated: the model, the data unless it is suites, and random weights."""
    from isomorph.evaluation.suites.test_data import default_data

    head = {"model": model} | ({} if suite else {"data": data or default_data(net)})
    return head | ({} if pretrained else {"weights": "random"})


def _check_options(batch_size: int, workers: int, suite: bool, classes: bool, partial: bool) -> None:
    """Raise UserError for options that are too small or cannot be combined."""
    if batch_size < 1 or workers < 0:
        raise UserError("--batch-size must be at least 1 and --workers at least 0")
    if suite and classes:
        raise UserError("--classes cannot be combined with --suite, whose classes are fixed")
    if partial and not suite:
        raise UserError("--partial applies to --suite only; give --suite too")


def _print_results(
    head: dict[str, str],
    suites: Sequence[str] | None,
    sizes: Sequence[tuple[int, int]],
    rows: list[dict[str, Any]],
    costs: list[dict[str, Any]],
    json_: bool,
) -> None:
    """Print a table if there are suites or several sizes, a row for each rfc ratio, or one metric per line."""
    many = bool(suites) or len(sizes) > 1
    single_cost = costs[0] if len(costs) == 1 else {}
    model = display_name(head["model"], pretrained="weights" not in head)
    if json_:
        several = {"rows": rows, "cost": costs} if many else {"curve": [head | row for row in rows]} | single_cost
        print_json(head | (several if many or len(rows) > 1 else rows[0] | single_cost))
    elif many:
        print(model)
        print_table(grid_table(rows))
        if costs:
            print_table(grid_table(costs) if len(costs) > 1 else metric_table("cost", single_cost))
    elif len(rows) == 1:
        rfc = f", rfc {rows[0]['rfc']:g} ({rows[0]['rfc_fill']})" if "rfc" in rows[0] else ""
        print_table(metric_table(model + rfc, rows[0] | single_cost))
    else:
        print_table(sweep_table(model, rows, "rfc"))
        print_table(metric_table(model, single_cost))
