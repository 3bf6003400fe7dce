"""Models from checkpoint files that isomorph did not write, and the architectures of timm that have their tensors."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import timm
from timm.data import resolve_data_config
from torch import nn

from isomorph.checkpoints.arguments import build_empty, layer_names, read_arguments, shapes_fit
from isomorph.checkpoints.files import Contents, strip_wrappers
from isomorph.checkpoints.hub import read_config
from isomorph.checkpoints.model import build_checked, load_state, record_base, record_data
from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import training_config
from isomorph.models import create, require_registered
from isomorph.models.model_kwargs import check_foreign_kwargs, check_model_kwargs
from isomorph.surgery.record import add_notes

_IMAGE_SETTINGS = ("input_size", "img_size", "in_chans", "mean", "std", "interpolation", "crop_pct", "crop_mode")
"""Settings of timm's training script that say which images the model expects."""


class ModelOptions(NamedTuple):
    """How to open a model that isomorph did not write, where the file does not say it.

    `arch` is the name of a timm model, `model_kwargs` are more arguments of timm.create_model. `ema` takes the averaged
    weights of a training checkpoint, where it has any.
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
            raise UserError(f"--model-kwargs: {error}") from None
        return dict(self.model_kwargs) | ({} if self.num_classes is None else {"num_classes": self.num_classes})


NO_OPTIONS = ModelOptions()


def open_foreign(contents: Contents, options: ModelOptions = NO_OPTIONS) -> nn.Module:
    """Open a checkpoint that isomorph did not write: a state dict, or one of timm's training script; in eval mode.

    The architecture is the one given, else the one that the file or timm's config.json next to it names. Number of
    classes, channels and image size are read from the tensors (`read_arguments`).

    Raises: UserError when the architecture is unknown or does not fit.
    """
    path, tensors = contents.path, strip_wrappers(contents.tensors)
    settings = read_config(path) if path.suffix == ".safetensors" else contents.settings
    name = options.arch or _named_architecture(settings)
    if not name:
        raise UserError(f"{path} does not say what model it is; {_architecture_hint(tensors)}")
    require_registered(name)
    given = {**_model_settings(settings, path), **options.arguments()}
    try:
        arguments = read_arguments(name, tensors, given)
    except UserError as error:
        raise UserError(f"cannot open {path} as {name}: {error}") from None
    try:
        model = build_checked(contents, lambda: create(name, **arguments), name)
        load_state(model, tensors, path)
    except UserError as misfit:
        other = guess_architecture(tensors)
        hint = f"; its tensors are those of {other}: give --arch {other}" if other and other != name else ""
        raise UserError(f"{misfit}{hint}") from None
    record_base(model, {"name": name, **arguments})
    images = _image_settings(settings, model, path)
    if images or "." not in name:  # a tag, as in resnet50.a1_in1k, says which images its weights expect
        record_data(model, images)
    add_notes(model, *contents.notes)
    return model.eval()


def _named_architecture(settings: Mapping[str, Any]) -> str | None:
    """Return the timm model that a training script names in its settings."""
    name = settings.get("model", settings.get("arch"))
    return name if isinstance(name, str) and timm.is_model(name.partition(".")[0]) else None


def _model_settings(settings: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the arguments with which timm's training script created its model, apart from those read from tensors."""
    given = settings.get("model_kwargs")
    arguments = {str(name): value for name, value in given.items()} if isinstance(given, Mapping) else {}
    if isinstance(settings.get("gp"), str):
        arguments["global_pool"] = settings["gp"]
    try:
        check_model_kwargs(arguments)
        check_foreign_kwargs(arguments)
    except ValueError as error:
        raise UserError(f"{path}: its args.model_kwargs cannot be used: {error}") from None
    return arguments


def _image_settings(settings: Mapping[str, Any], model: nn.Module, path: Path) -> dict[str, Any]:
    """Return the data config of timm's training script; empty if the file has no such settings."""
    given = {key: settings[key] for key in _IMAGE_SETTINGS if settings.get(key) is not None}
    if not given:
        return {}
    if "img_size" not in given:
        given.setdefault("input_size", training_config(model)["input_size"])
    try:
        return resolve_data_config(given, model=model)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"{path}: its args have no valid image settings ({error or type(error).__name__})") from None


_COMMON = {
    "layer1.0.conv1.weight": (
        *("resnet18", "resnet34", "resnet26", "resnet50", "resnet101", "resnet152", "wide_resnet50_2"),
        *("resnet18d", "resnet34d", "resnet26d", "resnet50d", "resnet101d", "resnet152d", "resnetrs50"),
        *("resnext50_32x4d", "resnext101_32x8d", "seresnet50", "cifar_resnet20", "cifar_resnet56"),
    ),
    "blocks.0.attn.qkv.weight": (
        *("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224", "vit_large_patch16_224"),
        *("vit_small_patch32_224", "vit_base_patch32_224", "vit_base_patch8_224", "vit_small_patch14_dinov2"),
        *("vit_base_patch14_dinov2", "deit3_small_patch16_224", "deit3_base_patch16_224", "beit_base_patch16_224"),
        *("deit_tiny_distilled_patch16_224", "deit_small_distilled_patch16_224", "cait_xxs24_224"),
    ),
    "stages.0.blocks.0.conv_dw.weight": (
        *("convnext_atto", "convnext_femto", "convnext_pico", "convnext_nano", "convnext_tiny", "convnext_small"),
        *("convnext_base", "convnext_large", "convnextv2_atto", "convnextv2_nano", "convnextv2_tiny"),
    ),
    "conv_stem.weight": (
        *("efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "efficientnet_b3", "efficientnet_b4"),
        *("mobilenetv2_100", "mobilenetv3_small_100", "mobilenetv3_large_100", "tf_efficientnetv2_s", "mnasnet_100"),
    ),
    "layers.0.blocks.0.attn.qkv.weight": (
        *("swin_tiny_patch4_window7_224", "swin_small_patch4_window7_224", "swin_base_patch4_window7_224"),
    ),
    "features.0.weight": ("vgg11", "vgg13", "vgg16", "vgg19", "vgg11_bn", "vgg13_bn", "vgg16_bn", "vgg19_bn"),
    "features.denseblock1.denselayer1.conv1.weight": ("densenet121", "densenet169", "densenet201", "densenet161"),
    "s1.b1.conv1.conv.weight": ("regnetx_002", "regnety_002", "regnety_008", "regnety_016", "regnety_032"),
}
"""Common architectures, by the name of a tensor that only they have; of several with equal tensors, the usual one."""


def guess_architecture(tensors: Mapping[str, Any]) -> str | None:
    """Return the name of a common model whose tensors have exactly these names and shapes; None if there is none.

    Classifier, position embedding and the first convolution, which depend on classes and images, may differ in shape.
    """
    candidates = (name for marker, names in _COMMON.items() if marker in tensors for name in names)
    return next((name for name in candidates if _fits(name, tensors)), None)


def _fits(name: str, tensors: Mapping[str, Any]) -> bool:
    """True if a model has these tensors, apart from those that depend on classes and images."""
    config = timm.get_pretrained_cfg(name)
    without = [f"{layer}." for entry in (config.classifier, config.first_conv) for layer in layer_names(entry)]
    with suppress(UserError):
        return shapes_fit(build_empty(name, {}), tensors, [*without, "pos_embed"])
    return False


def _architecture_hint(tensors: Mapping[str, Any]) -> str:
    """Return what to give as --arch, in words: the architecture with these tensors, or where to look."""
    if name := guess_architecture(tensors):
        return f"its tensors are those of {name}: give --arch {name}"
    return "give --arch NAME, one of timm.list_models(); another model opens in Python: iso.load(path, base=MyModel())"
