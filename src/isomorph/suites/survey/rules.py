"""The rules that a survey tries: one kind of attention, from hard to soft."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from isomorph.errors import UserError
from isomorph.surgery import ConvToGPSA, Rule
from isomorph.surgery.recast import keeps_function

SETTINGS = ((8.0, 8.0), (5.0, 6.0), (4.0, 5.0), (3.0, 4.0), (2.0, 3.0), (1.5, 2.0), (1.0, 1.0))
"""(locality, gate) from nearly the convolution to the paper's start: heads widen, and content gains weight."""
_SOFTNESS_FIELDS = ("init", "locality", "gate")
"""Fields of rules that change the function, and not its cost."""


def conv_rules(settings: Sequence[tuple[float, float]] = SETTINGS, **options: Any) -> list[Rule]:
    """Return a ConvToGPSA for each (locality, gate); `options` are its other fields.

    >>> from isomorph.suites.survey import conv_rules
    >>> [rule.locality for rule in conv_rules([(5.0, 6.0), (1.0, 1.0)])]
    [5.0, 1.0]
    """
    return [ConvToGPSA(locality=locality, gate=gate, **options) for locality, gate in settings]


@dataclass(frozen=True)
class SurveyedRule:
    """A rule and its label: what distinguishes it from the other rules of the survey."""

    rule: Rule
    label: str

    @property
    def cost_key(self) -> Rule:
        """The rule with default softness, which costs the same."""
        rule: Any = self.rule
        return replace(rule, **{field.name: field.default for field in fields(rule) if field.name in _SOFTNESS_FIELDS})


def label_rules(rules: Sequence[Rule]) -> list[SurveyedRule]:
    """Return the rules with labels such as "exact" or "locality 5, gate 6".

    Raises: UserError without a rule, or if two are equal.
    """
    if not rules:
        raise UserError("there is no rule to survey; give at least one")
    labelled = [SurveyedRule(rule, _label(rule)) for rule in rules]
    labels = [entry.label for entry in labelled]
    if repeated := next((label for label in labels if labels.count(label) > 1), None):
        raise UserError(f"two rules of the survey are equal ({repeated}); give each once")
    return labelled


def _label(rule: Any) -> str:
    """Return the fields that differ from their defaults, in words; "exact" for a rule that keeps the function."""
    changed = [f"{f.name} {_text(getattr(rule, f.name))}" for f in fields(rule) if getattr(rule, f.name) != f.default]
    if keeps_function(rule):
        changed.insert(0, "exact")
    return ", ".join(changed) or type(rule).__name__


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
