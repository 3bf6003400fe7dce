"""Finding a suite's folder and its format: class folders, tar files, webdataset shards, parquet files, or the hub."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isomorph.data.formats.naming import ImageFiles, is_image_name, named_for, visible
from isomorph.data.formats.registry import CLASS_NAME, detect_format, open_source
from isomorph.data.sources import Source
from isomorph.errors import UserError

_FORMS = ("imagefolder", "tar", "webdataset", "huggingface")
FLAT = "flat"
"""Format of one folder of images without class folders, as ImageNet's validation archive unpacks."""


@dataclass(frozen=True)
class SuiteLocation:
    """A folder, or a name on the hub, with its format."""

    path: Path
    form: str

    @property
    def title(self) -> str:
        """The path as messages show it."""
        return self.path.as_posix()


def open_location(location: SuiteLocation) -> Source:
    """Open the test split at a location; images of a flat folder get one unnamed class.

    Raises: UserError as `open_source`.
    """
    if location.form == FLAT:
        names_by_folder = {folder: _image_names(folder) for folder in _candidate_folders(location.path)}
        folder, names = max(names_by_folder.items(), key=lambda pair: len(pair[1]))  # others may hold stray images
        return Source(ImageFiles(folder, sorted(names)), np.zeros(len(names), np.int64), [""])
    return open_source(location.form, "test", location.path)


def find_suite(
    suite: str, folder: str, usual_names: Sequence[str], root: str | Path | None, form: str | None
) -> SuiteLocation:
    """Return the location of a suite: `folder`, or the first usual name in `root` ($ISOMORPH_DATA, else ./data).

    Raises: UserError when it is missing, or for an unknown format.
    """
    if form is not None and form not in _FORMS:
        raise UserError(f"suites are read as {', '.join(_FORMS)}, not {form!r}")
    if folder:
        path = Path(folder).expanduser()
        on_hub = not path.exists() and re.fullmatch(r"\w[\w.-]*/[\w.-]+(:\w+)?", folder) is not None
        if not path.is_dir() and not on_hub:
            raise UserError(f"no folder {folder}; give {suite}=FOLDER the folder of {suite}")
        return SuiteLocation(path, form or ("huggingface" if on_hub else detect_form(path)))
    top = Path(root or os.environ.get("ISOMORPH_DATA", "data")).expanduser()
    for name in usual_names:
        if (top / name).is_dir() and (name != "." or _has_test_images(top)):
            return SuiteLocation(top / name, form or detect_form(top / name))
    searched = ", ".join(name for name in usual_names if name != ".")
    raise UserError(
        f"no folder of {suite} in {top} (searched {searched}); give --suite {suite}=FOLDER or another --root"
    )


def _has_test_images(top: Path) -> bool:
    """True if a folder is a data set itself: has val/ or val.tar, class folders, or images."""
    named = named_for([*visible(top), *visible(top, ".tar")], "test")
    return bool(named or _class_folders(top) or _image_names(top))


def _candidate_folders(path: Path) -> list[Path]:
    """Return the folders that may hold the test images: the folder itself, and its folders of the test split."""
    return [path, *named_for(visible(path), "test")]


def _image_names(folder: Path) -> list[str]:
    """Return the names of the image files directly in a folder, unsorted."""
    with os.scandir(folder) as entries:
        return [e.name for e in entries if is_image_name(e.name) and not e.name.startswith(".") and e.is_file()]


def detect_form(path: Path) -> str:
    """Return the format of a folder by its content; `FLAT` for one of images without class folders."""
    form, folders = detect_format(path), _candidate_folders(path)
    if form != "imagefolder" or any(map(_class_folders, folders)):
        return form
    return FLAT if any(map(_image_names, folders)) else form


def _class_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder that are named like a class."""
    return [each for each in visible(folder) if CLASS_NAME.fullmatch(each.name)]
