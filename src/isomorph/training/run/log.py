"""What a run reports: log files, its environment, curves in TensorBoard or Weights & Biases, and terminal output."""

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from isomorph.checkpoints.files import write_atomically
from isomorph.distributed import Runtime
from isomorph.errors import UserError
from isomorph.terminal_tables import count_of, printable
from isomorph.training.recipe.recipe import Recipe

LOGS = ("log.jsonl", "steps.jsonl", "monitor.jsonl", "environment.jsonl")
"""Log files with one JSON object per line."""


def describe_environment(runtime: Runtime) -> dict[str, Any]:
    """Return time, host, command, device and versions of a run."""
    name = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else platform.processor()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__}
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "command": sys.argv,
        "device": f"{runtime.device.type} {name}".strip(),
        "processes": runtime.world,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **versions,
        "numpy": np.__version__,
    }


def check_tracker(recipe: Recipe) -> None:
    """Raise UserError when the package that draws the curves is not installed.

    A folder of curves with its name, such as wandb/ in the working folder, is not the package: it has no origin.
    """
    if recipe.track and ((spec := find_spec(recipe.track)) is None or spec.origin is None):
        raise UserError(f"track: {recipe.track} is not installed; run pip install {recipe.track}, or leave track out")


class TensorBoard:
    """TensorBoard's event files in `tensorboard/` of the run's folder; steps to be repeated are dropped from them."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here, as it imports all of tensorboard

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def add(self, group: str, step: int, values: dict[str, float]) -> None:
        """Add a point to each of the curves `group/name`; the step of the group "epoch" is the epoch."""
        for name, value in values.items():
            self.writer.add_scalar(f"{group}/{name}", value, step)

    def close(self, failed: bool) -> None:
        """Write what is buffered; `failed` is True for a run that stopped before its end."""
        self.writer.close()


class WeightsAndBiases:
    """One wandb run for each run folder, with the recipe as its config.

    Every group of curves has an axis of its own, so a resumed run draws the steps that it repeats over the old ones.

    Source: https://docs.wandb.ai (wandb.init, define_metric, log, finish)
    """

    def __init__(self, recipe: Recipe) -> None:
        import wandb

        file = recipe.folder / "wandb-id.txt"  # a resumed run continues the wandb run of this id
        known = file.read_text().strip() if file.is_file() else None
        try:
            self.run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "isomorph"),
                name=recipe.name,
                id=known,
                resume="allow",
                dir=str(recipe.folder),
                config=recipe.model_dump(mode="json"),
                allow_val_change=True,
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise UserError(f"wandb cannot start: {reason}; run wandb login, or set WANDB_MODE=offline") from None
        write_atomically(file, lambda path: path.write_text(f"{self.run.id}\n"))
        for group, axis in (("train", "step"), ("epoch", "epoch")):
            self.run.define_metric(f"{group}/*", step_metric=f"{group}/{axis}")

    def add(self, group: str, step: int, values: dict[str, float]) -> None:
        axis = "epoch" if group == "epoch" else "step"
        self.run.log({f"{group}/{name}": value for name, value in {**values, axis: step}.items()})

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


def open_tracker(recipe: Recipe, step: int) -> TensorBoard | WeightsAndBiases | None:
    """Return the tracker that a recipe asks for, or None; `step` is the last one that is done.

    Raises: UserError when wandb cannot start.
    """
    if recipe.track is None:
        return None
    return TensorBoard(recipe.folder, step) if recipe.track == "tensorboard" else WeightsAndBiases(recipe)


class Journal:
    """Writer of a run's logs, tracked curves and terminal output; only the leading process writes."""

    def __init__(self, recipe: Recipe, runtime: Runtime, show: bool) -> None:
        self.recipe, self.runtime, self.folder = recipe, runtime, recipe.folder
        self.console = Console(file=ClosableStream(sys.stdout), quiet=not (show and runtime.is_main))  # type: ignore[arg-type]
        self.tracker: TensorBoard | WeightsAndBiases | None = None

    def open(self, epoch: int, step: int) -> None:
        """Write recipe and environment, and remove log rows of steps that will be repeated.

        Raises: UserError when a file cannot be read or written, or the tracker cannot start.
        """
        if not self.runtime.is_main:
            return
        for name in LOGS:
            if damaged := _truncate_log(self.folder / name, epoch, step):
                self.say(f"removed {count_of(damaged, 'line')} of {name} that cannot be read")
        self.tracker = open_tracker(self.recipe, step)
        text = self.recipe.model_dump_json(indent=2)
        write_atomically(self.folder / "recipe.json", lambda file: file.write_text(text))
        self.write("environment.jsonl", describe_environment(self.runtime))

    def write(self, name: str, row: dict[str, Any]) -> None:
        """Append one line of JSON to a log. Raises: UserError when it cannot be written."""
        if not self.runtime.is_main:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / name).open("a") as file:
                file.write(_line(row))
        except OSError as error:
            raise UserError(
                f"cannot write {self.folder / name}: {error.strerror}; the snapshots are complete"
            ) from None

    def report_unreadable(self, problems: list[str]) -> None:
        """Print the number of unreadable images so far, and list them in unreadable.txt."""
        self.say(f"{len(problems)} unreadable images so far, listed in {self.folder}/unreadable.txt")
        if self.runtime.is_main:
            text = "".join(f"{problem}\n" for problem in problems)
            write_atomically(self.folder / "unreadable.txt", lambda file: file.write_text(text))

    def add_scalars(self, group: str, step: int, values: dict[str, Any]) -> None:
        """Add values to the curves of the run's tracker, if it has one."""
        if self.tracker:
            self.tracker.add(group, step, {name: v for name, v in values.items() if isinstance(v, int | float)})

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *error: object) -> None:
        """Close the tracker, which writes its buffer."""
        if self.tracker:
            self.tracker.close(failed=error[0] is not None)

    def say(self, text: str) -> None:
        """Print a message after the name of the run."""
        self.show(f"{self.recipe.name}: {text}")

    def show(self, *lines: str) -> None:
        """Print lines on the terminal."""
        for line in lines:
            self.console.print(printable(line), highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def progress(self, title: str, done: int, total: int) -> Iterator[Any]:
        """Show a progress bar if the output is a terminal. Yields a function to call after each step."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        off = not self.console.is_terminal or self.console.quiet
        with Progress(*columns, console=self.console, transient=True, disable=off) as bar:
            task = bar.add_task(title, total=total, completed=done)
            yield lambda: bar.advance(task)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a log, without damaged or incomplete lines."""
    return _read_rows(path)[0]


def _read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a log, and the number of damaged lines: incomplete, not UTF-8, not JSON, of other types."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    lines = [line for line in lines if line.strip()]
    rows: list[dict[str, Any]] = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            rows += [row] if _is_row(row) else []
    return rows, len(lines) - len(rows)


def _is_row(row: Any) -> bool:
    """Return True for a mapping whose step and epoch, if present, are integers."""
    return isinstance(row, dict) and all(type(row.get(key, 0)) is int for key in ("step", "epoch"))


def _truncate_log(path: Path, epoch: int, step: int) -> int:
    """Remove rows after a step (after an epoch, for rows without a step) and damaged lines; return the number of these.

    Raises: UserError when the log cannot be read or written.
    """
    if not path.exists():
        return 0
    try:
        if not path.is_file():
            raise OSError("it is not a file")
        rows, damaged = _read_rows(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; move it away") from None
    last = epoch if step else -1  # a run that starts again writes the row of epoch 0 again
    remaining = [row for row in rows if (row["step"] <= step if "step" in row else row.get("epoch", -1) <= last)]
    write_atomically(path, lambda file: file.write_text("".join(map(_line, remaining))))
    return damaged


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":")) + "\n"


class ClosableStream:
    """Text stream that ignores writes after it is closed (a closed terminal, a pipe without a reader)."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115 (stays open until the process ends)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self._ignore_closed():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._ignore_closed():
            self.stream.flush()

    @contextmanager
    def _ignore_closed(self) -> Iterator[None]:
        """Redirect the stream's file descriptor to /dev/null once a write fails."""
        try:
            yield
        except (OSError, ValueError):  # ValueError: it was closed in this process
            with suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.stream.fileno())
                os.close(null)
