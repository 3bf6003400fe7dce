"""Finding a suite's folder and its format: class folders, tar files, webdataset shards, parquet files, or the hub."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isomorph.data.formats.naming import SPLITS, ImageFiles, is_image_name
from isomorph.data.formats.registry import open_source
from isomorph.data.sources import Source
from isomorph.errors import UserError

_CLASS_NAME = re.compile(r"n\d{8}|\d{1,4}")
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
    within = any((top / f"{word}{end}").exists() for word in SPLITS["test"] for end in ("", ".tar"))
    return within or _has_class_folders(top) or bool(_image_names(top))


def _candidate_folders(path: Path) -> list[Path]:
    """Return the folders that may hold the test images: the folder itself, and its folders of the test split."""
    return [path, *(path / word for word in SPLITS["test"] if (path / word).is_dir())]


def _image_names(folder: Path) -> list[str]:
    """Return the names of the image files directly in a folder, unsorted."""
    with os.scandir(folder) as entries:
        return [e.name for e in entries if is_image_name(e.name) and not e.name.startswith(".") and e.is_file()]


def detect_form(path: Path) -> str:
    """Return the format of a folder by its content."""
    folders = _candidate_folders(path)
    if any(_has_class_folders(folder) for folder in folders):
        return "imagefolder"
    tars = [tar for folder in folders for tar in folder.glob("[!.]*.tar")]
    if any(tar.stem in SPLITS["test"] or _CLASS_NAME.fullmatch(tar.stem) for tar in tars):
        return "tar"
    if tars or any(path.glob("*/*.tar")):
        return "webdataset"
    of_hub = ("*.parquet", "*/*.parquet", "dataset_dict.json", "*/state.json")
    if any(next(path.glob(glob), None) for glob in of_hub):
        return "huggingface"
    return FLAT if any(map(_image_names, folders)) else "imagefolder"


def _has_class_folders(folder: Path) -> bool:
    """True if a folder has a subfolder named like a class."""
    with os.scandir(folder) as entries:
        return any(_CLASS_NAME.fullmatch(entry.name) and entry.is_dir() for entry in entries)
