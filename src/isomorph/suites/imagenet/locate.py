"""Where a suite lies, and in what form: class folders, tar files, webdataset shards, parquet files, or the hub."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isomorph.data import Source, open_source
from isomorph.data.formats.naming import SPLITS, Files, is_image
from isomorph.errors import UserError

CLASS = re.compile(r"n\d{8}|\d{1,4}")
FORMS = ("imagefolder", "tar", "webdataset", "huggingface")
FLAT = "flat"
"""The form of images in one folder, without classes, as ImageNet's validation images are unpacked."""


@dataclass(frozen=True)
class Place:
    """A folder (or a name on the hub) and the kind of source that reads it."""

    path: Path
    form: str

    @property
    def title(self) -> str:
        return self.path.as_posix()


def open_place(place: Place) -> Source:
    """The test split of what lies there; of a flat folder, images of one class that has no name.

    Raises: UserError as `open_source`.
    """
    if place.form == FLAT:
        listed = {top: _images_in(top) for top in _tops_of(place.path)}
        top, names = max(listed.items(), key=lambda found: len(found[1]))  # beside it a picture or two may lie
        return Source(Files(top, sorted(names)), np.zeros(len(names), np.int64), [""])
    return open_source(place.form, "test", place.path)


def find(suite: str, folder: str, usual: Sequence[str], root: str | Path | None, form: str | None) -> Place:
    """The place of a suite: the folder given, or the first of its usual ones in `root` ($ISOMORPH_DATA, ./data).

    Raises: UserError when it is not there, or for an unknown form.
    """
    if form is not None and form not in FORMS:
        raise UserError(f"suites are read as {', '.join(FORMS)}, not {form!r}")
    if folder:
        path = Path(folder).expanduser()
        on_hub = not path.exists() and re.fullmatch(r"\w[\w.-]*/[\w.-]+(:\w+)?", folder) is not None
        if not path.is_dir() and not on_hub:
            raise UserError(f"no folder {folder}; give {suite}=FOLDER the folder that holds {suite}")
        return Place(path, form or ("huggingface" if on_hub else form_of(path)))
    top = Path(root or os.environ.get("ISOMORPH_DATA", "data")).expanduser()
    for name in usual:
        if (top / name).is_dir() and (name != "." or _holds_split(top)):
            return Place(top / name, form or form_of(top / name))
    looked = ", ".join(name for name in usual if name != ".")
    raise UserError(
        f"no folder of {suite} in {top} (looked for {looked}); give --suite {suite}=FOLDER or another --root"
    )


def _holds_split(top: Path) -> bool:
    """Whether a folder is a data set itself, with its test images in val/, val.tar, in class folders or in itself."""
    within = any((top / f"{word}{end}").exists() for word in SPLITS["test"] for end in ("", ".tar"))
    return within or _classes_in(top) or bool(_images_in(top))


def _tops_of(path: Path) -> list[Path]:
    """The folders that may hold the test images: its own, and those of the test split in it."""
    return [path, *(path / word for word in SPLITS["test"] if (path / word).is_dir())]


def _images_in(top: Path) -> list[str]:
    """Names of the image files right in a folder, in no order."""
    with os.scandir(top) as entries:
        return [e.name for e in entries if is_image(e.name) and not e.name.startswith(".") and e.is_file()]


def form_of(path: Path) -> str:
    """The kind of source that reads a folder, by what is in it."""
    tops = _tops_of(path)
    if any(_classes_in(top) for top in tops):
        return "imagefolder"
    tars = [tar for top in tops for tar in top.glob("[!.]*.tar")]
    if any(tar.stem in SPLITS["test"] or CLASS.fullmatch(tar.stem) for tar in tars):
        return "tar"
    if tars or any(path.glob("*/*.tar")):
        return "webdataset"
    if _any_of(path, ("*.parquet", "*/*.parquet", "dataset_dict.json", "*/state.json")):
        return "huggingface"
    return FLAT if any(map(_images_in, tops)) else "imagefolder"


def _any_of(path: Path, globs: Iterable[str]) -> bool:
    return any(next(path.glob(glob), None) for glob in globs)


def _classes_in(top: Path) -> bool:
    """Whether there is a folder called like a class."""
    with os.scandir(top) as entries:
        return any(CLASS.fullmatch(entry.name) and entry.is_dir() for entry in entries)
