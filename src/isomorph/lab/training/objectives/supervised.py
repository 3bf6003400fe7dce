"""The loss of labels, and the penalty of Refiner's released code on similar attention maps of neighbouring blocks."""

from collections.abc import Sequence
from itertools import chain, islice, pairwise
from typing import Any

import torch
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from timm.task import ClassificationTask
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.lab.evaluation.classes import named_logits
from isomorph.lab.training.recipe.fields import AugmentPart, MapSimilarityPart
from isomorph.lab.training.task import Losses

# Lower bound on the lengths in the cosine, as in torch.nn.functional.cosine_similarity.
MIN_LENGTH = 1e-8


class SigmoidLoss(BinaryCrossEntropy):
    """Sigmoid cross-entropy summed over classes, in float32 at least: in bfloat16 a target of 1 - 1e-4 would be 1."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(x.to(torch.promote_types(x.dtype, torch.float32)), target)


def build_criterion(augment: AugmentPart, loss: str = "softmax") -> nn.Module:
    """Return softmax or sigmoid cross-entropy, with label smoothing, or soft targets for mixed images."""
    if loss == "sigmoid":
        return SigmoidLoss(augment.smoothing, sum_classes=True)
    if augment.mixes:
        return SoftTargetCrossEntropy()
    return nn.CrossEntropyLoss(label_smoothing=augment.smoothing)


def neighbour_similarity(maps: Sequence[Tensor], pairs: int | None = None) -> Tensor:
    """Return the mean cosine similarity of the attention maps of neighbouring blocks, over the heads of each entry.

    mean over i < pairs, b, q, k of  a_i . a_i+1 / (|a_i| |a_i+1|),  a_i = A_i[b, :, q, k]

    A block that passes on the map of the block before it has similarity 1, without a gradient. Only the given maps are
    saved for the backward pass. `pairs` is the number of neighbouring pairs to compare, by default all.

    Shape: maps of the blocks in order, each (B, nh, N, N) -> ()
    Source: Refiner code
    """
    neighbours = list(islice(pairwise(maps), pairs))
    # keyed by identity, so that a map that is passed on is measured once
    squares = {id(own): _squared_length(own) for own in chain.from_iterable(neighbours)}
    total = maps[0].new_zeros((), dtype=torch.promote_types(maps[0].dtype, torch.float32))
    for first, second in neighbours:
        if first is second:
            total = total + 1
        else:
            dots = (first * second).sum(1, dtype=total.dtype)  # (B, N, N)
            lengths = squares[id(first)] * squares[id(second)]
            total = total + (dots * lengths.rsqrt()).mean()
    return total / len(neighbours)


def _squared_length(maps: Tensor) -> Tensor:
    """Return the squared norm over heads, at least MIN_LENGTH^2. Shape: (B, nh, N, N) -> (B, N, N)"""
    dtype = torch.promote_types(maps.dtype, torch.float32)
    return (maps * maps).sum(1, dtype=dtype).clamp_min(MIN_LENGTH**2)


class PenalisedLoss(ClassificationTask):
    """Classification, and with `similarity` a penalty: loss = criterion(f(x), y) + weight similarity.

    Raises: UserError for a model whose blocks do not pass their maps on, or with a single block.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module,
        device: torch.device,
        similarity: MapSimilarityPart | None = None,
    ) -> None:
        super().__init__(model, criterion=criterion, device=device, verbose=False)
        self.similarity = similarity
        if similarity and not getattr(model, "shares_maps", False):
            raise UserError(
                f"map_similarity needs blocks that pass their maps on, and {type(model).__name__} has none; train a "
                "refined_vit_*_released, or a refined_vit_* with model.kwargs.share of at least 1"
            )
        if similarity and len(model.blocks) < 2:  # type: ignore[arg-type]
            raise UserError("map_similarity needs at least two blocks; the model has one")

    def predict(self, input: Tensor, **arguments: Any) -> tuple[Any, Tensor | float]:
        """Return the output of the model for images, and the penalty on its attention maps."""
        if self.similarity is None:
            return named_logits(self.trainable_module(input, **arguments)), 0.0
        output, maps = self.trainable_module(input, return_maps=True, **arguments)
        return output, self.similarity.weight * neighbour_similarity(maps, self.similarity.pairs)

    def forward(self, input: Tensor, target: Any) -> Losses:
        logits, penalty = self.predict(input)
        loss = self.criterion(logits, target)
        return {"loss": loss + penalty, "output": logits, "task_loss": loss}
