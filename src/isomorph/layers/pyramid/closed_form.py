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

Letters: G groups of channels, C channels of a token, N pyramids, J branches, o outputs, h channels within a branch, R
rows of a matrix. Channels are those of one group.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.layers.modes import constant, is_eager, saves_work, without_autocast
from isomorph.layers.pyramid.batchnorm import update_statistics
from isomorph.layers.pyramid.moments import Moments, symmetric_product

# Channels from which P is kept for the backward pass; narrower ones are computed again.
KEPT_FROM = 512


class Chains(NamedTuple):
    """The layers of a pyramid: units of a linear layer (weight and bias) and a BatchNorm, by branch; the branches'
    last layers, if they have one; the skip; the BatchNorm that rectifies; the factor of the sum before it.
    """

    units: list[list[tuple[Tensor, Tensor | None, _BatchNorm]]]
    lasts: list[tuple[Tensor, Tensor | None]]
    skip: tuple[Tensor, Tensor | None] | None
    rectifier: _BatchNorm | None
    scale: float


class _Form(NamedTuple):
    """What pyramids that are computed together have in common."""

    pyramids: int
    # Pyramids that a BatchNorm rectifies, the first ones.
    rectified: int
    groups: int
    # Channels of a token.
    reads: int
    # Units of every branch, in ascending order.
    depths: tuple[int, ...]
    # Channels after the first, second, ... units of a branch.
    widths: tuple[int, ...]
    out: int
    # Whether branches end with a linear layer; otherwise they are one unit each.
    last: bool
    skip: bool
    # Factor of the sum of the branches.
    scale: float
    # Further factor of the pyramids that are not rectified, where others are.
    rest: float
    eps: float
    # Chains that reach each level.
    chains: tuple[int, ...]
    # Branches whose last layer reads each level.
    ended: tuple[int, ...]
    # Rows that are normalised at each level, the rectified sums last.
    rows: tuple[int, ...]


def _full(size: int, value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((size,), value, dtype=dtype, device=device)


class _Pack:
    """Views of all tensors of pyramids, which one operation joins; with `levels`, the rows of all levels side by side.

    Shape: z (G, R, C); matrices (G, chains, rows, columns); vectors (G, chains, rows) or (G, R)
    """

    def __init__(self, form: _Form, tensors: Sequence[Tensor], like: Tensor, levels: Sequence[Tensor] = ()) -> None:
        groups, pyramids, out, first = form.groups, form.pyramids, form.out, form.chains[0]
        sums = sum(form.chains) + form.rectified  # BatchNorms
        unrectified = (pyramids - form.rectified) * out if form.rectified else 0
        parts = [*tensors[:first], *levels, *tensors[first:-sums]]
        if unrectified:  # by a variance of 0 and a scale that makes up for it, all sums are scaled at once
            parts.append(constant(_full, like, groups * unrectified, form.rest * form.eps**0.5, like.dtype))
        parts += tensors[-sums:]
        if groups > 1:
            joined = torch.cat([part.reshape(groups, -1) for part in parts], 1)
        else:
            joined = torch.cat([part if part.ndim == 1 else part.reshape(-1) for part in parts]).unsqueeze(0)
        joined, at = joined.to(like.dtype), 0

        def take(*shape: int) -> Tensor:
            nonlocal at
            at += math.prod(shape)
            return joined[:, at - math.prod(shape) : at].view(groups, *shape)

        widths, inner = form.widths, list(zip(form.chains, form.widths, strict=True))
        self.form = form
        self.z = take(sum(form.rows) if levels else form.rows[0], form.reads)
        self.skip = take(pyramids * form.skip, out, form.reads)
        self.read = joined[:, :at].view(groups, -1, form.reads)  # the matrices that multiply the mean
        self.inner = [take(*sizes, width) for sizes, width in zip(inner[1:], widths, strict=False)]
        ended = zip(form.ended, widths, strict=True)
        self.lasts = [[take(pyramids, out, width) for _ in range(count)] for count, width in ended]
        self.read_biases = take(form.rows[0] + pyramids * form.skip * out)
        self.inner_biases = [take(*sizes) for sizes in inner[1:]]
        self.last_biases = take(sum(form.ended), pyramids * out)
        self.scales = take(sum(form.rows) + unrectified)
        self.shifts = [take(*sizes) for sizes in inner]
        self.rectified_shift = take(form.rectified * out)


def _scale_rows(z: Tensor, v: Tensor, gamma: Tensor, zero: Tensor | None, eps: float) -> Tensor:
    """Return gamma / sqrt(v + eps) z: BatchNorm in eval mode, as one operation. Shape: z (G, R, C), v, gamma (G, R)"""
    if zero is None:  # differentiable, in v too
        return z * (torch.rsqrt(v + eps) * gamma).unsqueeze(-1)
    v, rows = v.reshape(-1), z.reshape(1, -1, z.shape[-1])
    return torch.native_batch_norm(rows, gamma.reshape(-1), None, zero[: len(v)], v, False, 0.0, eps)[0].view_as(z)


def _scale_rows_backward(
    d: Tensor, z: Tensor, v: Tensor, gamma: Tensor, zero: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of z, with v held fixed, and of gamma. Shape: as z, (G, R)"""
    flat, rows, v = d.reshape(1, -1, d.shape[-1]), z.reshape(1, -1, z.shape[-1]), v.reshape(-1).contiguous()
    arguments = (gamma.reshape(-1).contiguous(), zero[: len(v)], v, None, None, False, eps, [True, True, False])
    d_z, d_gamma, _ = torch.ops.aten.native_batch_norm_backward(flat, rows, *arguments)
    return d_z.view_as(z), d_gamma.view(z.shape[:-1])


def _row_variances(p: Tensor, z: Tensor) -> Tensor:
    """Return diag(Z S Z^T) from P = Z S. Shape: (G, R, C) -> (G, R)"""
    if saves_work(z):
        return (p * z).sum(-1)
    channels = z.shape[-1]
    return torch.bmm(p.reshape(-1, 1, channels), z.reshape(-1, channels, 1)).view(z.shape[:-1])


def _each(blocks: Tensor) -> Tensor:
    """Return matrices, or vectors as columns, one after the other. Shape: (G, n, rows, *) -> (G n, rows, *)"""
    return blocks.flatten(0, 1) if blocks.ndim == 4 else blocks.flatten(0, 1).unsqueeze(-1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right; for a compiler a product with a vector is a sum, which it can fuse."""
    if is_eager() or min(left.shape[-1], right.shape[-1]) > 1:
        return torch.bmm(left, right)
    return (left * right.mT).sum(-1, keepdim=True) if right.shape[-1] == 1 else left * right


def _add_product(added: Tensor, left: Tensor, right: Tensor, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Return beta added + alpha left @ right."""
    if is_eager() or min(left.shape[-1], right.shape[-1]) > 1:
        return torch.baddbmm(added, left, right, beta=beta, alpha=alpha)
    return beta * added + alpha * _product(left, right)


class _Found(NamedTuple):
    """Shape: weight, total (G, N o, C), bias (G, N o), variances (G, R), means (G, chains, h), z, p (G, R, C)"""

    weight: Tensor
    bias: Tensor
    variances: Tensor
    # Of what every BatchNorm reads, by level.
    means: list[Tensor]
    # The sums before they are rectified.
    total: Tensor
    z: list[Tensor]
    p: list[Tensor]


def _run(pack: _Pack, mean: Tensor, covariance: Tensor, zero: Tensor | None) -> _Found:
    """Compute the affine map of centred tokens, level after level; without zeros, by differentiable operations."""
    form, kept, a = pack.form, pack.form.scale, pack.z
    G, N, C, out = form.groups, form.pyramids, form.reads, form.out
    nothing = mean.new_zeros(1) if zero is None else zero[:1]
    constants = _add_product(pack.read_biases.unsqueeze(-1), pack.read, mean.unsqueeze(-1)).squeeze(-1)
    total = _each(pack.skip) if form.skip else nothing.view(1, 1, 1)
    shift = constants[:, form.rows[0] :].reshape(-1, out, 1) if form.skip else nothing.view(1, 1, 1)
    z_of, p_of, variances = [pack.z], [], []
    means = [constants[:, : form.rows[0]].unflatten(1, (-1, form.widths[0]))]
    scales = torch.split_with_sizes(pack.scales[:, : sum(form.rows)], form.rows, 1)
    for level, z in enumerate(z_of):  # which grows
        p_of.append(torch.bmm(z, covariance))
        variances.append(_row_variances(p_of[level], z))
        a = _scale_rows(z, variances[level], scales[level], zero, form.eps).view(G, form.chains[level], -1, C)
        for j, last in enumerate(map(_each, pack.lasts[level])):
            own, own_shift = (_each(each[:, j * N : (j + 1) * N]) for each in (a, pack.shifts[level]))
            total = _add_product(total, last, own, beta=kept, alpha=form.scale)
            shift = _add_product(shift, last, own_shift, beta=kept, alpha=form.scale)
            kept = 1.0
        if level + 1 < len(form.widths):
            rest, rest_shift = (_each(each[:, form.ended[level] * N :]) for each in (a, pack.shifts[level]))
            matrix, biases = _each(pack.inner[level]), pack.inner_biases[level]
            z_of.append(torch.bmm(matrix, rest).view(G, -1, C))
            means.append(_add_product(_each(biases), matrix, rest_shift).view(biases.shape))
    if form.last:
        bias = torch.add(shift.reshape(G, -1), pack.last_biases.sum(1), alpha=form.scale)
    else:  # every branch is a unit
        total, bias = (each.unflatten(1, (-1, N)).sum(1) * form.scale for each in (a, pack.shifts[0]))
        bias = bias.flatten(1)
    total = weight = total.reshape(G, -1, C)
    if form.rectified:
        rows = form.rows[-1]
        p_of.append(torch.bmm(total[:, :rows], covariance))
        variances.append(_row_variances(p_of[-1], total[:, :rows]))
        means.append(bias[:, :rows].unflatten(1, (-1, out)))
        if unrectified := N * out - rows:
            variances.append(mean.new_zeros(G, unrectified) if zero is None else zero[: G * unrectified].view(G, -1))
            bias = torch.cat([pack.rectified_shift, bias[:, rows:] * form.rest], 1)
        else:
            bias = pack.rectified_shift.clone()
    variance = variances[0] if len(variances) == 1 else torch.cat(variances, 1)
    if form.rectified:
        weight = _scale_rows(total, variance[:, -N * out :], pack.scales[:, -N * out :], zero, form.eps)
    return _Found(weight, bias, variance, means, total, z_of, p_of)


class _NormGradients:
    """Gradients of the scales and variances of all BatchNorms, collected from the last level to the first."""

    def __init__(self, pack: _Pack, found: _Found, covariance: Tensor, zero: Tensor) -> None:
        form, rows = pack.form, pack.form.rows
        normalised = slice(0, sum(rows))
        self.pack, self.variance, self.zero = pack, found.variances, zero
        self.spans = [slice(*ends) for ends in pairwise([0, *accumulate(rows)])]
        self.p = found.p or torch.split_with_sizes(torch.bmm(pack.z, covariance), rows, 1)
        spread = torch.rsub(found.variances[:, normalised], -2 * form.eps, alpha=2)
        self.slope = pack.scales[:, normalised] / spread  # -gamma / 2 (v + eps)
        inner = slice(0, self.spans[len(form.widths) - 1].stop)
        self.scaled = _scale_rows(pack.z[:, inner], self.variance[:, inner], pack.scales[:, inner], zero, form.eps)
        self.scales: list[Tensor] = []
        self.variances: list[Tensor] = []

    def through(self, level: int, d: Tensor, read: Tensor, at: slice) -> Tensor:
        """Return the gradient of what a level's BatchNorms read, of which the first rows are normalised."""
        form, count = self.pack.form, self.pack.form.rows[level]
        d, d_scale = _scale_rows_backward(d, read, self.variance[:, at], self.pack.scales[:, at], self.zero, form.eps)
        self.scales.insert(0, d_scale[:, :count])
        self.variances.insert(0, self.slope[:, self.spans[level]] * self.scales[0])
        d[:, :count].addcmul_(self.variances[0].unsqueeze(-1), self.p[level], value=2)
        return d

    def covariance(self) -> Tensor:
        """Return the gradient of the covariance. Shape: -> (G, C, C)"""
        factors = self.variances[0] if len(self.variances) == 1 else torch.cat(self.variances, 1)
        return symmetric_product(self.pack.z * factors.unsqueeze(-1), self.pack.z)


def _through_branches(
    pack: _Pack, level: int, chains: Tensor, d: Tensor, column: Tensor
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the gradients of a level's last matrices, and of the rows and shifts that these read."""
    G, N, C = pack.form.groups, pack.form.pyramids, pack.form.reads
    d_lasts: list[Tensor] = []
    parts: list[Tensor] = []
    shifts: list[Tensor] = []
    for j, last in enumerate(map(_each, pack.lasts[level])):
        own, own_shift = (_each(each[:, j * N : (j + 1) * N]) for each in (chains, pack.shifts[level]))
        d_lasts.append(_add_product(torch.bmm(d, own.mT), column, own_shift.mT))
        parts.append(torch.bmm(last.mT, d).view(G, -1, C))
        shifts.append(_product(last.mT, column).view(G, -1))
    return d_lasts, parts, shifts


def _backward(
    pack: _Pack, found: _Found, mean: Tensor, covariance: Tensor, zero: Tensor, d_weight: Tensor, d_bias: Tensor
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Return the gradients of the mean, the covariance, blocks of weights (G n, rows, columns) and vectors (G, R).

    Shape: d_weight (G, N o, C), d_bias (G, N o)
    """
    form, z, norms = pack.form, pack.z, _NormGradients(pack, found, covariance, zero)
    G, N, C, out, rows, depth = form.groups, form.pyramids, form.reads, form.out, form.rows, len(form.widths)
    d, d_shift = d_weight, d_bias
    if form.rectified:
        d, at = norms.through(depth, d, found.total, slice(-N * out, None)), rows[depth]
        d_shift = torch.cat([zero[: G * at].view(G, at), d_shift[:, at:] * form.rest], 1)
    if form.scale != 1:
        d, d_shift = d * form.scale, d_shift * form.scale
    d, column = d.reshape(-1, out, C), d_shift.reshape(-1, out, 1)
    d_z = d
    d_inner: list[Tensor] = []
    d_lasts: list[Tensor] = []
    d_shifts: list[Tensor] = []
    for level in reversed(range(depth)):
        chains = norms.scaled[:, norms.spans[level]].view(G, form.chains[level], -1, C)
        own, parts, shifts = _through_branches(pack, level, chains, d, column)
        d_lasts = [*own, *d_lasts]
        if not form.last:
            parts, shifts = [d.view(G, -1, C)] * len(form.depths), [column.view(G, -1)] * len(form.depths)
        elif level + 1 < depth:
            matrix, rest = _each(pack.inner[level]), _each(chains[:, form.ended[level] * N :])
            d_z = d_z.reshape(-1, *matrix.shape[1:2], C)
            d_inner.insert(0, torch.bmm(d_z, rest.mT))
            parts.append(torch.bmm(matrix.mT, d_z).view(G, -1, C))
            shifts.append(zero[: G * parts[-1].shape[1]].view(G, -1))
        d_shifts = [*shifts, *d_shifts]
        read = norms.spans[level]
        d_z = norms.through(level, parts[0] if len(parts) == 1 else torch.cat(parts, 1), z[:, read], read)
    blocks = [d_z.reshape(-1, form.widths[0], C)]
    d_mean = _product(found.weight.mT, d_bias.unsqueeze(-1))
    if form.skip:
        blocks.append(_add_product(d, column, mean.unsqueeze(1).expand(G, N, C).reshape(-1, 1, C)))
        d_mean = _add_product(d_mean, pack.skip.flatten(1, 2).mT, d_shift.unsqueeze(-1), beta=-1)
    else:
        d_mean = -d_mean
    dead = [zero[: G * count].view(G, -1) for count in rows[:depth]]
    vectors = [dead[0], *[d_shift] * form.skip, *dead[1:], *[d_shift] * sum(form.ended), *norms.scales, *d_shifts]
    vectors += [d_bias[:, : rows[depth]]] if form.rectified else []
    return d_mean.squeeze(-1), norms.covariance(), [*blocks, *d_inner, *d_lasts], vectors


def _zeros(form: _Form, like: Tensor) -> Tensor:
    return constant(_full, like, form.groups * (sum(form.rows) + form.pyramids * form.out), 0.0, like.dtype)


def _move(weight: Tensor, bias: Tensor, mean: Tensor) -> Tensor:
    """Return the bias of a map of x - mean as that of a map of x."""
    return _add_product(bias.unsqueeze(-1), weight, mean.unsqueeze(-1), alpha=-1).squeeze(-1)


class _Collapse(torch.autograd.Function):
    """Compute pyramids as one affine map of x - m if it is centred, where m has the bias's gradient, otherwise of x.

    Shape: mean (G, C), covariance (G, C, C) -> weight (G, N o, C), bias (G, N o), variances (G, R), means
    """

    @staticmethod
    def forward(
        ctx: Any, form: _Form, centred: bool, mean: Tensor, covariance: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        found = _run(_Pack(form, tensors, mean), mean, covariance, _zeros(form, mean))
        bias = found.bias if centred else _move(found.weight, found.bias, mean)
        ctx.form, ctx.centred, ctx.deeper = form, centred, len(found.z) - 1
        ctx.mark_non_differentiable(found.variances, *found.means)
        ctx.set_materialize_grads(False)
        kept = (*found.z[1:], *(found.p if form.reads >= KEPT_FROM else ()))
        ctx.save_for_backward(mean, covariance, found.weight, found.total, found.variances, *kept, *tensors)
        return found.weight, bias, found.variances, *found.means

    @staticmethod
    @without_autocast
    def backward(ctx: Any, d_weight: Tensor | None, d_bias: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        form, deeper = ctx.form, ctx.deeper
        mean, covariance, weight, total, variances, *saved = ctx.saved_tensors
        z, saved = saved[:deeper], saved[deeper:]
        levels = len(form.rows) if form.reads >= KEPT_FROM else 0
        p, tensors = saved[:levels], saved[levels:]
        if d_weight is None and d_bias is None:
            return (None,) * (4 + len(tensors))
        d_weight = torch.zeros_like(weight) if d_weight is None else d_weight
        d_bias = weight.new_zeros(weight.shape[:-1]) if d_bias is None else d_bias
        if torch.is_grad_enabled() and is_eager():
            inputs = (mean, covariance, *tensors)
            return None, None, *_differentiable_gradients(form, ctx.centred, inputs, d_weight, d_bias)
        if not ctx.centred:
            d_weight = _add_product(d_weight, d_bias.unsqueeze(-1), mean.unsqueeze(-2), alpha=-1)
        sums = [total[:, : form.rows[-1]]] if form.rectified else []
        pack = _Pack(form, tensors, mean, [*z, *sums] or [total[:, :0]])
        found = _Found(weight, d_bias, variances, [], total, z, p)
        zero = _zeros(form, mean)
        d_mean, d_covariance, blocks, vectors = _backward(pack, found, mean, covariance, zero, d_weight, d_bias)
        G = form.groups
        matrices = [m for block in blocks for m in (block if G == 1 else block.unflatten(0, (G, -1)).unbind(1))]
        sizes = [tensor.numel() // G for tensor in tensors[len(matrices) :]]
        grads = [*matrices, *torch.cat(vectors, 1).squeeze(0).split_with_sizes(sizes, -1)]
        pairs = zip(grads, tensors, strict=True)
        shaped = [grad if grad.shape == tensor.shape else grad.reshape(tensor.shape) for grad, tensor in pairs]
        return None, None, d_mean, d_covariance, *shaped


def _differentiable_gradients(
    form: _Form, centred: bool, inputs: Sequence[Tensor], d_weight: Tensor, d_bias: Tensor
) -> tuple[Tensor, ...]:
    own = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in inputs]  # tied ones apart
    mean, covariance, *tensors = own
    found = _run(_Pack(form, tensors, mean), mean, (covariance + covariance.mT) / 2, None)
    bias = _move(found.weight, found.bias, mean - mean.detach() if centred else mean)
    return torch.autograd.grad((found.weight, bias), own, (d_weight, d_bias), create_graph=True, materialize_grads=True)


def collapse(pyramids: Sequence[Chains], moments: Moments) -> tuple[Tensor, Tensor]:
    """Return pyramids that read one input, each BatchNorm by the batch, as one map; update their running statistics.

    Shape: -> weight (G, sum of out, C), bias (G, sum of out) of `moments.source`
    """
    parts: list[list[Chains]] = []
    for chains in pyramids:
        if parts and _joins(parts[-1][-1], chains):
            parts[-1].append(chains)
        else:
            parts.append([chains])
    weights, biases = zip(*(_collapse_alike(part, moments) for part in parts), strict=True)
    return (weights[0], biases[0]) if len(parts) == 1 else (torch.cat(weights, 1), torch.cat(biases, 1))


def _joins(last: Chains, chains: Chains) -> bool:
    """True for pyramids of one form: of one factor, or the first that is not rectified."""
    if _shape(last) != _shape(chains):
        return False
    if last.rectifier is not None and chains.rectifier is None:
        return True
    return (last.rectifier is None) == (chains.rectifier is None) and last.scale == chains.scale


def _shape(chains: Chains) -> tuple[Any, ...]:
    """Return what pyramids that are computed together have in common, but for the factor of the sum."""
    linear = [weight for branch in chains.units for weight, *_ in branch]
    linear += [weight for weight, _ in (*chains.lasts, *filter(None, [chains.skip]))]
    return chains.units[0][0][2].eps, *map(len, chains.units), *(weight.shape for weight in linear)


def _collapse_alike(pyramids: Sequence[Chains], moments: Moments) -> tuple[Tensor, Tensor]:
    mean, first = moments.mean, pyramids[0]
    order = sorted(range(len(first.units)), key=lambda j: len(first.units[j]))
    depths = [len(first.units[j]) for j in order]
    levels = [
        [p.units[j][level] for j in order if len(first.units[j]) > level for p in pyramids]
        for level in range(depths[-1])
    ]
    skips = [p.skip for p in pyramids if p.skip is not None]
    lasts = [p.lasts[j] for j in order if first.lasts for p in pyramids]
    linear = [*(unit[:2] for unit in levels[0]), *skips, *(unit[:2] for level in levels[1:] for unit in level), *lasts]
    rectifiers = [p.rectifier for p in pyramids if p.rectifier is not None]
    norms = [*(norm for level in levels for *_, norm in level), *rectifiers]
    weights = [weight for weight, _ in linear]
    biases = [mean.new_zeros(len(w)) if bias is None else bias for w, bias in linear]
    gammas = [mean.new_ones(n.num_features) if n.weight is None else n.weight for n in norms]
    betas = [mean.new_zeros(n.num_features) if n.bias is None else n.bias for n in norms]
    G, C = mean.shape
    widths = tuple(len(level[-1][0]) // G for level in levels)
    rest = pyramids[-1].scale / first.scale if rectifiers else 1.0
    out, last = len(weights[-1]) // G, len(lasts) > 0
    ended = tuple(depths.count(level + 1) * last for level in range(len(levels)))
    rows = tuple(len(level) * width for level, width in zip(levels, widths, strict=True))
    rows += (len(rectifiers) * out,) if rectifiers else ()
    form = _Form(
        len(pyramids), len(rectifiers), G, C, tuple(depths), widths, out, last, len(skips) > 0, first.scale, rest,
        norms[0].eps, tuple(map(len, levels)), ended, rows,
    )  # fmt: skip
    tensors = (*weights, *biases, *gammas, *betas)
    weight, bias, variances, *means = _Collapse.apply(form, moments.centred, mean, moments.covariance, *tensors)
    update_statistics(norms, means, variances, moments)
    return weight, bias
