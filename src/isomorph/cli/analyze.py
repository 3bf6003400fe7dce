"""The analyze and compare commands."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from isomorph.checkpoints.paths import is_function
from isomorph.cli import options as opt
from isomorph.cli.messages import name_options
from isomorph.cli.output import page_footer, page_line, show, spinner
from isomorph.errors import UserError
from isomorph.json_values import JsonObject
from isomorph.terminal_tables import say

if TYPE_CHECKING:
    from isomorph.lab.report.page_models import PageModel
    from isomorph.lab.report.run_files import AccuracyPoint, RunLog

_MAX_IMAGES = 256  # of which features or attention are measured, by default
_CROP_KEYS = ("crop_pct", "crop_mode", "interpolation")  # which decide the pixels that a model gets


@opt.group
class ImageOptions:
    """Test images to compare features on.

    Parameters
    ----------
    data
        Folder or data source of test images for CKA between layers. With --root alone: the source the model was trained
        on.
    root
        Folder of that data.
    max_images
        Number of images for CKA, by default 256.
    evolution
        With --data or --root: print and plot how fast features approach those of the last layer (F_k of Refiner eq. 2:
        linear CKA, mean of 10 random batches of 32 images).
    """

    data: opt.Data = None
    root: Path | None = None
    split: opt.Split = None
    max_images: Annotated[int, opt.whole(4, 10**7)] | None = None
    evolution: opt.Flag = False


@opt.command
def analyze(
    model: opt.Model,
    /,
    *,
    image: list[opt.File],
    against: opt.NamedModel | None = None,
    out: Path = Path("isomorph-analysis.html"),
    overwrite: opt.Overwrite = False,
    layers: list[str] | None = None,
    inputs: str | None = None,
    test: ImageOptions = ImageOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    opening: opt.OpenOptions = opt.OpenOptions(),  # noqa: B008
    size: opt.Size = None,
    device: opt.Device = "auto",
    json_: opt.Json = False,
) -> None:
    """Write an HTML page about a model, or two next to each other: attention maps of images, statistics, CKA, cost.

    Example: isomorph analyze t.safetensors --against resnet18 --image cat.jpg

    Parameters
    ----------
    image
        Image files whose attention maps are shown.
    against
        Second model to compare with, for example the same model after recasting or fine-tuning. Both get images of
        MODEL's size, unless --size is given.
    out
        File for the page, which needs no other file and no network.
    layers
        Globs over attention layers to show, for example `blocks.1?.attn`; by default all.
    inputs
        Function package.module:function from normalised images (B, C, H, W) to what the models read, if that is not the
        images alone: for CLIP a dict with texts, for SigLIP2 one with patches.
    """
    if inputs is not None and not is_function(inputs):
        raise UserError(
            f"--inputs {inputs[:80]!r} must be package.module:function, as Python imports it"
        )
    if test.evolution and not (test.data or test.root):
        raise UserError("--evolution compares features of test images; give --data or --root too")
    if test.split is not None and not (test.data or test.root):
        raise UserError("--split is about the test images for CKA; give --data or --root too")
    if test.max_images is not None and not (test.data or test.root):
        raise UserError("--max-images is about the test images for CKA; give --data or --root too")
    opt.check_out(out, overwrite, suffixes=(".html",))
    with opt.loading():
        from isomorph.checkpoints.open import import_function
        from isomorph.lab.report.analyze_page import NOT_DRAWN, AnalyzeOptions, analyze_sections
        from isomorph.lab.report.charts import Dots, series_table
        from isomorph.lab.report.html import write_page
        from isomorph.lab.report.page_images import open_images
    read = import_function(inputs) if inputs is not None else None
    names = [model, against] if against else [model]
    models = _open_models(names, opening, device, size, read)
    shown = open_images(image, dict(models[0].config))
    with spinner("analyzing") as show_step:
        batches, sampled, evolutions = open_test_loaders(models, test)
        options = AnalyzeOptions(layers, batches, sampled, evolutions, report_progress=show_step)
        sections = analyze_sections(models, shown, options)
    title = " and ".join(entry.name for entry in models)
    written = write_page(out, title, sections[0].finding, sections, page_footer())
    measured: JsonObject = {"out": str(out), "bytes": written}
    texts: list[Any] = []
    if evolutions:
        measured["evolution"] = evolutions
        texts = [series_table("F_k", evolutions), ""]
    measured["heads"] = {}
    for section in sections:
        if section.details and section.details.summary.endswith(NOT_DRAWN):
            for line in section.details.lines:
                say(f"isomorph: {section.details.summary}: {line}", sys.stderr)
        for chart in section.charts:
            if isinstance(chart, Dots):
                measured["heads"][chart.title] = chart.series
    show(json_, measured, *texts, page_line(out, written))


def _open_models(
    names: list[str],
    opening: opt.OpenOptions,
    device: str,
    size: opt.Size,
    read: Callable[[Any], Any] | None,
) -> list["PageModel"]:
    from isomorph.lab.report.page_models import unique_names

    models = []
    for name, title in zip(names, unique_names(names), strict=True):
        opened = open_page_model(name, title, opening, device, names)
        models.append(replace(opened, inputs=read))
    channels = {entry.name: entry.config["input_size"][0] for entry in models}
    if len(set(channels.values())) > 1:
        counts = ", ".join(f"{name}: {number}" for name, number in channels.items())
        raise UserError(
            f"the models differ in image channels ({counts}); give models with the same number"
        )
    common = size or models[0].config["input_size"][-2:]
    return [_fit_to(entry, common) for entry in models]


def _fit_to(model: "PageModel", size: tuple[int, int]) -> "PageModel":
    from isomorph.models.input_sizes import evaluation_config, fit_to_size

    height, width = model.config["input_size"][-2:]
    if (height, width) == tuple(size):
        return model
    fitted = replace(model, config=evaluation_config(model.model, size))
    try:
        if model.inputs is None:
            fitted = replace(fitted, model=fit_to_size(model.model, size))
    except UserError as error:
        raise UserError(f"{model.name}: {error}") from None
    new_size = f"{size[0]} x {size[1]}"
    say(
        f"isomorph: {model.name} gets images of {new_size}, its own size is {height} x {width}",
        sys.stderr,
    )
    return fitted


def open_page_model(
    name: str, title: str, opening: opt.OpenOptions, device: str, among: list[str] | None = None
) -> "PageModel":
    """Open a model by name, checkpoint or run folder, with its data config and recipe; `among`, see `open_given`."""
    from isomorph.cli.open_models import find_recipe, open_given
    from isomorph.lab.distributed import open_runtime
    from isomorph.lab.report.page_models import PageModel
    from isomorph.lab.training.open import is_checkpoint_or_run
    from isomorph.models.input_sizes import evaluation_config

    path = Path(name)
    among = among or [name]
    model = open_given(name, opening, among=among)
    recipe = None
    if path.is_dir() or path.suffix == ".safetensors":
        recipe = find_recipe(path)
    is_first = name == among[0]
    has_weights = (
        opening.pretrained or is_checkpoint_or_run(name) or bool(opening.weights and is_first)
    )
    title = opt.display_name(title, has_weights)
    return PageModel(title, model.to(open_runtime(device).device), evaluation_config(model), recipe)


def open_test_loaders(
    models: list["PageModel"], test: ImageOptions
) -> tuple[dict[str, Iterable[Any]], str, dict[str, dict[str, float]]]:
    """Return a loader of test images for each model, what they are, and F_k of every layer of each model if asked for.

    All models see the same images in the crop of the first one (their image sizes are equal), each with its own mean
    and std.
    """
    from isomorph.analysis import feature_evolution
    from isomorph.analysis.evolution import random_draw_indices
    from isomorph.lab.evaluation.model_data import default_data, open_test_images, sample_images

    if not (test.data or test.root):
        return {}, "", {}
    first = models[0].model
    source = open_test_images(first, test.data, test.root, test_fraction=test.split)
    chosen = sample_images(source, test.max_images or _MAX_IMAGES)
    sampled = f"{len(chosen)} images of {test.data or default_data(first)}, drawn at random"
    evolutions = {}
    if test.evolution:
        drawn = source.subset(random_draw_indices(len(source)).tolist())
        batches = _same_image_loaders(models, drawn)
        evolutions = {
            entry.name: feature_evolution(entry.model, batches[entry.name]) for entry in models
        }
    return _same_image_loaders(models, chosen), sampled, evolutions


def _same_image_loaders(models: list["PageModel"], source: Any) -> dict[str, Iterable[Any]]:
    from isomorph.lab.data.loaders import eval_loader

    crop = {key: models[0].config[key] for key in _CROP_KEYS}
    loaders: dict[str, Iterable[Any]] = {}
    for entry in models:
        loader = eval_loader(source, {**entry.config, **crop}, 32)
        loaders[entry.name] = _ReadBatches(loader, entry)
    return loaders


@dataclass(frozen=True)
class _ReadBatches:
    """The batches of a loader as a model reads them, with their labels."""

    loader: Iterable[Any]
    model: "PageModel"

    def __iter__(self) -> Iterator[Any]:
        for images, labels in self.loader:
            yield self.model.read(images), labels


@opt.group
class AlongOptions:
    """The test images of --along.

    Parameters
    ----------
    data
        Data source of the test images for --along; by default each run's own.
    root
        Folder of that data; by default the one in each run's recipe.
    max_images
        Number of images for --along, drawn at random, the same for all runs; by default 256.
    """

    data: opt.Data = None
    root: Path | None = None
    max_images: opt.Count | None = None


@opt.command
def compare_(
    runs: list[Path] | None = None,
    /,
    *,
    along: list[Literal["nonlocality", "entropy"]] | None = None,
    test: AlongOptions = AlongOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    evaluated: list[Path] | None = None,
    opening: opt.CheckpointOptions = opt.CheckpointOptions(),  # noqa: B008
    out: Path = Path("isomorph-comparison.html"),
    overwrite: opt.Overwrite = False,
    device: opt.Device = "auto",
    json_: opt.Json = False,
) -> None:
    """Compare runs in one HTML page: learning curves, accuracy against cost, gates along training, recipes.

    Example: isomorph compare runs/cnn runs/tcnn

    Parameters
    ----------
    runs
        Folders of runs, finished or not.
    along
        Measure attention on the checkpoints saved by keep_every; print and plot it per layer along training. One or
        both of nonlocality (ConViT Fig. 5) and entropy.
    evaluated
        Files with the output of `isomorph evaluate --json`; their models are added to the accuracy-cost chart.
    out
        File for the page, which needs no other file and no network.
    """
    folders = runs or []
    if not folders and not evaluated:
        raise UserError("there is nothing to compare; give folders of runs, or --evaluated")
    if (test.data or test.root) and not along:
        raise UserError(
            "--data and --root choose the images of --along; give --along nonlocality or entropy too"
        )
    if test.max_images is not None and not along:
        raise UserError(
            "--max-images is about the images of --along; give --along nonlocality or entropy too"
        )
    opt.check_out(out, overwrite, suffixes=(".html",))
    with opt.loading():
        from isomorph.cli.open_models import library_options
        from isomorph.lab.report.compare_page import (
            compare_sections,
            histories_json,
            history_tables,
        )
        from isomorph.lab.report.html import write_page
        from isomorph.lab.report.run_files import read_run_logs
    logs = read_run_logs(folders)
    options = library_options(opening)
    points = _accuracy_points(logs, evaluated or [], options)
    histories: JsonObject = {}
    with spinner("measuring") as show_step:
        if along:
            histories = _measure_along(logs, along, test, options, device, show_step)
    count = test.max_images or _MAX_IMAGES
    sampled = (
        f"at most {count} test images of {test.data or 'the data of each run'}, drawn at random"
    )
    sections = compare_sections(logs, gating_histories(logs, options), histories, sampled, points)
    size = write_page(out, _title_of(logs, points), sections[0].finding, sections, page_footer())
    measured: JsonObject = {"out": str(out), "bytes": size}
    if histories:
        measured["along"] = histories_json(histories)
    if points:
        measured["points"] = [point._asdict() for point in points]
    texts: list[Any] = []
    for table in history_tables(histories):
        texts += [table, ""]
    show(json_, measured, *texts, page_line(out, size))


def _title_of(logs: Sequence[Any], points: Sequence[Any]) -> str:
    compared = logs or points
    if len(compared) == 1:
        return compared[0].name
    return f"{len(compared)} {'runs' if logs else 'models'}"


def gating_histories(logs: Sequence["RunLog"], options: Any) -> JsonObject:
    """Return gates, centres and spans along each run of a model with gated layers; other runs are left out."""
    from isomorph.lab.training import gating_history

    histories = {}
    for log in logs:
        with suppress(UserError):  # no gated layer
            histories[log.name] = gating_history(log.folder, log.problems, options)
    return histories


def _open_images(log: "RunLog", test: AlongOptions) -> Any:
    from isomorph.lab.data.formats.registry import open_source
    from isomorph.lab.data.sources import first_classes
    from isomorph.lab.evaluation.model_data import sample_images

    data: JsonObject = {}
    if not test.data:
        data = log.recipe.get("data") or {}
    name = test.data or data.get("source")
    if not name:
        raise UserError("recipe.json does not name its data source; give --data")
    root = test.root or data.get("root")
    source = open_source(name, "test", root and Path(root), data.get("split"))
    if data.get("classes"):
        source = first_classes(source, data["classes"])
    return sample_images(source, test.max_images or _MAX_IMAGES)


def _measure_along(
    logs: Sequence["RunLog"],
    keys: Sequence[str],
    test: AlongOptions,
    options: Any,
    device: str,
    show_step: Callable[[str], None],
) -> JsonObject:
    """Measure attention on every saved checkpoint of each run; failures are added to the problems of the run's log."""
    from isomorph.lab.distributed import open_runtime
    from isomorph.lab.report.compare_page import MeasureHistory
    from isomorph.lab.report.page_models import MEASURES
    from isomorph.lab.training.history import attention_history

    if not logs:
        raise UserError("--along measures runs; give the folder of at least one run")
    histories: dict[str, JsonObject] = {key: {} for key in keys}
    measures = {key: MEASURES[key].of for key in keys}
    device = str(open_runtime(device).device)
    for log in logs:
        show_step(log.name)
        try:
            images = _open_images(log, test)
            epochs, values = attention_history(
                log.folder, measures, images, device, log.problems, options
            )
        except UserError as error:
            log.problems.append(f"no {' and no '.join(keys)} along training: {error}")
            continue
        for key, layers in values.items():
            histories[key][log.name] = MeasureHistory(epochs, layers)
    if not any(histories.values()):
        raise UserError(f"{logs[0].name}: {logs[0].problems[-1]}")
    return histories


def _accuracy_points(
    logs: Sequence["RunLog"], evaluated: Sequence[Path], options: Any
) -> list["AccuracyPoint"]:
    """Return accuracy and cost of runs and of evaluated models; of evaluated ones alone if there is only one model."""
    from isomorph.lab.report.run_files import AccuracyPoint, read_points
    from isomorph.lab.training.history import run_cost

    points = read_points(evaluated)
    if len(logs) + len(points) <= 1:
        return points
    run_points = []
    for log in logs:
        if log.best_top1 is None:
            continue
        try:
            cost = run_cost(log.folder, options)
        except UserError as error:
            problem = f"its cost was not counted: {name_options(str(error), 'compare')}"
            log.problems.append(problem)
            say(f"isomorph: {log.name}: {problem}", sys.stderr)
            continue
        test_set = log.test_set or "test set"
        run_points.append(
            AccuracyPoint(log.name, test_set, log.best_top1, **cost, images=log.test_images)
        )
    for log in logs:
        if log.best_top1 is None and (run_points or points):
            log.problems.append("no top-1, so it is not in the chart of accuracy and cost")
    names = [point.name for point in (*run_points, *points)]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name} is given twice; give it once, as a run or in --evaluated")
    return [*run_points, *points]
