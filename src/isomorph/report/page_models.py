"""The models of a page: what they are called, how they were made, what they see and say."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageNetInfo
from torch import Tensor, nn

from isomorph.layers.eval_mode import eval_mode
from isomorph.surgery import edits

GUESSES = 3
"""Classes of a prediction that are named."""


@dataclass(frozen=True)
class PageModel:
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


def unique_names(names: Sequence[str]) -> list[str]:
    """Short names of models, the whole ones where the short ones are alike, numbered where these are too."""
    short = [short_name(name) for name in names]
    if len(set(short)) == len(short):
        return short
    return list(names) if len(set(names)) == len(names) else [f"{name} ({i + 1})" for i, name in enumerate(short)]


def find_recipe(path: Path) -> dict[str, Any] | None:
    """The recipe of the run whose folder or checkpoint this is, where there is one that can be read."""
    folder = path if path.is_dir() else path.parent
    try:
        found = json.loads((folder / "recipe.json").read_text()) if path.exists() else None
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def framing_text(config: Mapping[str, Any]) -> str:
    """How a picture becomes what the model sees, in words, from its data config."""
    height, width = config["input_size"][-2:]
    rows, columns = (math.floor(side / config["crop_pct"]) for side in (height, width))
    within = {
        "squash": f"stretched to {rows} x {columns} px whatever its shape",
        "border": f"fitted into {rows} x {columns} px, the rest filled",
    }.get(config["crop_mode"], f"resized to cover {rows} x {columns} px")
    cut = "" if (rows, columns) == (height, width) else f", then its middle {height} x {width} px cut out"
    if config["crop_mode"] == "center" and not cut:
        cut = ", then its middle cut out"
    return f"Each picture is {within} ({config['interpolation']}){cut}: that is all a model sees of it."


def _class_namer(model: nn.Module, classes: int) -> Callable[[int], str]:
    """Names of the model's classes: those of its weights (wnids in English), ImageNet's for 1000, or numbers."""
    known = (getattr(model, "pretrained_cfg", None) or {}).get("label_names") or ()
    imagenet = ImageNetInfo()
    if len(known) == classes:
        wnids = set(imagenet.label_names())
        return lambda label: (
            _first_name(imagenet.label_name_to_description(known[label]))
            if known[label] in wnids
            else str(known[label])
        )
    if classes == 1000:
        return lambda label: _first_name(imagenet.index_to_description(label))
    return "class {}".format


def _first_name(description: str) -> str:
    """The first of the names of a class of ImageNet."""
    return description.split(",")[0]


def format_percent(share: float) -> str:
    """A probability in per cent, small ones with one decimal."""
    return f"{share:.0%}" if share >= 0.095 else f"{share:.1%}" if share >= 0.0005 else "<0.1%"


@torch.no_grad()
def prediction_texts(model: nn.Module, batch: Tensor) -> list[str]:
    """The likeliest classes of each image and their probabilities, in words; nothing of a model without classes."""
    with eval_mode(model):
        logits = model(batch)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        return [""] * len(batch)
    name = _class_namer(model, logits.shape[1])
    shares, classes = logits.float().softmax(-1).topk(min(GUESSES, logits.shape[1]))
    return [
        ", ".join(f"{name(label)} ({percent(share)})" for share, label in zip(p, c, strict=True))
        for p, c in zip(shares.tolist(), classes.tolist(), strict=True)
    ]


def model_history(subject: PageModel) -> str:
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
