"""Which parameters weight decay must not touch: each layer says so itself, wherever surgery has put it."""

from torch import nn


def undecayed(model: nn.Module) -> set[str]:
    """Full names of the parameters that the model's layers exempt by a `no_weight_decay()` of their own."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if module is not model and callable(getattr(module, "no_weight_decay", None))
        for name in module.no_weight_decay()
    }
