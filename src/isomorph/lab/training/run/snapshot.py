"""Snapshots of a run: folders of safetensors shards and one JSON file, written completely or not at all.

Each process writes its own shards, and any number can read them. The hidden folder of a new one gets checksums of its
files and a digest of all other values before it is renamed. A snapshot contains no code.
"""

import hashlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from isomorph.checkpoints.header import describe_problems
from isomorph.errors import UserError, one_line
from isomorph.json_values import JsonObject, read_object
from isomorph.lab.distributed import Runtime
from isomorph.lab.training.run.named_state import Tensors

STATE_FILE = "state.json"
_SNAPSHOTS_TO_KEEP = 2


_Count = Annotated[int, Field(ge=0)]
_Number = bool | int | float


class _ClosedSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class RunProgress(_ClosedSchema):
    """Progress of a run: finished steps, closed (evaluated and logged) epochs, and their metrics."""

    step: _Count = 0
    closed: _Count = 0
    recast: bool = True
    metrics: dict[str, int | float] = {}
    best: float = -math.inf
    unreadable: list[str] = []
    seconds: float = 0.0
    logged: _Count = 0
    """Step of the latest line of steps.jsonl."""
    logged_total: float = 0.0
    """Sum of the losses of this epoch up to it."""


class SnapshotValues(_ClosedSchema):
    """The content of state.json.

    `optimizer` are its values that are not tensors, by parameter and key, and by group and option; `data` the numbers
    of images, steps and classes of the run's data; `model` the header that rebuilds the model; `digest` that of all
    other values.
    """

    step: _Count
    files: dict[Annotated[str, Field(pattern=r"^shard-[\w.-]+$", max_length=200)], str]
    optimizer: dict[Literal["state", "groups"], dict[str, dict[str, _Number]]]
    recipe: JsonObject
    progress: RunProgress
    lanes: _Count
    data: dict[Literal["images", "steps", "classes", "batch"], _Count]
    model: dict[str, str]
    digest: str


def digest_of(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all values except the digest itself, as JSON with sorted keys."""
    rest = {name: value for name, value in values.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


class DamagedSnapshot(UserError):
    """Error for a snapshot that differs from what was written."""


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"


def _parse_step(path: Path) -> int | None:
    digits = re.fullmatch(r"step-([0-9]{8,})", path.name)
    return int(digits[1]) if digits and _folder_name(int(digits[1])) == path.name else None


def _named_snapshots(folder: Path) -> list[Path]:
    named = []
    for path in folder.glob("step-*"):
        step = _parse_step(path)
        if step is not None:
            named.append((step, path))
    return [path for _, path in sorted(named, reverse=True)]


def list_snapshots(folder: Path) -> list[Path]:
    """Return the complete snapshots of a run, newest first."""
    return [path for path in _named_snapshots(folder) if (path / STATE_FILE).is_file()]


def peek_header(folder: Path) -> Any:
    """Return the model's header in a run's newest snapshot, without checking its files; None if it cannot be read."""
    for path in list_snapshots(folder)[:1]:
        return (read_object(path / STATE_FILE) or {}).get("model")
    return None


def write_snapshot(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    runtime: Runtime,
) -> Path:
    """Write the snapshot of a step and delete old ones; every process calls it.

    `tensors` are equal in all processes, or shards (DTensor); `values` are plain.

    Raises: UserError when it cannot be written (a full disk); the older snapshots are then unchanged.
    """
    path = folder / _folder_name(step)
    partial = folder / f".{path.name}.partial"
    alone = not any(isinstance(tensor, DTensor) for tensor in tensors.values())
    files: list[tuple[str, str]] = []

    def make_empty() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def write_mine() -> None:
        copies = {name: tensor.detach() for name, tensor in tensors.items()}
        for name, tensor in copies.items():
            # safetensors needs it contiguous, sharing memory with no other
            if not isinstance(tensor, DTensor):
                copies[name] = tensor.clone(memory_format=torch.contiguous_format)
        with _no_process_group_warning():
            writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
            dcp.save(copies, storage_writer=writer, no_dist=alone)

    def finish() -> None:
        state = json.loads(json.dumps({"step": step, **values, "files": dict(sorted(files))}))
        with (partial / STATE_FILE).open("w") as file:
            json.dump({**state, "digest": digest_of(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        _flush_folder(partial)
        _replace(path, partial)

    try:
        _run_on_all_processes(make_empty, runtime, runtime.is_main)
        _run_on_all_processes(write_mine, runtime, runtime.is_main or not alone)
        mine = [
            (file.name, _checksum(file)) for file in partial.glob(f"shard-{runtime.rank + 1:05d}-*")
        ]
        for own in runtime.gather(mine):
            files += own
        _run_on_all_processes(finish, runtime, runtime.is_main)
    except OSError as error:
        if runtime.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            restore_replaced(folder)
        raise UserError(
            f"cannot write {path}: {error}; snapshots before it, if any, are intact"
        ) from None
    if runtime.is_main:
        _delete_older(folder)
    return path


def _run_on_all_processes(step: Callable[[], None], runtime: Runtime, mine: bool) -> None:
    """Run a step in every process, if it is its own. Raises: OSError in all, with a reason, when one fails."""
    problem = ""
    try:
        if mine:
            step()
    except (
        Exception,
        CheckpointException,
    ) as error:  # all processes must learn of any failure of any type
        problem = _error_reason(error)
    problems = [text for text in runtime.gather(problem) if text]
    if problems:
        raise OSError(problems[0])


@contextmanager
def _no_process_group_warning() -> Iterator[None]:
    """Silence torch's warning that a checkpoint is written or read without a process group, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled", category=UserWarning
        )
        yield


def _delete_older(folder: Path) -> None:
    for path in list_snapshots(folder)[_SNAPSHOTS_TO_KEEP:]:
        # renamed first, so that a half deleted folder is not named like a snapshot
        with suppress(OSError):
            path.rename(folder / f".{path.name}.partial")
    for path in (*folder.glob(".step-*.partial"), *folder.glob(".step-*.old")):
        shutil.rmtree(path, ignore_errors=True)


def _replace(path: Path, partial: Path) -> None:
    """Give a complete snapshot its name, and keep one of the same step until it has it."""
    with suppress(OSError):  # there is one if the run was stopped in the last step of an epoch
        path.rename(path.with_name(f".{path.name}.old"))
    os.replace(partial, path)
    _flush_folder(path.parent)


def restore_replaced(folder: Path) -> None:
    """Rename a snapshot back if the run was killed while it replaced it."""
    for path in folder.glob(".step-*.old"):
        with suppress(OSError):  # the new one is there
            path.rename(folder / path.name[1:].removesuffix(".old"))


def _flush_folder(folder: Path) -> None:
    """Flush a folder to disk, which makes a rename in it durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _error_reason(error: Any) -> str:
    """Return one line for an error, also for torch's exception that wraps those of all processes."""
    for failure in getattr(error, "failures", {}).values():
        if isinstance(failure, tuple):
            error = failure[0]
        break
    return one_line(error)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_values(path: Path) -> JsonObject:
    """Return a snapshot's plain values, after checking every file. Raises: DamagedSnapshot when one has changed."""
    try:
        found = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        values = SnapshotValues.model_validate(found)
        problem = _find_problem(path, values, digest_of(found))
    except ValidationError as error:
        problem = f"{STATE_FILE} is not the state of a run: {describe_problems(error)}"
    except (OSError, ValueError, RecursionError) as error:
        problem = _error_reason(error)
    if problem:
        raise DamagedSnapshot(f"the snapshot {path} is damaged: {problem}")
    return values.model_dump()


def _find_problem(path: Path, values: SnapshotValues, digest: str) -> str:
    """Return how a snapshot with these values differs from what was written, "" if it does not. Raises: OSError."""
    if values.digest != digest:
        return f"{STATE_FILE} is not what was written: its SHA-256 differs from the one it holds"
    changed = [name for name, held in values.files.items() if _checksum(path / name) != held]
    if changed:
        return f"{', '.join(changed)} is not what was written"
    if values.step != _parse_step(path):
        return f"it is a copy of the one after step {values.step}"
    names = {entry.name for entry in path.iterdir()} - {STATE_FILE, *values.files}
    foreign = sorted(n for n in names if not n.startswith(".") or n.endswith(".safetensors"))
    return f"{', '.join(foreign[:3])} is not part of it" if foreign else ""


def read_layout(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the full shape and dtype of every tensor. Raises: DamagedSnapshot for shards unreadable or too small."""
    try:
        about = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
        layout = {name: (entry.size, entry.properties.dtype) for name, entry in about.items()}  # type: ignore[union-attr]
    except Exception as error:  # safetensors and torch raise many types for forged shards
        raise DamagedSnapshot(f"the snapshot {path} is damaged: {_error_reason(error)}") from None
    wanted = sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values())
    held = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if wanted > held:
        raise DamagedSnapshot(
            f"{path} is damaged: it names {wanted:,} bytes of tensors and holds {held:,}"
        )
    return layout


def read_tensors_into(path: Path, tensors: Tensors) -> None:
    """Read a snapshot into tensors, or into this process's shards of them."""
    with _no_process_group_warning():
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)


def read_snapshot(path: Path) -> Tensors:
    """Return every tensor of a snapshot, unsharded."""
    tensors: Tensors = {}
    for name, (shape, dtype) in read_layout(path).items():
        tensors[name] = torch.zeros(shape, dtype=dtype)
    read_tensors_into(path, tensors)
    return tensors


@dataclass(frozen=True)
class IntactSnapshot:
    """An intact snapshot, its values, and the paths and error messages of newer ones that are damaged."""

    path: Path
    values: JsonObject
    damaged: tuple[tuple[Path, str], ...] = ()


def rename_damaged(found: IntactSnapshot) -> list[str]:
    """Rename the damaged snapshots, so that they are not counted as snapshots; return their error messages."""
    for path, _ in found.damaged:
        named = path.with_name(f"damaged-{path.name}")
        number = 2
        while named.exists():
            named = path.with_name(f"damaged-{path.name}-{number}")
            number += 1
        with suppress(OSError):
            path.rename(named)
    return [message for _, message in found.damaged]


def newest_snapshot(folder: Path) -> IntactSnapshot | None:
    """Return the newest intact snapshot, or None without any. Raises: DamagedSnapshot when all are damaged."""
    damaged: list[tuple[Path, str]] = []
    for path in _named_snapshots(folder):
        try:
            return IntactSnapshot(path, read_values(path), tuple(damaged))
        except DamagedSnapshot as error:
            if not path.exists():  # the running process has deleted it meanwhile
                return newest_snapshot(folder)
            damaged.append((path, str(error)))
    if damaged:
        raise DamagedSnapshot("; ".join(message for _, message in damaged))
    return None
