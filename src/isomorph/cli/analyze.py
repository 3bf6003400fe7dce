"""The command that takes models apart, and how pages are written."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter

import isomorph as iso
from isomorph.analysis import feature_evolution
from isomorph.analysis.evolution import random_draws
from isomorph.checkpoints.open import is_checkpoint_or_run, open_model
from isomorph.cli.app import Device, Json, Model, Weights, WholeNumber, app, check_limits, display_name, spinner
from isomorph.data.loaders import eval_loader
from isomorph.data.sources import Source
from isomorph.distributed import open_runtime
from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import at_size, evaluation_config
from isomorph.report.analyze_page import AnalyzeOptions, analyze_sections, lead_text
from isomorph.report.charts import Table
from isomorph.report.cka_charts import evolution_table
from isomorph.report.html import Section, write_page
from isomorph.report.page_images import open_images
from isomorph.report.page_models import PageModel, find_recipe, unique_names
from isomorph.report.save_figures import save_figures
from isomorph.report.terminal_tables import print_table
from isomorph.suites.robustness.results import read_results, weights_hash
from isomorph.suites.test_data import (
    default_data,
    images_on_device,
    open_test_images,
    sample_images,
)

_CROP_KEYS = ("crop_pct", "crop_mode", "interpolation")
"""What of a model's data config makes the picture, beside its size; the rest is how the picture is normalised."""


def open_subject(name: str, title: str, weights: Path | None, pretrained: bool, device: str) -> PageModel:
    """A model by name, checkpoint or run folder, ready to be taken apart."""
    path = Path(name)
    model = open_model(name, weights, pretrained)
    recipe = find_recipe(path) if path.is_dir() or path.suffix == ".safetensors" else None
    title = display_name(title, pretrained or is_checkpoint_or_run(name) or weights is not None)
    return PageModel(title, model.to(open_runtime(device).device), evaluation_config(model), recipe)


def _resize_subject(subject: PageModel, size: tuple[int, int]) -> PageModel:
    """The subject at an image size (height, width). Raises: UserError when its model takes no such images."""
    return replace(subject, model=at_size(subject.model, size), config=evaluation_config(subject.model, size))


def loaders_for(
    subjects: list[PageModel], data: str | None, root: Path | None, samples: int
) -> dict[str, Iterable[Any]]:
    """A loader for each model of the same pictures: test images drawn at random, the same ones at every call.

    All are cut and resized as the first model's (sizes are alike by then, see `analyze`); mean and std are each one's.
    """
    source = open_test_images(subjects[0].model, data, root)
    return _loaders_for(subjects, sample_images(source, samples))


def _loaders_for(subjects: list[PageModel], source: Source) -> dict[str, Iterable[Any]]:
    """A loader of the same images for each model, in batches of 32."""
    frame = {key: subjects[0].config[key] for key in _CROP_KEYS}
    return {s.name: eval_loader(source, {**s.config, **frame}, 32) for s in subjects}


def _feature_evolutions(subjects: list[PageModel], data: str | None, root: Path | None) -> dict[str, dict[str, float]]:
    """F_k of every layer of each model, on the same random batches of test images."""
    source = open_test_images(subjects[0].model, data, root)
    loaders = _loaders_for(subjects, source.subset(random_draws(len(source)).tolist()))
    return {s.name: feature_evolution(s.model, images_on_device(loaders[s.name], s.model)) for s in subjects}


def _check_same_channels(subjects: list[PageModel]) -> None:
    """Raises: UserError when models cannot be shown the same pictures."""
    counts = [subject.config["input_size"][0] for subject in subjects]
    if len(set(counts)) > 1:
        said = ", ".join(f"{s.name} of {n}" for s, n in zip(subjects, counts, strict=True))
        raise UserError(f"the models take images of other numbers of channels ({said}); give models of the same")


def footer() -> str:
    """What made the page, and when."""
    made = f"isomorph {iso.__version__}, torch {torch.__version__}, {time.strftime('%Y-%m-%d %H:%M')}"
    return f"{made}. This file loads nothing."


def say(
    out: Path,
    size: int,
    sections: list[Section],
    figures: Path | None,
    json_: bool,
    measured: Mapping[str, Any] | None = None,
    tables: Sequence[Table] = (),
) -> None:
    """Prints what was measured and written, after writing the figures where they are wanted."""
    drawn = save_figures(figures, sections) if figures else []
    if json_:
        written = {"out": str(out), "bytes": size, "figures": [str(path) for path in drawn]}
        print(json.dumps({**written, **(measured or {})}))
    else:
        for table in tables:
            print_table(table)
            print()
        more = f"\nfigures: {len(drawn)} files in {figures}" if figures else ""
        print(f"page: {out}  ({size / 1e6:.2f} MB; open it in any browser){more}")


@app.command
@check_limits
def analyze(
    model: Model,
    /,
    *,
    image: list[Path],
    against: str | None = None,
    out: Path = Path("isomorph-analysis.html"),
    layers: list[str] | None = None,
    data: str | None = None,
    root: Path | None = None,
    samples: WholeNumber = 256,
    evolution: Annotated[bool, Parameter(negative="")] = False,
    robustness: Annotated[list[Path] | None, Parameter(consume_multiple=True)] = None,
    weights: Weights = None,
    pretrained: bool = True,
    size: tuple[WholeNumber, WholeNumber] | None = None,
    figures: Path | None = None,
    megabytes: float = 7.5,
    speed: bool = False,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Take a model apart, or two side by side, and write one HTML page: attention under the pointer, and much more.

    Parameters
    ----------
    image
        An image file to look at; may be given several times.
    against
        Another model beside it: after recasting, after fine-tuning.
    out
        The page: one file, which loads nothing.
    layers
        Only attention layers that these globs match, like `blocks.1?.attn`.
    data
        Source of test images for CKA between layers; with --root alone, what the model was trained on.
    root
        Folder of that data.
    samples
        Images for CKA, 4 at least.
    evolution
        With --data or --root: print and draw how fast features become the final ones (F_k of Refiner eq. 2, linear CKA,
        mean of 10 random batches of 32).
    robustness
        Results of `isomorph robustness` (--out, or what --json printed) of the model, the other, or both.
    pretrained
        Use the models' public weights.
    size
        Height and width of the input; by default the model's own.
    figures
        Folder for every chart as PDF and SVG.
    megabytes
        Size of the page that attention maps are thinned out for.
    speed
        Measure images a second and peak memory too.
    """
    if samples < 4 or megabytes < 0.5:
        raise UserError("--samples must be at least 4 and --megabytes at least 0.5")
    if evolution and not (data or root):
        raise UserError("--evolution compares features of test images; give --data or --root too")
    given = [model, *([against] if against else [])]
    names = unique_names(given)
    wanted = zip(given, names, [weights, None], strict=False)
    subjects = [open_subject(name, title, own, pretrained, device) for name, title, own in wanted]
    _check_same_channels(subjects)
    results = read_results(robustness, {s.name: weights_hash(s.model) for s in subjects}) if robustness else None
    alike = size or subjects[0].config["input_size"][-2:]
    subjects = [_resize_subject(s, alike) if s.config["input_size"][-2:] != alike else s for s in subjects]
    pictures = open_images(image, dict(subjects[0].config))
    batches = loaders_for(subjects, data, root, samples) if data or root else {}
    with spinner("taking apart") as tell:
        drawn = f"{samples} images of {data or default_data(subjects[0].model)}, drawn at random"
        evolved = _feature_evolutions(subjects, data, root) if evolution else {}
        extras = AnalyzeOptions(batches, drawn, evolved, results, speed, int((megabytes - 0.4) * 1e6), tell)
        sections = analyze_sections(subjects, pictures, layers, extras)
    written = write_page(out, " and ".join(s.name for s in subjects), lead_text(subjects, sections), sections, footer())
    tables = [evolution_table(evolved)] if evolved else []
    say(out, written, sections, figures, json_, {"evolution": evolved} if evolved else None, tables)
