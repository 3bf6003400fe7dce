"""Layers: attention with gates, refined maps or relative positions, pyramids of linear layers, convolution blocks."""

from isomorph.layers.annealed import AnnealedPair, AnnealedReLU, SeriesActivation
from isomorph.layers.decomposed_attention import DecomposedAttention
from isomorph.layers.gpsa import GPSA
from isomorph.layers.gpsa2d import GPSA2d
from isomorph.layers.local_attention import LocalAttention
from isomorph.layers.map_edit import GatedMap, MapCall, RefinedMap
from isomorph.layers.mbconv import LayerNormMBConv, MBConv
from isomorph.layers.positional_conv import PositionalConv2d
from isomorph.layers.positional_tokens import PositionalAttention, ViTPositionalAttention
from isomorph.layers.psa import PSA
from isomorph.layers.pyramid_conv import PyramidConv2d
from isomorph.layers.pyramid_linear import JointPyramid, PyramidLinear
from isomorph.layers.refined_attention import ExpandedAttention, RefinedAttention, SpatialAttention
from isomorph.layers.refiner import CrossKernel, Expansion, MapConvolution, Refiner, SpatialRefiner
from isomorph.layers.relative_attention import PostRelativeAttention, RelativeAttention
from isomorph.layers.same_padding import SamePadding
from isomorph.layers.vit_gpsa import ViTGPSA
from isomorph.layers.vit_relative_attention import ViTRelativeAttention
from isomorph.layers.window_gpsa2d import WindowGPSA2d

__all__ = [
    "GPSA",
    "PSA",
    "AnnealedPair",
    "AnnealedReLU",
    "CrossKernel",
    "DecomposedAttention",
    "ExpandedAttention",
    "Expansion",
    "GPSA2d",
    "GatedMap",
    "JointPyramid",
    "LayerNormMBConv",
    "LocalAttention",
    "MBConv",
    "MapCall",
    "MapConvolution",
    "PositionalAttention",
    "PositionalConv2d",
    "PostRelativeAttention",
    "PyramidConv2d",
    "PyramidLinear",
    "RefinedAttention",
    "RefinedMap",
    "Refiner",
    "RelativeAttention",
    "SamePadding",
    "SeriesActivation",
    "SpatialAttention",
    "SpatialRefiner",
    "ViTGPSA",
    "ViTPositionalAttention",
    "ViTRelativeAttention",
    "WindowGPSA2d",
]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
