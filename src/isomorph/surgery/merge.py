"""Merge norms, scales, branches and chains of a model into its layers, in float64, and compare both models."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.operations import copy_module
from isomorph.surgery.affine import Group
from isomorph.surgery.collapse import Collapse, can_collapse
from isomorph.surgery.fuse_report import FuseReport
from isomorph.surgery.merge_plan import MergePlan
from isomorph.surgery.merged_weights import merged_weights
from isomorph.surgery.modules import parent_name
from isomorph.surgery.reference_calls import ReferenceCalls
from isomorph.surgery.rule import Rule
from isomorph.surgery.site import Site


@dataclass(frozen=True)
class Merge(Rule):
    """Rule that gives a module the form that it has after its function, or another's, was written into a layer.

    Forms: "layer", a layer with other weights, where asked for with a `bias` or another number of `outputs`;
    "identity", what is left of a norm or scale, its activation; "nothing", a branch that gives 0; "unscaled", a norm
    without its weight and bias. The values come from `fuse`, or from a checkpoint.

    >>> iso.surgery.Merge("identity").build(iso.surgery.Site(torch.nn.BatchNorm2d(4)))
    Identity()
    """

    form: str
    outputs: int = 0
    bias: bool = False

    atol = 1e-4
    is_reverted = False
    keeps_output = False

    def reason(self, site: Site) -> str | None:
        module = site.module
        needs_weight = self.form in ("layer", "unscaled")
        has_weight = getattr(module, "weight", None) is not None
        return "it has no weight" if needs_weight and not has_weight else None

    @torch.no_grad()
    def build(self, site: Site) -> nn.Module:
        self.check(site)
        module = site.module
        if self.form == "nothing":
            return ZeroBranch()
        if self.form == "identity":
            children = [
                (name, child)
                for name, child in module.named_children()
                if type(child) is not nn.Identity
            ]
            return nn.Sequential(OrderedDict(children)) if children else nn.Identity()
        new: Any = copy.deepcopy(module)
        if self.form == "unscaled":
            new._parameters |= dict.fromkeys(new._parameters)
            return new
        weight = new.weight
        width = "out_features" if hasattr(new, "out_features") else "out_channels"
        rows = self.outputs or getattr(new, width, len(weight))
        if self.outputs:
            new.weight = nn.Parameter(
                weight.new_zeros(rows, *weight.shape[1:]), weight.requires_grad
            )
            setattr(new, width, rows)
        if self.outputs or (self.bias and new.bias is None):
            new.bias = nn.Parameter(weight.new_zeros(rows), weight.requires_grad)
        return new


class ZeroBranch(nn.Module):
    """A branch that was written into another layer: it gives 0 for any input."""

    def forward(self, *_: Any) -> int:
        """Return 0."""
        return 0


def find_faults(
    names: list[Any], describe_fault: Callable[[list[Any]], str | None]
) -> dict[Any, str]:
    """Return the names with which a model changes, by halving, with what `describe_fault` says of each."""
    accepted: list[Any] = []
    faults: dict[Any, str] = {}

    def halve(half: list[Any]) -> None:
        reason = describe_fault([*accepted, *half])
        if reason is None:
            accepted.extend(half)
        elif len(half) == 1:
            faults[half[0]] = reason
        else:
            halve(half[: len(half) // 2])
            halve(half[len(half) // 2 :])

    if names:
        halve(names)
    return faults


class Merged(NamedTuple):
    """A model with all groups merged that leave it equal, the edits that merged them, and what was merged and left."""

    model: nn.Module
    edits: list[tuple[Rule, str]]
    report: FuseReport


# The order of merging. Into readers first: one of them may be a branch that is written into another layer afterwards.
# Chains need their sums, and a module that becomes its layer takes the names of all inside with it.
_ORDER = ("readers", "sum", "chain", "whole")


class _CommonPlan:
    """What all calls show together: the groups in which they agree, the norms, what is left, what was called."""

    def __init__(self, model: nn.Module, calls: ReferenceCalls, avoid: frozenset[str]) -> None:
        # Groups by their key: of the first call, and those in which all calls so far agree.
        self.groups_of_first_call: dict[Any, Group] | None = None
        self.common: dict[Any, Group] = {}
        # Modules that are not merged and that give or get other values, by the key of a group.
        self.changed_between: dict[Any, list[str]] = defaultdict(list)
        self.norms: set[str] = set()
        self.left: dict[str, str] = {}
        self.called: set[str] = set()
        for plan in calls.plans(model, avoid):
            self._agree_with(plan)
        self.groups = sorted(self.common.values(), key=lambda group: _ORDER.index(group.kind))

    def _agree_with(self, plan: MergePlan) -> None:
        """Keep the groups that a call shows too, or that it does not concern."""
        groups = {group.key: group for group in plan.groups}
        if self.groups_of_first_call is None:
            self.groups_of_first_call = groups
            self.common = groups
        self.common = {
            key: group
            for key, group in self.common.items()
            if key in groups or not plan.concerns(group)
        }
        for key, group in groups.items():
            self.changed_between[key] += group.between
        self.norms |= plan.norms
        self.left |= plan.left
        self.called |= plan.called

    def usable(self, chosen: list[Group]) -> list[Group]:
        """Return the chosen groups in order, without those that need another that is not chosen."""
        sums = {chosen_group.carriers[0] for chosen_group in chosen if chosen_group.kind == "sum"}
        return [
            group
            for group in self.groups
            if group in chosen and (group.carriers[0] in sums or not group.needs_sum)
        ]

    def rejected(self, model: nn.Module, across: bool, only_forward: bool) -> dict[Group, str]:
        """Return the groups that would lose something of a module, or change what one gives that may be called alone.

        Without `across` also those that change what any module gives.
        """
        rejected = {}
        for group in self.groups:
            between = self.changed_between[group.key]
            removed = {name for _, name in group.changes}
            alone = [
                name for name in between if _is_called_alone(model, name, as_slice=name in removed)
            ]
            if group.whole and not can_collapse(model, group.whole):
                rejected[group] = "its module holds more than that layer"
            elif between and not across:
                rejected[group] = (
                    f"with it merged, {between[0]} would give or get other values (across=False)"
                )
            elif alone and not only_forward:
                reason = f"with it merged, {alone[0]} called alone would give or get other values"
                rejected[group] = f"{reason}; only_forward=True allows it"
        return rejected


def _is_called_alone(model: nn.Module, name: str, as_slice: bool) -> bool:
    """Return True for what code outside a model calls: its children, and the items of sequences and lists in it.

    `as_slice`: for a norm that goes, whose place is asked for only as the end of a slice of an nn.Sequential.
    """
    path = parent_name(name)
    if as_slice and not isinstance(model.get_submodule(path), nn.Sequential):
        return False
    while path:
        if not isinstance(model.get_submodule(path), nn.Sequential | nn.ModuleList | nn.ModuleDict):
            return False
        path = parent_name(path)
    return True


class _Trials:
    """Copies of a model with groups merged, of which the last is kept."""

    def __init__(self, model: nn.Module, plan: _CommonPlan) -> None:
        self.model = model
        self.plan = plan
        self.chosen: list[Group] | None = None
        self.last = model
        self.edits: list[tuple[Rule, str]] = []

    def merged(self, chosen: list[Group]) -> nn.Module:
        """Return a copy with these groups merged; the last one again if they are the same."""
        groups = self.plan.usable(chosen)
        if groups != self.chosen:
            self.last = copy_module(self.model)
            aliases = _aliases(self.last)
            self.edits = []
            for group in groups:
                self.edits += _apply(self.last, aliases, group)
            self.chosen = groups
        return self.last


Aliases = dict[str, list[str]]


def _aliases(model: nn.Module) -> Aliases:
    """Return all names of every module, by the first."""
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)
    return {first: [first, *others] for first, *others in names.values()}


def merge(
    model: nn.Module,
    calls: ReferenceCalls,
    across: bool,
    avoid: frozenset[str] = frozenset(),
) -> Merged:
    """Return a copy of a float64 model with all groups merged that leave it equal.

    Groups count in which all calls agree. Where the merged model differs, the groups at fault are found by halving; if
    they have adapters or branches that code multiplies, it is done again without those, whose layers are in `avoid`.
    """
    plan = _CommonPlan(model, calls, avoid)
    faults = plan.rejected(model, across, calls.only_forward)

    trials = _Trials(model, plan)
    allowed = [group for group in plan.groups if group not in faults]
    faults |= find_faults(allowed, lambda chosen: calls.fault(lambda: trials.merged(chosen)))
    at_fault = _layers_to_avoid(plan, faults)
    if at_fault:
        return merge(model, calls, across, avoid | at_fault)
    accepted = plan.usable([group for group in plan.groups if group not in faults])
    new = trials.merged(accepted)
    into: dict[str, str] = {}
    between: dict[str, str] = {}
    for group in accepted:
        modules = plan.changed_between[group.key]
        for _, name in group.changes:
            into[name] = ", ".join(group.carriers)
            if modules:
                between[name] = modules[0]
    reasons = _reasons_left(model, plan, faults)
    left = {name: reason for name, reason in reasons.items() if name not in into}
    report = FuseReport(
        merged=into,
        left=left,
        across=between,
        uncalled=_uncalled(model, plan),
        wholes=tuple(group.whole.name for group in accepted if group.whole),
    )
    if not any(group.kind == "readers" for group in accepted):
        return Merged(new, trials.edits, report)
    # layers of two norms may read one value now
    further = merge(new, calls, across, avoid)
    edits = [*trials.edits, *further.edits]
    return Merged(further.model, edits, _join_rounds(report, further.report))


def _layers_to_avoid(plan: _CommonPlan, faults: dict[Group, str]) -> set[str]:
    """Return the layers of adapters and scaled branches whose groups failed, or that not all calls show.

    No later plan has them again, so that repeating it ends.
    """
    found = set()
    for key, group in (plan.groups_of_first_call or {}).items():
        if key in plan.common and group not in faults:
            continue
        for summand in group.summands:
            if summand.layer and (summand.after or summand.stays):
                found.add(summand.layer)
    return found


def _join_rounds(first: FuseReport, second: FuseReport) -> FuseReport:
    """Return what two rounds of merging did."""
    return replace(
        first,
        merged=first.merged | second.merged,
        left={name: reason for name, reason in first.left.items() if name not in second.merged},
        across=first.across | second.across,
        wholes=tuple(dict.fromkeys((*first.wholes, *second.wholes))),
    )


def _uncalled(model: nn.Module, plan: _CommonPlan) -> tuple[str, ...]:
    """Return the modules with parameters of their own that no call runs or reads."""
    uncalled = []
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and name not in plan.called:
            uncalled.append(name)
    return tuple(uncalled)


def _reasons_left(model: nn.Module, plan: _CommonPlan, faults: dict[Group, str]) -> dict[str, str]:
    """Return why norms are not merged, if they are not, and which modules with weights no call runs."""
    reasons: dict[str, str] = {}
    for group, reason in faults.items():
        reasons |= {name: reason for _, name in group.changes if name in plan.norms}
    reasons |= plan.left
    for name, module in model.named_modules():
        if name in plan.norms:
            reasons.setdefault(
                name, "calls at other sizes or by other methods differ in what they read"
            )
        elif isinstance(module, _BatchNorm):
            reasons[name] = (
                NOT_CALLED if name not in plan.called else "it is not the BatchNorm of a batch"
            )
    return reasons


# Why a norm is left that no example runs.
NOT_CALLED = "no example calls it"


@torch.no_grad()
def _apply(model: nn.Module, aliases: Aliases, group: Group) -> list[tuple[Rule, str]]:
    """Merge a group in place and return the edits that do so."""
    edits: list[tuple[Rule, str]] = []

    def reshape(rule: Rule, name: str) -> Any:
        old = model.get_submodule(name)
        new = rule.build(Site(old)).eval()
        for alias in aliases[name]:
            model.set_submodule(alias, new)
        edits.append((rule, name))
        return new

    written = merged_weights(model, group)
    for name, (weight, bias) in zip(group.carriers, written, strict=False):
        layer = reshape(
            Merge("layer", len(weight) if group.kind == "chain" else 0, bias is not None), name
        )
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    for form, name in group.changes:
        reshape(Merge(form), name)
    if group.whole:
        reshape(Collapse(group.whole.parts), group.whole.name)
    return edits
