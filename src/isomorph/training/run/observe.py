"""What a run watches in its model: attention and pyramids after steps; gates, spans and nonlocality after epochs."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.analysis import attention_spans, branch_similarity, centres, gates, logit_stats, nonlocality
from isomorph.errors import UserError
from isomorph.evaluation.model_data import images_on_device
from isomorph.training.parallel import unsharded
from isomorph.training.run.state import Run

MONITORED_IMAGES = 32
"""Images of a batch on which attention is monitored."""
_GATING = {"gates": gates, "spans": attention_spans, "centres": centres}


def attention_row(run: Run) -> dict[str, Any]:
    """Return what log.jsonl says of a model's attention: gating, {layer: {gates, spans, centres}}, by head; and
    nonlocality, {layer: heads}, on the first test images, if the recipe asks for it.

    Empty for a model without gated layers, or that is recast later. Three decimals are kept, two of spans and centres.

    Source: ConViT Figs. 5 and 6; T-CNN Fig. 4
    """
    model, row = run.eval_model, dict[str, Any]()
    with suppress(UserError), unsharded(model):
        found = {kind: measure(model) for kind, measure in _GATING.items()}
        row["gating"] = {
            layer: {kind: _rounded(values[layer], 3 if kind == "gates" else 2) for kind, values in found.items()}
            for layer in found["gates"]
        }
    if run.recipe.nonlocality_images:
        with suppress(UserError):
            distances = nonlocality(model, images_on_device(_first_batches(run), model))
            row["nonlocality"] = {layer: _rounded(heads, 3) for layer, heads in distances.items()}
    return row


def _rounded(values: Tensor, decimals: int) -> Any:
    """Return nested lists of rounded numbers, None for a number that is not finite."""
    if values.ndim > 1:
        return [_rounded(row, decimals) for row in values]
    return [round(x, decimals) if x - x == 0 else None for x in values.float().tolist()]


def _first_batches(run: Run) -> Iterator[Any]:
    """Yield the first test batches of this process, nonlocality_images in all."""
    left = run.recipe.nonlocality_images or 0
    for images, labels in run.test:
        yield images[:left], labels[:left]
        left -= len(images)
        if left <= 0:
            return


def monitor_row(run: Run, images: Tensor) -> dict[str, dict[str, float]]:
    """Return attention of each layer and the similarity of each pyramid's branches, in eval mode.

    Largest logit and attention are means over images, of the head with the largest. Empty for a CNN that is recast
    later. Raises: UserError for a model that has neither.
    """
    model, images = run.objective.result(run.trained), images[:MONITORED_IMAGES].to(run.runtime.device)
    row = _branches(model, images)
    try:
        stats = logit_stats(model, images)
    except UserError:
        if row or not run.progress.recast:
            return row
        raise
    return row | {
        "max_logit": {name: each.max_logit.max().item() for name, each in stats.items()},
        "max_attention": {name: each.max_attention.max().item() for name, each in stats.items()},
        "entropy": {name: each.entropy.mean().item() for name, each in stats.items()},
    }


def _branches(model: nn.Module, images: Tensor) -> dict[str, dict[str, float]]:
    """Return the mean similarity between the branches of each pyramid; nothing without any."""
    means = {}
    with suppress(UserError):
        for name, matrix in branch_similarity(model, images).items():
            pairs = torch.ones(matrix.shape[-2:], device=matrix.device).triu(1).bool()
            if pairs.any():
                means[name] = matrix[..., pairs].mean().item()
    return {"branch_similarity": means} if means else {}
