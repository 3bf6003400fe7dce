"""What a model computes, whatever its classes: attention maps to change or to read, found by operation."""

from isomorph.operations.applied import AppliedAttention, FormedMap, ReadMaps, Scores, images_per_chunk
from isomorph.operations.flow import Flow, Operation, see
from isomorph.operations.maps import EditMaps, FusedCall, MapLayout, from_standard_map, to_standard_map, usual_layout

__all__ = [
    "AppliedAttention",
    "EditMaps",
    "Flow",
    "FormedMap",
    "FusedCall",
    "MapLayout",
    "Operation",
    "ReadMaps",
    "Scores",
    "from_standard_map",
    "images_per_chunk",
    "see",
    "to_standard_map",
    "usual_layout",
]
