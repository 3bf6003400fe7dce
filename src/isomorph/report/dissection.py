"""`isomorph analyze` as a page: one model, or two side by side, taken apart layer by layer."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageNetInfo
from torch import Tensor, nn

from isomorph.analysis import attention_entropy, gates, logit_stats, nonlocality, spans
from isomorph.errors import UserError
from isomorph.evaluation import count_macs, count_parameters, throughput
from isomorph.layers.mode import eval_mode
from isomorph.report.charts import Chart, Dots, Table
from isomorph.report.likeness import alignments, similarity_chart
from isomorph.report.maps import BUDGET, gather_maps
from isomorph.report.page import Section
from isomorph.report.pictures import normalised
from isomorph.report.robustness import Cells, robustness_charts, robustness_table
from isomorph.report.viewer import Picture, Seen, build_viewer
from isomorph.surgery import edits
from isomorph.surgery.recast import Where


@dataclass(frozen=True)
class Subject:
    """A model to take apart: its name on the page, how its images are made, and the recipe that trained it, if any."""

    name: str
    model: nn.Module = field(repr=False)
    config: Mapping[str, Any] = field(repr=False)
    recipe: Mapping[str, Any] | None = None


def short_name(name: str) -> str:
    """What a model is called on the page: a run's folder for its checkpoints, else the file, else the name itself."""
    path = Path(name)
    if path.suffix == ".safetensors":
        return path.parent.name if path.stem in ("model", "best") and path.parent.name else path.stem
    return path.name or name


def told_apart(names: Sequence[str]) -> list[str]:
    """Short names of models, the whole ones where the short ones are alike, numbered where these are too."""
    short = [short_name(name) for name in names]
    if len(set(short)) == len(short):
        return short
    return list(names) if len(set(names)) == len(names) else [f"{name} ({i + 1})" for i, name in enumerate(short)]


def recipe_beside(path: Path) -> dict[str, Any] | None:
    """The recipe of the run whose folder or checkpoint this is, where there is one that can be read."""
    folder = path if path.is_dir() else path.parent
    try:
        found = json.loads((folder / "recipe.json").read_text()) if path.exists() else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


@torch.no_grad()
def predictions(model: nn.Module, batch: Tensor) -> list[str]:
    """The class that the model gives each image and its probability, in words; nothing of a model without classes."""
    with eval_mode(model):
        logits = model(batch)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        return [""] * len(batch)
    shares, classes = logits.float().softmax(-1).max(-1)
    named = ImageNetInfo().index_to_description if logits.shape[1] == 1000 else "class {}".format
    return [f"{named(int(c))} ({float(p):.0%})" for p, c in zip(shares, classes, strict=True)]


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


def dial_charts(subjects: Sequence[Subject]) -> list[Chart]:
    """Gates and spans of the models that have gated attention."""
    opened = {s.name: optional(gates, s.model) for s in subjects}
    wide = {s.name: optional(spans, s.model) for s in subjects}
    return [
        *dots("Gates: 1 looks at places, 0 at content", "sigma(gate)", opened, 1.0),
        *dots("Spans: how wide a head looks", "1 / locality", wide),
    ]


def reach_charts(subjects: Sequence[Subject], batches: Mapping[str, Tensor], layers: Where | None) -> list[Chart]:
    """Nonlocality, entropy and largest logit of the layers that are looked at, drawn or not (windows are not)."""
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


def cost_table(subjects: Sequence[Subject], timed: bool) -> Table:
    """Parameters, MACs and, if wanted, images a second of each model."""
    head = ["", "input", "parameters", "M MACs an image", *["images / s, batch 32"] * timed]
    rows = []
    for s in subjects:
        size = tuple(s.config["input_size"])
        speed = [f"{throughput(s.model, size):,.0f}"] * timed if timed else []
        macs = f"{count_macs(s.model, size) / 1e6:,.1f}"
        rows.append([s.name, " x ".join(map(str, size)), f"{count_parameters(s.model):,}", macs, *speed])
    return [head, *rows]


def story(subject: Subject) -> str:
    """What is recorded of how the model was made: its base, the edits in order, the recipe."""
    base = getattr(subject.model, "isomorph_base", None) or {
        "name": (getattr(subject.model, "pretrained_cfg", None) or {}).get("architecture", type(subject.model).__name__)
    }
    lines = ["base: " + json.dumps(base, default=str)]
    for edit in edits(subject.model):
        names = ", ".join(edit.names[:6]) + ", ..." * (len(edit.names) > 6)
        lines.append(f"edit: {edit.rule} on {len(edit.names)} modules: {names}")
    lines += ["edit: none"] * (len(lines) == 1)
    if subject.recipe:
        lines.append("recipe: " + json.dumps(subject.recipe, indent=2, default=str))
    return "\n".join(lines)


def map_section(seen: Sequence[Seen], pictures: Sequence[Picture], problems: Sequence[str], budget: int) -> Section:
    """The section that the page opens with: the viewer, or why there is none."""
    viewer = build_viewer(seen, pictures, budget)
    if viewer is None and problems:
        return Section("Attention", " ".join(["No attention layer can be drawn.", *problems]))
    if viewer is None:
        text = (
            "No attention layer whose map is known: this is a network without attention, or with a kind that isomorph "
            "does not read. Recast it (isomorph recast) to have something to look at."
        )
        return Section("Attention", text)
    text = (
        "Point at a patch of the image, touch it, or use the arrow keys: every head shows what it looks at from there."
    )
    return Section("Attention", " ".join([text, viewer.note, *problems]), viewer=viewer)


@dataclass(frozen=True)
class Extras:
    """What a page shows beside the maps when it is given: batches of images for CKA by model, robustness results."""

    batches: Mapping[str, Iterable[Any]] = field(default_factory=dict)
    results: Mapping[str, Cells] = field(default_factory=dict)
    problems: Sequence[str] = ()
    timed: bool = False
    budget: int = BUDGET


def likeness_charts(subjects: Sequence[Subject], batches: Mapping[str, Iterable[Any]]) -> list[Chart]:
    """CKA between the layers of the two models and within each. Raises: UserError when there are no features."""
    found = alignments({s.name: s.model for s in subjects}, batches)
    return [similarity_chart(names, matrix) for names, matrix in found.items()]


def dissect(
    subjects: Sequence[Subject], pictures: Sequence[Picture], layers: Where | None = None, extras: Extras | None = None
) -> list[Section]:
    """All sections of the page of one or two models and some images."""
    extras = extras or Extras()
    seen: list[Seen] = []
    batches: dict[str, Tensor] = {}
    problems: list[str] = []
    for s in subjects:
        batches[s.name] = normalised(pictures, dict(s.config)).to(next(s.model.parameters()))
        maps, said = gather_maps(s.model, batches[s.name], layers)
        opened = {name: values.tolist() for name, values in optional(gates, s.model).items()}
        seen.append(Seen(s.name, maps, opened, predictions(s.model, batches[s.name])))
        problems += [f"{s.name}: {problem}." for problem in said]
    sections = [map_section(seen, pictures, problems, extras.budget)]
    if charts := dial_charts(subjects):
        sections.append(
            Section("Gates and spans", "A dot is a head; the line goes through the means of the layers.", charts=charts)
        )
    if charts := reach_charts(subjects, batches, layers):
        sections.append(
            Section(
                "How far, how sharp",
                "On the images above. A dot is a head; the line goes through the means of the layers.",
                charts=charts,
            )
        )
    if extras.batches:
        text = (
            "Linear CKA of features averaged over the image, unbiased (HSIC of minibatches): 1 alike up to rotation, "
            "near 0 unrelated; by chance it may fall a little below 0."
        )
        sections.append(Section("Likeness of layers", text, charts=likeness_charts(subjects, extras.batches)))
    if extras.results:
        table, charts = robustness_table(extras.results), robustness_charts(extras.results)
        sections.append(Section("Robustness", " ".join(extras.problems), table, charts=charts))
    sections.append(Section("Cost", "1 MAC = 2 FLOPs, attention included.", cost_table(subjects, extras.timed)))
    return [*sections, *(Section(f"How {s.name} was made", listing=story(s)) for s in subjects)]
