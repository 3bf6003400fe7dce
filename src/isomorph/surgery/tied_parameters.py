"""Parameters that several modules share: kept so by surgery where both still have them, reported where not."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn


def tied_parameters(model: nn.Module) -> list[list[str]]:
    """The names of every parameter that two or more modules hold; a module in several places counts once."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in _parameters_by_module(model):
        found.setdefault(parameter, []).append(name)
    return [names for names in found.values() if len(names) > 1]


def _parameters_by_module(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter with the name that each module has for it."""
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{path}.{leaf}" if path else leaf, parameter


def restore_ties(model: nn.Module, before: list[list[str]]) -> tuple[str, ...]:
    """Ties again what was tied before, where it has its name, shape and values still; says what is tied no more.

    `before`: what `tied_parameters` gave of the model before its modules were replaced.
    """
    held, said = dict(_parameters_by_module(model)), []
    for names in before:
        now = [held[name] for name in names if name in held]
        shared = Counter(now).most_common(1)[0][0] if now else None
        kept = [name for name in names if name in held and shared is not None and _are_equal(held[name], shared)]
        for name in kept:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, shared)
        if lost := [name for name in names if name not in kept]:
            said.append(_describe_lost_tie(lost, kept))
    return tuple(said)


def _are_equal(a: nn.Parameter, b: nn.Parameter) -> bool:
    """Whether two parameters are alike, in values too where they have any."""
    if a is b:
        return True
    alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    return alike and (a.is_meta or torch.equal(a, b))


def _describe_lost_tie(lost: list[str], kept: list[str]) -> str:
    """A sentence about parameters that shared one tensor and do not any more."""
    verb = "was" if kept and len(lost) == 1 else "were"
    return (
        f"{_join_names(lost)} {verb} tied{f' to {_join_names(kept)}' if kept else ''}; no longer, so they train apart"
    )


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
