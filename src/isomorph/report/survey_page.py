"""The sections of the page of `isomorph survey`: what recasting each layer of a model costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from isomorph.report import guides
from isomorph.report.charts import Chart, Line, Matrix, Panel, Table, format_number
from isomorph.report.findings import count_noun
from isomorph.report.html import Details, Section
from isomorph.suites.survey import advice_lines, most_layers, softest_alone
from isomorph.suites.survey.advice import last_layers, loss_limit, loss_of

Result = Mapping[str, Any]


def survey_sections(result: Result) -> list[Section]:
    """Return the sections of a survey's page: the last layers together, each layer alone, costs, and the advice.

    >>> model = timm.create_model("cifar_resnet20")
    >>> digits = iso.data.open_source("digits", "test").subset(range(10))
    >>> loader = iso.data.eval_loader(digits, timm.data.resolve_data_config(model=model))
    >>> rules = [iso.ConvToGPSA(locality=5.0, gate=6.0)]
    >>> result = iso.survey(model, loader, rules, where="layer3.2.*", seconds=0)
    >>> [section.title for section in iso.report.survey_sections(result)]
    ['The last layers together', 'Each layer alone', 'Cost of each layer', 'What to recast']
    """
    return [_together(result), _alone(result), _costs(result), _advice(result)]


def survey_lead(result: Result) -> str:
    """Return the finding of the page in a sentence."""
    layers, labels = result["layers"], result["rules"]
    counts = most_layers(result["cells"], labels, result["loss"])
    best = max(reversed(labels), key=lambda label: counts[label])  # the softest of those that take the most layers
    start = "" if result["top1"] is None else f"The model has {result['top1']:.2f}% top-1 on "
    images = count_noun(result["images"], "image")
    images += f", with {result['shared']}" if "shared" in result else ""
    opening = f"{start}{images}. " if start else f"Measured on {images}. "
    if not counts[best]:
        return f"{opening}No layer can be recast at {labels[0]} without losing {_limit(result)}."
    softest = [label for label in labels if counts[label]][-1]
    hard, soft = (last_layers(counts[label]) for label in (best, softest))
    also = f", and {soft} at {softest}" if softest != best else ""
    return f"{opening}Of {len(layers)} layers, {hard} can be recast at {best} for at most {_limit(result)}{also}."


def _limit(result: Result) -> str:
    return loss_limit(result["loss"], result["top1"] is not None)


def _loss_label(result: Result) -> str:
    return "points of top-1 lost" if result["top1"] is not None else "predictions changed, %"


def _together(result: Result) -> Section:
    """Return the curves of recasting the last layers together."""
    lines: dict[str, Line] = {}
    deviations: dict[str, Line] = {}
    for label in result["rules"]:
        cells = [cell for cell in result["cells"] if cell["kind"] == "last" and cell["rule"] == label]
        counts = [float(len(cell["layers"])) for cell in cells]
        lines[label] = Line(counts, [loss_of(cell) for cell in cells])
        deviations[label] = Line(counts, [cell["deviation"] for cell in cells])
    charts: list[Chart] = [
        Panel("Loss", "number of last layers recast", _loss_label(result), lines, ordered=True),
        Panel("Change of the logits", "number of last layers recast", "deviation", deviations, ordered=True),
    ]
    return Section("The last layers together", charts=charts, guide=guides.SURVEY_TOGETHER)


def _alone(result: Result) -> Section:
    """Return the losses of recasting each layer alone, as a heat map of layers and rules."""
    cells = {(cell["layers"][0], cell["rule"]): cell for cell in result["cells"] if cell["kind"] == "alone"}
    layers, labels = [row["name"] for row in result["layers"]], result["rules"]
    words, columns = _short_labels(labels)
    values = [[loss_of(cells[layer, label]) for label in labels] for layer in layers]
    top = max((abs(value) for row in values for value in row), default=0.0) or 1.0
    changed = [[cells[layer, label]["changed"] for label in labels] for layer in layers]
    charts: list[Chart] = [
        Matrix(_loss_label(result).capitalize(), "layer", words, layers, columns, values, -top, top),
        Matrix("Predictions changed, %", "layer", words, layers, columns, changed, 0.0, max(map(max, changed)) or 1.0),
    ]
    if result["top1"] is None:
        charts = charts[1:]
    return Section("Each layer alone", charts=charts, guide=guides.SURVEY_ALONE)


def _short_labels(labels: Sequence[str]) -> tuple[str, list[str]]:
    """Return the words that all labels share, and the labels without them: "locality, gate" and "5, 6"."""
    split = [[part.rpartition(" ")[::2] for part in label.split(", ")] for label in labels]
    words = [tuple(word for word, _ in parts) for parts in split]
    if len(set(words)) > 1 or not all(words[0]):
        return "setting", list(labels)
    return ", ".join(words[0]), [", ".join(value for _, value in parts) for parts in split]


def cost_rows(result: Result) -> Table:
    """Return a table of MACs and relative time of every layer and form of it."""
    forms = list(dict.fromkeys(row["form"] for row in result["costs"] if row["form"]))
    found = {(row["layer"], row["form"]): row for row in result["costs"]}
    timed = any("time" in row for row in result["costs"])
    head = ["layer", "M MACs"]
    for form in forms:
        title = "recast" if len(forms) == 1 else form
        head += [f"M MACs, {title}"] + ([f"time, {title}"] if timed else [])
    rows = [head]
    for layer in (row["name"] for row in result["layers"]):
        cells = [layer, f"{found[layer, '']['macs'] / 1e6:.2f}"]
        for form in forms:
            row = found[layer, form]
            cells += [f"{row['macs'] / 1e6:.2f}"] + ([f"{row['time']:.1f}x"] if timed else [])
        rows.append(cells)
    return rows


def _costs(result: Result) -> Section:
    return Section("Cost of each layer", table=cost_rows(result), guide=guides.SURVEY_COST)


def alone_table(result: Result) -> Table:
    """Return a row for each layer: the softest setting that stays within the loss, and what it loses."""
    layers, labels = [row["name"] for row in result["layers"]], result["rules"]
    softest = softest_alone(result["cells"], layers, labels, result["loss"])
    cells = {(cell["layers"][0], cell["rule"]): cell for cell in result["cells"] if cell["kind"] == "alone"}
    rows = [["layer", f"softest setting within {_limit(result)}", _loss_label(result), "at the softest of all"]]
    for layer in layers:
        label = softest.get(layer)
        lost = _with_error(cells[layer, label]) if label else "-"
        rows.append([layer, label or "none", lost, _with_error(cells[layer, labels[-1]])])
    return rows


def _with_error(cell: Mapping[str, Any]) -> str:
    """Return the loss of a cell, with its standard error if it is known."""
    error = f" ± {cell['top1_error']:.2f}" if "top1_error" in cell else ""
    return f"{loss_of(cell):.2f}{error}"


def _advice(result: Result) -> Section:
    rejected = [f"{name}: {reason}" for name, reason in result["rejected"].items()]
    details = Details(f"{count_noun(len(rejected), 'layer')} that cannot be recast", rejected) if rejected else None
    text = ". ".join(line[0].upper() + line[1:] for line in advice_lines(result)) + "."
    return Section("What to recast", text, table=alone_table(result), details=details, guide=guides.SURVEY_ADVICE)


def summary_rows(result: Result) -> Table:
    """Return a table for the terminal: for each setting, how many of the last layers it takes, and what they lose."""
    counts = most_layers(result["cells"], result["rules"], result["loss"])
    layers = [row["name"] for row in result["layers"]]
    rows = [["setting", f"last layers within {_limit(result)}", "from", _loss_label(result), "all that were tried"]]
    for label, count in counts.items():
        cells = [cell for cell in result["cells"] if cell["kind"] == "last" and cell["rule"] == label]
        at = _with_error(cells[count - 1]) if count else "-"
        last = f"{len(cells[-1]['layers'])}: {format_number(loss_of(cells[-1]))}"
        rows.append([label, f"{count} of {len(layers)}", layers[-count] if count else "-", at, last])
    return rows
