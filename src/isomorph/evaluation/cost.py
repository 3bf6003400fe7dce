"""What a model costs in numbers that need no clock, and those of `isomorph evaluate`."""

import copy

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from isomorph.evaluation.speed import throughput


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


def measure_cost(model: nn.Module, input_size: tuple[int, ...]) -> dict[str, float]:
    """All three: parameters, macs (per image), images_per_second (batch 32)."""
    return {
        "parameters": count_parameters(model),
        "macs": count_macs(model, input_size),
        "images_per_second": throughput(model, input_size),
    }
