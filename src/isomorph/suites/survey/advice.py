"""What a survey advises: which layers can be recast, and how soft, for a given loss."""

from collections.abc import Mapping, Sequence
from typing import Any

Cell = Mapping[str, Any]


def loss_of(cell: Cell) -> float:
    """Return the loss of a cell: points of top-1; without labels, images with another prediction (%)."""
    return cell.get("top1_loss", cell["changed"])


def softest_alone(cells: Sequence[Cell], layers: Sequence[str], labels: Sequence[str], loss: float) -> dict[str, str]:
    """Return, for each layer, the last rule up to which recasting this layer alone loses no more than `loss`.

    Layers that lose more under the first rule are left out.
    """
    found: dict[str, str] = {}
    alone = {(cell["layers"][0], cell["rule"]): loss_of(cell) for cell in cells if cell["kind"] == "alone"}
    for layer in layers:
        for label in labels:
            if (layer, label) not in alone:
                continue
            if alone[layer, label] > loss:
                break
            found[layer] = label
    return found


def most_layers(cells: Sequence[Cell], labels: Sequence[str], loss: float) -> dict[str, int]:
    """Return, for each rule, how many of the last layers can be recast together for no more than `loss`."""
    counts = dict.fromkeys(labels, 0)
    for label in labels:
        last = sorted(
            (len(cell["layers"]), loss_of(cell)) for cell in cells if cell["kind"] == "last" and cell["rule"] == label
        )
        for count, lost in last:
            if lost > loss:
                break
            counts[label] = count
    return counts


def advice_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the advice of a survey's result in sentences."""
    loss, layers, labels = result["loss"], [row["name"] for row in result["layers"]], result["rules"]
    limit = loss_limit(loss, result["top1"] is not None)
    lines = []
    for label, count in most_layers(result["cells"], labels, loss).items():
        names = layers[-count:] if count else []
        what = f"{last_layers(count)} ({_span(names)})" if count else "no layer"
        lines.append(f"{label}: {what} of {len(layers)} for at most {limit}")
    alone = softest_alone(result["cells"], layers, labels, loss)
    if stay := [layer for layer in layers if layer not in alone]:
        lines.append(f"even alone, and at {labels[0]}, these lose more: {', '.join(stay)}")
    return lines


def _span(names: Sequence[str]) -> str:
    """Return the first and last of several names."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def last_layers(count: int) -> str:
    """Return "the last layer" or "the last 3 layers"."""
    return "the last layer" if count == 1 else f"the last {count} layers"


def loss_limit(loss: float, labelled: bool) -> str:
    """Return a loss in words: "1 point of top-1"; without labels, "1% of the predictions"."""
    return f"{loss:g} point{'' if loss == 1 else 's'} of top-1" if labelled else f"{loss:g}% of the predictions"
