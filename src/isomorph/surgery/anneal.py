"""Schedule that moves localities and gates from their exact initialisation to the paper's during training."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from isomorph.errors import UserError
from isomorph.layers import GPSA, AnnealedReLU, GatedMap
from isomorph.layers.gated.tap_heads import TapHeads
from isomorph.surgery.rules.gated import CONV_GATING, check_gating
from isomorph.surgery.rules.gated_attention import ATTENTION_GATING
from isomorph.surgery.rules.window import WindowAttention

# Layers with gating parameters that an anneal sets.
GatedAttention = GPSA | TapHeads | GatedMap


@dataclass(frozen=True)
class Anneal:
    """Schedule of (locality, gate) over the first training steps, for every gated attention layer of a model.

    Locality changes geometrically (its effect is exponential), the logit of the gate linearly. After `steps` steps the
    optimiser trains both. Annealed ReLUs (VanillaNet) go from slope 0 to slope 1, the identity, in the same steps, and
    stay there. Attention with windows (AttentionToWindow) goes from share 1, global, to share 0, windows alone.

    Raises: UserError for a number of steps below 1, or a locality or gate out of bounds.

    >>> tcnn = iso.recast(timm.create_model("cifar_resnet20"), iso.ConvToGPSA(init="exact"), where="layer3.0.conv1")
    >>> anneal = iso.Anneal(steps=100)
    >>> anneal.at(0), anneal.at(100)
    ((20.0, 15.0), (1.0, 1.0))
    >>> anneal.apply(tcnn, step=100)  # call it before every step of training
    >>> tcnn.layer3[0].conv1.gate[0].item()
    1.0
    """

    steps: int
    """Number of training steps."""

    start: tuple[float, float] | None = None
    """(locality, gate) at step 0; by default (20, 15) for a recast convolution and (1, -15) for recast attention."""

    stop: tuple[float, float] = CONV_GATING["paper"]
    """(locality, gate) at the last step."""

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 1:
            raise UserError(
                f"steps {self.steps!r} of the anneal must be a whole number of at least 1"
            )
        for name, gating in (("start", self.start), ("stop", self.stop)):
            if gating is None and name == "start":
                continue
            if not isinstance(gating, tuple | list) or len(gating) != 2:
                raise UserError(f"{name} {gating!r} of the anneal must be (locality, gate)")
            check_gating(*gating)

    def at(
        self, step: int, exact: tuple[float, float] = CONV_GATING["exact"]
    ) -> tuple[float, float]:
        """Return (locality, gate) at a step, `stop` from the last step on; without a `start` it begins at `exact`."""
        t = min(max(step / self.steps, 0.0), 1.0)
        locality_0, gate_0 = self.start or exact
        locality_1, gate_1 = self.stop
        return locality_0 * (locality_1 / locality_0) ** t, gate_0 + t * (gate_1 - gate_0)

    def apply(self, model: nn.Module, step: int) -> None:
        """Set the gating parameters of the model for a step; after `steps` it changes nothing.

        Raises: UserError for a model that was not recast (ConViT) if there is no `start`.
        """
        if step > self.steps:
            return
        gated, others = annealed_layers(model)
        t = max(step / self.steps, 0.0)
        for other in others:
            if isinstance(other, WindowAttention):
                other.set_share(1 - t)
            else:
                other.set_slope(t)
        for layer in gated:
            if self.start is None and type(layer) is GPSA:
                raise UserError(
                    "the model was not recast, so it has no exact initialisation; give the anneal a start"
                )
            defaults = CONV_GATING if isinstance(layer, TapHeads) else ATTENTION_GATING
            layer.set_gating(*self.at(step, defaults["exact"]))


def annealed_layers(
    model: nn.Module,
) -> tuple[list[GatedAttention], list[AnnealedReLU | WindowAttention]]:
    """Return the gated layers, and annealed ReLUs and windows, of a model. Raises: UserError if there is neither."""
    gated: list[Any] = []
    others: list[Any] = []
    for module in model.modules():
        if isinstance(module, GatedAttention):
            gated.append(module)
        elif isinstance(module, AnnealedReLU | WindowAttention) and not getattr(
            module, "pruned", False
        ):
            others.append(module)
    if not (gated or others):
        raise UserError("the model has no gated attention or windows to anneal; recast it first")
    return gated, others
