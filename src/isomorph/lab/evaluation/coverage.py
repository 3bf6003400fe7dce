"""Which modules of timm's models each rule accepts, counted on the meta device, by model and by family."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import timm
import torch
from timm.utils.model import reparameterize_model
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.analysis.cost import count_parameters
from isomorph.errors import UserError, one_line
from isomorph.surgery.fuse import fuse_with_report
from isomorph.surgery.recast import acceptance
from isomorph.surgery.rule import Rule
from isomorph.terminal_tables import Row


def _count_reasons(reasons: Iterable[str]) -> dict[str, int]:
    return dict(Counter(re.sub(r"\d+(\.\d+)?", "N", reason) for reason in reasons).most_common())


def family_of(name: str) -> str:
    """Return the family of a timm model: the module that defines it."""
    return timm.model_entrypoint(name).__module__.rpartition(".")[2]


def timm_models(names: Sequence[str] = ()) -> list[str]:
    """Return timm's own architectures, or those of given names or globs. Raises: UserError if there is none."""
    chosen: dict[str, None] = {}
    for glob in names:
        found = timm.list_models(glob)
        if not found:
            raise UserError(
                f"{glob!r} matches no model of timm; give a name or a glob, for example 'resnet*'"
            )
        chosen |= dict.fromkeys(found)
    if names:
        return list(chosen)
    return [
        name
        for name in timm.list_models()
        if timm.model_entrypoint(name).__module__.startswith("timm.")
    ]


def cover_models(names: Iterable[str], rules: Mapping[str, Rule]) -> Iterator[Row]:
    """Yield a row for every timm model: its name, family and parameters, or the `error` that it raises.

    Under `rules`: the number of accepted modules, of how many, and the reasons for the others with their counts, N in
    place of numbers.
    """

    def measure(name: str) -> Row:
        with torch.device("meta"):
            model = timm.create_model(name)
        counts: Row = {}
        for kind, rule in rules.items():
            accepted, rejected = acceptance(model, rule)
            reasons = _count_reasons(rejected.values())
            counts[kind] = [len(accepted), len(accepted) + len(rejected), reasons]
        return {"parameters": count_parameters(model), "rules": counts}

    return _rows(names, measure)


def merge_norms(names: Iterable[str]) -> Iterator[Row]:
    """Yield what `fuse` does to the norms of every timm model, with random weights and statistics.

    Models without BatchNorm are skipped. A row has the number of BatchNorms, how many are `merged`, how many of those
    left follow one layer `directly`, the reasons for all of them, the largest difference in float64, and parameters
    before, after and after timm's own method; or the `error` of the model.
    """
    return _rows(names, _merged_norms)


def _rows(names: Iterable[str], measure: Callable[[str], Row]) -> Iterator[Row]:
    """Yield a row for every timm model with what `measure` returns, if anything, or its error."""
    for name in names:
        row = {"model": name, "family": family_of(name)}
        try:
            with warnings.catch_warnings(action="ignore"):
                measured = measure(name)
        except Exception as error:  # of any module of timm
            measured = {"error": f"{type(error).__name__}: {one_line(error)[:200]}"}
        if measured:
            yield row | measured


def _merged_norms(name: str) -> Row:
    model = _randomised(timm.create_model(name).eval())
    norms = _norms_of(model)
    if not norms:
        return {}
    fused, report = fuse_with_report(model)
    left = {key: reason for key, reason in report.left.items() if key in norms}
    alone = [reason for reason in left.values() if not reason.startswith(_NOT_ALONE)]
    others = count_parameters(reparameterize_model(model))
    return {
        "norms": len(norms),
        "merged": len(norms - _norms_of(fused)),
        "directly": len(alone),
        "reasons": _count_reasons(left.values()),
        "difference": report.difference,
        "parameters": [*report.parameters, others],
    }


# How the reasons begin for norms that do not follow one layer that nothing else reads.
_NOT_ALONE = (
    "it follows",
    "it reads the model's input",
    "the output of the layer before it is read elsewhere",
)


def _norms_of(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


@torch.no_grad()
def _randomised(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for norm in model.modules():
        if not isinstance(norm, _BatchNorm) or not norm.affine:
            continue
        norm.reset_parameters()
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            if tensor is not None:
                noise = torch.rand(tensor.shape, generator=generator, device="cpu") - 0.5
                tensor.add_(0.2 * noise)
    return model


def summarise_coverage(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the coverage of every family: its models, and for each rule the modules, reasons and models it covers.

    `some` counts models in which it accepts a module, `every` all of its kind, `having` those with one of the kind.
    """
    families: dict[str, Row] = {}
    for row in rows:
        if "error" in row:
            continue
        family = families.setdefault(row["family"], {"models": 0, "rules": {}})
        family["models"] += 1
        for rule, (accepted, modules, reasons) in row["rules"].items():
            total, all_reasons = family["rules"].setdefault(rule, (Counter(), Counter()))
            total.update(
                accepted=accepted, modules=modules, some=accepted > 0, every=0 < accepted == modules
            )
            total.update(having=modules > 0)
            all_reasons.update(reasons)
    for family in families.values():
        for rule, (total, reasons) in family["rules"].items():
            family["rules"][rule] = {**total, "reasons": dict(reasons.most_common())}
    return dict(sorted(families.items()))
