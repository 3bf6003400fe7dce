"""Names of a model's modules: listed in messages, and those inside others."""

from collections.abc import Callable, Collection, Sequence

from torch import nn


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
