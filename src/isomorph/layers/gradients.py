"""Check whether a backward pass may overwrite a gradient."""

import torch
from torch import Tensor

from isomorph.layers.chunked import is_eager, is_functorch_tensor


def can_write_into(gradient: Tensor) -> bool:
    """Return whether a gradient may be overwritten: it is contiguous, and torch runs eagerly and records nothing.

    The caller makes sure that nothing else reads the gradient.
    """
    recorded = torch.is_grad_enabled() or not is_eager() or is_functorch_tensor(gradient)
    return not recorded and gradient.is_contiguous()
