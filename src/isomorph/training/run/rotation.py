"""How far one training step turns the weights of pyramids whose scale has no effect."""

from typing import Any

import torch
from torch import Tensor, nn

from isomorph.layers.pyramid import Pyramid


class Rotation:
    """Measures the angle by which a step turns the scale-free weights of each pyramid.

    Adam turns such a weight by about the learning rate in each step, whatever its gradient; the angle is its effective
    learning rate. Under fsdp the rows of this process are measured.
    """

    def __init__(self, model: nn.Module) -> None:
        pyramids = {name: module for name, module in model.named_modules() if isinstance(module, Pyramid)}
        self.weights: dict[str, list[Any]] = {
            name: [layer.weight for layer in p.scale_free_layers] for name, p in pyramids.items()
        }
        self.before: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def remember(self) -> None:
        """Store the directions of the weights before a step."""
        self.before = {name: [_directions(w).clone() for w in weights] for name, weights in self.weights.items()}

    @torch.no_grad()
    def angles(self) -> dict[str, float]:
        """Return the mean angle, in radians, between the stored rows and the present ones, and forget the stored ones.

        Layers without rows have none, and nothing has without a call of `remember` before.
        """
        found = {}
        for name, before in self.before.items():
            chords = [(_directions(w) - old).norm(dim=1) for w, old in zip(self.weights[name], before, strict=True)]
            rows = torch.cat(chords) if chords else torch.empty(0)
            if len(rows):
                found[name] = (2 * torch.asin((rows / 2).clamp(max=1))).mean()
        self.before = {}
        values = torch.stack(list(found.values())).tolist() if found else []  # one transfer from the device
        return dict(zip(found, values, strict=True))


def _directions(weight: Tensor) -> Tensor:
    """Return the rows of a weight at length 1. Shape: (out, *) -> (out, C)"""
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    return nn.functional.normalize(local.flatten(1).float(), dim=1)
