"""Whole networks, registered with timm on import."""

from difflib import get_close_matches
from typing import Any

import timm
from torch import nn

from isomorph.errors import UserError
from isomorph.models import cifar_resnet, coatnet, convit, refined_vit, refined_vit_released, tcnn, tdrl_vit, vanillanet

MODULES = (cifar_resnet, coatnet, convit, refined_vit, refined_vit_released, tcnn, tdrl_vit, vanillanet)


def names() -> list[str]:
    """Every model that isomorph adds to timm's registry."""
    return sorted(name for module in MODULES for name in module.default_cfgs)


def require_registered(name: str) -> None:
    """Raises: UserError naming the closest models when timm's registry (isomorph's are in it) has no such model."""
    if not timm.is_model(name.split(".")[0]):
        close = timm.list_models(f"*{name}*")[:3] or get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "see `isomorph models` and timm.list_models()"
        raise UserError(f"no model {name!r} is registered; {hint}")


def create(name: str, **arguments: Any) -> nn.Module:
    """timm.create_model with its many kinds of failure as one line."""
    require_registered(name)
    try:
        return timm.create_model(name, **arguments)
    except UserError:
        raise
    except Exception as error:
        hint = (
            "; without a network give its weights as a file (--weights, model.weights)"
            if arguments.get("pretrained")
            else ""
        )
        raise UserError(f"timm cannot create {name}: {' '.join(str(error).split())[:300]}{hint}") from error


__all__ = ["create", "names", "require_registered"]
