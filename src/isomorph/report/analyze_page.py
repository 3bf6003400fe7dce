"""The sections of the page of `isomorph analyze`: one model, or two side by side."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from isomorph.analysis import attention_entropy, attention_spans, gates, logit_stats, nonlocality
from isomorph.analysis.evolution import DRAW_SIZE, NUM_DRAWS
from isomorph.errors import UserError
from isomorph.evaluation.cost_tables import cost_table, static_cost
from isomorph.report.attention_viewer import PageImage, ViewerModel, build_viewer
from isomorph.report.charts import Chart, Dots
from isomorph.report.cka_charts import (
    Evolution,
    cka_chart,
    evolution_chart,
    pairwise_cka,
)
from isomorph.report.cost_tables import batch_cost_table, cost_problems, fixed_cost_table, pass_cost_table
from isomorph.report.html import Details, ImageCard, Section
from isomorph.report.layer_maps import MAX_MAP_CHARACTERS, capture_layer_maps
from isomorph.report.page_images import normalise_images
from isomorph.report.page_models import (
    PageModel,
    framing_text,
    model_history,
    prediction_texts,
)
from isomorph.report.robustness_charts import RobustnessData, robustness_charts, robustness_table
from isomorph.surgery.where import Where


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
    return [Dots(title, label, series, limit)] if series else []


def _gating_charts(models: Sequence[PageModel]) -> list[Chart]:
    """Return charts of the gates and spans of the models that have gated attention."""
    gates_of = {m.name: _values_or_empty(gates, m.model) for m in models}
    spans_of = {m.name: _values_or_empty(attention_spans, m.model) for m in models}
    return [
        *_dots_chart("Gates: 1 is position attention, 0 content attention", "sigma(gate)", gates_of, 1.0),
        *_dots_chart("Spans: width of position attention", "1 / locality", spans_of),
    ]


def _centreless_text(models: Sequence[PageModel]) -> str:
    """Return a sentence on the heads without a centre, which have no span; empty where all have one."""
    counts = {
        m.name: sum(int(v.isnan().sum()) for v in _values_or_empty(attention_spans, m.model).values()) for m in models
    }
    return " ".join(
        f"{count} heads of {name} have lost their centre: they have no span." for name, count in counts.items() if count
    )


def _attention_charts(models: Sequence[PageModel], batches: Mapping[str, Tensor], layers: Where | None) -> list[Chart]:
    """Return charts of distance, entropy and largest logit of the chosen attention layers."""
    where = "*" if layers is None else layers
    distances, entropies, logits = (
        {m.name: _values_or_empty(analysis, m.model, batches[m.name], where) for m in models}
        for analysis in (nonlocality, attention_entropy, logit_stats)
    )
    largest = {name: {layer: stats.max_logit for layer, stats in found.items()} for name, found in logits.items()}
    return [
        *_dots_chart("Nonlocality: mean attention distance", "grid steps", distances),
        *_dots_chart("Attention entropy", "nats", entropies),
        *_dots_chart("Largest attention logit", "logit", largest),
    ]


def _fixed_cost_row(model: PageModel) -> dict[str, Any]:
    """Return a row of `iso.cost_table` without the measurements that take time."""
    _, height, width = model.config["input_size"]
    cost = static_cost(model.model, model.config["input_size"])
    return {"model": model.name, "height": height, "width": width, **cost}


PASS_COST_TEXT = (
    "MACs of one forward pass: what every image adds, and what a pass costs once, whatever its batch (the products of "
    "weights). By branches: the cost of an image in training if its tokens passed through all branches."
)


def _cost_sections(models: Sequence[PageModel], measure_speed: bool) -> list[Section]:
    """Return the cost of each model at the page's image size; with speed and peak memory if asked for."""
    size = models[0].config["input_size"][-2:]
    if measure_speed:
        rows = list(cost_table({m.name: m.model for m in models}, [size]))
    else:
        rows = [_fixed_cost_row(m) for m in models]
    text = "Of one image. 1 MAC = 2 FLOPs, attention included. Saved: activations saved for the backward pass."
    sections = [Section("Cost", text, fixed_cost_table(rows))]
    if passes := pass_cost_table(rows):
        sections.append(Section("Cost per pass", PASS_COST_TEXT, passes))
    if measure_speed:
        text = (
            "On this machine, the models in alternation. Peak memory on top of the model, without and with a backward "
            "pass."
        )
        problems = cost_problems(rows)
        details = Details("Measurements that failed", problems) if problems else None
        sections.append(Section("Speed and memory", text, batch_cost_table(rows), details=details))
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
        text = (
            "Point at a patch of the image, touch it, or use the arrow keys: every head shows what that patch attends "
            f"to. {framing} {viewer.note}"
        )
        return Section("Attention", text, viewer=viewer, details=details)
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
    return Section("Predictions", f"{framing} {reason}", images=cards, details=details)


def lead_text(models: Sequence[PageModel], sections: Sequence[Section]) -> str:
    """Return the line under the title: what the page shows."""
    text = "Attention of every head, layer by layer" if sections[0].viewer else "Predictions and cost"
    return text + (": two models side by side." if len(models) > 1 else ".")


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


EVOLUTION_TEXT = (
    "F_k = CKA(f_k, f_out) / CKA(f_in, f_out) of the output of layer k: 1 at the first layer, higher where features "
    f"are closer to the last ones (Refiner eq. 2). Linear CKA of {DRAW_SIZE} random test images, "
    f"mean of {NUM_DRAWS} draws."
)


def _comparison_sections(models: Sequence[PageModel], options: AnalyzeOptions) -> list[Section]:
    """Return the sections of CKA, feature evolution and robustness, where they are asked for."""
    sections = []
    if options.cka_batches:
        options.report_progress("CKA between layers")
        text = (
            "Linear CKA of features averaged over the image, unbiased (minibatch HSIC): 1 is equal up to rotation and "
            "scale, near 0 unrelated; values slightly below 0 occur by chance."
        ) + f" On {options.cka_images}." * bool(options.cka_images)
        found = pairwise_cka({m.name: m.model for m in models}, options.cka_batches)
        charts = [cka_chart(names, matrix) for names, matrix in found.items()]
        sections.append(Section("Layer similarity (CKA)", text, charts=charts))
    if options.evolution:
        sections.append(Section("Feature evolution", EVOLUTION_TEXT, charts=[evolution_chart(options.evolution)]))
    if options.robustness:
        cells, measured, problems = options.robustness
        details = Details("Lines that could not be read", problems) if problems else None
        table = robustness_table(cells)
        text = f"Images: {measured}."
        sections.append(Section("Robustness", text, table, charts=robustness_charts(cells), details=details))
    return sections


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
    shown: list[ViewerModel] = []
    batches: dict[str, Tensor] = {}
    problems: dict[str, dict[str, str]] = {}
    for m in models:
        options.report_progress(f"attention of {m.name}")
        batches[m.name] = normalise_images(images, dict(m.config)).to(next(m.model.parameters()))
        maps, problems[m.name] = capture_layer_maps(m.model, batches[m.name], layers)
        gates_of = {name: values.tolist() for name, values in _values_or_empty(gates, m.model).items()}
        shown.append(ViewerModel(m.name, maps, gates_of, prediction_texts(m.model, batches[m.name])))
    framing = framing_text(models[0].config)
    sections = [_attention_section(shown, images, problems, framing, options.max_map_characters)]
    dots_text = "A dot is a head; the line joins the means of the layers."
    if charts := _gating_charts(models):
        sections.append(Section("Gates and spans", f"{dots_text} {_centreless_text(models)}".strip(), charts=charts))
    options.report_progress("attention statistics")
    if charts := _attention_charts(models, batches, layers):
        sections.append(Section("Attention distance and entropy", f"On the images above. {dots_text}", charts=charts))
    sections += _comparison_sections(models, options)
    options.report_progress("cost")
    sections += _cost_sections(models, options.measure_speed)
    return [*sections, *(Section(f"Model history: {m.name}", listing=model_history(m)) for m in models)]
