"""What each recast layer costs, next to the layer that it replaces."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.evaluation.cost import count_pass
from isomorph.evaluation.speed import measure_speeds
from isomorph.layers.eval_mode import eval_mode
from isomorph.suites.survey.rules import SurveyedRule
from isomorph.surgery import Rule, recast

TIMED_IMAGES = 8
"""Images of a batch on which layers are timed."""


@torch.no_grad()
def input_shapes(model: nn.Module, layers: Sequence[str], images: Tensor) -> dict[str, tuple[int, ...]]:
    """Return the shape of the tensor that each layer gets for these images, the batch included."""
    shapes: dict[str, tuple[int, ...]] = {}

    def recorder(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, inputs: shapes.__setitem__(name, tuple(inputs[0].shape))

    hooks = [model.get_submodule(name).register_forward_pre_hook(recorder(name)) for name in layers]
    try:
        with eval_mode(model):
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def layer_costs(
    model: nn.Module,
    layers: Sequence[str],
    rules: Sequence[SurveyedRule],
    images: Tensor,
    seconds: float,
    tick: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return a row for each layer and form of it: `layer`, `form`, `macs`, `time`.

    The form "" is the layer itself. Rules that differ only in softness are one form, under the label of the first.
    `macs` are those of one image; `time` is the median time of a pass of up to 8 images, relative to the layer itself,
    measured in turn for `seconds` each; with 0 seconds, or for a layer that does not run on its own, it is missing.

    Shape: images (B, C, H, W)
    """
    forms: dict[Rule, str] = {}
    for entry in rules:
        forms.setdefault(entry.cost_key, entry.label)
    shapes = input_shapes(model, layers, images[:TIMED_IMAGES])
    rows = []
    for name in layers:
        tick(f"cost of {name}")
        replaced = {label: recast(model, rule, where=[name]).get_submodule(name) for rule, label in forms.items()}
        rows += _rows(name, {"": model.get_submodule(name), **replaced}, shapes[name], seconds)
    return rows


def _rows(name: str, forms: dict[str, nn.Module], shape: tuple[int, ...], seconds: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"layer": name, "form": form, "macs": count_pass(layer, shape[1:]).per_image} for form, layer in forms.items()
    ]
    if seconds:
        speeds = measure_speeds(forms, shape[1:], shape[0], seconds)
        rows = [row | {"time": speeds[""].median / speeds[row["form"]].median} for row in rows]
    return rows
