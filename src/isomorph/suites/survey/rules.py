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

    With `content="none"`, which has no gates, the gates are left out.

    >>> from isomorph.suites.survey import conv_rules
    >>> [rule.locality for rule in conv_rules([(5.0, 6.0), (1.0, 1.0)], content="window")]
    [5.0, 1.0]
    """
    gated = options.get("content") != "none"
    return [ConvToGPSA(locality=locality, gate=gate if gated else None, **options) for locality, gate in settings]


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
    """Return the rules with labels such as "exact" or "locality 5, gate 6", without the fields of `shared_fields`.

    Raises: UserError without a rule, or if two are equal.
    """
    if not rules:
        raise UserError("there is no rule to survey; give at least one")
    shared = _shared(rules)
    labelled = [SurveyedRule(rule, _label(rule, shared)) for rule in rules]
    labels = [entry.label for entry in labelled]
    if repeated := next((label for label in labels if labels.count(label) > 1), None):
        raise UserError(f"two rules of the survey are equal ({repeated}); give each once")
    return labelled


def shared_fields(rules: Sequence[Rule]) -> str:
    """Return in words what is the same for several rules, and not the default: "content window"; "" without any."""
    return _words(rules[0], sorted(_shared(rules)))


def _shared(rules: Sequence[Any]) -> set[str]:
    """Return the names of the fields that are the same for several rules, other than the softness."""
    if len({type(rule) for rule in rules}) != 1 or len(rules) == 1:
        return set()
    names = {field.name for field in fields(rules[0])} - set(_SOFTNESS_FIELDS)
    return {name for name in names if len({repr(getattr(rule, name)) for rule in rules}) == 1}


def _words(rule: Any, names: Sequence[str]) -> str:
    """Return those of the fields that differ from their defaults, in words."""
    changed = [f for f in fields(rule) if f.name in names and getattr(rule, f.name) != f.default]
    return ", ".join(f"{f.name} {_text(getattr(rule, f.name))}" for f in changed)


def _label(rule: Any, shared: set[str]) -> str:
    """Return the fields that differ from their defaults, in words; "exact" for a rule that keeps the function."""
    words = _words(rule, [field.name for field in fields(rule) if field.name not in shared])
    changed = [words] if words else []
    if keeps_function(rule):
        changed.insert(0, "exact")
    return ", ".join(changed) or type(rule).__name__


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
