"""What a run reports: log files, curves in TensorBoard, and terminal output."""

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from isomorph.checkpoints.files import write_atomically
from isomorph.errors import UserError, optional_module
from isomorph.json_values import JsonObject, parse_log_row
from isomorph.lab.distributed import Runtime
from isomorph.lab.training.recipe.recipe import Recipe
from isomorph.terminal_tables import Row, Rows, count_of, printable

LOGS = ("log.jsonl", "steps.jsonl", "monitor.jsonl", "environment.jsonl")

# Logs that are drawn as curves, and the key of their horizontal axis.
_CURVES = {"log.jsonl": "epoch", "steps.jsonl": "step"}


class Journal:
    """Writer of a run's logs, curves and terminal output; only the leading process writes."""

    def __init__(self, recipe: Recipe, runtime: Runtime, show: bool) -> None:
        self.recipe = recipe
        self.runtime = runtime
        self.folder = recipe.folder
        stream: Any = ClosableStream(sys.stdout)
        self.console = Console(file=stream, quiet=not (show and runtime.is_main))
        self.curves: Any = None
        self.tensorboard: Any = None
        if recipe.tensorboard:
            advice = "the field tensorboard needs TensorBoard"
            self.tensorboard = optional_module("torch.utils.tensorboard", advice, "track")

    def open(self, epoch: int, step: int) -> None:
        """Write recipe and environment; remove log rows of steps that will be repeated. Raises: UserError."""
        if not self.runtime.is_main:
            return
        for name in LOGS:
            _truncate_log(self.folder / name, epoch, step)
        logged = {row.get("epoch") for row in read_log(self.folder / "log.jsonl")}
        missing = set(range(1, epoch + 1)) - logged
        if missing:
            self.say(
                f"log.jsonl lacks {count_of(len(missing), 'epoch')} before the snapshot: "
                "was it copied in training? best.safetensors may be too old as well; copy both again"
            )
        if self.tensorboard:
            self.curves = self.tensorboard.SummaryWriter(
                str(self.folder / "tensorboard"), purge_step=step + 1
            )
        text = self.recipe.model_dump_json(indent=2)
        write_atomically(self.folder / "recipe.json", lambda file: file.write_text(text))
        self.write("environment.jsonl", self._environment())

    def _environment(self) -> JsonObject:
        device = self.runtime.device
        name = platform.processor()
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        return {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "host": socket.gethostname(),
            "command": sys.argv,
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "device": f"{device.type} {name}".strip(),
            "processes": self.runtime.world,
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "timm": timm.__version__,
            "numpy": np.__version__,
        }

    def write(self, name: str, row: Row) -> None:
        """Append one line of JSON to a log, and draw its numbers. Raises: UserError when it cannot be written."""
        if not self.runtime.is_main:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / name).open("a") as file:
                file.write(_line(row))
        except OSError as error:
            raise UserError(
                f"cannot write {self.folder / name}: {error.strerror}; snapshots are not changed"
            ) from None
        if self.curves and name in _CURVES:
            axis = _CURVES[name]
            group = "epoch" if axis == "epoch" else "train"
            for key, value in row.items():
                if isinstance(value, int | float):
                    self.curves.add_scalar(f"{group}/{key}", value, row[axis])

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *error: object) -> None:
        if self.curves:
            self.curves.close()

    def say(self, text: str) -> None:
        self.show(f"{self.recipe.name}: {text}")

    def show(self, *lines: str) -> None:
        for line in lines:
            self.console.print(printable(line), highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def progress(self, title: str, done: int, total: int) -> Iterator[Any]:
        """Show a progress bar if the output is a terminal. Yields a function to call after each step."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        off = not self.console.is_terminal or self.console.quiet
        with Progress(*columns, console=self.console, transient=True, disable=off) as bar:
            task = bar.add_task(title, total=total, completed=done)
            yield lambda: bar.advance(task)


def read_log(path: Path) -> Rows:
    """Return the rows of a log, without damaged lines: incomplete, not JSON, or with other types."""
    if not path.is_file():
        return []
    rows = map(parse_log_row, path.read_bytes().split(b"\n"))
    return [row for row in rows if row is not None]


def _truncate_log(path: Path, epoch: int, step: int) -> None:
    """Remove rows after a step (after an epoch, for rows without a step) and damaged lines. Raises: UserError."""
    if not path.exists():
        return
    last = epoch if step else -1  # a run that starts again writes the row of epoch 0 again
    lines = []
    for row in read_log(path):
        if "step" in row:
            stays = row["step"] <= step
        else:
            stays = row.get("epoch", -1) <= last
        if stays:
            lines.append(_line(row))
    write_atomically(path, lambda file: file.write_text("".join(lines)))


def _line(row: Row) -> str:
    return json.dumps(row, separators=(",", ":")) + "\n"


class ClosableStream:
    """Text stream that ignores writes after it is closed (a closed terminal, a pipe without a reader)."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115 (stays open until the process ends)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._attempt(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, ValueError):  # ValueError: it was closed in this process
            with suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.stream.fileno())
                os.close(null)
