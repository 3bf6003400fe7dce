"""Parse a CoAtNet's layout, written as in the paper, and check its other options.

`C-C-T-T` has four stages after the stem, each at half the resolution of the one before; C is convolution, T attention.
Letters without a hyphen between them share a resolution: the third stage of `C-C-CT-T`, CoAtNet-6's layout, is mixed.
The stem is the letter `S`, which may be left out, or `P` for patches: `PT`, patches and then Transformer blocks, is
ViT_REL.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from timm.layers import to_2tuple

from isomorph.errors import UserError

STEM_DEPTHS = {"S": 2, "P": 1}
"""Number of convolutions in each stem."""


class BlockGroup(NamedTuple):
    """Consecutive blocks of one kind and width; if `halves`, the first one halves the feature map."""

    kind: str
    halves: bool
    depth: int
    width: int


def parse_layout(layout: str, depths: Sequence[int], widths: Sequence[int]) -> list[list[BlockGroup]]:
    """Return the stages as lists of groups, the stem first in the first stage.

    Raises: UserError for a layout that cannot be parsed, or depths and widths that do not fit it.
    """
    if not isinstance(layout, str) or not all(isinstance(given, Sequence) for given in (depths, widths)):
        raise UserError(f"layout {layout!r} must be text, depths {depths!r} and widths {widths!r} lists of numbers")
    written = layout if layout[:1] in STEM_DEPTHS else f"S-{layout}"
    stages, letters = written.split("-"), written.replace("-", "")
    if not all(stages) or set(letters[1:]) - set("CT") or len(letters) < 2:
        raise UserError(f"layout {layout!r} is invalid; write stages of C and T, as in C-C-T-T, C-C-CT-T or PT")
    if not len(depths) == len(widths) == len(letters):
        raise UserError(
            f"layout {layout!r} with its stem has {len(letters)} letters; give {len(letters)} depths and widths, "
            f"not {len(depths)} and {len(widths)}"
        )
    if not all(type(n) is int and n > 0 for n in (*depths, *widths)):
        raise UserError(f"depths {list(depths)} and widths {list(widths)} must be whole numbers above 0")
    if depths[0] != STEM_DEPTHS[letters[0]]:
        raise UserError(
            f"depths {list(depths)} must begin with {STEM_DEPTHS[letters[0]]}, the depth of stem {letters[0]}"
        )
    sizes = iter(zip(depths, widths, strict=True))
    return [[BlockGroup(kind, i == 0, *next(sizes)) for i, kind in enumerate(stage)] for stage in stages]


def count_resolutions(layout: str) -> int:
    """Return the number of resolutions, and thus of feature maps; 1 for what parse_layout rejects."""
    if not isinstance(layout, str):
        return 1
    return layout.count("-") + (1 if layout[:1] in STEM_DEPTHS else 2)


CHOICES = {
    "norm": ("batch", "layer"),
    "relative": ("pre", "post", "none"),
    "stride_on": ("expand", "depthwise"),
    "global_pool": ("avg", "max", "avgmax", ""),
}


def check_choices(**choices: Any) -> None:
    """Check that each option has one of its allowed values. Raises: UserError if not."""
    for name, value in choices.items():
        if value not in CHOICES[name]:
            raise UserError(f"{name} {value!r} is unknown; choose {' or '.join(map(repr, CHOICES[name]))}")


def check_positive_integers(**numbers: Any) -> None:
    """Check that each option is a whole number above 0. Raises: UserError if not."""
    for name, number in numbers.items():
        if type(number) is not int or number < 1:
            raise UserError(f"{name} {number!r} must be a whole number above 0")


def check_rates(**rates: float) -> None:
    """Check that each option is at least 0 and below 1. Raises: UserError if not."""
    for name, rate in rates.items():
        if not 0 <= rate < 1:
            raise UserError(f"{name} {rate} must be at least 0 and below 1")


def parse_image_size(img_size: Any) -> tuple[int, int]:
    """Return an image size as (height, width). Raises: UserError if it is not one or two whole numbers above 0."""
    size = to_2tuple(img_size)
    if len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise UserError(f"img_size {img_size!r} must be a whole number above 0, or a pair of them")
    return size[0], size[1]
