"""Cost tables as text cells for a report, made from the rows of `iso.cost_table`."""

from collections.abc import Mapping, Sequence
from typing import Any

CostRow = Mapping[str, Any]
"""A row of `iso.cost_table`."""


def _mebibytes(count: int | None) -> str:
    """Return a number of bytes as text in MiB, or "-" if it could not be measured."""
    return "-" if count is None else f"{count / 2**20:,.1f}"


def _image_size(row: CostRow) -> str:
    return f"{row['height']}x{row['width']}"


def fixed_cost_table(rows: Sequence[CostRow]) -> list[list[str]]:
    """Return a table with a row for each model and image size: the costs that do not depend on the batch size."""
    by_size = {(row["model"], _image_size(row)): row for row in rows}
    body = (
        [name, size, f"{row['parameters']:,}", f"{row['macs'] / 1e6:,.1f}", _mebibytes(row["saved_bytes"])]
        for (name, size), row in by_size.items()
    )
    return [["one image", "size", "parameters", "M MACs", "saved MiB"], *body]


def pass_cost_table(rows: Sequence[CostRow]) -> list[list[str]]:
    """Return a table of the MACs of a forward pass: in inference, and in training in closed form and branch by branch.

    It has a row for each image size of a model that has pyramids, or whose pass has a fixed cost in addition to the
    cost per image. Without such a model, the table is empty.
    """
    by_size = {(row["model"], _image_size(row)): row for row in rows if row["step_macs"] or "branch_macs" in row}
    keys = ("macs", "step_macs", "training_macs", "training_step_macs", "branch_macs")
    body = [
        [*name, *(f"{row[key] / 1e6:,.1f}" if key in row else "-" for key in keys)] for name, row in by_size.items()
    ]
    header = [
        "M MACs",
        "size",
        "per image",
        "per pass",
        "training: per image",
        "training: per pass",
        "branch by branch: per image",
    ]
    return [header, *body] if body else []


def cost_problems(rows: Sequence[CostRow]) -> list[str]:
    """Return the reasons why peak memory could not be measured, each once."""
    return list(dict.fromkeys(f"{row['model']}: {row['problem']}" for row in rows if "problem" in row))


def batch_cost_table(rows: Sequence[CostRow]) -> list[list[str]]:
    """Return a table with a row for each cost row: peak memory, images per second, quartiles, ratio."""
    body = (
        [
            row["model"],
            f"{row['batch']} x {_image_size(row)}",
            _mebibytes(row["peak_bytes"]),
            _mebibytes(row["training_peak_bytes"]),
            f"{row['images_per_second']:,.1f}",
            f"{row['low']:,.1f}-{row['high']:,.1f}",
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    )
    return [["one batch", "size", "peak MiB", "peak MiB, training", "images/s", "quartiles", "ratio"], *body]
