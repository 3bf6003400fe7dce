"""When a backward pass may work in place."""

import torch
from torch import Tensor

from isomorph.layers.chunked import is_eager, is_functorch_tensor


def can_write_into(gradient: Tensor) -> bool:
    """True if torch runs eagerly and records nothing, so that a gradient may be overwritten.

    Nothing else may read the gradient, which the caller has to know.
    """
    recorded = torch.is_grad_enabled() or not is_eager() or is_functorch_tensor(gradient)
    return not recorded and gradient.is_contiguous()
