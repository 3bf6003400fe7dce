"""Parameters that several modules share: tie them again after surgery, and report ties that are lost."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from isomorph.surgery.where import list_names


def tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that two or more modules share; a module used twice counts once."""
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in _parameters_by_module(model):
        names_of.setdefault(parameter, []).append(name)
    return [names for names in names_of.values() if len(names) > 1]


def _parameters_by_module(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter under its name in each module that has it."""
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{path}.{leaf}" if path else leaf, parameter


def restore_ties(model: nn.Module, before: list[list[str]]) -> tuple[str, ...]:
    """Tie parameters again if name, shape and values are unchanged, and return a sentence for every lost tie.

    `before`: result of `tied_parameters` before the modules of the model were replaced.
    """
    current, messages = dict(_parameters_by_module(model)), []
    for names in before:
        candidates = [current[name] for name in names if name in current]
        shared = Counter(candidates).most_common(1)[0][0] if candidates else None
        tied = [name for name in names if name in current and shared is not None and _are_equal(current[name], shared)]
        for name in tied:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, shared)
        if lost := [name for name in names if name not in tied]:
            messages.append(_describe_lost_tie(lost, tied))
    return tuple(messages)


def _are_equal(a: nn.Parameter, b: nn.Parameter) -> bool:
    """True if two parameters have the same shape, dtype, device and values (on the meta device there are none)."""
    if a is b:
        return True
    same_form = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    return same_form and (a.is_meta or torch.equal(a, b))


def _describe_lost_tie(lost: list[str], tied: list[str]) -> str:
    """Return a sentence about parameters that no longer share one tensor."""
    verb = "was" if tied and len(lost) == 1 else "were"
    partners = f" to {list_names(tied)}" if tied else ""
    return f"{list_names(lost)} {verb} tied{partners}; they are no longer tied and train separately"
