"""Tables of what models cost."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def _mebibytes(count: int | None) -> str:
    """Bytes as MiB; a dash where they could not be measured."""
    return "-" if count is None else f"{count / 2**20:,.1f}"


def size_of(row: Row) -> str:
    """Height and width of a row's images."""
    return f"{row['height']}x{row['width']}"


def fixed_cost_table(rows: Sequence[Row]) -> list[list[str]]:
    """Head and a row for each model and resolution of `cost_table`: what does not depend on the batch."""
    each = {(row["model"], size_of(row)): row for row in rows}
    body = (
        [name, size, f"{row['parameters']:,}", f"{row['macs'] / 1e6:,.1f}", _mebibytes(row["saved_bytes"])]
        for (name, size), row in each.items()
    )
    return [["one image", "size", "parameters", "M MACs", "saved MiB"], *body]


def pass_cost_table(rows: Sequence[Row]) -> list[list[str]]:
    """Head and a row for each model and resolution whose passes cost more than their images; empty where none does.

    Of inference, of training in closed form, and of training branch by branch.
    """
    each = {(row["model"], size_of(row)): row for row in rows if row["step_macs"] or "branch_macs" in row}
    keys = ("macs", "step_macs", "training_macs", "training_step_macs", "branch_macs")
    body = [[*name, *(f"{row[key] / 1e6:,.1f}" if key in row else "-" for key in keys)] for name, row in each.items()]
    head = ["a pass, M MACs", "size", "an image", "a step", "training: an image", "a step", "by branches: an image"]
    return [head, *body] if body else []


def cost_problems(rows: Sequence[Row]) -> list[str]:
    """Why peaks could not be measured, each reason once."""
    return list(dict.fromkeys(f"{row['model']}: {row['problem']}" for row in rows if "problem" in row))


def batch_cost_table(rows: Sequence[Row]) -> list[list[str]]:
    """Head and a row for each row of `cost_table`: peak memory, images a second with quartiles, their ratio."""
    body = (
        [
            row["model"],
            f"{row['batch']} x {size_of(row)}",
            _mebibytes(row["peak_bytes"]),
            _mebibytes(row["training_peak_bytes"]),
            f"{row['images_per_second']:,.1f}",
            f"{row['low']:,.1f}-{row['high']:,.1f}",
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    )
    return [["a batch", "of", "peak MiB", "to train", "images/s", "quartiles", "ratio"], *body]
