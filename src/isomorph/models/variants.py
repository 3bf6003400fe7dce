"""What isomorph's networks have in common as models of timm: variants, configuration, foreign checkpoints, sizes."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, register_model
from torch import Tensor, nn

from isomorph.errors import UserError

Mixin: Any = object
"""Base class typed as Any: the mixin is combined with timm's models, whose attributes mypy does not know."""


def image_cfg(**more: Any) -> dict[str, Any]:
    """Return the pretrained_cfg of a network for ImageNet at 224 or any other size; `more` overrides its entries."""
    images = dict(input_size=(3, 224, 224), crop_pct=0.875, interpolation="bicubic", fixed_input_size=False)
    colours = dict(mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD)
    layers = dict(num_classes=1000, pool_size=None, first_conv="patch_embed.proj", classifier="head")
    return images | colours | layers | more


class Variant(NamedTuple):
    """A variant of a network: its arguments, and a line that describes it."""

    arguments: dict[str, Any]
    description: str


def register_variants(module: str, create: Callable[..., nn.Module], variants: Mapping[str, Variant]) -> None:
    """Add variants to timm's registry as functions of a module, built by `create(name, pretrained, **arguments)`."""
    for name, variant in variants.items():
        setattr(sys.modules[module], name, register_model(_entrypoint(module, create, name, variant)))


def _entrypoint(module: str, create: Callable[..., nn.Module], name: str, variant: Variant) -> Callable[..., nn.Module]:
    def build(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return create(name, pretrained, **{**variant.arguments, **kwargs})

    build.__module__, build.__name__, build.__qualname__, build.__doc__ = module, name, name, variant.description
    return build


def build_variant(
    kind: type, name: str, pretrained: bool, /, feature_cfg: Any = None, own_cfg: Any = (), **arguments: Any
) -> Any:
    """Build a variant through timm; the module of the class `kind` has its `checkpoint_filter_fn`.

    `feature_cfg` is timm's, by default that of a ViT. `own_cfg` are entries of the `pretrained_cfg` that depend on the
    arguments; the user's `pretrained_cfg_overlay` overrides them.
    """
    return build_model_with_cfg(
        kind,
        name,
        pretrained,
        pretrained_filter_fn=own_filter(kind),
        pretrained_cfg_overlay={**dict(own_cfg), **(arguments.pop("pretrained_cfg_overlay", None) or {})},
        feature_cfg=dict(out_indices=3, feature_cls="getter") if feature_cfg is None else feature_cfg,
        **arguments,
    )


def own_filter(kind: type) -> Callable[[dict[str, Any], Any], dict[str, Tensor]]:
    """Return the `checkpoint_filter_fn` of the module of a class, or of a base class; else one that changes nothing."""
    modules = (vars(sys.modules[base.__module__]) for base in kind.__mro__)
    found = (module["checkpoint_filter_fn"] for module in modules if "checkpoint_filter_fn" in module)
    return next(found, lambda state, _: state)


def unwrap_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors in a training checkpoint's `state_dict` or `model`, without DataParallel's prefix."""
    tensors = state_dict.get("state_dict", state_dict.get("model", state_dict))
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def renamed_in_order(state: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor] | None:
    """Return tensors under new names, given in the same order; None if the numbers or the last names do not agree."""
    if [name.rpartition(".")[2] for name in names] != [name.rpartition(".")[2] for name in state]:
        return None
    return dict(zip(names, state.values(), strict=True))


class ForeignCheckpoints(Mixin):
    """Mixin for a model whose `load_state_dict` also takes the layouts that `iso.load_weights` converts.

    A position embedding of another image size is resized; unknown layouts are loaded unchanged and strictly. The
    conversion is the `checkpoint_filter_fn` of the model's module.
    """

    def is_foreign(self, state: dict[str, Tensor]) -> bool:
        """Return True if the tensors have another code base's layout that the model can convert."""
        raise NotImplementedError

    def convert_foreign(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return own_filter(type(self))(state, self)

    # torch calls this hook for the module and its children, so it also works when the model is part of another one
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        given = {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}
        own, positions = getattr(self, "pos_embed", None), given.get("pos_embed")
        resized = own is not None and positions is not None and own.shape[1:-1] != positions.shape[1:-1]
        if resized or self.is_foreign(given):
            for name in given:
                del state_dict[prefix + name]
            state_dict |= {prefix + name: tensor for name, tensor in self.convert_foreign(given).items()}
        super()._load_from_state_dict(state_dict, prefix, *rest)


@torch.no_grad()
def init_as_mae(model: nn.Module) -> None:
    """Draw Xavier-uniform weights for every matrix, zeros for biases; filters are one matrix, as in MAE's code."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight.view(len(module.weight), -1))
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def require_images(x: Tensor, patch: tuple[int, int] | None = None, padded: bool = False) -> Tensor:
    """Return a batch of images unchanged, after checking it; under `torch.fx.wrap` any size can be traced.

    Shape: x (B, in_chans, height, width) -> as x
    Raises: UserError for another number of axes, an image without pixels, or a size that is not in whole patches.
    """
    if x.ndim != 4 or x.shape[2] < 1 or x.shape[3] < 1:
        raise UserError(f"images must have shape (B, in_chans, height, width), not {tuple(x.shape)}")
    if patch:
        check_whole_patches((x.shape[2], x.shape[3]), patch, padded)
    return x


def check_whole_patches(size: tuple[int, ...], patch: tuple[int, ...], padded: bool) -> None:
    """Check an image size. Raises: UserError if it is below the patch size, or not a multiple of it unless `padded`."""
    (height, width), (ph, pw) = size, patch
    if not padded and (height < ph or width < pw):
        raise UserError(f"the {height} x {width} image is smaller than the {ph} x {pw} patch; give a larger one")
    if not padded and (height % ph or width % pw):
        raise UserError(
            f"the {height} x {width} image is not a multiple of the {ph} x {pw} patch; "
            "resize it, or create the model with dynamic_img_pad=True"
        )
