"""Layers: attention with gates, refined maps or relative positions, pyramids of linear layers, convolution blocks."""

from isomorph.layers.annealed import AnnealedPair, AnnealedReLU, SeriesActivation
from isomorph.layers.conv_norm import ConvNorm
from isomorph.layers.gated.gpsa import GPSA, PositionalAttention, ViTGPSA, ViTPositionalAttention
from isomorph.layers.gated.gpsa2d import GPSA2d
from isomorph.layers.gated.psa import PSA
from isomorph.layers.gated.tap_heads import PositionalConv2d
from isomorph.layers.gated.window_gpsa2d import WindowGPSA2d
from isomorph.layers.map_attention import MapAttention
from isomorph.layers.map_edit import GatedMap, MapCall, RefinedMap
from isomorph.layers.pyramid.conv import PyramidConv2d
from isomorph.layers.pyramid.linear import JointPyramid, PyramidLinear
from isomorph.layers.refined.attention import (
    ExpandedAttention,
    LocalAttention,
    RefinedAttention,
    SpatialAttention,
)
from isomorph.layers.refined.refiner import (
    CrossKernel,
    Expansion,
    MapConvolution,
    Refiner,
    SpatialRefiner,
)
from isomorph.layers.relative.attention import (
    PostRelativeAttention,
    RelativeAttention,
    ViTRelativeAttention,
)
from isomorph.layers.relative.decomposed import DecomposedAttention
from isomorph.layers.relative.mbconv import LayerNormMBConv, MBConv
from isomorph.layers.same_padding import SamePadding

__all__ = [
    "GPSA",
    "PSA",
    "AnnealedPair",
    "AnnealedReLU",
    "ConvNorm",
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
    "MapAttention",
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
