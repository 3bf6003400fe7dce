"""Numbers of parameters and multiply-accumulates.

Multiply-accumulates are counted by the shapes of convolutions and matrix products (1 MAC = 2 FLOPs), so they are the
same on every device. Those that grow with the batch are counted per image; the rest, such as the products of weights of
pyramids in closed form, are counted per pass.
"""

import copy
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from isomorph.evaluation.input_sizes import inputs_like
from isomorph.layers import JointPyramid
from isomorph.layers.pyramid.base import Pyramid
from isomorph.surgery.model_inputs import run_model

_COUNTED_BATCH = 2
"""Size of the smaller of the two counted batches: enough for BatchNorm in training mode."""


class MacCount(NamedTuple):
    """Multiply-accumulates of a forward pass: per image, and once per pass."""

    per_image: int
    per_pass: int


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters; shared ones count once.

    >>> from isomorph.evaluation import count_parameters
    >>> count_parameters(timm.create_model("cifar_resnet20"))
    269722
    """
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: nn.Module, input_size: tuple[int, ...]) -> int:
    """Return the multiply-accumulates of inference for one image (1 MAC = 2 FLOPs), attention included.

    Shape: input_size is (channels, height, width)

    >>> from isomorph.evaluation import count_macs
    >>> count_macs(timm.create_model("cifar_resnet20"), (3, 32, 32))
    40551040
    """
    return count_pass(model, input_size).per_image


def count_pass(model: nn.Module, input_size: tuple[int, ...], training: bool = False) -> MacCount:
    """Return the multiply-accumulates of a forward pass, in eval or training mode, per image and per pass."""
    return _count_at_two_batches(_meta_copy(model).train(training), input_size)


def count_branches(model: nn.Module, input_size: tuple[int, ...]) -> int:
    """Return the multiply-accumulates of a training forward pass for one image, with pyramids run branch by branch.

    Every token passes through every layer of every branch, as TDRL counts it in Table 8. isomorph trains pyramids in
    closed form; for its count use `count_pass(model, input_size, training=True)`.
    """
    branched = _meta_copy(model)
    for module in branched.modules():
        if isinstance(module, JointPyramid):
            module.forward = partial(_forward_joint_branches, module)  # type: ignore[method-assign]
        elif isinstance(module, Pyramid):
            module.forward = partial(_forward_branches, module)
    return _count_at_two_batches(branched, input_size).per_image


def has_pyramids(model: nn.Module) -> bool:
    """True if any layer of the model is a pyramid."""
    return any(isinstance(module, Pyramid) for module in model.modules())


def _meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device (shapes without values), in eval mode."""
    return copy.deepcopy(model).to("meta").eval()


@torch.no_grad()
def _count_at_two_batches(model: nn.Module, input_size: tuple[int, ...]) -> MacCount:
    """Count two batch sizes, and split their difference into per image and per pass."""
    counts = []
    for batch in (_COUNTED_BATCH, _COUNTED_BATCH + 1):
        inputs = inputs_like(model, batch, input_size, "meta")
        # the plain form of attention: the counter does not see into fused kernels
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            run_model(model, inputs)
        counts.append(counter.get_total_flops() // 2)
    per_image = counts[1] - counts[0]
    return MacCount(per_image, counts[0] - _COUNTED_BATCH * per_image)


def _forward_branches(pyramid: Pyramid, x: Tensor) -> Tensor:
    """Run a pyramid layer by layer and sum its branches, without norms, which are not counted."""
    branches = []
    for layers in pyramid.chains:
        y = x
        for layer in layers:
            y = layer(y) if isinstance(layer, nn.Linear | nn.Conv2d) else y
        branches.append(y)
    return sum(branches[1:], branches[0])


def _forward_joint_branches(joint: JointPyramid, x: Tensor) -> Tensor:
    """Run joint pyramids layer by layer, and linear parts as they are, and concatenate their outputs."""
    parts = (_forward_branches(part, x) if isinstance(part, Pyramid) else part(x) for part in joint.pyramids)
    return torch.cat(list(parts), -1)
