"""The parameters that weight decay must not change, as declared by the layers themselves."""

from torch import nn


def parameters_without_decay(model: nn.Module) -> set[str]:
    """Return the full names of the parameters that layers of the model exempt by a `no_weight_decay()` method."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if module is not model and callable(getattr(module, "no_weight_decay", None))
        for name in module.no_weight_decay()
    }
