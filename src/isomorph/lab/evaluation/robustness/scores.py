"""Scores of a robustness evaluation: means over cells, mCE, and the gain over a baseline."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from statistics import mean
from typing import Any

from isomorph.json_values import JsonObject
from isomorph.lab.data.corruptions.corrupt import (
    CORRUPTION_CATEGORIES,
    EXTRA_CORRUPTIONS,
    IMAGENET_C_CORRUPTIONS,
    SEVERITIES,
)
from isomorph.terminal_tables import Table, interval_text

Cell = Mapping[str, Any]
Cells = Mapping[tuple[str, int], Cell]
# Top-1 (%) by corruption and severity.
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

_CATEGORIES = {**CORRUPTION_CATEGORIES, "extra": EXTRA_CORRUPTIONS}


def robustness_summary(cells: Cells, clean: Cell | None, imagenet: bool) -> JsonObject:
    """Return top-1 by corruption, category and severity, and mCE and relative mCE if they are defined.

    Means by severity and over all use the 15 corruptions of the suite; the extra ones are a separate category.
    mCE = mean over corruptions of (sum over severities of error / the same of AlexNet): for 1000 classes at 224 px
    (`imagenet`) and all 75 cells. Relative mCE subtracts each net's clean error from both.

    Source: Hendrycks and Dietterich 2019, section 4.1
    """
    values = {key: cell["top1"] for key, cell in cells.items()}
    by_corruption = means_by_corruption(values)
    summary: JsonObject = {
        "by_corruption": by_corruption,
        "by_category": _group_means(by_corruption, _CATEGORIES),
        "by_severity": means_by_severity(values),
    }
    errors = {}
    for name, value in by_corruption.items():
        if name in IMAGENET_C_CORRUPTIONS:
            errors[name] = 100 - value
    if not errors:
        return summary
    mean_error = mean(errors.values())
    summary["mean_top1"] = 100 - mean_error
    summary["mean_error_unnormalised"] = mean_error
    if imagenet and cells.keys() >= set(product(IMAGENET_C_CORRUPTIONS, SEVERITIES)):
        summary |= _compared_with_alexnet(errors, clean)
    return summary


def _compared_with_alexnet(errors: Mapping[str, float], clean: Cell | None) -> JsonObject:
    ce = {name: 100 * errors[name] / ALEXNET[name] for name in IMAGENET_C_CORRUPTIONS}
    scores: JsonObject = {"ce": ce, "mce": mean(ce.values())}
    if clean is None:
        return scores
    clean_error = 100 - clean["top1"]
    relative = []
    for name in IMAGENET_C_CORRUPTIONS:
        rise = errors[name] - clean_error
        rise_of_alexnet = ALEXNET[name] - ALEXNET_CLEAN
        relative.append(100 * rise / rise_of_alexnet)
    scores["relative_mce"] = mean(relative)
    return scores


def means_by_corruption(values: CellValues) -> dict[str, float]:
    """Return the mean over severities of each corruption, in the suite's order."""
    means = _means((name, value) for (name, _), value in values.items())
    order = (*IMAGENET_C_CORRUPTIONS, *EXTRA_CORRUPTIONS)
    return {name: means[name] for name in order if name in means}


def _means(values: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Return the mean of the values of each key."""
    values_of = defaultdict(list)
    for key, value in values:
        values_of[key].append(value)
    return {key: mean(own) for key, own in values_of.items()}


def _group_means(
    by_corruption: Mapping[str, float], groups: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Return the mean over the corruptions of each group that has any."""
    values = []
    for group, names in groups.items():
        values += [(group, by_corruption[name]) for name in names if name in by_corruption]
    return _means(values)


def means_by_severity(values: CellValues) -> dict[int, float]:
    """Return the mean over the suite's corruptions by severity (over the extra ones if there are no others)."""
    chosen = [key for key in values if key[0] in IMAGENET_C_CORRUPTIONS] or values
    means = _means((severity, values[name, severity]) for name, severity in chosen)
    return dict(sorted(means.items()))


def compare_to_baseline(cells: Cells, base: Cells, name: str) -> JsonObject:
    """Return the gain over a baseline on common cells, in points and in per cent of the baseline's.

    `error_ratio` is the mCE with the baseline instead of AlexNet: mean over corruptions of error / its error (%).

    Source: T-CNN Fig. 3 (relative improvement by category and by severity)
    """
    common = [key for key in cells if key in base]
    our_scores = robustness_summary({key: cells[key] for key in common}, clean=None, imagenet=False)
    their_scores = robustness_summary(
        {key: base[key] for key in common}, clean=None, imagenet=False
    )
    gain: JsonObject = {"model": name, "cells": len(common)}
    for view in ("by_corruption", "by_category", "by_severity"):
        theirs = their_scores[view]
        gain[view] = {key: _gain(value, theirs[key]) for key, value in our_scores[view].items()}
    ratios = []
    for corruption, value in our_scores["by_corruption"].items():
        baseline = their_scores["by_corruption"][corruption]
        if corruption in IMAGENET_C_CORRUPTIONS and baseline < 100:
            ratios.append((100 - value) / (100 - baseline))
    if ratios:
        gain["points"] = our_scores["mean_top1"] - their_scores["mean_top1"]
        gain["error_ratio"] = 100 * mean(ratios)
    return gain


def _gain(value: float, baseline: float) -> dict[str, float | None]:
    points = value - baseline
    relative = 100 * points / baseline if baseline else None
    return {"points": points, "relative": relative}


def severity_table(result: JsonObject) -> Table:
    """Return a table of top-1 by severity with a row for each corruption, each category and their mean."""
    severities = list(result["by_severity"])
    cells = {(cell["corruption"], cell["severity"]): cell["top1"] for cell in result["cells"]}
    gain = result.get("against", {})
    ce = result.get("ce", {})
    head = [f"{result['model']}: top-1 (%)", *map(str, severities), "mean"]
    if ce:
        head.append("CE (%)")
    if gain:
        head.append("gain")
    rows = [head]

    def add(
        name: str,
        means: Iterable[float | None],
        average: float | None,
        error: float | None,
        points: float | None,
    ) -> None:
        row = [name, *(_text(value, ".1f") for value in means), _text(average, ".2f")]
        if ce:
            row.append(_text(error, ".1f"))
        if gain:
            row.append(_text(points, "+.2f"))
        rows.append(row)

    for view in ("by_corruption", "by_category"):
        gains = gain.get(view, {})
        for name, value in result[view].items():
            members = (name,) if view == "by_corruption" else _CATEGORIES[name]
            means = [_mean_of_cells(cells, members, severity) for severity in severities]
            points = gains[name]["points"] if name in gains else None
            add(name, means, value, ce.get(name), points)
    count = sum(name in IMAGENET_C_CORRUPTIONS for name in result["by_corruption"])
    if count:
        name = "all of the suite"
        if count < len(IMAGENET_C_CORRUPTIONS):
            name = f"{count} of the suite's {len(IMAGENET_C_CORRUPTIONS)}"
        means = result["by_severity"].values()
        add(name, means, result.get("mean_top1"), result.get("mce"), gain.get("points"))
    return rows


def _mean_of_cells(cells: CellValues, names: Sequence[str], severity: int) -> float | None:
    values = [cells[name, severity] for name in names if (name, severity) in cells]
    if not values:
        return None
    return mean(values)


def _text(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return format(value, form)


def summary_lines(result: JsonObject) -> Iterator[str]:
    """Yield the lines to print below the table."""
    yield f"{result['pictures']}; {result['constants']}; {result['images']:,} images, seed {result['seed']}"
    yield f"95% interval of every top-1: at most {98 / result['images'] ** 0.5:.1f} points to either side"
    if result.get("resumed"):
        yield f"{result['resumed']} cells were read from its file"
    if result["clean"]:
        clean = result["clean"]["top1"]
        interval = interval_text(clean, result["clean"]["images"])
        yield f"clean top-1 {clean:.2f} % (95% interval {interval})"
    if "relative_mce" in result:
        yield (
            f"mCE {result['mce']:.1f} %, relative mCE {result['relative_mce']:.1f} % "
            "(100 is AlexNet)"
        )
    elif "mce" in result:
        yield f"mCE {result['mce']:.1f} % (100 is AlexNet)"
    elif "mean_error_unnormalised" in result:
        yield f"mean corruption error, unnormalised: {result['mean_error_unnormalised']:.2f} %"
    gain = result.get("against", {})
    if "error_ratio" in gain:
        yield (
            f"compared with {gain['model']}: top-1 {gain['points']:+.2f} points, mean over "
            f"corruptions of the errors' ratio {gain['error_ratio']:.1f} %"
        )
