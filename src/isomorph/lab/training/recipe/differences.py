"""What a run's recipe has otherwise than a published one: data, network, length, and any other field."""

import math

from isomorph.json_values import JsonObject, flatten
from isomorph.lab.training.recipe.read import SCHEDULES
from isomorph.lab.training.recipe.recipe import Recipe

# Fields that do not change what is trained, or say only where it is read, kept and reported.
_WITHOUT_EFFECT = (
    "name",
    "out",
    "device",
    "seed",
    "amp",
    "dataset",
    "source",
    "expected",
    "log_every",
    "checkpoint_minutes",
    "tensorboard",
    "evaluate_every",
    "keep_every",
    "monitor_every",
    "scale",
    "data.root",
    "data.workers",
    "data.unreadable",
    "data.images",
    "data.draw",
    "model.weights",
    "model.start",
    "distill.weights",
    "mask.teacher",
    "task.teacher",
    "task.teacher_weights",
    "token_labels.maps",
)
# Teachers: their path has no effect, but a run without a teacher is another run.
_TEACHERS = ("mask.teacher", "task.teacher")
# Data sets by their names as a data source.
_NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "camvid": "CamVid", "glue": "GLUE"}
_NAMED_FIELDS = 3


def differing_fields(own: JsonObject, published: Recipe) -> list[str]:
    """Return the fields that differ, of those that the run's recipe has: an older one lacks the latest.

    A group that the run has switched off, such as `distill: null`, is one field.
    """
    mine = flatten(own)
    theirs = flatten(published.model_dump(mode="json"))
    groups = tuple(f"{field}." for field in _WITHOUT_EFFECT)
    fields: dict[str, None] = {}
    for name in sorted(mine.keys() | theirs.keys()):
        is_off = name in mine and mine[name] is None and theirs.get(name) is not None
        if name in _TEACHERS and is_off:
            fields[name] = None
        if name in _WITHOUT_EFFECT or name.startswith(groups):
            continue
        group = name.partition(".")[0]
        if group != name and mine.get(group, ...) is None:
            fields[group] = None
            continue
        if name not in mine and not name.startswith(("model.kwargs.", "model.recast.")):
            continue
        if mine.get(name) != theirs.get(name) and not _follows_rate(name, mine, theirs):
            fields[name] = None
    return list(fields)


def _follows_rate(name: str, mine: JsonObject, theirs: JsonObject) -> bool:
    """True for the rate of a parameter group that is the same multiple of another `optim.lr`."""
    if name not in ("optim.gate_lr", "optim.position_lr", "optim.gamma_lr"):
        return False
    own_ratio = float(mine[name]) / float(mine["optim.lr"])
    published_ratio = float(theirs[name]) / float(theirs["optim.lr"])
    return math.isclose(own_ratio, published_ratio, rel_tol=1e-9)


def describe_differences(
    own: JsonObject, published: Recipe, trained: int | None = None, steps: int | None = None
) -> str:
    """Return what a run has otherwise than a published recipe, like "CIFAR-10, 2 of 300 epochs"; empty for nothing.

    `own` is the recipe that the run wrote, `trained` and `steps` are the epochs and steps that it has finished.
    """
    fields = differing_fields(own, published)
    parts = []
    data = own.get("data") or {}
    if "data.source" in fields:
        source = str(data.get("source"))
        parts.append(_NAMES.get(source, source))
    for unit in ("epochs", "iterations"):
        if unit in fields and own.get(unit) and getattr(published, unit):
            parts.append(f"{own[unit]} of {getattr(published, unit)} {unit}")
    said = {"data.source", "epochs", "iterations"}
    if "epochs" in fields or "iterations" in fields:
        said |= SCHEDULES.keys()
    others = [name for name in fields if name not in said]
    if others:
        text = ", ".join(others[:_NAMED_FIELDS])
        more = len(others) - _NAMED_FIELDS
        if more > 0:
            text += f" and {more} more field{'s' if more > 1 else ''}"
        parts.append(text)
    unfinished = _unfinished(own, trained, steps)
    if unfinished:
        parts.append(unfinished)
    return ", ".join(parts)


def _unfinished(own: JsonObject, trained: int | None, steps: int | None) -> str:
    """Return how far a run is that has not reached its end; empty for one that has, or where it is not known."""
    iterations = own.get("iterations")
    if iterations:
        if steps is None or steps >= iterations:
            return ""
        return f"at step {steps:,} of {iterations:,}"
    length = own.get("epochs")
    if trained is None or not isinstance(length, int) or trained >= length:
        return ""
    return f"at epoch {trained} of {length}"
