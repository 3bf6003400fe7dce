"""Closed form: chains of linear and BatchNorm layers that read one input, as one affine map of it, in train mode too.

Given mean m and covariance S of the tokens in a batch, every chain computes A (x - m) + c, with

    linear      A <- W A,                                     c <- W c + b
    BatchNorm   s = gamma / sqrt(diag(A S A^T) + eps),        A <- s A,     c <- beta

because a unit A (x - m) + c has mean c and variance diag(A S A^T) over the batch. This equals running the tokens
through the layers, but costs only products of weight matrices. Pyramids of one form that read one input are computed
together, level after level: the first layers of all branches, their BatchNorms, the second layers, and so on. Z are the
rows A of all chains at one level, P is Z S.

**Backward.** dA is the gradient of a level's output, dv that of its variances v:

    dgamma = rowsum(dA Z) / sqrt(v + eps),    dv = -gamma dgamma / (2 (v + eps)),    dZ = s dA + 2 dv P
    dS = sum over levels of Z^T diag(dv) Z

A bias before a BatchNorm has no effect; its gradient is zero.

Letters: G groups of channels, C channels of a token, P pyramids, J branches, n pyramids that a BatchNorm rectifies (the
first ones), o outputs, h channels within a branch, R rows of a matrix. Channels are those of one group.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.layers.eager import in_functorch, is_eager
from isomorph.layers.pyramid.batchnorm import update_statistics
from isomorph.layers.pyramid.moments import Moments, symmetric_product
from isomorph.layers.pyramid.packs import Block, Form, Packs, plan_of, stacked
from isomorph.layers.pyramid.tokens import saves_work

KEPT_FROM = 512
"""Channels from which P is kept for the backward pass; narrower ones are computed again."""


def _scale_rows(z: Tensor, v: Tensor, gamma: Tensor, zero: Tensor | None, eps: float) -> Tensor:
    """Return gamma / sqrt(v + eps) z: BatchNorm in eval mode, as one operation. Shape: z (G, R, C), v, gamma (G, R)"""
    if zero is None:  # differentiable, in v too
        return z * (torch.rsqrt(v + eps) * gamma).unsqueeze(-1)
    v, rows = v.reshape(-1), z.reshape(1, -1, z.shape[-1])
    return torch.native_batch_norm(rows, gamma.reshape(-1), None, zero[: len(v)], v, False, 0.0, eps)[0].view_as(z)


def _scale_rows_backward(
    d: Tensor, z: Tensor, v: Tensor, gamma: Tensor, zero: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of z, with v held fixed, and of gamma. Shape: as z, (G, R)"""
    if zero is None:
        inverse = torch.rsqrt(v + eps)
        return d * (inverse * gamma).unsqueeze(-1), (d * z).sum(-1) * inverse
    flat, rows, v = d.reshape(1, -1, d.shape[-1]), z.reshape(1, -1, z.shape[-1]), v.reshape(-1)
    arguments = (gamma.reshape(-1), zero[: len(v)], v, None, None, False, eps, [True, True, False])
    d_z, d_gamma, _ = torch.ops.aten.native_batch_norm_backward(flat, rows, *arguments)
    return d_z.view_as(z), d_gamma.view(z.shape[:-1])


def _row_variances(p: Tensor, z: Tensor) -> Tensor:
    """Return diag(Z S Z^T) from P = Z S. Shape: (G, R, C) -> (G, R)"""
    if saves_work(z):
        return (p * z).sum(-1)
    channels = z.shape[-1]
    return torch.bmm(p.reshape(-1, 1, channels), z.reshape(-1, channels, 1)).view(z.shape[:-1])


def _zeros(mean: Tensor, zero: Tensor | None, count: int) -> Tensor:
    """Return zeros, of those at hand if there are any. Shape: -> (G, count)"""
    groups = len(mean)
    return mean.new_zeros(groups, count) if zero is None else zero[: groups * count].view(groups, -1)


class _Forward(NamedTuple):
    """What the forward pass computes. Shape: weight (G, P o, C), bias (G, P o), variances (G, rows)"""

    weight: Tensor
    bias: Tensor
    variances: Tensor
    means: list[Tensor]
    """Of what every BatchNorm reads. Shape: (G, chains, h)"""
    z: list[Tensor]
    p: list[Tensor]


def _run(packs: Packs, covariance: Tensor, zero: Tensor | None) -> _Forward:
    """Compute the affine map of centred tokens, level after level; without zeros, by differentiable operations."""
    form, plan = packs.form, packs.plan
    found = _Forward(*_sum_branches(packs, covariance, zero))
    if not form.rectified:
        return found
    rows, last_rows, weight = form.rectified * form.out, form.pyramids * form.out, found.weight
    p = torch.bmm(weight[:, :rows], covariance)
    variances, shift = [found.variances, _row_variances(p, weight[:, :rows])], packs.rectified_shift
    if plan.rest_rows:  # by a variance of 0 and a scale that makes up for it, all rows are scaled at once
        variances.append(_zeros(weight, zero, plan.rest_rows))
        shift = torch.cat([shift, found.bias[:, rows:] * form.rest], 1)
    variance = torch.cat(variances, 1)
    scaled = _scale_rows(weight, variance[:, -last_rows:], packs.scales[:, -last_rows:], zero, form.eps)
    means = found.bias[:, :rows].unflatten(1, (-1, form.out))
    return _Forward(scaled, shift, variance, [*found.means, means], [*found.z, weight], [*found.p, p])


def _sum_branches(packs: Packs, covariance: Tensor, zero: Tensor | None) -> tuple[Any, ...]:
    """Compute the sum of the branches, as `_Forward` has it."""
    form, plan = packs.form, packs.plan
    G, P, C, scale = form.groups, form.pyramids, form.reads, form.scale
    matrices = {width: packs.matrix(width) for width, blocks in plan.packs.items() if blocks}
    products = {
        width: torch.baddbmm(packs.biases[width].unsqueeze(1), packs.columns[width], pack.mT)
        for width, pack in matrices.items()
    }  # every matrix times every vector: (G, vectors, R)

    def constants(block: Block) -> Tensor:  # every matrix times its own vector: (G, number, rows)
        found, shape = products[block.width], (G, block.number, block.rows)
        columns, rows = found.shape[1:]
        strides = (columns * rows, block.rows if block.on_mean else rows + block.rows, 1)
        return found.as_strided(shape, strides, block.column * rows + block.span.start)

    scales = torch.split_with_sizes(packs.scales, [*plan.level_rows, plan.rest_rows], 1)
    z_of, p_of, variances, means = [matrices[C].narrow(1, 0, plan.level_rows[0])], [], [], []
    total: Any = None
    shift: Any = None
    if plan.skip:
        total, shift = stacked(matrices[C], plan.skip), constants(plan.skip)
    for level, block in enumerate(plan.inner):
        z = z_of[level]
        p_of.append(torch.bmm(z, covariance))
        variances.append(_row_variances(p_of[level], z))
        means.append(constants(block))
        a = _scale_rows(z, variances[level], scales[level], zero, form.eps).view(G, -1, block.rows, C)
        ended = plan.lasts[plan.ended[level] : plan.ended[level + 1]]
        for j, last in enumerate(ended):
            matrix, piece = stacked(matrices[last.width], last), a.narrow(1, j * P, P).reshape(-1, block.rows, C)
            if total is None:
                total, shift = torch.bmm(matrix, piece) * scale, constants(last)
                continue
            only_skip = last is plan.lasts[0]  # which then has no factor yet
            total = torch.baddbmm(total, matrix, piece, beta=scale if only_skip else 1.0, alpha=scale)
            shift = shift + constants(last)
        if level + 1 < len(plan.inner):
            rest, after = a[:, len(ended) * P :].reshape(-1, block.rows, C), plan.inner[level + 1]
            z_of.append(torch.bmm(stacked(matrices[after.width], after), rest).view(G, -1, C))
    if not form.last:  # every branch is a unit
        total = a.unflatten(1, (-1, P)).sum(1) * scale
        shift = packs.columns[form.out][:, plan.free_column :].unflatten(1, (-1, P)).sum(1)
    bias = shift.flatten(1) if scale == 1 else shift.flatten(1) * scale
    variance = variances[0] if len(variances) == 1 else torch.cat(variances, 1)
    return total.reshape(G, -1, C), bias, variance, means, z_of, p_of


class _Collapse(torch.autograd.Function):
    """Compute pyramids as one affine map of the layer's input, x - m if it is centred, otherwise x.

    Where the input is centred, m is a constant for whoever subtracts it: its gradient is that of the bias, here.

    Shape: mean (G, C), covariance (G, C, C) -> weight (G, P o, C), bias (G, P o), variances (G, rows), means
    """

    @staticmethod
    def forward(
        ctx: Any, form: Form, centred: bool, zero: Tensor, mean: Tensor, covariance: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        packs = Packs(form, tensors, mean)
        weight, bias, variances, means, z, p = _run(packs, covariance, zero)
        if not centred:
            bias = torch.baddbmm(bias.unsqueeze(-1), weight, mean.unsqueeze(-1), alpha=-1).squeeze(-1)
        ctx.form, ctx.centred, ctx.levels = form, centred, len(means)
        ctx.mark_non_differentiable(variances, *means)
        ctx.set_materialize_grads(False)
        kept = (*z[1:], *(p if form.reads >= KEPT_FROM else ()))
        ctx.save_for_backward(zero, mean, covariance, weight, variances, packs.vectors, *kept, *tensors)
        return weight, bias, variances, *means

    @staticmethod
    def backward(ctx: Any, d_weight: Tensor | None, d_bias: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        form, levels = ctx.form, ctx.levels
        zero, mean, covariance, weight, variances, vectors, *saved = ctx.saved_tensors
        z, saved = [weight, *saved[: levels - 1]], saved[levels - 1 :]
        p, tensors = (saved[:levels], saved[levels:]) if form.reads >= KEPT_FROM else ([], saved)
        if d_weight is None and d_bias is None:
            return (None,) * (5 + len(tensors))
        d_weight = torch.zeros_like(weight) if d_weight is None else d_weight
        d_bias = weight.new_zeros(weight.shape[:-1]) if d_bias is None else d_bias
        if torch.is_grad_enabled() and is_eager():  # differentiable: from the inputs again
            zero, packs = None, Packs(form, tensors, mean)
            covariance = (covariance + covariance.mT) / 2  # whose gradient is symmetric
            found = _run(packs, covariance, None)
            # the gradient by x - m, in which m is a constant for the first derivative alone
            d_weight = d_weight + d_bias.unsqueeze(-1) * (_level(mean, ctx.centred)).unsqueeze(-2)
        else:
            packs, found = Packs(form, tensors, mean, vectors), _Forward(weight, d_bias, variances, [], z, p)
            if not ctx.centred:
                d_weight = torch.baddbmm(d_weight, d_bias.unsqueeze(-1), mean.unsqueeze(-2), alpha=-1)
        return None, None, None, *_Gradients(packs, found, mean, covariance, zero).all(d_weight, d_bias)


def _level(mean: Tensor, centred: bool) -> Tensor:
    """Return what is left of x - m once a constant is subtracted from x, or nothing: zero, with a gradient, or -m."""
    return mean.detach() - mean if centred else -mean


class _Gradients:
    """The gradients of the mean, the covariance and all tensors; without zeros, by differentiable operations."""

    def __init__(self, packs: Packs, found: _Forward, mean: Tensor, covariance: Tensor, zero: Tensor | None) -> None:
        form, plan, variance = packs.form, packs.plan, found.variances
        C, D, rows = form.reads, len(plan.inner), sum(plan.level_rows)
        self.packs, self.found, self.mean, self.zero = packs, found, mean, zero
        sums = [found.z[D][:, : form.rectified * form.out]] if form.rectified else []
        self.matrices = {w: packs.matrix(w) for w, blocks in plan.packs.items() if blocks and w != C}
        self.matrices[C] = packs.matrix(C, [*found.z[1:D], *sums])
        self.after = {C: rows - plan.level_rows[0]}  # rows of further levels in front of the other blocks
        self.z = self.matrices[C].narrow(1, 0, rows)
        ends = list(accumulate(plan.level_rows))
        self.spans = [slice(*pair) for pair in pairwise([0, *ends])]
        self.p = found.p or torch.split_with_sizes(torch.bmm(self.z, covariance), plan.level_rows, 1)
        inner = slice(0, ends[D - 1])
        self.a = _scale_rows(self.z[:, inner], variance[:, inner], packs.scales[:, inner], zero, form.eps)
        denominator = torch.rsub(variance[:, :rows], -2 * form.eps, alpha=2)
        self.slope = packs.scales[:, :rows] / denominator  # -gamma / (2 (v + eps))
        self.weights: list[Tensor] = [mean] * plan.weights
        self.scales: list[Tensor] = []
        self.shifts: list[Tensor] = []
        self.variances: list[Tensor] = []

    def put(self, block: Block, grads: Tensor) -> None:
        """Set the gradients of the matrices of a block. Shape: (G number, rows, width)"""
        groups, given = self.packs.form.groups, self.packs.tensors[block.tensors]
        each = grads.unbind() if groups == 1 else grads.unflatten(0, (groups, -1)).unbind(1)
        if given[0].ndim > 2 or groups > 1:
            each = tuple(grad.reshape(tensor.shape) for grad, tensor in zip(each, given, strict=True))
        self.weights[block.tensors] = each

    def matrix(self, block: Block) -> Tensor:
        return stacked(self.matrices[block.width], block, self.after.get(block.width, 0))

    def through_variance(self, level: int, d_z: Tensor, d_scale: Tensor) -> Tensor:
        """Add the gradient by way of the variances of a level; its rows are the first."""
        self.variances.insert(0, self.slope[:, self.spans[level]] * d_scale)
        self.scales.insert(0, d_scale)
        factor, p = self.variances[0].unsqueeze(-1), self.p[level]
        rows = p.shape[1]
        if self.zero is None:
            return torch.cat([torch.addcmul(d_z[:, :rows], factor, p, value=2), d_z[:, rows:]], 1)
        (d_z if rows == d_z.shape[1] else d_z[:, :rows]).addcmul_(factor, p, value=2)
        return d_z

    def through_level(self, level: int, d: Tensor, column: Tensor, d_z: Tensor) -> Tensor:
        """Return the gradient of a level's rows Z, from those of the sum and of the deeper level's rows.

        Shape: d (G P, o, C), column (G P, o, 1), d_z (G, R, C)
        """
        form, plan, at = self.packs.form, self.packs.plan, self.spans[level]
        G, P, C, rows = form.groups, form.pyramids, form.reads, plan.inner[level].rows
        begin, end = plan.ended[level : level + 2]
        chains = self.a[:, at].view(G, -1, rows, C)
        pieces: list[Tensor] = []
        shifts: list[Tensor] = []
        for j in range(begin, end):
            if not form.last:
                pieces.append(d.reshape(G, -1, C))
                shifts.append(column.reshape(G, -1))
                continue
            last, own = plan.lasts[j], chains.narrow(1, (j - begin) * P, P).reshape(-1, rows, C)
            matrix = self.matrix(last).mT
            read = self.packs.read(last).reshape(-1, 1, rows)
            self.put(last, torch.baddbmm(torch.bmm(d, own.mT), column, read))
            pieces.append(torch.bmm(matrix, d).view(G, -1, C))
            shifts.append(torch.bmm(matrix, column).view(G, -1))
        if level + 1 < len(plan.inner):
            deeper, own = plan.inner[level + 1], chains[:, (end - begin) * P :].reshape(-1, rows, C)
            d_z = d_z.reshape(-1, deeper.rows, C)
            self.put(deeper, torch.bmm(d_z, own.mT))
            pieces.append(torch.bmm(self.matrix(deeper).mT, d_z).view(G, -1, C))
            shifts.append(_zeros(self.mean, self.zero, deeper.number * rows))
        self.shifts = [*shifts, *self.shifts]
        d_a = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        variance, scales = self.found.variances[:, at], self.packs.scales[:, at]
        both = _scale_rows_backward(d_a, self.z[:, at], variance, scales, self.zero, form.eps)
        return self.through_variance(level, *both)

    def all(self, d_weight: Tensor, d_bias: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients. Shape: d_weight (G, P o, C), d_bias (G, P o)"""
        packs, zero, mean = self.packs, self.zero, self.mean
        form, plan, found = packs.form, packs.plan, self.found
        G, P, C, rectified, last = (
            form.groups,
            form.pyramids,
            form.reads,
            form.rectified * form.out,
            -form.pyramids * form.out,
        )
        d, d_shift = d_weight, d_bias
        if rectified:
            variance, scales = found.variances[:, last:], packs.scales[:, last:]
            d, d_scale = _scale_rows_backward(d, found.z[-1], variance, scales, zero, form.eps)
            d = self.through_variance(len(plan.inner), d, d_scale[:, :rectified])
            d_shift = d_shift[:, rectified:] * form.rest
            d_shift = F.pad(d_shift, (rectified, 0)) if plan.rest_rows else torch.zeros_like(d_bias)
        if form.scale != 1:
            d, d_shift = d * form.scale, d_shift * form.scale
        d, column = d.reshape(-1, form.out, C), d_shift.reshape(-1, form.out, 1)
        d_z = d
        for level in reversed(range(len(plan.inner))):
            d_z = self.through_level(level, d, column, d_z)
        self.put(plan.inner[0], d_z.reshape(-1, plan.inner[0].rows, C))
        moved = (found.weight.mT, d_bias.unsqueeze(-1))
        if plan.skip:
            self.put(plan.skip, torch.baddbmm(d, column, mean.unsqueeze(1).expand(G, P, C).reshape(-1, 1, C)))
            skips = self.matrix(plan.skip).view(G, -1, C)
            d_mean = torch.baddbmm(torch.bmm(skips.mT, d_shift.unsqueeze(-1)), *moved, alpha=-1)
        else:
            d_mean = -torch.bmm(*moved)
        dead = _zeros(mean, zero, sum(plan.level_rows[: len(plan.inner)]))
        parts = [dead, *[d_shift] * (len(plan.lasts) + form.skip), *self.scales, *self.shifts]
        joined = torch.cat([*parts, d_bias[:, :rectified]] if rectified else parts, 1)
        vectors = torch.split_with_sizes(joined.view(-1) if G == 1 else joined, plan.vector_sizes, int(G > 1))
        factor = self.variances[0] if len(self.variances) == 1 else torch.cat(self.variances, 1)
        d_covariance = symmetric_product(self.z * factor.unsqueeze(-1), self.z)
        shaped = vectors if G == 1 else (vector.reshape(-1) for vector in vectors)
        return d_mean.squeeze(-1), d_covariance, *self.weights, *shaped


class Chains(NamedTuple):
    """The layers of a pyramid: units of a linear layer (weight and bias) and a BatchNorm, by branch; the branches'
    last layers, if they have one; the skip; the BatchNorm that rectifies; the factor of the sum before it.
    """

    units: list[list[tuple[Tensor, Tensor | None, _BatchNorm]]]
    lasts: list[tuple[Tensor, Tensor | None]]
    skip: tuple[Tensor, Tensor | None] | None
    rectifier: _BatchNorm | None
    scale: float

    @property
    def norms(self) -> list[_BatchNorm]:
        own = [norm for branch in self.units for *_, norm in branch]
        return own if self.rectifier is None else [*own, self.rectifier]


def collapse(pyramids: Sequence[Chains], moments: Moments) -> tuple[Tensor, Tensor]:
    """Return pyramids that read one input as one affine map of `moments.source`, and update their running statistics.

    Every BatchNorm normalises by the batch. Pyramids of one form are computed together.

    Shape: -> weight (G, sum of out, C), bias (G, sum of out)
    """
    if len(pyramids) == 1:
        return _collapse_alike(pyramids, moments)
    alike: dict[Any, list[int]] = {}
    for index, chains in enumerate(pyramids):
        shapes = [weight.shape for branch in chains.units for weight, *_ in branch]
        shapes += [weight.shape for weight, _ in (*chains.lasts, *filter(None, [chains.skip]))]
        eps = chains.units[0][0][2].eps
        alike.setdefault((eps, *map(len, chains.units), *shapes), []).append(index)
    parts = [part for members in alike.values() for part in _by_factor(members, pyramids)]
    maps = [_collapse_alike([pyramids[index] for index in part], moments) for part in parts]
    if [index for part in parts for index in part] == list(range(len(pyramids))):
        joined = [list(each) for each in zip(*maps, strict=True)]
    else:
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for part, (weight, bias) in zip(parts, maps, strict=True):
            found |= zip(part, zip(weight.chunk(len(part), 1), bias.chunk(len(part), 1), strict=True), strict=True)
        joined = [[found[index][i] for index in range(len(pyramids))] for i in (0, 1)]
    weight, bias = (each[0] if len(each) == 1 else torch.cat(each, 1) for each in joined)
    return weight, bias


def _by_factor(members: list[int], pyramids: Sequence[Chains]) -> list[list[int]]:
    """Split pyramids: the rectified ones of one factor first, with others of one factor."""
    parts: dict[Any, list[int]] = {}
    for index in members:
        parts.setdefault((pyramids[index].rectifier is None, pyramids[index].scale), []).append(index)
    groups = [parts[key] for key in sorted(parts)]
    if len(groups) > 1 and pyramids[groups[0][0]].rectifier and not pyramids[groups[-1][0]].rectifier:
        return [groups[0] + groups[-1], *groups[1:-1]]
    return groups


def _collapse_alike(pyramids: Sequence[Chains], moments: Moments) -> tuple[Tensor, Tensor]:
    """Collapse pyramids of one form, the rectified ones first."""
    mean, first = moments.mean, pyramids[0]
    G, C = mean.shape
    order = sorted(range(len(first.units)), key=lambda j: len(first.units[j]))
    depths = tuple(len(first.units[j]) for j in order)
    levels = range(depths[-1])
    units = [p.units[j][level] for level in levels for j in order if len(first.units[j]) > level for p in pyramids]
    linear = [*((w, b) for w, b, _ in units), *(p.lasts[j] for j in order if first.lasts for p in pyramids)]
    linear += [p.skip for p in pyramids if p.skip is not None]
    norms = [norm for *_, norm in units] + [p.rectifier for p in pyramids if p.rectifier is not None]
    weights = [weight for weight, _ in linear]
    biases = [mean.new_zeros(len(w)) if bias is None else bias for w, bias in linear]
    gammas = [mean.new_ones(n.num_features) if n.weight is None else n.weight for n in norms]
    betas = [mean.new_zeros(n.num_features) if n.bias is None else n.bias for n in norms]
    rectified = sum(p.rectifier is not None for p in pyramids)
    deepest = first.units[order[-1]]
    out = len(weights[-1]) // G
    rest = pyramids[-1].scale / first.scale if 0 < rectified < len(pyramids) else 1.0
    form = Form(
        len(pyramids), rectified, G, C, depths, tuple(len(w) // G for w, *_ in deepest), out, bool(first.lasts),
        first.skip is not None, first.scale, rest, norms[0].eps,
    )  # fmt: skip
    tensors = (*weights, *biases, *gammas, *betas)
    if in_functorch():
        weight, bias, variances, means, *_ = _run(Packs(form, tensors, mean), moments.covariance, None)
        if not moments.centred:
            bias = bias - (weight @ mean.unsqueeze(-1)).squeeze(-1)
    else:
        zero = mean.new_zeros(G * (sum(plan_of(form).level_rows) + len(pyramids) * out))
        arguments = (form, moments.centred, zero, mean, moments.covariance, *tensors)
        weight, bias, variances, *means = _Collapse.apply(*arguments)
    update_statistics(norms, means, variances, moments)
    return weight, bias
