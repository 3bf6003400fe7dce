"""Checkpoint files: written completely or not at all, read without running code from them."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from isomorph.errors import UserError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary file, flush it to disk and rename it, so that readers see the old or the new file.

    Raises: UserError when the file cannot be written; the old file is then unchanged.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError for a full disk
        raise UserError(f"cannot write {path}: {' '.join(str(error).split())}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def read_header(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file. Raises: UserError when it cannot be read."""
    if not path.is_file():
        raise UserError(f"no checkpoint {path}")
    try:
        with safe_open(str(path), framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}); it may be truncated") from None


def is_complete(path: Path) -> bool:
    """True if a safetensors file exists and is not truncated."""
    try:
        with safe_open(str(path), framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def read_tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors or PyTorch file by name; code in a PyTorch file is not run.

    Raises: UserError when the file is missing, damaged, or not a dictionary of tensors.
    """
    if not path.is_file():
        raise UserError(f"no checkpoint {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(str(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load and safetensors raise many types for a damaged file
        raise UserError(
            f"cannot read checkpoint {path} ({short_reason(error)}); it may be truncated or foreign"
        ) from None
    for key in ("state_dict", "model"):
        state = state.get(key, state) if isinstance(state, dict) else state
    if not isinstance(state, dict):
        raise UserError(f"checkpoint {path} holds a {type(state).__name__}, not a dictionary of tensors")
    if not all(isinstance(name, str) for name in state):
        raise UserError(f"checkpoint {path} holds tensors without names, not a dictionary of tensors by name")
    return state


def short_reason(error: Exception) -> str:
    """Return the first line of an error, with its type if the line is a single word."""
    line = next(iter(str(error).splitlines()), "")
    return line if " " in line else f"{type(error).__name__} {line}".strip()
