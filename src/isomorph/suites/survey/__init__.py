"""The survey of a model: which layers can be recast, how soft, and what it costs."""

from isomorph.suites.survey.advice import advice_lines, most_layers, softest_alone
from isomorph.suites.survey.rules import SETTINGS, conv_rules
from isomorph.suites.survey.run import survey

__all__ = ["SETTINGS", "advice_lines", "conv_rules", "most_layers", "softest_alone", "survey"]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
