"""Centred kernel alignment (CKA) between the layers of two models, over a loader in constant memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from isomorph.analysis.batches import batches
from isomorph.analysis.features import feature_layers, features
from isomorph.errors import UserError
from isomorph.surgery.where import Where

MAX_COVARIANCE_ENTRIES = 2**28
"""Entries of the covariance matrices of `covariance_cka`, 2 GiB in float64."""

MIN_IMAGES = 4
"""Smallest batch for unbiased HSIC, which divides by n - 3."""

_ReadFeatures = Callable[[Tensor], Tensor]


class CKA(NamedTuple):
    """Similarity of layers: 1 equal up to rotation and scale, 0 unrelated; `rows` and `columns` are the layers' names.

    Shape: matrix (rows, columns)

    Example:
        >>> a, b = (timm.create_model("cifar_resnet20") for _ in range(2))
        >>> iso.cka(a, b, torch.randn(8, 3, 32, 32)).rows
        ['act1', 'layer1', 'layer2', 'layer3']
    """

    matrix: Tensor
    rows: list[str]
    columns: list[str]


def flatten_features(output: Tensor) -> Tensor:
    """Return the output of a layer as one vector for every image. Shape: (B, ...) -> (B, features)"""
    return output.flatten(1)


def pool_features(output: Tensor) -> Tensor:
    """Return the output of a layer as its mean over tokens or pixels, for the argument `read` of `cka`.

    Shape: (B, N, C) or (B, C, H, W) -> (B, C)

    Example:
        >>> tuple(iso.analysis.pool_features(torch.randn(8, 64, 4, 4)).shape)
        (8, 64)
    """
    return output.mean(1) if output.ndim == 3 else output.flatten(2).mean(2) if output.ndim == 4 else output.flatten(1)


def cka(
    a: nn.Module,
    b: nn.Module,
    data: Tensor | Iterable[Any],
    where: Where | None = None,
    other_where: Where | None = None,
    read: _ReadFeatures = flatten_features,
) -> CKA:
    """Return the similarity between all layers of two models on the same images: linear CKA from unbiased HSIC.

    sum_i HSIC1(K_i, L_i) / sqrt(sum_i HSIC1(K_i, K_i) sum_i HSIC1(L_i, L_i)) over batches i, where K and L are the Gram
    matrices of a batch's features. The batch size changes only its noise. For unrelated features it is near 0, on
    either side, where the biased form is high. Only the Gram matrices of one batch are in memory.

    Args:
        a: a model, for the rows.
        b: a model, for the columns.
        data: images (B, C, H, W), or a loader of such; batches of fewer than 4 images (the last one) are skipped.
        where: layers of both models, by default those of timm's `feature_info`.
        other_where: layers of `b`, if they differ.
        read: function from the output of a layer to features (B, features), by default all of the output.

    Source: Nguyen, Raghu, Kornblith (2021), eq. 2 to 4; HSIC1: Song et al. (2012), eq. 5
    Raises: UserError if no batch has 4 images, or a model has no such layer.

    Example:
        >>> a, b = (timm.create_model("cifar_resnet20") for _ in range(2))
        >>> tuple(iso.cka(a, b, torch.randn(8, 3, 32, 32)).matrix.shape)
        (4, 4)
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
    """Return `cka` of two models with different inputs for the same images, such as other sizes or normalisation.

    Shape: pairs of batches of the same images, (B, C, H, W) for a and (B, C', H', W') for b -> CKA
    Raises: UserError as in `cka`, or if the batches of a pair have different numbers of images.
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
    """Yield the groups of batches (one for each model) that have at least 4 images, as unbiased HSIC needs.

    Raises: UserError if no batch is large enough, or the batches of a group have different numbers of images.
    """
    largest = 0
    for several in given:
        sizes = [len(batch) for batch in several]
        if len(set(sizes)) > 1:
            raise UserError(
                f"CKA needs the same images for both models, not batches of {' and '.join(map(str, sizes))}"
            )
        largest = max(largest, *sizes)
        if sizes[0] >= MIN_IMAGES:
            yield several
    if largest < MIN_IMAGES:
        raise UserError(f"unbiased CKA needs batches of at least {MIN_IMAGES} images; the largest given has {largest}")


def gram_matrices(model: nn.Module, batch: Tensor, layers: dict[str, nn.Module], read: _ReadFeatures) -> Tensor:
    """Return the Gram matrix of every layer's features with zero diagonal, in float64; features are not stored.

    Shape: -> (layers, B, B)
    """

    def gram(output: Tensor) -> Tensor:
        x = read(output).double()
        x = x - x.mean(0)  # HSIC does not depend on the mean; removing it reduces rounding errors
        return (x @ x.T).fill_diagonal_(0.0)

    matrices = features(model, batch.to(next(model.parameters())), layers, gram)
    if missing := [name for name in layers if name not in matrices]:
        raise UserError(f"the forward of the model does not call {missing[0]}, so it has no features")
    return torch.stack([value.cpu() for value in matrices.values()])


def hsic(k: Tensor, m: Tensor) -> Tensor:
    """Return unbiased HSIC between all pairs of Gram matrices with zero diagonals.

    [tr(KM) + 1'K1 1'M1 / ((n-1)(n-2)) - 2 1'KM1 / (n-2)] / (n (n-3))

    Shape: k (p, n, n), m (q, n, n) -> (p, q)
    """
    n = k.shape[-1]
    traces = k.flatten(1) @ m.flatten(1).T
    row_k, row_m = k.sum(-1), m.sum(-1)  # (p, n), (q, n)
    totals = row_k.sum(-1)[:, None] * row_m.sum(-1)
    return (traces + totals / ((n - 1) * (n - 2)) - 2 * (row_k @ row_m.T) / (n - 2)) / (n * (n - 3))


def _hsic_own(k: Tensor) -> Tensor:
    """Return unbiased HSIC of each Gram matrix with itself. Shape: (p, n, n) -> (p,)"""
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
    """Return the linear CKA between all layers of two models over all images of a loader, from running covariances.

    |Cov(x, y)|^2 / (|Cov(x, x)| |Cov(y, y)|), equal to `linear_cka` of all features. Memory grows with the square of
    the number of features, not with images, so features are by default the mean over tokens or pixels
    (`pool_features`). Arguments as in `cka`.

    This is the biased estimate: it is near 0 for unrelated features only if there are many more images than features.
    For n images, unrelated features of p and q independent channels give about
    1 / sqrt((1 + n / p) (1 + n / q)): 0.75 for 768 channels and 256 images. `cka` does not have this bias.

    Shape: batch (B, C, H, W) or a loader of such -> CKA, (layers of a, layers of b)
    Source: Kornblith et al. (2019) eq. 3
    Raises: UserError if the covariances would take more than 2 GiB, or a model has no such layer.

    Example:
        >>> a, b = (timm.create_model("cifar_resnet20") for _ in range(2))
        >>> tuple(iso.analysis.covariance_cka(a, b, torch.randn(8, 3, 32, 32)).matrix.shape)
        (4, 4)
    """
    rows, columns = feature_layers(a, where, 1), feature_layers(b, other_where or where, 1)
    covariances: _FeatureCovariances | None = None
    for batch in batches(data):
        values = [
            value
            for m, layers in ((a, rows), (b, columns))
            for value in features(
                m, batch.to(next(m.parameters()).device), layers, lambda out: read(out).double().cpu()
            ).values()
        ]
        covariances = covariances or _FeatureCovariances(values, len(rows))
        covariances.add(values)
    assert covariances is not None  # batches() has raised otherwise
    return CKA(covariances.alignment(), list(rows), list(columns))


class _FeatureCovariances:
    """Sums of outer products of features, for each layer and all pairs, relative to the mean of the first batch.

    The first `rows` features are those of the rows, the others those of the columns.
    """

    def __init__(self, values: list[Tensor], rows: int) -> None:
        self.rows, self.columns, self.images = range(rows), range(rows, len(values)), 0
        self.origins = [value.mean(0) for value in values]
        pairs = [(i, i) for i in range(len(values))] + [(i, j) for i in self.rows for j in self.columns]
        widths = [value.shape[1] for value in values]
        size = sum(widths[i] * widths[j] for i, j in pairs)
        if size > MAX_COVARIANCE_ENTRIES:
            raise UserError(
                f"the covariances of these features take {size * 8 / 2**30:.1f} GiB of the 2 GiB allowed; select fewer "
                "layers with where, use read=pool_features, or use iso.cka"
            )
        self.sums = [torch.zeros_like(origin) for origin in self.origins]
        self.products = {(i, j): values[0].new_zeros(widths[i], widths[j]) for i, j in pairs}

    def add(self, values: list[Tensor]) -> None:
        """Add the features of a batch. Shape: (B, p) each"""
        self.images += len(values[0])
        values = [value - origin for value, origin in zip(values, self.origins, strict=True)]
        for total, value in zip(self.sums, values, strict=True):
            total += value.sum(0)
        for (i, j), product in self.products.items():
            product += values[i].T @ values[j]

    def alignment(self) -> Tensor:
        """Return the linear CKA of all pairs. Shape: -> (rows, columns)"""
        norms = {
            (i, j): (product - torch.outer(self.sums[i], self.sums[j]) / self.images).norm()
            for (i, j), product in self.products.items()
        }
        pairs = [norms[i, j].square() / (norms[i, i] * norms[j, j]) for i in self.rows for j in self.columns]
        return torch.stack(pairs).view(len(self.rows), len(self.columns))


def linear_cka(x: Tensor, y: Tensor) -> Tensor:
    """Return the linear CKA of two sets of features of the same samples: 1 equal up to rotation and scale, 0 unrelated.

    |Y^T X|^2 / (|X^T X| |Y^T Y|), with centred columns.

    Shape: x (samples, p), y (samples, q) -> ()
    Source: Kornblith et al. (2019) eq. 3; TDRL Fig. 2 (c) uses it for branches
    Raises: UserError if the numbers of samples differ.

    Example:
        >>> x = torch.randn(100, 8)
        >>> round(iso.analysis.linear_cka(x, 3 * x).item(), 6)
        1.0
    """
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        raise UserError(f"CKA needs (samples, features) of the same samples, not {tuple(x.shape)} and {tuple(y.shape)}")
    x, y = (t.double() - t.double().mean(0) for t in (x, y))
    if len(x) < max(x.shape[1], y.shape[1]):  # the same value from the Gram matrices, which are smaller
        inner = (x @ x.T * (y @ y.T)).sum()
        return inner / ((x @ x.T).norm() * (y @ y.T).norm())
    return (y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())
