"""Arguments of timm.create_model, read from the tensors of a checkpoint."""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import timm
import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.models import create

_COMMON_SIZES = (32, 64, 96, 112, 128, 160, 192, 224, 240, 256, 288, 320, 336, 384, 448, 512)
"""Image sizes to try for a model whose tensors depend on the size in another way than by a position embedding."""


def read_arguments(name: str, tensors: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with which timm's model `name` has the shapes of these tensors: those given, and more.

    Read are the number of classes and of input channels, and where shapes differ still: size of images and patches,
    the pooling of tokens, and depth and width of a ViT. Tensors of another layout are left to the model's own filter.

    Raises: UserError when the number of patches does not say the size of the image, or the width not the heads.
    """
    config = timm.get_pretrained_cfg(name)
    arguments = dict(given)
    for argument, read in (("num_classes", _num_classes), ("in_chans", _input_channels)):
        number = read(config, tensors)
        if number and arguments.get(argument, number) != number:
            raise UserError(f"{argument} {arguments[argument]} is given, and the checkpoint has {number}; leave it out")
        if number is not None:
            arguments.setdefault(argument, number)
    for argument, value in _read_vit(build_empty(name, arguments), tensors, arguments):
        arguments.setdefault(argument, value)
    if "img_size" not in arguments and _has_other_shapes(build_empty(name, arguments), tensors):
        arguments |= _find_size(name, tensors, arguments)
    return arguments


def build_empty(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Create a model without memory for its tensors, on the meta device."""
    with torch.device("meta"):
        return create(name, **arguments)


def shapes_fit(model: nn.Module, tensors: Mapping[str, Any], without: Collection[str] = ()) -> bool:
    """True if the model and the tensors have the same names and shapes, those that begin with `without` left out."""
    return _shapes(model.state_dict(), without) == _shapes(tensors, without)


def _shapes(tensors: Mapping[str, Any], without: Collection[str]) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(getattr(tensor, "shape", ()))
        for name, tensor in tensors.items()
        if not name.startswith(tuple(without))
    }


def _has_other_shapes(model: nn.Module, tensors: Mapping[str, Any]) -> bool:
    """True if the tensors have the names of all parameters, and another shape for one of them."""
    own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return own.keys() <= tensors.keys() and any(_shapes({n: tensors[n]}, ())[n] != shape for n, shape in own.items())


def layer_names(entry: Any) -> tuple[str, ...]:
    """Return the names of layers in an entry of a pretrained_cfg: a name, several, or None."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _num_classes(config: Any, tensors: Mapping[str, Any]) -> int | None:
    """Return the rows of the classifier; 0 for a checkpoint in timm's layout that has none, None where unknown."""
    for name in layer_names(config.classifier):
        if isinstance(weight := tensors.get(f"{name}.weight"), Tensor) and weight.ndim:
            return len(weight)
    return 0 if _input_channels(config, tensors) else None


def _input_channels(config: Any, tensors: Mapping[str, Any]) -> int | None:
    """Return the channels of the first convolution; None where it is not in the checkpoint."""
    weights = [tensors.get(f"{name}.weight") for name in layer_names(config.first_conv)]
    return next((w.shape[1] for w in weights if isinstance(w, Tensor) and w.ndim == 4), None)


def _read_vit(model: Any, tensors: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments by which a ViT's tensors differ from the model's, by name."""
    patches, positions = tensors.get("patch_embed.proj.weight"), tensors.get("pos_embed")
    embed: Any = getattr(model, "patch_embed", None)
    if not (isinstance(patches, Tensor) and patches.ndim == 4 and isinstance(getattr(embed, "proj", None), nn.Conv2d)):
        return
    own = model.state_dict()
    patch = tuple(patches.shape[-2:])
    if patch != tuple(embed.proj.kernel_size):
        yield "patch_size", patch[0] if patch[0] == patch[1] else list(patch)
    if "fc_norm.weight" in tensors and "fc_norm.weight" not in own:
        yield "global_pool", "avg"
        if "cls_token" in own and "cls_token" not in tensors:
            yield "class_token", False
    if (depth := _depth(tensors)) and depth != _depth(own):
        yield "depth", depth
    if len(patches) != embed.proj.out_channels:
        yield "embed_dim", _width(len(patches), given)
    if isinstance(positions, Tensor) and positions.ndim == 3 and "pos_embed" in own and "img_size" not in given:
        prefix = own["pos_embed"].shape[1] - math.prod(embed.grid_size)
        prefix -= "cls_token" in own and "cls_token" not in tensors and prefix > 0
        if positions.shape[1] - prefix != math.prod(embed.grid_size) or patch != tuple(embed.proj.kernel_size):
            yield "img_size", _image_size(positions.shape[1] - prefix, patch)


def _depth(tensors: Mapping[str, Any]) -> int:
    """Return the number of blocks: of those that have tensors, as a file may name any number."""
    numbers = (name.split(".")[1] for name in tensors if name.startswith("blocks."))
    return len({number for number in numbers if number.isdigit()})


def _width(width: int, given: Mapping[str, Any]) -> int:
    """Return the width of a ViT. Raises: UserError when the number of heads is not given, which no tensor tells."""
    if "num_heads" not in given:
        raise UserError(
            f"the checkpoint has embed_dim {width}, which is not the architecture's, and its tensors do not give the "
            f"number of heads; give another --arch, or --model-kwargs embed_dim={width} num_heads=N"
        )
    return width


def _image_size(count: int, patch: tuple[int, ...]) -> list[int]:
    """Return height and width of images of `count` patches. Raises: UserError when it is not a square number."""
    side = math.isqrt(max(count, 0))
    if side**2 != count or not side:
        raise UserError(
            f"the checkpoint has positions for {count} patches, not a square number; give the image size it was "
            "trained with, like --model-kwargs img_size=96,128"
        )
    return [side * patch[0], side * patch[1]]


def _find_size(name: str, tensors: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the image size for which the model has the shapes of these tensors; nothing if there is none."""
    for size in _COMMON_SIZES:
        with suppress(UserError):  # the model has no image size, or not this one
            if shapes_fit(build_empty(name, {**arguments, "img_size": size}), tensors):
                return {"img_size": size}
    return {}
