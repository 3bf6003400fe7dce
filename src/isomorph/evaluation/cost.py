"""What a model costs: parameters, multiply-accumulates, images a second."""

import copy

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from isomorph.layers.mode import eval_mode


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def count_macs(model: nn.Module, input_size: tuple[int, ...]) -> int:
    """Multiply-accumulates of one forward pass for one image (1 MAC = 2 FLOPs), attention included.

    Counts convolutions and matrix products by their shapes alone, so the number is the same on every device. Attention
    runs in its plain form here so that none of it is missed.
    """
    shapes = copy.deepcopy(model).to("meta").eval()
    image = torch.empty(1, *input_size, device="meta", dtype=next(shapes.parameters()).dtype)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        shapes(image)
    return counter.get_total_flops() // 2


@torch.no_grad()
def throughput(model: nn.Module, input_size: tuple[int, ...], batch_size: int = 32, seconds: float = 2.0) -> float:
    """Images a second in eval mode: the median over runs of at least `seconds` in all, after a warm-up."""
    from torch.utils.benchmark import Timer  # warns of a missing compiler when it is imported

    parameter = next(model.parameters())
    batch = torch.randn(batch_size, *input_size, device=parameter.device, dtype=parameter.dtype)
    with eval_mode(model):
        model(batch)
        timer = Timer("model(batch)", globals={"model": model, "batch": batch}, num_threads=torch.get_num_threads())
        return batch_size / timer.blocked_autorange(min_run_time=seconds).median


def measure_cost(model: nn.Module, input_size: tuple[int, ...]) -> dict[str, float]:
    """All three: parameters, macs (per image), images_per_second (batch 32)."""
    return {
        "parameters": count_parameters(model),
        "macs": count_macs(model, input_size),
        "images_per_second": throughput(model, input_size),
    }
