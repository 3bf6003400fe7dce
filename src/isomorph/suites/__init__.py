"""Named test suites of ImageNet-1k, and evaluation on them at several image sizes."""

from isomorph.suites.imagenet.suites import SUITES, open_suites
from isomorph.suites.sweep import Sweep, evaluate_suites

__all__ = ["SUITES", "Sweep", "evaluate_suites", "open_suites"]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
