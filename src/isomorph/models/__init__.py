"""Whole networks, registered with timm on import."""

import timm

from isomorph.models import cifar_resnet, tcnn

MODULES = (cifar_resnet, tcnn)


def names() -> list[str]:
    """Every model that isomorph adds to timm's registry."""
    return sorted(name for module in MODULES for name in timm.list_models(module=module.__name__.rpartition(".")[2]))


__all__ = ["names"]
