"""Opening the models, recipes and images that a command names."""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import timm
import torch
from torch import nn

from isomorph.checkpoints.foreign import ModelOptions
from isomorph.checkpoints.model import warn_of_nan
from isomorph.checkpoints.open import local_file
from isomorph.checkpoints.paths import HUB
from isomorph.cli.messages import name_options
from isomorph.cli.options import EXPORTED, CheckpointOptions, DataOptions, OpenOptions
from isomorph.cli.output import COMMAND
from isomorph.errors import UserError
from isomorph.json_values import JsonObject, read_object
from isomorph.lab.data.formats.registry import open_source
from isomorph.lab.data.loaders import eval_loader
from isomorph.lab.data.sources import spaced_images
from isomorph.lab.evaluation.model_data import record_root
from isomorph.lab.training.open import (
    check_pretrained_option,
    is_checkpoint_or_run,
    needs_options,
    open_model,
    open_trained,
)
from isomorph.models.input_sizes import describe_images, random_inputs, training_config
from isomorph.process import is_main_process
from isomorph.spec import ImageSize, spec_of
from isomorph.surgery import notes
from isomorph.surgery.calls import Inputs
from isomorph.surgery.rule import add_notes
from isomorph.terminal_tables import say
from isomorph.yaml_values import parse_value


def open_given(
    name: str, opening: CheckpointOptions, pretrained: bool | None = None, among: Sequence[str] = ()
) -> nn.Module:
    """Open a model by its name in timm, its checkpoint or its run, and print which of several weights were taken.

    `pretrained` replaces that of the options. `among` are all models of the command: the first has the weights, and the
    options are about checkpoints of other programs alone, if there are any.

    Raises: UserError when there is no such model, or for --no-pretrained with weights.
    """
    if Path(name).suffix in EXPORTED:
        raise UserError(
            f"{name} is an exported model, which only evaluate, predict, robustness and verify (as "
            "its second model) take; give its checkpoint"
        )
    weights = None
    if not among or name == among[0]:
        weights = getattr(opening, "weights", None)
    if pretrained is None:
        pretrained = getattr(opening, "pretrained", True)
        check_pretrained_option(among or [name], getattr(opening, "weights", None), pretrained)
    name = _on_disk(name)
    among = list(map(_on_disk, among))
    if any(map(needs_options, among)) and not needs_options(name):
        opening = CheckpointOptions(ema=opening.ema)
    model = open_model(name, weights, pretrained, library_options(opening))
    if not spec_of(model).config:
        _note_defaults(model, name, weighted=bool(weights) or is_checkpoint_or_run(name))
    _print_notes(model)
    warn_of_nan(model.state_dict(), "used")
    recipe = find_recipe(Path(name))
    if recipe:
        record_root(model, recipe)
    return model


def open_without_weights(name: str, num_classes: int | None = None) -> nn.Module:
    """Open a model without reading its weights; one of timm with a number of classes, by default its own.

    Raises: UserError when there is no such model.
    """
    options = library_options(CheckpointOptions())
    if timm.is_model(name):
        options = options._replace(num_classes=num_classes)
    return open_model(_on_disk(name), pretrained=False, options=options)


def _note_defaults(model: nn.Module, name: str, weighted: bool) -> None:
    """Note what is taken for granted of a user's own model: its weights, and the images that it was trained on."""
    weights = "" if weighted else "its weights are those that the function returns; "
    add_notes(
        model, f"{name}: {weights}images are prepared as for ImageNet: {describe_images(model)}"
    )


def find_recipe(path: Path) -> JsonObject | None:
    """Return the recipe.json next to a checkpoint or in a run's folder, None if there is none to read."""
    if not path.exists():
        return None
    folder = path if path.is_dir() else path.parent
    return read_object(folder / "recipe.json")


@functools.cache
def _on_disk(name: str) -> str:
    """Return the name of a model; of one on the hub, the path of its file, which is downloaded once."""
    return str(local_file(name)) if name.startswith(HUB) else name


def open_deployable(name: str, opening: OpenOptions) -> nn.Module:
    """Open a model for deployment. Raises: as `open_given`, and UserError for a pre-training run."""
    recipe = find_recipe(Path(name))
    if recipe and recipe.get("mask"):
        raise UserError(
            f"{name} is a run of masked pre-training: its classifier is not trained; fine-tune it first, with its "
            "model.safetensors as --model.weights of `isomorph train`"
        )
    return open_given(name, opening)


def open_classifier(
    name: str, opening: OpenOptions, device: torch.device | str = "cpu"
) -> nn.Module:
    """Open a classifier, also an exported one. Raises: UserError for options that it does not take, or other inputs."""
    if Path(name).suffix not in EXPORTED:
        return open_deployable(name, opening).to(device)
    from isomorph.deployment.artefact import open_artefact

    if opening.weights or not opening.pretrained:
        raise UserError(f"{name} has its weights; leave out --weights and --no-pretrained")
    artefact = open_artefact(name)
    input_names = artefact.metadata.get("inputs")
    if input_names:
        inputs = " and ".join(input_names)
        raise UserError(
            f"{name} takes {inputs}, and this is for models of images alone; give the model's checkpoint"
        )
    return artefact


def open_given_checkpoint(path: Path, checkpoint: CheckpointOptions) -> nn.Module:
    """Open a checkpoint or the current model of a run, and print which of several weights were taken."""
    return _print_notes(open_trained(path, library_options(checkpoint)))


def library_options(options: CheckpointOptions) -> ModelOptions:
    """Return the options as the library takes them. Raises: UserError for --model-kwargs that are not NAME=VALUE."""
    arguments = {}
    for assignment in options.model_kwargs or []:
        name, equals, text = assignment.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(
                f"--model-kwargs {assignment!r} must be NAME=VALUE, for example img_size=96"
            )
        arguments[name] = parse_value(text)
    return ModelOptions(options.arch, options.num_classes, arguments, options.ema)


def _print_notes(model: nn.Module) -> nn.Module:
    if is_main_process():
        for note in notes(model):
            say(f"isomorph: {name_options(note, *COMMAND[:1])}", sys.stderr)
    return model


def comparison_inputs(
    model: nn.Module, images: DataOptions, batch: int, sizes: Sequence[ImageSize] = ()
) -> list[Inputs]:
    """Return test images, by default one batch, of every size or the model's own; random inputs without data."""
    tried_sizes = sizes or (None,)
    if not images.data:
        return [random_inputs(batch, model, size) for size in tried_sizes]
    fraction = None if images.split == 1 else images.split
    source = open_source(images.data, "test", images.root, fraction)
    chosen = spaced_images(source, images.max_images or batch)
    inputs = []
    for size in tried_sizes:
        for part, _ in eval_loader(chosen, training_config(model, size), batch):
            inputs.append(part)
    return inputs
