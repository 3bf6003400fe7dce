"""What images a model takes: their size, channels and normalisation, and the model at another size than its own."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
from timm.data import resolve_data_config
from timm.layers import PatchEmbed
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.eval_mode import eval_mode

ImageSize = tuple[int, int]


def evaluation_config(model: nn.Module, size: ImageSize | None = None) -> dict[str, Any]:
    """The data config to test a model with: input size (height, width) as given or its own, mean, std, crop.

    Raises: UserError for a size without a pixel.
    """
    given = {"input_size": (input_channels(model), *size)} if size else {}
    return _adapt_channels(resolve_data_config(given, model=model, use_test_size=True), input_channels(model))


def training_config(
    model: nn.Module, size: Sequence[int] | None = None, crop: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The data config to train a model with, at the given size or its own, and the crop of its test images.

    Raises: UserError for a size without a pixel.
    """
    given = {**(crop or {}), **({"input_size": (input_channels(model), *size)} if size else {})}
    return _adapt_channels(resolve_data_config(given, model=model, use_test_size=False), input_channels(model))


def _adapt_channels(config: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The data config for images of so many channels: where there are others, each has the mean of mean and of std.

    Raises: UserError for a size without a pixel.
    """
    height, width = config["input_size"][-2:]
    _check_size((height, width))
    spread = {k: config[k] if len(config[k]) == number else (fmean(config[k]),) * number for k in ("mean", "std")}
    return {**config, **spread, "input_size": (number, height, width)}


def _check_size(size: ImageSize) -> None:
    """Raises: UserError for a size without a pixel."""
    if min(size) < 1:
        raise UserError(f"a size of {size[0]} x {size[1]} has no pixel; give positive sizes")


def input_channels(model: nn.Module) -> int:
    """Channels of the model's images: as it says itself, else as its first convolution has them."""
    config = getattr(model, "pretrained_cfg", None) or {}
    first = config.get("first_conv")
    try:
        conv = model.get_submodule(first) if isinstance(first, str) else None
    except AttributeError:  # gone, or another class since
        conv = None
    known = getattr(model, "in_chans", None) or getattr(conv, "in_channels", None)
    return known or (config.get("input_size") or (3,))[0]


def fit_to_size(model: nn.Module, size: ImageSize) -> nn.Module:
    """The model itself if it takes images of this size (height, width), else a copy that timm has fitted to it.

    A ViT's position embedding is resampled, as `set_input_size` does; the weights stay as they are.

    Raises: UserError when the model takes no such images, or its patches would leave out an edge of them.
    """
    _check_size(size)
    shape = (input_channels(model), *size)
    problem = input_size_problem(model, shape)
    if problem and not _patch_embed_problem(model, shape) and hasattr(model, "set_input_size"):
        model = copy.deepcopy(model)
        try:
            with warnings.catch_warnings(action="ignore"):  # timm's interpolation of relative positions
                model.set_input_size(img_size=size)  # type: ignore[operator]
            problem = input_size_problem(model, shape)
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            problem = _error_text(error)
    if problem:
        raise UserError(f"the model takes no images of {size[0]} x {size[1]}: {problem}")
    return model


@torch.no_grad()
def input_size_problem(model: nn.Module, size: Sequence[int]) -> str:
    """What the model says against one image of this size (channels, height, width); nothing where it takes it.

    An edge that its patches leave out, as they do not fill the image, is said too: timm drops it silently. Only at the
    size that the weights were made for is that their way.
    """
    parameter = next(model.parameters())
    if said := _patch_embed_problem(model, size):
        return said
    try:
        with eval_mode(model), _record_uncovered(model, size) as seen:
            model(torch.zeros(1, *size, device=parameter.device, dtype=parameter.dtype))
    except (RuntimeError, AssertionError, ValueError) as error:
        return _error_text(error)
    return "" if _is_native_size(model, size) else "".join(_uncovered_edge(patch, size) for patch in seen[-1:])


def _error_text(error: Exception) -> str:
    """An error's words in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _is_native_size(model: nn.Module, size: Sequence[int]) -> bool:
    """Whether this is the size that the model was trained or is tested at."""
    return tuple(size[-2:]) in {tuple(of(model)["input_size"][-2:]) for of in (evaluation_config, training_config)}


def _patch_embed_problem(model: nn.Module, size: Sequence[int]) -> str:
    """What is wrong with the size for the model's patch embedding, before any image is shown to it; or nothing."""
    embed = getattr(model, "patch_embed", None)
    if not isinstance(embed, PatchEmbed) or embed.dynamic_img_pad or _is_native_size(model, size):
        return ""
    return _uncovered_edge(embed.patch_size, size)


def _uncovered_edge(patch: Sequence[int], size: Sequence[int]) -> str:
    """That patches do not fill an image, and the nearest sizes that they fill; nothing where they do."""
    pairs = list(zip(size[-2:], patch, strict=True))
    if not any(side % step for side, step in pairs):
        return ""
    below, above = ([(side + more * (step - 1)) // step * step for side, step in pairs] for more in (0, 1))
    nearest = " or ".join("{} x {}".format(*sides) for sides in (below, above) if min(sides))
    of = str(patch[0]) if len(set(patch)) == 1 else "{} x {}".format(*patch)
    return f"patches of {of} do not fill them; give {nearest}"


@contextmanager
def _record_uncovered(model: nn.Module, size: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Patches, in pixels of the image, that leave out an edge of what they cut up while the model looks at an image.

    They are convolutions whose stride is their kernel, without padding: on the image, or within a module of a
    `patch_size` (on the map of a backbone).
    """
    found: list[tuple[int, int]] = []
    handles = [conv.register_forward_pre_hook(_recording_hook(found, size)) for conv in _patch_convolutions(model)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _patch_convolutions(model: nn.Module) -> list[nn.Conv2d]:
    """The convolutions that cut images into patches."""
    inside = {child for module in model.modules() if hasattr(module, "patch_size") for child in module.children()}
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Conv2d)
        and module.stride == module.kernel_size != (1, 1)
        and module.padding in ((0, 0), "valid")
        and (module in inside or module.in_channels == input_channels(model))
    ]


def _recording_hook(
    found: list[tuple[int, int]], size: Sequence[int]
) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    """A hook that notes the patches of a convolution, in pixels, where they do not fill its input."""

    def note(conv: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sides, steps = inputs[0].shape[-2:], conv.kernel_size
        if any(side % int(step) for side, step in zip(sides, steps, strict=True)):  # type: ignore[arg-type]
            height, width = (int(k) * round(a / max(b, 1)) for k, a, b in zip(steps, size[-2:], sides, strict=True))  # type: ignore[arg-type]
            found.append((height, width))

    return note
