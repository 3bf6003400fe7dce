"""Named test suites: which images, which labels, which classes count, and the measures that are published of them."""

from isomorph.suites.robustness import robustness

__all__ = ["robustness"]
