"""What `isomorph survey` measures and writes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

import isomorph as iso
from isomorph.cli.page_output import page_footer, save_figures_and_print
from isomorph.cli.progress import progress_bar
from isomorph.data.loaders import eval_loader
from isomorph.evaluation.input_sizes import fit_to_size
from isomorph.report.html import write_page
from isomorph.report.survey_page import alone_table, summary_rows, survey_lead, survey_sections
from isomorph.suites.test_data import evaluation_data, sample_images
from isomorph.surgery import Rule
from isomorph.terminal_tables import print_table

ImageOptions = tuple[str | None, Path | None, float | None, int | None, int, tuple[int, int] | None, int]
"""Data source, its folder, the fraction to test on, classes, number of images, their size, and images per batch."""


def measure(
    model: nn.Module,
    images: ImageOptions,
    rules: Sequence[Rule],
    where: Sequence[str],
    loss: float,
    seconds: float,
    out: Path | None,
    name: str,
) -> dict[str, Any]:
    """Survey a model on random test images, with a progress bar."""
    data, root, split, classes, count, size, batch_size = images
    source, config = evaluation_data(model, data, root, size, classes, split)
    fitted = fit_to_size(model, size) if size else model
    loader = eval_loader(sample_images(source, count), config, batch_size)
    with progress_bar("cells") as update:
        return iso.survey(fitted, loader, rules, where, loss=loss, seconds=seconds, out=out, name=name, progress=update)


def write_survey(result: Mapping[str, Any], out: Path, figures: Path | None, json_: bool) -> None:
    """Write the page of a survey and its figures, and print its tables."""
    sections = survey_sections(result)
    written = write_page(out, f"Survey of {result['model']}", survey_lead(result), sections, page_footer())
    if not json_:
        print(survey_lead(result) + "\n")
        print_table(alone_table(result))
        print()
    save_figures_and_print(out, written, sections, figures, json_, result, [] if json_ else [summary_rows(result)])
