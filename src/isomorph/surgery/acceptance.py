"""Which modules of a model a rule accepts, and why it rejects the others."""

from typing import NamedTuple

from torch import nn

from isomorph.errors import UserError
from isomorph.surgery.compiled import unwrap_compiled
from isomorph.surgery.recast import Rule, bind_rule, check_model, rule_kinds
from isomorph.surgery.where import Where, matches_where


class Acceptance(NamedTuple):
    """Names of the modules that a rule accepts, and the reason for each module of its kind that it rejects.

    >>> cnn = timm.create_model("resnet18", num_classes=3)
    >>> iso.surgery.acceptance(cnn, iso.ConvToGPSA(), where="layer4.0.*").rejected
    {}
    """

    accepted: list[str]
    rejected: dict[str, str]


def acceptance(model: nn.Module, rule: Rule, where: Where = "*") -> Acceptance:
    """Return which modules of the rule's kind that `where` selects are accepted, in the order of the model's modules.

    Unlike `targets`, it raises no error for a module that the rule rejects.

    Raises: UserError if the model is not a model.

    >>> cnn = timm.create_model("convnext_atto")
    >>> found = iso.surgery.acceptance(cnn, iso.ConvToGPSA())
    >>> found.rejected["stem.0"]
    'the 4x4 kernel has even sides, so no tap lies in its middle'
    """
    check_model(model)
    model = unwrap_compiled(model)
    bound = bind_rule(rule, model)
    kinds = rule_kinds(bound)
    accepted: list[str] = []
    rejected: dict[str, str] = {}
    for name, module in model.named_modules():
        if not matches_where(where, name, module):
            continue
        if bound.accepts(module):
            accepted.append(name)
        elif isinstance(module, kinds):
            rejected[name] = _reason(bound, module)
    return Acceptance(accepted, rejected)


def _reason(rule: Rule, module: nn.Module) -> str:
    """Return why the rule rejects the module: what it says itself, or the error of its `build`."""
    if explain := getattr(rule, "rejection_reason", None):
        return explain(module)
    try:
        rule.build(module)
    except UserError as error:
        return str(error)
    return f"{type(rule).__name__} does not accept it"
