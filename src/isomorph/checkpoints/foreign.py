"""Models from checkpoint files that isomorph did not write."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import timm
from timm.data import resolve_data_config
from torch import nn

from isomorph.checkpoints.arguments import read_arguments
from isomorph.checkpoints.contents import read_contents, strip_wrappers
from isomorph.checkpoints.guess import architecture_hint, guess_architecture
from isomorph.checkpoints.hub import read_config
from isomorph.checkpoints.model import load_state
from isomorph.checkpoints.rebuild import build_checked, record_base, record_data
from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import training_config
from isomorph.models import create, require_registered
from isomorph.models.model_kwargs import check_model_kwargs
from isomorph.surgery.notes import add_notes

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


def open_foreign(path: Path, options: ModelOptions = NO_OPTIONS) -> nn.Module:
    """Open a checkpoint that isomorph did not write: a state dict, or one of timm's training script; in eval mode.

    The architecture is the one given, else the one that the file or timm's config.json next to it names. Number of
    classes, channels and image size are read from the tensors (`read_arguments`).

    Raises: UserError when the architecture is unknown or does not fit, or the file cannot be read.
    """
    contents = read_contents(path, options.ema)
    if path.suffix == ".safetensors":
        contents = contents._replace(settings=read_config(path))
    tensors = strip_wrappers(contents.tensors)
    name = options.arch or _named_architecture(contents.settings)
    if not name:
        raise UserError(f"{path} does not say what model it is; {architecture_hint(tensors)}")
    require_registered(name)
    given = {**_model_settings(contents.settings, path), **options.arguments()}
    arguments = _fitting_arguments(name, tensors, given, path)
    try:
        model = build_checked(tensors, path, lambda: create(name, **arguments), name)
        load_state(model, tensors, path)
    except UserError as misfit:
        other = guess_architecture(tensors)
        hint = f"; its tensors are those of {other}: give --arch {other}" if other and other != name else ""
        raise UserError(f"{misfit}{hint}") from None
    record_base(model, {"name": name, **arguments})
    images = _image_settings(contents.settings, model, path)
    if images or "." not in name:  # a tag, as in resnet50.a1_in1k, says which images its weights expect
        record_data(model, images)
    add_notes(model, *filter(None, [contents.note(path)]))
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
    except ValueError as error:
        raise UserError(f"{path}: its args.model_kwargs cannot be used: {error}") from None
    return arguments


def _fitting_arguments(name: str, tensors: Mapping[str, Any], given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the arguments for a model with these tensors. Raises: UserError naming the file."""
    try:
        return read_arguments(name, tensors, given)
    except UserError as error:
        raise UserError(f"cannot open {path} as {name}: {error}") from None


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
