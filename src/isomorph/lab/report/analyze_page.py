"""The sections of the page of `isomorph analyze`: one model, or two side by side."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.analysis import (
    attention_spans,
    branch_similarity,
    gammas,
    gates,
    logit_stats,
    prefix_attention,
)
from isomorph.analysis.batches import batches
from isomorph.analysis.cka import cka_of_pairs, pool_features
from isomorph.analysis.cost import count_once, count_parameters, static_cost
from isomorph.analysis.evolution import DRAW_SIZE, NUM_DRAWS
from isomorph.errors import UserError
from isomorph.json_values import JsonObject
from isomorph.lab.report import guides
from isomorph.lab.report.attention_viewer import (
    EQUAL_BOUNDS,
    MAX_MAP_CHARACTERS,
    Viewer,
    ViewerModel,
    build_viewer,
    capture_layer_maps,
)
from isomorph.lab.report.charts import Chart, Dots, Line, Matrix, Panel, format_number
from isomorph.lab.report.html import Details, ImageCard, Section
from isomorph.lab.report.page_images import PageImage, normalise_images
from isomorph.lab.report.page_models import (
    MEASURES,
    HeadMeasure,
    PageModel,
    framing_text,
    model_history,
    model_logits,
    name_classes,
    register_count,
)
from isomorph.layers.pyramid.base import Pyramid
from isomorph.surgery.calls import Inputs, to_model
from isomorph.surgery.site import Where
from isomorph.terminal_tables import Table, count_of

# How the summary of layers without a map ends.
NOT_DRAWN = "not drawn"
# Smaller differences of gates, spans, distances, entropies and logits are not drawn.
RESOLUTION = 1e-3
# Keys of the MACs in a row of `iso.cost_table`, and the heads of their columns.
PASS_COSTS = {
    "macs": "per image",
    "step_macs": "per pass",
    "training_macs": "training: per image",
    "training_step_macs": "training: per pass",
    "branch_macs": "branch by branch: per image",
}
# A row of `iso.cost_table`.
CostRow = Mapping[str, Any]
# F_k of every layer by model, as `iso.analysis.feature_evolution` returns it for each.
Evolution = Mapping[str, Mapping[str, float]]


def _largest_logits(*arguments: Any) -> dict[str, Tensor]:
    return {layer: stats.max_logit for layer, stats in logit_stats(*arguments).items()}


def _largest_attention(*arguments: Any) -> dict[str, Tensor]:
    return {layer: stats.max_attention for layer, stats in logit_stats(*arguments).items()}


def _branch_similarities(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Return the similarity of every two branches of each pyramid, but for the skip. Shape: -> {name: (pairs,)}"""
    similarities = {}
    for name, matrix in branch_similarity(model, batch).items():
        layer = model.get_submodule(name)
        parts = getattr(layer, "pyramids", [layer])
        pyramids = [part for part in parts if isinstance(part, Pyramid)]
        matrices = matrix if matrix.ndim == 3 else matrix[None]
        values = []
        for pyramid, own in zip(pyramids, matrices, strict=True):
            count = len(pyramid.branches)
            first, second = torch.triu_indices(count, count, offset=1)
            values += own[first, second].tolist()
        if values:
            similarities[name] = torch.tensor(values)
    return similarities


GATING = (
    HeadMeasure("Gates", "sigma(gate)", gates, 1.0),
    HeadMeasure("Spans", "1 / locality, grid steps", attention_spans),
)
GAMMAS = HeadMeasure("Gammas", "weight of the inserted block, by channel", gammas, each="channel")
PREFIX = HeadMeasure("Attention to class token and registers", "share", prefix_attention, 1.0)
LARGEST = (
    HeadMeasure("Largest attention logit", "logit", _largest_logits),
    HeadMeasure("Largest attention", "share", _largest_attention, 1.0),
)
STATISTICS = (*MEASURES.values(), PREFIX, *LARGEST)
BRANCHES = HeadMeasure(
    "Similarity of pyramid branches",
    "linear CKA of two branches",
    _branch_similarities,
    1.0,
    "pair of branches",
)


def _mebibytes(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / 2**20:,.1f}"


def _millions(row: CostRow, key: str) -> str:
    if key in row:
        return f"{row[key] / 1e6:,.1f}"
    return "-"


def cost_tables(rows: Sequence[CostRow]) -> list[Table]:
    """Return rows of `iso.cost_table` as text: the costs of one image, of a pass if any, and of batches if measured."""
    by_size = {(row["model"], f"{row['height']}x{row['width']}"): row for row in rows}
    image = [["one image", "size", "parameters", "M MACs", "saved MiB"]]
    one_pass = [["M MACs", "size", *PASS_COSTS.values()]]
    for (model, size), row in by_size.items():
        saved = _mebibytes(row["saved_bytes"])
        image.append([model, size, f"{row['parameters']:,}", _millions(row, "macs"), saved])
        if row["step_macs"] or "branch_macs" in row:
            one_pass.append([model, size, *(_millions(row, cost) for cost in PASS_COSTS)])
    batch = [
        ["one batch", "size", "peak MiB", "peak MiB, training", "images/s", "quartiles", "ratio"]
    ]
    batch += [_batch_row(row) for row in rows if "batch" in row]
    return [table for table in (image, one_pass, batch) if len(table) > 1]


def _batch_row(row: CostRow) -> list[str]:
    return [
        row["model"],
        f"{row['batch']} x {row['height']}x{row['width']}",
        _mebibytes(row["peak_bytes"]),
        _mebibytes(row["training_peak_bytes"]),
        f"{row['images_per_second']:,.1f}",
        f"{row['low']:,.1f}-{row['high']:,.1f}",
        f"{row['ratio']:.2f}",
    ]


def outputs_finding(names: Sequence[str], logits: Sequence[Tensor | None]) -> str:
    """Return how far the outputs of two models are apart; empty without classes in common. Shape: (B, classes)"""
    first, second = logits
    if first is None or second is None or first.shape != second.shape:
        return ""
    difference = float((first - second).abs().max())
    largest = float(first.abs().max())
    images = count_of(len(first), "image")
    same = int((first.argmax(1) == second.argmax(1)).sum())
    if not difference < torch.inf:
        return f"The outputs of {names[1]} or {names[0]} are not finite on {images}."
    if difference == 0:
        return f"{names[1]} and {names[0]} compute the same outputs on {images}: difference 0."
    return (
        f"On {images}, the outputs of {names[1]} and {names[0]} are at most "
        f"{format_number(difference)} apart (largest output {format_number(largest)}); the "
        f"predicted class is the same on {same} of {len(first)}."
    )


def maps_finding(names: Sequence[str], differences: Mapping[str, list[list[float]]]) -> str:
    """Return in how many heads two models differ, from `largest_differences` by layer; empty without any."""
    heads = {}
    for name, by_image in differences.items():
        for head, values in enumerate(zip(*by_image, strict=True), 1):
            heads[name, head] = max(values)
    if not heads:
        return ""
    layer, head = max(heads, key=heads.__getitem__)
    largest = heads[layer, head]
    for bound in EQUAL_BOUNDS:
        if largest <= bound:
            within = f"{bound:.0e}".replace("e-0", "e-")
            return f"The attention maps of both models are equal within {within} in all {len(heads)} heads."
    count = sum(value > EQUAL_BOUNDS[-1] for value in heads.values())
    return (
        f"The attention maps of {names[1]} and {names[0]} differ in {count} of {len(heads)} heads, most in {layer}, "
        f"head {head}: by {format_number(largest)}."
    )


def cost_finding(rows: Sequence[CostRow]) -> str:
    """Return parameters and MACs of one model, or how much the second differs from the first."""
    first = rows[0]
    last = rows[-1]
    if first["model"] == last["model"] or not first["parameters"] or not first["macs"]:
        return (
            f"{first['model']} has {first['parameters']:,} parameters and "
            f"{first['macs'] / 1e6:,.1f} M MACs per image."
        )
    parameters = 100 * (last["parameters"] / first["parameters"] - 1)
    macs = 100 * (last["macs"] / first["macs"] - 1)
    return f"{last['model']} compared with {first['model']}: parameters {parameters:+.3g} %, MACs {macs:+.3g} %."


def _measure_charts(
    measures: Sequence[HeadMeasure], models: Sequence[PageModel], *arguments: Mapping[str, Any]
) -> list[Dots]:
    charts = []
    for measure in measures:
        series = {}
        for m in models:
            own_arguments = [argument[m.name] for argument in arguments]
            try:
                layers = measure.of(m.model, *own_arguments)
            except UserError:  # it does not apply to the model
                continue
            if layers:
                series[m.name] = {
                    layer: heads.flatten().tolist() for layer, heads in layers.items()
                }
        if series:
            dots = Dots(
                measure.title, measure.unit, series, measure.limit, RESOLUTION, measure.each
            )
            charts.append(dots)
    return charts


def _gating_section(charts: Sequence[Dots]) -> Section:
    texts = []
    for chart in charts[1:]:
        for name, layers in chart.series.items():
            spans = chain.from_iterable(layers.values())
            lost = sum(map(math.isnan, spans))
            if lost:
                texts.append(
                    f"Heads of {name} without a centre (locality not positive), and so without "
                    f"a span: {lost}."
                )
    return Section("Gates and spans", " ".join(texts), charts=charts, guide=guides.GATES)


def _cost(subject: PageModel) -> JsonObject:
    if subject.inputs is None:
        return static_cost(subject.model, subject.config["input_size"])
    image = torch.zeros(1, *subject.config["input_size"])
    inputs = to_model(subject.read(image), subject.model)
    return {
        "parameters": count_parameters(subject.model),
        "macs": count_once(subject.model, inputs),
        "step_macs": 0,
        "saved_bytes": None,
    }


def _cost_sections(models: Sequence[PageModel]) -> Iterator[Section]:
    height, width = models[0].config["input_size"][-2:]
    rows = []
    for m in models:
        rows.append({"model": m.name, "height": height, "width": width} | _cost(m))
    one_image, *passes = cost_tables(rows)
    finding = cost_finding(rows)
    yield Section("Cost", "Of one image.", one_image, finding=finding, guide=guides.COST)
    for table in passes:
        yield Section("Cost per pass", table=table, guide=guides.PASS_COST)


def _undrawn_layers(problems: Mapping[str, Mapping[str, str]]) -> Details | None:
    layers_of: dict[str, list[str]] = {}
    for model, reasons in problems.items():
        for layer, reason in reasons.items():
            name = f"{model}: {layer}" if len(problems) > 1 else layer
            layers_of.setdefault(reason, []).append(name)
    if not layers_of:
        return None
    count = sum(map(len, layers_of.values()))
    verb = "is" if count == 1 else "are"
    title = f"{count_of(count, 'attention layer')} {verb} {NOT_DRAWN}"
    lines = [f"{', '.join(layers)}: {reason}." for reason, layers in layers_of.items()]
    return Details(title, lines)


@dataclass(frozen=True)
class AnalyzeOptions:
    """Optional content of `analyze_sections`.

    `layers` selects attention layers, all by default. `cka_batches` are loaders by model of the same images for CKA,
    `cka_images` names them in words; `evolution` is F_k of every layer by model (`iso.analysis.feature_evolution`).
    `report_progress` is called with what is being computed.

    >>> images = [(torch.randn(8, 3, 32, 32), None)]
    >>> iso.report.AnalyzeOptions(cka_batches={"CNN": images}, cka_images="8 random images").cka_images
    '8 random images'
    """

    layers: Where | None = None
    cka_batches: Mapping[str, Iterable[Any]] = field(default_factory=dict)
    cka_images: str = ""
    evolution: Evolution = field(default_factory=dict)
    max_map_characters: int = MAX_MAP_CHARACTERS
    report_progress: Callable[[str], None] = lambda doing: None


def _cka_section(
    first: PageModel,
    second: PageModel,
    pairs: Iterable[tuple[Inputs, Inputs]],
    options: AnalyzeOptions,
) -> Section:
    """Return the similarity of layers, or, where the images are too few, the sentence that says so."""
    try:
        cka = cka_of_pairs(first.model, second.model, pairs, read=pool_features)
    except UserError as error:
        return Section("Layer similarity (CKA)", f"{error}.")
    title = f"Within {first.name}"
    if first is not second:
        title = f"{first.name} x {second.name}"
    chart: Chart = Matrix(
        title, first.name, second.name, cka.rows, cka.columns, cka.matrix.tolist()
    )
    text = f"On {options.cka_images}." if options.cka_images else ""
    return Section("Layer similarity (CKA)", text, charts=[chart], guide=guides.CKA)


def _similarity_sections(models: Sequence[PageModel], options: AnalyzeOptions) -> Iterator[Section]:
    if options.cka_batches:
        options.report_progress("CKA between layers")
        first = models[0]
        second = models[-1]
        pairs = zip(
            batches(options.cka_batches[first.name]),
            batches(options.cka_batches[second.name]),
            strict=True,
        )
        yield _cka_section(first, second, pairs, options)
    if options.evolution:
        text = f"Linear CKA of {DRAW_SIZE} random test images, mean of {NUM_DRAWS} draws."
        lines = {}
        for name, values in options.evolution.items():
            lines[name] = Line(range(1, len(values) + 1), list(values.values()))
        chart = Panel("Feature evolution", "layer k", "F_k", lines)
        yield Section("Feature evolution", text, charts=[chart], guide=guides.EVOLUTION)


def _attention_section(
    models: Sequence[PageModel],
    images: Sequence[PageImage],
    batches: Mapping[str, Inputs],
    gates_of: Mapping[str, Any],
    options: AnalyzeOptions,
) -> Section:
    shown = list[ViewerModel]()
    outputs = list[Tensor | None]()
    problems = dict[str, dict[str, str]]()
    for m in models:
        options.report_progress(f"attention of {m.name}")
        batch = batches[m.name]
        keep_exact = len(models) == 2
        maps, problems[m.name] = capture_layer_maps(m.model, batch, options.layers, keep_exact)
        logits = model_logits(m.model, batch)
        outputs.append(logits)
        predictions: Sequence[str] = ()
        if logits is not None and logits.isfinite().all():
            predictions = name_classes(m.model, logits)
        gates = gates_of.get(m.name, {})
        shown.append(ViewerModel(m.name, maps, gates, predictions, register_count(m.model)))

    viewer = build_viewer(shown, images, options.max_map_characters)
    details = _undrawn_layers(problems)
    finding = _attention_finding(shown, outputs, images, viewer)
    framing = framing_text(models[0].config)
    if viewer:
        text = f"Point at a patch of the image, touch it, or use the arrow keys. {framing} {viewer.note}"
        guide = guides.MAPS
        if len(models) > 1:
            guide = f"{guides.MAPS} {guides.DIFFERENCE}"
        return Section(
            "Attention", text, viewer=viewer, details=details, finding=finding, guide=guide
        )
    reason = "The model has no attention to draw; isomorph recast adds some."
    if details:
        reason = "None of its attention layers can be drawn."
    return Section(
        "Predictions",
        f"{framing} {reason}",
        images=[_image_card(image, i, shown) for i, image in enumerate(images)],
        details=details,
        finding=finding,
        guide=guides.PREDICTIONS,
    )


def _attention_finding(
    shown: Sequence[ViewerModel],
    outputs: Sequence[Tensor | None],
    images: Sequence[PageImage],
    viewer: Viewer | None,
) -> str:
    """Return how far two models' outputs and maps are apart, or what each predicts for the first image."""
    names = [m.name for m in shown]
    sentences = []
    if len(shown) == 2:
        sentences.append(outputs_finding(names, outputs))
    if not any(sentences):
        for m in shown:
            if m.predictions:
                sentences.append(f"{m.name} predicts {m.predictions[0]} for {images[0].name}.")
        for name, logits in zip(names, outputs, strict=True):
            if logits is not None and not logits.isfinite().all():
                sentences.append(f"The outputs of {name} are not finite.")
    if viewer:
        layers = viewer.data["layers"]
        differences = {
            layer["name"]: layer["differences"] for layer in layers if layer["differences"]
        }
        sentences.append(maps_finding(names, differences))
        sentences += [f"{m.name} has no attention map to draw." for m in shown if not m.maps]
    text = " ".join(filter(None, sentences))
    if text:
        return text
    verb = "gives" if len(names) == 1 else "give"
    undrawn = "" if viewer else ", and none of its attention can be drawn"
    return f"{' and '.join(names)} {verb} no classes{undrawn}."


def _image_card(image: PageImage, number: int, shown: Sequence[ViewerModel]) -> ImageCard:
    lines = []
    for m in shown:
        if m.predictions:
            line = m.predictions[number]
            lines.append(f"{m.name}: {line}" if len(shown) > 1 else line)
    return ImageCard(image.data_uri(), image.name, lines)


def analyze_sections(
    models: Sequence[PageModel], images: Sequence[PageImage], options: AnalyzeOptions | None = None
) -> list[Section]:
    """Return the sections of the analyze page for one or two models, which take images of the same size.

    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10).eval()
    >>> config = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
    >>> config |= {"crop_mode": "center", "interpolation": "bicubic"}
    >>> models = [iso.report.PageModel("ViT", model, config)]
    >>> images = [iso.report.PageImage("noise", torch.rand(3, 32, 32))]
    >>> [section.title for section in iso.report.analyze_sections(models, images)]
    ['Attention', 'Attention distance and entropy', 'Cost', 'Model history: ViT']

    Raises: UserError when the option `layers` matches no attention layer.
    """
    options = options or AnalyzeOptions()
    batches = {}
    for m in models:
        pixels = normalise_images(images, dict(m.config))
        batches[m.name] = to_model(m.read(pixels), m.model)
    gating = _measure_charts(GATING, models)
    gates_of = gating[0].series if gating else {}
    sections = [_attention_section(models, images, batches, gates_of, options)]
    if gating:
        sections.append(_gating_section(gating))
    charts = _measure_charts((GAMMAS,), models)
    if charts:
        sections.append(Section("Inserted blocks", charts=charts, guide=guides.GAMMAS))
    charts = _measure_charts((BRANCHES,), models, batches)
    if charts:
        text = "Of the images above, every two branches but the skip; in eval mode."
        sections.append(Section("Pyramid branches", text, charts=charts, guide=guides.BRANCHES))
    options.report_progress("attention statistics")
    where = dict.fromkeys(batches, "*" if options.layers is None else options.layers)
    charts = _measure_charts(STATISTICS, models, batches, where)
    if charts:
        title = "Attention distance and entropy"
        text = "On the images above."
        sections.append(Section(title, text, charts=charts, guide=guides.DISTANCE))
    sections += _similarity_sections(models, options)
    options.report_progress("cost")
    sections += _cost_sections(models)
    for m in models:
        guide = guides.HISTORY if m is models[0] else ""
        sections.append(Section(f"Model history: {m.name}", listing=model_history(m), guide=guide))
    return sections
