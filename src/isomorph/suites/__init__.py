"""Named test suites: which images, which labels, which classes count, and the measures that are published of them."""

from isomorph.suites.imagenet.suites import SUITES, open_suites
from isomorph.suites.sweep import Sweep, evaluate_suites

__all__ = ["SUITES", "Sweep", "evaluate_suites", "open_suites"]
