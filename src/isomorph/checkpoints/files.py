"""Checkpoint files: written completely or not at all, and read without running code from them."""

import argparse
import datetime
import os
import re
import types
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from timm.models import is_model
from torch import Tensor
from torch.serialization import add_safe_globals, get_safe_globals, safe_globals

from isomorph.checkpoints.paths import move_into_place
from isomorph.errors import UserError


def write_atomically(path: Path, write: Callable[[Path], object], new: bool = False) -> None:
    """Call `write` on a temporary file, flush it to disk and rename it, so that readers see the old or the new file.

    Raises: UserError when the file cannot be written, or must be `new` and exists; the old file is then unchanged.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        move_into_place(partial, path, new)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError for a full disk
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"cannot write {path}: {reason}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


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

    Raises: UserError when it is damaged, or holds a class that could run code.
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
    text = " ".join(str(error).split())
    if rejected := _REJECTED.search(text):
        return UserError(
            f"cannot read checkpoint {path}: it holds a {rejected[1] or rejected[2]}, and building one could run code. "
            "In the program that wrote the file, save the weights alone: torch.save(model.state_dict(), 'weights.pth')"
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


_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict")
_LAST = ("state_dict", "model_state_dict", "model", "net", "module", "weights")
"""Entries of training checkpoints that hold the model's tensors, averaged over training (EMA) or as they were last."""


class Contents(NamedTuple):
    """What a checkpoint holds: tensors by name, and what was written next to them.

    `header` is the metadata of a safetensors file, `settings` are the arguments of the training script, if it saved
    them. `notes` says which of several weights were chosen, if there was a choice.
    """

    path: Path
    tensors: dict[str, Any]
    header: Mapping[str, str] = {}
    settings: Mapping[str, Any] = {}
    notes: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        """True for a file that isomorph wrote, whose header rebuilds the model; others have the format "pt"."""
        return is_own(self.header)


def is_own(header: Mapping[str, str]) -> bool:
    """True for the header of a file that isomorph wrote."""
    return header.get("format", "").startswith("isomorph")


def read_header(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file. Raises: UserError when it cannot be read."""
    return _read_safetensors(path, tensors=False)[1]


def _read_safetensors(path: Path, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise UserError(_describe_missing(path))
    try:
        with safe_open(str(path), framework="pt") as file:
            names = file.keys() if tensors else ()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except Exception as error:  # safetensors raises many types for a damaged file
        raise UserError(f"cannot read checkpoint {path} ({short_reason(error)}); it may be truncated") from None


def _describe_missing(path: Path) -> str:
    if not path.is_dir():
        if not path.suffix and is_model(str(path)):
            return f"{path} is a timm model, not a checkpoint; give a checkpoint or the folder of a run"
        return f"there is no checkpoint {path}"
    inside = path / "model.safetensors"
    return f"{path} is a folder, not a checkpoint" + f"; give {inside}" * inside.is_file()


def read_contents(path: Path, ema: bool = True) -> Contents:
    """Return the tensors of a safetensors or PyTorch file, and what is next to them; no code in it is run.

    Averaged weights (EMA) are taken where the file has any; with `ema=False`, the last ones.

    Raises: UserError when the file is missing, damaged, or holds no tensors by name.
    """
    if path.suffix == ".safetensors":
        return Contents(path, *_read_safetensors(path))
    if not path.is_file():
        raise UserError(_describe_missing(path))
    held = unpickle(path)
    if not isinstance(held, Mapping):
        raise UserError(
            f"checkpoint {path} holds a {type(held).__name__}, not a dictionary of tensors; save model.state_dict()"
        )
    if not all(isinstance(name, str) for name in held):
        raise UserError(f"checkpoint {path} holds tensors without names; save model.state_dict(), which names them")
    return _choose_tensors(path, held, ema)


def _choose_tensors(path: Path, held: Mapping[str, Any], ema: bool) -> Contents:
    settings = held.get("args", held.get("hyper_parameters"))
    settings = dict(settings if isinstance(settings, Mapping) else getattr(settings, "__dict__", {}))
    if isinstance(held.get("arch"), str):
        settings.setdefault("model", held["arch"])
    entries = [key for key in (*_AVERAGED, *_LAST) if _holds_tensors(held.get(key))]
    if not entries:
        if not _holds_tensors(held, depth=0):
            found = "the state of an optimiser" if "param_groups" in held else ", ".join(list(held)[:6]) or "nothing"
            raise UserError(f"{path} holds no weights, only {found}; give a file with the model's state_dict")
        return Contents(path, dict(held), settings=settings)
    last = [key for key in entries if key in _LAST]
    chosen = (entries if ema or not last else last)[0]
    notes: tuple[str, ...] = ()
    if other := next((key for key in entries if (key in _LAST) != (chosen in _LAST)), ""):
        averaged = f"averaged weights (EMA, {chosen}); --no-ema (ema=False) takes {other}"
        newest = f"last weights ({chosen}); --ema (ema=True) takes the average, {other}"
        notes = (f"{path.name}: {newest if chosen in _LAST else averaged}",)
    return Contents(path, _choose_tensors(path, held[chosen], ema).tensors, {}, settings, notes)


def _holds_tensors(value: Any, depth: int = 2) -> bool:
    """True for a dictionary of tensors by name, or one that holds it in one of the entries above, `depth` levels in."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    within = depth and any(_holds_tensors(value.get(key), depth - 1) for key in (*_AVERAGED, *_LAST))
    return within or any(isinstance(each, Tensor) for each in value.values())


_WRAPPERS = ("module.", "model.")  # prefixes of all tensor names that DistributedDataParallel and training modules add
_COMPILED = "_orig_mod."


def strip_wrappers(tensors: Mapping[str, Any], own: Collection[str] = ()) -> dict[str, Any]:
    """Remove the prefixes of DistributedDataParallel, torch.compile and training modules, but those of `own` names."""
    stripped = {name: tensor for name, tensor in tensors.items() if name != "n_averaged"}  # of AveragedModel
    if not any(_COMPILED in name for name in own):
        stripped = {name.replace(_COMPILED, ""): tensor for name, tensor in stripped.items()}
    while stripped:
        prefix = next((p for p in _WRAPPERS if all(name.startswith(p) for name in stripped)), None)
        if prefix is None or any(name.startswith(prefix) for name in own):
            break
        stripped = {name.removeprefix(prefix): tensor for name, tensor in stripped.items()}
    return stripped
