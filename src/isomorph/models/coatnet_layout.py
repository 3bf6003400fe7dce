"""What a CoAtNet may be: its vertical layout, as the paper writes it, and its other choices.

`C-C-T-T` has four stages after the stem, each of half the resolution of the one before. Letters with no hyphen between
them share a resolution: `C-C-CT-T` is CoAtNet-6's mixed third stage. The stem is `S`, in front of every layout that
names none; `PT`, patches and then Transformer blocks, is ViT_REL.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from timm.layers import to_2tuple

from isomorph.errors import UserError

STEM_DEPTHS = {"S": 2, "P": 1}
"""Convolutions of each stem."""


class BlockGroup(NamedTuple):
    """Blocks of one kind and width, in a row; the first halves the map, or not."""

    kind: str
    halves: bool
    depth: int
    width: int


def parse_layout(layout: str, depths: Sequence[int], widths: Sequence[int]) -> list[list[BlockGroup]]:
    """Stages of groups, the stem at the head of the first. Raises: UserError for a layout that cannot be built."""
    if not isinstance(layout, str) or not all(isinstance(given, Sequence) for given in (depths, widths)):
        raise UserError(f"layout {layout!r} must be text, depths {depths!r} and widths {widths!r} lists of numbers")
    written = layout if layout[:1] in STEM_DEPTHS else f"S-{layout}"
    stages, letters = written.split("-"), written.replace("-", "")
    if not all(stages) or set(letters[1:]) - set("CT") or len(letters) < 2:
        raise UserError(f"layout {layout!r} is not understood; write stages of C and T, as in C-C-T-T, C-C-CT-T or PT")
    if not len(depths) == len(widths) == len(letters):
        raise UserError(
            f"layout {layout!r} has {len(letters)} parts with its stem: give as many depths and widths, "
            f"not {len(depths)} and {len(widths)}"
        )
    if not all(type(n) is int and n > 0 for n in (*depths, *widths)):
        raise UserError(f"depths {list(depths)} and widths {list(widths)} must be whole numbers above 0")
    if depths[0] != STEM_DEPTHS[letters[0]]:
        raise UserError(f"depths {list(depths)}: the stem {letters[0]} has {STEM_DEPTHS[letters[0]]}, not {depths[0]}")
    sizes = iter(zip(depths, widths, strict=True))
    return [[BlockGroup(kind, i == 0, *next(sizes)) for i, kind in enumerate(stage)] for stage in stages]


def count_resolutions(layout: str) -> int:
    """Resolutions of a layout: features that it gives. What is no layout is refused where it is parsed."""
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
    """Raises: UserError for a choice that there is not."""
    for name, value in choices.items():
        if value not in CHOICES[name]:
            raise UserError(f"{name} {value!r} is unknown; choose {' or '.join(map(repr, CHOICES[name]))}")


def check_positive_integers(**numbers: Any) -> None:
    """Raises: UserError for one that is no whole number above 0."""
    for name, number in numbers.items():
        if type(number) is not int or number < 1:
            raise UserError(f"{name} {number!r} must be a whole number above 0")


def check_rates(**rates: float) -> None:
    """Raises: UserError for one that is not from 0 to below 1."""
    for name, rate in rates.items():
        if not 0 <= rate < 1:
            raise UserError(f"{name} {rate} must be from 0 to below 1")


def parse_image_size(img_size: Any) -> tuple[int, int]:
    """As (height, width). Raises: UserError when it is no size."""
    size = to_2tuple(img_size)
    if len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise UserError(f"img_size {img_size!r} must be a whole number above 0, or a pair of them")
    return size[0], size[1]
