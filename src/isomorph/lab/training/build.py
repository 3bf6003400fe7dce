"""Build the model and the data loaders of a run from its recipe."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from isomorph.checkpoints.files import read_contents, strip_wrappers
from isomorph.checkpoints.model import load_state
from isomorph.checkpoints.open import build_by_function, load, local_file
from isomorph.errors import UserError
from isomorph.lab.data.formats.registry import open_source
from isomorph.lab.data.label_maps import LabelMapSource
from isomorph.lab.data.loaders import (
    ImageConfig,
    eval_transform,
    loader_of_share,
    train_loader,
    train_transform,
    transformed,
)
from isomorph.lab.data.sampler import BatchOrder, BatchParts, TrainSampler
from isomorph.lab.data.sources import Source, class_fraction, drawn_once, first_classes
from isomorph.lab.data.streams import Stream, open_stream, stream_loader, stream_test_loader
from isomorph.lab.distributed import Runtime
from isomorph.lab.training.open import open_with_classes
from isomorph.lab.training.recipe.model_fields import ModelPart
from isomorph.lab.training.recipe.recipe import Recipe
from isomorph.layers.pyramid.inits import init_as_mae
from isomorph.models import create
from isomorph.models.input_sizes import training_config
from isomorph.spec import spec_of
from isomorph.surgery import notes, recast, unstride
from isomorph.surgery.rule import add_notes, update_record
from isomorph.surgery.site import nearest_names

Data = Source | Stream


def build_model(
    part: ModelPart, num_classes: int, drop_path: float = 0.0, recast_now: bool = True
) -> nn.Module:
    """Create the base model with its weights, and unstride and recast it if `recast_now`.

    Raises: UserError when timm cannot create the model, the weights do not fit, or unstride or recast match no module.
    """
    if part.head_std is not None and (part.is_of_function or part.name is None):
        raise UserError(
            "model.head_std is for a model of timm that is given as model.name; leave it out"
        )
    arguments = {"num_classes": part.num_classes or num_classes, **part.kwargs}
    if drop_path:
        arguments["drop_path_rate"] = drop_path
    start = ""
    if part.is_of_function:
        model, start = _open_own_model(part, drop_path)
    elif part.name is None:
        assert part.weights is not None
        model, new = open_with_classes(part.weights, arguments)
        start = describe_loaded_weights(model, part.weights, new)
    else:
        model = create(part.name, pretrained=part.pretrained and part.weights is None, **arguments)
    if part.head_std is not None and not _has_public_classifier(model, part):
        start_classifiers(model, part.head_std)
    if part.name and part.weights and not part.is_of_function:
        model, start = _load_weights(model, part, recast_now)
    else:
        model = apply_surgery(model, part, recast_now)
    if part.weight_init and not (part.weights or part.pretrained):
        init_as_mae(model)
        if part.head_std is not None:
            start_classifiers(model, part.head_std)  # MAE's rule has drawn them too
    update_record(model, start="; ".join(filter(None, [start, *notes(model)])))
    return model


def _has_public_classifier(model: nn.Module, part: ModelPart) -> bool:
    """True if the model has the classifier of its public weights: one for as many classes as they tell apart."""
    if not part.pretrained or part.weights is not None:
        return False
    return spec_of(model).config.get("num_classes") == getattr(model, "num_classes", None)


@torch.no_grad()
def start_classifiers(model: nn.Module, std: float) -> None:
    """Draw the weights of the classifiers from a truncated normal distribution; weights that are loaded replace them.

    Raises: UserError for a model whose classifiers are not linear layers.
    """
    heads: Any = ()
    if hasattr(model, "get_classifier"):
        heads = model.get_classifier()  # type: ignore[operator]
    layers = [heads] if isinstance(heads, nn.Module) else list(heads)
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if not linear or len(linear) < len(layers):
        raise UserError(
            f"model.head_std needs a linear classifier, which {type(model).__name__} does not have"
        )
    for layer in linear:
        nn.init.trunc_normal_(layer.weight, std=std)
        nn.init.zeros_(layer.bias)


def _open_own_model(part: ModelPart, drop_path: float) -> tuple[nn.Module, str]:
    """Return the model of package.module:function, with edits and weights of `model.weights` if given; and a message.

    Raises: UserError for fields that only timm's models take.
    """
    assert part.name is not None
    given = {
        "model.num_classes": part.num_classes,
        "drop_path": drop_path,
        "model.pretrained": part.pretrained,
    }
    ignored = [field for field, value in given.items() if value]
    if ignored:
        names = " and ".join(ignored)
        raise UserError(
            f"{names} cannot be passed to {part.name}; give its arguments as model.kwargs.NAME=VALUE"
        )
    model = build_by_function(part.name, part.kwargs)
    if part.weights is None:
        return model, f"weights: those that {part.name} returns"
    path = local_file(part.weights)
    model = load(path, base=model)
    return model, describe_loaded_weights(model, path, ())


def _load_weights(model: nn.Module, part: ModelPart, recast_now: bool) -> tuple[nn.Module, str]:
    """Load `model.weights` before the surgery if names and shapes fit, else after it; return model and a message.

    Raises: UserError when they fit neither, or when they are recast already and the run recasts later.
    """
    assert part.weights is not None
    path = local_file(part.weights)
    contents = read_contents(path)
    state = strip_wrappers(contents.tensors)
    add_notes(model, *contents.notes)
    try:
        new = load_state(model, dict(state), path, fresh_head=True)
    except UserError as misfit:
        if not part.recast:
            raise
        model = apply_surgery(model, part)
        try:
            new = load_state(model, dict(state), path, fresh_head=True)
        except UserError as error:
            reason = str(error).removeprefix(f"{path} does not fit {type(model).__name__}: ")
            raise UserError(f"{misfit}; nor does it fit the recast model: {reason}") from None
        if not recast_now:
            raise UserError(
                f"model.weights {path} is recast already, but model.recast_epoch is {part.recast_epoch}; set "
                "model.recast_epoch to 0, or give weights of the model before its recast"
            ) from None
        form = " (of the recast model), whose gates and other start values replace those of model.recast"
        return model, describe_loaded_weights(model, path, new, form)
    form = " (of the model before its recast)" if part.recast else ""
    start = describe_loaded_weights(model, path, new, form)
    return apply_surgery(model, part, recast_now), start


def describe_loaded_weights(
    model: nn.Module, path: str | Path, new: Sequence[str], form: str = ""
) -> str:
    """Return a message about the tensors that were loaded, and the new ones; `form` says of which form of the model."""
    counted = [name for name in model.state_dict() if not name.endswith(".num_batches_tracked")]
    text = f"weights: {len(counted) - len(new)} tensors from {path}{form}"
    if new:
        text += f"; new: {', '.join(new[:4])}"
    if len(new) > 4:
        text += f" and {len(new) - 4} more"
    return text


def apply_surgery(model: nn.Module, part: ModelPart, recast_now: bool = True) -> nn.Module:
    """Unstride, recast and freeze a model as the recipe says, or only freeze it if its recast comes later.

    Raises: UserError when a glob matches nothing.
    """
    if recast_now and part.unstride:
        model = unstride(model, part.unstride)
    if recast_now and part.recast:
        model = recast(model, part.recast.build_rule(), part.recast.where)
    return freeze(model, part.freeze, later=not recast_now)


def freeze(model: nn.Module, globs: Sequence[str], later: bool = False) -> nn.Module:
    """Freeze the parameters that the globs select; with `later`, a recast may still create what a glob matches.

    Raises: UserError for a glob without a match, or when no trainable parameter is left.
    """
    parameters = dict(model.named_parameters())
    for glob in globs:
        selected = [name for name in parameters if fnmatchcase(name, glob)]
        if not selected and not later:
            raise UserError(
                f"model.freeze {glob!r} matches no parameter{nearest_names(glob, parameters)}"
            )
        for name in selected:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        which = (
            "model.freeze freezes every parameter"
            if globs
            else "no parameter of the model requires a gradient"
        )
        raise UserError(f"{which}; leave some to train")
    return model


def data_config(recipe: Recipe, model: nn.Module) -> ImageConfig:
    """Return input size, mean, std, interpolation and test crop: the model's, unless the recipe gives others."""
    crop: ImageConfig = {}
    if recipe.data.crop_pct:
        crop = {"crop_mode": "center", "crop_pct": recipe.data.crop_pct}
    elif recipe.data.test_crop == "center":
        crop = {"crop_mode": "center"}
    elif recipe.data.test_crop == "whole":
        crop = {"crop_mode": "squash", "crop_pct": 1.0}
    return training_config(model, recipe.data.size, crop)


def open_sources(recipe: Recipe) -> tuple[Data, Data]:
    """Open the training and test split of the data, restricted to the recipe's classes and fraction."""
    data = recipe.data
    if data.streamed:
        train = open_stream(data.source, "train", data.root, data.images)
        len(train)  # raises if the number of images is neither known nor given
        return train, open_stream(data.source, "test", data.root, classes=len(train.classes))
    source = open_source(data.source, "train", data.root, data.split)
    test = open_source(data.source, "test", data.root, data.split)
    if data.classes is not None:
        source = first_classes(source, data.classes)
        test = first_classes(test, data.classes)
    test = drawn_once(test, data.test_images)
    if data.fraction < 1:
        source = class_fraction(source, data.fraction, recipe.draw_seed)
    if recipe.token_labels and recipe.token_labels.maps:
        num_classes = recipe.model.num_classes or len(source.classes)
        source = LabelMapSource(source, recipe.token_labels.maps, num_classes)
    return source, test


def plan_batches(recipe: Recipe, train: Data, runtime: Runtime) -> tuple[BatchOrder, BatchParts]:
    """Return the order of the training images, and the parts of every batch that this process trains on.

    Raises: UserError when the batch cannot be split evenly, the data is smaller than one batch, or the warm-up is as
    long as the run.
    """
    data = recipe.data
    parts = recipe.scale.accumulate * runtime.world
    least = 2 * parts if recipe.augment.mixes else parts
    if data.batch_size % least:
        why = f"processes {runtime.world}, scale.accumulate {recipe.scale.accumulate}"
        if recipe.augment.mixes:
            why += ", pairs to mix"
        raise UserError(
            f"data.batch_size {data.batch_size} cannot be split evenly; give a multiple of {least}: {why}"
        )
    batch = data.batch_size
    if batch > len(train):
        batch = len(train) // (2 * parts) * 2 * parts
    if not batch:
        raise UserError(
            "the training data is smaller than one batch; lower data.batch_size or raise data.fraction"
        )
    order = BatchOrder(len(train), batch, recipe.seed, recipe.augment.repeats)
    total = recipe.iterations or recipe.epochs * order.steps
    if (recipe.optim.warmup_iterations or 0) >= total:
        raise UserError(
            f"optim.warmup_iterations must be below the run's {total:,} steps; lower it"
        )
    first = runtime.rank * recipe.scale.accumulate
    own = range(first, first + recipe.scale.accumulate)
    return order, BatchParts(own, parts)


def build_train_loader(
    recipe: Recipe, config: ImageConfig, train: Data, sampler: TrainSampler
) -> DataLoader[Any]:
    augment = recipe.augment
    data = recipe.data
    options = augment.model_dump(include={"scale", "hflip", "auto_augment", "color_jitter"})
    options |= dict(ratio=(3 / 4, 4 / 3), re_prob=augment.erasing, re_mode="pixel")
    padding = augment.padding_at(*config["input_size"][-2:])
    transform = train_transform(config, padding, **options)
    if isinstance(train, Stream):
        return stream_loader(train, transform, sampler, data.workers, data.unreadable)
    return train_loader(transformed(train, transform), sampler, data.workers, data.unreadable)


def build_test_loader(
    recipe: Recipe, config: ImageConfig, test: Data, runtime: Runtime
) -> DataLoader[Any]:
    """Return the loader of this process's test images. Raises: UserError for fewer images than processes."""
    batch = max(1, recipe.data.batch_size // runtime.world)
    workers = recipe.data.workers
    if isinstance(test, Stream):
        share = BatchParts(range(runtime.rank, runtime.rank + 1), runtime.world)
        return stream_test_loader(test, eval_transform(config), batch, workers, share)
    return loader_of_share(transformed(test, eval_transform(config)), batch, workers, runtime)
