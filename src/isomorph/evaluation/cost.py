"""What a model costs in numbers that need no clock, and those of `isomorph evaluate`.

Multiply-accumulates are counted by the shapes of convolutions and matrix products (1 MAC = 2 FLOPs), so they are the
same on every device. What grows with the batch belongs to an image; the rest, like the products of weights of pyramids
in closed form, belongs to a pass, whatever its batch.
"""

import copy
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from isomorph.evaluation.speed import throughput
from isomorph.layers import JointPyramid
from isomorph.layers.pyramid import Pyramid

_COUNTED_BATCH = 2
"""Images of the smaller of the two batches that are counted: enough for BatchNorm in training mode."""


class MacCount(NamedTuple):
    """Multiply-accumulates of a forward pass: for every image, and once for the pass."""

    image: int
    step: int


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: nn.Module, input_size: tuple[int, ...]) -> int:
    """Multiply-accumulates of inference for one image (1 MAC = 2 FLOPs), attention included."""
    return count_pass(model, input_size).image


def count_pass(model: nn.Module, input_size: tuple[int, ...], training: bool = False) -> MacCount:
    """Multiply-accumulates of a forward pass, in eval mode or in training mode, for an image and for the pass."""
    return _count_at_two_batches(_meta_copy(model).train(training), input_size)


def count_branches(model: nn.Module, input_size: tuple[int, ...]) -> int:
    """Multiply-accumulates of training (the forward pass) for one image with every pyramid branch by branch.

    Every token passes through every layer of every branch, as TDRL counts it in Table 8; isomorph trains pyramids in
    closed form, which is `count_pass(model, input_size, training=True)`.
    """
    shapes = _meta_copy(model)
    for module in shapes.modules():
        if isinstance(module, JointPyramid):
            module.forward = partial(_forward_joint_branches, module)  # type: ignore[method-assign]
        elif isinstance(module, Pyramid):
            module.forward = partial(_forward_branches, module)
    return _count_at_two_batches(shapes, input_size).image


def has_pyramids(model: nn.Module) -> bool:
    """Whether any layer of the model is a pyramid."""
    return any(isinstance(module, Pyramid) for module in model.modules())


def _meta_copy(model: nn.Module) -> nn.Module:
    """A copy of the model in eval mode that has shapes and no numbers."""
    return copy.deepcopy(model).to("meta").eval()


@torch.no_grad()
def _count_at_two_batches(shapes: nn.Module, input_size: tuple[int, ...]) -> MacCount:
    """Multiply-accumulates from those of two batches; attention in its plain form, so that none of it is missed."""
    counts = []
    for batch in (_COUNTED_BATCH, _COUNTED_BATCH + 1):
        images = torch.empty(batch, *input_size, device="meta", dtype=next(shapes.parameters()).dtype)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            shapes(images)
        counts.append(counter.get_total_flops() // 2)
    image = counts[1] - counts[0]
    return MacCount(image, counts[0] - _COUNTED_BATCH * image)


def _forward_branches(pyramid: Pyramid, x: Tensor) -> Tensor:
    """The sum of a pyramid's branches layer by layer, without norms, which are not counted."""
    branches = []
    for layers in pyramid.chains:
        y = x
        for layer in layers:
            y = layer(y) if isinstance(layer, nn.Linear | nn.Conv2d) else y
        branches.append(y)
    return sum(branches[1:], branches[0])


def _forward_joint_branches(joint: JointPyramid, x: Tensor) -> Tensor:
    return torch.cat([_forward_branches(pyramid, x) for pyramid in joint.pyramids], -1)  # type: ignore[arg-type]


def measure_cost(model: nn.Module, input_size: tuple[int, ...]) -> dict[str, float]:
    """All three: parameters, macs (per image), images_per_second (batch 32); step_macs where a pass has some."""
    macs = count_pass(model, input_size)
    return {
        "parameters": count_parameters(model),
        "macs": macs.image,
        **({"step_macs": macs.step} if macs.step else {}),
        "images_per_second": throughput(model, input_size),
    }
