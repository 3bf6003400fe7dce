"""What `isomorph evaluate` does with a model that was trained for another task than image classification."""

import json
from typing import Any

from torch import nn

from isomorph.distributed import Runtime
from isomorph.errors import UserError
from isomorph.terminal_tables import METRIC_FORMATS, metric_table, print_table
from isomorph.training.task import EvaluationOptions, Task, task_of


def evaluate_own_task(
    model: nn.Module, name: str, options: EvaluationOptions, runtime: Runtime, json_: bool, classifiers: dict[str, Any]
) -> bool:
    """Print the metrics of a model of another task than image classification; return False for a classifier.

    `classifiers` are the values of the options for image classifiers.

    Raises: UserError for an option of the other kind of model.
    """
    task = task_of(model)
    if task is None:
        if options.page:
            raise UserError(
                "--page is for networks of other tasks, such as detectors; for a classifier use isomorph analyze"
            )
        return False
    for option, value in classifiers.items():
        if value:
            raise UserError(f"--{option.replace('_', '-')} is for image classifiers; leave it out for this model")
    evaluate_task(task, model, name, options, runtime, json_)
    return True


def evaluate_task(
    task: Task, model: nn.Module, name: str, options: EvaluationOptions, runtime: Runtime, json_: bool
) -> None:
    """Print the metrics of a model's own task: a table of the first row, and one with a line for each further row."""
    rows = task.evaluate(model, options, runtime)
    if not runtime.is_main:
        return
    if json_:
        print(json.dumps({"model": name, "rows": rows}))
        return
    print_table(metric_table(name, rows[0]))
    if rows[1:]:
        print_table(_row_table(rows[1:]))
    if options.page:
        print(f"page: {options.page}")


def _row_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return a table of rows that have the same keys; the first, without a format, names the row."""
    names = list(rows[0])
    heads = [METRIC_FORMATS[name][0] if name in METRIC_FORMATS else name for name in names]
    return [heads, *([_cell(name, row[name]) for name in names] for row in rows)]


def _cell(name: str, value: Any) -> str:
    """Return a value with its metric's format; a dash for none."""
    if value is None:
        return "-"
    return METRIC_FORMATS[name][1](value) if name in METRIC_FORMATS else str(value)
