"""ImageNet's test suites: folders, classes and labels."""
