"""Notes that surgery attaches to a model, to tell the user about side effects."""

from torch import nn


def notes(model: nn.Module) -> tuple[str, ...]:
    """Return the notes on side effects of surgery on a model, oldest first.

    Each note is a message for the user, for example that parameters are no longer tied, or that the copy of a compiled
    model is not compiled. Notes are not saved with the model.

    Example:
        >>> cnn = torch.compile(timm.create_model("cifar_resnet20"))
        >>> iso.surgery.notes(iso.recast(cnn, iso.ConvToGPSA(), where="layer3.0.conv1"))
        ('the model was compiled and its copy is not: compile the copy',)
    """
    return getattr(model, "isomorph_notes", ())


def add_notes(model: nn.Module, *sentences: str) -> None:
    """Add notes to a model; a note that it already has is not repeated."""
    model.isomorph_notes = tuple(dict.fromkeys((*notes(model), *sentences)))  # type: ignore[assignment]
