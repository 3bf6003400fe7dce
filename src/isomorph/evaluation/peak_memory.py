"""The peak of memory of a pass: by torch's allocator on a GPU, by the system in a process of its own on a CPU."""

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.import_path import import_path
from isomorph.layers.eval_mode import eval_mode

_STATUS_FILE, _RESET_FILE = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_WORKER_CODE = "import sys; sys.path[:] = sys.argv[1:]; from isomorph.evaluation.peak_memory import main; main()"
"""The code of the measuring process, which imports from where this one does."""


def _run_once(model: nn.Module, x: Tensor, training: bool) -> None:
    """One inference pass, or a forward and backward pass in training mode."""
    if not training:
        with torch.no_grad():
            model(x)
        return
    out = model.train()(x)
    (out[0] if isinstance(out, tuple) else out).float().sum().backward()


class PeakMeter:
    """The process that measures peaks on a CPU, started at the first: one for all models, batches and kinds of a table.

    It runs nothing but the passes, so that the system's count of its memory is theirs. Leaving the block ends it.
    """

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.process: subprocess.Popen[str] | None = None
        self.model: nn.Module | None = None
        self.models = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        self.folder.cleanup()

    def stop(self) -> None:
        """Ends the process and closes its pipes."""
        if self.process:
            self.process.kill()
            self.process.communicate()

    def measure(self, model: nn.Module, shape: tuple[int, ...], training: bool) -> int | None:
        """Bytes that a pass over a batch of this shape takes on top of the model; None where it cannot be pickled.

        Raises: UserError when the pass fails, or its memory is not there.
        """
        if not self.hand_over(model):
            return None
        process = self.process if self.process and self.process.poll() is None else self.start()
        assert process.stdin  # they are pipes
        assert process.stdout
        try:
            process.stdin.write(json.dumps([str(self.file), shape, training]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        found: dict[str, Any] = json.loads(answer) if answer else {"error": self.last_words()}
        if "error" in found:
            raise _measurement_error(shape[0], found["error"])
        return found["bytes"]

    @property
    def file(self) -> Path:
        return Path(self.folder.name) / f"{self.models}.pt"

    def hand_over(self, model: nn.Module) -> bool:
        """Writes the model where the process reads it, unless it is there; whether it can be written."""
        if model is self.model:
            return True
        self.file.unlink(missing_ok=True)
        self.model, self.models = model, self.models + 1
        try:
            torch.save(model, self.file)
        except Exception:  # pickle fails in many ways
            self.file.unlink(missing_ok=True)
            self.model = None
            return False
        return True

    def start(self) -> subprocess.Popen[str]:
        """Starts the process that `answer_requests` is."""
        self.stop()
        # large blocks go back to the system as soon as they are free, so that the peak is the pass's own
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        env["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        command = [sys.executable, "-I" if sys.flags.isolated else "-P", "-c", _WORKER_CODE, *import_path()]
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(command, env=env, text=True, stderr=said, **pipes)
        return self.process

    @property
    def said(self) -> Path:
        return Path(self.folder.name) / "said"

    def last_words(self) -> str:
        """The last line of what the process said before it ended."""
        lines = self.said.read_text(errors="replace").strip().splitlines()
        return (lines or ["it was killed: too little memory, perhaps"])[-1]


def peak_bytes(
    model: nn.Module,
    input_size: tuple[int, ...],
    batch_size: int = 1,
    training: bool = False,
    meter: PeakMeter | None = None,
) -> int | None:
    """Bytes that a pass takes at its peak on top of the model: an inference pass, or forward and backward.

    On a GPU what torch's allocator has given out; on a CPU what the system counts for a process of its own that runs
    a copy of the model (Linux; after a first pass, so that what libraries set up once is left out). Gradients count.
    Several peaks are found faster by one `meter`.

    None where neither can be measured: on another system or device, or a model that cannot be pickled.

    Raises: UserError when the pass fails (a batch too small for BatchNorm), or there is too little memory for it.
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        return _cuda_peak(model, input_size, batch_size, training)
    if device.type != "cpu" or not os.access(_RESET_FILE, os.W_OK):
        return None
    if meter:
        return meter.measure(model, (batch_size, *input_size), training)
    with PeakMeter() as own:
        return own.measure(model, (batch_size, *input_size), training)


def _cuda_peak(model: nn.Module, input_size: tuple[int, ...], batch_size: int, training: bool) -> int:
    """Largest allocation above what is there before, on the model's GPU; the model is left without gradients."""
    parameter = next(model.parameters())
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    try:
        with eval_mode(model):
            x = torch.randn(batch_size, *input_size, device=parameter.device, dtype=parameter.dtype)
            for _ in range(2):  # the first sets up workspaces of libraries
                model.zero_grad(set_to_none=True)
                torch.cuda.synchronize(parameter.device)
                torch.cuda.reset_peak_memory_stats(parameter.device)
                before = torch.cuda.memory_allocated(parameter.device)
                _run_once(model, x, training)
                peak = torch.cuda.max_memory_allocated(parameter.device) - before
    except (RuntimeError, ValueError) as error:
        raise _measurement_error(batch_size, " ".join(str(error).split())) from None
    finally:
        model.zero_grad(set_to_none=True)
        for name, tensor in model.named_buffers():
            tensor.detach().copy_(buffers[name])
    return peak


def _measurement_error(batch_size: int, why: str) -> UserError:
    """The error of a pass that failed."""
    return UserError(f"measuring the peak of a batch of {batch_size} failed: {why}")


def answer_requests() -> None:
    """Answers each line that names a model's file, a shape and a kind of pass by its bytes: the measuring process."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a model prints is no answer
    model, path = None, None
    for line in sys.stdin:
        file, shape, training = json.loads(line)
        if file != path:
            model = None  # freed before the next one comes
            model, path = _load_pickled_model(file), file
        try:
            found: dict[str, Any] = {"bytes": None if model is None else _cpu_peak(model, tuple(shape), training)}
        except Exception as error:
            found = {"error": " ".join(str(error).split()) or type(error).__name__}
        print(json.dumps(found), file=answers, flush=True)


def _load_pickled_model(file: str) -> nn.Module | None:
    """The model in a file that the parent wrote a moment ago; None for a class that cannot be imported here."""
    try:
        return torch.load(file, weights_only=False)
    except Exception:
        return None


def _cpu_peak(model: nn.Module, shape: tuple[int, ...], training: bool) -> int:
    """Growth of this process's resident memory during a pass, after a first one."""
    x = torch.randn(shape, dtype=next(model.parameters()).dtype)
    model.eval()
    _run_once(model, x, training)
    model.zero_grad(set_to_none=True)
    gc.collect()
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
    _RESET_FILE.write_text("5")  # the peak is what it is now
    before = _resident_bytes("VmRSS")
    _run_once(model, x, training)
    peak = _resident_bytes("VmHWM")
    model.zero_grad(set_to_none=True)
    return max(peak - before, 0)


def _resident_bytes(key: str) -> int:
    """Bytes of this process in memory: now (VmRSS) or at its peak (VmHWM)."""
    line = next(line for line in _STATUS_FILE.read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])
