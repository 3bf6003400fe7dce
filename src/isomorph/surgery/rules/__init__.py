"""Rules: which module becomes which, with its function preserved. One file a family of rules."""

from isomorph.surgery.rules.branches import BranchesToConv
from isomorph.surgery.rules.gated import ConvToGPSA
from isomorph.surgery.rules.gated_attention import AttentionToGPSA
from isomorph.surgery.rules.linears import AttentionToLinears
from isomorph.surgery.rules.norms import ConvToConvNorm
from isomorph.surgery.rules.pyramid import LinearToPyramid
from isomorph.surgery.rules.refined import AttentionToRefined
from isomorph.surgery.rules.relative import AttentionToRelative

__all__ = [
    "AttentionToGPSA",
    "AttentionToLinears",
    "AttentionToRefined",
    "AttentionToRelative",
    "BranchesToConv",
    "ConvToConvNorm",
    "ConvToGPSA",
    "LinearToPyramid",
]
