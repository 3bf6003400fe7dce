"""Building blocks of isomorph's ViTs: their pretrained_cfg, how timm builds them, and checks of sizes."""

from collections.abc import Callable
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import to_2tuple
from timm.models import build_model_with_cfg
from torch import Tensor

from isomorph.errors import UserError


def vit_cfg(**more: Any) -> dict[str, Any]:
    """Return the pretrained_cfg of a ViT for ImageNet at 224 or any other size; `more` overrides its entries."""
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
    """Check the number of heads. Raises: UserError if it does not divide the channels."""
    if num_heads < 1 or embed_dim % num_heads:
        raise UserError(f"num_heads {num_heads} does not divide embed_dim {embed_dim}")


def unwrap_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors in a training checkpoint's `state_dict` or `model`, without DataParallel's prefix."""
    tensors = state_dict.get("state_dict", state_dict.get("model", state_dict))
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def build_vit(
    kind: type, variant: str, pretrained: bool, filter_fn: Callable[..., Any], arguments: dict[str, Any], **cfg: Any
) -> Any:
    """Build a variant through timm, with features after every block.

    `kind` is the class of the model. `cfg` are entries of its `pretrained_cfg` that depend on the arguments; the user's
    `pretrained_cfg_overlay` overrides them.
    """
    arguments = dict(arguments)
    features = dict(out_indices=arguments.pop("out_indices", 3), feature_cls="getter")
    arguments["pretrained_cfg_overlay"] = {**cfg, **(arguments.get("pretrained_cfg_overlay") or {})}
    return build_model_with_cfg(
        kind, variant, pretrained, pretrained_filter_fn=filter_fn, feature_cfg=features, **arguments
    )


def parse_sizes(img_size: Any, patch_size: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return both sizes as (height, width). Raises: UserError if one is not a whole number or a pair of them."""
    sizes = to_2tuple(img_size), to_2tuple(patch_size)
    if any(len(size) != 2 or not all(isinstance(n, int) for n in size) for size in sizes):
        raise UserError(f"img_size {img_size!r} and patch_size {patch_size!r} must be whole numbers or pairs of them")
    return sizes


def require_images(x: Tensor, patch: tuple[int, int] | None = None, padded: bool = False) -> Tensor:
    """Return a batch of images unchanged, after checking it.

    A module that wraps this name with `torch.fx.wrap` can be traced for any size.

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
    if min(ph, pw) < 1 or height < 1 or width < 1:
        raise UserError(f"the {height} x {width} image and the {ph} x {pw} patch must have at least one pixel")
    if padded:
        return
    if height < ph or width < pw:
        raise UserError(f"the {height} x {width} image is smaller than the {ph} x {pw} patch; give a larger one")
    if height % ph or width % pw:
        raise UserError(
            f"the {height} x {width} image is not a multiple of the {ph} x {pw} patch; "
            "resize it, or create the model with dynamic_img_pad=True"
        )
