"""The command that evaluates a model."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from isomorph.checkpoints.open import check_pretrained_option, open_model
from isomorph.cli.app import (
    Device,
    Json,
    Model,
    Root,
    Weights,
    WholeNumber,
    app,
    check_limits,
    display_name,
    track_steps,
)
from isomorph.distributed import open_runtime
from isomorph.errors import UserError
from isomorph.report.terminal_tables import grid_table, metric_table, print_table, sweep_table
from isomorph.suites import sweep as evaluating
from isomorph.suites import test_set as views
from isomorph.suites.imagenet import suites as imagenet
from isomorph.suites.test_data import default_data, evaluation_data


@app.command(name="evaluate")
@check_limits
def evaluate_(
    model: Model,
    /,
    *,
    suite: Annotated[list[str] | None, Parameter(negative="")] = None,
    data: str | None = None,
    root: Root = None,
    partial: Annotated[bool, Parameter(negative="")] = False,
    weights: Weights = None,
    pretrained: bool = True,
    batch_size: WholeNumber = 100,
    workers: WholeNumber = 0,
    size: tuple[tuple[WholeNumber, WholeNumber], ...] = (),
    classes: WholeNumber | None = None,
    rfc: tuple[float, ...] = (),
    rfc_fill: Literal["zero", "black"] = "zero",
    per_class: Path | None = None,
    device: Device = "auto",
    cost: bool = True,
    json_: Json = False,
) -> None:
    """Accuracy, calibration and cost of a model on a test set, or on several ImageNet suites.

    Parameters
    ----------
    suite
        imagenet, real, imagenet-v2 (also imagenet-v2-matched-frequency, the same images, -threshold-0.7 and
        -top-images), imagenet-a, imagenet-r, imagenet-sketch; several with commas, or the option several times. Each is
        looked for in --root under its name (imagenet/, imagenet-v2/, ...); NAME=FOLDER says where it is.
    data
        cifar10, cifar100, digits or imagefolder; by default what the model's weights were trained on. With --suite: the
        form of its folder (imagefolder, tar, webdataset, huggingface), by default found out.
    partial
        Allow a suite that lacks classes or images.
    pretrained
        Use the model's public weights; --no-pretrained leaves it with random ones.
    batch_size
        Images per step.
    workers
        Processes that prepare images.
    size
        Height and width of the input; by default the model's own. Several (--size 160 160 --size 224 224) are a sweep.
    classes
        Only the first so many classes of the data, as data.classes in training.
    rfc
        Ratio of receptive-field calibration, e.g. 1.13, in place of the model's own crop: the image smaller by so much,
        padded to the input (below 1: cropped). Several ratios (--rfc 1 --rfc 1.06 --rfc 1.13) print the curve.
    rfc_fill
        zero pads what the model reads (the mean colour), black pads the picture.
    per_class
        Write the accuracy of every class to this file (.csv).
    cost
        Measure MACs and throughput too.
    """
    if batch_size < 1 or workers < 0:
        raise UserError("--batch-size must be at least 1 and --workers at least 0")
    _check_options(bool(suite), classes is not None, partial)
    check_pretrained_option(model, weights, pretrained)
    evaluating.refuse_no_csv(per_class)
    places = imagenet.find_suites(suite or [], root, data)
    net = open_model(model, weights, pretrained)
    if places:
        views.refuse_other_classes(getattr(net, "num_classes", None), imagenet.CLASSES)
        sets = imagenet.open_found(places, partial)
    else:
        sets = [views.whole(evaluation_data(net, data, root, size[0] if size else None, classes)[0])]
    net.to(open_runtime(device).device)
    sweep = evaluating.Sweep(size, rfc, rfc_fill)
    rows, of_classes = evaluating.run_sweep(net, sets, sweep, batch_size, workers, track_steps)
    if per_class:
        evaluating.write_csv(per_class, of_classes)
    costs = evaluating.costs(net, size) if cost else []
    head = {"model": model} | ({} if suite else {"data": data or default_data(net)})
    head |= {} if pretrained else {"weights": "random"}
    _print_results(head, bool(suite) or len(size) > 1, rows, costs, json_)


def _check_options(suite: bool, classes: bool, partial: bool) -> None:
    """Raises: UserError for options that do not go together."""
    if suite and classes:
        raise UserError("--classes does not go with --suite, whose classes are fixed")
    if partial and not suite:
        raise UserError("--partial goes with --suite")


def _print_results(
    head: dict[str, str], many: bool, rows: list[dict[str, Any]], costs: list[dict[str, Any]], json_: bool
) -> None:
    """Prints what was found: a table of `many` suites or sizes, a curve, or one number under another."""
    found = costs[0] if len(costs) == 1 else {}
    model = display_name(head["model"], pretrained="weights" not in head)
    if json_:
        several = {"rows": rows, "cost": costs} if many else {"curve": [head | row for row in rows]} | found
        print(json.dumps(head | (several if many or len(rows) > 1 else rows[0] | found)))
    elif many:
        print(model)
        print_table(grid_table(rows))
        if costs:
            print_table(grid_table(costs) if len(costs) > 1 else metric_table("cost", found))
    elif len(rows) == 1:
        rfc = f", rfc {rows[0]['rfc']:g} ({rows[0]['rfc_fill']})" if "rfc" in rows[0] else ""
        print_table(metric_table(model + rfc, rows[0] | found))
    else:
        print_table(sweep_table(model, rows, "rfc"))
        print_table(metric_table(model, found))
