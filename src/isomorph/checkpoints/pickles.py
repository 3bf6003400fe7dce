"""PyTorch's own files, which are pickles: read without running code that a file may contain."""

import argparse
import datetime
import re
import types
import warnings
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch
from torch.serialization import add_safe_globals, get_safe_globals, safe_globals

from isomorph.errors import UserError, one_line, short_reason

_PATH_CLASSES = {"PosixPath": PurePosixPath, "WindowsPath": PureWindowsPath}
_NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
# Classes of values that training scripts write next to the weights: building one runs no code of the file.
_HARMLESS: list[Any] = [
    argparse.Namespace,
    types.SimpleNamespace,
    datetime.datetime,
    datetime.date,
    datetime.timedelta,
    *(
        (pure, f"{module}.{name}")
        for name, pure in _PATH_CLASSES.items()
        for module in ("pathlib", "pathlib._local")
    ),
    PurePosixPath,
    PureWindowsPath,
    *((np._core.multiarray.scalar, f"{module}.scalar") for module in _NUMPY_MODULES),  # type: ignore[attr-defined]
    np.dtype,
    *dict.fromkeys(type(np.dtype(code)) for code in "?bBhHiIlLqQefdFDUS"),
]
# How torch.load names the class or function that it does not build.
_REJECTED = re.compile(r"GLOBAL ([\w.]+)|(?:but got|function|class) <(?:class|function) '?([\w.]+)")


def unpickle(path: Path) -> Any:
    """Return the content of a PyTorch file: tensors, plain values and harmless classes such as argparse.Namespace.

    Raises: UserError when it is damaged, or holds a class that could run code.
    """
    allowed = get_safe_globals()
    try:
        # torch warns about the protocol; the error below explains it
        with safe_globals(_HARMLESS), warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types for a damaged file
        raise _explain(path, error) from None
    finally:
        # safe_globals also removes those that the program had added before
        add_safe_globals(allowed)


def _explain(path: Path, error: Exception) -> UserError:
    """Return the error of a pickle that cannot be read: code that is not allowed, or a damaged file."""
    rejected = _REJECTED.search(one_line(error))
    if rejected:
        return UserError(
            f"cannot read checkpoint {path}: it holds a {rejected[1] or rejected[2]}, and building one could run code. "
            "In the program that wrote the file, save the weights alone: torch.save(model.state_dict(), 'weights.pth')"
        )
    reason = f" ({short_reason(error)})"
    if isinstance(error, KeyError):  # a number of no meaning to the user
        reason = ""
    return UserError(
        f"cannot read checkpoint {path}{reason}; it may be truncated or of another format; give "
        "a file written by torch.save or safetensors"
    )
