"""Results of `isomorph evaluate --json` and `isomorph robustness --json`, as columns of published tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isomorph.errors import UserError
from isomorph.json_values import JsonObject, is_number, read_object
from isomorph.lab.evaluation.suites import SUITES
from isomorph.terminal_tables import RANDOM_WEIGHTS

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
    size: tuple[int, int] | None = None
    """Height and width of the test images; None if not known, and for ImageNet-C, which is tested at 224."""
    is_own_size: bool = True
    """The size is the model's own."""
    rfc: float | None = None
    differs: str = ""
    """What of the evaluation is not a published one, in words; empty if nothing is."""

    @property
    def title(self) -> str:
        """The file's name, and the size if one was given."""
        if self.size is None or self.is_own_size:
            return self.name
        return f"{self.name} at {_size_text(self.size)}"


def read_evaluations(files: Sequence[Path]) -> list[Evaluation]:
    """Read the files that the commands' output was written to; files without a number for a column give nothing.

    Raises: UserError for a file that cannot be read.
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
    model = result["model"].removesuffix(RANDOM_WEIGHTS)
    if model != result["model"] or result.get("weights") == "random":
        rows = [row | {"differs": "random weights"} for row in rows]
    return [Evaluation(path.stem, model, **row) for row in rows]


def _size_text(size: Sequence[int]) -> str:
    """Return 224 for a square, 224x320 for other sizes."""
    return "x".join(map(str, dict.fromkeys(size)))


def _suite_rows(result: JsonObject) -> Iterator[JsonObject]:
    """Yield what was measured at each size and calibration ratio, of all suites together."""
    points: dict[Any, JsonObject] = {}
    for row in result.get("rows", ()):
        column = SUITE_COLUMNS.get(row.get("suite"))
        if column is None or not is_number(row.get("top1")):
            continue
        given = row.get("size") or result.get("input_size")
        size = tuple(given) if given else None
        own_size = not row.get("size") or row["size"] == result.get("input_size")
        rfc = row.get("rfc")
        if rfc:
            if column != "top1":  # the papers calibrate on ImageNet alone
                continue
            column = "rfc_top1"
        empty = {"measured": {}, "size": size, "is_own_size": own_size, "rfc": rfc, "differs": ""}
        point = points.setdefault((size, rfc), empty)
        point["measured"][column] = float(row["top1"])
        images = SUITES[row["suite"]].scored_images
        if row.get("images", images) < images:
            point["differs"] = f"{row['images']:,} of {images:,} images of {row['suite']}"
        if row.get("rfc_fill", "black") != "black":  # the padding of Refiner's Table 5
            padding = f"padded with {row['rfc_fill']}"
            point["differs"] = ", ".join(filter(None, (point["differs"], padding)))
    yield from points.values()


def _robustness_rows(result: JsonObject) -> Iterator[JsonObject]:
    if result.get("suite") != "imagenet-c" or not is_number(result.get("mean_top1")):
        return
    differs = ""
    images = result.get("images", 0)
    size = result.get("size") or [224, 224]
    if size != [224, 224]:
        differs = f"at {_size_text(size)}"
    elif "mce" not in result or images < SUITES["imagenet"].images:
        differs = f"{len(result['cells'])} cells of {images:,} images"
    yield {"measured": {"imagenet_c": float(result["mean_top1"])}, "differs": differs}
