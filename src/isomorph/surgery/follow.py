"""Layers in a ViT see tokens, not the image: a hook on the patch embedding tells them the grid."""

from dataclasses import replace
from typing import Any

from timm.layers import PatchDropout
from torch import nn

from isomorph.errors import UserError
from isomorph.layers import SpatialAttention, ViTGPSA
from isomorph.surgery.bounds import check_grid

FOLLOWERS = (SpatialAttention, ViTGPSA)
"""Layers whose tokens have places on the grid of the image."""


class FollowGrid:
    """Tells layers with places the grid of each image that is embedded: a hook on the model's `patch_embed`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, patch_embed: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        image = args[0] if args else kwargs["x"]
        height, width = image.shape[-2:]
        grid_size = patch_embed.dynamic_feat_size((height, width))
        for module in self.model.modules():
            if isinstance(module, FOLLOWERS):
                module.grid_size = grid_size


def follow_grid(model: Any) -> None:
    """Hooks the patch embedding where a layer of the model needs it, and unhooks it where none does any more."""
    hooks = model.patch_embed._forward_pre_hooks
    present = [key for key, hook in hooks.items() if isinstance(hook, FollowGrid)]
    if not any(isinstance(module, FOLLOWERS) for module in model.modules()):
        for key in present:
            del hooks[key]
            model.patch_embed._forward_pre_hooks_with_kwargs.pop(key, None)
    elif not present:
        model.patch_embed.register_forward_pre_hook(FollowGrid(model), with_kwargs=True)


def embedding_models(model: nn.Module) -> list[Any]:
    """The parts of a model that embed patches and say on which grid, each embedding once."""
    parts = {
        id(part.patch_embed): part
        for part in reversed(list(model.modules()))
        if hasattr(getattr(part, "patch_embed", None), "dynamic_feat_size")
    }
    return list(parts.values())


def embedding_model(model: nn.Module) -> Any:
    """The one part of a model that embeds patches, or None.

    Raises: UserError when there are several, or when it drops patches: their grid has holes then.
    """
    found = embedding_models(model)
    if len(found) > 1:
        raise UserError(
            "the model embeds patches in several places; recast each part, or give grid_size and prefix_tokens"
        )
    if found and isinstance(getattr(found[0], "patch_drop", None), PatchDropout) and found[0].patch_drop.prob:
        raise UserError(
            "the model drops patches in training (patch_drop_rate), which leaves no grid; create it without"
        )
    return found[0] if found else None


def check_place(rule: Any) -> None:
    """Makes `grid_size` a pair, as JSON and YAML have lists only. Raises: UserError for an impossible place."""
    check_grid(rule.grid_size, rule.prefix_tokens)
    if rule.grid_size is not None:
        object.__setattr__(rule, "grid_size", tuple(rule.grid_size))


def placed(rule: Any, model: nn.Module) -> Any:
    """The rule with the model's grid and number of prefix tokens, where it has none of its own."""
    owner = None if None not in (rule.grid_size, rule.prefix_tokens) else embedding_model(model)
    if owner is None:
        return rule
    known = dict(grid_size=owner.patch_embed.grid_size, prefix_tokens=getattr(owner, "num_prefix_tokens", 0))
    return replace(rule, **{name: value for name, value in known.items() if getattr(rule, name) is None})


def attach_grid(rule: Any, model: nn.Module) -> None:
    """Lets the grid of the rule's layers follow the images, unless the rule gives one; stops where none is left."""
    owner = embedding_model(model) if rule.grid_size is None else None
    if owner is not None:
        follow_grid(owner)
