"""Models under `torch.compile`: surgery takes the model inside, and its copies are not compiled."""

import copy
from typing import Any

from torch import nn

from isomorph.errors import UserError
from isomorph.surgery.attachments import hooks_on

_RECOMPILE_NOTE = "the model was compiled and its copy is not: compile the copy"
"""The note on a copy of a compiled model."""


def unwrap_compiled(model: Any) -> Any:
    """The model out of `torch.compile`: itself, what the wrapper holds, or a copy where a wrapper lies inside.

    Names of modules are then those of the model as it was before it was compiled.
    """
    if not isinstance(model, nn.Module):
        return model
    model = _unwrap(model)
    if not any(map(_is_wrapper, model.modules())):
        return model
    model = _deepcopy(model)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None:
                parent._modules[name] = _unwrap(child)
    return model


def _is_wrapper(module: nn.Module) -> bool:
    """Whether a module is torch.compile's; never its truth value, which it may not have."""
    return "_orig_mod" in module._modules


def _unwrap(module: nn.Module) -> nn.Module:
    """What torch.compile's wrappers hold. Raises: UserError when a wrapper has hooks, which would be lost."""
    while (inner := module._modules.get("_orig_mod")) is not None:
        if hooks := hooks_on(module):
            raise UserError(f"the compiled model has hooks ({', '.join(hooks)}); register them on the model inside")
        module = inner
    return module


def _is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it is compiled, by `torch.compile(model)` or by `model.compile()`."""
    return any(_is_wrapper(m) or m._compiled_call_impl is not None for m in model.modules())


def copy_model(model: nn.Module) -> nn.Module:
    """A copy of the model for surgery, not compiled; a note says so where the model was.

    Raises: UserError when torch cannot copy it: the weight of a pruned layer is the result of a computation.
    """
    new = _deepcopy(unwrap_compiled(model))
    if _is_compiled(model):
        add_notes(new, _RECOMPILE_NOTE)
    return new


def _deepcopy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        raise UserError(
            f"the model cannot be copied ({' '.join(str(error).split())[:120]}); make pruning and weight norms "
            "permanent first (prune.remove, remove_weight_norm)"
        ) from None


def notes(model: nn.Module) -> tuple[str, ...]:
    """What surgery has changed besides the form of the model, oldest first: ties that are gone, compilation."""
    return getattr(model, "isomorph_notes", ())


def add_notes(model: nn.Module, *said: str) -> None:
    """Adds sentences to the notes on a model, each once."""
    model.isomorph_notes = tuple(dict.fromkeys((*notes(model), *said)))  # type: ignore[assignment]
