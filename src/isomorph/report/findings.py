"""Findings of a page: sentences with their numbers, computed from what the page shows."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from torch import Tensor

from isomorph.analysis import GatingHistory
from isomorph.report.attention_viewer import EQUAL_BOUNDS
from isomorph.report.charts import Dots, Matrix, format_number, layer_means
from isomorph.report.run_files import AccuracyPoint
from isomorph.terminal_tables import count_of

HeadValues = Mapping[str, Sequence[float]]
"""A number for each head: {layer: (heads,)}."""


def outputs_finding(names: Sequence[str], logits: Sequence[Tensor | None]) -> str:
    """Return how far the outputs of two models are apart; empty without classes in common. Shape: (B, classes)"""
    if len(names) != 2:
        return ""
    first, second = logits
    if first is None or second is None or first.shape != second.shape:
        return ""
    difference, largest = float((first - second).abs().max()), float(first.abs().max())
    images, same = count_of(len(first), "image"), int((first.argmax(1) == second.argmax(1)).sum())
    apart = f"at most {format_number(difference)} apart (largest output {format_number(largest)})"
    if not math.isfinite(difference):
        return f"The outputs of {names[1]} or {names[0]} are not finite on {images}."
    if difference == 0:
        return f"{names[1]} and {names[0]} compute the same outputs on {images}: difference 0."
    agree = f"the predicted class is the same on {same} of {len(first)}"
    return f"On {images}, the outputs of {names[1]} and {names[0]} are {apart}; {agree}."


def predictions_finding(name: str, images: Sequence[str], predictions: Sequence[str]) -> str:
    """Return what a model predicts for the first image; empty for a model without classes."""
    return f"{name} predicts {predictions[0]} for {images[0]}." if predictions and predictions[0] else ""


def maps_finding(names: Sequence[str], differences: Mapping[str, list[list[float]]]) -> str:
    """Return in how many heads the attention of two models differs; empty without comparable layers.

    `differences` are the largest ones of each layer by image and head, as `largest_differences` returns them.
    """
    heads = {
        (layer, head): max(image[head] for image in images)
        for layer, images in differences.items()
        for head in range(len(images[0]))
    }
    if not heads:
        return ""
    apart = [head for head, value in heads.items() if value > EQUAL_BOUNDS[-1]]
    if not apart:
        bound = next(bound for bound in EQUAL_BOUNDS if max(heads.values()) <= bound)
        within = f"{bound:.0e}".replace("e-0", "e-")
        return f"The attention maps of both models are equal within {within} in all {len(heads)} heads."
    layer, head = max(heads, key=heads.__getitem__)
    return (
        f"The attention maps of {names[1]} and {names[0]} differ in {len(apart)} of {len(heads)} heads, most in "
        f"{layer}, head {head + 1}: by {format_number(heads[layer, head])}."
    )


def distance_finding(series: Mapping[str, HeadValues]) -> str:
    """Return in which layers the attention of each model reaches furthest and least far, in grid steps."""
    sentences = []
    for name, layers in series.items():
        means = layer_means(layers)
        if not means:
            continue
        least, most = (choose(means, key=means.__getitem__) for choose in (min, max))
        if means[most] - means[least] < 0.01:
            sentences.append(f"The attention of {name} reaches {means[most]:.2f} grid steps on average in every layer.")
        else:
            furthest = f"reaches furthest in {most}, {means[most]:.2f} grid steps on average"
            sentences.append(f"The attention of {name} {furthest}, and least in {least}, {means[least]:.2f}.")
    return " ".join(sentences)


def gates_finding(chart: Dots) -> str:
    """Return the range and mean of the gates of each model."""
    sentences = []
    for name, layers in chart.series.items():
        values = [v for heads in layers.values() for v in heads if math.isfinite(v)]
        if values:
            low, high = (f"{value:.2f}" for value in (min(values), max(values)))
            spread = f"are all {low}" if low == high else f"are {low} to {high}, {fmean(values):.2f} on average"
            sentences.append(f"The {count_of(len(values), 'gate')} of {name} {spread}.")
    return " ".join(sentences)


def similarity_finding(chart: Matrix) -> str:
    """Return where two models differ most by CKA at layers of the same name, else their most similar layers."""
    cells = {
        (row, column): value
        for row, values in zip(chart.rows, chart.values, strict=True)
        for column, value in zip(chart.columns, values, strict=True)
        if math.isfinite(value)
    }
    own = {row: value for (row, column), value in cells.items() if row == column}
    if chart.row_label != chart.column_label and len(own) == len(chart.rows) == len(chart.columns):
        least = min(own, key=own.__getitem__)
        return (
            f"Of the layers with the same name, those of {chart.row_label} and {chart.column_label} are least similar "
            f"at {least}: CKA {own[least]:.3f}."
        )
    others = cells if chart.row_label != chart.column_label else {k: v for k, v in cells.items() if k[0] != k[1]}
    if not others:
        return ""
    (row, column), value = max(others.items(), key=lambda item: item[1])
    return f"The most similar layers are {row} and {column}: CKA {value:.3f}."


def evolution_finding(evolution: Mapping[str, Mapping[str, float]]) -> str:
    """Return F_k of each model at its last layer."""
    last = {name: list(layers.values())[-1] for name, layers in evolution.items() if layers}
    texts = (f"{format_number(value)} for {name}" for name, value in last.items())
    return f"At the last layer, F_k is {', '.join(texts)}." if last else ""


def robustness_finding(means: Mapping[str, Mapping[str, float]], metric: str = "top-1") -> str:
    """Return the mean of a metric of each model, and of two models the corruptions with the best and the worst change.

    `means` are the metric (%) by model and corruption, over cells that all models have.
    """
    means = {name: by_corruption for name, by_corruption in means.items() if by_corruption}
    if not means:
        return ""
    average = {name: fmean(by_corruption.values()) for name, by_corruption in means.items()}
    if len(means) != 2:
        name, by_corruption = next(iter(means.items()))
        worst = min(by_corruption, key=by_corruption.__getitem__)
        corrupted = f"{name} reaches {average[name]:.2f} % {metric} on corrupted images"
        return f"{corrupted}; its lowest is {by_corruption[worst]:.2f} %, under {worst}."
    (first, base), (second, new) = means.items()
    gains = {name: new[name] - base[name] for name in base if name in new}
    best, worst = (choose(gains, key=gains.__getitem__) for choose in (max, min))
    change = average[second] - average[first]
    verdict = (
        f"{abs(change):.2f} points {'above' if change > 0 else 'below'} {first}" if change else f"equal to {first}"
    )
    return (
        f"On corrupted images {second} reaches {average[second]:.2f} % {metric}, {verdict}: {gains[best]:+.2f} under "
        f"{best}, {gains[worst]:+.2f} under {worst}."
    )


def _percent_change(before: float, after: float) -> str:
    """Return a change in per cent: "+1.5 %", or "equal"."""
    return "equal" if before == after else f"{100 * (after / before - 1):+.3g} %"


def cost_finding(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return parameters and MACs of one model, or how much the second differs from the first."""
    first, last = rows[0], rows[-1]
    if len(rows) == 1 or not first["parameters"] or not first["macs"]:
        return (
            f"{first['model']} has {first['parameters']:,} parameters and {first['macs'] / 1e6:,.1f} M MACs per image."
        )
    parameters, macs = (_percent_change(first[key], last[key]) for key in ("parameters", "macs"))
    return f"{last['model']} compared with {first['model']}: parameters {parameters}, MACs {macs}."


def speed_finding(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the images per second of a model, or of two models their ratio, at the largest batch."""
    first, last = rows[0], rows[-1]
    if first["model"] == last["model"]:
        return f"{last['model']}: {last['images_per_second']:,.1f} images per second in batches of {last['batch']}."
    return f"{last['model']} runs at {last['ratio']:.2f} times the speed of {first['model']}."


def runs_finding(best: Mapping[str, float | None], metric: str = "top-1") -> str:
    """Return the best result of the runs, and its lead over the second."""
    known = sorted(((value, name) for name, value in best.items() if value is not None), reverse=True)
    if not known:
        return f"No run has measured its {metric}."
    value, name = known[0]
    missing = f" {count_of(len(best) - len(known), 'run')} without a {metric}." if len(known) < len(best) else ""
    reached = f"{name} reaches the best {metric}, {value:.2f} %"
    if len(known) == 1:
        return f"{name} reaches a {metric} of {value:.2f} %.{missing}"
    second, other = known[1]
    if value == second:
        equal = sum(top == value for top, _ in known)
        return f"{equal} of {len(known)} runs reach the best {metric}, {value:.2f} %.{missing}"
    return f"{reached}, {value - second:.2f} points above {other}.{missing}"


def gates_moved(gating: Mapping[str, GatingHistory]) -> str:
    """Return by how much the mean gate of each run has changed in the layer where it changed most."""
    sentences = []
    for run, history in gating.items():
        means = {
            layer: [v for v in gates.nanmean(1).tolist() if math.isfinite(v)] for layer, gates in history.gates.items()
        }
        ends = {layer: (values[0], values[-1]) for layer, values in means.items() if values}
        if not ends:
            continue
        layer = max(ends, key=lambda name: abs(ends[name][1] - ends[name][0]))
        first, last = ends[layer]
        overall = fmean(b for _, b in ends.values())
        if len(history.epochs) == 1:
            sentences.append(f"The gates of {run} are {overall:.2f} on average.")
        elif abs(last - first) < 0.005:
            sentences.append(f"The gates of {run} stay within 0.005 in every layer: {overall:.2f} on average.")
        else:
            sentences.append(f"The gates of {run} move most in {layer}: from {first:.2f} to {last:.2f} on average.")
    return " ".join(sentences)


def accuracy_cost_finding(points: Sequence[AccuracyPoint]) -> str:
    """Return the most accurate and the cheapest model; of several test sets, those of the first."""
    if not points:
        return ""
    same = [point for point in points if point.data == points[0].data]
    best, cheapest = max(same, key=lambda point: point.top1), min(same, key=lambda point: point.macs)
    if best.name == cheapest.name:
        return f"On {best.data}, {best.name} is both the most accurate, {best.top1:.2f} % top-1, and the cheapest."
    ratio = best.macs / cheapest.macs if cheapest.macs else math.inf
    return (
        f"On {best.data}, {best.name} is the most accurate, {best.top1:.2f} % top-1; {cheapest.name} is the cheapest: "
        f"{best.top1 - cheapest.top1:.2f} points less at 1/{ratio:.1f} of the MACs."
    )
