"""What isomorph's ViTs share: the images they expect, as timm has it and in size, and how timm builds them."""

from collections.abc import Callable
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import to_2tuple
from timm.models import build_model_with_cfg
from torch import Tensor

from isomorph.errors import UserError


def vit_cfg(**more: Any) -> dict[str, Any]:
    """The pretrained entry of a ViT for ImageNet at 224 and any other size, but for what is given."""
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "fixed_input_size": False,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        **more,
    }


def check_heads(num_heads: int, embed_dim: int) -> None:
    """Raises: UserError for heads that do not divide the channels."""
    if num_heads < 1 or embed_dim % num_heads:
        raise UserError(f"num_heads {num_heads} does not divide embed_dim {embed_dim}")


def unwrap_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a checkpoint, out of a trainer's wrapping and DataParallel's prefix."""
    tensors = state_dict.get("state_dict", state_dict.get("model", state_dict))
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def build_vit(
    kind: type, variant: str, pretrained: bool, filter_fn: Callable[..., Any], arguments: dict[str, Any], **cfg: Any
) -> Any:
    """Builds a variant through timm, its features taken block by block.

    `cfg`: what its `pretrained_cfg` says of the network that these arguments give, unless the user overlays it.
    """
    kept = {name: value for name, value in arguments.items() if name != "out_indices"}
    kept["pretrained_cfg_overlay"] = {**cfg, **(kept.get("pretrained_cfg_overlay") or {})}
    features = dict(out_indices=arguments.get("out_indices", 3), feature_cls="getter")
    return build_model_with_cfg(kind, variant, pretrained, pretrained_filter_fn=filter_fn, feature_cfg=features, **kept)


def parse_sizes(img_size: Any, patch_size: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both as (height, width). Raises: UserError when one is nothing of the kind."""
    sizes = to_2tuple(img_size), to_2tuple(patch_size)
    if any(len(size) != 2 or not all(isinstance(n, int) for n in size) for size in sizes):
        raise UserError(f"img_size {img_size!r} and patch_size {patch_size!r} must be whole numbers or pairs of them")
    return sizes


def require_images(x: Tensor, patch: tuple[int, int] | None = None, padded: bool = False) -> Tensor:
    """Return a batch of images as it is. A model that wraps this name for `torch.fx` can be traced at any size.

    Shape: x (B, in_chans, height, width) -> as x
    Raises: UserError for another number of axes, an image without pixels, or one of no whole patches.
    """
    if x.ndim != 4 or x.shape[2] < 1 or x.shape[3] < 1:
        raise UserError(f"images come as (B, in_chans, height, width), not with shape {tuple(x.shape)}")
    if patch:
        check_image_size((x.shape[2], x.shape[3]), patch, padded)
    return x


def check_image_size(size: tuple[int, ...], patch: tuple[int, ...], padded: bool) -> None:
    """Raises: UserError when an image is smaller than a patch, or no multiple of it and not to be padded."""
    (height, width), (ph, pw) = size, patch
    if min(ph, pw) < 1 or height < 1 or width < 1:
        raise UserError(f"the {height} x {width} image or the {ph} x {pw} patch has no pixel")
    if padded:
        return
    if height < ph or width < pw:
        raise UserError(f"the {height} x {width} image is smaller than the {ph} x {pw} patch; give a larger one")
    if height % ph or width % pw:
        raise UserError(
            f"the {height} x {width} image is no multiple of the {ph} x {pw} patch; "
            "resize it, or create the model with dynamic_img_pad=True"
        )
