"""Image folders and webdataset shards inside tar files, never unpacked: a tar is indexed once, then read by offset."""

import json
import math
import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from isomorph.errors import UserError, first_line
from isomorph.lab.data.formats.imagefolder import sort_by_class
from isomorph.lab.data.formats.naming import (
    SPLIT_NAMES,
    SPLITS,
    PackedStrings,
    ambiguous_split,
    check_folder,
    check_known_classes,
    check_one_split,
    composed,
    count_left_out,
    is_hidden,
    is_image_name,
    named_for,
    names_a_split,
    number_classes,
    read_lines,
    report_left_out,
    report_unnamed,
    split_words,
    visible,
)
from isomorph.lab.data.sources import ImageLike, ImageSubset, Source

# gzip, bzip2, xz, zstandard
_COMPRESSED_PREFIXES = (
    b"\x1f\x8b",
    b"BZh",
    b"\xfd7zXZ",
    b"\x28\xb5\x2f\xfd",
)
_MAX_DEPTH = 4  # tars inside tars that are read as folders
_MAX_LABEL_BYTES = 2**20
_NO_LABEL, _TWO_LABELS = -1, -2  # in place of a label


class TarMember(NamedTuple):
    """A file inside a tar file: `size` bytes from `offset` on; a label of -1 means none, of -2 several that differ."""

    name: str
    offset: int
    size: int
    label: int = _NO_LABEL


class _FileStamp(NamedTuple):
    path: str
    size: int
    modified: int


class TarIndex(NamedTuple):
    """The images of one tar, and the files that are left out, counted by their kind.

    Shape: numbers (3, n) int64: offsets, sizes and labels; a label of -1 means none, of -2 several that differ.
    """

    stamp: _FileStamp
    names: PackedStrings
    numbers: np.ndarray
    left_out: Counter[str]


class _OpenFile:
    """An open file that closes when nothing refers to it; read by position, so processes and threads may share it."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@lru_cache(maxsize=128)
def _open_tar(stamp: _FileStamp) -> _OpenFile:
    """Open a tar; a process keeps the latest 128 open. Raises: UserError when the file has changed since indexing."""
    file = _OpenFile(stamp.path)
    status = os.fstat(file.descriptor)
    if (status.st_size, status.st_mtime_ns) != (stamp.size, stamp.modified):
        raise UserError(
            f"{stamp.path} has changed since it was opened; restart to read the new file"
        )
    return file


class TarImages(Sequence[ImageLike]):
    """The images of indexed tars, one tar after the other, each read by its offset."""

    def __init__(self, indices: Sequence[TarIndex]) -> None:
        self.stamps = [index.stamp for index in indices]
        self.names = [index.names for index in indices]
        self.ends = np.cumsum([len(index.names) for index in indices], dtype=np.int64)
        self.offsets, self.sizes = np.concatenate([index.numbers[:2] for index in indices], 1)

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: Any) -> Any:
        size = int(self.sizes[index])
        offset = int(self.offsets[index])
        number, _ = self._locate(index)
        # held while it is read: another thread may close older ones
        file = _open_tar(self.stamps[number])
        data = os.pread(file.descriptor, size, offset)
        if len(data) != size:
            raise OSError(f"the file ends after {len(data)} of its {size} bytes")
        return data

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the number of an image's tar, and its index in the tar."""
        index = range(len(self))[index]
        number = int(np.searchsorted(self.ends, index, side="right"))
        start = int(self.ends[number - 1]) if number else 0
        return number, index - start

    def name(self, index: int) -> str:
        number, member = self._locate(index)
        return f"{self.stamps[number].path}:{self.names[number][member]}"

    def file_name(self, index: int) -> str:
        """Return the name of an image inside its tar."""
        number, member = self._locate(index)
        return self.names[number][member]


def index_tars(paths: Sequence[Path]) -> list[TarIndex]:
    """Return the index of each tar. Raises: UserError when one cannot be read, is cut short or compressed."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(_index_tar, paths))


def _index_tar(path: Path) -> TarIndex:
    try:
        status = path.stat()
        stamp = _FileStamp(str(path.absolute()), status.st_size, status.st_mtime_ns)
        with open(path, "rb") as file:
            if file.read(6).startswith(_COMPRESSED_PREFIXES):
                raise UserError(
                    f"{path} is compressed, so its members cannot be read in place; unpack it to a .tar"
                )
            file.seek(0)
            left_out = Counter[str]()
            members = list(_iter_images(file, left_out))
        numbers = np.array([member[1:] for member in members], np.int64).reshape(-1, 3).T
    except (tarfile.TarError, OSError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"cannot read {path}: {first_line(error)}; copy or write it again"
        ) from None
    return TarIndex(stamp, PackedStrings.of(member.name for member in members), numbers, left_out)


def _iter_members(
    file: BinaryIO, prefix: str = "", end: float = math.inf, depth: int = 0
) -> Iterator[TarMember]:
    """Yield every file but hidden ones in a tar that starts where `file` stands; a tar inside is read as a folder."""
    if depth > _MAX_DEPTH:
        raise tarfile.ReadError(
            f"{prefix[:60]} is in more than {_MAX_DEPTH} tars inside each other"
        )
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for entry in iter(archive.next, None):
            archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep every entry in memory
            parts = [part for part in entry.name.split("/") if part not in ("", ".")]
            if is_image_name(entry.name) and (entry.islnk() or entry.issym()):
                raise tarfile.ReadError(
                    f"{entry.name} is a link to {entry.linkname}, not an image; pack it by `tar "
                    "--dereference --hard-dereference`"
                )
            if not entry.isreg() or is_hidden(*parts):
                continue
            if entry.issparse():
                raise tarfile.ReadError(
                    f"{entry.name} is stored without its zeros; pack it by tar without --sparse"
                )
            if entry.offset_data + entry.size > end:
                raise tarfile.ReadError(f"{entry.name} ends outside of the tar that it is in")
            name = prefix + "/".join(parts)
            if name.endswith(".tar"):
                file.seek(entry.offset_data)
                inside = name.removesuffix(".tar") + "/"
                yield from _iter_members(file, inside, entry.offset_data + entry.size, depth + 1)
            else:
                yield TarMember(name, entry.offset_data, entry.size)
        file.seek(archive.offset)
        last = file.read(tarfile.BLOCKSIZE)
        if len(last) < tarfile.BLOCKSIZE or any(last) or archive.offset + tarfile.BLOCKSIZE > end:
            raise tarfile.ReadError(
                f"no end of the archive where it should be (byte {archive.offset}): cut or damaged"
            )


def _iter_images(file: BinaryIO, left_out: Counter[str]) -> Iterator[TarMember]:
    """Yield the images, each with the label that a file of its name says, and count the other files by suffix.

    Of a webdataset sample with such a label the first image named key.jpg, not key.mask.png, is the one.
    """
    for _, group in groupby(_iter_members(file), lambda member: _sample_of(member.name)):
        members = list(group)
        images = [member for member in members if is_image_name(member.name)]
        labels = {_read_label(file, member) for member in members} - {_NO_LABEL}
        label = _one_label(labels)
        others = [member for member in members if not is_image_name(member.name)]
        if label != _NO_LABEL:
            if len({member.name for member in members}) < len(members):
                raise tarfile.ReadError(f"the sample of {members[0].name} is there twice")
            images = [image for image in images if _has_one_ending(image.name)][:1]
            others = [] if images else members
        for image in images:
            yield image._replace(label=label)
        for member in others:
            count_left_out(member.name, left_out)


def _has_one_ending(name: str) -> bool:
    """True for key.jpg, False for key.mask.png."""
    return name.rpartition("/")[2].count(".") == 1


def _one_label(labels: set[int]) -> int:
    if not labels:
        return _NO_LABEL
    if len(labels) == 1:
        return labels.pop()
    return _TWO_LABELS


def first_names(path: Path) -> list[str]:
    """Return the names of the first 16 members of a tar, none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return [member.name for member in islice(_iter_members(file), 16)]
    except (tarfile.TarError, OSError, ValueError, OverflowError):
        return []


def _sample_of(name: str) -> tuple[str, str]:
    """Return folder and stem of a name: consecutive files with the same are a sample."""
    folder, _, base = name.rpartition("/")
    return folder, base.partition(".")[0]


def _read_label(file: BinaryIO, member: TarMember) -> int:
    """Return the label that a member says, a whole number from 0 in a .cls or .json file, else -1."""
    if member.name.endswith((".cls", ".json")):
        file.seek(member.offset)
        text = file.read(min(member.size, _MAX_LABEL_BYTES))
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            if member.name.endswith(".cls"):
                label = int(text)
            else:
                label = json.loads(text)["label"]
            if type(label) is int and 0 <= label < 2**31:
                return label
    return _NO_LABEL


def tar(split: str, root: Path) -> Source:
    """Open images inside `root/train.tar` and `root/val.tar` (or test, validation), or inside one tar per class.

    Such a tar holds one folder per class, or one tar per class (like the file of ImageNet's training images). The tars
    of classes may also be `root/train/*.tar`. Classes are numbered as in train, if it exists. Of a name that is stored
    twice, the later counts, as in unpacking. Warns about images that are left out.

    Raises: UserError when a tar is missing, damaged, holds no class folders, or has a class that train lacks.
    """
    check_folder(root, "train.tar and val.tar")
    archives = {name: _find_archives(root, name) for name in SPLITS}
    others = _tars_without_split(root) if any(archives.values()) else []
    train = archives["train"]
    own = archives[split]
    _check_splits(root, train, archives["test"], others)
    if not own:
        raise UserError(
            f"{root} has no {SPLIT_NAMES[split]}.tar, and no folder of that name with one tar per class"
        )
    known = train or own
    check_known_classes(own.path, own.classes, known.path, known.classes)
    left_out = _sum_left_out(own.indices)
    order, labels = sort_by_class(own.path, own.names, known.classes, left_out)
    if not len(order):
        raise UserError(
            f"{own.path} has no class folders with images; its members must be like cat/1.jpg"
        )
    return Source(ImageSubset(TarImages(own.indices), order), labels, known.classes)


def _sum_left_out(indices: Sequence[TarIndex]) -> Counter[str]:
    return sum((index.left_out for index in indices), Counter[str]())


def _tars_without_split(root: Path) -> list[Path]:
    """Return the tars with images, and the folders of such tars, that are not named for one split."""
    entries = [*visible(root, ".tar"), *visible(root)]
    unnamed = [path for path in entries if not names_a_split(path.stem)]
    return [path for path in unnamed if _starts_with_images(path)]


def _starts_with_images(path: Path) -> bool:
    """True for a tar whose first members have images, or a folder whose first tar has."""
    inside = visible(path, ".tar")
    first = inside[0] if inside else path
    return any(map(is_image_name, first_names(first)))


def _check_splits(
    root: Path, train: "_Archives | None", test: "_Archives | None", others: Sequence[Path]
) -> None:
    """Check that what is named for a split is not a class: other tars with images then are classes too.

    They are left out, with a warning, where the tars of both splits have a class in common.
    """
    if not others:
        return
    if train and test and set(train.classes) & set(test.classes):
        report_left_out(root, {"not named for a split": len(others)})
        return
    named = train or test
    if named:
        raise ambiguous_split(root, named.path.name, others[0].name)


class _Archives:
    """The tar files of a split: `path` itself, or one per class in the folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = visible(path, ".tar") or [path]

    @cached_property
    def indices(self) -> list[TarIndex]:
        return index_tars(self.files)

    @cached_property
    def names(self) -> list[str]:
        if self.path in self.files:
            return _below_split(list(self.indices[0].names))
        names = []
        for file, index in zip(self.files, self.indices, strict=True):
            names += [f"{file.stem}/{name}" for name in index.names]
        return names

    @cached_property
    def classes(self) -> list[str]:
        """Sorted names of the classes; with one tar per class the tars are not read for it, and may be empty."""
        if self.path in self.files:
            return sorted({composed(name.partition("/")[0]) for name in self.names if "/" in name})
        return sorted({composed(file.stem) for file in self.files})


def _below_split(names: list[str]) -> list[str]:
    """Return the names without a folder around all of them that is named for a split, which is not a class."""
    tops = {name.partition("/")[0] for name in names}
    if len(tops) != 1 or not split_words(*tops) or not all("/" in name for name in names):
        return names
    if not any(name.count("/") > 1 for name in names):
        return names  # a class, the only one
    return _below_split([name.partition("/")[2] for name in names])


def _find_archives(root: Path, split: str) -> _Archives | None:
    """Return the tar files of a split, by the first of its names; tars without classes (of test images) come last."""
    folders = [folder for folder in visible(root) if visible(folder, ".tar")]
    paths = [*named_for(visible(root, ".tar"), split), *named_for(folders, split)]
    candidates = [_Archives(path) for path in paths]
    for archives in candidates:
        if archives.classes:
            return archives
    return candidates[0] if candidates else None


def webdataset(split: str, root: Path) -> Source:
    """Open samples `key.jpg` (or another image) + `key.cls` (or `key.json` with "label") in tar shards below `root`.

    A shard's split is the word train, test, val or validation in its name or its folder's; if no shard has such a word,
    all are test shards. Names of the classes come from `classnames.txt` in `root` (one per line); without it the names
    are the numbers. Warns about samples whose image is of another kind.

    Raises: UserError when shards are missing, damaged, compressed, or a sample has no label, or several that differ.
    """
    check_folder(root, "shards like train-0000.tar")
    shards = _shards_by_split(root)
    if not shards[split]:
        raise UserError(
            f"{root} has no shard for the {split} split; name them like {SPLITS[split][0]}-0000.tar"
        )
    indices = index_tars(shards[split])
    labels = np.concatenate([index.numbers[2] for index in indices])
    if not len(labels):
        raise UserError(
            f"no images in {shards[split][0].parent}; shards must hold key.jpg (or png, webp) + key.cls"
        )
    images = TarImages(indices)
    several = np.flatnonzero(labels == _TWO_LABELS)
    if len(several):
        where = images.name(int(several[0]))
        raise UserError(
            f"{where} has labels that differ in the .cls and .json files next to it; keep one of them"
        )
    if labels.min() < 0:
        raise UserError(
            f"{images.name(int(labels.argmin()))} has no label: next to it must be a .cls file with the number of the "
            'class, or a .json file with "label"; add it, or move the shards without labels away'
        )
    _check_same_labels(images, labels)
    largest = int(labels.max())
    listed = root / "classnames.txt"
    classes = list(map(composed, read_lines(listed))) if listed.is_file() else []
    if not classes:
        other = "test" if split == "train" else "train"
        everything = [*indices, *index_tars(shards[other])]
        largest = max(int(index.numbers[2].max(initial=0)) for index in everything)
        classes = number_classes(largest, root)
    if largest >= len(classes):
        raise UserError(
            f"{root} names {len(classes)} classes, but its shards have label {largest}; labels start at 0"
        )
    report_left_out(root, _sum_left_out(indices))
    return Source(images, labels, classes)


def _check_same_labels(images: TarImages, labels: np.ndarray) -> None:
    """Raise a UserError for a sample that a shard stores twice, with different labels."""
    start = 0
    for names in images.names:
        label_of: dict[tuple[str, str], int] = {}
        for index, name in enumerate(names, start):
            label = int(labels[index])
            earlier = label_of.setdefault(_sample_of(name), label)
            if earlier != label:
                where = images.name(index)
                raise UserError(
                    f"{where} has label {label}, and {earlier} where it is stored before; remove one of them"
                )
        start += len(names)


def _shards_by_split(root: Path) -> dict[str, list[Path]]:
    """Return the sorted shards below a folder by split, those with the first of the split's names that any has."""
    shards = []
    for path in sorted(root.rglob("*.tar")):
        if not is_hidden(*path.relative_to(root).parts):
            shards.append(path)
    words = {path: split_words(str(path.relative_to(root))) for path in shards}
    if not any(words.values()):
        return {"train": [], "test": shards}
    check_one_split(words)
    report_unnamed(root, words)
    by_split: dict[str, list[Path]] = {}
    for split, known in SPLITS.items():
        by_split[split] = []
        for word in known:
            named = [path for path in shards if word in words[path]]
            if named:
                by_split[split] = named
                break
    return by_split
