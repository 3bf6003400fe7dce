"""A penalty on how similar the attention maps of neighbouring blocks are, as Refiner's released code trains with."""

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import torch
from timm.task import ClassificationTask
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.training.recipe.objective_fields import MapSimilarityPart

MIN_LENGTH = 1e-8
"""Below this length heads count as if they had it, as in torch's cosine."""


def neighbour_similarity(maps: Sequence[Tensor], pairs: int | None = None) -> Tensor:
    """The mean over neighbours, images, queries and keys of the cosine between what their heads have there.

    mean over i < pairs, b, q, k of  a_i . a_i+1 / (|a_i| |a_i+1|),  a_i = A_i[b, :, q, k]

    A block that hands on the map it was given is as similar to the one before as can be: 1, without a gradient. For the
    backward pass no map is kept but those given.

    Shape: maps of every block in turn, each (B, H, N, N); the first `pairs` neighbours of them, or all -> ()
    Source: Refiner code
    """
    neighbours = list(islice(pairwise(maps), pairs))
    squares = {
        id(each): _squared_length(each) for pair in neighbours for each in pair
    }  # a map handed on is measured once
    total = maps[0].new_zeros((), dtype=torch.promote_types(maps[0].dtype, torch.float32))
    for first, second in neighbours:
        if first is second:
            total = total + 1
        else:
            dots = (first * second).sum(1, dtype=total.dtype)  # (B, N, N)
            total = total + (dots * (squares[id(first)] * squares[id(second)]).rsqrt()).mean()
    return total / len(neighbours)


def _squared_length(maps: Tensor) -> Tensor:
    """The squared length of the heads' vector at every query and key. Shape: (B, H, N, N) -> (B, N, N)"""
    dtype = torch.promote_types(maps.dtype, torch.float32)
    return (maps * maps).sum(1, dtype=dtype).clamp_min(MIN_LENGTH**2)


class PenalisedTask(ClassificationTask):
    """A classification task with a penalty on its network's maps: loss = criterion(f(x), y) + weight similarity.

    Without a `similarity` there is no penalty, and no map is asked for.

    Raises: UserError for a network whose blocks do not hand their maps on, or a single block.
    """

    def __init__(
        self, model: nn.Module, criterion: nn.Module, device: torch.device, similarity: MapSimilarityPart | None = None
    ) -> None:
        super().__init__(model, criterion=criterion, device=device, verbose=False)
        self.similarity = similarity
        if similarity:
            _check_model(model)

    def ask(self, input: Tensor, **arguments: Any) -> tuple[Any, Tensor | float]:
        """What the network says of images, and the penalty on the maps that it says it with."""
        if self.similarity is None:
            return self.trainable_module(input, **arguments), 0.0
        found, maps = self.trainable_module(input, hand_out=True, **arguments)
        return found, self.similarity.weight * neighbour_similarity(maps, self.similarity.pairs)

    def forward(self, input: Tensor, target: Any) -> dict[str, Tensor]:
        logits, penalty = self.ask(input)
        task = self.criterion(logits, target)
        return {"loss": task + penalty, "output": logits, "task_loss": task}


def _check_model(model: nn.Module) -> None:
    """Raises: UserError for a network whose blocks do not hand their maps on, or a single block."""
    if not getattr(model, "hands_maps_on", False):
        raise UserError(
            f"map_similarity needs blocks that hand their maps on; {type(model).__name__} has none: train a "
            "refined_vit_*_released, or a refined_vit_* with model.kwargs.share of at least 1"
        )
    if len(model.blocks) < 2:  # type: ignore[arg-type]
        raise UserError("map_similarity compares neighbouring blocks; the model has one only")
