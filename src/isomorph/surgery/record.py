"""What a model carries besides its modules: its base, its edits and notes; and copies of models, not compiled."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from isomorph.operations import copy_module, is_compiled, unwrap, wrappers_of
from isomorph.surgery.rule import Rule


@dataclass(frozen=True)
class Edit:
    """A rule, and the names of the modules or parts of joint projections that it replaced.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> iso.edits(iso.recast(cnn, iso.ConvToGPSA(), where="layer3.0.conv?"))[0].names
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
    return getattr(wrappers_of(model)[-1], "isomorph_record", Record())


def update_record(model: nn.Module, **changes: Any) -> None:
    """Change fields of a model's record."""
    model.isomorph_record = replace(record(model), **changes)  # type: ignore[assignment]


def edits(model: nn.Module) -> tuple[Edit, ...]:
    """Return the edits by which the model was made from its base, oldest first.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> iso.edits(iso.recast(cnn, iso.LinearToPyramid(), where="linear"))[0].names
    ('linear',)
    >>> iso.edits(cnn)
    ()
    """
    return record(model).edits


def edits_since(model: nn.Module, base: nn.Module) -> tuple[Edit, ...]:
    """Return the edits by which `model` was made from `base`.

    >>> tcnn = iso.recast(timm.create_model("cifar_resnet20"), iso.ConvToGPSA(), where="layer3.0.conv1")
    >>> wide = iso.recast(tcnn, iso.LinearToPyramid(), where="linear")
    >>> [edit.names for edit in iso.surgery.edits_since(wide, tcnn)]
    [('linear',)]
    """
    return edits(model)[len(edits(base)) :]


def notes(model: nn.Module) -> tuple[str, ...]:
    """Return the notes on side effects of surgery on a model, oldest first; they are not saved with it.

    >>> cnn = torch.compile(timm.create_model("cifar_resnet20"))
    >>> iso.surgery.notes(iso.recast(cnn, iso.ConvToGPSA(), where="layer3.0.conv1"))
    ('the model was compiled and its copy is not: compile the copy',)
    """
    return record(model).notes


def add_notes(model: nn.Module, *sentences: str) -> None:
    """Add notes to a model; a note that it already has is not repeated."""
    update_record(model, notes=tuple(dict.fromkeys((*notes(model), *sentences))))


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of the model inside wrappers, with a note if it was compiled. Raises: UserError as `unwrap`."""
    new = copy_module(unwrap(model))
    if is_compiled(model):
        add_notes(new, "the model was compiled and its copy is not: compile the copy")
    return new
