"""How features and attention maps change from block to block (Refiner section 3.1, Fig. 2, 4 and 5)."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.analysis.attention import attention_maps
from isomorph.analysis.batches import batches, mean_over
from isomorph.analysis.cka import linear_cka
from isomorph.analysis.features import feature_layers, features
from isomorph.errors import UserError
from isomorph.surgery.where import Where

NUM_DRAWS, DRAW_SIZE = 10, 32
"""Batches that F_k is the mean of in the paper's measurement, and images of each."""


def random_draw_indices(images: int) -> Tensor:
    """Which of so many images the batches of F_k have, one batch after the other; the same at every call.

    Shape: -> (DRAWS DRAWN,)
    Raises: UserError when there are fewer images than a batch has.
    """
    if images < DRAW_SIZE:
        raise UserError(f"{images} images are too few to draw batches of {DRAW_SIZE} from; give more test images")
    generator = torch.Generator().manual_seed(0)
    return torch.cat([torch.randperm(images, generator=generator)[:DRAW_SIZE] for _ in range(NUM_DRAWS)])


def feature_evolution(model: nn.Module, data: Tensor | Iterable[Any], where: Where | None = None) -> dict[str, float]:
    """How fast features become the final ones: F_k = CKA(f_k, f_out) / CKA(f_in, f_out), mean over batches.

    f_k is what layer k gives, f_in the first layer's, f_out the last one's; 1 at the first. A network that evolves fast
    starts low and rises late: its last features are far from the first. The paper takes 10 batches of 32 images; of
    fewer images CKA is biased upwards.

    Layers are those that timm's `feature_info` names (the blocks of a ViT, the stages of a CNN), or `where`.

    Shape: a batch (B, C, H, W), or a loader of such -> {name: F_k}, in order
    Source: Refiner eq. 2
    Raises: UserError when there is no batch, a batch of one image, or fewer than two layers.
    """
    layers, count = feature_layers(model, where), 0
    sums: dict[str, float] = {}
    for batch in batches(data):
        if len(batch) < 2:
            raise UserError("CKA compares images with each other; give batches of several, 32 as the paper does")
        found = list(features(model, batch, layers).items())
        final = found[-1][1]
        first = linear_cka(found[0][1], final)
        for name, value in found:
            sums[name] = sums.get(name, 0.0) + (linear_cka(value, final) / first).item()
        count += 1
    return {name: total / count for name, total in sums.items()}


def map_similarity(model: nn.Module, data: Tensor | Iterable[Any], where: Where = "*") -> Tensor:
    """How alike the attention maps of blocks are: cosine of what a query looks at, mean over images, heads, queries.

    The maps of one image exist at a time.

    Shape: a batch (B, C, H, W), or a loader of such -> (layers, layers), NaN between layers with maps of different
    shapes
    """

    def look(image: Tensor) -> dict[str, Tensor]:
        maps = [F.normalize(found.float(), dim=-1) for found in attention_maps(model, image, where).values()]
        rows = [[_mean_cosine(a, b) for b in maps] for a in maps]
        return {"": torch.stack([torch.stack(row) for row in rows])}

    return mean_over((image for batch in batches(data) for image in batch.split(1)), look)[""]


def _mean_cosine(a: Tensor, b: Tensor) -> Tensor:
    """Mean cosine of the rows of two maps, NaN where they have different shapes."""
    return (a * b).sum(-1).mean() if a.shape == b.shape else a.new_tensor(float("nan"))
