"""What a model takes: size, channels and normalisation of images, random inputs, and models fitted to another size."""

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

import torch
from timm.data import resolve_data_config
from timm.layers import PatchEmbed
from timm.models import get_model_input_config, get_model_traits
from torch import nn

from isomorph.errors import UserError, one_line
from isomorph.layers.modes import eval_mode, first_float
from isomorph.operations import copy_module
from isomorph.spec import ImageSize, image_size, spec_of
from isomorph.surgery.calls import Inputs, cast, own_inputs
from isomorph.surgery.rule import record


def evaluation_config(model: nn.Module, size: int | ImageSize | None = None) -> dict[str, Any]:
    """Return timm's data config for testing a model, at the given size (height, width, or one for both) or its own.

    Its own size is the one that the model was built for (`img_size`), else that of its pretrained_cfg.
    Keys: input_size (channels, height, width), mean, std, interpolation, crop_pct, crop_mode.

    Raises: UserError for a size below 1.

    >>> from isomorph.models.input_sizes import evaluation_config
    >>> evaluation_config(timm.create_model("cifar_resnet20"))["input_size"]
    (3, 32, 32)
    """
    return _data_config(model, size, {}, use_test_size=True)


def training_config(
    model: nn.Module, size: int | Sequence[int] | None = None, crop: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return timm's data config for training a model, at the given size (height, width, or one for both) or its own.

    Its own size is the one that the model was built for (`img_size`), else that of its pretrained_cfg.
    `crop` overrides crop_pct and crop_mode, which are for its test images.

    Raises: UserError for a size below 1.

    >>> from isomorph.models.input_sizes import training_config
    >>> training_config(timm.create_model("cifar_resnet20"), size=(48, 48))["input_size"]
    (3, 48, 48)
    """
    return _data_config(model, size, crop or {}, use_test_size=False)


def _data_config(
    model: nn.Module, size: int | Sequence[int] | None, crop: Mapping[str, Any], use_test_size: bool
) -> dict[str, Any]:
    """Every channel has the average mean and std if they differ; without a size, timm takes the pretrained_cfg's."""
    sides = built_size(model) if size is None else image_size(size)
    channels = input_channels(model)
    options = dict(crop)
    if sides is not None:
        options["input_size"] = (channels, *sides)
    config = dict(resolve_data_config(options, model=model, use_test_size=use_test_size))
    for key in ("mean", "std"):
        if len(config[key]) != channels:
            config[key] = (fmean(config[key]),) * channels
    config["input_size"] = (channels, *image_size(config["input_size"][-2:]))
    return config


def describe_images(model: nn.Module) -> str:
    """Return a model's own size of images, in tests another if so, and how images are cropped and normalised."""
    config = evaluation_config(model)
    trained = "{} x {}".format(*training_config(model)["input_size"][-2:])
    tested = "{} x {}".format(*config["input_size"][-2:])
    size = trained if trained == tested else f"{trained}, in tests {tested}"
    return f"own size {size}, crop_pct {config['crop_pct']:g}, mean {config['mean']}, std {config['std']}"


def built_size(model: nn.Module) -> ImageSize | None:
    """Return the image size (height, width) that a model was built for, if its pretrained_cfg has another one.

    It is the `img_size` of timm.create_model or set_input_size; a size that `record_data` recorded counts for more.
    """
    size = get_model_traits(model).get("img_size") or _size_in_config(model)
    if size is None or (spec_of(model).input_size or ())[-2:] == tuple(size):
        return None
    if record(model).trained_size and not get_model_input_config(model)["fixed_input_size"]:
        return None
    return size[0], size[1]


def _size_in_config(model: nn.Module) -> ImageSize | None:
    """Return the image size in the config of a model of transformers, or of its vision half."""
    config = getattr(model, "config", None)
    side: Any = getattr(getattr(config, "vision_config", config), "image_size", None)
    if isinstance(side, Mapping):
        side = [side.get("height"), side.get("width")]
    try:
        return image_size(side)
    except UserError:  # it has none
        return None


def knows_size(model: nn.Module) -> bool:
    """True if the model says itself which size of images it takes."""
    return bool(spec_of(model).input_size or built_size(model))


def input_channels(model: nn.Module) -> int:
    """Return the number of input channels: the model's `in_chans`, else those of its first convolution."""
    channels = getattr(model, "in_chans", None) or getattr(
        _first_convolution(model), "in_channels", None
    )
    if channels:
        return channels
    size = spec_of(model).input_size or (3,)
    return size[0]


def _first_convolution(model: nn.Module) -> nn.Module | None:
    spec = spec_of(model)
    if not spec.config:  # a user's own network
        for module in model.modules():
            if isinstance(module, nn.Conv2d) and module.in_channels <= 4:
                return module
        return None
    if len(spec.first_layers) != 1:
        return None
    with suppress(AttributeError):  # removed or replaced
        return model.get_submodule(spec.first_layers[0])
    return None


def fit_to_size(model: nn.Module, size: int | ImageSize) -> nn.Module:
    """Return the model itself if it takes images of this size, else a copy that timm has fitted to it.

    The size is a height and a width, or one number for both.

    timm's `set_input_size` resamples the position embedding of a ViT; the other weights are unchanged.

    Raises: UserError when the model does not take such images, or its patches would leave out an edge of them.

    >>> from isomorph.models.input_sizes import fit_to_size
    >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval()
    >>> fit_to_size(vit, (64, 64))(torch.zeros(1, 3, 64, 64)).shape
    torch.Size([1, 1000])
    """
    size = image_size(size)
    shape = (input_channels(model), *size)
    problem = input_size_problem(model, shape)
    if problem and not _uncovered_edge(model, shape) and hasattr(model, "set_input_size"):
        model = copy_module(model)
        try:
            # timm warns when it interpolates relative positions
            with warnings.catch_warnings(action="ignore"):
                model.set_input_size(img_size=size)  # type: ignore[operator]
            problem = input_size_problem(model, shape)
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            problem = str(error)
    if problem:
        own = ""
        if knows_size(model) and not _uncovered_edge(model, shape):
            own = "; its own are {} x {}".format(*evaluation_config(model)["input_size"][-2:])
        raise UserError(
            f"the model takes no images of {size[0]} x {size[1]}: {' '.join(problem.split())}{own}",
        )
    return model


@torch.no_grad()
def input_size_problem(model: nn.Module, size: Sequence[int]) -> str:
    """Return why the model does not take an image of this size (channels, height, width); empty if it does.

    Patches must fill the image, since timm drops the edge that they leave out; not at the model's native size.
    """
    inputs = own_inputs(model, 1)
    if inputs:
        return f"its inputs are {' and '.join(inputs)}, not images alone"
    problem = _uncovered_edge(model, size)
    if problem:
        return problem
    try:
        with eval_mode(model):
            model(torch.zeros(1, *size, device="cpu").to(first_float(model)))
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        return one_line(error)
    return ""


def _uncovered_edge(model: nn.Module, size: Sequence[int]) -> str:
    """Return that timm's patches do not fill an image, with the nearest sizes that they fill; empty if they do."""
    embed = getattr(model, "patch_embed", None)
    if not isinstance(embed, PatchEmbed) or embed.dynamic_img_pad:
        return ""
    height, width = size[-2:]
    ph, pw = embed.patch_size
    native = {config(model)["input_size"][-2:] for config in (evaluation_config, training_config)}
    if not (height % ph or width % pw) or (height, width) in native:
        return ""
    nearest = f"{math.ceil(height / ph) * ph} x {math.ceil(width / pw) * pw}"
    if height >= ph and width >= pw:
        nearest = f"{height // ph * ph} x {width // pw * pw} or {nearest}"
    return f"patches of {ph} x {pw} do not fill them; give {nearest}, since timm would leave out the rest of the image"


def random_inputs(batch: int, model: nn.Module, size: ImageSize | None = None) -> Inputs:
    """Return the model's own `example_inputs(batch, size)`, else standard normal noise, the same at every call."""
    if batch < 1:
        raise UserError(f"a batch of {batch} has no inputs; give at least 1")
    model_inputs = own_inputs(model, batch, size)
    if model_inputs:
        return model_inputs
    shape = training_config(model, size)["input_size"]
    return torch.randn((batch, *shape), generator=torch.Generator().manual_seed(0), device="cpu")


def inputs_like(
    model: nn.Module,
    batch: int,
    input_size: tuple[int, ...],
    device: str | None = None,
) -> Inputs:
    """Return inputs of (channels, height, width) to time or count, in the model's dtype, on its device or the given."""
    parameter = first_float(model)
    target = device or parameter.device
    model_inputs = own_inputs(model, batch, input_size[-2:])
    if model_inputs is None:
        return torch.randn(batch, *input_size, device=target, dtype=parameter.dtype)
    return {name: cast(x, parameter.dtype).to(target) for name, x in model_inputs.items()}


def label_names(model: nn.Module) -> list[str]:
    """Return the names of a model's classes; empty without any, or if their number is another (of public weights)."""
    names = spec_of(model).classes
    return names if getattr(model, "num_classes", len(names)) == len(names) else []


def class_names(model: nn.Module) -> list[str]:
    """Return the names of a model's classes, or their numbers where they have none."""
    count: Any = model.num_classes
    return label_names(model) or [str(number) for number in range(count)]
