"""What a model carries besides its modules: its base, its edits and notes; and copies of models, not compiled."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.surgery.plain_layers import hooks_on
from isomorph.surgery.rule import Rule


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


@dataclass(frozen=True)
class Record:
    """What isomorph knows of a model that its modules do not say, in one attribute of the model."""

    base: Mapping[str, Any] | None = None
    """The named model that it was made from, with its arguments, as checkpoints store it."""

    edits: tuple[Edit, ...] = ()
    """The edits by which it was made from its base, oldest first."""

    notes: tuple[str, ...] = ()
    """Messages for the user about side effects of surgery and loading."""

    start: str = ""
    """What its weights were before training."""

    trained_size: bool = False
    """True if its input size is the one that it was trained on."""

    data_root: str | None = None
    """The folder of the data that it is tested on, where the user named one."""


def record(model: nn.Module) -> Record:
    """Return the record of a model, which is empty for one that isomorph has not changed or loaded."""
    return getattr(model, "isomorph_record", Record())


def update_record(model: nn.Module, **changes: Any) -> None:
    """Change fields of a model's record."""
    model.isomorph_record = replace(record(model), **changes)  # type: ignore[assignment]


def edits(model: nn.Module) -> tuple[Edit, ...]:
    """Return the edits by which the model was made from its base, oldest first.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> iso.edits(iso.recast(cnn, iso.LinearToPyramid(), where="linear"))[0].names
        ('linear',)
        >>> iso.edits(cnn)
        ()
    """
    return record(model).edits


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


def notes(model: nn.Module) -> tuple[str, ...]:
    """Return the notes on side effects of surgery on a model, oldest first.

    Each note is a message for the user, for example that parameters are no longer tied, or that the copy of a compiled
    model is not compiled. Notes are not saved with the model.

    Example:
        >>> cnn = torch.compile(timm.create_model("cifar_resnet20"))
        >>> iso.surgery.notes(iso.recast(cnn, iso.ConvToGPSA(), where="layer3.0.conv1"))
        ('the model was compiled and its copy is not: compile the copy',)
    """
    return record(model).notes


def add_notes(model: nn.Module, *sentences: str) -> None:
    """Add notes to a model; a note that it already has is not repeated."""
    update_record(model, notes=tuple(dict.fromkeys((*notes(model), *sentences))))


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
