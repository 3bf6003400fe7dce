"""What torch does with this call: whether it runs eagerly, under torch.func, and may overwrite a gradient."""

import torch
from torch import Tensor

CPU_DEVICE = "cpu"
"""Type of the device for which layers take the form of a CPU; a test of the other form names another."""


def on_cpu(tensor: Tensor) -> bool:
    """True if a layer takes the form that is fast on a CPU for this tensor."""
    return tensor.device.type == CPU_DEVICE


def is_eager() -> bool:
    """True if torch runs eagerly: nothing is compiling, exporting or tracing this call."""
    return not torch.compiler.is_compiling() and not torch.jit.is_tracing()


def is_functorch_tensor(tensor: Tensor) -> bool:
    """True if the tensor is a wrapper of torch.func (vmap, jvp and the like)."""
    return is_eager() and torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def can_write_into(gradient: Tensor) -> bool:
    """Return whether a gradient may be overwritten: it is contiguous, and torch runs eagerly and records nothing.

    The caller makes sure that nothing else reads the gradient.
    """
    recorded = torch.is_grad_enabled() or not is_eager() or is_functorch_tensor(gradient)
    return not recorded and gradient.is_contiguous()
