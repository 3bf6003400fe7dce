"""What a run watches in its model: attention and pyramids after steps, gates and spans after epochs."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.analysis import attention_spans, branch_similarity, centres, gates, logit_stats
from isomorph.errors import UserError
from isomorph.training.parallel import unsharded
from isomorph.training.run.state import Run

MONITORED_IMAGES = 32
"""Images of a batch on which attention is monitored."""


def gating_row(run: Run) -> dict[str, Any]:
    """Return what log.jsonl says of gated layers: {"gating": {layer: {gates, spans, centres}}}, by head.

    Empty for a model without gated layers, or that is recast later. Three decimals are kept, two of spans and centres.

    Source: ConViT Figs. 5 and 6; T-CNN Fig. 4
    """
    measures = {"gates": (gates, 3), "spans": (attention_spans, 2), "centres": (centres, 2)}
    model, row = run.eval_model, dict[str, Any]()
    with suppress(UserError), unsharded(model):
        for kind, (measure, decimals) in measures.items():
            for layer, values in measure(model).items():
                row.setdefault(layer, {})[kind] = _rounded(values, decimals)
    return {"gating": row} if row else {}


def _rounded(values: Tensor, decimals: int) -> Any:
    """Return nested lists of rounded numbers, None for a number that is not finite."""
    if values.ndim > 1:
        return [_rounded(row, decimals) for row in values]
    return [round(x, decimals) if x - x == 0 else None for x in values.float().tolist()]


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
