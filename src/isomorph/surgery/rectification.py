"""Rectifications of the sums of pyramids, for all layers or by layer name, as the field `rectify` gives them."""

from collections.abc import Mapping
from typing import Any

from isomorph.errors import UserError

_RECTIFICATIONS = ("paper", "batchnorm", "rescale", "none")


def normalise_rectify(given: str | Mapping[str, str]) -> str:
    """Return `rectify` as one string: a rectification, or NAME=RECTIFICATION pairs sorted by name.

    Raises: UserError for an unknown rectification, or a name given twice.
    """
    pairs = list(given.items()) if isinstance(given, Mapping) else []
    if isinstance(given, str) and "=" not in given:
        _check_rectification(given)
        return given
    if isinstance(given, str):
        pairs = [(name.strip(), value.strip()) for name, _, value in (pair.partition("=") for pair in given.split(","))]
    if not isinstance(given, str | Mapping):
        _check_rectification(given)
    if not pairs or len(dict(pairs)) < len(pairs):
        raise UserError(f"rectify {given!r} must name each layer once, as in 'q=none,v=rescale'")
    for name, value in pairs:
        _check_rectification(value, f" of {name}")
    return ",".join(f"{name}={value}" for name, value in sorted(pairs))


def _check_rectification(value: Any, layer: str = "") -> None:
    """Check that a rectification exists.

    Raises: UserError otherwise.
    """
    if value not in _RECTIFICATIONS:
        raise UserError(
            f"rectify{layer} {value!r} is unknown; choose 'paper', 'batchnorm', 'rescale' or 'none', or one for each "
            "layer, as in 'q=none,v=rescale'"
        )
