"""What a run needs that is not part of isomorph: data, weights, teachers, a tokeniser."""

from collections.abc import Iterator
from pathlib import Path

import timm

from isomorph.lab.training.recipe.recipe import Recipe, task_teacher_file

# What `--data.root` has to be, by data.source.
_FOLDERS = {
    "imagefolder": "the folder with train/ and val/, each with a folder for every class",
    "ade20k": "the folder with images/ and annotations/",
    "coco": "the folder with annotations/, train2017/ and val2017/",
    "camvid": "the folder with train/, trainannot/ and those of val and test",
    "glue": "the folder with GLUE's files, or nyu-mll/glue",
    "text": "a text file, or a folder of them",
}


def list_needs(recipe: Recipe, data_set: str) -> Iterator[str]:
    """Yield a line for everything that has to be there before the run can start."""
    yield from _data(recipe, data_set)
    yield from _weights(recipe)
    yield from _teachers(recipe)
    tokenizer = getattr(recipe.task, "tokenizer", None)
    if tokenizer:
        yield f"task.tokenizer {tokenizer}"


def _data(recipe: Recipe, data_set: str) -> Iterator[str]:
    source = recipe.data.source
    if source == "digits" or recipe.data.root is not None:
        return
    folder = _FOLDERS.get(source, "its folder")
    yield f"{data_set} as data.source {source}: --data.root is {folder}"
    if recipe.token_labels and recipe.token_labels.maps is not None:
        yield f"token_labels.maps {recipe.token_labels.maps}"


def _weights(recipe: Recipe) -> Iterator[str]:
    part = recipe.model
    if part.weights is not None:
        yield from _file("model.weights", part.weights)
    elif part.pretrained and part.name is not None:
        yield f"weights of {part.name}: {_address(part.name)}"
    elif part.start == "weights":
        yield f"--model.weights, a trained checkpoint ({recipe.expected or recipe.source})"


def _teachers(recipe: Recipe) -> Iterator[str]:
    if recipe.distill:
        teacher = recipe.distill.teacher
        if recipe.distill.weights is not None:
            yield from _file("distill.weights", recipe.distill.weights)
        elif timm.is_model(teacher):
            yield f"teacher {teacher}: {_address(teacher)}"
        else:
            yield from _file("distill.teacher", Path(teacher))
    if recipe.mask and recipe.mask.teacher is not None:
        yield from _file("mask.teacher", recipe.mask.teacher)
    path = task_teacher_file(recipe)
    if path is not None:
        for need in _file("task.teacher", path):
            yield f"{need}; the predicted memory and hours leave it out"


def _file(field: str, path: Path) -> Iterator[str]:
    if path.exists():
        return
    if path.parts[0] == "runs" and len(path.parts) > 1:
        yield f"{field} {path}, which `isomorph train {path.parts[1]}` writes"
    else:
        yield f"{field} {path}, which is not here"


def _address(name: str) -> str:
    """Return where timm downloads the weights of a model from."""
    config = timm.get_pretrained_cfg(name)
    if config is None or not (config.hf_hub_id or config.url):
        return "none are public"
    return str(config.hf_hub_id or config.url)
