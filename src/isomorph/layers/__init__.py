"""nn.Modules that know tensors only."""

from isomorph.layers.gpsa import GPSA, GPSA2d

__all__ = ["GPSA", "GPSA2d"]
