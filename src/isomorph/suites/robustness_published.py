"""The published folders of ImageNet-C: CORRUPTION/SEVERITY/WNID/*.JPEG, as its archives unpack."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from isomorph.data import CATEGORIES, Source
from isomorph.data.folders import imagefolder
from isomorph.errors import UserError
from isomorph.suites.imagenet_classes import with_imagenet_labels


def published_cell(root: Path, corruption: str, severity: int, classes: int) -> Source:
    """The pictures of one cell, below `root` or the folder of its category in it (`root/noise/gaussian_noise/1`).

    Labels of a 1000-class model go by WordNet id, so part of the classes will do; others go by sorted folder.

    Raises: UserError when a folder is missing, or its classes are not the model's.
    """
    folder = corruption_folder(root, corruption, [severity])
    source = imagefolder("test", folder / str(severity))
    if classes == 1000:
        return with_imagenet_labels(source, str(folder / str(severity)))
    if len(source.classes) != classes:
        raise UserError(f"{folder / str(severity)} has {len(source.classes)} classes, the model knows {classes}")
    return source


def corruption_folder(root: Path, corruption: str, severities: Sequence[int]) -> Path:
    """Raises: UserError when there is no folder of the suite, of the corruption, or of a severity."""
    if not root.is_dir():
        raise UserError(f"no folder {root}; give the one with ImageNet-C's CORRUPTION/SEVERITY/CLASS/*.JPEG")
    found = [root / corruption, *sorted(root.glob(f"*/{corruption}"))]
    for folder in found:
        if folder.is_dir():
            missing = [severity for severity in severities if not (folder / str(severity)).is_dir()]
            if missing:
                raise UserError(f"{folder} has no folder {missing[0]}; it must hold one per severity, 1 to 5")
            return folder
    below = [
        path.name
        for path in sorted((*root.glob("*"), *root.glob("*/*")))
        if path.is_dir() and path.name not in CATEGORIES
    ]
    close = get_close_matches(corruption, below, n=1)
    raise UserError(
        f"{root} has no folder {corruption}" + f"; nearest: {close[0]}" * bool(close) + "; unpack it, or choose others "
        "with --corruption"
    )
