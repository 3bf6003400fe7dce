"""Results of `isomorph evaluate --json` and `isomorph robustness --json`, as columns of published tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isomorph.errors import UserError
from isomorph.json_values import JsonObject, is_number, read_object
from isomorph.lab.evaluation.suites import SUITES

# What follows the name of a model whose weights are random.
RANDOM = " (random weights)"
# Columns of published tables that a test suite fills.
SUITE_COLUMNS = {
    "imagenet": "top1",
    "real": "real_top1",
    "imagenet-c": "imagenet_c",
    "imagenet-a": "imagenet_a",
    "imagenet-r": "imagenet_r",
    "imagenet-sketch": "imagenet_s",
    "imagenet-v2": "v2_f",
    "imagenet-v2-matched-frequency": "v2_f",
    "imagenet-v2-threshold-0.7": "v2_thr",
    "imagenet-v2-top-images": "v2_top",
}


@dataclass(frozen=True)
class Evaluation:
    """What a file has of one model, at one size and crop: a number for each column."""

    name: str
    """The file's name, without ending."""
    model: str
    """The model as it was given to the command."""
    measured: Mapping[str, float]
    size: int | None = None
    """Side of the test images, None for the model's own."""
    rfc: float | None = None
    differs: str = ""
    """What of the evaluation is not a published one, in words; empty if nothing is."""

    @property
    def title(self) -> str:
        """The file's name, and the size if one was given."""
        if self.size:
            return f"{self.name} at {self.size}"
        return self.name


def read_evaluations(files: Sequence[Path]) -> list[Evaluation]:
    """Read the files that the commands' output was written to.

    Raises: UserError for a file that cannot be read, or has no number for a column.
    """
    evaluations = []
    for path in files:
        evaluations += _read_file(path)
    return evaluations


def _read_file(path: Path) -> list[Evaluation]:
    result = read_object(path)
    if result is None or not isinstance(result.get("model"), str):
        raise UserError(
            f"{path} is not a result; write one with isomorph evaluate MODEL --suite imagenet --json"
        )
    rows_of = _robustness_rows if "cells" in result else _suite_rows
    rows = list(rows_of(result))
    if not rows:
        raise UserError(
            f"{path} has no result of a test suite; write it with isomorph evaluate {result['model']} --suite imagenet "
            "--json"
        )
    model = result["model"].removesuffix(RANDOM)
    if model != result["model"] or result.get("weights") == "random":
        rows = [row | {"differs": "random weights"} for row in rows]
    return [Evaluation(path.stem, model, **row) for row in rows]


def _suite_rows(result: JsonObject) -> Iterator[JsonObject]:
    """Yield what was measured at each size and calibration ratio, of all suites together."""
    points: dict[Any, JsonObject] = {}
    for row in result.get("rows", ()):
        column = SUITE_COLUMNS.get(row.get("suite"))
        if column is None or not is_number(row.get("top1")):
            continue
        size = row["size"][0] if row.get("size") else None
        rfc = row.get("rfc")
        if rfc:
            if column != "top1":  # the papers calibrate on ImageNet alone
                continue
            column = "rfc_top1"
        empty = {"measured": {}, "size": size, "rfc": rfc, "differs": ""}
        point = points.setdefault((size, rfc), empty)
        point["measured"][column] = float(row["top1"])
        images = SUITES[row["suite"]].scored_images
        if row.get("images", images) < images:
            point["differs"] = f"{row['images']:,} of {images:,} images of {row['suite']}"
    yield from points.values()


def _robustness_rows(result: JsonObject) -> Iterator[JsonObject]:
    if result.get("suite") != "imagenet-c" or not is_number(result.get("mean_top1")):
        return
    differs = ""
    if "mce" not in result:
        differs = f"{len(result['cells'])} cells of {result.get('images')} images"
    yield {"measured": {"imagenet_c": float(result["mean_top1"])}, "differs": differs}
