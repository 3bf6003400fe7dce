"""The dial between two inits: a schedule that carries localities and gates from `exact` to `paper` over given steps.

A T-CNN born exact keeps the CNN's accuracy but has nothing to learn with; one born on the verge of locality has to
win the accuracy back. Annealing opens the layers while the rest of the network follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from isomorph.errors import UserError
from isomorph.layers import GPSA, AnnealedReLU, GPSA2d
from isomorph.surgery.rules.gated import (
    ATTENTION_GATING,
    CONV_GATING,
    check_gating,
    initial_gating,
)


@dataclass(frozen=True)
class Anneal:
    """Moves every gated attention layer from one (locality, gate) to another in `steps` steps, then lets go of it.

    Annealed ReLUs (VanillaNet) go from slope 0 to slope 1, the identity, in the same steps, and stay there.

    Without a `start` each layer starts exact: as the convolution (20, 15) or the attention (1, -15) it was recast from.
    Locality moves geometrically (a constant factor a step: its effect is exponential), the gate's logit linearly.
    """

    steps: int
    start: tuple[float, float] | None = None
    stop: tuple[float, float] = initial_gating("paper", None, None)

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise UserError(f"anneal steps {self.steps} must be a whole number, at least 1")
        for pair in filter(None, (self.start, self.stop)):
            check_gating(*pair)

    def at(self, step: int, exact: tuple[float, float] = CONV_GATING["exact"]) -> tuple[float, float]:
        """(locality, gate) at a step; step `steps` and later give `stop`. `exact` is the start where none is given."""
        t = min(max(step / self.steps, 0.0), 1.0)
        (locality_0, gate_0), (locality_1, gate_1) = self.start or exact, self.stop
        return locality_0 * (locality_1 / locality_0) ** t, gate_0 + t * (gate_1 - gate_0)

    def apply(self, model: nn.Module, step: int) -> None:
        """Sets the dials for a step; call it at every one. After `steps` they are the optimiser's and stay untouched.

        Raises: UserError for a model that was born gated (ConViT) where no `start` says from where.
        """
        if step <= self.steps:
            self.set_slopes(model, step)
            for layer in annealed_layers(model)[0]:
                if self.start is None and type(layer) is GPSA:
                    raise UserError("this layer was recast from nothing, so nothing is exact; give the anneal a start")
                named = CONV_GATING if isinstance(layer, GPSA2d) else ATTENTION_GATING
                layer.set_gating(*self.at(step, named["exact"]))

    def set_slopes(self, model: nn.Module, step: int) -> None:
        """Sets the slopes of annealed ReLUs after so many steps, of averaged weights too: a slope is not averaged."""
        for layer in _annealed_relus(model):
            layer.set_slope(min(max(step / self.steps, 0.0), 1.0))


def _annealed_relus(model: nn.Module) -> list[AnnealedReLU]:
    """Every annealed ReLU of a model."""
    return [module for module in model.modules() if isinstance(module, AnnealedReLU)]


def annealed_layers(model: nn.Module) -> tuple[Sequence[GPSA | GPSA2d], Sequence[AnnealedReLU]]:
    """All that an anneal moves: gated attention layers, and annealed ReLUs.

    Raises: UserError when there is neither.
    """
    relus = _annealed_relus(model)
    gated = any(isinstance(module, GPSA | GPSA2d) for module in model.modules())
    return (gpsa_layers(model) if gated or not relus else []), relus


def gpsa_layers(model: nn.Module) -> Sequence[GPSA | GPSA2d]:
    """Every gated attention layer of a model.

    Raises: UserError when there is none.
    """
    layers = [module for module in model.modules() if isinstance(module, GPSA | GPSA2d)]
    if not layers:
        raise UserError(
            "the model has no gated attention layer to anneal; recast it with ConvToGPSA or AttentionToGPSA first"
        )
    return layers
