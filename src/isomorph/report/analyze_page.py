"""The sections of the page of `isomorph analyze`: one model, or two side by side."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.analysis import attention_spans, gates, logit_stats
from isomorph.analysis.batches import batches
from isomorph.analysis.cka import CKA, gram_matrices, hsic, matching_batches, pool_features
from isomorph.analysis.evolution import DRAW_SIZE, NUM_DRAWS
from isomorph.analysis.features import feature_layers
from isomorph.errors import UserError
from isomorph.evaluation.cost import cost_table, static_cost
from isomorph.report import findings, guides
from isomorph.report.attention_viewer import (
    MAX_MAP_CHARACTERS,
    Viewer,
    ViewerModel,
    build_viewer,
    capture_layer_maps,
)
from isomorph.report.charts import Dots, Line, Matrix, Panel, Table, format_number
from isomorph.report.html import Details, ImageCard, Section
from isomorph.report.page_images import PageImage, normalise_images
from isomorph.report.page_models import (
    MEASURES,
    HeadMeasure,
    PageModel,
    class_logits,
    framing_text,
    model_history,
    name_classes,
)
from isomorph.report.robustness_page import RobustnessData, robustness_charts, robustness_table, shared_means
from isomorph.surgery.where import Where

RESOLUTION = 1e-3
"""Smaller differences of gates, spans, distances, entropies and logits are not drawn."""
PASS_COSTS = {
    "macs": "per image",
    "step_macs": "per pass",
    "training_macs": "training: per image",
    "training_step_macs": "training: per pass",
    "branch_macs": "branch by branch: per image",
}
"""Keys of the MACs in a row of `iso.cost_table`, and the heads of their columns."""
CostRow = Mapping[str, Any]
"""A row of `iso.cost_table`."""
Evolution = Mapping[str, Mapping[str, float]]
"""F_k of every layer by model, as `iso.analysis.feature_evolution` returns it for each."""


def _largest_logits(*arguments: Any) -> dict[str, Tensor]:
    return {layer: stats.max_logit for layer, stats in logit_stats(*arguments).items()}


GATING = (
    HeadMeasure("Gates", "sigma(gate)", gates, 1.0),
    HeadMeasure("Spans", "1 / locality, grid steps", attention_spans),
)
STATISTICS = (*MEASURES.values(), HeadMeasure("Largest attention logit", "logit", _largest_logits))


@torch.no_grad()
def pairwise_cka(models: Mapping[str, nn.Module], loaders: Mapping[str, Iterable[Any]]) -> dict[tuple[str, str], CKA]:
    """Return unbiased linear CKA between two models and within each (`iso.cka` with read=pooled), in one pass.

    Each model has its own loader of the same images, normalised for it. Only the Gram matrices of one batch are in
    memory at a time. A single model is compared with itself.

    Shape: loaders of (images (B, C, H, W), ...) -> {(model, model): (layers, layers)}
    Raises: UserError when a model has no layers that timm names, or no batch has 4 images.
    """
    names = list(models)
    pairs = dict.fromkeys([(names[0], names[-1]), *((name, name) for name in names)])
    layers = {name: feature_layers(model, None, 1) for name, model in models.items()}
    sums: dict[tuple[str, str], Any] = dict.fromkeys(pairs, 0.0)
    for several in matching_batches(zip(*(batches(loaders[name]) for name in names), strict=True)):
        found = {
            name: gram_matrices(models[name], x, layers[name], pool_features)
            for name, x in zip(names, several, strict=True)
        }
        sums = {(a, b): total + hsic(found[a], found[b]) for (a, b), total in sums.items()}
    own = {name: sums[name, name].diagonal() for name in names}
    return {
        (a, b): CKA(total / (own[a][:, None] * own[b]).sqrt(), list(layers[a]), list(layers[b]))
        for (a, b), total in sums.items()
    }


def evolution_table(evolution: Evolution) -> Table:
    """Return a table with a row for each layer: F_k of each model, a dash where it has no layer of that name."""
    layers = dict.fromkeys(layer for values in evolution.values() for layer in values)
    rows = [[layer, *(format_number(values.get(layer)) for values in evolution.values())] for layer in layers]
    return [["F_k", *evolution], *rows]


def _mebibytes(count: int | None) -> str:
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


def pass_cost_table(rows: Sequence[CostRow]) -> Table:
    """Return a table of the MACs of a forward pass: in inference, and in training in closed form and branch by branch.

    It has a row for each image size of a model that has pyramids, or whose pass has a fixed cost in addition to the
    cost per image. Without such a model, the table is empty.
    """
    by_size = {(row["model"], _image_size(row)): row for row in rows if row["step_macs"] or "branch_macs" in row}
    body = [
        [*name, *(f"{row[key] / 1e6:,.1f}" if key in row else "-" for key in PASS_COSTS)]
        for name, row in by_size.items()
    ]
    return [["M MACs", "size", *PASS_COSTS.values()], *body] if body else []


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


def _measure_charts(
    measures: Sequence[HeadMeasure], models: Sequence[PageModel], *arguments: Mapping[str, Any]
) -> list[Dots]:
    """Return a chart for each measure, of the models that have it; `arguments` are further ones by model."""
    charts = []
    for measure in measures:
        series = {}
        for m in models:
            with suppress(UserError):  # it does not apply to the model
                layers = measure.of(m.model, *(argument[m.name] for argument in arguments))
                series[m.name] = {layer: heads.flatten().tolist() for layer, heads in layers.items()}
        series = {name: layers for name, layers in series.items() if layers}
        if series:
            charts.append(Dots(measure.title, measure.unit, series, measure.limit, RESOLUTION))
    return charts


def _gating_section(charts: Sequence[Dots]) -> Section:
    """Return the section of gates and spans, with the number of heads that have no span."""
    texts = []
    for chart in charts[1:]:
        for name, layers in chart.series.items():
            if count := sum(value != value for heads in layers.values() for value in heads):
                texts.append(
                    f"Heads of {name} without a centre (locality not positive), and so without a span: {count}."
                )
    finding = "" if charts[0].constant_text() else findings.gates_finding(charts[0])
    return Section("Gates and spans", " ".join(texts), charts=charts, finding=finding, guide=guides.GATES)


def _cost_sections(models: Sequence[PageModel], measure_speed: bool) -> list[Section]:
    """Return the cost of each model at the page's image size; with speed and peak memory if asked for."""
    size = models[0].config["input_size"][-2:]
    rows: Sequence[CostRow]
    if measure_speed:
        rows = list(cost_table({m.name: m.model for m in models}, [size]))
        finding = findings.cost_finding([row for row in rows if row["batch"] == rows[0]["batch"]])
    else:
        costs = [(m.name, static_cost(m.model, m.config["input_size"])) for m in models]
        rows = [{"model": name, "height": size[0], "width": size[1], **cost} for name, cost in costs]
        finding = findings.cost_finding(rows)
    sections = [Section("Cost", "Of one image.", fixed_cost_table(rows), finding=finding, guide=guides.COST)]
    if passes := pass_cost_table(rows):
        sections.append(Section("Cost per pass", table=passes, guide=guides.PASS_COST))
    if measure_speed:
        text, finding = "On this machine, the models in alternation.", findings.speed_finding(rows)
        details = Details("Measurements that failed", problems) if (problems := cost_problems(rows)) else None
        speed = Section("Speed and memory", text, batch_cost_table(rows), details=details, finding=finding)
        sections.append(replace(speed, guide=guides.SPEED))
    return sections


def _undrawn_layers(problems: Mapping[str, Mapping[str, str]]) -> Details | None:
    """Return the layers that are not drawn, grouped by reason, from {model: {layer: reason}}; None without any."""
    layers_of: dict[str, list[str]] = {}
    for model, reasons in problems.items():
        for layer, reason in reasons.items():
            layers_of.setdefault(reason, []).append(f"{model}: {layer}" if len(problems) > 1 else layer)
    count = sum(map(len, layers_of.values()))
    lines = [f"{', '.join(layers)}: {reason}." for reason, layers in layers_of.items()]
    return Details(f"{count} attention layer{'s are' if count > 1 else ' is'} not drawn", lines) if count else None


def _attention_section(
    models: Sequence[ViewerModel],
    images: Sequence[PageImage],
    problems: Mapping[str, Mapping[str, str]],
    framing: str,
    max_map_characters: int,
) -> Section:
    """Return the attention viewer, or the images and predictions where no map can be drawn."""
    viewer, details = build_viewer(models, images, max_map_characters), _undrawn_layers(problems)
    if viewer:
        text = f"Point at a patch of the image, touch it, or use the arrow keys. {framing} {viewer.note}"
        guide = " ".join([guides.MAPS, *([guides.DIFFERENCE] if len(models) > 1 else [])])
        return Section("Attention", text, viewer=viewer, details=details, guide=guide)
    reason = (
        "None of its attention layers can be drawn."
        if details
        else "The model has no attention to draw; isomorph recast adds some."
    )
    prefixes = [f"{model.name}: " if len(models) > 1 else "" for model in models]
    cards = []
    for i, image in enumerate(images):
        lines = [f"{p}{m.predictions[i]}" for p, m in zip(prefixes, models, strict=True) if m.predictions]
        cards.append(ImageCard(image.data_uri(), image.name, lines))
    return Section("Predictions", f"{framing} {reason}", images=cards, details=details, guide=guides.PREDICTIONS)


def lead_text(sections: Sequence[Section]) -> str:
    """Return the finding of the page: that of its first section, and of robustness where it was measured."""
    found = [section.finding for i, section in enumerate(sections) if i == 0 or section.title == "Robustness"]
    return " ".join(filter(None, found))


@dataclass(frozen=True)
class AnalyzeOptions:
    """Optional content of `analyze_sections`.

    `cka_batches` are loaders by model of the same images for CKA, `cka_images` names them in words; `evolution` is
    F_k of every layer by model (`iso.analysis.feature_evolution`); `robustness` are results of `isomorph robustness`.
    `measure_speed` adds speed and peak memory. Attention maps are thinned to `max_map_characters` characters.
    `report_progress` is called with what is being computed.

    >>> images = [(torch.randn(8, 3, 32, 32), None)]
    >>> iso.report.AnalyzeOptions(cka_batches={"CNN": images}, cka_images="8 random images").measure_speed
    False
    """

    cka_batches: Mapping[str, Iterable[Any]] = field(default_factory=dict)
    cka_images: str = ""
    evolution: Evolution = field(default_factory=dict)
    robustness: RobustnessData | None = None
    measure_speed: bool = False
    max_map_characters: int = MAX_MAP_CHARACTERS
    report_progress: Callable[[str], None] = lambda doing: None


def _comparison_sections(models: Sequence[PageModel], options: AnalyzeOptions) -> list[Section]:
    """Return the sections of CKA, feature evolution and robustness, where they are asked for."""
    sections = []
    if options.cka_batches:
        options.report_progress("CKA between layers")
        charts = [
            Matrix(f"{a} x {b}" if a != b else f"Within {a}", a, b, cka.rows, cka.columns, cka.matrix.tolist())
            for (a, b), cka in pairwise_cka({m.name: m.model for m in models}, options.cka_batches).items()
        ]
        text = f"On {options.cka_images}." if options.cka_images else ""
        finding = findings.similarity_finding(charts[0])
        sections.append(Section("Layer similarity (CKA)", text, charts=charts, finding=finding, guide=guides.CKA))
    if options.evolution:
        text = f"Linear CKA of {DRAW_SIZE} random test images, mean of {NUM_DRAWS} draws."
        lines = {name: Line(range(1, len(of) + 1), list(of.values())) for name, of in options.evolution.items()}
        chart, finding = (
            Panel("Feature evolution", "layer k", "F_k", lines),
            findings.evolution_finding(options.evolution),
        )
        sections.append(Section("Feature evolution", text, charts=[chart], finding=finding, guide=guides.EVOLUTION))
    if options.robustness:
        cells, measured, problems = options.robustness
        details = Details("Lines that could not be read", problems) if problems else None
        table = robustness_table(cells)
        robust = Section("Robustness", f"Images: {measured}.", table, charts=robustness_charts(cells), details=details)
        finding = findings.robustness_finding(shared_means(cells))
        sections.append(replace(robust, finding=finding, guide=guides.ROBUSTNESS))
    return sections


def _first_section(
    models: Sequence[PageModel],
    images: Sequence[PageImage],
    batches: Mapping[str, Tensor],
    layers: Where | None,
    gating: Sequence[Dots],
    options: AnalyzeOptions,
) -> Section:
    """Return the attention or predictions of the models, with the finding of the whole page."""
    gates_of = gating[0].series if gating else {}
    shown: list[ViewerModel] = []
    outputs: list[Tensor | None] = []
    problems: dict[str, dict[str, str]] = {}
    for m in models:
        options.report_progress(f"attention of {m.name}")
        batch = batches[m.name]
        maps, problems[m.name] = capture_layer_maps(m.model, batch, layers, keep_exact=len(models) == 2)
        outputs.append(class_logits(m.model, batch))
        predictions = () if outputs[-1] is None else name_classes(m.model, outputs[-1])
        shown.append(ViewerModel(m.name, maps, gates_of.get(m.name, {}), predictions))
    section = _attention_section(shown, images, problems, framing_text(models[0].config), options.max_map_characters)
    return replace(section, finding=_page_finding(shown, outputs, images, section.viewer))


def _page_finding(
    models: Sequence[ViewerModel],
    outputs: Sequence[Tensor | None],
    images: Sequence[PageImage],
    viewer: Viewer | None,
) -> str:
    """Return how far the outputs and the attention of two models are apart, or what one predicts, in sentences."""
    names = [model.name for model in models]
    found = [findings.outputs_finding(names, outputs)]
    if not found[0]:
        found = [findings.predictions_finding(m.name, [image.name for image in images], m.predictions) for m in models]
    layers = viewer.data["layers"] if viewer else []
    found.append(findings.maps_finding(names, {layer["name"]: d for layer in layers if (d := layer["differences"])}))
    found += [f"{m.name} has no attention map to draw." for m in models if viewer and not m.maps]
    return " ".join(filter(None, found)) or "The models give no classes, and none of their attention can be drawn."


def analyze_sections(
    models: Sequence[PageModel],
    images: Sequence[PageImage],
    layers: Where | None = None,
    options: AnalyzeOptions | None = None,
) -> list[Section]:
    """Return the sections of the analyze page for one or two models and some images.

    The models take images of the same size; `layers` selects attention layers by globs, all by default.

    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10).eval()
    >>> config = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
    >>> config |= {"crop_mode": "center", "interpolation": "bicubic"}
    >>> models = [iso.report.PageModel("ViT", model, config)]
    >>> images = [iso.report.PageImage("noise", torch.rand(3, 32, 32))]
    >>> [section.title for section in iso.report.analyze_sections(models, images)]
    ['Attention', 'Attention distance and entropy', 'Cost', 'Model history: ViT']

    Raises: UserError when `layers` matches no attention layer.
    """
    options = options or AnalyzeOptions()
    batches = {m.name: normalise_images(images, dict(m.config)).to(next(m.model.parameters())) for m in models}
    gating = _measure_charts(GATING, models)
    sections = [_first_section(models, images, batches, layers, gating, options)]
    sections += [_gating_section(gating)] if gating else []
    options.report_progress("attention statistics")
    where = dict.fromkeys(batches, "*" if layers is None else layers)
    if charts := _measure_charts(STATISTICS, models, batches, where):
        finding = findings.distance_finding(charts[0].series)
        distances = Section("Attention distance and entropy", "On the images above.", charts=charts, finding=finding)
        sections.append(replace(distances, guide=guides.DISTANCE))
    sections += _comparison_sections(models, options)
    options.report_progress("cost")
    sections += _cost_sections(models, options.measure_speed)
    histories = [Section(f"Model history: {m.name}", listing=model_history(m)) for m in models]
    return [*sections, replace(histories[0], guide=guides.HISTORY), *histories[1:]]
