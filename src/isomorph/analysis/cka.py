"""Centred kernel alignment between all layers of two networks, over a loader, in memory that does not grow with it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from isomorph.analysis.batches import batches
from isomorph.analysis.features import feature_layers, features
from isomorph.errors import UserError
from isomorph.surgery.where import Where

MAX_COVARIANCE_ENTRIES = 2**28
"""Numbers that `covariance_cka` may keep: 2 GiB."""

MIN_IMAGES = 4
"""Images of a batch that unbiased HSIC can be taken of: it divides by n - 3."""

_ReadFeatures = Callable[[Tensor], Tensor]


class CKA(NamedTuple):
    """How alike layers are: 1 alike up to rotation and scale, 0 unrelated; `rows` of one model, `columns` of another.

    Shape: matrix (rows, columns)
    """

    matrix: Tensor
    rows: list[str]
    columns: list[str]


def flatten_features(output: Tensor) -> Tensor:
    """Every image as one vector of all that the layer gives. Shape: (B, ...) -> (B, features)"""
    return output.flatten(1)


def pool_features(output: Tensor) -> Tensor:
    """Every image as the mean over its tokens or places. Shape: (B, N, C) or (B, C, H, W) -> (B, C)"""
    return output.mean(1) if output.ndim == 3 else output.flatten(2).mean(2) if output.ndim == 4 else output.flatten(1)


def cka(
    a: nn.Module,
    b: nn.Module,
    data: Tensor | Iterable[Any],
    where: Where | None = None,
    other_where: Where | None = None,
    read: _ReadFeatures = flatten_features,
) -> CKA:
    """How alike the layers of two models are on the same images: linear CKA from unbiased HSIC, batch by batch.

    sum_i HSIC1(K_i, L_i) / sqrt(sum_i HSIC1(K_i, K_i) sum_i HSIC1(L_i, L_i)) over batches i, K and L the Gram matrices
    of a batch's features. It does not depend on the size of batches but for noise, and lies near 0 (either side) for
    unrelated features, where the biased form lies high. Gram matrices of one batch are all that is kept.

    `where` selects layers (of `b`: `other_where`, or else the same), by default those that timm's `feature_info` names.
    `read`: features of an image from what a layer gives, by default all of it. Batches of fewer than 4 images (a last
    one) are skipped.

    Shape: a batch (B, C, H, W), or a loader of such -> CKA, (layers of a, layers of b)
    Source: Nguyen, Raghu, Kornblith (2021), eq. 2 to 4; HSIC1: Song et al. (2012), eq. 5
    Raises: UserError when no batch has 4 images, or a model no such layer.
    """
    return cka_of_pairs(a, b, ((batch, batch) for batch in batches(data)), where, other_where, read)


@torch.no_grad()
def cka_of_pairs(
    a: nn.Module,
    b: nn.Module,
    pairs: Iterable[tuple[Tensor, Tensor]],
    where: Where | None = None,
    other_where: Where | None = None,
    read: _ReadFeatures = flatten_features,
) -> CKA:
    """`cka` of two models that take the same images differently: normalised, resized, each in its own way.

    Shape: pairs of batches of the same images, (B, C, H, W) for a and (B, C', H', W') for b -> CKA
    Raises: UserError as `cka` does, or when a pair is of different numbers of images.
    """
    rows, columns = feature_layers(a, where, 1), feature_layers(b, other_where or where, 1)
    cross, own_a, own_b = 0.0, 0.0, 0.0  # type: Any, Any, Any
    for one, other in matching_batches(pairs):
        x, y = gram_matrices(a, one, rows, read), gram_matrices(b, other, columns, read)
        cross = cross + hsic(x, y)
        own_a, own_b = own_a + _hsic_own(x), own_b + _hsic_own(y)
    return CKA(cross / (own_a[:, None] * own_b).sqrt(), list(rows), list(columns))


Batches = TypeVar("Batches", bound=Sequence[Tensor])


def matching_batches(given: Iterable[Batches]) -> Iterator[Batches]:
    """Those of several models' batches of the same images that unbiased HSIC can be taken of: of 4 images at least.

    Raises: UserError when none is large enough, or the models' batches are of different numbers of images.
    """
    largest = 0
    for several in given:
        sizes = [len(batch) for batch in several]
        if len(set(sizes)) > 1:
            raise UserError(f"CKA compares models on the same images, not on {' and '.join(map(str, sizes))} of them")
        largest = max(largest, *sizes)
        if sizes[0] >= MIN_IMAGES:
            yield several
    if largest < MIN_IMAGES:
        raise UserError(f"unbiased CKA takes batches of at least {MIN_IMAGES} images; the largest here has {largest}")


def gram_matrices(model: nn.Module, batch: Tensor, layers: dict[str, nn.Module], read: _ReadFeatures) -> Tensor:
    """Gram matrix of each layer's features without its diagonal, in float64; features are let go at once.

    Shape: -> (layers, B, B)
    """

    def gram(output: Tensor) -> Tensor:
        x = read(output).double()
        x = x - x.mean(0)  # HSIC does not see the mean; without it less is lost to rounding
        return (x @ x.T).fill_diagonal_(0.0)

    found = features(model, batch.to(next(model.parameters())), layers, gram)
    if missing := [name for name in layers if name not in found]:
        raise UserError(f"{missing[0]} does not run when the model does: it has no features")
    return torch.stack([value.cpu() for value in found.values()])


def hsic(k: Tensor, m: Tensor) -> Tensor:
    """Unbiased HSIC of all pairs of Gram matrices with zero diagonals.

    [tr(KM) + 1'K1 1'M1 / ((n-1)(n-2)) - 2 1'KM1 / (n-2)] / (n (n-3))

    Shape: k (p, n, n), m (q, n, n) -> (p, q)
    """
    n = k.shape[-1]
    traces = k.flatten(1) @ m.flatten(1).T
    row_k, row_m = k.sum(-1), m.sum(-1)  # (p, n), (q, n)
    totals = row_k.sum(-1)[:, None] * row_m.sum(-1)
    return (traces + totals / ((n - 1) * (n - 2)) - 2 * (row_k @ row_m.T) / (n - 2)) / (n * (n - 3))


def _hsic_own(k: Tensor) -> Tensor:
    """Unbiased HSIC of each Gram matrix with itself. Shape: (p, n, n) -> (p,)"""
    return torch.cat([hsic(one, one)[0] for one in k.split(1)])


@torch.no_grad()
def covariance_cka(
    a: nn.Module,
    b: nn.Module,
    data: Tensor | Iterable[Any],
    where: Where | None = None,
    other_where: Where | None = None,
    read: _ReadFeatures = pool_features,
) -> CKA:
    """Linear CKA of two models' layers over all images of a loader at once, exactly, from streamed covariances.

    |Cov(x, y)|^2 / (|Cov(x, x)| |Cov(y, y)|), as `linear_cka` of all features would give; for few features, so by
    default the mean over tokens or places of what a layer gives (`pool_features`). Memory goes with features squared, not with
    images. Arguments as `cka`.

    This is the biased estimate: it is not near 0 for unrelated features unless the images are many more than the
    features. Of n images unrelated features of p and q independent channels read about
    1 / sqrt((1 + n / p) (1 + n / q)): 0.75 for 768 channels and 256 images. `cka` has no such bias.

    Shape: a batch (B, C, H, W), or a loader of such -> CKA, (layers of a, layers of b)
    Source: Kornblith et al. (2019) eq. 3
    Raises: UserError when the covariances would take more than 2 GiB, or a model has no such layer.
    """
    rows, columns = feature_layers(a, where, 1), feature_layers(b, other_where or where, 1)
    moments: _FeatureCovariances | None = None
    for batch in batches(data):
        x, y = (
            features(m, batch.to(next(m.parameters()).device), layers, lambda out: read(out).double().cpu())
            for m, layers in ((a, rows), (b, columns))
        )
        moments = moments or _FeatureCovariances(list(x.values()), list(y.values()))
        moments.add(list(x.values()), list(y.values()))
    assert moments is not None  # batches() has raised otherwise
    return CKA(moments.alignment(), list(rows), list(columns))


class _FeatureCovariances:
    """Sums of outer products of features, of each layer and of all pairs, about the mean of the first batch."""

    def __init__(self, x: list[Tensor], y: list[Tensor]) -> None:
        self.origins = [value.mean(0) for value in x], [value.mean(0) for value in y]
        self.images = 0
        size = sum(f.shape[1] ** 2 for f in x + y) + sum(f.shape[1] * g.shape[1] for f in x for g in y)
        if size > MAX_COVARIANCE_ENTRIES:
            raise UserError(
                f"covariances of these features take {size * 8 / 2**30:.1f} GiB; select fewer layers with where, "
                "read fewer features (read=pooled), or take iso.cka, which goes by batches"
            )
        self.means = [torch.zeros_like(v) for v in self.origins[0]], [torch.zeros_like(v) for v in self.origins[1]]
        self.own = (
            [v.new_zeros(len(v), len(v)) for v in self.origins[0]],
            [v.new_zeros(len(v), len(v)) for v in self.origins[1]],
        )
        self.cross = [[v.new_zeros(len(v), len(w)) for w in self.origins[1]] for v in self.origins[0]]

    def add(self, x: list[Tensor], y: list[Tensor]) -> None:
        """Adds a batch. Shape: (B, p) each"""
        self.images += len(x[0])
        x, y = (
            [v - origin for v, origin in zip(values, self.origins[i], strict=True)] for i, values in ((0, x), (1, y))
        )
        for i, values in ((0, x), (1, y)):
            for mean, own, value in zip(self.means[i], self.own[i], values, strict=True):
                mean += value.sum(0)
                own += value.T @ value
        for row, v in zip(self.cross, x, strict=True):
            for product, w in zip(row, y, strict=True):
                product += v.T @ w

    def alignment(self) -> Tensor:
        """Linear CKA of all pairs. Shape: -> (layers of x, layers of y)"""

        def centred(product: Tensor, first: Tensor, second: Tensor) -> Tensor:
            return (product - torch.outer(first, second) / self.images).norm()

        left, right = (
            torch.stack([centred(own, m, m) for own, m in zip(self.own[i], self.means[i], strict=True)]) for i in (0, 1)
        )
        rows = [
            torch.stack([centred(p, m, n) for p, n in zip(row, self.means[1], strict=True)])
            for row, m in zip(self.cross, self.means[0], strict=True)
        ]
        return torch.stack(rows).square() / (left[:, None] * right)


def linear_cka(x: Tensor, y: Tensor) -> Tensor:
    """Centred kernel alignment of two sets of features of the same samples: 1 alike up to rotation, 0 unrelated.

    |Y^T X|^2 / (|X^T X| |Y^T Y|), columns centred. Shape: x (samples, p), y (samples, q) -> ()
    Source: Kornblith et al. (2019) eq. 3, as TDRL Fig. 2 (c) measures branches
    Raises: UserError when the samples are not as many.
    """
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        raise UserError(f"CKA compares (samples, features) of the same samples, not {tuple(x.shape)}, {tuple(y.shape)}")
    x, y = (t.double() - t.double().mean(0) for t in (x, y))
    if len(x) < max(x.shape[1], y.shape[1]):  # fewer samples than features: the same number from their Gram matrices
        inner = (x @ x.T * (y @ y.T)).sum()
        return inner / ((x @ x.T).norm() * (y @ y.T).norm())
    return (y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())
