"""CKA between the layers of two models on features averaged over the image, and how features evolve with depth."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from isomorph.analysis.batches import batches
from isomorph.analysis.cka import (
    CKA,
    gram_matrices,
    hsic,
    matching_batches,
    pool_features,
)
from isomorph.analysis.features import feature_layers
from isomorph.report.charts import Line, Matrix, Panel, Table, format_number


@torch.no_grad()
def pairwise_cka(models: Mapping[str, nn.Module], loaders: Mapping[str, Iterable[Any]]) -> dict[tuple[str, str], CKA]:
    """Return unbiased linear CKA between two models and within each (`iso.cka` with read=pooled), in one pass.

    Each model has its own loader of the same images, normalised for it. Only the Gram matrices of one batch are in
    memory at a time. A single model is compared with itself.

    Shape: loaders of (images (B, C, H, W), ...) -> {(model, model): (layers, layers)}
    Raises: UserError when a model has no layers that timm names, or no batch has 4 images.
    """
    names = list(models)
    pairs = dict.fromkeys([(names[0], names[-1]), *((name, name) for name in names)])
    layers = {name: feature_layers(model, None, 1) for name, model in models.items()}
    sums: dict[tuple[str, str], Any] = dict.fromkeys(pairs, 0.0)
    for several in matching_batches(zip(*(batches(loaders[name]) for name in names), strict=True)):
        found = {
            name: gram_matrices(models[name], x, layers[name], pool_features)
            for name, x in zip(names, several, strict=True)
        }
        sums = {(a, b): total + hsic(found[a], found[b]) for (a, b), total in sums.items()}
    own = {name: sums[name, name].diagonal() for name in names}
    return {
        (a, b): CKA(total / (own[a][:, None] * own[b]).sqrt(), list(layers[a]), list(layers[b]))
        for (a, b), total in sums.items()
    }


def cka_chart(names: tuple[str, str], cka: CKA) -> Matrix:
    """Return a chart of CKA between every layer of one model (down) and every layer of the other (across)."""
    a, b = names
    return Matrix(f"{a} x {b}" if a != b else f"Within {a}", a, b, cka.rows, cka.columns, cka.matrix.tolist())


Evolution = Mapping[str, Mapping[str, float]]
"""F_k of every layer by model, as `iso.analysis.feature_evolution` returns it for each."""


def evolution_chart(evolution: Evolution) -> Panel:
    """Return a chart of F_k by depth, a line for each model."""
    lines = {name: Line(range(1, len(layers) + 1), list(layers.values())) for name, layers in evolution.items()}
    return Panel("Feature evolution", "layer k", "F_k", lines)


def evolution_table(evolution: Evolution) -> Table:
    """Return a table with a row for each layer: F_k of each model, a dash where it has no layer of that name."""
    layers = dict.fromkeys(layer for values in evolution.values() for layer in values)
    rows = [[layer, *(format_number(values.get(layer)) for values in evolution.values())] for layer in layers]
    return [["F_k", *evolution], *rows]
