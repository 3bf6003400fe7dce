"""Surgery from model to new model: find targets, rebuild each by a rule, leave the input untouched.

*Can* a module be rebuilt? The rule answers. *Should* it be? The user answers, with `where`: one glob, several, or a
`(name, module) -> bool`. The edits made are kept on the new model (`edits(model)`), by module name, so that a
checkpoint can be rebuilt: create the base, replay the edits, load the tensors.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Protocol

from torch import nn

from isomorph.errors import UserError
from isomorph.surgery.attachments import check_attached
from isomorph.surgery.compiled import add_notes, copy_model, notes, unwrap_compiled
from isomorph.surgery.joint_projections import JointPart, find_target, joint_parts
from isomorph.surgery.layer_checks import first_altered_part
from isomorph.surgery.tied_parameters import restore_ties, tied_parameters

Where = str | Sequence[str] | Callable[[str, nn.Module], bool]


class Rule(Protocol):
    """Rebuilds a module as another that computes the same function.

    A rule is a frozen dataclass: it prints, hashes and is stored with the model. With a `kind: ClassVar` too, a type
    or several, modules that it cannot take are an error if of that kind and passed over in silence if not. With
    `within(model) -> Rule` it completes itself with what a module alone does not tell; with `attach(model)` it ties
    its replacements to the rest of the model, and unties what a revert has left idle. With `takes_parts = True` globs
    may name the parts of joint projections (`blocks.*.attn.v` of a `qkv`), which the rule gets as a `JointPart`.
    """

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
    """One recast: the rule, and the names of the modules, or parts of joint projections, that it rebuilt."""

    rule: Rule
    names: tuple[str, ...]


def keeps_function(rule: Rule) -> bool:
    """Return True if the rule promises the same function; one with the field `init` says so itself."""
    return getattr(rule, "keeps_function", True)


def edits(model: nn.Module) -> tuple[Edit, ...]:
    """The recasts that made this model, oldest first."""
    return getattr(model, "isomorph_edits", ())


def edits_since(model: nn.Module, base: nn.Module) -> tuple[Edit, ...]:
    """The recasts that made the model from `base`."""
    return edits(model)[len(edits(base)) :]


def matches_where(where: Where, name: str, module: nn.Module) -> bool:
    """Whether `where` selects this module."""
    if callable(where):
        return bool(where(name, module))
    globs = [where] if isinstance(where, str) else where
    return any(fnmatchcase(name, glob) for glob in globs)


_Target = nn.Module | JointPart


def _unique_targets(pairs: Iterable[tuple[str, _Target]]) -> Iterable[tuple[str, _Target]]:
    """Every module once, under the first name given."""
    seen: set[_Target] = set()
    for name, module in pairs:
        if module not in seen:
            seen.add(module)
            yield name, module


def outermost_modules(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """The modules that are wanted and lie inside no other such, by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if not inside and wanted(module):
            found[name] = module
    return found


def _bind_rule(rule: Rule, model: nn.Module) -> Rule:
    """The rule with what it has to know of the model, where it asks."""
    within = getattr(rule, "within", None)
    return within(model) if within else rule


def _attach_rule(rule: Rule, model: nn.Module) -> None:
    """Ties the rule's replacements to the model, or unties what is not needed any more, where the rule does that."""
    if hook := getattr(rule, "attach", None):
        hook(model)


def describe_where(where: Where) -> str:
    """`where` for a message."""
    return f"the predicate {getattr(where, '__name__', where)}" if callable(where) else f"where={where!r}"


def _check_arguments(rule: Rule, where: Where) -> None:
    """Raises: UserError when the rule is no rule, or `where` nothing that selects."""
    if isinstance(rule, type) or not callable(getattr(rule, "build", None)):
        raise UserError(f"{rule!r} is not a rule; give an instance, like ConvToGPSA(init='exact')")
    if not callable(where) and not (isinstance(where, str) or (isinstance(where, Sequence) and where)):
        raise UserError(f"where={where!r} selects nothing; give a glob, several, or a (name, module) -> bool")


def nearest_names(where: Where, names: Sequence[str]) -> str:
    """A hint for a `where` that selects nothing: the module names most like it."""
    globs = [where] if isinstance(where, str) else [] if callable(where) else list(where)
    close = [name for glob in globs for name in difflib.get_close_matches(glob, names, n=3, cutoff=0.4)]
    return f"; nearest names: {', '.join(dict.fromkeys(close))}" if close else ""


def targets(model: nn.Module, rule: Rule, where: Where = "*") -> list[str]:
    """Names of the modules of the rule's kind that `where` selects, in the order of named_modules().

    For a rule that takes them, globs select parts of joint projections too, which follow, unless all of the layer is
    selected.

    Raises: UserError when there is none (naming the nearest names), when the rule cannot take one (naming it and the
    reason), or when one lies inside another.
    """
    _check_arguments(rule, where)
    _check_model(model)
    model = unwrap_compiled(model)
    given, rule = rule, _bind_rule(rule, model)
    named: list[tuple[str, Any]] = list(model.named_modules(remove_duplicate=False))
    if getattr(given, "takes_parts", False) and not callable(where):
        named += joint_parts(model).items()
    for glob in [] if callable(where) or isinstance(where, str) else where:
        if not any(fnmatchcase(name, glob) for name, _ in named):
            raise UserError(f"{glob!r} in where matches no module{nearest_names(glob, [n for n, _ in named if n])}")
    selected = _without_covered(list(_unique_targets((n, m) for n, m in named if matches_where(where, n, m))))
    kind = _rule_kinds(rule)
    if not selected:
        names = [name for name, _ in named if name]
        raise UserError(f"{describe_where(where)} matches no module{nearest_names(where, names)}")
    found = [(n, m) for n, m in selected if isinstance(m, (*kind, JointPart)) or rule.accepts(m)]
    if not found:
        wanted, ours = " and ".join(k.__name__ for k in kind) or "other modules", type(given).__name__
        seen = ", ".join(sorted({_class_name(type(module), wanted) for _, module in selected}))
        raise UserError(
            f"{ours} rebuilds {wanted}, and {describe_where(where)} matches none among {len(selected)} modules ({seen})"
        )
    for name, module in found:
        if not rule.accepts(module):
            raise UserError(f"{name or 'the model'}: {_rejection_reason(rule, module)}")
    _check_not_nested([name for name, _ in found])
    return [name for name, _ in found]


def _without_covered(selected: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The selection without parts of joint projections that are selected as a whole."""
    modules = {module for _, module in selected}
    return [(n, m) for n, m in selected if not (isinstance(m, JointPart) and m.joint in modules)]


def _check_model(model: object) -> None:
    """Raises: UserError when it is not a model."""
    if not isinstance(model, nn.Module):
        raise UserError(f"{model!r} is not a model; create it first, with timm.create_model")


def _rule_kinds(rule: Rule) -> tuple[type[nn.Module], ...]:
    """The rule's `kind`, none or several."""
    kind = getattr(rule, "kind", ())
    return kind if isinstance(kind, tuple) else (kind,)


def _class_name(kind: type, wanted: str) -> str:
    """A module's class, with where it comes from if only that tells it from the wanted one."""
    return f"another {kind.__module__}.{kind.__name__}" if kind.__name__ == wanted else kind.__name__


def _rejection_reason(rule: Rule, module: Any) -> str:
    """Why the rule cannot take the module: what `build` says."""
    try:
        rule.build(module)
    except UserError as error:
        return str(error)
    return f"{type(rule).__name__} does not accept it"


def _check_not_nested(names: Sequence[str]) -> None:
    """Raises: UserError when a target lies inside another."""
    for outer in names:
        inner = next((name for name in names if name != outer and (name.startswith(f"{outer}.") or not outer)), None)
        if inner:
            raise UserError(
                f"target {inner} lies inside target {outer or 'the model itself'}; narrow where to one of them"
            )


def match_original(replacement: nn.Module, original: nn.Module) -> nn.Module:
    """Gives the replacement the original's device, dtype, mode and requires_grad (parameter by parameter where it can).

    A replacement of the original's own type is the original, altered: it has them already. Where the original has
    several dtypes, what it carries over keeps its own.
    """
    if type(replacement) is type(original):
        return replacement
    old = dict(original.named_parameters())
    if old:
        first = next(iter(old.values()))
        mixed = any(parameter.dtype != first.dtype for parameter in old.values())
        replacement.to(device=first.device, dtype=None if mixed else first.dtype)
    trained = not old or any(parameter.requires_grad for parameter in old.values())
    for name, parameter in replacement.named_parameters():
        parameter.requires_grad_(old[name].requires_grad if name in old else trained and parameter.requires_grad)
    return replacement.train(original.training)


def recast(model: nn.Module, rule: Rule, where: Where = "*") -> nn.Module:
    """A copy of the model in which every target is rebuilt by the rule; the model itself is left as it was.

    Device, dtype, train / eval mode and requires_grad are those of each target; a module used in several places is
    rebuilt once. The root may be a target. Of a compiled model (`torch.compile`) the model inside is recast, under its
    own names; the copy is not compiled.

    Hooks and methods set on a module stay where the replacement carries that module over, and are an error where it
    does not. Parameters that modules share (tied weights) stay shared where the replacement has the parameter under
    the same name, with the same shape and values; where it has not, they train apart, and `notes` of the copy says so.

    Raises: UserError as `targets` does, or when hooks or methods of a target's own would be lost.
    """
    edit = Edit(rule, tuple(targets(model, rule, where)))
    return replay(copy_model(model), edit)


def replay(model: nn.Module, edit: Edit) -> nn.Module:
    """Makes one edit in place and returns the model: what loading a checkpoint does to the base it has just created."""
    rule, tied = _bind_rule(edit.rule, model), tied_parameters(model)
    for name in edit.names:
        target: Any = find_target(model, name)
        if target is None:
            raise UserError(f"the model has no module {name}, which {type(edit.rule).__name__} is to rebuild")
        original, own = (target.joint, target.joint_name) if isinstance(target, JointPart) else (target, name)
        try:
            replacement = rule.build(target)
        except UserError as error:
            raise UserError(f"{name or 'the model'}: {error}") from None
        model = _replace_module(model, own, original, match_original(replacement, original))
    add_notes(model, *restore_ties(model, tied))
    model.isomorph_edits = (*edits(model), edit)  # type: ignore[assignment]
    for made in edits(model):
        _attach_rule(made.rule, model)
    return model


def _replace_module(model: nn.Module, name: str, original: nn.Module, replacement: nn.Module) -> nn.Module:
    """Puts the replacement in every place of the original; gives the model, or the replacement of all of it.

    Raises: UserError when hooks or methods set on the original, or on a part of it, would be lost.
    """
    check_attached(name, original, replacement)
    if not name:
        add_notes(replacement, *notes(model))
        return replacement
    for alias in _module_names(model, original):
        model.set_submodule(alias, replacement)
    return model


def _module_names(model: nn.Module, module: nn.Module) -> list[str]:
    """Every name under which the model holds this very module."""
    return [name for name, other in model.named_modules(remove_duplicate=False) if other is module]


_REVERT_METHODS = ("to_conv", "to_attention")
"""Methods of recast layers that give the original form while the layer still has its function."""


def _revert_method(layer: nn.Module) -> Callable[[float], nn.Module] | None:
    """The layer's conditional way back, if it has one."""
    return next((getattr(layer, name) for name in _REVERT_METHODS if callable(getattr(layer, name, None))), None)


def revert(model: nn.Module, where: Where = "*", atol: float = 1e-3) -> nn.Module:
    """A copy of the model in which every recast layer with a conditional way back (WAYS_BACK) has taken it.

    The edits that made those layers are taken off the record, so the model is saved as what it is again.

    Raises: UserError when `where` matches no such layer, or naming the first that has another function by now, with
    the measured deviation.
    """
    _check_model(model)
    model = copy_model(model)
    tied = tied_parameters(model)
    found = [n for n, m in model.named_modules() if _revert_method(m) and matches_where(where, n, m)]
    if not found:
        raise UserError(f"{describe_where(where)} matches no layer with a way back; pyramids go back with fuse")
    for name in found:
        layer = model.get_submodule(name)
        try:
            original = _revert_method(layer)(atol)  # type: ignore[misc]
        except ValueError as error:
            raise UserError(f"{name or 'the model'}: {error}") from None
        except (RuntimeError, TypeError, KeyError):  # of parts that do not let themselves be merged
            if reason := first_altered_part(layer):
                raise UserError(f"{name or 'the model'} has no way back: {reason}") from None
            raise
        model = _replace_module(model, name, layer, original)
    add_notes(model, *restore_ties(model, tied))
    for edit in edits(model):
        _attach_rule(edit.rule, model)
    kept = [Edit(edit.rule, tuple(name for name in edit.names if name not in found)) for edit in edits(model)]
    model.isomorph_edits = tuple(edit for edit in kept if edit.names)  # type: ignore[assignment]
    return model
