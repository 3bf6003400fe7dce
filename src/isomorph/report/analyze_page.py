"""The sections of the page of `isomorph analyze`: one model, or two side by side."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from isomorph.analysis import attention_entropy, attention_spans, gates, logit_stats, nonlocality
from isomorph.analysis.evolution import DRAW_SIZE, NUM_DRAWS
from isomorph.errors import UserError
from isomorph.evaluation.cost_tables import cost_table, static_cost
from isomorph.report import guides
from isomorph.report.attention_viewer import PageImage, Viewer, ViewerModel, build_viewer
from isomorph.report.charts import Dots
from isomorph.report.cka_charts import (
    Evolution,
    cka_chart,
    evolution_chart,
    pairwise_cka,
)
from isomorph.report.cost_tables import batch_cost_table, cost_problems, fixed_cost_table, pass_cost_table
from isomorph.report.findings import (
    cost_finding,
    distance_finding,
    evolution_finding,
    gates_finding,
    maps_finding,
    outputs_finding,
    predictions_finding,
    robustness_finding,
    similarity_finding,
    speed_finding,
)
from isomorph.report.html import Details, ImageCard, Section
from isomorph.report.layer_maps import MAX_MAP_CHARACTERS, capture_layer_maps
from isomorph.report.page_images import normalise_images
from isomorph.report.page_models import (
    PageModel,
    class_logits,
    framing_text,
    model_history,
    name_classes,
)
from isomorph.report.robustness_charts import RobustnessData, robustness_charts, robustness_table, shared_means
from isomorph.surgery.where import Where

RESOLUTION = 1e-3
"""Smaller differences of gates, spans, distances, entropies and logits are not drawn."""


def _values_or_empty(analysis: Callable[..., Mapping[str, Any]], *arguments: Any) -> Mapping[str, Any]:
    """Return the result of an analysis, an empty one where it does not apply to the model."""
    try:
        return analysis(*arguments)
    except UserError:
        return {}


def _dots_chart(
    title: str, label: str, values: Mapping[str, Mapping[str, Tensor]], limit: float | None = None
) -> list[Dots]:
    """Return a chart of {model: {layer: (heads,)}} without the models that have no layer; no chart without any."""
    series = {
        name: {layer: [float(v) for v in heads.flatten()] for layer, heads in layers.items()}
        for name, layers in values.items()
        if layers
    }
    return [Dots(title, label, series, limit, RESOLUTION)] if series else []


def _gating_charts(models: Sequence[PageModel]) -> list[Dots]:
    """Return charts of the gates and spans of the models that have gated attention."""
    gates_of = {m.name: _values_or_empty(gates, m.model) for m in models}
    spans_of = {m.name: _values_or_empty(attention_spans, m.model) for m in models}
    return [
        *_dots_chart("Gates", "sigma(gate)", gates_of, 1.0),
        *_dots_chart("Spans", "1 / locality, grid steps", spans_of),
    ]


def _centreless_text(models: Sequence[PageModel]) -> str:
    """Return a sentence on the heads without a centre, which have no span; empty where all have one."""
    counts = {
        m.name: sum(int(v.isnan().sum()) for v in _values_or_empty(attention_spans, m.model).values()) for m in models
    }
    return " ".join(
        f"Heads of {name} without a centre (locality not positive), and so without a span: {count}."
        for name, count in counts.items()
        if count
    )


def _attention_charts(models: Sequence[PageModel], batches: Mapping[str, Tensor], layers: Where | None) -> list[Dots]:
    """Return charts of distance, entropy and largest logit of the chosen attention layers."""
    where = "*" if layers is None else layers
    distances, entropies, logits = (
        {m.name: _values_or_empty(analysis, m.model, batches[m.name], where) for m in models}
        for analysis in (nonlocality, attention_entropy, logit_stats)
    )
    largest = {name: {layer: stats.max_logit for layer, stats in found.items()} for name, found in logits.items()}
    return [
        *_dots_chart("Nonlocality", "mean distance, grid steps", distances),
        *_dots_chart("Attention entropy", "nats", entropies),
        *_dots_chart("Largest attention logit", "logit", largest),
    ]


def _fixed_cost_row(model: PageModel) -> dict[str, Any]:
    """Return a row of `iso.cost_table` without the measurements that take time."""
    _, height, width = model.config["input_size"]
    cost = static_cost(model.model, model.config["input_size"])
    return {"model": model.name, "height": height, "width": width, **cost}


def _cost_sections(models: Sequence[PageModel], measure_speed: bool) -> list[Section]:
    """Return the cost of each model at the page's image size; with speed and peak memory if asked for."""
    size = models[0].config["input_size"][-2:]
    if measure_speed:
        rows = list(cost_table({m.name: m.model for m in models}, [size]))
    else:
        rows = [_fixed_cost_row(m) for m in models]
    finding = cost_finding([row for row in rows if row["batch"] == rows[0]["batch"]] if measure_speed else rows)
    sections = [Section("Cost", "Of one image.", fixed_cost_table(rows), finding=finding, guide=guides.COST)]
    if passes := pass_cost_table(rows):
        sections.append(Section("Cost per pass", table=passes, guide=guides.PASS_COST))
    if measure_speed:
        text = "On this machine, the models in alternation."
        problems = cost_problems(rows)
        details = Details("Measurements that failed", problems) if problems else None
        table, finding = batch_cost_table(rows), speed_finding(rows)
        speed = Section("Speed and memory", text, table, details=details, finding=finding, guide=guides.SPEED)
        sections.append(speed)
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
        lines = [f"{p}{m.predictions[i]}" for p, m in zip(prefixes, models, strict=True) if m.predictions[i]]
        cards.append(ImageCard(image.data_uri(), image.name, lines))
    guide = guides.PREDICTIONS
    return Section("Predictions", f"{framing} {reason}", images=cards, details=details, guide=guide)


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
        text = f"On {options.cka_images}." if options.cka_images else ""
        found = pairwise_cka({m.name: m.model for m in models}, options.cka_batches)
        charts = [cka_chart(names, matrix) for names, matrix in found.items()]
        finding = similarity_finding(charts[0])
        sections.append(Section("Layer similarity (CKA)", text, charts=charts, finding=finding, guide=guides.CKA))
    if options.evolution:
        text = f"Linear CKA of {DRAW_SIZE} random test images, mean of {NUM_DRAWS} draws."
        evolution = Section("Feature evolution", text, charts=[evolution_chart(options.evolution)])
        finding = evolution_finding(options.evolution)
        sections.append(replace(evolution, finding=finding, guide=guides.EVOLUTION))
    if options.robustness:
        cells, measured, problems = options.robustness
        details = Details("Lines that could not be read", problems) if problems else None
        table = robustness_table(cells)
        robust = Section("Robustness", f"Images: {measured}.", table, charts=robustness_charts(cells), details=details)
        finding = robustness_finding(shared_means(cells))
        sections.append(replace(robust, finding=finding, guide=guides.ROBUSTNESS))
    return sections


def _first_section(
    models: Sequence[PageModel],
    images: Sequence[PageImage],
    batches: Mapping[str, Tensor],
    layers: Where | None,
    options: AnalyzeOptions,
) -> Section:
    """Return the attention or predictions of the models, with the finding of the whole page."""
    shown: list[ViewerModel] = []
    outputs: list[Tensor | None] = []
    problems: dict[str, dict[str, str]] = {}
    for m in models:
        options.report_progress(f"attention of {m.name}")
        batch = batches[m.name]
        maps, problems[m.name] = capture_layer_maps(m.model, batch, layers, keep_exact=len(models) == 2)
        gates_of = {name: values.tolist() for name, values in _values_or_empty(gates, m.model).items()}
        outputs.append(class_logits(m.model, batch))
        predictions = [""] * len(images) if outputs[-1] is None else name_classes(m.model, outputs[-1])
        shown.append(ViewerModel(m.name, maps, gates_of, predictions))
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
    found = [outputs_finding(names, outputs)]
    if not found[0]:
        found = [predictions_finding(m.name, [image.name for image in images], m.predictions) for m in models]
    layers = viewer.data["layers"] if viewer else []
    found.append(maps_finding(names, {layer["name"]: d for layer in layers if (d := layer["differences"])}))
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
    sections = [_first_section(models, images, batches, layers, options)]
    if charts := _gating_charts(models):
        finding = "" if charts[0].constant_text() else gates_finding(charts[0])
        text = _centreless_text(models)
        sections.append(Section("Gates and spans", text, charts=charts, finding=finding, guide=guides.GATES))
    options.report_progress("attention statistics")
    if charts := _attention_charts(models, batches, layers):
        distances = Section("Attention distance and entropy", "On the images above.", charts=charts)
        finding = distance_finding(charts[0].series)
        sections.append(replace(distances, finding=finding, guide=guides.DISTANCE))
    sections += _comparison_sections(models, options)
    options.report_progress("cost")
    sections += _cost_sections(models, options.measure_speed)
    texts = [guides.HISTORY] + [""] * (len(models) - 1)
    histories = ((f"Model history: {m.name}", model_history(m)) for m in models)
    return [*sections, *(Section(t, listing=h, guide=guide) for (t, h), guide in zip(histories, texts, strict=True))]
