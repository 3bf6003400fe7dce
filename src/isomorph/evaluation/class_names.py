"""Names of the classes of a model."""

from collections.abc import Callable, Sequence

from timm.data import ImageNetInfo
from torch import nn

from isomorph.errors import UserError


def label_names(model: nn.Module) -> list[str]:
    """Return the names of a model's classes, as its checkpoint recorded them; an empty list without any.

    Names that are not as many as the classes are of the architecture's public weights, and not of this model.
    """
    names = list((getattr(model, "pretrained_cfg", None) or {}).get("label_names") or ())
    return names if getattr(model, "num_classes", len(names)) == len(names) else []


def check_own_classes(model: nn.Module, classes: Sequence[str]) -> None:
    """Raise UserError for data with another number of classes than a trained model's."""
    own = len(label_names(model)) or model.num_classes
    if len(classes) != own:
        raise UserError(f"the data has {len(classes)} classes and the model {own}; give data of its classes")


def class_namer(model: nn.Module, classes: int) -> Callable[[int], str]:
    """Return the names of the model's classes: of its weights (wnids in English), ImageNet's for 1000, or numbers."""
    known = label_names(model)
    imagenet = ImageNetInfo()
    if len(known) == classes:
        wnids = set(imagenet.label_names())
        return lambda label: (
            _first_name(imagenet.label_name_to_description(known[label]))
            if known[label] in wnids
            else str(known[label])
        )
    if classes == 1000:
        return lambda label: _first_name(imagenet.index_to_description(label))
    return "class {}".format


def _first_name(description: str) -> str:
    """Return the first of the names of a class of ImageNet."""
    return description.split(",")[0]
