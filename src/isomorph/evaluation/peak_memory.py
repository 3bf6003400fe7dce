"""Peak memory of a pass: from torch's allocator on a GPU, from the system in a separate process on a CPU."""

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
from isomorph.layers.eval_mode import eval_mode
from isomorph.process import child_import_path

_STATUS_FILE, _RESET_FILE = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_WORKER_CODE = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from isomorph.evaluation.peak_memory import answer_requests; answer_requests()"
)
"""Code of the measuring process, which has the same import path as this one."""


def _run_once(model: nn.Module, x: Tensor, training: bool) -> None:
    """Run an inference pass, or a forward and backward pass in training mode."""
    if not training:
        with torch.no_grad():
            model(x)
        return
    out = model.train()(x)
    (out[0] if isinstance(out, tuple) else out).float().sum().backward()


class PeakMeter:
    """A process that measures peaks on a CPU; it is started by the first measurement and shared by all.

    It runs the passes only, so the system's count of its memory is theirs. Leaving the `with` block ends it.
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
        """End the process and close its pipes."""
        if self.process:
            self.process.kill()
            self.process.communicate()

    def measure(self, model: nn.Module, shape: tuple[int, ...], training: bool) -> int | None:
        """Return the bytes of a pass over a batch beyond the model itself; None if the model cannot be pickled.

        Raises: UserError when the pass fails, or there is too little memory.
        """
        if not self._write_model(model):
            return None
        process = self.process if self.process and self.process.poll() is None else self._start()
        assert process.stdin  # they are pipes
        assert process.stdout
        try:
            process.stdin.write(json.dumps([str(self._model_file), shape, training]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        result: dict[str, Any] = json.loads(answer) if answer else {"error": self._last_error_line()}
        if "error" in result:
            raise _measurement_error(shape[0], result["error"])
        return result["bytes"]

    @property
    def _model_file(self) -> Path:
        return Path(self.folder.name) / f"{self.models}.pt"

    def _write_model(self, model: nn.Module) -> bool:
        """Write the model to the file that the process reads, unless it is there; return True if that succeeded."""
        if model is self.model:
            return True
        self._model_file.unlink(missing_ok=True)
        self.model, self.models = model, self.models + 1
        try:
            torch.save(model, self._model_file)
        except Exception:  # pickle fails in many ways
            self._model_file.unlink(missing_ok=True)
            self.model = None
            return False
        return True

    def _start(self) -> subprocess.Popen[str]:
        """Start the process, which runs `answer_requests`."""
        self.stop()
        # return large freed blocks to the system at once, so that the peak is that of the pass
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        env["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        command = [sys.executable, "-I" if sys.flags.isolated else "-P", "-c", _WORKER_CODE, *child_import_path()]
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with self._error_file.open("wb") as errors:
            self.process = subprocess.Popen(command, env=env, text=True, stderr=errors, **pipes)
        return self.process

    @property
    def _error_file(self) -> Path:
        return Path(self.folder.name) / "stderr"

    def _last_error_line(self) -> str:
        """Return the last line that the process wrote to stderr."""
        lines = self._error_file.read_text(errors="replace").strip().splitlines()
        return (lines or ["the process was killed, probably for lack of memory"])[-1]


def peak_bytes(
    model: nn.Module,
    input_size: tuple[int, ...],
    batch_size: int = 1,
    training: bool = False,
    meter: PeakMeter | None = None,
) -> int | None:
    """Return the peak memory in bytes of an inference pass, or of a forward and backward pass, beyond the model itself.

    On a GPU it is the peak of torch's allocator. On a CPU (Linux) a copy of the model runs in a separate process, and
    the system counts that process's memory, after a first pass that sets up libraries. Gradients count. Several
    measurements are faster with one `meter`.

    Returns None where neither can be measured: on another system or device, or for a model that cannot be pickled.

    Shape: input_size is (channels, height, width)
    Raises: UserError when the pass fails (a batch too small for BatchNorm), or there is too little memory for it.

    >>> from isomorph.evaluation import peak_bytes
    >>> peak_bytes(timm.create_model("cifar_resnet20").to("meta"), (3, 32, 32)) is None  # no memory on this device
    True
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
    """Return the growth of the allocator's peak on the model's GPU; the model's gradients are cleared."""
    parameter = next(model.parameters())
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    try:
        with eval_mode(model):
            x = torch.randn(batch_size, *input_size, device=parameter.device, dtype=parameter.dtype)
            for _ in range(2):  # the first pass sets up the workspaces of libraries
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
    """Return the error of a pass that failed."""
    return UserError(f"measuring the peak of a batch of {batch_size} failed: {why}")


def answer_requests() -> None:
    """Answer each request on stdin (model file, shape, training) with bytes on stdout: the measuring process."""
    answers, sys.stdout = sys.stdout, sys.stderr  # a model's own prints must not mix with the answers
    model, path = None, None
    for line in sys.stdin:
        file, shape, training = json.loads(line)
        if file != path:
            model = None  # freed before the next model is loaded
            model, path = _load_pickled_model(file), file
        try:
            result: dict[str, Any] = {"bytes": None if model is None else _cpu_peak(model, tuple(shape), training)}
        except Exception as error:
            result = {"error": " ".join(str(error).split()) or type(error).__name__}
        print(json.dumps(result), file=answers, flush=True)


def _load_pickled_model(file: str) -> nn.Module | None:
    """Load a model that the parent process has written; None if its class cannot be imported here."""
    try:
        return torch.load(file, weights_only=False)
    except Exception:
        return None


def _cpu_peak(model: nn.Module, shape: tuple[int, ...], training: bool) -> int:
    """Return the growth of this process's resident memory during a pass, after a first one."""
    x = torch.randn(shape, dtype=next(model.parameters()).dtype)
    model.eval()
    _run_once(model, x, training)
    model.zero_grad(set_to_none=True)
    gc.collect()
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
    _RESET_FILE.write_text("5")  # resets the peak (VmHWM) to the current memory
    before = _resident_bytes("VmRSS")
    _run_once(model, x, training)
    peak = _resident_bytes("VmHWM")
    model.zero_grad(set_to_none=True)
    return max(peak - before, 0)


def _resident_bytes(key: str) -> int:
    """Return the resident memory of this process in bytes: now (VmRSS) or at its peak (VmHWM)."""
    line = next(line for line in _STATUS_FILE.read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])
