"""What `isomorph evaluate` does with a model that was trained for another task than image classification."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from isomorph.cli.json_output import print_json
from isomorph.cli.sizes import only_size
from isomorph.distributed import Runtime
from isomorph.errors import UserError
from isomorph.terminal_tables import metric_table, print_table, row_table
from isomorph.training.task import EvaluationOptions, Task, task_of


def evaluate_own_task(
    model: nn.Module,
    name: str,
    options: EvaluationOptions,
    sizes: Sequence[tuple[int, int]],
    runtime: Runtime,
    json_: bool,
    classifiers: dict[str, Any],
) -> bool:
    """Print the metrics of a model of another task than image classification; return False for a classifier.

    `sizes` are all values of --size, and `classifiers` those of the options for image classifiers.

    Raises: UserError for an option of the other kind of model, or several sizes.
    """
    task = task_of(model)
    if task is None:
        if options.page:
            raise UserError(
                "--page is for networks of other tasks, such as detectors; for a classifier use isomorph analyze"
            )
        return False
    reject_classifier_options(classifiers)
    evaluate_task(task, model, name, options._replace(size=only_size(sizes)), runtime, json_)
    return True


def reject_classifier_options(given: Mapping[str, Any]) -> None:
    """Raise UserError for an option that is for image classifiers only, with a value."""
    for option, value in given.items():
        if value:
            raise UserError(f"--{option.replace('_', '-')} is for image classifiers; leave it out for this model")


def evaluate_task(
    task: Task, model: nn.Module, name: str, options: EvaluationOptions, runtime: Runtime, json_: bool
) -> None:
    """Print the metrics of a model's own task: a table of the first row, and one with a line for each further row."""
    rows = task.evaluate(model, options, runtime)
    if not runtime.is_main:
        return
    if json_:
        print_json({"model": name, "rows": rows})
        return
    print_table(metric_table(name, rows[0]))
    if rows[1:]:
        print_table(row_table(rows[1:]))
    if options.page:
        print(f"page: {options.page}")
