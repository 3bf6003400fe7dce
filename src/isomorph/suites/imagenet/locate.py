"""Where a suite lies, and in what form: class folders, tar files, webdataset shards, parquet files, or the hub."""

import os
import re
from collections.abc import Iterable, Sequence
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
"""The form of images in one folder, without classes, as ImageNet's validation images are unpacked."""


@dataclass(frozen=True)
class SuiteLocation:
    """A folder (or a name on the hub) and the kind of source that reads it."""

    path: Path
    form: str

    @property
    def title(self) -> str:
        return self.path.as_posix()


def open_location(place: SuiteLocation) -> Source:
    """The test split of what lies there; of a flat folder, images of one class that has no name.

    Raises: UserError as `open_source`.
    """
    if place.form == FLAT:
        listed = {top: _image_names(top) for top in _candidate_folders(place.path)}
        top, names = max(listed.items(), key=lambda found: len(found[1]))  # beside it a picture or two may lie
        return Source(ImageFiles(top, sorted(names)), np.zeros(len(names), np.int64), [""])
    return open_source(place.form, "test", place.path)


def find_suite(suite: str, folder: str, usual: Sequence[str], root: str | Path | None, form: str | None) -> SuiteLocation:
    """The place of a suite: the folder given, or the first of its usual ones in `root` ($ISOMORPH_DATA, ./data).

    Raises: UserError when it is not there, or for an unknown form.
    """
    if form is not None and form not in _FORMS:
        raise UserError(f"suites are read as {', '.join(_FORMS)}, not {form!r}")
    if folder:
        path = Path(folder).expanduser()
        on_hub = not path.exists() and re.fullmatch(r"\w[\w.-]*/[\w.-]+(:\w+)?", folder) is not None
        if not path.is_dir() and not on_hub:
            raise UserError(f"no folder {folder}; give {suite}=FOLDER the folder that holds {suite}")
        return SuiteLocation(path, form or ("huggingface" if on_hub else detect_form(path)))
    top = Path(root or os.environ.get("ISOMORPH_DATA", "data")).expanduser()
    for name in usual:
        if (top / name).is_dir() and (name != "." or _has_test_images(top)):
            return SuiteLocation(top / name, form or detect_form(top / name))
    looked = ", ".join(name for name in usual if name != ".")
    raise UserError(
        f"no folder of {suite} in {top} (looked for {looked}); give --suite {suite}=FOLDER or another --root"
    )


def _has_test_images(top: Path) -> bool:
    """Whether a folder is a data set itself, with its test images in val/, val.tar, in class folders or in itself."""
    within = any((top / f"{word}{end}").exists() for word in SPLITS["test"] for end in ("", ".tar"))
    return within or _has_class_folders(top) or bool(_image_names(top))


def _candidate_folders(path: Path) -> list[Path]:
    """The folders that may hold the test images: its own, and those of the test split in it."""
    return [path, *(path / word for word in SPLITS["test"] if (path / word).is_dir())]


def _image_names(top: Path) -> list[str]:
    """Names of the image files right in a folder, in no order."""
    with os.scandir(top) as entries:
        return [e.name for e in entries if is_image_name(e.name) and not e.name.startswith(".") and e.is_file()]


def detect_form(path: Path) -> str:
    """The kind of source that reads a folder, by what is in it."""
    tops = _candidate_folders(path)
    if any(_has_class_folders(top) for top in tops):
        return "imagefolder"
    tars = [tar for top in tops for tar in top.glob("[!.]*.tar")]
    if any(tar.stem in SPLITS["test"] or _CLASS_NAME.fullmatch(tar.stem) for tar in tars):
        return "tar"
    if tars or any(path.glob("*/*.tar")):
        return "webdataset"
    if _any_match(path, ("*.parquet", "*/*.parquet", "dataset_dict.json", "*/state.json")):
        return "huggingface"
    return FLAT if any(map(_image_names, tops)) else "imagefolder"


def _any_match(path: Path, globs: Iterable[str]) -> bool:
    return any(next(path.glob(glob), None) for glob in globs)


def _has_class_folders(top: Path) -> bool:
    """Whether there is a folder called like a class."""
    with os.scandir(top) as entries:
        return any(_CLASS_NAME.fullmatch(entry.name) and entry.is_dir() for entry in entries)
