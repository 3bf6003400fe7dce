"""Memory of a pass: what it saves for the backward pass, and its peak, as torch's own allocators count them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import inputs_like
from isomorph.layers.eval_mode import eval_mode
from isomorph.surgery.model_inputs import run_model


@contextmanager
def _restored_afterwards(model: nn.Module) -> Iterator[None]:
    """Restore modes, buffers and gradients of a model after the block, which begins in eval mode."""
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    gradients = [parameter.grad for parameter in model.parameters()]
    try:
        with eval_mode(model):
            model.zero_grad(set_to_none=True)
            yield
    finally:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for name, tensor in model.named_buffers():
            tensor.detach().copy_(buffers[name])


def saved_bytes(model: nn.Module, input_size: tuple[int, ...], batch_size: int = 1) -> int:
    """Return the bytes per image that autograd saves in the forward pass of a training step.

    Every storage counts once, however many saved tensors are views of it. Parameters and buffers are left out; the
    images count if they are saved. BatchNorm's running statistics are restored.

    Shape: input_size is (channels, height, width)

    >>> from isomorph.evaluation import saved_bytes
    >>> saved_bytes(timm.create_model("cifar_resnet20"), (3, 32, 32), batch_size=2) > 0
    True
    """
    excluded = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = inputs_like(model, batch_size, input_size, next(model.parameters()).device)
    with (
        _restored_afterwards(model),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        output = run_model(model.train(), inputs)  # noqa: F841 (keeps graph and storages alive, so that no address is used twice)
    return sum(saved.values()) // batch_size


def peak_bytes(
    model: nn.Module, input_size: tuple[int, ...], batch_size: int = 1, training: bool = False
) -> int | None:
    """Return the peak memory in bytes of an inference pass, or of a forward and backward pass, beyond the model itself.

    It is what torch's allocator has handed out, on a GPU or a CPU, in a second pass, since the first one sets up
    libraries. Gradients count. None on other devices.

    Shape: input_size is (channels, height, width)
    Raises: UserError when the pass fails (a batch too small for BatchNorm), or there is too little memory for it.

    >>> from isomorph.evaluation import peak_bytes
    >>> peak_bytes(torch.nn.Conv2d(3, 8, 1), (3, 10, 10), batch_size=2)  # of the output, (2, 8, 10, 10) in float32
    6400
    """
    device = next(model.parameters()).device
    if device.type not in ("cpu", "cuda"):
        return None
    inputs = inputs_like(model, batch_size, input_size, device)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(training):
            output = run_model(model.train(training), inputs)
            if training:
                (output[0] if isinstance(output, tuple) else output).float().sum().backward()

    try:
        with _restored_afterwards(model):
            run()
            model.zero_grad(set_to_none=True)
            return _cuda_peak(run, device) if device.type == "cuda" else _cpu_peak(run)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"measuring the peak of a batch of {batch_size} failed: {reason}") from None


def _cuda_peak(run: Callable[[], None], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_peak(run: Callable[[], None]) -> int:
    """Return the largest sum of allocations and releases, which torch's profiler records in order."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library reports on stderr that it starts
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    held = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
