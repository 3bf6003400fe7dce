"""What a run needs that is not part of isomorph: data, weights, teachers, a tokeniser."""

from pathlib import Path

import timm

from isomorph.training.recipe.recipe import Recipe

# What `--data.root` has to be, by data.source.
_FOLDERS = {
    "imagefolder": "the folder with train/ and val/, each with a folder for every class",
    "ade20k": "the folder with images/ and annotations/",
    "coco": "the folder with annotations/, train2017/ and val2017/",
    "camvid": "the folder with train/, trainannot/ and those of val and test",
    "glue": "the folder with GLUE's files, or nyu-mll/glue",
    "text": "a text file, or a folder of them",
}


def list_needs(recipe: Recipe, data_set: str) -> list[str]:
    """Return a line for everything that has to be there before the run can start."""
    lines = [*_data(recipe, data_set), *_weights(recipe), *_teachers(recipe)]
    if recipe.task is not None:
        tokenizer = getattr(recipe.task, "tokenizer", None)
        if tokenizer:
            lines.append(f"task.tokenizer {tokenizer}")
    return lines


def _data(recipe: Recipe, data_set: str) -> list[str]:
    source = recipe.data.source
    if source == "digits" or recipe.data.root is not None:
        return []
    folder = _FOLDERS.get(source, "its folder")
    lines = [f"{data_set} as data.source {source}: --data.root is {folder}"]
    if recipe.token_labels and recipe.token_labels.maps is not None:
        lines.append(f"token_labels.maps {recipe.token_labels.maps}")
    return lines


def _weights(recipe: Recipe) -> list[str]:
    part = recipe.model
    if part.weights is not None:
        return _file("model.weights", part.weights)
    if part.pretrained and part.name is not None:
        return [f"weights of {part.name}: {_address(part.name)}"]
    if part.start == "weights":
        return [f"--model.weights, a trained checkpoint ({recipe.expected or recipe.source})"]
    return []


def _teachers(recipe: Recipe) -> list[str]:
    lines = []
    if recipe.distill:
        if recipe.distill.weights is not None:
            lines += _file("distill.weights", recipe.distill.weights)
        elif timm.is_model(recipe.distill.teacher):
            address = _address(recipe.distill.teacher)
            lines.append(f"teacher {recipe.distill.teacher}: {address}")
        else:
            lines += _file("distill.teacher", Path(recipe.distill.teacher))
    if recipe.mask and recipe.mask.teacher is not None:
        lines += _file("mask.teacher", recipe.mask.teacher)
    if "--task.teacher" in recipe.expected and not getattr(recipe.task, "teacher", None):
        lines.append("--task.teacher, a network trained on the same task")
    return lines


def _file(field: str, path: Path) -> list[str]:
    if path.exists():
        return []
    if path.parts[0] == "runs" and len(path.parts) > 1:
        return [f"{field} {path}, which `isomorph train {path.parts[1]}` writes"]
    return [f"{field} {path}, which is not here"]


def _address(name: str) -> str:
    """Return where timm downloads the weights of a model from."""
    config = timm.get_pretrained_cfg(name)
    if config is None or not (config.hf_hub_id or config.url):
        return "none are public"
    return str(config.hf_hub_id or config.url)
