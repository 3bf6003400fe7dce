"""Pictures inside tar files, read in place: each shard is indexed once, then any member is one read away.

The index of a shard (names, offsets, sizes, labels) is kept in `$XDG_CACHE_HOME/isomorph/shards` (else `~/.cache`) and
made anew when the shard's size or time of change differs.
"""

import hashlib
import io
import json
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from isomorph.data.formats.naming import PackedStrings, is_image_name
from isomorph.data.sources import ImageLike, first_line
from isomorph.errors import UserError

_INDEX_VERSION = 1
_COMPRESSED_PREFIXES = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""How files compressed by gzip, bzip2, xz and zstandard begin."""
_IMAGE_KEYS = ("jpg", "jpeg", "png", "webp")


@dataclass(frozen=True)
class TarMember:
    """A file inside a tar file: `size` bytes from `offset` on."""

    name: str
    offset: int
    size: int
    label: int = -1


@dataclass(frozen=True)
class _FileStamp:
    """A shard as it was when indexed."""

    path: str
    size: int
    changed: int

    @classmethod
    def of(cls, path: Path) -> "_FileStamp":
        found = path.stat()
        return cls(str(path.absolute()), found.st_size, found.st_mtime_ns)


@dataclass
class ShardIndex:
    """The pictures of one shard. Shape: offsets, sizes, labels (n,) int64; a label of -1 is none."""

    stamp: _FileStamp
    names: PackedStrings
    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(cls, stamp: _FileStamp, members: Sequence[TarMember]) -> "ShardIndex":
        columns = ([getattr(member, key) for member in members] for key in ("offset", "size", "label"))
        return cls(
            stamp, PackedStrings.of(member.name for member in members), *(np.asarray(c, np.int64) for c in columns)
        )


class _OpenFile:
    """An open file that closes when nothing refers to it; read by position, so processes and threads may share it."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@lru_cache(maxsize=128)
def _open_shard(stamp: _FileStamp) -> _OpenFile:
    """The shard's file; a process keeps the latest 128 open. Raises: UserError when it is not the one indexed."""
    handle = _OpenFile(stamp.path)
    found = os.fstat(handle.number)
    if (found.st_size, found.st_mtime_ns) != (stamp.size, stamp.changed):
        raise UserError(f"{stamp.path} has changed since it was opened; start again to read it as it is now")
    return handle


class TarImages(Sequence[ImageLike]):
    """The pictures of indexed shards, shard after shard, each read by its offset."""

    def __init__(self, indices: Sequence[ShardIndex]) -> None:
        self.stamps = [index.stamp for index in indices]
        self.names = [index.names for index in indices]
        self.ends = np.cumsum([len(index.offsets) for index in indices], dtype=np.int64)
        self.offsets, self.sizes = (
            np.concatenate([getattr(index, key) for index in indices]) for key in ("offsets", "sizes")
        )

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: Any) -> Any:
        size, offset = int(self.sizes[index]), int(self.offsets[index])
        shard, _ = self.place(index)
        data = os.pread(_open_shard(self.stamps[shard]).number, size, offset)
        if len(data) != size:
            raise OSError(f"the file ends after {len(data)} of its {size} bytes")
        return data

    def place(self, index: int) -> tuple[int, int]:
        """Number of the shard, and place in it."""
        index = range(len(self))[index]
        shard = int(np.searchsorted(self.ends, index, side="right"))
        return shard, index - (int(self.ends[shard - 1]) if shard else 0)

    def name(self, index: int) -> str:
        shard, place = self.place(index)
        return f"{self.stamps[shard].path}:{self.names[shard][place]}"

    def member(self, index: int) -> str:
        """The name of a picture inside its shard."""
        shard, place = self.place(index)
        return self.names[shard][place]


def index_shards(paths: Sequence[Path], pick: Callable[[BinaryIO, Path], list[TarMember]]) -> list[ShardIndex]:
    """The index of each shard, from the cache where it is still good; `pick` lists a shard's pictures.

    Raises: UserError when a shard cannot be read, is cut short or compressed.
    """
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda path: _index_shard(path, pick), paths))


def _index_shard(path: Path, pick: Callable[[BinaryIO, Path], list[TarMember]]) -> ShardIndex:
    try:
        stamp = _FileStamp.of(path)
        kept = _load_index(stamp, pick.__name__)
        if kept is None:
            with open(path, "rb") as file:
                if file.read(6).startswith(_COMPRESSED_PREFIXES):
                    raise UserError(
                        f"{path} is compressed, so its members cannot be read in place; unpack it to a .tar"
                    )
                file.seek(0)
                kept = ShardIndex.of(stamp, pick(file, path))
            _save_index(kept, pick.__name__)
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}; copy or write it again") from None
    return kept


def _cache_file(stamp: _FileStamp, kind: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(f"{kind} {stamp.path}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return base / "isomorph" / "shards" / f"{name}.npz"


def _load_index(stamp: _FileStamp, kind: str) -> ShardIndex | None:
    """The index kept for this shard as it is now, if there is one."""
    try:
        with open(_cache_file(stamp, kind), "rb") as file, np.load(file, allow_pickle=False) as kept:
            if kept["stamp"].tolist() != [_INDEX_VERSION, stamp.size, stamp.changed]:
                return None
            return ShardIndex(
                stamp, PackedStrings(kept["block"], kept["ends"]), kept["offsets"], kept["sizes"], kept["labels"]
            )
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile):
        return None


def _save_index(index: ShardIndex, kind: str) -> None:
    """Writes the index where `_load_index` finds it, whole or not at all; without a writable cache it is not kept."""
    stamp, names, written = (
        np.asarray([_INDEX_VERSION, index.stamp.size, index.stamp.changed]),
        index.names,
        io.BytesIO(),
    )
    numbers = dict(offsets=index.offsets, sizes=index.sizes, labels=index.labels)
    np.savez(written, allow_pickle=False, stamp=stamp, block=names.block, ends=names.ends, **numbers)
    try:
        target = _cache_file(index.stamp, kind)
        target.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
    except (OSError, RuntimeError):
        return
    try:
        with open(number, "wb") as file:
            file.write(written.getbuffer())
        os.replace(name, target)
    except OSError:
        Path(name).unlink(missing_ok=True)


class UnlabelledError(UserError):
    """A sample has no label."""


def _iter_members(file: BinaryIO, prefix: str = "") -> Iterator[TarMember]:
    """Every file in a tar from where `file` stands, but hidden ones; a tar inside is a folder of its name.

    Raises: tarfile.TarError when it is damaged, has no end, or a link in the place of an image.
    """
    with tarfile.open(fileobj=file, mode="r:") as archive:
        while (entry := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would remember them all
            parts = [part for part in entry.name.split("/") if part not in ("", ".")]
            if (entry.islnk() or entry.issym()) and is_image_name(entry.name):
                hint = "pack it with --dereference --hard-dereference"
                raise tarfile.ReadError(f"{entry.name} is a link to {entry.linkname}, not an image; {hint}")
            if not entry.isreg() or any(part.startswith(".") for part in parts):
                continue
            name = prefix + "/".join(parts)
            if name.endswith(".tar"):
                file.seek(entry.offset_data)
                yield from _iter_members(file, name.removesuffix(".tar") + "/")
            else:
                yield TarMember(name, entry.offset_data, entry.size)
        file.seek(archive.offset)
        end = file.read(tarfile.BLOCKSIZE)
        if len(end) < tarfile.BLOCKSIZE or any(end):
            raise tarfile.ReadError(f"no end of the archive where it should be (byte {archive.offset}): cut or damaged")


def images(file: BinaryIO, path: Path) -> list[TarMember]:
    """The image files of a tar."""
    return [member for member in _iter_members(file) if is_image_name(member.name)]


def samples(file: BinaryIO, path: Path) -> list[TarMember]:
    """The labelled pictures of a webdataset shard; members of one key, side by side, are a sample.

    Raises: UserError naming a sample without a label that is a number.
    """
    found: list[TarMember] = []
    key, parts = None, dict[str, TarMember]()
    for member in _iter_members(file):
        folder, _, base = member.name.rpartition("/")
        stem, _, ending = base.partition(".")
        if (folder, stem) != key:
            found += _labelled_image(file, path, parts)
            key, parts = (folder, stem), {}
        parts[ending.lower()] = member
    return found + _labelled_image(file, path, parts)


def _labelled_image(file: BinaryIO, path: Path, parts: dict[str, TarMember]) -> list[TarMember]:
    """The picture of a sample, with its label; nothing when it has no picture."""
    picture = next((parts[key] for key in _IMAGE_KEYS if key in parts), None)
    if picture is None:
        return []
    said = ""
    for key in ("cls", "json"):
        if key in parts:
            file.seek(parts[key].offset)
            text = file.read(parts[key].size)
            label = _parse_label(key, text)
            if label is not None:
                return [TarMember(picture.name, picture.offset, picture.size, label)]
            said = f"; its .{key} says {text[:40].decode(errors='replace').strip()!r}"
    raise UnlabelledError(
        f"{path}:{picture.name} has no label: beside it must be a .cls file with the number of the class, "
        f'or a .json file with "label"{said}'
    )


def _parse_label(key: str, text: bytes) -> int | None:
    """The label that a .cls or .json file gives, if it is a whole number from 0."""
    try:
        label = int(text) if key == "cls" else json.loads(text)["label"]
    except (ValueError, KeyError, TypeError):
        return None
    return label if isinstance(label, int) and not isinstance(label, bool) and label >= 0 else None
