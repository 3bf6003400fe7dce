"""How alike two sets of features are: centred kernel alignment."""

from torch import Tensor

from isomorph.errors import UserError


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
