"""A model's modules and tensors by name: listed in messages, those inside others, copied."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn


def list_names(names: Sequence[str], most: int = 3) -> str:
    """Return the first names in a row, and the number of the others."""
    shown = ", ".join(name or "the model" for name in names[:most])
    if len(names) > most:
        shown += f" and {len(names) - most} more"
    return shown


def parent_name(name: str) -> str:
    """Return the name of the module that has one as a child, "" for the model itself."""
    return name.rpartition(".")[0]


def lies_within(path: str, names: Collection[str]) -> bool:
    """Return True for the name of one of some modules, or of a module inside one."""
    while path not in names:
        if not path:
            return False
        path = parent_name(path)
    return True


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers under all their names, also those that a state_dict leaves out."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    return tensors


@torch.no_grad()
def copy_tensors(source: nn.Module, target: nn.Module) -> None:
    """Give a model the parameters and buffers of another of the same form."""
    tensors = tensors_by_name(source)
    for name, tensor in (*target.named_parameters(), *target.named_buffers()):
        tensor.copy_(tensors[name])


def outermost_modules(
    model: nn.Module, predicate: Callable[[nn.Module], bool]
) -> dict[str, nn.Module]:
    """Return the modules for which `predicate` is True and that are not inside another such module, by name."""
    outermost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        prefixes = tuple(f"{outer}.".removeprefix(".") for outer in outermost)
        if not name.startswith(prefixes) and predicate(module):
            outermost[name] = module
    return outermost
