"""Weights of a classification checkpoint for a network around a backbone, and the network's layers for layer decay."""

import sys
from collections.abc import Collection
from typing import Any

from torch import Tensor

from isomorph.errors import UserError
from isomorph.models.vit_cfg import unwrap_state_dict

_STEM = r"^backbone\.(?:stem|conv_stem|conv\d|bn\d|patch_embed|pos_embed|cls_token|reg_token|dist_token|norm_pre)"
_STAGE = r"^backbone\.[a-z]+[._]?(\d+)"


def layer_groups() -> dict[str, Any]:
    """Return the `group_matcher` of a network whose timm backbone is its attribute `backbone`.

    Patches and positions are layer 0, the blocks of a ViT (or of numbered stages) layers 1 to depth, and everything
    else comes last.
    """
    return {"stem": _STEM, "blocks": [(rf"{_STAGE}\.(?:blocks\.)?(\d+)", None), (_STAGE, None)]}


def backbone_state(network: Any, state: dict[str, Any], fresh: Collection[str] = ()) -> dict[str, Any]:
    """Convert a checkpoint for a network whose timm backbone is its attribute `backbone`.

    A checkpoint of the whole network is returned unchanged. One of the backbone alone, a classifier's for example, is
    converted by the filter of the backbone, which resizes positions: its method `convert_foreign`, or timm's
    `checkpoint_filter_fn`. Tensors of layers after the last feature map, such as the classifier's, are left out. Those
    of the network around the backbone, and those of the backbone whose last name is in `fresh`, keep the network's
    values where the checkpoint does not have them.

    Raises: UserError if no tensor has the name of one of the backbone's.
    """
    state = unwrap_state_dict(state)
    if any(name.startswith("backbone.") for name in state):
        return state
    backbone = network.backbone
    filter_fn = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", lambda state, _: state)
    convert = getattr(backbone, "convert_foreign", None)
    given = convert(state) if convert else filter_fn(state, backbone)
    own: dict[str, Tensor] = backbone.state_dict()
    if not own.keys() & given.keys():
        raise UserError(f"the weights are not those of a {type(backbone).__name__}: no tensor has the name of its own")
    kept = {name for name in own if name not in given and name.rpartition(".")[2] in (*fresh, "num_batches_tracked")}
    if own.keys() <= given.keys() | kept:  # complete: the others belong to later layers
        given = {name: tensor for name, tensor in given.items() if name in own}
    whole = network.state_dict()
    around = {name: tensor for name, tensor in whole.items() if not name.startswith("backbone.")}
    around |= {f"backbone.{name}": whole[f"backbone.{name}"] for name in kept}
    return {**around, **{f"backbone.{name}": tensor for name, tensor in given.items()}}
