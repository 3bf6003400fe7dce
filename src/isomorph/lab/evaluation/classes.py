"""The classes that a model tells apart: their logits, number and names, and whether data has the same."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from timm.data import ImageNetInfo
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.modes import eval_mode, require_finite
from isomorph.models.input_sizes import (
    evaluation_config,
    input_size_problem,
    inputs_like,
    label_names,
)
from isomorph.spec import ImageSize
from isomorph.surgery.calls import run_model


def named_logits(outputs: Any) -> Any:
    """Return the `logits` of outputs with names, as transformers' models have them; others as they are."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits")
    return getattr(outputs, "logits", outputs)


def first_logits(outputs: Any) -> Any:
    """Return the candidate for logits in a model's outputs: the tensor, the first of several, or `logits`."""
    logits = named_logits(outputs)
    if isinstance(logits, tuple | list) and logits:
        return logits[0]
    return logits


def class_logits(outputs: Any) -> Tensor:
    """Return the `first_logits` in a classifier's outputs.

    Shape: -> (B, K) float32
    Raises: UserError for outputs without logits of images, NotFinite for NaN or infinite ones.
    """
    logits = first_logits(outputs)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        given = f"is a {type(outputs).__name__}"
        if isinstance(logits, Tensor):
            given = f"has shape {tuple(logits.shape)}"
        raise UserError(
            f"the model does not classify images: its output {given}, not (images, classes)",
        )
    require_finite(logits)
    return logits.float()


@torch.no_grad()
def class_count(model: nn.Module, size: ImageSize | None = None) -> int:
    """Return a classifier's `num_classes`, else that of its outputs for an image. Raises: UserError without logits."""
    known = getattr(model, "num_classes", None)
    if isinstance(known, int):
        return known
    shape = evaluation_config(model, size)["input_size"]
    with eval_mode(model):
        return class_logits(run_model(model, inputs_like(model, 1, shape))).shape[1]


def check_image_size(model: nn.Module, size: Sequence[int], name: str) -> None:
    """Raise UserError if the model cannot process images of this size (channels, height, width)."""
    reason = input_size_problem(model, size)
    if reason:
        raise UserError(
            f"{name} cannot process the run's images of {'x'.join(map(str, size))}: {reason}; give another data.size, "
            "or model.kwargs.img_size if the model has it"
        )


def check_own_classes(
    model: nn.Module,
    classes: Sequence[str],
    where: str = "",
    more: str = "",
    size: ImageSize | None = None,
) -> None:
    """Raise UserError for data with another number of classes than the model's; `where` it is, `more` that helps."""
    own = len(label_names(model)) or class_count(model, size)
    if len(classes) != own:
        first = ""
        if len(classes) > own:
            first = f", or only its first {own} classes (data.classes={own})"
        raise UserError(
            f"the model has {own} classes, the data{where} has {len(classes)} ({shorten(classes)}); give data with the "
            f"model's labels{first}{more}"
        )


def check_same_classes(model: nn.Module, classes: Sequence[str]) -> None:
    """Raise UserError for data with other classes than the model's, or in another order, where both have names."""
    check_own_classes(model, classes)
    for number, (own, given) in enumerate(zip(label_names(model), classes, strict=False)):
        if own != given and not own.isdigit() and not given.isdigit():
            raise UserError(
                f"class {number} is {own} in the model and {given} in the data; give data with the "
                "model's classes, in its order"
            )


def shorten(names: Sequence[str]) -> str:
    """Return names for a message, the first few of many."""
    if len(names) > 4:
        names = [*names[:4], "..."]
    return ", ".join(names)


def config_labels(model: nn.Module) -> list[str]:
    """Return the names of classes in the config of a model of transformers; empty where they are numbers only."""
    given = getattr(getattr(model, "config", None), "id2label", None)
    if not isinstance(given, Mapping) or all(
        name == f"LABEL_{label}" for label, name in given.items()
    ):
        return []
    return [str(given[label]) for label in sorted(given)]


def class_namer(model: nn.Module, classes: int) -> Callable[[int], str]:
    """Return the names of the model's classes: of its weights (wnids in English), ImageNet's for 1000, or numbers."""
    imagenet = ImageNetInfo()
    names = label_names(model) or config_labels(model)
    wnids = imagenet.label_names()
    if len(names) != classes:
        if classes != len(wnids):
            return "class {}".format
        names = wnids
    english = {
        wnid: imagenet.label_name_to_description(wnid).split(",")[0]
        for wnid in set(names) & set(wnids)
    }
    return lambda label: english.get(names[label], str(names[label]))


def likeliest_classes(
    model: nn.Module, logits: Tensor, count: int
) -> list[list[tuple[str, float]]]:
    """Return names and probabilities of the `count` most likely classes of each image. Shape: logits (B, classes)"""
    classes = logits.shape[1]
    name = class_namer(model, classes)
    shares, numbers = logits.softmax(-1).topk(min(count, classes))
    likeliest = []
    for own_shares, own_numbers in zip(shares.tolist(), numbers.tolist(), strict=True):
        likeliest.append(list(zip(map(name, own_numbers), own_shares, strict=True)))
    return likeliest
