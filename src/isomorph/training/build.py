"""From a recipe to the model and the loaders of its run."""

from typing import Any

from timm.data import resolve_data_config
from torch import nn
from torch.utils.data import DataLoader

from isomorph.data import Source, class_fraction, eval_loader, open_source, train_loader
from isomorph.models import create
from isomorph.surgery import recast, unstride
from isomorph.training.checkpoint import load_weights
from isomorph.training.recipe import ModelPart, Recipe


def base_arguments(part: ModelPart, num_classes: int, drop_path: float = 0.0) -> dict[str, Any]:
    """Arguments of timm.create_model for the base, its name included, the weights not."""
    arguments = {"name": part.name, "num_classes": part.num_classes or num_classes, **part.kwargs}
    return arguments | ({"drop_path_rate": drop_path} if drop_path else {})


def build_model(part: ModelPart, num_classes: int, drop_path: float = 0.0) -> nn.Module:
    """Creates the base with its weights, then the surgery: unstride, recast.

    Raises: UserError when timm cannot create it, the weights do not fit, or the surgery matches nothing.
    """
    arguments = base_arguments(part, num_classes, drop_path)
    model = create(arguments.pop("name"), pretrained=part.pretrained and part.weights is None, **arguments)
    if part.weights:
        load_weights(model, part.weights)
    if part.unstride:
        model = unstride(model, part.unstride)
    return recast(model, part.recast.rule(), part.recast.where) if part.recast else model


def data_config(recipe: Recipe, model: nn.Module) -> dict[str, Any]:
    """Input size, mean, std and interpolation of the run: the model's own, the recipe's size where it gives one."""
    given = {"input_size": (3, *recipe.data.size)} if recipe.data.size else {}
    return resolve_data_config(given, model=model, use_test_size=False)


def build_loaders(
    recipe: Recipe, model: nn.Module, train: Source, test: Source
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Training and evaluation batches of a run."""
    data, augment, config = recipe.data, recipe.augment, data_config(recipe, model)
    if data.fraction < 1:
        train = class_fraction(train, data.fraction, recipe.seed)
    training = train_loader(
        train,
        config,
        data.batch_size,
        data.workers,
        crop_padding=augment.crop_padding,
        scale=augment.scale,
        ratio=(3 / 4, 4 / 3),
        hflip=augment.hflip,
        auto_augment=augment.auto_augment,
        color_jitter=augment.color_jitter,
        re_prob=augment.erasing,
        re_mode="pixel",
    )
    return training, eval_loader(test, config, data.batch_size, data.workers)


def open_sources(recipe: Recipe) -> tuple[Source, Source]:
    """The training and test split of the recipe's source."""
    data = recipe.data
    return open_source(data.source, "train", data.root), open_source(data.source, "test", data.root)
