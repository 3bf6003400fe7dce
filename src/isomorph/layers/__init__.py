"""nn.Modules that know tensors only."""

from isomorph.layers.gpsa import GPSA
from isomorph.layers.gpsa2d import GPSA2d
from isomorph.layers.vit_gpsa import ViTGPSA

__all__ = ["GPSA", "GPSA2d", "ViTGPSA"]
