"""Centred kernel alignment (CKA) between the layers of two models, over a loader in constant memory."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isomorph.analysis.batches import Data, batches, count_images
from isomorph.analysis.features import feature_layers, features
from isomorph.errors import DataWarning, UserError
from isomorph.operations import unwrap
from isomorph.surgery.calls import Inputs, to_model
from isomorph.surgery.modules import list_names
from isomorph.surgery.site import Where

# Smallest batch for unbiased HSIC, which divides by n - 3.
MIN_IMAGES = 4
# Largest standard deviation of the value of unrelated layers that is not worth a warning: that of 16 images.
_LARGEST_NOISE = 0.1

_ReadFeatures = Callable[[Tensor], Tensor]


class CKA(NamedTuple):
    """Similarity of layers: 1 equal up to rotation and scale, 0 unrelated; `rows` and `columns` are the layers' names.

    Shape: matrix (rows, columns)

    >>> a, b = (timm.create_model("cifar_resnet20") for _ in range(2))
    >>> iso.cka(a, b, torch.randn(16, 3, 32, 32)).rows
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

    >>> tuple(iso.analysis.pool_features(torch.randn(8, 64, 4, 4)).shape)
    (8, 64)
    """
    if output.ndim == 3:
        return output.mean(1)
    if output.ndim == 4:
        return output.flatten(2).mean(2)
    return output.flatten(1)


def cka(
    a: nn.Module,
    b: nn.Module,
    data: Data,
    where: Where | None = None,
    other_where: Where | None = None,
    read: _ReadFeatures = flatten_features,
) -> CKA:
    """Return the similarity between all layers of two models on the same images: linear CKA from unbiased HSIC.

    sum_i HSIC1(K_i, L_i) / sqrt(sum_i HSIC1(K_i, K_i) sum_i HSIC1(L_i, L_i)) over batches i, where K and L are the Gram
    matrices of a batch's features. For unrelated features it scatters around 0, where the biased form is high. Only the
    Gram matrices of one batch are in memory.

    How far it scatters depends on the number of images alone: HSIC1 is a scalar product of centred matrices without
    diagonal, which for n images have n (n - 3) / 2 dimensions, so that the cosine of unrelated ones has the standard
    deviation 1 / sqrt(sum_i n_i (n_i - 3) / 2). It is .71 with 4 images, .22 with 8, .098 with 16, .046 with 32.

    Args:
        a, b: models, for the rows and the columns.
        data: images (B, C, H, W) or inputs by name, or a loader of such; batches of fewer than 4 images (the last one)
            are skipped.
        where: layers of both models, by default those of timm's `feature_info`, or the blocks of other models.
        other_where: layers of `b`, if they differ.
        read: function from the output of a layer to features (B, features), by default all of the output.

    Source: Nguyen, Raghu, Kornblith (2021), eq. 2 to 4; HSIC1: Song et al. (2012), eq. 5
    Raises: UserError if no batch has 4 images, if they are too few for all layers, or a model has no such layer. Where
        they are too few for some layers, or features do not depend on the image, it warns, and the value is NaN. It
        also warns where that standard deviation is above .1, as with fewer than 16 images in one batch.

    >>> a, b = (timm.create_model("cifar_resnet20") for _ in range(2))
    >>> tuple(iso.cka(a, b, torch.randn(16, 3, 32, 32)).matrix.shape)
    (4, 4)
    """
    return cka_of_pairs(a, b, ((batch, batch) for batch in batches(data)), where, other_where, read)


@torch.no_grad()
def cka_of_pairs(
    a: nn.Module,
    b: nn.Module,
    pairs: Iterable[tuple[Inputs, Inputs]],
    where: Where | None = None,
    other_where: Where | None = None,
    read: _ReadFeatures = flatten_features,
) -> CKA:
    """Return `cka` of two models with different inputs for the same images, such as other sizes or normalisation.

    Shape: pairs of batches of the same images, (B, C, H, W) for a and (B, C', H', W') for b -> CKA
    Raises: UserError as in `cka`, or if the batches of a pair have different numbers of images.
    """
    a = unwrap(a, to_copy=False)
    b = unwrap(b, to_copy=False)
    rows = feature_layers(a, where, 1)
    columns = feature_layers(b, other_where or where, 1)
    cross: Any = 0.0
    own_a: Any = 0.0
    own_b: Any = 0.0
    largest = 0
    images = 0
    dimensions = 0.0  # of centred matrices without diagonal
    for batch, other_batch in pairs:
        count = count_images(batch)
        if count != count_images(other_batch):
            other_count = count_images(other_batch)
            raise UserError(
                f"CKA needs the same images for both models, not batches of {count} and {other_count}"
            )
        largest = max(largest, count)
        if count < MIN_IMAGES:
            continue
        images += count
        dimensions += count * (count - 3) / 2
        x = gram_matrices(a, batch, rows, read)
        y = gram_matrices(b, other_batch, columns, read)
        cross = cross + hsic(x, y)
        own_a = own_a + _hsic_own(x)
        own_b = own_b + _hsic_own(y)
    if largest < MIN_IMAGES:
        raise UserError(
            f"unbiased CKA needs batches of at least {MIN_IMAGES} images; the largest given has {largest}",
        )
    matrix = cross / (own_a[:, None] * own_b).sqrt()
    own = zip([*rows, *columns], [*own_a, *own_b], strict=True)
    unknown = [name for name, hsic_own in own if not hsic_own > 0]
    noise = dimensions**-0.5
    if unknown:
        _report_unknown(matrix, list_names(list(dict.fromkeys(unknown))), largest)
    elif noise > _LARGEST_NOISE:
        said = f"CKA of {images} images scatters: unrelated layers get values of 0 +- {noise:.2f}"
        warnings.warn(f"{said}; give batches of 16 images or more", DataWarning, stacklevel=4)
    return CKA(matrix, list(rows), list(columns))


def _report_unknown(matrix: Tensor, names: str, images: int) -> None:
    """Warn of layers whose HSIC with themselves is not positive. Raises: UserError if there is no other layer."""
    problem = (
        f"the CKA of {names} is unknown (NaN): in batches of {images} their features say too little"
    )
    advice = "give larger batches, of 32 images or more; features that are the same for all images have none"
    if not matrix.isfinite().any():
        raise UserError(f"{problem}; {advice}")
    warnings.warn(f"{problem}; {advice}", DataWarning, stacklevel=5)


def gram_matrices(
    model: nn.Module,
    batch: Inputs,
    layers: dict[str, nn.Module],
    read: _ReadFeatures,
) -> Tensor:
    """Return the Gram matrix of every layer's features with zero diagonal, in float64; features are not stored.

    Shape: -> (layers, B, B)
    """

    def gram(output: Tensor) -> Tensor:
        x = read(output).double()
        x = x - x.mean(0)  # HSIC does not depend on the mean; removing it reduces rounding errors
        return (x @ x.T).fill_diagonal_(0.0)

    matrices = features(model, to_model(batch, model), layers, gram)
    for name in layers:
        if name not in matrices:
            raise UserError(f"the forward of the model does not call {name}, so it has no features")
    return torch.stack([value.cpu() for value in matrices.values()])


def hsic(k: Tensor, m: Tensor) -> Tensor:
    """Return unbiased HSIC of all pairs of Gram matrices with zero diagonals. Shape: (p, n, n), (q, n, n) -> (p, q)

    [tr(KM) + 1'K1 1'M1 / ((n-1)(n-2)) - 2 1'KM1 / (n-2)] / (n (n-3))
    """
    n = k.shape[-1]
    traces = k.flatten(1) @ m.flatten(1).T
    row_k = k.sum(-1)  # (p, n)
    row_m = m.sum(-1)  # (q, n)
    totals = row_k.sum(-1)[:, None] * row_m.sum(-1)
    rows = row_k @ row_m.T
    total = traces + totals / ((n - 1) * (n - 2)) - 2 * rows / (n - 2)
    return total / (n * (n - 3))


def _hsic_own(k: Tensor) -> Tensor:
    """Return unbiased HSIC of each Gram matrix with itself. Shape: (p, n, n) -> (p,)"""
    return torch.cat([hsic(matrix, matrix)[0] for matrix in k.split(1)])


def linear_cka(x: Tensor, y: Tensor) -> Tensor:
    """Return the linear CKA of two sets of features of the same samples: 1 equal up to rotation and scale, 0 unrelated.

    |Y^T X|^2 / (|X^T X| |Y^T Y|), with centred columns
    Shape: x (samples, p), y (samples, q) -> ()
    Source: Kornblith et al. (2019) eq. 3; TDRL Fig. 2 (c) uses it for branches
    Raises: UserError if the numbers of samples differ, or for a single one. Features that are the same for all samples
        give NaN and a warning.

    >>> x = torch.randn(100, 8)
    >>> round(iso.analysis.linear_cka(x, 3 * x).item(), 6)
    1.0
    """
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        raise UserError(
            f"CKA needs (samples, features) of the same samples, not {tuple(x.shape)} and {tuple(y.shape)}",
        )
    if len(x) < 2:
        raise UserError(f"CKA needs at least 2 samples, not {len(x)}")
    x = x.double() - x.double().mean(0)
    y = y.double() - y.double().mean(0)
    if not (x.any() and y.any()):
        warnings.warn(
            "CKA is unknown (NaN): features are the same for all samples", DataWarning, stacklevel=2
        )
    # the same value from the Gram matrices, which are smaller
    if len(x) < max(x.shape[1], y.shape[1]):
        k = x @ x.T
        m = y @ y.T
        return (k * m).sum() / (k.norm() * m.norm())
    cross = (y.T @ x).square().sum()
    return cross / ((x.T @ x).norm() * (y.T @ y).norm())
