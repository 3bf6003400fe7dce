"""Compilation, activation checkpointing, synchronised BatchNorm, and DDP or FSDP for a task."""

from collections.abc import Iterator
from contextlib import contextmanager

from timm.layers import convert_sync_batchnorm
from timm.task import TrainingTask
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from isomorph.errors import UserError
from isomorph.lab.distributed import Runtime
from isomorph.lab.training.recipe.fields import ScalePart


def prepare_model(model: nn.Module, scale: ScalePart, runtime: Runtime) -> nn.Module:
    """Set activation checkpointing and synchronised BatchNorm. Raises: UserError where there is no such thing."""
    if scale.parallel == "fsdp" and runtime.world == 1:
        raise UserError(
            "scale.parallel fsdp needs several processes; start the run with torchrun, or set ddp"
        )
    if scale.activation_checkpointing:
        try:
            model.set_grad_checkpointing(True)  # type: ignore[operator]
        except (AttributeError, AssertionError):
            raise UserError(
                f"{type(model).__name__} has no activation checkpointing; set scale.activation_checkpointing false"
            ) from None
    if scale.sync_batch_norm and runtime.world > 1:
        if runtime.device.type == "cpu":
            raise UserError(
                "BatchNorm is synchronised on GPUs only; set scale.sync_batch_norm false"
            )
        model = convert_sync_batchnorm(model)
    return model


def distribute(task: TrainingTask, scale: ScalePart, runtime: Runtime) -> None:
    """Compile the trained module, and wrap it in DDP or FSDP if there are several processes."""
    module = task.get_trainable_module()
    if scale.compile:
        module.compile(mode=None if scale.compile is True else scale.compile)
    if scale.parallel == "fsdp":
        _shard(module)
        if task.has_ema():
            _shard(task.get_trainable_module(ema=True).module)
    elif runtime.world > 1:
        on_gpu = runtime.device.type == "cuda"
        task.prepare_distributed(device_ids=[runtime.device.index] if on_gpu else None)


def _shard(module: nn.Module) -> None:
    for block in find_blocks(module):
        fully_shard(block)
    fully_shard(module)


def find_blocks(module: nn.Module, listed: bool = False) -> list[nn.Module]:
    """Return the repeated blocks of a network: members of its outermost lists, or of lists inside these."""
    blocks: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            blocks += find_blocks(child, True)
        elif not listed or hasattr(child, "blocks"):
            blocks += find_blocks(child)
        elif next(child.parameters(), None) is not None:
            blocks.append(child)
    return blocks


@contextmanager
def no_gradient_sync(task: TrainingTask) -> Iterator[None]:
    """Accumulate gradients without reducing them over processes; for all parts of a batch but the last."""
    module = task.get_trainable_module()
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(False)
        yield
        module.set_requires_gradient_sync(True)
        return
    with task.no_sync():
        yield


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Gather the parameters that FSDP sharded, for the time of a context. Every process must enter it."""
    shards = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in shards:
        part.unshard()
    try:
        yield
    finally:
        for part in shards:
            part.reshard()


def gathered_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, gathered from their shards. Every process must call it."""
    state = module.state_dict()
    return {name: _whole(tensor) for name, tensor in state.items()}


def _whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor
