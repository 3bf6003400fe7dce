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

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.layers.modes import Gradients, is_arithmetic_bound, is_eager, without_autocast
from isomorph.layers.pyramid.batchnorm import update_statistics
from isomorph.layers.pyramid.chains import (
    Chains,
    ChainSizes,
    ChainTensors,
    LinearLayer,
    Unit,
    join,
    join_maps,
)
from isomorph.layers.pyramid.moments import Moments, symmetric_product

# Channels from which P is kept for the backward pass; narrower ones are computed again.
KEPT_FROM = 512


def _scale_rows(tensors: ChainTensors, z: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """Return gamma / sqrt(v + eps) z: BatchNorm in eval mode, as one operation.

    Shape: z (G, R, C), v, gamma (G, R) -> as z
    """
    rows = z.reshape(1, -1, z.shape[-1])
    v = v.reshape(-1)
    gamma = gamma.reshape(-1)
    mean = tensors.zeros[: len(v)]
    scaled, _, _ = torch.native_batch_norm(
        rows, gamma, None, mean, v, False, 0.0, tensors.sizes.eps
    )
    return scaled.view_as(z)


def _scale_rows_differentiably(
    tensors: ChainTensors,
    z: Tensor,
    v: Tensor,
    gamma: Tensor,
) -> Tensor:
    """Return what `_scale_rows` returns, by operations that are differentiable in v too."""
    scale = torch.rsqrt(v + tensors.sizes.eps) * gamma
    return z * scale.unsqueeze(-1)


def _scale_rows_backward(
    tensors: ChainTensors, d: Tensor, z: Tensor, v: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of z, with v held fixed, and of gamma. Shape: as z, (G, R)"""
    d_rows = d.reshape(1, -1, d.shape[-1])
    rows = z.reshape(1, -1, z.shape[-1])
    v = v.reshape(-1).contiguous()
    gamma = gamma.reshape(-1).contiguous()
    mean = tensors.zeros[: len(v)]
    eps = tensors.sizes.eps
    output_mask = [True, True, False]
    d_z, d_gamma, _ = torch.ops.aten.native_batch_norm_backward(
        d_rows, rows, gamma, mean, v, None, None, False, eps, output_mask
    )
    return d_z.view_as(z), d_gamma.view(z.shape[:-1])


def _row_variances(p: Tensor, z: Tensor) -> Tensor:
    """Return diag(Z S Z^T) from P = Z S. Shape: (G, R, C) -> (G, R)"""
    if is_arithmetic_bound(z):
        return (p * z).sum(-1)
    channels = z.shape[-1]
    products = torch.bmm(p.reshape(-1, 1, channels), z.reshape(-1, channels, 1))
    return products.view(z.shape[:-1])


def _stack(blocks: Tensor) -> Tensor:
    """Return matrices, or vectors as columns, one after the other. Shape: (G, n, rows, *) -> (G n, rows, *)"""
    stacked = blocks.flatten(0, 1)
    return stacked if blocks.ndim == 4 else stacked.unsqueeze(-1)


def _is_sum(left: Tensor, right: Tensor) -> bool:
    """True for a product with a vector in a compiled graph: as a sum the compiler can fuse it."""
    return not is_eager() and min(left.shape[-1], right.shape[-1]) <= 1


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right."""
    if not _is_sum(left, right):
        return torch.bmm(left, right)
    return (left * right.mT).sum(-1, keepdim=True) if right.shape[-1] == 1 else left * right


def _add_product(
    added: Tensor,
    left: Tensor,
    right: Tensor,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> Tensor:
    """Return beta added + alpha left @ right."""
    if not _is_sum(left, right):
        return torch.baddbmm(added, left, right, beta=beta, alpha=alpha)
    return beta * added + alpha * _product(left, right)


def _add_to_vector(added: Tensor, matrix: Tensor, vector: Tensor, alpha: float = 1.0) -> Tensor:
    """Return added + alpha matrix vector. Shape: (G, R), (G, R, C), (G, C) -> (G, R)"""
    return _add_product(added.unsqueeze(-1), matrix, vector.unsqueeze(-1), alpha=alpha).squeeze(-1)


class _Collapsed(NamedTuple):
    """Shape: weight, total (G, N o, C), bias (G, N o), variances (G, R), means (G, chains, h), z, p (G, R, C)"""

    weight: Tensor
    bias: Tensor
    # Of what every BatchNorm reads, those of all levels joined.
    variances: Tensor
    # Of the same, by level.
    means: list[Tensor]
    # The sums before they are rectified.
    total: Tensor
    z: list[Tensor]
    p: list[Tensor]


def _add_branches(
    tensors: ChainTensors,
    level: int,
    a: Tensor,
    total: Tensor,
    shift: Tensor,
) -> tuple[Tensor, Tensor]:
    """Add the branches that end at a level, by their last layers L: total + scale L a, shift + scale L beta."""
    sizes = tensors.sizes
    beta = tensors.shifts[level]
    # the first product scales the skip too
    old_factor = 1.0 if any(sizes.branches_ended[:level]) else sizes.scale
    for number, last in enumerate(tensors.last_layers[level]):
        branch = tensors.branch(number)
        matrix = _stack(last)
        total = _add_product(
            total, matrix, _stack(a[:, branch]), beta=old_factor, alpha=sizes.scale
        )
        shift = _add_product(
            shift, matrix, _stack(beta[:, branch]), beta=old_factor, alpha=sizes.scale
        )
        old_factor = 1.0
    return total, shift


def _run(
    tensors: ChainTensors,
    mean: Tensor,
    covariance: Tensor,
    scale_rows: Callable[..., Tensor] = _scale_rows,
) -> _Collapsed:
    """Compute the affine map of centred tokens, level after level: P = Z S, v = diag(P Z^T), then BatchNorm to a.

    The branches that end at a level are added to the total; inner layers M of the others give the next Z = M a.
    """
    sizes = tensors.sizes
    G = sizes.groups
    C = sizes.reads
    depth = len(sizes.widths)
    first = sizes.rows[0]
    constants = _add_to_vector(tensors.read_biases, tensors.read, mean)
    if sizes.skip:
        total = tensors.skip.reshape(-1, sizes.out, C)
        shift = constants[:, first:].reshape(-1, sizes.out, 1)
    else:
        total = shift = tensors.take_zeros(1, 1, 1)

    z = [tensors.z]
    p = []
    variances = []
    means = [constants[:, :first].unflatten(1, (-1, sizes.widths[0]))]
    gammas = torch.split_with_sizes(tensors.scales[:, : sum(sizes.rows)], sizes.rows, 1)
    for level in range(depth):
        p.append(torch.bmm(z[level], covariance))
        variances.append(_row_variances(p[level], z[level]))
        a = scale_rows(tensors, z[level], variances[level], gammas[level])
        a = a.view(G, sizes.chains[level], -1, C)
        beta = tensors.shifts[level]
        total, shift = _add_branches(tensors, level, a, total, shift)
        if level + 1 < depth:
            deeper_branches = tensors.deeper(level)
            matrix = _stack(tensors.inner[level])
            biases = tensors.inner_biases[level]
            deeper = torch.bmm(matrix, _stack(a[:, deeper_branches]))
            z.append(deeper.view(G, -1, C))
            constants = _add_product(_stack(biases), matrix, _stack(beta[:, deeper_branches]))
            means.append(constants.view(biases.shape))

    if sizes.last:
        bias = torch.add(shift.reshape(G, -1), tensors.last_biases.sum(1), alpha=sizes.scale)
    else:  # every branch is a unit
        total = a.unflatten(1, (-1, sizes.pyramids)).sum(1) * sizes.scale
        bias = beta.unflatten(1, (-1, sizes.pyramids)).sum(1).flatten(1) * sizes.scale
    total = total.reshape(G, -1, C)
    if not sizes.rectified:
        return _Collapsed(total, bias, join(variances), means, total, z, p)

    rectified = slice(0, sizes.rows[depth])
    sums = total[:, rectified]
    p.append(torch.bmm(sums, covariance))
    variances.append(_row_variances(p[depth], sums))
    means.append(bias[:, rectified].unflatten(1, (-1, sizes.out)))
    if sizes.unrectified:
        variances.append(tensors.take_zeros(G, sizes.unrectified))
    collapsed = _Collapsed(total, bias, join(variances), means, total, z, p)
    return _rectify(tensors, collapsed, scale_rows)


def _rectify(
    tensors: ChainTensors,
    collapsed: _Collapsed,
    scale_rows: Callable[..., Tensor],
) -> _Collapsed:
    """Apply the BatchNorms that rectify the first pyramids, and the further factor of the others, all at once."""
    sizes = tensors.sizes
    if sizes.unrectified:
        unrectified = collapsed.bias[:, -sizes.unrectified :] * sizes.unrectified_scale
        bias = torch.cat([tensors.rectified_shift, unrectified], 1)
    else:
        bias = tensors.rectified_shift.clone()
    sums = slice(-collapsed.total.shape[1], None)
    weight = scale_rows(
        tensors, collapsed.total, collapsed.variances[:, sums], tensors.scales[:, sums]
    )
    return collapsed._replace(weight=weight, bias=bias)


class _NormGradients:
    """Gradients of the scales and variances of all BatchNorms, collected from the last level to the first."""

    def __init__(self, tensors: ChainTensors, collapsed: _Collapsed, covariance: Tensor) -> None:
        sizes = tensors.sizes
        self.tensors = tensors
        self.variances = collapsed.variances
        self.spans = [slice(*ends) for ends in pairwise([0, *accumulate(sizes.rows)])]
        self.p = collapsed.p or torch.split_with_sizes(
            torch.bmm(tensors.z, covariance), sizes.rows, 1
        )
        normalised = slice(0, sum(sizes.rows))
        spread = torch.rsub(
            collapsed.variances[:, normalised], -2 * sizes.eps, alpha=2
        )  # -2 (v + eps)
        self.slope = tensors.scales[:, normalised] / spread
        units = slice(0, self.spans[len(sizes.widths) - 1].stop)
        v = collapsed.variances[:, units]
        gamma = tensors.scales[:, units]
        self.scaled = _scale_rows(tensors, tensors.z[:, units], v, gamma)
        self.d_scales: list[Tensor] = []
        self.d_variances: list[Tensor] = []

    def outputs(self, level: int) -> Tensor:
        """Return the matrices of a level's chains after their BatchNorms. Shape: -> (G, chains, h, C)"""
        sizes = self.tensors.sizes
        rows = self.scaled[:, self.spans[level]]
        return rows.view(sizes.groups, sizes.chains[level], -1, sizes.reads)

    def through(self, level: int, d: Tensor, z: Tensor, rows: slice) -> Tensor:
        """Return the gradient of what a level's BatchNorms read, of which the first rows are normalised.

        dgamma = rowsum(dA Z) / sqrt(v + eps),    dv = -gamma dgamma / (2 (v + eps)),    dZ = s dA + 2 dv P
        """
        sizes = self.tensors.sizes
        v = self.variances[:, rows]
        gamma = self.tensors.scales[:, rows]
        d, d_scale = _scale_rows_backward(self.tensors, d, z, v, gamma)
        normalised = slice(0, sizes.rows[level])
        d_scale = d_scale[:, normalised]
        d_variance = self.slope[:, self.spans[level]] * d_scale
        d[:, normalised].addcmul_(d_variance.unsqueeze(-1), self.p[level], value=2)
        self.d_scales.insert(0, d_scale)
        self.d_variances.insert(0, d_variance)
        return d

    def covariance(self) -> Tensor:
        """Return the gradient of the covariance. Shape: -> (G, C, C)"""
        z = self.tensors.z
        return symmetric_product(z * join(self.d_variances).unsqueeze(-1), z)


class _LevelGradients(NamedTuple):
    """Gradients of the layers that read a level, and of the matrices and shifts that they read, branch by branch.

    Shape: inner, lasts (G n, rows, columns), matrices (G, R, C), shifts (G, R)
    """

    inner: list[Tensor]
    last_layers: list[Tensor]
    matrices: list[Tensor]
    shifts: list[Tensor]


def _through_layers(
    tensors: ChainTensors, level: int, a: Tensor, d: Tensor, column: Tensor, d_z: Tensor
) -> _LevelGradients:
    """Return the gradients of all that reads a level's outputs a and the BatchNorms' shifts beta:

        last layer L     dL = d a^T + d_shift beta^T,    da = L^T d,       dbeta = L^T d_shift
        inner layer M    dM = dz a^T,                    da = M^T dz,      dbeta = 0

    Shape: a (G, chains, h, C), d (G N, out, C), d_shift: column (G N, out, 1), d_z of the next level (G, R, C)
    """
    sizes = tensors.sizes
    G = sizes.groups
    C = sizes.reads
    beta = tensors.shifts[level]
    grads = _LevelGradients([], [], [], [])
    if not sizes.last:  # the branches are summed as they are
        grads.matrices.extend([d.view(G, -1, C)] * sizes.branches)
        grads.shifts.extend([column.view(G, -1)] * sizes.branches)
        return grads
    for number, last in enumerate(tensors.last_layers[level]):
        branch = tensors.branch(number)
        matrix = _stack(last)
        d_last = torch.bmm(d, _stack(a[:, branch]).mT)
        d_last = _add_product(d_last, column, _stack(beta[:, branch]).mT)
        grads.last_layers.append(d_last)
        grads.matrices.append(torch.bmm(matrix.mT, d).view(G, -1, C))
        grads.shifts.append(_product(matrix.mT, column).view(G, -1))
    if level + 1 < len(sizes.widths):
        deeper_branches = tensors.deeper(level)
        matrix = _stack(tensors.inner[level])
        d_z = d_z.reshape(-1, matrix.shape[1], C)
        grads.inner.append(torch.bmm(d_z, _stack(a[:, deeper_branches]).mT))
        grads.matrices.append(torch.bmm(matrix.mT, d_z).view(G, -1, C))
        grads.shifts.append(tensors.take_zeros(G, grads.matrices[-1].shape[1]))
    return grads


class _ChainGradients(NamedTuple):
    """Shape: mean (G, C), covariance (G, C, C), blocks of weights (G n, rows, columns), vectors (G, R)"""

    mean: Tensor
    covariance: Tensor
    blocks: list[Tensor]
    vectors: list[Tensor]


def _backward(
    tensors: ChainTensors,
    collapsed: _Collapsed,
    mean: Tensor,
    covariance: Tensor,
    d_weight: Tensor,
    d_bias: Tensor,
) -> _ChainGradients:
    """Return the gradients of all tensors, in their order: from the sum of the branches back to the first level.

    The bias is that of a map of x, so the mean has -W^T d_bias, and a skip's W^T d_shift. Shape: d_weight (G, N o, C),
    d_bias (G, N o)
    """
    sizes = tensors.sizes
    G = sizes.groups
    C = sizes.reads
    depth = len(sizes.widths)
    norms = _NormGradients(tensors, collapsed, covariance)

    d = d_weight
    d_shift = d_bias
    if sizes.rectified:
        rows = sizes.rows[depth]
        d = norms.through(depth, d, collapsed.total, slice(-sizes.pyramids * sizes.out, None))
        d_shift = torch.cat(
            [tensors.take_zeros(G, rows), d_shift[:, rows:] * sizes.unrectified_scale], 1
        )
    if sizes.scale != 1:
        d = d * sizes.scale
        d_shift = d_shift * sizes.scale
    d = d.reshape(-1, sizes.out, C)
    column = d_shift.reshape(-1, sizes.out, 1)

    d_z = d
    levels: list[_LevelGradients] = []
    for level in reversed(range(depth)):
        grads = _through_layers(tensors, level, norms.outputs(level), d, column, d_z)
        rows_of_level = norms.spans[level]
        d_z = norms.through(level, join(grads.matrices), tensors.z[:, rows_of_level], rows_of_level)
        levels.insert(0, grads)

    blocks = [d_z.reshape(-1, sizes.widths[0], C)]
    vectors = [tensors.take_zeros(G, sizes.rows[0])]  # biases before a BatchNorm have no effect
    d_mean = _product(collapsed.weight.mT, d_bias.unsqueeze(-1))
    if sizes.skip:
        tokens = mean.unsqueeze(1).expand(G, sizes.pyramids, C).reshape(-1, 1, C)
        blocks.append(_add_product(d, column, tokens))
        vectors.append(d_shift)
        d_mean = _add_product(d_mean, tensors.skip.mT, d_shift.unsqueeze(-1), beta=-1)
    else:
        d_mean = -d_mean
    for grads in levels:
        blocks += grads.inner
    for grads in levels:
        blocks += grads.last_layers
    for rows in sizes.rows[1:depth]:
        vectors.append(tensors.take_zeros(G, rows))
    vectors += [d_shift] * sum(sizes.branches_ended)
    vectors += norms.d_scales
    for grads in levels:
        vectors += grads.shifts
    if sizes.rectified:
        vectors.append(d_bias[:, : sizes.rows[depth]])
    return _ChainGradients(d_mean.squeeze(-1), norms.covariance(), blocks, vectors)


def _of_each_tensor(
    gradients: _ChainGradients, groups: int, tensors: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of weights and vectors as those of the tensors, in their shapes."""
    grads: list[Tensor] = []
    for block in gradients.blocks:
        if groups == 1:
            grads += block.unbind(0)
        else:
            grads += block.unflatten(0, (groups, -1)).unbind(1)
    sizes = [tensor.numel() // groups for tensor in tensors[len(grads) :]]
    grads += torch.cat(gradients.vectors, 1).squeeze(0).split_with_sizes(sizes, -1)
    shaped = []
    for grad, tensor in zip(grads, tensors, strict=True):
        shaped.append(grad if grad.shape == tensor.shape else grad.reshape(tensor.shape))
    return shaped


def _move(weight: Tensor, bias: Tensor, mean: Tensor) -> Tensor:
    """Return the bias of a map of x - mean as that of a map of x."""
    return _add_to_vector(bias, weight, mean, alpha=-1)


class _Collapse(torch.autograd.Function):
    """Compute pyramids as one affine map of x - m if it is centred, where m has the bias's gradient, otherwise of x.

    Shape: mean (G, C), covariance (G, C, C) -> weight (G, N o, C), bias (G, N o), variances (G, R), means
    """

    @staticmethod
    def forward(
        ctx: Any,
        sizes: ChainSizes,
        centred: bool,
        mean: Tensor,
        covariance: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        collapsed = _run(ChainTensors(sizes, tensors, mean), mean, covariance)
        bias = collapsed.bias if centred else _move(collapsed.weight, collapsed.bias, mean)
        z = collapsed.z[1:]
        p = collapsed.p if sizes.reads >= KEPT_FROM else []
        ctx.sizes = sizes
        ctx.centred = centred
        ctx.kept = (len(z), len(p))
        ctx.mark_non_differentiable(collapsed.variances, *collapsed.means)
        ctx.set_materialize_grads(False)  # variances and means have no gradients
        ctx.save_for_backward(
            mean,
            covariance,
            collapsed.weight,
            collapsed.total,
            collapsed.variances,
            *z,
            *p,
            *tensors,
        )
        return collapsed.weight, bias, collapsed.variances, *collapsed.means

    @staticmethod
    @without_autocast
    def backward(ctx: Any, d_weight: Tensor | None, d_bias: Tensor | None, *_: Any) -> Gradients:
        sizes = ctx.sizes
        deeper, products = ctx.kept
        mean, covariance, weight, total, variances, *saved = ctx.saved_tensors
        z = saved[:deeper]
        p = saved[deeper : deeper + products]
        tensors = saved[deeper + products :]
        if d_weight is None and d_bias is None:
            return (None,) * (4 + len(tensors))
        if d_weight is None:
            d_weight = torch.zeros_like(weight)
        if d_bias is None:
            d_bias = weight.new_zeros(weight.shape[:-1])
        if torch.is_grad_enabled() and is_eager():
            inputs = (mean, covariance, *tensors)
            gradients = _differentiable_gradients(sizes, ctx.centred, inputs, d_weight, d_bias)
            return None, None, *gradients

        if not ctx.centred:
            d_weight = _add_product(d_weight, d_bias.unsqueeze(-1), mean.unsqueeze(-2), alpha=-1)
        if sizes.rectified:
            z = [*z, total[:, : sizes.rows[-1]]]
        chain_tensors = ChainTensors(sizes, tensors, mean, levels=z)
        collapsed = _Collapsed(weight, d_bias, variances, [], total, z, p)
        grads = _backward(chain_tensors, collapsed, mean, covariance, d_weight, d_bias)
        d_tensors = _of_each_tensor(grads, sizes.groups, tensors)
        return None, None, grads.mean, grads.covariance, *d_tensors


def _differentiable_gradients(
    sizes: ChainSizes, centred: bool, inputs: Sequence[Tensor], d_weight: Tensor, d_bias: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of all inputs so that they can be differentiated again."""
    copies = []
    for tensor in inputs:  # tied ones apart
        copies.append(
            tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
        )
    mean, covariance, *tensors = copies
    symmetric = (covariance + covariance.mT) / 2
    collapsed = _run(
        ChainTensors(sizes, tensors, mean), mean, symmetric, _scale_rows_differentiably
    )
    offset = mean - mean.detach() if centred else mean
    bias = _move(collapsed.weight, collapsed.bias, offset)
    outputs = (collapsed.weight, bias)
    return torch.autograd.grad(
        outputs, copies, (d_weight, d_bias), create_graph=True, materialize_grads=True
    )


def collapse(pyramids: Sequence[Chains], moments: Moments) -> tuple[Tensor, Tensor]:
    """Return pyramids that read one input, each BatchNorm by the batch, as one map; update their running statistics.

    Shape: -> weight (G, sum of out, C), bias (G, sum of out) of `moments.source`
    """
    groups: list[list[Chains]] = []
    for chains in pyramids:
        if groups and _belong_together(groups[-1][-1], chains):
            groups[-1].append(chains)
        else:
            groups.append([chains])
    return join_maps([_collapse_alike(part, moments) for part in groups])


def _belong_together(last: Chains, chains: Chains) -> bool:
    """True for pyramids that are computed together: of one form and factor, those without a rectifier last."""
    if _shape(last) != _shape(chains):
        return False
    if last.rectifier is not None and chains.rectifier is None:
        return True
    return (last.rectifier is None) == (chains.rectifier is None) and last.scale == chains.scale


def _shape(chains: Chains) -> tuple[Any, ...]:
    """Return what pyramids that are computed together have in common, but for the factor of the sum."""
    shapes: list[Any] = [chains.units[0][0].norm.eps]
    for branch in chains.units:
        shapes.append(tuple(unit.linear.weight.shape for unit in branch))
    shapes += [last.weight.shape for last in chains.last_layers]
    shapes.append(None if chains.skip is None else chains.skip.weight.shape)
    return tuple(shapes)


class _Layers(NamedTuple):
    """The layers of pyramids that are computed together, branch after branch, in ascending order of their depths."""

    levels: list[list[Unit]]
    last_layers: list[LinearLayer]
    skips: list[LinearLayer]
    rectifiers: list[_BatchNorm]

    def linear(self) -> list[LinearLayer]:
        """Return the linear layers: those that read the input, further units by level, last ones."""
        layers = [unit.linear for unit in self.levels[0]] + self.skips
        for level in self.levels[1:]:
            layers += [unit.linear for unit in level]
        return layers + self.last_layers

    def norms(self) -> list[_BatchNorm]:
        """Return the BatchNorms of the units, level by level, and those that rectify."""
        norms = []
        for level in self.levels:
            norms += [unit.norm for unit in level]
        return norms + self.rectifiers


def _gather_layers(pyramids: Sequence[Chains]) -> _Layers:
    """Return the layers of pyramids level by level, those of shallow branches first."""
    first = pyramids[0]
    levels: list[list[Unit]] = [[] for _ in range(max(map(len, first.units)))]
    last_layers = []
    for j in sorted(range(len(first.units)), key=lambda j: len(first.units[j])):
        for level in range(len(first.units[j])):
            levels[level] += [pyramid.units[j][level] for pyramid in pyramids]
        if first.last_layers:
            last_layers += [pyramid.last_layers[j] for pyramid in pyramids]
    skips = [pyramid.skip for pyramid in pyramids if pyramid.skip is not None]
    rectifiers = [pyramid.rectifier for pyramid in pyramids if pyramid.rectifier is not None]
    return _Layers(levels, last_layers, skips, rectifiers)


def _sizes_of(
    pyramids: Sequence[Chains],
    layers: _Layers,
    groups: int,
    channels: int,
) -> ChainSizes:
    """Return what the pyramids have in common."""
    first = pyramids[0]
    depths = [len(branch) for branch in first.units]
    chains = tuple(len(level) for level in layers.levels)
    widths = tuple(len(level[0].linear.weight) // groups for level in layers.levels)
    out = len(layers.last_layers[0].weight) // groups if layers.last_layers else widths[0]
    branches_ended = [0] * len(widths)
    if layers.last_layers:
        branches_ended = [depths.count(level + 1) for level in range(len(widths))]
    rows = [count * width for count, width in zip(chains, widths, strict=True)]
    unrectified_scale = 1.0
    unrectified = 0
    if layers.rectifiers:
        rows.append(len(layers.rectifiers) * out)
        unrectified_scale = pyramids[-1].scale / first.scale
        unrectified = (len(pyramids) - len(layers.rectifiers)) * out
    return ChainSizes(
        pyramids=len(pyramids),
        rectified=len(layers.rectifiers),
        unrectified=unrectified,
        groups=groups,
        reads=channels,
        widths=widths,
        out=out,
        branches=len(depths),
        last=bool(layers.last_layers),
        skip=bool(layers.skips),
        scale=first.scale,
        unrectified_scale=unrectified_scale,
        eps=layers.levels[0][0].norm.eps,
        chains=chains,
        branches_ended=tuple(branches_ended),
        rows=tuple(rows),
    )


def _or_equal_values(tensor: Tensor | None, size: int, value: float, like: Tensor) -> Tensor:
    """Return a vector, or one of equal values where there is none. Shape: -> (size,)"""
    if tensor is None:
        return like.new_full((size,), value)
    return tensor


def _collapse_alike(pyramids: Sequence[Chains], moments: Moments) -> tuple[Tensor, Tensor]:
    """Return pyramids of one layout as one map, and update their running statistics."""
    mean = moments.mean
    layers = _gather_layers(pyramids)
    linear = layers.linear()
    norms = layers.norms()
    sizes = _sizes_of(pyramids, layers, *mean.shape)
    tensors = [layer.weight for layer in linear]
    tensors += [_or_equal_values(layer.bias, len(layer.weight), 0.0, mean) for layer in linear]
    tensors += [_or_equal_values(norm.weight, norm.num_features, 1.0, mean) for norm in norms]
    tensors += [_or_equal_values(norm.bias, norm.num_features, 0.0, mean) for norm in norms]
    weight, bias, variances, *means = _Collapse.apply(
        sizes, moments.centred, mean, moments.covariance, *tensors
    )
    update_statistics(norms, means, variances, moments.total)
    return weight, bias
