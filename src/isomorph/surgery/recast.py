"""Surgery from model to new model: find targets, rebuild each by a rule, leave the input untouched.

*Can* a module be rebuilt? The rule answers. *Should* it be? The user answers, with `where`: one glob, several, or a
`(name, module) -> bool`. The edits made are kept on the new model (`edits(model)`), by module name, so that a
checkpoint can be rebuilt: create the base, replay the edits, load the tensors.
"""

import copy
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Protocol

from torch import nn

from isomorph.errors import UserError

Where = str | Sequence[str] | Callable[[str, nn.Module], bool]


class Rule(Protocol):
    """Rebuilds a module as another that computes the same function.

    A rule is a frozen dataclass: it prints, hashes and is stored with the model.
    """

    kind: ClassVar[type[nn.Module]]
    """What it rebuilds: modules of other types are passed over, ones of this type that it cannot take are errors."""

    atol: ClassVar[float]
    """Largest |difference| of the whole model's output that `verify` accepts by default."""

    def accepts(self, module: nn.Module) -> bool:
        """Whether the module can be rebuilt."""
        ...

    def build(self, module: nn.Module) -> nn.Module:
        """The replacement, on new parameters. Raises UserError with the reason when the module is not accepted."""
        ...


@dataclass(frozen=True)
class Edit:
    """One recast: the rule, and the names of the modules it rebuilt."""

    rule: Rule
    names: tuple[str, ...]


def edits(model: nn.Module) -> tuple[Edit, ...]:
    """The recasts that made this model, oldest first."""
    return getattr(model, "isomorph_edits", ())


def matches(where: Where, name: str, module: nn.Module) -> bool:
    """Whether `where` selects this module."""
    if callable(where):
        return bool(where(name, module))
    globs = [where] if isinstance(where, str) else where
    return any(fnmatchcase(name, glob) for glob in globs)


def nearest_names(where: Where, names: Sequence[str]) -> str:
    """A hint for a `where` that selects nothing: the module names most like it."""
    globs = [where] if isinstance(where, str) else [] if callable(where) else list(where)
    close = [name for glob in globs for name in difflib.get_close_matches(glob, names, n=3, cutoff=0.4)]
    return f"; nearest names: {', '.join(dict.fromkeys(close))}" if close else ""


def targets(model: nn.Module, rule: Rule, where: Where = "*") -> list[str]:
    """Names of the modules of the rule's kind that `where` selects, in the order of named_modules().

    Raises: UserError when there is none (naming the nearest names), when the rule cannot take one (naming it and the
    reason), or when one lies inside another.
    """
    selected = [(name, module) for name, module in model.named_modules() if matches(where, name, module)]
    if not selected:
        names = [name for name, _ in model.named_modules() if name]
        raise UserError(f"where={where!r} matches no module{nearest_names(where, names)}")
    found = [(name, module) for name, module in selected if isinstance(module, rule.kind)]
    if not found:
        kinds = ", ".join(sorted({type(module).__name__ for _, module in selected}))
        wanted, ours = rule.kind.__name__, type(rule).__name__
        raise UserError(
            f"{ours} rebuilds {wanted}, and where={where!r} matches none among {len(selected)} modules ({kinds})"
        )
    for name, module in found:
        if not rule.accepts(module):
            raise UserError(f"{name or 'the model'}: {refusal(rule, module)}")
    refuse_nested([name for name, _ in found])
    return [name for name, _ in found]


def refusal(rule: Rule, module: nn.Module) -> str:
    """Why the rule cannot take the module: what `build` says."""
    try:
        rule.build(module)
    except UserError as error:
        return str(error)
    return f"{type(rule).__name__} does not accept it"


def refuse_nested(names: Sequence[str]) -> None:
    """Raises: UserError when a target lies inside another."""
    for outer in names:
        inner = next((name for name in names if name != outer and (name.startswith(f"{outer}.") or not outer)), None)
        if inner:
            raise UserError(
                f"target {inner} lies inside target {outer or 'the model itself'}; narrow where to one of them"
            )


def adopt(replacement: nn.Module, original: nn.Module) -> nn.Module:
    """Gives the replacement the original's device, dtype, mode and requires_grad."""
    old = next(original.parameters(), None)
    if old is not None:
        replacement.to(device=old.device, dtype=old.dtype)
    frozen = old is not None and not any(p.requires_grad for p in original.parameters())
    return replacement.train(original.training).requires_grad_(not frozen)


def recast(model: nn.Module, rule: Rule, where: Where = "*") -> nn.Module:
    """A copy of the model in which every target is rebuilt by the rule; the model itself is left as it was.

    Device, dtype, train / eval mode and requires_grad are those of each target; a module used in several places is
    rebuilt once. The root may be a target.

    Raises: UserError as `targets` does, or when a target has hooks, which would be lost.
    """
    return replay(copy.deepcopy(model), Edit(rule, tuple(targets(model, rule, where))))


def replay(model: nn.Module, edit: Edit) -> nn.Module:
    """Makes one edit in place and returns the model: what loading a checkpoint does to the base it has just created."""
    for name in edit.names:
        try:
            original = model.get_submodule(name)
        except AttributeError:
            raise UserError(f"the model has no module {name}, which {type(edit.rule).__name__} is to rebuild") from None
        if original._forward_hooks or original._forward_pre_hooks or original._backward_hooks:
            raise UserError(f"{name or 'the model'} has hooks, which would be lost; remove them before recasting")
        replacement = adopt(edit.rule.build(original), original)
        if not name:
            model = replacement
            continue
        for alias in aliases(model, original):
            model.set_submodule(alias, replacement)
    model.isomorph_edits = (*edits(model), edit)  # type: ignore[assignment]
    return model


def aliases(model: nn.Module, module: nn.Module) -> list[str]:
    """Every name under which the model holds this very module."""
    return [name for name, other in model.named_modules(remove_duplicate=False) if other is module]
