"""What a model computes, whatever its classes: attention maps to change or to read, and models without wrappers."""

from isomorph.operations.applied import AppliedAttention, ReadMaps, images_per_chunk
from isomorph.operations.flow import Flow, Operation, count_calls, see
from isomorph.operations.maps import (
    EditMaps,
    FollowMaps,
    FusedCall,
    MapLayout,
    from_standard_map,
    to_standard_map,
    usual_layout,
)
from isomorph.operations.observe import ModuleCall, observing
from isomorph.operations.traces import left_no_trace, state_of
from isomorph.operations.values import TensorVersion, leaves, parts_of, tensors_in, value_of
from isomorph.operations.wrapped_models import (
    copy_module,
    hooks_on,
    in_eval_mode,
    is_compiled,
    match_modes,
    records_outputs,
    unwrap,
    wrappers_of,
)

__all__ = [
    "AppliedAttention",
    "EditMaps",
    "Flow",
    "FollowMaps",
    "FusedCall",
    "MapLayout",
    "ModuleCall",
    "Operation",
    "ReadMaps",
    "TensorVersion",
    "copy_module",
    "count_calls",
    "from_standard_map",
    "hooks_on",
    "images_per_chunk",
    "in_eval_mode",
    "is_compiled",
    "leaves",
    "left_no_trace",
    "match_modes",
    "observing",
    "parts_of",
    "records_outputs",
    "see",
    "state_of",
    "tensors_in",
    "to_standard_map",
    "unwrap",
    "usual_layout",
    "value_of",
    "wrappers_of",
]
