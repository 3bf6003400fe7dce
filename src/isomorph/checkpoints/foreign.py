"""Models from checkpoint files that isomorph did not write: state dicts, and those of timm's training script."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.data import resolve_data_config
from torch import Tensor, nn

from isomorph.checkpoints.files import Contents, strip_wrappers
from isomorph.checkpoints.header import check_foreign_kwargs, parse_data
from isomorph.checkpoints.hub import read_config
from isomorph.checkpoints.model import build_checked, record_data
from isomorph.errors import UnknownModel, UserError
from isomorph.models import create, require_registered
from isomorph.models.input_sizes import describe_images, training_config
from isomorph.models.model_kwargs import check_model_kwargs
from isomorph.operations import copy_module, in_eval_mode
from isomorph.spec import layer_names
from isomorph.surgery import Edit, Reparameterize, apply_edit
from isomorph.surgery.rule import add_notes
from isomorph.surgery.site import Site

_TEST_SETTINGS = ("test_input_size", "test_crop_pct")
_IMAGE_SETTINGS = (
    "input_size",
    "img_size",
    "in_chans",
    "mean",
    "std",
    "interpolation",
    "crop_pct",
    "crop_mode",
)


class ModelOptions(NamedTuple):
    """How to open a model that isomorph did not write, where the file does not say it.

    `arch` is the name of a timm model, or `package.module:function` of your own; `model_kwargs` are more arguments of
    timm.create_model, or of the function. `ema` takes the averaged weights of a training checkpoint, where it has any.
    """

    arch: str | None = None
    num_classes: int | None = None
    model_kwargs: Mapping[str, Any] = {}
    ema: bool = True

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of timm.create_model that were given. Raises: UserError for one that is not allowed."""
        try:
            check_model_kwargs(self.model_kwargs)
        except ValueError as error:
            raise UserError(f"model.kwargs: {error}") from None
        arguments = dict(self.model_kwargs)
        if self.num_classes is not None:
            arguments["num_classes"] = self.num_classes
        return arguments


NO_OPTIONS = ModelOptions()


def build_foreign(contents: Contents, options: ModelOptions = NO_OPTIONS) -> nn.Module:
    """Build the model of a checkpoint that isomorph did not write: a state dict, or one of timm's training script.

    The architecture is the one given, else the one that the file or timm's config.json next to it names. Number of
    classes, channels and image size are read from the tensors (`read_arguments`).

    Raises: UserError when the architecture is unknown or does not fit.
    """
    path = contents.path
    tensors = strip_wrappers(contents.tensors)
    settings = read_config(path) if path.suffix == ".safetensors" else contents.settings
    name = options.arch or _named_model(settings)
    if not name:
        raise UnknownModel(
            f"{path} does not say what model it is; give base=NAME, one of timm.list_models(), or "
            "base=MyModel() of your own"
        )
    require_registered(name)
    try:
        arguments = read_arguments(
            name, tensors, {**_model_settings(settings, path), **options.arguments()}
        )
    except UserError as error:
        raise UserError(f"cannot open {path} as {name}: {error}") from None
    model = build_checked(
        contents, lambda: create(name, **arguments), f"{name} without other arguments"
    )
    model = _with_layers_of(model, tensors)
    images = _image_settings(settings, model, path)
    # a tag, as in resnet50.a1_in1k, says which images its weights expect
    if images or "." not in name:
        record_data(model, images)
        if not images:
            prepared = f"as for {name}'s public weights: {describe_images(model)}"
            add_notes(model, f"{path.name} does not say how its images were prepared; {prepared}")
    return model


def _named_model(settings: Mapping[str, Any]) -> str | None:
    """Return the timm model that a training script named, or None."""
    named = settings.get("model", settings.get("arch"))
    return named if isinstance(named, str) and timm.is_model(named.partition(".")[0]) else None


def _with_layers_of(model: nn.Module, tensors: Mapping[str, Any]) -> nn.Module:
    """Return the model, or its reparameterized form if the tensors are those of that form."""
    if tensors.keys() == model.state_dict().keys() or not Reparameterize().accepts(Site(model)):
        return model
    reparameterized = apply_edit(in_eval_mode(copy_module(model)), Edit(Reparameterize(), ("",)))
    return reparameterized if tensors.keys() == reparameterized.state_dict().keys() else model


def _model_settings(settings: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the arguments with which timm's training script created its model, apart from those read from tensors."""
    kwargs = settings.get("model_kwargs")
    arguments: dict[str, Any] = {}
    if isinstance(kwargs, Mapping):
        arguments = {str(name): value for name, value in kwargs.items()}
    if isinstance(settings.get("gp"), str):
        arguments["global_pool"] = settings["gp"]
    try:
        check_model_kwargs(arguments)
        check_foreign_kwargs(arguments)
    except ValueError as error:
        raise UserError(f"{path}: its args.model_kwargs cannot be used: {error}") from None
    return arguments


def _image_settings(settings: Mapping[str, Any], model: nn.Module, path: Path) -> dict[str, Any]:
    """Return the data config that a training script's settings give. Raises: UserError if they are invalid."""
    image_settings = {
        key: settings[key] for key in _IMAGE_SETTINGS if settings.get(key) is not None
    }
    if not image_settings:
        return {}
    if "img_size" not in image_settings:
        image_settings.setdefault("input_size", training_config(model)["input_size"])
    try:
        of_tests = {key: settings[key] for key in _TEST_SETTINGS if settings.get(key) is not None}
        return resolve_data_config(image_settings, model=model) | parse_data(of_tests, path)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: its args have no valid image settings ({error or type(error).__name__})"
        ) from None


def read_arguments(
    name: str, tensors: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments with which timm's model `name` has the shapes of these tensors: those given, and more.

    Read are the number of classes and of input channels, and of a ViT the size of images and patches and the pooling of
    tokens. Tensors of another layout are left to the model's own filter.

    Raises: UserError when the number of patches does not say the size of the image.
    """
    arguments = dict(given)
    for argument, number in _read_numbers(name, tensors):
        if number and arguments.get(argument, number) != number:
            raise UserError(
                f"{argument} {arguments[argument]} is given, and the checkpoint has {number}; leave it out"
            )
        arguments.setdefault(argument, number)
    with torch.device("meta"):
        model = create(name, **arguments)
    arguments_of_vit = dict(_read_vit(model, tensors, has_size="img_size" in arguments))
    return arguments_of_vit | arguments


def _read_numbers(name: str, tensors: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the numbers of classes and of input channels that tensors have, where they say them."""
    config = timm.get_pretrained_cfg(name)
    assert config
    classifiers = layer_names(config.classifier)
    stems = [
        weight for weight in _weights(layer_names(config.first_conv), tensors) if weight.ndim == 4
    ]
    heads = _weights(classifiers, tensors)
    if heads:
        yield "num_classes", len(heads[0])
    elif stems and not any(tensor.startswith(classifiers) for tensor in tensors):
        yield "num_classes", 0  # in timm's layout, without a classifier
    if stems:
        yield "in_chans", stems[0].shape[1]


def _weights(layers: tuple[str, ...], tensors: Mapping[str, Any]) -> list[Tensor]:
    weights = [tensors.get(f"{layer}.weight") for layer in layers]
    return [weight for weight in weights if isinstance(weight, Tensor) and weight.ndim]


def _read_vit(model: Any, tensors: Mapping[str, Any], has_size: bool) -> Iterator[tuple[str, Any]]:
    """Yield the arguments by which a ViT's tensors differ from the model's, by name; not its size if it is known."""
    patches = tensors.get("patch_embed.proj.weight")
    embed: Any = getattr(model, "patch_embed", None)
    if not isinstance(patches, Tensor) or patches.ndim != 4:
        return
    if not isinstance(getattr(embed, "proj", None), nn.Conv2d):
        return
    state = model.state_dict()
    patch = tuple(patches.shape[-2:])
    has_other_patches = patch != tuple(embed.proj.kernel_size)
    if has_other_patches:
        yield "patch_size", patch[0] if patch[0] == patch[1] else list(patch)
    lacks_class_token = "cls_token" in state and "cls_token" not in tensors
    if "fc_norm.weight" in tensors and "fc_norm.weight" not in state:
        yield "global_pool", "avg"
        if lacks_class_token:
            yield "class_token", False
    positions = tensors.get("pos_embed")
    if (
        has_size
        or not isinstance(positions, Tensor)
        or positions.ndim != 3
        or "pos_embed" not in state
    ):
        return
    grid = math.prod(embed.grid_size)
    prefix = state["pos_embed"].shape[1] - grid
    count = positions.shape[1] - prefix
    if lacks_class_token and prefix > 0:
        count += 1
    # the authors of DINOv2 add one to the class token
    if not prefix and math.isqrt(count) ** 2 == count - 1:
        count -= 1
    if count != grid or has_other_patches:
        unknown = [
            f"; it has {name}, and the model has not" for name in tensors if name not in state
        ]
        yield "img_size", _image_size(count, patch, "".join(unknown[:1]))


def _image_size(count: int, patch: tuple[int, ...], suffix: str) -> list[int]:
    """Return the size of the square image with this number of patches. Raises: UserError if there is none."""
    side = math.isqrt(max(count, 0))
    if side**2 != count or not side:
        raise UserError(
            f"the checkpoint has positions for {count} patches, not a square number{suffix}; give the image size it "
            "was trained with, like img_size=(96, 128), or another `base`"
        )
    return [side * patch[0], side * patch[1]]
