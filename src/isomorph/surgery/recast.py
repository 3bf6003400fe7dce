"""Recast a model: select modules with `where`, replace each by a rule, and record the edits on a copy.

The rule decides which modules can be recast, the user which of them are, with `where`: a glob, several, or a function
`(name, module) -> bool`. The edits are recorded on the new model (`edits(model)`) by module name, from which a
checkpoint is rebuilt: create the base model, replay the edits, load the tensors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.surgery.attachments import check_attached
from isomorph.surgery.compiled import copy_model, unwrap_compiled
from isomorph.surgery.joint_projections import JointPart, find_target, joint_parts
from isomorph.surgery.notes import add_notes, notes
from isomorph.surgery.tied_parameters import restore_ties, tied_parameters
from isomorph.surgery.where import (
    Where,
    describe_where,
    matches_where,
    names_of_kind,
    nearest_names,
    selectable_modules,
)


class Rule(Protocol):
    """Protocol of the rules: replace a module by another that computes the same function.

    A rule is a frozen dataclass, which prints, hashes and is stored with the model. Optional members:

    - `kind: ClassVar`, a module class or a tuple of them: selected modules that the rule does not accept are an error
      if they are of this kind, and skipped otherwise.
    - `within(model) -> Rule` returns the rule completed with facts about the model.
    - `attach(model)` connects the replacements to the rest of the model, with hooks for example, and removes
      connections that a revert made unnecessary.
    - `takes_parts = True`: globs may name parts of joint projections (`blocks.*.attn.v` of a `qkv`), which the rule
      receives as a `JointPart`.
    - `keeps_function: bool`: False for options with which the outputs change; without it, the rule keeps the function.

    Example:
        >>> from dataclasses import dataclass
        >>> from typing import ClassVar
        >>> @dataclass(frozen=True)
        ... class ReLUToLeakyReLU:
        ...     atol: ClassVar[float] = 1e-5
        ...     def accepts(self, module):
        ...         return isinstance(module, torch.nn.ReLU)
        ...     def build(self, module):
        ...         return torch.nn.LeakyReLU(0.0)
        >>> cnn = timm.create_model("cifar_resnet20").eval()
        >>> new = iso.recast(cnn, ReLUToLeakyReLU(), where="layer3.*")
        >>> iso.verify(cnn, new, torch.randn(1, 3, 32, 32)).passed
        True
    """

    atol: ClassVar[float]
    """Largest difference of the model's output that `verify` accepts by default."""

    def accepts(self, module: nn.Module) -> bool:
        """Return True if the module can be recast."""
        ...

    def build(self, module: nn.Module) -> nn.Module:
        """Return the replacement, with new parameters.

        Raises: UserError with the reason if the module is not accepted.
        """
        ...


@dataclass(frozen=True)
class Edit:
    """A rule, and the names of the modules or parts of joint projections that it replaced.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> edit = iso.edits(iso.recast(cnn, iso.ConvToGPSA(), where="layer3.0.conv?"))[0]
        >>> edit.names
        ('layer3.0.conv1', 'layer3.0.conv2')
    """

    rule: Rule
    names: tuple[str, ...]


def keeps_function(rule: Rule) -> bool:
    """Return True if the rule, with its options, promises to keep the function."""
    return getattr(rule, "keeps_function", True)


def edits(model: nn.Module) -> tuple[Edit, ...]:
    """Return the edits by which the model was made from its base, oldest first.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> iso.edits(iso.recast(cnn, iso.LinearToPyramid(), where="linear"))[0].names
        ('linear',)
        >>> iso.edits(cnn)
        ()
    """
    return getattr(model, "isomorph_edits", ())


def edits_since(model: nn.Module, base: nn.Module) -> tuple[Edit, ...]:
    """Return the edits by which `model` was made from `base`.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(), where="layer3.0.conv1")
        >>> wide = iso.recast(tcnn, iso.LinearToPyramid(), where="linear")
        >>> [edit.names for edit in iso.surgery.edits_since(wide, tcnn)]
        [('linear',)]
    """
    return edits(model)[len(edits(base)) :]


_Target = nn.Module | JointPart


def _unique_targets(pairs: Iterable[tuple[str, _Target]]) -> Iterable[tuple[str, _Target]]:
    """Yield every module once, under its first name."""
    seen: set[_Target] = set()
    for name, module in pairs:
        if module not in seen:
            seen.add(module)
            yield name, module


def bind_rule(rule: Rule, model: nn.Module) -> Rule:
    """Return the rule completed with facts about the model, if it has a method `within`."""
    within = getattr(rule, "within", None)
    return within(model) if within else rule


def attach_rule(rule: Rule, model: nn.Module) -> None:
    """Connect the rule's replacements to the model, if the rule has a method `attach`."""
    if hook := getattr(rule, "attach", None):
        hook(model)


def _check_arguments(rule: Rule, where: Where) -> None:
    """Check that the rule is a rule and that `where` can select modules.

    Raises: UserError otherwise.
    """
    if isinstance(rule, type) or not callable(getattr(rule, "build", None)):
        raise UserError(f"{rule!r} is not a rule; give an instance, like ConvToGPSA(init='exact')")
    globs = [where] if isinstance(where, str) else where if isinstance(where, Sequence) else []
    if not callable(where) and not (globs and all(isinstance(glob, str) for glob in globs)):
        shown = repr(where) if where is None or isinstance(where, Sequence) else f"a {type(where).__name__}"
        raise UserError(
            f"where={shown} selects nothing; give a glob, several globs, or a function (name, module) -> bool"
        )


def targets(model: nn.Module, rule: Rule, where: Where = "*") -> list[str]:
    """Return the names of the modules that `recast` would replace, in the order of `model.named_modules()`.

    For a rule with `takes_parts`, globs select parts of joint projections too. They come last, and are left out if the
    whole layer is selected.

    Raises: UserError if `where` selects no module of the rule's kind (with the nearest names), if the rule does not
        accept one (with its name and the reason), or if one is inside another.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> iso.targets(cnn, iso.ConvToGPSA(), where="layer3.0.*")
        ['layer3.0.conv1', 'layer3.0.conv2']
    """
    _check_arguments(rule, where)
    check_model(model)
    model = unwrap_compiled(model)
    given, rule = rule, bind_rule(rule, model)
    kind = rule_kinds(rule)
    named: list[tuple[str, Any]] = selectable_modules(model)
    if getattr(given, "takes_parts", False) and not callable(where):
        named += joint_parts(model).items()
    own = names_of_kind(named, kind)
    names = own or [name for name, _ in named if name]
    for glob in [] if callable(where) or isinstance(where, str) else where:
        if not any(fnmatchcase(name, glob) for name, _ in named):
            raise UserError(f"{glob!r} in where matches no module{nearest_names(glob, names)}")
    selected = _without_covered(list(_unique_targets((n, m) for n, m in named if matches_where(where, n, m))))
    if not selected:
        raise UserError(f"{describe_where(where)} matches no module{nearest_names(where, names)}")
    candidates = [(n, m) for n, m in selected if isinstance(m, (*kind, JointPart)) or rule.accepts(m)]
    if not candidates:
        shown = [k for k in kind if not k.__module__.startswith("isomorph.layers")] or kind
        wanted = " and ".join(k.__name__ for k in shown) or "other modules"
        classes = ", ".join(sorted({_class_name(type(module), wanted) for _, module in selected}))
        selection = f"{describe_where(where)} matches only other classes ({classes})"
        raise UserError(f"{type(given).__name__} recasts {wanted}, but {selection}{nearest_names(where, own)}")
    for name, module in candidates:
        if not rule.accepts(module):
            raise UserError(f"{name or 'the model'}: {_rejection_reason(rule, module)}")
    _check_not_nested([name for name, _ in candidates])
    return [name for name, _ in candidates]


def _without_covered(selected: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the selection without parts of joint projections whose whole layer is selected."""
    modules = {module for _, module in selected}
    return [(n, m) for n, m in selected if not (isinstance(m, JointPart) and m.joint in modules)]


def check_model(model: object) -> None:
    """Check that the argument is a model.

    Raises: UserError otherwise.
    """
    if not isinstance(model, nn.Module):
        shown = type(model).__name__ if len(repr(model)) > 40 else repr(model)
        raise UserError(f"{shown} is not a model; create it first, with timm.create_model")
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise UserError(f"{name} has no shape yet (lazy layer); run the model once on an input first")


def rule_kinds(rule: Rule) -> tuple[type[nn.Module], ...]:
    """Return the module classes of the rule's `kind`, if any."""
    kind = getattr(rule, "kind", ())
    return kind if isinstance(kind, tuple) else (kind,)


def _class_name(kind: type, wanted: str) -> str:
    """Return the name of a class, with its module if it has the same name as the wanted one."""
    return f"another {kind.__module__}.{kind.__name__}" if kind.__name__ == wanted else kind.__name__


def _rejection_reason(rule: Rule, module: Any) -> str:
    """Return why the rule does not accept the module: the error of its `build`."""
    try:
        rule.build(module)
    except UserError as error:
        return str(error)
    return f"{type(rule).__name__} does not accept it"


def _check_not_nested(names: Sequence[str]) -> None:
    """Check that no target is inside another.

    Raises: UserError otherwise.
    """
    for outer in names:
        inner = next((name for name in names if name != outer and (name.startswith(f"{outer}.") or not outer)), None)
        if inner:
            raise UserError(f"target {inner} is inside target {outer or 'the model itself'}; select only one of them")


def match_original(replacement: nn.Module, original: nn.Module) -> nn.Module:
    """Give the replacement the original's device, dtype, train or eval mode and requires_grad, and return it.

    requires_grad goes by parameter name where the original has the parameter. A replacement of the same class is an
    altered copy of the original and is left as it is. If the original has several dtypes, each parameter keeps its own.
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
    replacement.train(original.training)  # LeViT's returns None
    return replacement


def recast(model: nn.Module, rule: Rule, where: Where = "*") -> nn.Module:
    """Return a copy of the model with the selected modules replaced by a rule; the model itself is unchanged.

    Each replacement has the device, dtype, train or eval mode and requires_grad of the module that it replaces. A
    module that is used several times is replaced once, and the model itself may be a target (`where=""`). A compiled
    model (`torch.compile`) is unwrapped; the copy is not compiled.

    Hooks and patched methods of a module stay if the replacement contains the same module, and are an error if it does
    not. Tied parameters stay tied if the replacement has a parameter of the same name, shape and values; otherwise
    they train separately, and `iso.surgery.notes(copy)` says so.

    Args:
        model: any model; timm's, isomorph's or your own.
        rule: such as `ConvToGPSA(init="exact")`; see `Rule`.
        where: a glob over module names ("layer3.*.conv?"), several, or a function `(name, module) -> bool`; by default
            every module that the rule accepts.

    Raises: UserError as in `targets`, or if hooks or patched methods of a target would be lost.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.*.conv?")
        >>> type(cnn.layer3[0].conv1).__name__, type(tcnn.layer3[0].conv1).__name__
        ('Conv2d', 'GPSA2d')
    """
    edit = Edit(rule, tuple(targets(model, rule, where)))
    return replay(copy_model(model), edit)


def replay(model: nn.Module, edit: Edit) -> nn.Module:
    """Apply an edit in place and return the model; `load` rebuilds a checkpoint from its base model with it.

    Raises: UserError if the model does not have a module of the edit, or the rule does not accept it.

    Example:
        >>> edit = iso.surgery.Edit(iso.ConvToGPSA(), ("layer3.0.conv1",))
        >>> tcnn = iso.surgery.replay(timm.create_model("cifar_resnet20"), edit)
        >>> type(tcnn.layer3[0].conv1).__name__
        'GPSA2d'
    """
    rule, tied = bind_rule(edit.rule, model), tied_parameters(model)
    for name in edit.names:
        target: Any = find_target(model, name)
        if target is None:
            raise UserError(f"the model has no module {name}, which {type(edit.rule).__name__} should recast")
        part = isinstance(target, JointPart)
        original, path = (target.joint, target.joint_name) if part else (target, name)
        try:
            replacement = rule.build(target)
        except UserError as error:
            raise UserError(f"{name or 'the model'}: {error}") from None
        model = replace_module(model, path, original, match_original(replacement, original))
    add_notes(model, *restore_ties(model, tied))
    model.isomorph_edits = (*edits(model), edit)  # type: ignore[assignment]
    for applied in edits(model):
        attach_rule(applied.rule, model)
    return model


def replace_module(model: nn.Module, name: str, original: nn.Module, replacement: nn.Module) -> nn.Module:
    """Replace a module under all its names, and return the model (the replacement itself if the name is "").

    The replacement is in channels_last if the original is.

    Raises: UserError if hooks or patched methods of the original or a submodule would be lost.
    """
    check_attached(name, original, replacement)
    if any(map(_is_channels_last, original.parameters())):
        replacement.to(memory_format=torch.channels_last)
    if not name:
        add_notes(replacement, *notes(model))
        return replacement
    for alias in _module_names(model, original):
        model.set_submodule(alias, replacement)
    return model


def _is_channels_last(parameter: Tensor) -> bool:
    return not parameter.is_contiguous() and parameter.is_contiguous(memory_format=torch.channels_last)


def _module_names(model: nn.Module, module: nn.Module) -> list[str]:
    """Return all names of a module in the model."""
    return [name for name, other in model.named_modules(remove_duplicate=False) if other is module]
