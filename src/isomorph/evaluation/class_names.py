"""Names of the classes of a model."""

from collections.abc import Callable

from timm.data import ImageNetInfo
from torch import nn


def class_namer(model: nn.Module, classes: int) -> Callable[[int], str]:
    """Return the names of the model's classes: of its weights (wnids in English), ImageNet's for 1000, or numbers."""
    known = (getattr(model, "pretrained_cfg", None) or {}).get("label_names") or ()
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
