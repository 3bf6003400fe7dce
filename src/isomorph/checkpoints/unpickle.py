"""Reading PyTorch files without running code from them."""

import argparse
import datetime
import re
import types
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch
from torch.serialization import add_safe_globals, get_safe_globals, safe_globals

from isomorph.errors import UserError

_PATH_CLASSES = {"PosixPath": PurePosixPath, "WindowsPath": PureWindowsPath}
_NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_HARMLESS: list[Any] = [
    argparse.Namespace,
    types.SimpleNamespace,
    datetime.datetime,
    datetime.date,
    datetime.timedelta,
    *((pure, f"{module}.{name}") for name, pure in _PATH_CLASSES.items() for module in ("pathlib", "pathlib._local")),
    PurePosixPath,
    PureWindowsPath,
    *((np._core.multiarray.scalar, f"{module}.scalar") for module in _NUMPY_MODULES),  # type: ignore[attr-defined]
    np.dtype,
    *dict.fromkeys(type(np.dtype(code)) for code in "?bBhHiIlLqQefdFDUS"),
]
"""Classes of values that training scripts write next to the weights: building one runs no code of the file."""
_REJECTED = re.compile(r"GLOBAL ([\w.]+)|(?:but got|function|class) <(?:class|function) '?([\w.]+)")
"""How torch.load names the class or function that it does not build."""


def unpickle(path: Path) -> Any:
    """Return the content of a PyTorch file: tensors, plain values and harmless classes such as argparse.Namespace.

    Raises: UserError when the file is damaged, or holds a class that could run code.
    """
    allowed = get_safe_globals()
    try:
        with safe_globals(_HARMLESS):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types for a damaged file
        raise _explain(path, error) from None
    finally:
        add_safe_globals(allowed)  # safe_globals also removes those that the program had added before


def _explain(path: Path, error: Exception) -> UserError:
    """Return the error for a file that torch.load rejects."""
    text = " ".join(str(error).split())
    if rejected := _REJECTED.search(text):
        return UserError(
            f"cannot read checkpoint {path}: it holds a {rejected[1] or rejected[2]}, and building one could run code. "
            "In the program that wrote the file, save the weights alone: torch.save(model.state_dict(), 'weights.pth')"
        )
    if "TorchScript" in text:
        return UserError(
            f"cannot read checkpoint {path}: it is a TorchScript archive; save the weights alone: "
            f"torch.save(torch.jit.load({str(path)!r}).state_dict(), 'weights.pth')"
        )
    reason = "" if isinstance(error, KeyError) else f" ({short_reason(error)})"  # a number of no meaning to the user
    return UserError(
        f"cannot read checkpoint {path}{reason}; it may be truncated or of another format; give "
        "a file written by torch.save or safetensors"
    )


def short_reason(error: Exception) -> str:
    """Return the first sentence of an error, with its type if it is a single word."""
    line = next(iter(str(error).splitlines()), "").partition(". ")[0]
    return line if " " in line else f"{type(error).__name__} {line}".strip()
