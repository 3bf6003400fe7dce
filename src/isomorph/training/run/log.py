"""What a run writes down as it goes: its recipe, the machine it is on, and its metrics, line by line."""

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from isomorph.checkpoints.model import write_atomically
from isomorph.distributed import Runtime
from isomorph.errors import UserError
from isomorph.training.recipe.recipe import Recipe

LOGS = ("log.jsonl", "steps.jsonl", "monitor.jsonl", "environment.jsonl")


def describe_environment(runtime: Runtime) -> dict[str, Any]:
    """Where, when and with what a run was started."""
    place = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else platform.processor()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__}
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "command": sys.argv,
        "device": f"{runtime.device.type} {place}".strip(),
        "processes": runtime.world,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **versions,
        "numpy": np.__version__,
    }


class Journal:
    """The files of a run's folder that are read by people, and the terminal. Only the leading process writes.

    Raises: UserError when TensorBoard is wanted and not installed.
    """

    def __init__(self, recipe: Recipe, runtime: Runtime, show: bool) -> None:
        self.recipe, self.runtime, self.folder = recipe, runtime, recipe.folder
        self.console = Console(file=ClosableStream(sys.stdout), quiet=not (show and runtime.leads))  # type: ignore[arg-type]
        self.board: Any = None

    def open(self, epoch: int, step: int) -> None:
        """Writes recipe and environment, and drops what the logs say of steps that will be run again.

        Raises: UserError when one of these files cannot be read or written.
        """
        if not self.runtime.leads:
            return
        for name in LOGS:
            if lost := _truncate_log(self.folder / name, epoch, step):
                lines = "1 line" if lost == 1 else f"{lost} lines"
                self.say(f"{self.recipe.name}: {lines} of {name} cannot be read and were dropped from it")
        self.board = _open_board(self.folder, step) if self.recipe.tensorboard else None
        text = self.recipe.model_dump_json(indent=2)
        write_atomically(self.folder / "recipe.json", lambda file: file.write_text(text))
        self.write("environment.jsonl", describe_environment(self.runtime))

    def write(self, name: str, row: dict[str, Any]) -> None:
        """Appends one line of JSON. Raises: UserError when the disk is full."""
        if not self.runtime.leads:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / name).open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {self.folder / name}: {error.strerror}; the snapshots are whole") from None

    def list_unreadable(self, problems: list[str]) -> None:
        """Says how many images could not be read so far, and lists them in unreadable.txt."""
        self.say(
            f"{self.recipe.name}: {len(problems)} unreadable images so far, listed in {self.folder}/unreadable.txt"
        )
        if self.runtime.leads:
            text = "".join(f"{said}\n" for said in problems)
            write_atomically(self.folder / "unreadable.txt", lambda file: file.write_text(text))

    def curve(self, group: str, step: int, values: dict[str, Any]) -> None:
        """A point on each curve in TensorBoard, where that is on."""
        for name, value in values.items():
            if self.board and isinstance(value, int | float):
                self.board.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        """Flushes what is still in memory."""
        if self.board:
            self.board.close()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def progress(self, title: str, done: int, total: int) -> Iterator[Any]:
        """A bar on a terminal, nothing elsewhere. Yields a function to call after each step."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        off = not self.console.is_terminal or self.console.quiet
        with Progress(*columns, console=self.console, transient=True, disable=off) as bar:
            task = bar.add_task(title, total=total, completed=done)
            yield lambda: bar.advance(task)


def _open_board(folder: Path, step: int) -> Any:
    """TensorBoard's writer, which hides what it has of later steps. Raises: UserError when it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("tensorboard needs a package; pip install 'isomorph[track]'") from None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log, without lines that a crash cut short or that are damaged."""
    return _read_rows(path)[0]


def _read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a log, and how many of its lines are not rows: cut short, not UTF-8, not JSON, of other types."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    lines = [line for line in lines if line.strip()]
    rows: list[dict[str, Any]] = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            rows += [row] if _is_row(row) else []
    return rows, len(lines) - len(rows)


def _is_row(row: Any) -> bool:
    """Whether this is a row of a log: its step and its epoch, where it has them, are whole numbers."""
    return isinstance(row, dict) and all(type(row.get(key, 0)) is int for key in ("step", "epoch"))


def _truncate_log(path: Path, epoch: int, step: int) -> int:
    """Drops the rows of epochs after `epoch`, or, where they say a step, of steps after `step`; and damaged lines.

    Returns the number of the latter.

    Raises: UserError when the log cannot be read or written.
    """
    if not path.exists():
        return 0
    try:
        if not path.is_file():
            raise OSError("it is not a file")
        rows, lost = _read_rows(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; move it away") from None
    kept = [row for row in rows if (row["step"] <= step if "step" in row else row.get("epoch", 0) <= epoch)]
    write_atomically(path, lambda file: file.write_text("".join(json.dumps(row) + "\n" for row in kept)))
    return lost


class ClosableStream:
    """A stream that may go away (a closed terminal, a pipe without a reader): what is written after that is dropped."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self.dropping():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self.dropping():
            self.stream.flush()

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Points the stream at nothing once it fails, for all who write to it."""
        try:
            yield
        except (OSError, ValueError):  # the latter: it has been closed in this process
            with suppress(OSError, ValueError):
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self.stream.fileno())
                os.close(nothing)
