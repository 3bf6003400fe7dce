"""The evaluate, predict and bench commands."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from isomorph.cli import options as opt
from isomorph.cli.output import progress_bar, show, track_steps
from isomorph.errors import UserError
from isomorph.json_values import JsonObject
from isomorph.terminal_tables import Rows, grid_table, metric_table, row_table, say


@opt.group
class ClassifierOptions:
    """What to measure of a classifier of images.

    Parameters
    ----------
    suite
        imagenet, real, imagenet-v2 (the matched-frequency images; also imagenet-v2-matched-frequency,
        imagenet-v2-threshold-0.7, imagenet-v2-top-images), imagenet-a, imagenet-r, imagenet-sketch; several may be
        given. A suite is looked up in --root under its name (imagenet/, imagenet-v2/, ...);
        NAME=FOLDER gives its folder.
    partial
        Accept a suite with missing classes or images.
    classes
        Use only the first N classes of the data, as data.classes does in training.
    rfc
        Ratio of receptive-field calibration, for example 1.13, instead of the model's own crop: the image is resized to
        1/ratio of the input and padded (below 1: enlarged and cropped). Several ratios print a row each.
    rfc_fill
        Padding of --rfc: zero after normalisation (the mean colour), or black before it.
    per_class
        File for the accuracy of every class (.csv).
    cost
        Also measure MACs and throughput.
    """

    suite: list[str] | None = None
    split: opt.Split = None
    partial: opt.Flag = False
    classes: opt.Count | None = None
    rfc: tuple[Annotated[float, opt.real(0, 100)], ...] = ()
    rfc_fill: Literal["zero", "black"] = "zero"
    per_class: Path | None = None
    cost: bool = True


@opt.command
def evaluate_(
    model: opt.Model,
    /,
    *,
    data: str | None = None,
    load: opt.LoadOptions = opt.LoadOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    size: opt.Sizes = None,
    classifier: ClassifierOptions = ClassifierOptions(),  # noqa: B008
    opening: opt.OpenOptions = opt.OpenOptions(),  # noqa: B008
    overwrite: Annotated[
        bool, Parameter(negative="", help="Replace --per-class if it exists.")
    ] = False,
    device: opt.Device = "auto",
    json_: opt.Json = False,
) -> None:
    """Measure accuracy, calibration and cost of a model on a test set, or on several ImageNet test suites.

    Example: isomorph evaluate t.safetensors --data photos

    Parameters
    ----------
    data
        A folder of images with one folder per class (in val/ or test/, or directly), or a data source: cifar10,
        cifar100, digits or imagefolder; by default the one the model was trained on. With --suite: the format of its
        folder (imagefolder, tar, webdataset, huggingface), by default detected.
    """
    for option in ("classes", "split"):
        if classifier.suite and getattr(classifier, option) is not None:
            raise UserError(f"--{option} cannot be combined with --suite, whose images are fixed")
    if classifier.rfc_fill != "zero" and not classifier.rfc:
        raise UserError("--rfc-fill is the padding of --rfc; give --rfc too")
    if classifier.partial and not classifier.suite:
        raise UserError("--partial applies to --suite only; give --suite too")
    opt.check_out(classifier.per_class, overwrite, suffixes=(".csv",), option="--per-class")
    with opt.loading():
        from isomorph.cli.open_models import open_classifier
        from isomorph.lab.distributed import open_runtime
        from isomorph.lab.evaluation.model_data import default_data, training_root
        from isomorph.lab.evaluation.suites import find_suites
        from isomorph.lab.training.task import EvaluationOptions, task_of
        from isomorph.models.input_sizes import evaluation_config
    locations = find_suites(classifier.suite, load.root, data) if classifier.suite else {}
    runtime = open_runtime(device)
    net = open_classifier(model, opening, runtime.device)
    data_options = EvaluationOptions(data, **vars(load))
    sizes = tuple(size or ())
    task = task_of(net)
    if task is not None:
        if len(sizes) > 1:
            raise UserError("--size has several values; give this model one height and width")
        if data is not None and load.root is not None and data not in task.sources:
            raise UserError(f"--data {data} is a file or a folder of its own; leave --root out")
        data_options = data_options._replace(
            size=sizes[0] if sizes else None, root=training_root(net, data, load.root)
        )
        evaluate_task(task, net, model, classifier, data_options, runtime, json_)
        return
    exported = Path(model).suffix in opt.EXPORTED
    rows, costs = _measure(net, classifier, data_options, locations, sizes, runtime, exported)
    if not runtime.is_main:
        return
    head: JsonObject = {
        "model": model,
        "input_size": list(evaluation_config(net)["input_size"][1:]),
    }
    if not locations:
        head["data"] = data or default_data(net)
    if not opening.pretrained:
        head["weights"] = "random"
    _show_rows(head, rows, costs, bool(locations) or len(sizes) > 1, json_)


def evaluate_task(
    task: Any,
    net: Any,
    model: str,
    classifier: ClassifierOptions,
    data_options: Any,
    runtime: Any,
    json_: bool,
) -> None:
    """Print the metrics of a model's own task: a table of the first row, and one with a line for each further row."""
    for name, value in vars(classifier).items():
        if value and name not in ("rfc_fill", "cost"):
            option = name.replace("_", "-")
            raise UserError(f"--{option} is for image classifiers; leave it out for this model")
    rows = task.evaluate(net, data_options, runtime)
    if not runtime.is_main:
        return
    first, *more_rows = rows
    texts = [metric_table(model, first)]
    if more_rows:
        texts.append(row_table(more_rows))
    show(json_, {"model": model, "rows": rows}, *texts)


def _measure(
    net: Any,
    options: ClassifierOptions,
    data_options: Any,
    locations: Mapping[Any, Any],
    sizes: Sequence[tuple[int, int]],
    runtime: Any,
    exported: bool,
) -> tuple[Rows, Rows]:
    """Return a row of metrics for every suite, size and rfc ratio, and the costs for every size."""
    from isomorph.checkpoints.files import write_atomically
    from isomorph.lab.data.imagenet_labels import NUM_CLASSES
    from isomorph.lab.evaluation.model_data import (
        Scoring,
        Sweep,
        TestSet,
        check_num_classes,
        evaluation_data,
        measure_costs,
        run_sweep,
        write_csv,
    )
    from isomorph.lab.evaluation.suites import open_located

    if locations:
        check_num_classes(getattr(net, "num_classes", None), NUM_CLASSES)
        test_sets = open_located(locations, options.partial)
    else:
        size = sizes[0] if sizes else None
        source, _ = evaluation_data(
            net, data_options.data, data_options.root, size, options.classes, options.split
        )
        test_sets = [TestSet(source, [Scoring("", source.labels, source.classes)])]
    if data_options.max_images is not None:
        test_sets = [test_set.spaced(data_options.max_images) for test_set in test_sets]
    sweep = Sweep(sizes, options.rfc, options.rfc_fill)
    rows, class_rows = run_sweep(
        net,
        test_sets,
        sweep,
        data_options.batch_size,
        data_options.workers,
        track_steps,
        runtime,
    )
    if options.per_class and runtime.is_main:
        write_atomically(options.per_class, lambda file: write_csv(file, class_rows))
    if not (options.cost and runtime.is_main):
        return rows, []
    images = sum(len(test_set.source) for test_set in test_sets)
    return rows, measure_costs(net, sizes, images, exported)


def _show_rows(
    head: JsonObject,
    rows: Rows,
    costs: Rows,
    has_several: bool,
    json_: bool,
) -> None:
    """Print a metric per line, or a row for each suite, size and rfc ratio; a star marks the best of several ratios."""
    model = opt.display_name(head["model"], pretrained="weights" not in head)
    cost = costs[0] if len(costs) == 1 else {}
    if len(rows) == 1 and not has_several:
        row = rows[0]
        if "rfc" in row:
            model += f", rfc {row['rfc']:g} ({row['rfc_fill']})"
        show(json_, head | row | cost, metric_table(model, row | cost))
        return
    tables = [grid_table(rows)]
    if has_several:
        results: JsonObject = {"rows": rows, "cost": costs}
    else:
        results = {"curve": [head | row for row in rows], **cost}
        best = max(range(len(rows)), key=lambda number: rows[number]["top1"])
        tables[0][1 + best][0] += " *"
    if len(costs) > 1:
        tables.append(grid_table(costs))
    elif costs:
        tables.append(metric_table("cost", cost))
    show(json_, head | results, model, *tables)


@opt.command
def predict(
    model: opt.Model,
    /,
    *,
    image: opt.File,
    out: Path | None = None,
    opening: opt.OpenOptions = opt.OpenOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    device: opt.Device = "auto",
    overwrite: opt.Overwrite = False,
    json_: opt.Json = False,
) -> None:
    """Predict one image: the five likeliest classes, a class for every pixel, or the objects in it.

    What is predicted is what the model was trained for. Example: isomorph predict runs/camvid --image x.jpg --out y.png

    Parameters
    ----------
    image
        File of the image.
    out
        File for the image with the prediction drawn over it (.png); further files are written next to it: y-mask.png
        with the number of the class of every pixel, y.json with the objects. For a classifier a .json file. By default
        nothing is written.
    """
    if out and out.exists() and out.samefile(image):
        raise UserError(f"--out {out} is the image itself; give another file")
    with opt.loading():
        from isomorph.cli.open_models import open_classifier
        from isomorph.lab.distributed import open_runtime
        from isomorph.lab.training.classification import CLASSIFICATION
        from isomorph.lab.training.task import recorded_task
    net = open_classifier(model, opening, open_runtime(device).device)
    task = recorded_task(net) or CLASSIFICATION
    prediction = task.predict(net, image)
    files: dict[Path, Any] = {}
    if out:
        files = _planned_files(prediction.files, out, image, overwrite)
    for path, value in files.items():
        _write(path, value)
    written = list(map(str, files))
    values = {"model": model, "image": str(image), "rows": prediction.rows, "files": written}
    table = [["", str(image)], ["nothing", ""]]
    if prediction.rows:
        table = row_table(prediction.rows)
    show(json_, values, table, *(f"wrote {path}" for path in written))


def _planned_files(
    values: dict[str, Any], out: Path, image: Path, overwrite: bool
) -> dict[Path, Any]:
    kinds = [ending for ending in values if ending.startswith(".")]
    if out.suffix not in kinds:
        raise UserError(f"--out {out} must end in {' or '.join(kinds)} for this model")
    files = {}
    for ending, value in values.items():
        path = out.with_name(out.stem + ending)
        if path.exists() and path.samefile(image):
            raise UserError(
                f"{path}, which --out {out} writes too, is the image itself; give another file"
            )
        opt.check_out(path, overwrite, suffixes=(path.suffix,))
        files[path] = value
    return files


def _write(path: Path, value: Any) -> None:
    from PIL import Image

    from isomorph.checkpoints.files import write_atomically

    if isinstance(value, Image.Image):
        write_atomically(path, lambda file: value.save(file, format="PNG"))
    else:
        write_atomically(path, lambda file: file.write_text(json.dumps(value, indent=1)))


@opt.command
def bench(
    model: opt.NamedModel,
    /,
    *,
    against: list[opt.NamedModel] | None = None,
    batch_size: list[opt.BatchSize] = [32],  # noqa: B006 (cyclopts shows it)
    size: opt.Sizes = None,
    step: Literal["inference", "train", "pretrain"] = "inference",
    seconds: opt.Seconds = 2.0,
    peak: bool = True,
    opening: opt.CheckpointOptions = opt.CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    device: opt.Device = "auto",
    json_: opt.Json = False,
) -> None:
    """Measure parameters, MACs, activations, peak memory and images per second, by batch size and image size.

    Example: isomorph bench resnet18 --against t.safetensors --batch-size 1 32

    Parameters
    ----------
    model
        Name of a timm model (its weights are not loaded), a checkpoint, or the folder of a run.
    against
        Further models. All are timed by turns in one process; the ratios are relative to MODEL.
    batch_size
        Images per batch; several values give several rows.
    step
        What to time: an inference pass, a training step with AdamW, or a step of masked pre-training (TDRL Table 8).
    seconds
        Seconds of timing for each model, image size and batch size; at least five passes are timed.
    peak
        Also measure peak memory.
    """
    names = [model, *(against or [])]
    if len(set(names)) < len(names):
        raise UserError(
            f"{max(names, key=names.count)} is given twice; --against takes models other than MODEL"
        )
    with opt.loading():
        from isomorph.analysis.cost import cost_table
        from isomorph.cli.open_models import open_given
        from isomorph.lab.distributed import open_runtime
        from isomorph.lab.report.analyze_page import cost_tables
        from isomorph.models.input_sizes import evaluation_config
    models = {name: open_given(name, opening, pretrained=False, among=names) for name in names}
    sizes = size or [evaluation_config(models[model])["input_size"][-2:]]
    for net in models.values():
        net.to(open_runtime(device).device)
    with progress_bar("measuring") as update:
        rows = list(cost_table(models, sizes, batch_size, seconds, peak, update, step))
    parts: list[Any] = []
    for table in cost_tables(rows):
        parts += ["", table]
    show(json_, rows, *parts[1:])
    problems: dict[str, None] = {}
    for row in rows:
        if "problem" in row:
            problems.setdefault(f"{row['model']}: {row['problem']}")
    for problem in problems:
        say(f"isomorph: {problem}", sys.stderr)
