"""Scores of a robustness evaluation: means over cells, mCE, and the gain over a baseline."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from isomorph.lab.data.corruptions.corrupt import (
    CORRUPTION_CATEGORIES,
    EXTRA_CORRUPTIONS,
    IMAGENET_C_CORRUPTIONS,
    SEVERITIES,
)
from isomorph.terminal_tables import interval_text

Cell = Mapping[str, Any]
Cells = Mapping[tuple[str, int], Cell]
CellValues = Mapping[tuple[str, int], float]

# Top-1 error (%), mean over severities. Source: github hendrycks/robustness, issues 10 (by severity) and 38 (net).
ALEXNET = {
    "gaussian_noise": 88.6428,
    "shot_noise": 89.4468,
    "impulse_noise": 92.2640,
    "defocus_blur": 81.9880,
    "glass_blur": 82.6268,
    "motion_blur": 78.5948,
    "zoom_blur": 79.8360,
    "snow": 86.6816,
    "frost": 82.6572,
    "fog": 81.9324,
    "brightness": 56.4592,
    "contrast": 85.3204,
    "elastic_transform": 64.6056,
    "pixelate": 71.7840,
    "jpeg_compression": 60.6500,
}
ALEXNET_CLEAN = 43.478  # top-1 error (%) on ImageNet: torchvision's AlexNet_Weights.IMAGENET1K_V1; the paper has 43.5


def robustness_summary(cells: Cells, clean: Cell | None, imagenet: bool) -> dict[str, Any]:
    """Return top-1 by corruption, category and severity, and mCE and relative mCE if they are defined.

    Means by severity and over all use the 15 corruptions of the suite; the extra ones are a separate category.
    mCE = mean over corruptions of (sum over severities of error / the same of AlexNet): for 1000 classes at 224 px
    (`imagenet`) and all 75 cells. Relative mCE subtracts each net's clean error from both.

    Source: Hendrycks and Dietterich 2019, section 4.1
    """
    values = {key: cell["top1"] for key, cell in cells.items()}
    by_corruption = _group_means(values, {name: (name,) for name in (*IMAGENET_C_CORRUPTIONS, *EXTRA_CORRUPTIONS)})
    errors = {name: 100 - value for name, value in by_corruption.items() if name in IMAGENET_C_CORRUPTIONS}
    found: dict[str, Any] = {
        "by_corruption": by_corruption,
        "by_category": _group_means(values, {**CORRUPTION_CATEGORIES, "extra": EXTRA_CORRUPTIONS}),
        "by_severity": _severity_means(values),
    }
    if errors:
        found |= {
            "mean_top1": 100 - mean(errors.values()),
            "mean_error_unnormalised": mean(errors.values()),
        }
    if imagenet and all((name, severity) in cells for name in IMAGENET_C_CORRUPTIONS for severity in SEVERITIES):
        found["ce"] = {name: 100 * errors[name] / ALEXNET[name] for name in IMAGENET_C_CORRUPTIONS}
        found["mce"] = mean(found["ce"].values())
        if clean is not None:
            worse = {name: errors[name] - (100 - clean["top1"]) for name in IMAGENET_C_CORRUPTIONS}
            found["relative_mce"] = mean(
                100 * worse[name] / (ALEXNET[name] - ALEXNET_CLEAN) for name in IMAGENET_C_CORRUPTIONS
            )
    return found


def _group_means(values: CellValues, groups: Mapping[str, Sequence[str]]) -> dict[str, float]:
    group_means = {}
    for group, names in groups.items():
        rows = [[value for (name, _), value in values.items() if name == member] for member in names]
        if any(rows):
            group_means[group] = mean(mean(row) for row in rows if row)
    return group_means


def _severity_means(values: CellValues) -> dict[int, float]:
    """Return the mean over the suite's corruptions by severity (over the extra ones if there are no others)."""
    chosen = [key for key in values if key[0] in IMAGENET_C_CORRUPTIONS] or list(values)
    return {
        severity: mean(values[key] for key in chosen if key[1] == severity)
        for severity in sorted({severity for _, severity in chosen})
    }


def compare_to_baseline(cells: Cells, base: Cells, name: str) -> dict[str, Any]:
    """Return the gain over a baseline on common cells, in points and in per cent of the baseline's.

    `error_ratio` is the mCE with the baseline instead of AlexNet: mean over corruptions of error / its error (%).

    Source: T-CNN Fig. 3 (relative improvement by category and by severity)
    """
    common = [key for key in cells if key in base]
    our_scores, their_scores = (
        robustness_summary({key: own[key] for key in common}, None, False) for own in (cells, base)
    )
    gain: dict[str, Any] = {"model": name, "cells": len(common)}
    for view in ("by_corruption", "by_category", "by_severity"):
        pairs = {key: (our_scores[view][key], their_scores[view][key]) for key in our_scores[view]}
        gain[view] = {
            key: {"points": a - b, "relative": 100 * (a - b) / b if b else None} for key, (a, b) in pairs.items()
        }
    ratios = [
        (100 - value) / (100 - their_scores["by_corruption"][key])
        for key, value in our_scores["by_corruption"].items()
        if key in IMAGENET_C_CORRUPTIONS and their_scores["by_corruption"][key] < 100
    ]
    if ratios:
        gain["points"] = our_scores["mean_top1"] - their_scores["mean_top1"]
        gain["error_ratio"] = 100 * mean(ratios)
    return gain


def severity_table(result: Mapping[str, Any]) -> list[list[str]]:
    """Return a table of top-1 by severity with a row for each corruption, each category and their mean."""
    severities = list(result["by_severity"])
    cells = {(cell["corruption"], cell["severity"]): cell["top1"] for cell in result["cells"]}
    gain = result.get("against", {})
    ce = result.get("ce", {})
    groups = {name: (name,) for name in result["by_corruption"]} | CORRUPTION_CATEGORIES | {"extra": EXTRA_CORRUPTIONS}
    optional = ["CE (%)"] * bool(ce) + ["gain"] * bool(gain)
    rows = [[f"{result['model']}: top-1 (%)", *map(str, severities), "mean", *optional]]

    def add(
        name: str,
        means: Iterable[float | None],
        average: float | None,
        error: float | None,
        points: Any,
    ) -> None:
        more = [_text(error, ".1f")] * bool(ce) + [_text(points, "+.2f")] * bool(gain)
        rows.append([name, *(_text(value, ".1f") for value in means), _text(average, ".2f"), *more])

    for view in ("by_corruption", "by_category"):
        for name, value in result[view].items():
            parts = [[cells[m, s] for m in groups[name] if (m, s) in cells] for s in severities]
            points = gain.get(view, {}).get(name, {}).get("points")
            add(name, (mean(part) if part else None for part in parts), value, ce.get(name), points)
    count = sum(name in IMAGENET_C_CORRUPTIONS for name in result["by_corruption"])
    if count:
        whole = len(IMAGENET_C_CORRUPTIONS)
        name = "all of the suite" if count == whole else f"{count} of the suite's {whole}"
        average = result.get("mean_top1")
        error = result.get("mce")
        add(name, result["by_severity"].values(), average, error, gain.get("points"))
    return rows


def _text(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return format(value, form)


def summary_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the lines to print below the table."""
    lines = [f"{result['pictures']}; {result['constants']}; {result['images']:,} images, seed {result['seed']}"]
    lines.append(f"95% interval of every top-1: at most {98 / result['images'] ** 0.5:.1f} points to either side")
    if result.get("resumed"):
        lines.append(f"{result['resumed']} cells were read from --out")
    if result["clean"]:
        clean = result["clean"]["top1"]
        lines.append(f"clean top-1 {clean:.2f} % (95% interval {interval_text(clean, result['images'])})")
    if "mce" in result:
        if "relative_mce" in result:
            relative = f", relative mCE {result['relative_mce']:.1f} %"
        else:
            relative = ""
        lines.append(f"mCE {result['mce']:.1f} %{relative} (100 is AlexNet)")
    elif "mean_error_unnormalised" in result:
        lines.append(f"mean corruption error, unnormalised: {result['mean_error_unnormalised']:.2f} %")
    if "error_ratio" in (gain := result.get("against", {})):
        ratio = f"mean over corruptions of the errors' ratio {gain['error_ratio']:.1f} %"
        lines.append(f"compared with {gain['model']}: top-1 {gain['points']:+.2f} points, {ratio}")
    return lines
