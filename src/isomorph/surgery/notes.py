"""Notes that surgery leaves on a model: what changed besides its form."""

from torch import nn


def notes(model: nn.Module) -> tuple[str, ...]:
    """Return what surgery changed besides the form of the model, oldest first.

    Sentences for the user: parameters that are no longer tied, or a compiled model whose copy is not compiled. They are
    not saved with the model.

    Example:
        >>> cnn = torch.compile(timm.create_model("cifar_resnet20"))
        >>> iso.surgery.notes(iso.recast(cnn, iso.ConvToGPSA(), where="layer3.0.conv1"))
        ('the model was compiled and its copy is not: compile the copy',)
    """
    return getattr(model, "isomorph_notes", ())


def add_notes(model: nn.Module, *sentences: str) -> None:
    """Add sentences to the notes on a model, each once."""
    model.isomorph_notes = tuple(dict.fromkeys((*notes(model), *sentences)))  # type: ignore[assignment]
