"""What a model holds in memory: what a step keeps for its backward pass, and the peak of a pass."""

import ctypes
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.mode import eval_mode

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def saved_bytes(model: nn.Module, input_size: tuple[int, ...], batch_size: int = 1) -> int:
    """Bytes that one image keeps from the forward pass for the backward pass, in training mode.

    Every storage once, however many views of it are kept; parameters and buffers left out, the images themselves
    counted where they are kept. BatchNorm's running statistics are as before afterwards.
    """
    parameter = next(model.parameters())
    x = torch.randn(batch_size, *input_size, device=parameter.device, dtype=parameter.dtype)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            held = model(x)  # noqa: F841 (keeps its graph, and the storages, alive: no address is used twice)
    finally:
        for module, training in modes:
            module.training = training
        for name, tensor in model.named_buffers():
            tensor.detach().copy_(buffers[name])
    return sum(kept.values()) // batch_size


def run_once(model: nn.Module, x: Tensor, training: bool) -> None:
    """One inference pass, or a forward and backward pass in training mode."""
    if not training:
        with torch.no_grad():
            model(x)
        return
    out = model.train()(x)
    (out[0] if isinstance(out, tuple) else out).float().sum().backward()


def peak_bytes(
    model: nn.Module, input_size: tuple[int, ...], batch_size: int = 1, training: bool = False
) -> int | None:
    """Bytes that a pass takes at its peak on top of the model: an inference pass, or forward and backward.

    On a GPU what torch's allocator has given out; on a CPU what the system counts for a process of its own that runs
    a copy of the model (Linux; after a first pass, so that what libraries set up once is left out). Gradients count.

    None where neither can be measured: on another system or device, or a model that cannot be pickled.
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        return cuda_peak(model, input_size, batch_size, training)
    return cpu_peak(model, input_size, batch_size, training) if device.type == "cpu" and RESET.exists() else None


def cuda_peak(model: nn.Module, input_size: tuple[int, ...], batch_size: int, training: bool) -> int:
    """Largest allocation above what is there before, on the model's GPU; the model is left without gradients."""
    parameter = next(model.parameters())
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    with eval_mode(model):
        x = torch.randn(batch_size, *input_size, device=parameter.device, dtype=parameter.dtype)
        for _ in range(2):  # the first sets up workspaces of libraries
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize(parameter.device)
            torch.cuda.reset_peak_memory_stats(parameter.device)
            before = torch.cuda.memory_allocated(parameter.device)
            run_once(model, x, training)
            peak = torch.cuda.max_memory_allocated(parameter.device) - before
    model.zero_grad(set_to_none=True)
    for name, tensor in model.named_buffers():
        tensor.copy_(buffers[name])
    return peak


def cpu_peak(model: nn.Module, input_size: tuple[int, ...], batch_size: int, training: bool) -> int | None:
    """Growth of a fresh process's resident memory while it runs the pass."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pass.pt"
        try:
            torch.save((model, (batch_size, *input_size), training), file)
        except Exception:  # pickle fails in many ways
            return None
        code = "import sys; from isomorph.evaluation.memory import main; main(sys.argv[1])"
        # large blocks go back to the system as soon as they are free, so that the peak is the pass's own
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        env["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, env=env)
    lines = done.stdout.split()
    if done.returncode == 0 and lines:
        return int(lines[-1])
    if "CannotRebuild" in done.stderr:
        return None
    said = (done.stderr.strip().splitlines() or ["it was killed: too little memory, perhaps"])[-1]
    raise UserError(f"measuring the peak of a batch of {batch_size} failed: {said}")


class CannotRebuild(Exception):
    """A model of a class that the other process cannot import."""


def resident(key: str) -> int:
    """Bytes of this process in memory: now (VmRSS) or at its peak (VmHWM)."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


def main(file: str) -> None:
    """Prints how many bytes the pass in a file takes: what the measuring process does."""
    try:
        model, shape, training = torch.load(file, weights_only=False)  # written by the parent, a moment ago
    except Exception as error:
        raise CannotRebuild from error
    parameter = next(model.parameters())
    x = torch.randn(shape, dtype=parameter.dtype)
    model.eval()
    run_once(model, x, training)
    model.zero_grad(set_to_none=True)
    gc.collect()
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
    RESET.write_text("5")  # the peak is what it is now
    before = resident("VmRSS")
    run_once(model, x, training)
    print(max(resident("VmHWM") - before, 0))
