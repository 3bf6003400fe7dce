"""Plain messages for the errors of torch and timm about images that do not fit a model."""

import re

_PATTERNS = {
    r"Input (?:height|width) \((\d+)\) doesn't match model \((\d+)\)": (
        "images of {0} pixels do not fit this model, which was built for {1}; give --size {1}, or leave --size out"
    ),
    r"Input (?:height|width) \((\d+)\) should be divisible by patch size \((\d+)\)": (
        "images of {0} pixels do not fit this model; give a --size that is a multiple of its patch size {1}"
    ),
    r"expected input\[.*?\] to have (\d+) channels, but got (\d+) channels": (
        "the model takes {0}-channel images, but these have {1} channels; give other data, or another model"
    ),
    r"reads feature maps of (\d+) channels, not (\d+)": (
        "the model takes {0}-channel images, but these have {1} channels; give other data, or another model"
    ),
    r"[Kk]ernel size can't be greater than actual input size": (
        "the images are too small for this model; give a larger --size"
    ),
    r"Output size is too small": "the images are too small for this model; give a larger --size",
}


def explain_shape_error(text: str) -> str | None:
    """Return what to do about an error message of torch or timm, or None if it is not about the shape of images."""
    for pattern, advice in _PATTERNS.items():
        if found := re.search(pattern, text):
            return advice.format(*found.groups())
    return None
