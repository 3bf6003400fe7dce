"""The vertical layout of a CoAtNet, as the paper writes it.

`C-C-T-T` has four stages after the stem, each of half the resolution of the one before. Letters with no hyphen between
them share a resolution: `C-C-CT-T` is CoAtNet-6's mixed third stage. The stem is `S`, in front of every layout that
names none; `PT`, patches and then Transformer blocks, is ViT_REL.
"""

from collections.abc import Sequence
from typing import NamedTuple

from isomorph.errors import UserError

STEM_DEPTHS = {"S": 2, "P": 1}
"""Convolutions of each stem."""


class Group(NamedTuple):
    """Blocks of one kind and width, in a row; the first halves the map, or not."""

    kind: str
    halves: bool
    depth: int
    width: int


def parse_layout(layout: str, depths: Sequence[int], widths: Sequence[int]) -> list[list[Group]]:
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
    return [[Group(kind, i == 0, *next(sizes)) for i, kind in enumerate(stage)] for stage in stages]


def count_levels(layout: str) -> int:
    """Resolutions of a layout: features that it gives. What is no layout is refused where it is parsed."""
    if not isinstance(layout, str):
        return 1
    return layout.count("-") + (1 if layout[:1] in STEM_DEPTHS else 2)
