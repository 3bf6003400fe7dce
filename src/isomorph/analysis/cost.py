"""Cost of models: parameters, multiply-accumulates, memory of a pass, and the table of all with the speed.

Multiply-accumulates of convolutions and matrix products (1 MAC = 2 FLOPs) are counted by shape: those that grow with
the batch per image, others, such as products of the weights of pyramids, per pass. Memory is what allocators count.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from isomorph.analysis.speed import (
    Step,
    measure_speeds,
    propagate_back,
    restored_afterwards,
    stepped_module,
)
from isomorph.errors import DoesNotRun, UserError, one_line
from isomorph.layers.modes import first_float
from isomorph.layers.pyramid.base import Parallel, Pyramid
from isomorph.models.input_sizes import fit_to_size, input_channels, inputs_like
from isomorph.operations import copy_module, in_eval_mode
from isomorph.surgery.calls import Inputs, call_model

# size of the smaller of the two counted batches: enough for BatchNorm in training mode
_COUNTED_BATCH = 2
_PEAK_COLUMNS = {"peak_bytes": False, "training_peak_bytes": True}  # True for a pass of training
TableRow = dict[str, Any]
TableProgress = Callable[[float, int, str], None]  # steps done, all steps, the current one


class MacCount(NamedTuple):
    """Multiply-accumulates of a forward pass: per image, and once per pass."""

    per_image: int
    per_pass: int


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters; shared ones count once.

    >>> from isomorph.analysis.cost import count_parameters
    >>> count_parameters(timm.create_model("cifar_resnet20"))
    269722
    """
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: nn.Module, input_size: tuple[int, ...]) -> int:
    """Return the multiply-accumulates of inference for one image (1 MAC = 2 FLOPs), attention included.

    Shape: input_size is (channels, height, width)

    >>> from isomorph.analysis.cost import count_macs
    >>> count_macs(timm.create_model("cifar_resnet20"), (3, 32, 32))
    40551040
    """
    return count_pass(model, input_size).per_image


def count_pass(model: nn.Module, input_size: tuple[int, ...], training: bool = False) -> MacCount:
    """Return the multiply-accumulates of a forward pass, in eval or training mode, per image and per pass."""
    counted = _meta_copy(model)
    counted.train(training)
    return _count_at_two_batches(counted, input_size)


def count_branches(model: nn.Module, input_size: tuple[int, ...]) -> int:
    """Return the multiply-accumulates of a training forward pass for one image, with pyramids run branch by branch.

    As TDRL counts in Table 8. For the closed form that isomorph trains: `count_pass(model, input_size, training=True)`.
    """
    branched = _meta_copy(model)
    for module in branched.modules():
        if isinstance(module, Parallel):
            module.forward = module.run_branches  # type: ignore[method-assign]
    return _count_at_two_batches(branched, input_size).per_image


def has_pyramids(model: nn.Module) -> bool:
    """True if any layer of the model is a pyramid."""
    return any(isinstance(module, Pyramid) for module in model.modules())


def _meta_copy(model: nn.Module) -> nn.Module:
    return in_eval_mode(copy_module(model).to("meta"))


@torch.no_grad()
def count_once(model: nn.Module, inputs: Inputs) -> int:
    """Return the multiply-accumulates of one forward pass with these inputs, all in all."""
    # the plain forms of attention: the counter does not see into fused kernels
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            call_model(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)
    return counter.get_total_flops() // 2


def _count_at_two_batches(model: nn.Module, input_size: tuple[int, ...]) -> MacCount:
    """Count two batch sizes: their difference is one image, and the rest does not depend on the batch."""
    counts = []
    for batch in (_COUNTED_BATCH, _COUNTED_BATCH + 1):
        try:
            counts.append(count_once(model, inputs_like(model, batch, input_size, "meta")))
        except DoesNotRun as error:
            # of torch, for an operation on the device meta
            if isinstance(error.__cause__, NotImplementedError):
                raise UserError(
                    "the operations of this model cannot be counted from shapes alone: one of them needs the values of "
                    f"its inputs, or has no form without them ({one_line(error.__cause__)})"
                ) from error
            raise
    per_image = counts[1] - counts[0]
    return MacCount(per_image, counts[0] - _COUNTED_BATCH * per_image)


def saved_bytes(model: nn.Module, input_size: tuple[int, ...], batch_size: int = 1) -> int:
    """Return the bytes per image that autograd saves in the forward pass of a training step.

    Every storage counts once, however many saved tensors are views of it. Parameters and buffers are left out; the
    images count if they are saved. BatchNorm's running statistics are restored.

    Shape: input_size is (channels, height, width)

    >>> from isomorph.analysis.cost import saved_bytes
    >>> saved_bytes(timm.create_model("cifar_resnet20"), (3, 32, 32), batch_size=2) > 0
    True
    """
    excluded = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())
    }
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = inputs_like(model, batch_size, input_size)
    with (
        restored_afterwards(model),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        model.train()
        output = call_model(model, inputs)  # noqa: F841 (keeps graph and storages alive, so that no address is used twice)
    return sum(saved.values()) // batch_size


def peak_bytes(
    model: nn.Module, input_size: tuple[int, ...], batch_size: int = 1, training: bool = False
) -> int | None:
    """Return the peak memory in bytes of an inference pass, or of a forward and backward pass, beyond the model itself.

    It is what torch's allocator has handed out, on a GPU or a CPU, in a second pass, since the first one sets up
    libraries. Gradients count. None on other devices.

    Shape: input_size is (channels, height, width)
    Raises: UserError when the pass fails (a batch too small for BatchNorm), or there is too little memory for it.

    >>> from isomorph.analysis.cost import peak_bytes
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(300, 800))
    >>> peak_bytes(net, (3, 10, 10), batch_size=2)  # of the output, (2, 800) in float32
    6400
    """
    device = first_float(model).device
    if device.type not in ("cpu", "cuda"):
        return None
    inputs = inputs_like(model, batch_size, input_size)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model.train(training)
        with torch.set_grad_enabled(training):
            output = call_model(model, inputs)
            if training:
                propagate_back(output)

    try:
        with restored_afterwards(model):
            run()
            model.zero_grad(set_to_none=True)
            return _cuda_peak(run, device) if device.type == "cuda" else _cpu_peak(run)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"measuring the peak of a batch of {batch_size} failed: {one_line(error)}"
        ) from None


def _cuda_peak(run: Callable[[], None], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_peak(run: Callable[[], None]) -> int:
    """Return the largest sum of allocations and releases, which torch's profiler records in order."""
    # the profiler's library reports on stderr that it starts
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    allocated = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


def cost_table(
    models: Mapping[str, nn.Module],
    sizes: Sequence[tuple[int, int]],
    batch_sizes: Sequence[int] = (32,),
    seconds: float = 2.0,
    peak: bool = True,
    progress: TableProgress = lambda done, total, description: None,
    timed: Step = "inference",
) -> Iterator[TableRow]:
    """Yield one row for each image size, batch size and model: its cost, and its speed relative to the first model's.

    `models` maps names to models, `sizes` are (height, width). `seconds` is the time spent on timing one model at one
    batch size; `peak=False` skips peak memory. Keys of a row:

    - model, height, width, batch
    - parameters
    - macs, step_macs: multiply-accumulates of inference, per image and per pass; those per pass are products of
      weights and do not depend on the batch size
    - saved_bytes: memory per image that a training step saves for its backward pass
    - peak_bytes, training_peak_bytes: of a pass over the batch, without the model itself; None if not measured
    - images_per_second (median), its quartiles low and high, runs (number of passes)
    - ratio: images per second relative to the first model's at the same image and batch size
    - problem: why peak memory could not be measured; only if it failed
    - for a model with pyramids, training_macs and training_step_macs: those of a forward pass in training mode;
      and branch_macs: those per image in training when every branch is computed separately

    The models are timed in turn, in one process: an inference pass, or with `timed` a training step, or one of masked
    pre-training (TDRL Table 8), whose memory is then the training peak.

    Raises: UserError when a model does not accept an image size, or an image or batch size is not positive.

    >>> models = {"resnet20": timm.create_model("cifar_resnet20")}
    >>> rows = list(iso.cost_table(models, sizes=[(32, 32)], batch_sizes=[1], seconds=0, peak=False))
    >>> rows[0]["parameters"], rows[0]["macs"], rows[0]["ratio"]
    (269722, 40551040, 1.0)
    """
    if min((*batch_sizes, *itertools.chain(*sizes)), default=0) < 1:
        raise UserError("sizes and batch sizes must be positive; give at least one of each")
    memory_steps = 2 * len(models) if peak else 0
    steps = _Steps(progress, len(sizes) * (len(models) + len(batch_sizes) * (1 + memory_steps)))
    for height, width in sizes:
        size = f"{height} x {width}"
        resized = {name: fit_to_size(model, (height, width)) for name, model in models.items()}
        stepped = {name: stepped_module(model, timed) for name, model in resized.items()}
        inputs = {name: (input_channels(model), height, width) for name, model in resized.items()}
        static = {}
        for name, model in resized.items():
            with steps.next(f"{name} {size}: counting"):
                static[name] = static_cost(model, inputs[name])
        for batch in batch_sizes:
            with steps.next(f"{size}, batch {batch}: timing"):
                speeds = measure_speeds(
                    stepped, inputs, batch, seconds, least=5, training=timed != "inference"
                )
            first = next(iter(speeds.values()))
            for name, speed in speeds.items():
                row = {"model": name, "height": height, "width": width, "batch": batch} | static[
                    name
                ]
                row["images_per_second"] = speed.median
                row["low"] = speed.low
                row["high"] = speed.high
                row["runs"] = speed.runs
                row["ratio"] = speed.median / first.median
                row |= dict.fromkeys(_PEAK_COLUMNS)
                for column, training in _PEAK_COLUMNS.items() if peak else ():
                    model = stepped[name] if training else resized[name]
                    measured = "training memory" if training else "memory"
                    try:
                        with steps.next(f"{name} {size}, batch {batch}: {measured}"):
                            row[column] = peak_bytes(model, inputs[name], batch, training)
                    except UserError as error:
                        row["problem"] = str(error)
                yield row


class _Steps:
    """Reports the steps of a table: how many are done, how many there are, and the current one."""

    def __init__(self, report: TableProgress, total: int) -> None:
        self.report = report
        self.total = total
        self.done = 0

    @contextmanager
    def next(self, description: str) -> Iterator[None]:
        self.report(self.done, self.total, description)
        try:
            yield
        finally:
            self.done += 1
            self.report(self.done, self.total, description)


def static_cost(model: nn.Module, input_size: tuple[int, ...]) -> dict[str, int]:
    """Return the costs that do not depend on the batch size: parameters, multiply-accumulates, saved memory."""
    macs = count_pass(model, input_size)
    # BatchNorm can fail to train on a batch of one image
    has_batch_norm = any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
    )
    cost = {
        "parameters": count_parameters(model),
        "macs": macs.per_image,
        "step_macs": macs.per_pass,
    }
    if has_pyramids(model):
        cost |= pyramid_cost(model, input_size)
    cost["saved_bytes"] = saved_bytes(model, input_size, 2 if has_batch_norm else 1)
    return cost


def pyramid_cost(model: nn.Module, input_size: tuple[int, ...]) -> dict[str, int]:
    """Return the multiply-accumulates of a training forward pass with pyramids, in closed form and branch by branch."""
    macs = count_pass(model, input_size, training=True)
    return {
        "training_macs": macs.per_image,
        "training_step_macs": macs.per_pass,
        "branch_macs": count_branches(model, input_size),
    }
