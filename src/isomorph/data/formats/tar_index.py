"""Images inside tar files, read in place: each shard is indexed once, then any member is read by its offset.

The index of a shard (names, offsets, sizes, labels) is cached in `$XDG_CACHE_HOME/isomorph/shards` (else `~/.cache`)
and written again when the shard's size or modification time changes.
"""

import hashlib
import io
import json
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from isomorph.data.formats.naming import PackedStrings, is_image_name
from isomorph.data.sources import ImageLike
from isomorph.errors import UserError, first_line

_INDEX_VERSION = 1
_COMPRESSED_PREFIXES = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""The first bytes of files compressed by gzip, bzip2, xz and zstandard."""
_IMAGE_KEYS = ("jpg", "jpeg", "png", "webp")


@dataclass(frozen=True)
class TarMember:
    """A file inside a tar file: `size` bytes from `offset` on; a label of -1 means none."""

    name: str
    offset: int
    size: int
    label: int = -1


@dataclass(frozen=True)
class _FileStamp:
    """Path, size and modification time of a shard when it was indexed."""

    path: str
    size: int
    modified: int

    @classmethod
    def of(cls, path: Path) -> "_FileStamp":
        """Return the stamp of a file as it is now."""
        status = path.stat()
        return cls(str(path.absolute()), status.st_size, status.st_mtime_ns)


@dataclass
class ShardIndex:
    """The images of one shard. Shape: offsets, sizes, labels (n,) int64; a label of -1 means none."""

    stamp: _FileStamp
    names: PackedStrings
    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(cls, stamp: _FileStamp, members: Sequence[TarMember]) -> "ShardIndex":
        """Index these members of a shard."""
        columns = ([getattr(member, key) for member in members] for key in ("offset", "size", "label"))
        return cls(
            stamp, PackedStrings.of(member.name for member in members), *(np.asarray(c, np.int64) for c in columns)
        )


class _OpenFile:
    """An open file that closes when nothing refers to it; read by position, so processes and threads may share it."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@lru_cache(maxsize=128)
def _open_shard(stamp: _FileStamp) -> _OpenFile:
    """Open a shard; a process keeps the latest 128 open. Raises: UserError when the file has changed since indexing."""
    file = _OpenFile(stamp.path)
    status = os.fstat(file.descriptor)
    if (status.st_size, status.st_mtime_ns) != (stamp.size, stamp.modified):
        raise UserError(f"{stamp.path} has changed since it was opened; restart to read the new file")
    return file


class TarImages(Sequence[ImageLike]):
    """The images of indexed shards, shard after shard, each read by its offset."""

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
        shard, _ = self._locate(index)
        data = os.pread(_open_shard(self.stamps[shard]).descriptor, size, offset)
        if len(data) != size:
            raise OSError(f"the file ends after {len(data)} of its {size} bytes")
        return data

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the number of an image's shard, and its index in the shard."""
        index = range(len(self))[index]
        shard = int(np.searchsorted(self.ends, index, side="right"))
        return shard, index - (int(self.ends[shard - 1]) if shard else 0)

    def name(self, index: int) -> str:
        shard, member = self._locate(index)
        return f"{self.stamps[shard].path}:{self.names[shard][member]}"

    def file_name(self, index: int) -> str:
        """Return the name of an image inside its shard."""
        shard, member = self._locate(index)
        return self.names[shard][member]


def index_shards(paths: Sequence[Path], content: Literal["images", "samples"]) -> list[ShardIndex]:
    """Return the index of each shard, from the cache where it is still valid.

    `content` selects the members: all images, or the labelled images of webdataset samples.

    Raises: UserError when a shard cannot be read, is cut short or compressed.
    """
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda path: _index_shard(path, content), paths))


def _index_shard(path: Path, content: str) -> ShardIndex:
    try:
        stamp = _FileStamp.of(path)
        index = _load_index(stamp, content)
        if index is None:
            with open(path, "rb") as file:
                if file.read(6).startswith(_COMPRESSED_PREFIXES):
                    raise UserError(
                        f"{path} is compressed, so its members cannot be read in place; unpack it to a .tar"
                    )
                file.seek(0)
                members = _list_images(file) if content == "images" else _list_samples(file, path)
            index = ShardIndex.of(stamp, members)
            _save_index(index, content)
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}; copy or write it again") from None
    return index


def _cache_file(stamp: _FileStamp, content: str) -> Path:
    """Return the path of the cached index of a shard."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(f"{content} {stamp.path}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return base / "isomorph" / "shards" / f"{name}.npz"


def _load_index(stamp: _FileStamp, content: str) -> ShardIndex | None:
    """Return the cached index of this shard if it is of the file as it is now; else None."""
    try:
        with open(_cache_file(stamp, content), "rb") as file, np.load(file, allow_pickle=False) as saved:
            if saved["stamp"].tolist() != [_INDEX_VERSION, stamp.size, stamp.modified]:
                return None
            return ShardIndex(
                stamp, PackedStrings(saved["block"], saved["ends"]), saved["offsets"], saved["sizes"], saved["labels"]
            )
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile):
        return None


def _save_index(index: ShardIndex, content: str) -> None:
    """Write the index to the cache in one piece; nothing is written without a writable cache folder."""
    stamp, names, written = (
        np.asarray([_INDEX_VERSION, index.stamp.size, index.stamp.modified]),
        index.names,
        io.BytesIO(),
    )
    numbers = dict(offsets=index.offsets, sizes=index.sizes, labels=index.labels)
    np.savez(written, allow_pickle=False, stamp=stamp, block=names.block, ends=names.ends, **numbers)
    try:
        target = _cache_file(index.stamp, content)
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
    """Error of a sample without a label."""


def _iter_members(file: BinaryIO, prefix: str = "") -> Iterator[TarMember]:
    """Yield every file but hidden ones in a tar that starts where `file` stands; a tar inside is read as a folder.

    Raises: tarfile.TarError when it is damaged, has no end, or has a link instead of an image.
    """
    with tarfile.open(fileobj=file, mode="r:") as archive:
        while (entry := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep every entry in memory
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


def _list_images(file: BinaryIO) -> list[TarMember]:
    """Return the image files of a tar."""
    return [member for member in _iter_members(file) if is_image_name(member.name)]


def _list_samples(file: BinaryIO, path: Path) -> list[TarMember]:
    """Return the labelled images of a webdataset shard; consecutive members with one key are a sample.

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
    """Return the image of a sample with its label, as a list that is empty when the sample has no image."""
    image = next((parts[key] for key in _IMAGE_KEYS if key in parts), None)
    if image is None:
        return []
    given = ""
    for key in ("cls", "json"):
        if key in parts:
            file.seek(parts[key].offset)
            text = file.read(parts[key].size)
            label = _parse_label(key, text)
            if label is not None:
                return [TarMember(image.name, image.offset, image.size, label)]
            given = f"; its .{key} says {text[:40].decode(errors='replace').strip()!r}"
    raise UnlabelledError(
        f"{path}:{image.name} has no label: next to it must be a .cls file with the number of the class, "
        f'or a .json file with "label"{given}'
    )


def _parse_label(key: str, text: bytes) -> int | None:
    """Return the label in a .cls or .json file; None if it is not a whole number from 0."""
    try:
        label = int(text) if key == "cls" else json.loads(text)["label"]
    except (ValueError, KeyError, TypeError):
        return None
    return label if isinstance(label, int) and not isinstance(label, bool) and label >= 0 else None
