"""The survey of a model's layers: what recasting them softly costs in accuracy, time and MACs."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.suites.result_file import Line, ResultFile
from isomorph.suites.robustness.results import weights_hash
from isomorph.suites.survey.advice import loss_of
from isomorph.suites.survey.costs import layer_costs
from isomorph.suites.survey.measure import Batch, Reference, read_batches
from isomorph.suites.survey.rules import SurveyedRule, conv_rules, label_rules, shared_fields
from isomorph.surgery import ConvToGPSA, Rule, acceptance, fit_sharpness, recast
from isomorph.surgery.where import Where, describe_where, nearest_names

KIND = "isomorph survey"
MAX_LOSS = 20.0
"""Points lost above which further layers are not added to a set of recast ones."""
_IDENTITY_NAMES = {
    "weights": "another model",
    "data": "other images",
    "rules": "other rules",
    "rule_class": "other rules",
    "shared": "other rules",
    "surveyed": "other layers",
}
ProgressCallback = Callable[[float, int, str], None]
"""Takes the number of finished cells, the number of all cells, and the name of the current step."""
_Cell = tuple[str, SurveyedRule, list[str]]
"""A kind (alone or last), a rule and the layers to be recast by it."""
Key = tuple[str, str, tuple[str, ...]]
"""A kind, the label of a rule, and the names of layers."""


def survey(
    model: nn.Module,
    loader: Iterable[Any],
    rules: Sequence[Rule] | None = None,
    where: Where = "*",
    *,
    loss: float = 1.0,
    seconds: float = 0.2,
    out: str | Path | None = None,
    name: str | None = None,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Measure, layer by layer, what recasting a model costs: which layers can become attention, and how soft.

    Each layer is recast alone by each rule, then the last layer, the last two, and so on back to the first, as long as
    no more than 20 points are lost. Nothing is trained: the survey tells where fine-tuning starts.

    Args:
        loader: Yields images and labels (-1: unknown). All are held in memory; a few hundred images are enough.
        rules: From hard to soft; by default ConvToGPSA, from locality 8, gate 8 to the paper's 1 and 1.
        where: The layers to survey; by default all that the rules accept.
        loss: Points of top-1 that a set of layers may lose in the advice.
        seconds: Time spent on timing each form of a layer; 0 skips timing.
        out: File for the finished measurements, from which a later call resumes.
        name: Name of the model in the result; by default its class.
        progress: Called with the number of finished cells, of all cells, and the current step.

    Returns a dictionary: `model`, `images`, `top1` (None without labels), `rules` (labels; `shared` is what is the same
    for all and not the default), `layers` (name and module), `rejected` (reasons by name), `costs` (see `layer_costs`),
    `cells` (kind, rule, layers, and what changed: see `Reference.compare`), and `loss`.

    Raises: UserError when no layer is accepted, the loader yields no batch, or `out` holds another survey.

    >>> model = timm.create_model("cifar_resnet20")
    >>> digits = iso.data.open_source("digits", "test").subset(range(20))
    >>> loader = iso.data.eval_loader(digits, timm.data.resolve_data_config(model=model))
    >>> rules = [iso.ConvToGPSA(locality=5.0, gate=6.0), iso.ConvToGPSA(init="paper")]
    >>> result = iso.survey(model, loader, rules, where="layer3.2.*", seconds=0)
    >>> [(cell["kind"], cell["rule"], len(cell["layers"])) for cell in result["cells"]][:2]
    [('alone', 'locality 5, gate 6', 1), ('alone', 'init paper', 1)]
    """
    if loss < 0 or seconds < 0:
        raise UserError(f"loss {loss:g} and seconds {seconds:g} must be at least 0")
    labelled = label_rules(conv_rules() if rules is None else rules)
    with torch.random.fork_rng(devices=[]):  # the layers' initial weights are drawn from a seed of their own
        return _survey(model, loader, labelled, where, loss, seconds, out, name, progress or _silent)


def _silent(done: float, total: int, step: str) -> None:
    """Report no progress."""


def _survey(
    model: nn.Module,
    loader: Iterable[Any],
    labelled: Sequence[SurveyedRule],
    where: Where,
    loss: float,
    seconds: float,
    out: str | Path | None,
    name: str | None,
    progress: ProgressCallback,
) -> dict[str, Any]:
    """Survey the layers; see `survey`."""
    layers, rejected = _surveyed_layers(model, labelled, where)
    batches = read_batches(loader, model)
    identity = _identity(model, name, labelled, layers, batches)
    lines: list[Line] = []

    def resume(saved: Line, finished: list[Line]) -> None:
        _check_same_survey(out, saved, identity)
        lines.extend(finished)

    file = ResultFile(Path(out).expanduser() if out else None, KIND, identity, resume)
    reference = Reference(model, batches)
    done = {_key(line): line for line in lines if "kind" in line}
    cells = _measure(model, reference, labelled, layers, done, file, progress)
    costs = next((line["costs"] for line in lines if "costs" in line), None)
    if costs is None:
        costs = layer_costs(model, layers, labelled, batches[0][0], seconds, partial(progress, len(cells), len(cells)))
        file.add({"costs": costs})
    return {
        **identity,
        "images": len(reference.labels),
        "top1": reference.top1,
        "loss": loss,
        "layers": [{"name": layer, "module": str(model.get_submodule(layer))} for layer in layers],
        "rejected": rejected,
        "costs": costs,
        "cells": cells,
    }


def _surveyed_layers(model: nn.Module, rules: Sequence[SurveyedRule], where: Where) -> tuple[list[str], dict[str, str]]:
    """Return the layers that all rules accept, and why the others are rejected.

    Raises: UserError when there is none.
    """
    found = [acceptance(model, entry.rule, where) for entry in rules]
    rejected = {name: reason for each in reversed(found) for name, reason in each.rejected.items()}
    layers = [layer for layer in found[0].accepted if layer not in rejected]
    if not layers:
        why = f": {next(iter(rejected))}: {next(iter(rejected.values()))}" if rejected else ""
        possible = acceptance(model, rules[0].rule, "*").accepted
        hint = nearest_names(where, possible) if possible else "; no layer of this model can be recast"
        raise UserError(f"there is no layer to survey for {describe_where(where)}{why}{hint}")
    return layers, rejected


def _identity(
    model: nn.Module, name: str | None, rules: Sequence[SurveyedRule], layers: Sequence[str], batches: Sequence[Batch]
) -> dict[str, Any]:
    """Return what the results of a survey are for."""
    digest = hashlib.sha256()
    for images, labels in batches:
        digest.update(images.cpu().numpy().tobytes() + labels.numpy().tobytes())
    shared = shared_fields([entry.rule for entry in rules])
    return ({"shared": shared} if shared else {}) | {
        "model": name or type(model).__name__,
        "weights": weights_hash(model),
        "data": digest.hexdigest()[:16],
        "rules": [entry.label for entry in rules],
        "rule_class": type(rules[0].rule).__name__,
        "surveyed": list(layers),
    }


def _check_same_survey(path: object, saved: Line, identity: Line) -> None:
    """Raise UserError unless the saved lines are of this model, these images, rules and layers."""
    for key, what in _IDENTITY_NAMES.items():
        if saved.get(key) != identity.get(key):
            raise UserError(f"{path} is a survey of {what}; give another file, or remove it")


def _cells(rules: Sequence[SurveyedRule], layers: Sequence[str]) -> list[_Cell]:
    """Return the cells in the order in which they are measured."""
    return [
        *(("alone", entry, [layer]) for layer in reversed(layers) for entry in rules),
        *(("last", entry, list(layers[-count:])) for entry in rules for count in range(1, len(layers) + 1)),
    ]


def _measure(
    model: nn.Module,
    reference: Reference,
    rules: Sequence[SurveyedRule],
    layers: Sequence[str],
    done: dict[Key, Line],
    file: ResultFile,
    progress: ProgressCallback,
) -> list[Line]:
    """Measure all cells that are not done yet, and return all of them."""
    wanted = _cells(rules, layers)
    found: list[dict[str, Any]] = []
    for number, (kind, entry, names) in enumerate(wanted):
        if kind == "last" and _has_ended(found, entry.label, len(names)):
            continue
        cell = {"kind": kind, "rule": entry.label, "layers": names}
        if _key(cell) not in done:
            step = f"{kind} {len(names)}, {entry.label}" if kind == "last" else f"{names[-1]}, {entry.label}"
            values = _known(found, cell) or reference.compare(
                _recast(model, entry.rule, names, reference.batches[0][0]),
                lambda fraction, number=number, step=step: progress(number + fraction, len(wanted), step),  # type: ignore[misc]
            )
            done[_key(cell)] = cell | values
            file.add(done[_key(cell)])
        found.append(done[_key(cell)])
    return found


def _recast(model: nn.Module, rule: Rule, names: Sequence[str], images: Tensor) -> nn.Module:
    """Recast layers, with the same random initial weights at every call, and a sharpness that fits the images."""
    torch.manual_seed(0)
    recasted = recast(model, rule, where=names)
    fits = isinstance(rule, ConvToGPSA) and rule.content == "similar" and rule.sharpness is None
    return fit_sharpness(recasted, images) if fits else recasted


def _key(cell: Line) -> Key:
    return cell["kind"], cell["rule"], tuple(cell["layers"])


def _known(found: Sequence[dict[str, Any]], cell: dict[str, Any]) -> dict[str, Any] | None:
    """Return the values of a cell that is a measured one under another name: the last layer is that layer alone."""
    same = (old for old in found if (old["rule"], old["layers"]) == (cell["rule"], cell["layers"]))
    return {key: value for key, value in old.items() if key != "kind"} if (old := next(same, None)) else None


def _has_ended(found: Sequence[dict[str, Any]], label: str, count: int) -> bool:
    """True if fewer layers recast by this rule already lost more than is worth following."""
    last = [cell for cell in found if cell["kind"] == "last" and cell["rule"] == label]
    return bool(last) and (loss_of(last[-1]) > MAX_LOSS or len(last) < count - 1)
