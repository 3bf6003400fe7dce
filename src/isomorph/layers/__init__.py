"""nn.Modules that know tensors only."""

from isomorph.layers.annealed import AnnealedPair, AnnealedReLU, SeriesActivation
from isomorph.layers.gpsa import GPSA
from isomorph.layers.gpsa2d import GPSA2d
from isomorph.layers.local_attention import LocalAttention
from isomorph.layers.mbconv import LayerNormMBConv, MBConv
from isomorph.layers.psa import PSA
from isomorph.layers.pyramid_conv import PyramidConv2d
from isomorph.layers.pyramid_linear import JointPyramid, PyramidLinear
from isomorph.layers.refined_attention import ExpandedAttention, RefinedAttention, ReusedAttention, SpatialAttention
from isomorph.layers.refiner import CrossKernel, Expansion, MapConvolution, Refiner, SpatialRefiner
from isomorph.layers.relative_attention import PostRelativeAttention, RelativeAttention
from isomorph.layers.vit_gpsa import ViTGPSA

__all__ = [
    "GPSA",
    "PSA",
    "AnnealedPair",
    "AnnealedReLU",
    "CrossKernel",
    "ExpandedAttention",
    "Expansion",
    "GPSA2d",
    "JointPyramid",
    "LayerNormMBConv",
    "LocalAttention",
    "MBConv",
    "MapConvolution",
    "PostRelativeAttention",
    "PyramidConv2d",
    "PyramidLinear",
    "RefinedAttention",
    "Refiner",
    "RelativeAttention",
    "ReusedAttention",
    "SeriesActivation",
    "SpatialAttention",
    "SpatialRefiner",
    "ViTGPSA",
]
