"""Models whose branches timm's `reparameterize_model` merges: with pyramids in them, and files of merged ones."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from timm.utils.model import reparameterize_model
from torch import nn

from isomorph.layers.pyramid.base import Pyramid
from isomorph.surgery.fuse import fuse_pyramids
from isomorph.surgery.rule import Rule
from isomorph.surgery.site import Site

# Methods of timm's blocks that `reparameterize_model` calls.
_METHODS = ("fuse", "reparameterize", "switch_to_deploy")


@dataclass(frozen=True)
class Reparameterize(Rule):
    """Rule that gives a model of timm the form in which its `reparameterize_model` leaves it, as a file of one has it.

    `fuse` merges branches by what they compute, more of them and in float64; this is for weights of that form.

    Raises: UserError from `build` for a model that is not timm's.

    >>> repvgg = timm.create_model("repvgg_a0").eval()
    >>> merged = iso.surgery.Reparameterize().build(iso.surgery.Site(repvgg))
    >>> sum(isinstance(part, torch.nn.BatchNorm2d) for part in merged.modules())
    0
    """

    atol = 1e-4
    is_reverted = False

    def reason(self, site: Site) -> str | None:
        is_timm = type(site.module).__module__.startswith("timm.")
        return None if is_timm else f"{type(site.module).__name__} is not a model of timm"

    def build(self, site: Site) -> nn.Module:
        self.check(site)
        module = site.module
        trained = any(parameter.requires_grad for parameter in module.parameters())
        merged: nn.Module = reparameterize_model(module)
        first = next(module.parameters())
        # timm makes layers without saying in which dtype and where
        merged.to(first.device, first.dtype)
        return merged.train(module.training).requires_grad_(trained)


def guard_pyramids(model: nn.Module) -> None:
    """Make methods of timm fuse the pyramids in their module first, since they read weights and no biases, in place."""
    for module in model.modules():
        has_pyramid = any(isinstance(part, Pyramid) for part in module.modules())
        for method in _METHODS:
            own_method = getattr(type(module), method, None)
            vars(module).pop(method, None)
            if own_method and has_pyramid and not own_method.__module__.startswith("isomorph."):
                vars(module)[method] = partial(_fuse_pyramids_first, module, method)


def _fuse_pyramids_first(module: nn.Module, method: str) -> Any:
    """Call a method of timm after the pyramids of its module are fused."""
    vars(module).pop(method)
    fuse_pyramids(module)
    return getattr(module, method)()
