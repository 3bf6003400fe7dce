"""What a model costs: parameters, multiply-accumulates, images a second."""

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def count_macs(model: nn.Module, input_size: tuple[int, ...]) -> int:
    """Multiply-accumulates of one forward pass for one image (1 MAC = 2 FLOPs), attention included.

    Counts convolutions and matrix products. Attention runs in its plain form here so that none of it is missed.
    """
    training, parameter = model.training, next(model.parameters())
    model.eval()
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, *input_size, device=parameter.device, dtype=parameter.dtype))
    finally:
        model.train(training)
    return counter.get_total_flops() // 2


@torch.no_grad()
def throughput(model: nn.Module, input_size: tuple[int, ...], batch_size: int = 32, seconds: float = 2.0) -> float:
    """Images a second in eval mode: the median over runs of at least `seconds` in all, after a warm-up."""
    training, parameter = model.training, next(model.parameters())
    batch = torch.randn(batch_size, *input_size, device=parameter.device, dtype=parameter.dtype)
    model.eval()
    try:
        model(batch)
        timer = Timer("model(batch)", globals={"model": model, "batch": batch}, num_threads=torch.get_num_threads())
        return batch_size / timer.blocked_autorange(min_run_time=seconds).median
    finally:
        model.train(training)
