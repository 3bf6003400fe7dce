"""Any timm model as the backbone of a network for dense tasks: its feature maps, its weights, its layers."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import timm
import torch
from timm.layers import to_2tuple
from timm.models import group_parameters
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.models.base import (
    State,
    build_variant,
    own_filter,
    parameters_without_decay,
    unwrap_state_dict,
)
from isomorph.models.blockwise import BlockwiseViT
from isomorph.spec import ImageSize, record_config, spec_of


class FeatureBackbone(NamedTuple):
    """A backbone, the indices of its feature maps that are used, and the channels and reduction of each."""

    module: nn.Module
    indices: tuple[int, ...]
    channels: tuple[int, ...]
    reductions: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """True if all maps have one resolution, as those of a plain ViT."""
        return len(set(self.reductions)) == 1

    def distinct(self) -> "FeatureBackbone":
        """Keep the last map of each resolution; maps finer than stride 4 only if there are fewer than two others."""
        last = {reduction: position for position, reduction in enumerate(self.reductions)}
        coarse = [position for reduction, position in last.items() if reduction >= 4]
        positions = sorted(coarse if len(coarse) > 1 else last.values())
        indices = tuple(self.indices[position] for position in positions)
        channels = tuple(self.channels[position] for position in positions)
        reductions = tuple(self.reductions[position] for position in positions)
        return FeatureBackbone(self.module, indices, channels, reductions)


def build_backbone(
    name: str,
    in_chans: int = 3,
    img_size: int | ImageSize | None = None,
    pretrained: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> FeatureBackbone:
    """Create a timm model without its head and the stages after the last feature map that is used.

    `img_size` is passed on to models that have such an argument. Four maps are taken: those of the last four
    resolutions, or of blocks a third, a half, two thirds and all of the way through a plain ViT (3, 5, 7, 11 of 12).

    Raises: UserError for a model without feature maps; what timm raises for others.
    """
    model_arguments = _image_size_arguments(name, img_size) | dict(arguments or {})
    model = timm.create_model(
        name, pretrained=pretrained, in_chans=in_chans, num_classes=0, **model_arguments
    )
    info: list[dict[str, Any]] = list(getattr(model, "feature_info", None) or ())
    if not info or not hasattr(model, "forward_intermediates"):
        others = "vit_tiny_patch16_224, resnet50 or swin_tiny_patch4_window7_224"
        raise UserError(
            f"{name} has no feature maps (timm's forward_intermediates); choose another, like {others}",
        )
    indices = _choose_indices(info)
    if hasattr(model, "prune_intermediate_layers"):
        model.prune_intermediate_layers(sorted(set(indices)), prune_norm=True, prune_head=True)
    channels = tuple(info[index]["num_chs"] for index in indices)
    reductions = tuple(info[index]["reduction"] for index in indices)
    return FeatureBackbone(model, indices, channels, reductions)


def _image_size_arguments(name: str, img_size: int | ImageSize | None) -> dict[str, Any]:
    """Return the arguments with which a model takes images of any size, as far as its class and its bases have them."""
    model_class = _model_class(name.partition(".")[0])
    arguments: dict[str, Any] = {}
    if not issubclass(model_class, BlockwiseViT):  # which takes them anyway
        arguments |= {"dynamic_img_size": True, "strict_img_size": False}
    if img_size is not None:
        arguments["img_size"] = to_2tuple(img_size)
    accepted: set[str] = set()
    for base in model_class.__mro__:
        accepted |= inspect.signature(base.__init__).parameters.keys()  # type: ignore[misc]
    return {key: value for key, value in arguments.items() if key in accepted}


@cache
def _model_class(name: str) -> type[nn.Module]:
    """Return the class of a timm model, which only creating one tells."""
    with torch.device("meta"):
        return type(timm.create_model(name))


def _choose_indices(info: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    count = len(info)
    if len({level["reduction"] for level in info}) == 1:
        return tuple(max(0, round(count * part / 12) - 1) for part in (4, 6, 8, 12))
    return tuple(range(count))[-4:]


class BackboneNetwork(nn.Module):
    """A network around a timm model, its attribute `backbone`, which was created with `backbone_kwargs`.

    It reads the feature maps of the `indices`; None if the backbone itself returns a list of maps. `own_cfg` returns
    the entries of its `pretrained_cfg` that depend on the backbone, given the backbone's.
    """

    backbone: Any
    backbone_kwargs: dict[str, Any]
    indices: tuple[int, ...] | None

    def backbone_maps(self, x: Tensor) -> list[Tensor]:
        """Return a feature map for each index. Shape: (B, in_chans, h, w) -> (B, C_i, H_i, W_i) each"""
        if self.indices is None:
            return self.backbone(x)
        unique_indices = sorted(set(self.indices))
        maps = self.backbone.forward_intermediates(
            x, indices=unique_indices, intermediates_only=True, output_fmt="NCHW"
        )
        return [maps[unique_indices.index(index)] for index in self.indices]

    def own_cfg(self, inner: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of the `pretrained_cfg` that follow from the backbone's, which is `inner`."""
        raise NotImplementedError

    @property
    def fused_arguments(self) -> dict[str, Any]:
        """Arguments that create the network with its backbone fused; empty if the backbone has none."""
        fused = getattr(self.backbone, "fused_arguments", None)
        if not fused:
            return {}
        return {"backbone_kwargs": {**self.backbone_kwargs, **fused}}

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters that layers exempt from weight decay."""
        return parameters_without_decay(self)

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """Return the layer of each parameter for layer decay: those of the backbone, then everything else."""
        layers = group_parameters(
            self.backbone, self.backbone.group_matcher(coarse=coarse), reverse=True
        )
        last = max(layers.values()) + 1

        def layer_of(name: str) -> int:
            if not name.startswith("backbone."):
                return last
            return layers.get(name.removeprefix("backbone."), last)

        return layer_of

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's blocks in the backward pass instead of storing their activations."""
        self.backbone.set_grad_checkpointing(enable)


def create_network(
    kind: type[BackboneNetwork],
    name: str,
    pretrained: bool,
    **arguments: Any,
) -> BackboneNetwork:
    """Build a network through timm. `pretrained` gives the backbone its public weights; the network has none."""
    overlay = arguments.pop("pretrained_cfg_overlay", None) or {}
    model = build_variant(kind, name, False, backbone_pretrained=pretrained, **arguments)
    own_config = model.own_cfg(spec_of(model.backbone).config)
    record_config(model, {**spec_of(model).config, **own_config, **overlay})
    return model


def backbone_state(
    network: BackboneNetwork,
    state: dict[str, Any],
    fresh: Collection[str] = (),
) -> dict[str, Any]:
    """Convert a checkpoint of the whole network (unchanged) or of its backbone alone, such as a classifier's.

    The backbone's own filter converts it. Tensors of layers after the last feature map are left out. Those around the
    backbone, and those whose last name is in `fresh`, keep the network's values where the checkpoint has none.

    Raises: UserError if no tensor has the name of one of the backbone's.
    """
    state = unwrap_state_dict(state)
    if any(name.startswith("backbone.") for name in state):
        return state
    backbone = network.backbone
    convert = getattr(backbone, "convert_foreign", None)
    weights = convert(state) if convert else own_filter(type(backbone))(state, backbone)
    backbone_weights: State = backbone.state_dict()
    if not backbone_weights.keys() & weights.keys():
        raise UserError(
            f"the weights are not those of a {type(backbone).__name__}: no tensor has the name of its own",
        )
    last_names = (*fresh, "num_batches_tracked")
    missing = backbone_weights.keys() - weights.keys()
    names_kept = {name for name in missing if name.rpartition(".")[2] in last_names}
    if (
        backbone_weights.keys() <= weights.keys() | names_kept
    ):  # complete: the others belong to later layers
        weights = {name: tensor for name, tensor in weights.items() if name in backbone_weights}
    converted = {
        name: tensor
        for name, tensor in network.state_dict().items()
        if not name.startswith("backbone.")
    }
    for name in names_kept:
        converted[f"backbone.{name}"] = backbone_weights[name]
    for name, tensor in weights.items():
        converted[f"backbone.{name}"] = tensor
    return converted
