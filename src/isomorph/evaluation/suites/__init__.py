"""Named test sets and their protocols: ImageNet's suites, and robustness under corruptions."""
