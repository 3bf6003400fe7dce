"""Named test suites: which images, which labels, which classes count, and the measures that are published of them."""

from isomorph.suites.evaluating import Sweep, evaluate_suites
from isomorph.suites.imagenet import SUITES, open_suites
from isomorph.suites.robustness import robustness

__all__ = ["SUITES", "Sweep", "evaluate_suites", "open_suites", "robustness"]
