"""Surgery on models under `torch.compile`: unwrap them, and copy them uncompiled."""

import copy
from typing import Any

from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.surgery.attachments import hooks_on
from isomorph.surgery.notes import add_notes

_RECOMPILE_NOTE = "the model was compiled and its copy is not: compile the copy"
"""The note on a copy of a compiled model."""


def unwrap_compiled(model: Any) -> Any:
    """Return the model without the wrappers of `torch.compile`; a copy if a submodule is wrapped.

    Its modules have the names that they had before compilation.
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
    """True if a module is a wrapper of torch.compile, which keeps the original module as `_orig_mod`."""
    return "_orig_mod" in module._modules


def _unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrappers.

    Raises: UserError if a wrapper has hooks, which would be lost.
    """
    while (inner := module._modules.get("_orig_mod")) is not None:
        if hooks := hooks_on(module):
            raise UserError(
                f"the compiled model has hooks ({', '.join(hooks)}); register them on the model before it is compiled"
            )
        module = inner
    return module


def _is_compiled(model: nn.Module) -> bool:
    """True if the model or a submodule is compiled, by `torch.compile(model)` or by `model.compile()`."""
    # model.compile() sets a private attribute of torch's and wraps nothing
    return any(_is_wrapper(m) or m._compiled_call_impl is not None for m in model.modules())


def copy_model(model: nn.Module) -> nn.Module:
    """Return an uncompiled copy of the model, with a note if the model was compiled.

    Raises: UserError if torch cannot copy it, as with pruned layers, whose weight is the result of a computation.
    """
    new = _deepcopy(unwrap_compiled(model))
    if _is_compiled(model):
        add_notes(new, _RECOMPILE_NOTE)
    return new


def _deepcopy(model: nn.Module) -> nn.Module:
    """Return a deep copy of the model, with torch's error as a UserError."""
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        reason = f"the model cannot be copied ({' '.join(str(error).split())[:120]}); "
        if kept := _result_of_call(model):
            advice = f"{kept} keeps a result of its last call: call model.train(), and call it under torch.no_grad()"
        else:
            advice = "make pruning and weight norms permanent first (prune.remove, remove_weight_norm)"
        raise UserError(reason + advice) from None


def _result_of_call(model: nn.Module) -> str | None:
    """Return the name of a layer that stores what a call computed, as timm's LeViT does; not a weight's own value."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            held = value.values() if isinstance(value, dict) else (value,)
            computed = any(isinstance(each, Tensor) and not each.is_leaf for each in held)
            if computed and not {f"{key}_orig", f"{key}_g"} & module._parameters.keys():  # not a pruned weight
                return name or type(model).__name__
    return None
