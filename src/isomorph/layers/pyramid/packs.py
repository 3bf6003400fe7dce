"""The tensors of pyramids of one form, packed: matrices with equal columns below each other, and all vectors.

Letters as in `closed_form.py`.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from isomorph.layers.eager import is_eager


class Form(NamedTuple):
    """Sizes of pyramids that are computed together: what their tensors have in common."""

    pyramids: int
    rectified: int
    groups: int
    reads: int
    """Channels of a token."""
    depths: tuple[int, ...]
    """Units of every branch, in ascending order."""
    widths: tuple[int, ...]
    """Channels after the first, second, ... units of a branch."""
    out: int
    last: bool
    """Whether branches end with a linear layer."""
    skip: bool
    scale: float
    """Factor of the sum of the branches."""
    rest: float
    """Further factor of the pyramids that are not rectified, where others are."""
    eps: float


class Block(NamedTuple):
    """Matrices of equal shape, one for each of some chains: their place among the tensors and among the rows read."""

    tensors: slice
    number: int
    rows: int
    width: int
    """Columns of the matrices; all matrices with as many columns are packed."""
    span: slice
    column: int
    """The first of the vectors that they multiply, among those of that width."""
    on_mean: bool


class Plan(NamedTuple):
    """The order in which tensors are packed, and where they are then found."""

    packs: dict[int, list[Block]]
    inner: list[Block]
    lasts: list[Block]
    skip: Block | None
    ended: list[int]
    """Branches that are no deeper than each level."""
    order: list[int]
    """Biases, the mean (-1) and shifts, scales, and shifts that rectify, as they are packed."""
    sizes: list[int]
    level_rows: list[int]
    rest_rows: int
    free_column: int
    """The first shift of units that no matrix multiplies."""
    weights: int
    """Number of weights."""
    vector_sizes: list[int]
    """Entries of the biases, scales and shifts, in the order in which tensors are given."""


def _make_plan(form: Form) -> Plan:
    """Plan the packs of tensors that are given in the order of `collapse`."""
    P, J, widths = form.pyramids, len(form.depths), (form.reads, *form.widths)
    ended = [sum(depth <= level for depth in form.depths) for level in range(len(widths))]
    counts = [1, *((J - before) * P for before in ended[:-1])]  # vectors at each level: the mean, then shifts
    shapes = [(level, ended[level], (J - ended[level]) * P, rows) for level, rows in enumerate(form.widths)]
    shapes += [(depth, j, P, form.out) for j, depth in enumerate(form.depths) if form.last]
    shapes += [(0, 0, P, form.out)] * form.skip
    packs: dict[int, list[Block]] = {widths[level]: [] for level, *_ in shapes}
    if not form.last:
        packs.setdefault(form.out, [])
    same = [[other for other in range(len(widths)) if widths[other] == width] for width in widths]
    blocks, first = [], 0
    for level, branch, count, rows in shapes:
        pack = packs[widths[level]]
        start = pack[-1].span.stop if pack else 0
        column = sum(counts[other] for other in same[level] if other < level)
        column += (branch - ended[level - 1]) * P if level else 0
        span = slice(start, start + count * rows)
        blocks.append(Block(slice(first, first + count), count, rows, widths[level], span, column, level == 0))
        pack.append(blocks[-1])
        first += count
    D, n, norms = len(form.widths), form.rectified, sum(counts[1:])
    shifts, at = 2 * first + norms + n, [0, *accumulate(counts[1:])]
    order = [first + i for pack in packs.values() for b in pack for i in range(b.tensors.start, b.tensors.stop)]
    for level in (level for width in packs for level in same[widths.index(width)]):
        order += [shifts + i for i in range(at[level - 1], at[level])] if level else [-1]
    rest_rows = (P - n) * form.out if n else 0
    order += [*range(2 * first, shifts), *([-2] if rest_rows else []), *range(shifts + norms, shifts + norms + n)]
    level_rows = [block.number * block.rows for block in blocks[:D]] + [n * form.out] * (n > 0)
    sizes = [pack[-1].span.stop if pack else 0 for pack in packs.values()]
    sizes += [width * sum(counts[level] for level in same[widths.index(width)]) for width in packs]
    sizes += [sum(level_rows) + rest_rows, n * form.out]
    lasts = blocks[D : D + J * form.last]
    skip = blocks[-1] if form.skip else None
    free = int(form.out == form.reads)  # after the mean
    norms_rows = [b.rows for b in blocks[:D] for _ in range(b.number)] + [form.out] * n
    vectors = [block.rows for block in blocks for _ in range(block.number)] + norms_rows * 2
    return Plan(packs, blocks[:D], lasts, skip, ended, order, sizes, level_rows, rest_rows, free, first, vectors)


_cached_plan = lru_cache(maxsize=256)(_make_plan)


def plan_of(form: Form) -> Plan:
    return _cached_plan(form) if is_eager() else _make_plan(form)


def _join(parts: Sequence[Tensor], groups: int, width: int = 0) -> Tensor:
    """Return parameters as one: vectors (G x,) each -> (G, X), or weights (G r, width, ...) each -> (G, R, width)."""
    if groups > 1:
        shape = (groups, -1, width) if width else (groups, -1)
        parts = [part.reshape(shape) for part in parts]
    elif width:
        parts = [part if part.ndim == 2 else part.flatten(1) for part in parts]
    joined = parts[0] if len(parts) == 1 else torch.cat(list(parts), int(groups > 1))
    return joined if groups > 1 else joined.unsqueeze(0)


class Packs:
    """The tensors of pyramids, packed: matrices by width below each other, and all vectors."""

    def __init__(self, form: Form, tensors: Sequence[Tensor], mean: Tensor, vectors: Tensor | None = None) -> None:
        self.form, self.plan, self.tensors = form, plan_of(form), tensors
        if vectors is None:
            given = [*tensors, mean.view(-1)]  # the last one is number -1
            if rows := form.groups * self.plan.rest_rows:
                given[-1:] = [mean.new_full((rows,), form.rest * form.eps**0.5), given[-1]]
            vectors = _join([given[i] for i in self.plan.order], form.groups).to(mean.dtype)
        self.vectors, packs = vectors, self.plan.packs
        *parts, self.scales, self.rectified_shift = torch.split_with_sizes(vectors, self.plan.sizes, 1)
        self.biases = dict(zip(packs, parts, strict=False))
        columns = zip(packs, parts[len(packs) :], strict=True)
        self.columns = {width: part.view(form.groups, -1, width) for width, part in columns}  # (G, vectors, width)

    def matrix(self, width: int, levels: Sequence[Tensor] = ()) -> Tensor:
        """Return all matrices of a width, those of further levels after the first block. Shape: -> (G, R, width)"""
        parts = [t for block in self.plan.packs[width] for t in self.tensors[block.tensors]]
        if levels:
            at = self.plan.inner[0].number
            parts[at:at] = [each.squeeze(0) if self.form.groups == 1 else each for each in levels]
        return _join(parts, self.form.groups, width).to(self.vectors.dtype)

    def read(self, block: Block) -> Tensor:
        """Return the vectors that the matrices of a block multiply. Shape: -> (G, count, width)"""
        return self.columns[block.width].narrow(1, block.column, block.number)


def stacked(pack: Tensor, block: Block, after: int = 0) -> Tensor:
    """Return the matrices of a block, so many rows after its place. Shape: (G, R, width) -> (G count, rows, width)"""
    rows = pack.narrow(1, block.span.start + after, block.number * block.rows)
    return rows.reshape(-1, block.rows, block.width)
