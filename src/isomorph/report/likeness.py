"""CKA between the layers of two models, from features that are averaged over the image."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.analysis import linear_cka
from isomorph.analysis.alignment import pooled
from isomorph.analysis.evolution import feature_layers, features
from isomorph.errors import UserError
from isomorph.report.charts import Matrix


def pooled_features(model: nn.Module, batches: Iterable[Any]) -> dict[str, Tensor]:
    """What each layer that timm names for the model gives, averaged over places, in eval mode.

    Shape: batches of (images (B, C, H, W), ...) -> {name: (images, channels)}
    Raises: UserError when there are no such layers or no images.
    """
    layers, like = feature_layers(model, None, 1), next(model.parameters())
    parts = [features(model, images.to(like), layers, pooled) for images, *_ in batches]
    if not parts:
        raise UserError("there are no images to compare features on")
    return {name: torch.cat([part[name].float().cpu() for part in parts]) for name in parts[0]}


def similarity_chart(title: str, names: tuple[str, str], a: dict[str, Tensor], b: dict[str, Tensor]) -> Matrix:
    """Linear CKA of every layer of one model (down) with every layer of the other (across)."""
    values = [[float(linear_cka(x, y)) for y in b.values()] for x in a.values()]
    return Matrix(title, *names, list(a), list(b), values)
