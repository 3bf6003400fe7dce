"""Rule that computes the branches of MobileOne's blocks as one convolution in training."""

from dataclasses import dataclass
from typing import ClassVar

from timm.models.byobnet import MobileOneBlock
from torch import nn

from isomorph.surgery.mobileone import CombinedBlock, block_mismatch, combine, shared_window
from isomorph.surgery.rule import Rule, register_rule


@register_rule
@dataclass(frozen=True)
class BranchesToConv(Rule):
    """Compute all branches of a MobileOne block as one convolution in training, as in inference: exact, and faster.

    Accepts MobileOneBlock of timm.models.byobnet (`mobileone_*`) with its branches. Weights and their names stay the
    same, and so does the function; in train mode also gradients and running statistics, because the statistics of every
    BatchNorm follow from the moments of the input, which are measured once. timm's `reparameterize_model` still merges
    the network for inference.

    Measured on a CPU, it is faster with four k x k branches in a block (`mobileone_s0`) and slower with one
    (`mobileone_s1` to `s4`), where it only saves memory.

    Source: Vasu et al., MobileOne (2023), section 3.2; the closed form is isomorph's.
    Raises: UserError from `recast`, for a block that it does not accept.

    Example:
        >>> net = timm.create_model("mobileone_s0")
        >>> fast = iso.recast(net, iso.BranchesToConv(), where=["stem", "stages.*"])
        >>> fast.state_dict().keys() == net.state_dict().keys()
        True
        >>> images = torch.randn(2, 3, 64, 64)
        >>> bool((fast.train()(images) - net.train()(images)).abs().max() < 1e-3)
        True
    """

    atol: ClassVar[float] = 1e-4
    kind: ClassVar[tuple[type[nn.Module], ...]] = (MobileOneBlock,)

    def reason(self, module: nn.Module) -> str | None:
        """Return why the module cannot be recast, or None if it can."""
        if not isinstance(module, MobileOneBlock):
            kind = type(module)
            return f"{kind.__module__}.{kind.__name__} is not timm.models.byobnet.MobileOneBlock"
        if reason := block_mismatch(module):
            return reason
        return None if shared_window(module) else "its branches do not read the same patches"

    def build(self, module: nn.Module) -> CombinedBlock:
        """Return the block that computes its branches as one convolution.

        Raises: UserError with the reason if the module is not accepted.
        """
        self.check(module)
        assert isinstance(module, MobileOneBlock)
        return combine(module)
