"""Hooks, patched methods and parametrizations of a module, which would be lost when it is replaced."""

from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from isomorph.errors import UserError

OVERRIDABLE_METHODS = (
    "forward",
    "_conv_forward",
    "state_dict",
    "load_state_dict",
    "_save_to_state_dict",
    "_load_from_state_dict",
)
"""Methods that decide what a module computes, saves and loads, and that a user may have patched on the instance."""


def hooks_on(module: nn.Module) -> list[str]:
    """Return the names of the hooks on one module, of all of torch's kinds.

    Hooks that a rule's `attach` registers again (`reattached`) are left out.
    """
    # torch has no public list of hooks: each kind is a dict in a private attribute that ends in _hooks
    kinds = [hooks for name, hooks in vars(module).items() if name.endswith("_hooks") and isinstance(hooks, dict)]
    hooks_of_all_kinds = [hook for hooks in kinds for hook in hooks.values()]
    return [_hook_name(hook) for hook in hooks_of_all_kinds if not _is_reattached(hook)]


def _is_reattached(hook: Any) -> bool:
    """True if surgery registered the hook itself and registers it again where it is needed."""
    function = getattr(hook, "hook", None) or hook
    return getattr(getattr(function, "__self__", function), "reattached", False)


def _hook_name(hook: Any) -> str:
    """Return the name of a hook's function, or the class of a hook object, without torch's wrapper."""
    function = getattr(hook, "hook", None) or hook
    return getattr(function, "__name__", type(function).__name__)


def _own_methods(module: nn.Module) -> list[str]:
    """Return the names of the methods that are set on the instance instead of the class, like a patched `forward`."""
    return [name for name in OVERRIDABLE_METHODS if name in vars(module)]


def describe_attachments(module: nn.Module) -> str | None:
    """Return a description of the hooks, patched methods or parametrization of one module, or None."""
    if hooks := hooks_on(module):
        return f"hooks ({', '.join(dict.fromkeys(hooks))})"
    if methods := _own_methods(module):
        return f"a patched {' and a patched '.join(methods)}"
    return "a parametrized weight" if is_parametrized(module) else None


def check_attached(name: str, original: nn.Module, replacement: nn.Module) -> None:
    """Check that no hook, patched method or parametrization of a module is lost in its replacement.

    It is not lost if the replacement has the submodule itself: the same class under the same name, with as many hooks
    and the same patched methods.

    Raises: UserError if one would be lost.
    """
    carried: dict[str, nn.Module] = dict(replacement.named_modules(remove_duplicate=False))
    for path, part in original.named_modules(remove_duplicate=False):
        other = carried.get(path)
        carries = (
            other is not None and type(other) is type(part) and _attachment_counts(other) == _attachment_counts(part)
        )
        if not carries and (attachments := describe_attachments(part)):
            full = ".".join(filter(None, (name, path))) or "the model"
            raise UserError(f"{full} has {attachments}, which would be lost; remove them first")


def _attachment_counts(module: nn.Module) -> tuple[int, list[str]]:
    """Return the number of hooks of a module and the names of its patched methods."""
    return len(hooks_on(module)), _own_methods(module)
