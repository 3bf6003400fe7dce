"""A dry run: what a recipe needs, and what its run takes, from two steps on this machine."""

import copy
import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch

from isomorph.checkpoints.open import is_checkpoint_or_run
from isomorph.errors import UserError
from isomorph.evaluation.cost import count_parameters
from isomorph.models.download import is_in_hub_cache
from isomorph.surgery import edits
from isomorph.terminal_tables import count_of
from isomorph.training.classification import recipe_task
from isomorph.training.recipe.recipe import Recipe, validate
from isomorph.training.run.loop import train_step
from isomorph.training.run.state import given_files, open_run

IMAGENET_IMAGES, IMAGENET_CLASSES = 1_281_167, 1000
"""Size of ImageNet-1k, which is assumed where a folder of images is missing."""
CPU_BATCH = 32
"""Most images of a step on a CPU; times are in proportion."""


def dry_run(recipe: Recipe) -> list[str]:
    """Return lines on a run: its model, the time of a step and of all, the memory, and what it needs that is missing.

    The model is built and recast, and trains two steps; nothing is written or downloaded. Missing parts are replaced:
    weights by random ones, a folder of images by digits of the same size (and ImageNet-1k's number of images and
    classes), and a teacher is left out.

    Raises: UserError for a recipe that cannot be built, or whose data is missing and cannot be replaced.

    >>> lines = iso.training.dry_run(iso.load_recipe("digits_cnn", ["epochs=1"]))
    >>> lines[0]
    'model: cifar_resnet20, 269,722 parameters'
    """
    trial, needs, images = _replace_missing(recipe)
    with TemporaryDirectory() as folder:
        run = open_run(validate(trial | {"out": str(Path(folder) / "run")}))
        run.task.train()
        for _ in range(2):  # the first step also sets up libraries
            start = time.perf_counter()
            train_step(run)
            run.progress.step += 1
            loss = run.mean_total(0)  # waits for the device
        seconds, batch = time.perf_counter() - start, run.order.batch
        run.batches = None
    if loss - loss != 0:
        raise UserError(f"the loss is not finite after two steps of {recipe.name}; lower optim.lr")
    model, images = run.eval_model, images or run.order.images
    shown = recipe.iterations * recipe.data.batch_size if recipe.iterations else images * recipe.epochs
    hours, length = shown * seconds / batch / 3600, count_of(recipe.iterations or recipe.epochs, "epoch")
    length = f"{recipe.iterations:,} steps" if recipe.iterations else length
    rounded = f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
    lines = [f"model: {recipe.model.name or recipe.model.weights}, {count_parameters(model):,} parameters"]
    lines += [f"edits: {count_of(len(edit.names), 'layer')} by {type(edit.rule).__name__}" for edit in edits(model)]
    return [
        *lines,
        f"data: {count_of(images, 'image')} an epoch, steps of {recipe.data.batch_size:,}",
        f"step: {seconds:.2f} s for {batch} images on {run.runtime.device}, {_memory(run.runtime.device)}",
        f"time: about {rounded} hours for {length} like this, without evaluations",
        *(f"needs: {need}" for need in needs),
    ]


def _memory(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB at most on the device"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB at most in the process"


def _replace_missing(recipe: Recipe) -> tuple[dict[str, Any], list[str], int]:
    """Return a recipe's values with everything replaced that is missing, what is missing, and the number of images.

    The number is 0 where the data is there.
    """
    values, needs, images = copy.deepcopy(recipe.model_dump()), [], 0
    model, data = values["model"], values["data"]
    missing = {field: path for field, path in given_files(recipe).items() if not path.is_file()}
    needs += [f"{field} {path}, which does not exist" for field, path in missing.items()]
    if model["start"] == "weights" and not (model["weights"] or model["pretrained"]):
        needs.append("trained weights: give --model.weights FILE")
    if model["pretrained"] and not _is_cached(model["name"]):
        needs.append(f"a download of {model['name']}'s weights")
    model |= {"start": "random", "pretrained": False}
    model |= {"weights": None} if "model.weights" in missing and model["name"] else {}
    if recipe.mask and "mask.teacher" in missing:
        depth, width, heads = recipe.mask.decoder
        values["mask"] |= dict(teacher=None, teacher_model=None, depth=depth, width=width, heads=heads)
    if part := recipe.distill:
        absent = not (part.weights or is_checkpoint_or_run(part.teacher) or _is_cached(part.teacher))
        needs += [f"a download of {part.teacher}'s weights"] * absent
        values["distill"] = None if absent or "distill.weights" in missing else values["distill"]
    try:
        recipe_task(recipe).open_data(recipe)
    except UserError as error:
        if recipe.task or recipe.data.source != "imagefolder":
            raise
        needs.append(f"data: {error}")
        images = round(IMAGENET_IMAGES * recipe.data.fraction)
        size = data["size"] or [*(timm.get_pretrained_cfg(model["name"]) or timm.models.PretrainedCfg()).input_size[1:]]
        values["data"] = dict(source="digits", size=size, batch_size=data["batch_size"])
        model |= {"num_classes": model["num_classes"] or data["classes"] or IMAGENET_CLASSES}
        if recipe.token_labels:
            values["token_labels"] |= dict(maps=None, class_token="label")
    if not torch.cuda.is_available() or recipe.device == "cpu":
        values["data"]["batch_size"] = min(data["batch_size"], CPU_BATCH * recipe.scale.accumulate)
    values["data"]["workers"] = 0
    return values | {"track": None, "keep_every": None}, needs, images


def _is_cached(name: str) -> bool:
    """True if the public weights of a model are in the cache of the hub."""
    config = timm.get_pretrained_cfg(name)
    return bool(config and config.hf_hub_id and is_in_hub_cache(config.hf_hub_id))
