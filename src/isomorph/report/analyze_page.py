"""`isomorph analyze` as a page: one model, or two side by side, taken apart layer by layer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from isomorph.analysis import attention_entropy, gates, logit_stats, nonlocality, spans
from isomorph.analysis.evolution import DRAWN, DRAWS
from isomorph.errors import UserError
from isomorph.evaluation.cost_tables import cost_table, fixed_cost
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
from isomorph.surgery.recast import Where


def optional(analysis: Callable[..., Mapping[str, Any]], *arguments: Any) -> Mapping[str, Any]:
    """What an analysis finds, or nothing where it does not apply to this model."""
    try:
        return analysis(*arguments)
    except UserError:
        return {}


def dots(title: str, label: str, found: Mapping[str, Mapping[str, Tensor]], limit: float | None = None) -> list[Dots]:
    """A chart of one value per head and layer for each model that has any; none where no model has."""
    series = {
        name: {layer: [float(v) for v in heads.flatten()] for layer, heads in values.items()}
        for name, values in found.items()
        if values
    }
    return [Dots(title, label, series, limit)] if series else []


def _dial_charts(subjects: Sequence[PageModel]) -> list[Chart]:
    """Gates and spans of the models that have gated attention."""
    opened = {s.name: optional(gates, s.model) for s in subjects}
    wide = {s.name: optional(spans, s.model) for s in subjects}
    return [
        *dots("Gates: 1 looks at places, 0 at content", "sigma(gate)", opened, 1.0),
        *dots("Spans: how wide a head looks", "1 / locality", wide),
    ]


def centreless(subjects: Sequence[PageModel]) -> str:
    """A sentence on the heads without a centre, which have no span; nothing where all have one."""
    lost = {s.name: sum(int(v.isnan().sum()) for v in optional(spans, s.model).values()) for s in subjects}
    said = (
        f"{count} heads of {name} have lost their centre: they have no span." for name, count in lost.items() if count
    )
    return " ".join(said)


def _reach_charts(subjects: Sequence[PageModel], batches: Mapping[str, Tensor], layers: Where | None) -> list[Chart]:
    """Nonlocality, entropy and largest logit of the layers that are looked at, drawn or not."""
    where = "*" if layers is None else layers
    far, entropy, logits = (
        {s.name: optional(analysis, s.model, batches[s.name], where) for s in subjects}
        for analysis in (nonlocality, attention_entropy, logit_stats)
    )
    largest = {name: {n: stats.max_logit for n, stats in found.items()} for name, found in logits.items()}
    return [
        *dots("Nonlocality: how far a head looks", "steps of the grid", far),
        *dots("Entropy: how spread attention is", "nats", entropy),
        *dots("Largest attention logit", "logit", largest),
    ]


def _untimed(subject: PageModel) -> dict[str, Any]:
    """A row of `cost_table` without what takes time to measure."""
    _, height, width = subject.config["input_size"]
    cost = fixed_cost(subject.model, subject.config["input_size"])
    return {"model": subject.name, "height": height, "width": width, **cost}


PASS = (
    "Of one forward pass: what every image adds, and what a step costs once, whatever its batch (the products of "
    "weights). By branches: what every image would cost in training if its tokens passed through all branches."
)
"""What the table of `pass_cost_table` says."""


def _cost_sections(subjects: Sequence[PageModel], timed: bool) -> list[Section]:
    """What each model costs at the size of the page's images; timed: speed and peak memory too, of both in turns."""
    models = {s.name: s.model for s in subjects}
    size = subjects[0].config["input_size"][-2:]
    rows = list(cost_table(models, [size])) if timed else [_untimed(s) for s in subjects]
    text = "Of one image. 1 MAC = 2 FLOPs, attention included. Saved: what a training step keeps for its backward pass."
    sections = [Section("Cost", text, fixed_cost_table(rows))]
    if passes := pass_cost_table(rows):
        sections.append(Section("Cost of a pass", PASS, passes))
    if timed:
        text = "On this machine, model after model in turns; memory at its peak on top of the model, without and with "
        fold = Details("What could not be measured", lost) if (lost := cost_problems(rows)) else None
        sections.append(Section("Speed and memory", f"{text}a backward pass.", batch_cost_table(rows), fold=fold))
    return sections


def _unseen(missing: Mapping[str, Mapping[str, str]]) -> Details | None:
    """Layers that are not drawn, those of one reason together; {model: {layer: reason}}."""
    reasons: dict[str, list[str]] = {}
    for model, layers in missing.items():
        for layer, reason in layers.items():
            reasons.setdefault(reason, []).append(f"{model}: {layer}" if len(missing) > 1 else layer)
    count = sum(map(len, reasons.values()))
    lines = [f"{', '.join(layers)}: {reason}." for reason, layers in reasons.items()]
    return Details(f"{count} attention layer{'s are' if count > 1 else ' is'} not drawn", lines) if count else None


def _map_section(
    seen: Sequence[ViewerModel],
    pictures: Sequence[PageImage],
    missing: Mapping[str, Mapping[str, str]],
    how: str,
    budget: int,
) -> Section:
    """The section that the page opens with: the viewer, or the pictures by themselves where no map can be drawn."""
    viewer, fold = build_viewer(seen, pictures, budget), _unseen(missing)
    if viewer:
        text = (
            "Point at a patch of the image, touch it, or use the arrow keys: every head shows what it looks at from "
            f"there. {how} {viewer.note}"
        )
        return Section("Attention", text, viewer=viewer, fold=fold)
    none = (
        "No attention layer of it can be drawn."
        if fold
        else "There is no attention to draw: recast the model (isomorph recast) to have some."
    )
    shots = [
        ImageCard(
            p.uri(), p.name, [f"{m.name}: {m.said[b]}" if len(seen) > 1 else m.said[b] for m in seen if m.said[b]]
        )
        for b, p in enumerate(pictures)
    ]
    return Section("What the model says", f"{how} {none}", shots=shots, fold=fold)


def lead_text(subjects: Sequence[PageModel], sections: Sequence[Section]) -> str:
    """The sentence under the title: what there is to see."""
    kind = "What each head looks at, layer by layer" if sections[0].viewer else "What it says, and what it costs"
    return kind + (": two models side by side." if len(subjects) > 1 else ".")


@dataclass(frozen=True)
class AnalyzeOptions:
    """What a page shows beside the maps when it is given: batches of images for CKA by model and which they are, in
    words; F_k by model; robustness results."""

    batches: Mapping[str, Iterable[Any]] = field(default_factory=dict)
    drawn: str = ""
    evolution: Evolution = field(default_factory=dict)
    results: RobustnessData | None = None
    timed: bool = False
    budget: int = MAX_MAP_CHARACTERS
    tell: Callable[[str], None] = lambda doing: None
    """Told what is being done."""


def _likeness_charts(subjects: Sequence[PageModel], batches: Mapping[str, Iterable[Any]]) -> list[Chart]:
    """CKA between the layers of the two models and within each. Raises: UserError when there are no features."""
    found = pairwise_cka({s.name: s.model for s in subjects}, batches)
    return [cka_chart(names, matrix) for names, matrix in found.items()]


EVOLUTION = (
    "F_k = CKA(f_k, f_out) / CKA(f_in, f_out) of what layer k gives: 1 at the first layer, higher where features are "
    f"closer to the last ones (Refiner eq. 2). Linear CKA of {DRAWN} random test images, mean of {DRAWS} draws."
)


def analyze_sections(
    subjects: Sequence[PageModel],
    pictures: Sequence[PageImage],
    layers: Where | None = None,
    extras: AnalyzeOptions | None = None,
) -> list[Section]:
    """All sections of the page of one or two models and some images."""
    extras = extras or AnalyzeOptions()
    seen: list[ViewerModel] = []
    batches: dict[str, Tensor] = {}
    missing: dict[str, dict[str, str]] = {}
    for s in subjects:
        extras.tell(f"attention of {s.name}")
        batches[s.name] = normalise_images(pictures, dict(s.config)).to(next(s.model.parameters()))
        maps, missing[s.name] = capture_layer_maps(s.model, batches[s.name], layers)
        opened = {name: values.tolist() for name, values in optional(gates, s.model).items()}
        seen.append(ViewerModel(s.name, maps, opened, prediction_texts(s.model, batches[s.name])))
    sections = [_map_section(seen, pictures, missing, framing_text(subjects[0].config), extras.budget)]
    if charts := _dial_charts(subjects):
        text = f"A dot is a head; the line goes through the means of the layers. {centreless(subjects)}"
        sections.append(Section("Gates and spans", text.strip(), charts=charts))
    extras.tell("statistics of attention")
    if charts := _reach_charts(subjects, batches, layers):
        sections.append(
            Section(
                "How far, how sharp",
                "On the images above. A dot is a head; the line goes through the means of the layers.",
                charts=charts,
            )
        )
    if extras.batches:
        extras.tell("likeness of layers")
        text = (
            "Linear CKA of features averaged over the image, unbiased (HSIC of minibatches): 1 alike up to rotation, "
            "near 0 unrelated; by chance it may fall a little below 0." + f" On {extras.drawn}." * bool(extras.drawn)
        )
        sections.append(Section("Likeness of layers", text, charts=_likeness_charts(subjects, extras.batches)))
    if extras.evolution:
        sections.append(Section("Feature evolution", EVOLUTION, charts=[evolution_chart(extras.evolution)]))
    if extras.results:
        cells, measured, problems = extras.results
        fold = Details("What could not be read", problems) if problems else None
        table, charts = robustness_table(cells), robustness_charts(cells)
        sections.append(Section("Robustness", f"Shown: {measured}.", table, charts=charts, fold=fold))
    extras.tell("cost")
    sections += _cost_sections(subjects, extras.timed)
    return [*sections, *(Section(f"How {s.name} was made", listing=model_history(s)) for s in subjects)]
