"""What hangs on a module besides its weights, and would be lost with it: hooks, own methods, parametrizations."""

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
"""Methods that decide what a module computes, saves and loads, and that a user may have set on the instance."""


def hooks_on(module: nn.Module) -> list[str]:
    """The hooks registered on one module, of every kind that torch has, by the names of what they call.

    Hooks that a rule's `attach` puts on again (`reattached`) do not count.
    """
    kinds = [hooks for name, hooks in vars(module).items() if name.endswith("_hooks") and isinstance(hooks, dict)]
    found = [hook for hooks in kinds for hook in hooks.values()]
    return [_hook_name(hook) for hook in found if not _is_reattached(hook)]


def _is_reattached(hook: Any) -> bool:
    """Whether surgery itself has put a hook on, and puts it on again where it is needed."""
    function = getattr(hook, "hook", None) or hook
    return getattr(getattr(function, "__self__", function), "reattached", False)


def _hook_name(hook: Any) -> str:
    """What a hook calls: a function's own name, or the class of an object, out of torch's wrapping."""
    function = getattr(hook, "hook", None) or hook
    return getattr(function, "__name__", type(function).__name__)


def _own_methods(module: nn.Module) -> list[str]:
    """Names of the methods that were set on this very module in place of its class's, a patched `forward` say."""
    return [name for name in OVERRIDABLE_METHODS if name in vars(module)]


def describe_attachments(module: nn.Module) -> str | None:
    """What is attached to one module, in words, or None."""
    if hooks := hooks_on(module):
        return f"hooks ({', '.join(dict.fromkeys(hooks))})"
    if methods := _own_methods(module):
        return f"a {' and a '.join(methods)} of its own, set on the module"
    return "a parametrized weight" if is_parametrized(module) else None


def check_attached(name: str, original: nn.Module, replacement: nn.Module) -> None:
    """Raises: UserError when something attached to a module, or to a part of it, is lost in its replacement.

    It is not lost where the replacement carries the part itself: the same class under the same name, with as many
    hooks and the same methods.
    """
    carried: dict[str, nn.Module] = dict(replacement.named_modules(remove_duplicate=False))
    for path, part in original.named_modules(remove_duplicate=False):
        other = carried.get(path)
        kept = other is not None and type(other) is type(part) and _attachment_counts(other) == _attachment_counts(part)
        if not kept and (found := describe_attachments(part)):
            full = ".".join(filter(None, (name, path))) or "the model"
            raise UserError(f"{full} has {found}, which would be lost; remove them first")


def _attachment_counts(module: nn.Module) -> tuple[int, list[str]]:
    """How many hooks a module has, and which methods of its own."""
    return len(hooks_on(module)), _own_methods(module)
