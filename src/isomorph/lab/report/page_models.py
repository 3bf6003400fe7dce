"""The models of a page: their names, histories and predictions, and what is measured of their attention."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isomorph.analysis import attention_entropy, nonlocality
from isomorph.json_values import JsonObject
from isomorph.lab.data.loaders import ImageConfig
from isomorph.lab.evaluation.classes import first_logits, likeliest_classes
from isomorph.layers.modes import eval_mode
from isomorph.spec import spec_of
from isomorph.surgery import edits
from isomorph.surgery.calls import Inputs, run_model
from isomorph.surgery.rule import record

# Classes that a prediction names.
PREDICTED_CLASSES = 3


class HeadMeasure(NamedTuple):
    """A number of each head, or of what `each` names: `of(model, ...)` returns {layer: (heads,)}.

    `limit` is the top of its axis.
    """

    title: str
    unit: str
    of: Callable[..., dict[str, Tensor]]
    limit: float | None = None
    each: str = "head"


# What is measured of any attention, by its name in `isomorph compare --along`.
MEASURES = {
    "nonlocality": HeadMeasure("Nonlocality", "grid steps", nonlocality),
    "entropy": HeadMeasure("Attention entropy", "nats", attention_entropy),
}


@dataclass(frozen=True)
class PageModel:
    """A model on the page: its name, its data config (as timm resolves it), and the recipe that trained it, if any.

    `inputs` returns what the model reads for a batch of normalised images (B, C, H, W), where that is not the batch
    itself: arguments by name for CLIP, patches and their grids for SigLIP2.

    >>> cnn = timm.create_model("cifar_resnet20").eval()
    >>> iso.report.PageModel("CNN", cnn, timm.data.resolve_data_config(model=cnn)).name
    'CNN'
    """

    name: str
    model: nn.Module = field(repr=False)
    config: ImageConfig = field(repr=False)
    recipe: JsonObject | None = None
    inputs: Callable[[Tensor], Inputs] | None = field(default=None, repr=False)

    def read(self, images: Tensor) -> Inputs:
        """Return what the model reads for a batch of normalised images. Shape: (B, C, H, W)"""
        if self.inputs is None:
            return images
        return self.inputs(images)


def short_name(name: str) -> str:
    """Return the run's folder for a checkpoint of a run, the stem of another checkpoint, else the name itself."""
    path = Path(name)
    if path.suffix == ".safetensors":
        if path.stem in ("model", "best") and path.parent.name:
            return path.parent.name
        return path.stem
    return path.name or name


def unique_names(names: Sequence[str]) -> list[str]:
    """Return the short names of models; the whole names if these are equal, numbered if those are equal too."""
    short = [short_name(name) for name in names]
    if len(set(short)) == len(short):
        return short
    if len(set(names)) == len(names):
        return list(names)
    return [f"{name} ({i + 1})" for i, name in enumerate(short)]


def framing_text(config: ImageConfig) -> str:
    """Return a sentence on how images are resized and cropped, from a model's data config."""
    height, width = config["input_size"][-2:]
    rows = math.floor(height / config["crop_pct"])
    columns = math.floor(width / config["crop_pct"])
    mode = config["crop_mode"]
    if mode == "squash":
        resized = f"stretched to {rows} x {columns} px"
    elif mode == "border":
        resized = f"resized to fit {rows} x {columns} px and padded"
    else:
        resized = f"resized to cover {rows} x {columns} px"
    crop = ""
    if (rows, columns) != (height, width):
        crop = f", then cropped to its central {height} x {width} px"
    elif mode == "center":
        crop = ", then cropped to its centre"
    return f"Each image is {resized} ({config['interpolation']}){crop}."


def format_percent(share: float) -> str:
    """Return a probability in per cent, small ones with one decimal."""
    if share >= 0.095:
        return f"{share:.0%}"
    if share >= 0.0005:
        return f"{share:.1%}"
    return "<0.1%"


@torch.no_grad()
def model_logits(model: nn.Module, batch: Inputs) -> Tensor | None:
    """Return a model's `first_logits` in eval mode; None for a model without classes. Shape: -> (B, classes)"""
    if getattr(model, "num_classes", None) == 0:
        return None
    with eval_mode(model):
        logits = first_logits(run_model(model, batch))
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        return None
    return logits.float().cpu()


def name_classes(model: nn.Module, logits: Tensor) -> list[str]:
    """Return the most likely classes of each image with their probabilities. Shape: logits (B, classes)"""
    texts = []
    for classes in likeliest_classes(model, logits, PREDICTED_CLASSES):
        words = [f"{name} ({format_percent(share)})" for name, share in classes]
        texts.append(", ".join(words))
    return texts


def register_count(model: Any) -> int:
    """Return how many of the tokens before the patches are registers, the last ones: timm's, or transformers'."""
    config = getattr(model, "config", None)
    in_transformers = getattr(config, "num_register_tokens", 0)
    return getattr(model, "num_reg_tokens", in_transformers)


def model_history(model: PageModel) -> str:
    """Return what is recorded of how the model was made: its base, its edits in order, its recipe."""
    base = record(model.model).base
    if not base:
        base = {"name": spec_of(model.model).name or type(model.model).__name__}
    lines = ["base: " + json.dumps(base, default=str)]
    for edit in edits(model.model):
        names = ", ".join(edit.names[:6])
        if len(edit.names) > 6:
            names += f", ... ({len(edit.names)} in all)"
        lines.append(f"edit: {edit.rule} on {names}")
    if len(lines) == 1:
        lines.append("edit: none")
    if model.recipe:
        lines.append("recipe: " + json.dumps(model.recipe, indent=2, default=str))
    return "\n".join(lines)
