"""nn.Modules that know tensors only."""

from isomorph.layers.gpsa import GPSA
from isomorph.layers.gpsa2d import GPSA2d
from isomorph.layers.pyramid_conv import PyramidConv2d
from isomorph.layers.pyramid_linear import JointPyramid, PyramidLinear
from isomorph.layers.vit_gpsa import ViTGPSA

__all__ = ["GPSA", "GPSA2d", "JointPyramid", "PyramidConv2d", "PyramidLinear", "ViTGPSA"]
