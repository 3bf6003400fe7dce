"""Checkpoint files: written completely or not at all, and which of several weights in one are read."""

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from timm.models import is_model
from torch import Tensor

from isomorph.checkpoints.paths import move_into_place
from isomorph.checkpoints.pickles import unpickle
from isomorph.errors import UserError, one_line, short_reason


def write_atomically(path: Path, write: Callable[[Path], object], new: bool = False) -> None:
    """Call `write` on a temporary file, flush it to disk and rename it, so that readers see the old or the new file.

    Raises: UserError when the file cannot be written, or must be `new` and exists; the old file is then unchanged.
    """
    # processes of two machines, or two threads, may write the same file
    unique = f"{os.getpid()}-{uuid4().hex[:8]}"
    partial = path.with_name(f".{path.name}.{unique}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        move_into_place(partial, path, new)
    except (
        OSError,
        SafetensorError,
        RuntimeError,
    ) as error:  # torch.save raises RuntimeError for a full disk
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"cannot write {path}: {reason}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def remove_partial_files(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder; no other process may write there."""
    with suppress(OSError):
        for path in filter(Path.is_file, folder.glob(".*.[0-9]*.partial")):
            path.unlink(missing_ok=True)


# Entries of training checkpoints that hold the model's tensors, averaged over training (EMA) or as they were last.
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema", "ema_model", "params_ema")
_LAST = ("state_dict", "model_state_dict", "model", "net", "module", "weights", "params")
# Those of training without labels, where the teacher is the average of the student; next to others it is another model.
_PAIR = ("teacher", "student")


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
    """Return the tensors and the header of a safetensors file. Raises: UserError if it is damaged."""
    _require_file(path)
    try:
        with safe_open(str(path), framework="pt") as file:
            names = file.keys() if tensors else ()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except Exception as error:  # safetensors raises many types for a damaged file
        if not path.stat().st_size:
            raise UserError(f"cannot read checkpoint {path}: it is empty") from None
        raise UserError(
            f"cannot read checkpoint {path} ({short_reason(error)}); it may be truncated or of another format"
        ) from None


def _require_file(path: Path) -> None:
    if path.is_file():
        return
    if path.is_dir():
        inside = path / "model.safetensors"
        hint = f"; give {inside}" if inside.is_file() else ""
        raise UserError(f"{path} is a folder, not a checkpoint{hint}")
    if not path.suffix and is_model(str(path)):
        raise UserError(
            f"{path} is a timm model, not a checkpoint; give a checkpoint or the folder of a run"
        )
    raise UserError(f"there is no checkpoint {path}")


def read_contents(path: Path, ema: bool = True) -> Contents:
    """Return the tensors of a safetensors or PyTorch file, and what is next to them; no code in it is run.

    Averaged weights (EMA) are taken where the file has any; with `ema=False`, the last ones.

    Raises: UserError when the file is missing, damaged, or holds no tensors by name.
    """
    if path.suffix.lower() == ".safetensors":
        return Contents(path, *_read_safetensors(path))
    _require_file(path)
    checkpoint = unpickle(path)
    if not isinstance(checkpoint, Mapping):
        raise UserError(
            f"checkpoint {path} holds a {type(checkpoint).__name__}, not a dictionary of tensors; "
            "save model.state_dict()"
        )
    if not all(isinstance(name, str) for name in checkpoint):
        raise UserError(
            f"checkpoint {path} holds tensors without names; save model.state_dict(), which names them"
        )
    contents = _choose_tensors(path, checkpoint, ema)
    _check_count(path, contents.tensors)
    return contents


def count_numbers(tensors: Mapping[str, Any]) -> int:
    """Return how many numbers tensors have; other values have none."""
    return sum(tensor.numel() for tensor in tensors.values() if isinstance(tensor, Tensor))


def _check_count(path: Path, tensors: Mapping[str, Any]) -> None:
    """Raise UserError if tensors have far more numbers than their file has bytes: views of a few, or sparse ones."""
    count = count_numbers(tensors)
    size = path.stat().st_size
    if count > max(10 * size, 2**20):
        raise UserError(
            f"cannot read checkpoint {path}: its tensors have {count:,} numbers, more than fit into {size:,} bytes; "
            "save dense tensors, each with .contiguous()"
        )


def _choose_tensors(path: Path, checkpoint: Mapping[str, Any], ema: bool) -> Contents:
    """Return the tensors in a checkpoint of a training script: averaged ones if wanted, otherwise the last."""
    settings = _settings_in(checkpoint)
    entries = _entries_with_tensors(checkpoint)
    if not entries:
        if not _holds_tensors(checkpoint, depth=0):
            raise UserError(
                f"{path} holds no weights, only {_describe(checkpoint)}; give a file with the model's state_dict"
            )
        return Contents(path, dict(checkpoint), settings=settings)
    last = [key for key in entries if key in _LAST or key == "student"]
    averaged = [key for key in entries if key not in last]
    chosen = last[0] if last and not (ema and averaged) else entries[0]
    notes: tuple[str, ...] = ()
    if averaged and last and chosen in last:
        notes = (
            f"{path.name}: last weights ({chosen}); ema=True takes the average, {averaged[0]}",
        )
    elif averaged and last:
        notes = (f"{path.name}: averaged weights (EMA, {chosen}); ema=False takes {last[0]}",)
    inner = _choose_tensors(path, checkpoint[chosen], ema)
    return Contents(path, inner.tensors, {}, settings, notes or inner.notes)


def _settings_in(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the training script that wrote a checkpoint, if it saved them."""
    saved = checkpoint.get("args", checkpoint.get("hyper_parameters"))
    settings = dict(saved) if isinstance(saved, Mapping) else dict(getattr(saved, "__dict__", {}))
    if isinstance(checkpoint.get("arch"), str):
        settings.setdefault("model", checkpoint["arch"])
    return settings


def _entries_with_tensors(checkpoint: Mapping[str, Any]) -> list[str]:
    """Return the entries that hold a model's tensors, averaged ones first, or else teacher and student."""
    entries = [key for key in (*_AVERAGED, *_LAST) if _holds_tensors(checkpoint.get(key))]
    return entries or [key for key in _PAIR if _holds_tensors(checkpoint.get(key))]


def _describe(checkpoint: Mapping[str, Any]) -> str:
    """Describe a dictionary without weights in an error."""
    if "param_groups" in checkpoint:
        return "the state of an optimiser"
    return ", ".join(list(checkpoint)[:6]) or "nothing"


def _holds_tensors(value: Any, depth: int = 2) -> bool:
    """True for a dictionary of tensors by name, or one that holds it in one of the entries above, `depth` levels in."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    if any(isinstance(item, Tensor) for item in value.values()):
        return True
    if not depth:
        return False
    return any(_holds_tensors(value.get(key), depth - 1) for key in (*_AVERAGED, *_LAST, *_PAIR))


# which DistributedDataParallel and training modules add to all names
_WRAPPERS = ("module.", "model.", "backbone.")
_COMPILED = "_orig_mod."
# next to the backbone, in DINO's training
_PROJECTIONS = ("dino_head.", "ibot_head.", "head.mlp.", "head.last_layer")


def strip_wrappers(tensors: Mapping[str, Any], kept_names: Collection[str] = ()) -> dict[str, Any]:
    """Remove the prefixes of DistributedDataParallel, torch.compile and training modules, but those of `kept_names`."""
    # of AveragedModel
    stripped = {key: tensor for key, tensor in tensors.items() if key != "n_averaged"}
    if not any(_COMPILED in key for key in kept_names):
        stripped = {key.replace(_COMPILED, ""): tensor for key, tensor in stripped.items()}
    while stripped:
        names = list(stripped)
        if any(key.startswith("backbone.") for key in stripped):
            names = [key for key in stripped if not key.startswith(_PROJECTIONS)]
        prefix = _shared_prefix(names)
        if prefix is None or any(key.startswith(prefix) for key in kept_names):
            break
        stripped = {key.removeprefix(prefix): stripped[key] for key in names}
    return stripped


def _shared_prefix(names: list[str]) -> str | None:
    """Return the prefix of a wrapper that all names have, or None."""
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in names):
            return prefix
    return None
