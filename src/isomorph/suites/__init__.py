"""Named test suites: which images, which labels, which classes count, and the measures that are published of them."""
