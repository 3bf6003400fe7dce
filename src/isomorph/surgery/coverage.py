"""Which modules of timm's models each rule accepts, counted on the meta device, by model and by family."""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import timm
import torch
from timm.utils.model import reparameterize_model
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from isomorph.errors import UserError
from isomorph.surgery.fuse import fuse_with_report
from isomorph.surgery.recast import acceptance
from isomorph.surgery.rule import RULES, Rule

_FILLS: set[Any] = {
    *(Tensor.normal_, Tensor.uniform_, Tensor.fill_, Tensor.zero_, Tensor.copy_, Tensor.erfinv_),
    *(Tensor.add_, Tensor.mul_, Tensor.div_, Tensor.clamp_),
}


class _SkipFills(TorchFunctionMode):
    """Torch function mode that skips the initialisation of weights, which have no values on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in _FILLS else func(*args, **(kwargs or {}))


class RuleCoverage(NamedTuple):
    """Of the modules of a rule's kind in a model or family: how many it accepts, of how many, and why not the others.

    >>> iso.surgery.RuleCoverage(2, 3, {"the NxN kernel is not square": 1}).complete
    False
    """

    accepted: int
    modules: int
    reasons: dict[str, int]

    @property
    def complete(self) -> bool:
        """True if the rule accepts every module of its kind, and there is one."""
        return 0 < self.accepted == self.modules


def _reason_kind(reason: str) -> str:
    """Return a reason with N in place of every number, so that the reasons of similar modules are counted together."""
    return re.sub(r"\d+(\.\d+)?", "N", reason)


def model_coverage(model: nn.Module, rules: Mapping[str, Rule] | None = None) -> dict[str, RuleCoverage]:
    """Return the coverage of every rule in a model; by default of all registered rules with their default options.

    Raises: UserError if the model is not a model.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> iso.surgery.model_coverage(cnn)["ConvToGPSA"]
    RuleCoverage(accepted=19, modules=19, reasons={})
    """
    found = {}
    for name, rule in (rules or {name: kind() for name, kind in RULES.items()}).items():
        accepted, rejected = acceptance(model, rule)
        reasons = Counter(map(_reason_kind, rejected.values()))
        found[name] = RuleCoverage(len(accepted), len(accepted) + len(rejected), dict(reasons.most_common()))
    return found


def family_of(name: str) -> str:
    """Return the family of a timm model: the module that defines it.

    >>> iso.surgery.family_of("resnet50d")
    'resnet'
    """
    return timm.model_entrypoint(name).__module__.rpartition(".")[2]


def timm_models(names: Sequence[str] = ()) -> list[str]:
    """Return timm's own architectures, or those of given names or globs.

    Raises: UserError if there is none.

    >>> iso.surgery.timm_models(["resnet1*t"])
    ['resnet10t', 'resnet14t']
    """
    if unknown := [glob for glob in names if not timm.list_models(glob)]:
        raise UserError(f"{unknown[0]!r} matches no model of timm; give a name or a glob, for example 'resnet*'")
    if names:
        return list(dict.fromkeys(name for glob in names for name in timm.list_models(glob)))
    return [name for name in timm.list_models() if timm.model_entrypoint(name).__module__.startswith("timm.")]


def cover_models(names: Iterable[str], rules: Mapping[str, Rule]) -> Iterator[dict[str, Any]]:
    """Yield a row for every timm model: its name, family, parameters and the coverage of every rule.

    A model that cannot be created has the reason under `error` instead.
    """
    for name in names:
        row: dict[str, Any] = {"model": name, "family": family_of(name)}
        try:
            with torch.device("meta"), _SkipFills(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = timm.create_model(name)
            row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
            yield row | {"rules": {rule: list(found) for rule, found in model_coverage(model, rules).items()}}
        except Exception as error:  # of any module of timm
            yield row | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def merge_norms(names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield what `fuse` does to the norms of every timm model, with random weights and statistics.

    Models without BatchNorm are skipped. A row has the number of BatchNorms, how many are `merged`, how many of those
    left follow one layer `directly`, the reasons for all of them, the largest difference in float64, and parameters
    before, after and after timm's own method. For a model that cannot be created or run it has the reason as `error`.
    """
    for name in names:
        row: dict[str, Any] = {"model": name, "family": family_of(name)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = _randomised(timm.create_model(name).eval())
                norms = [key for key, module in model.named_modules() if isinstance(module, _BatchNorm)]
                if not norms:
                    continue
                fused, report = fuse_with_report(model)
                others = sum(parameter.numel() for parameter in reparameterize_model(model).parameters())
            left = {key: reason for key, reason in report.left.items() if key in norms}
            alone = [reason for reason in left.values() if not reason.startswith(_NOT_ALONE)]
            yield row | {
                "norms": len(norms),
                "merged": sum(not isinstance(dict(fused.named_modules()).get(key), _BatchNorm) for key in norms),
                "directly": len(alone),
                "reasons": dict(Counter(map(_reason_kind, left.values())).most_common()),
                "difference": report.difference,
                "parameters": [*report.parameters, others],
            }
        except Exception as error:  # of any module of timm
            yield row | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


_NOT_ALONE = ("it follows", "it reads the model's input", "the output of the layer before it is read elsewhere")
"""How the reasons begin for norms that do not follow one layer that nothing else reads."""


@torch.no_grad()
def _randomised(model: nn.Module) -> nn.Module:
    """Give the norms of a model other weights and statistics, in place, and return it."""
    generator = torch.Generator().manual_seed(0)
    for norm in (module for module in model.modules() if isinstance(module, _BatchNorm) and module.affine):
        for tensor, middle in ((norm.weight, 1.0), (norm.bias, 0.0), (norm.running_mean, 0.0), (norm.running_var, 1.0)):
            if tensor is not None:
                tensor.copy_(middle + 0.2 * (torch.rand(tensor.shape, generator=generator) - 0.5))
    return model


def summarise_coverage(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the coverage of every family: its models, and for each rule the modules, reasons and models it covers.

    `some` counts the models in which the rule accepts a module, `every` those in which it accepts all of its kind, and
    `having` those that have a module of the kind.
    """
    families: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "error" in row:
            continue
        family = families.setdefault(row["family"], {"models": 0, "rules": {}})
        family["models"] += 1
        for rule, (accepted, modules, reasons) in row["rules"].items():
            total = family["rules"].setdefault(
                rule, dict(accepted=0, modules=0, some=0, every=0, having=0, reasons=Counter())
            )
            total["accepted"] += accepted
            total["modules"] += modules
            total["some"] += accepted > 0
            total["every"] += 0 < accepted == modules
            total["having"] += modules > 0
            total["reasons"].update(reasons)
    for family in families.values():
        for total in family["rules"].values():
            total["reasons"] = dict(total["reasons"].most_common())
    return dict(sorted(families.items()))
