"""Disk cache of corrupted images: raw pixels, verified by checksums."""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from isomorph.distributed import ALONE, Runtime
from isomorph.errors import UserError

_RESERVED_BYTES = 2**30
"""Bytes of the disk that a cache leaves free."""


class CorruptionCache:
    """Cells of corrupted images (all images under one corruption and severity) in CORRUPTION-SEVERITY.{raw,json}.

    The folder is named for `kind`: source, size, seed and all else that the pixels depend on. The checksums of a cell
    are written last and by renaming, so a cell that has them is complete; a cell damaged later fails its checksums and
    is computed again. The processes of `runtime` write the cells together, to a disk that all of them see.

    Raises: UserError when the folder cannot be written or the disk is too small.
    """

    def __init__(
        self, top: Path, kind: Mapping[str, Any], images: int, size: tuple[int, int], runtime: Runtime = ALONE
    ) -> None:
        self.kind = json.dumps(kind, sort_keys=True)
        self.folder = top.expanduser() / hashlib.sha256(self.kind.encode()).hexdigest()[:16]
        self.images, self.shape, self.runtime = images, (3, *size), runtime
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "kind.json").write_text(self.kind)
        except OSError as error:
            raise UserError(f"cannot write the cache {top}: {error.strerror}; give another folder") from None

    @property
    def image_bytes(self) -> int:
        """Bytes of one image."""
        return int(np.prod(self.shape))

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell."""
        return self.images * self.image_bytes

    def check_free_space(self, cells: int) -> None:
        """Raise a UserError when this many more cells do not fit on the disk."""
        free, needed = shutil.disk_usage(self.folder).free - _RESERVED_BYTES, cells * self.cell_bytes
        if needed > free:
            raise UserError(
                f"the cache needs {needed / 2**30:.1f} GiB, but {max(0, free) / 2**30:.1f} GiB are free in "
                f"{self.folder.parent}; give another folder or leave out --cache"
            )

    def paths(self, corruption: str, severity: int) -> tuple[Path, Path]:
        """Return the files of a cell: pixels and checksums."""
        stem = f"{corruption}-{severity}"
        return self.folder / f"{stem}.raw", self.folder / f"{stem}.json"

    def load(self, corruption: str, severity: int) -> np.ndarray | None:
        """Return the images of a cell; None if it is missing, incomplete or damaged. Shape: -> (n, 3, H, W) uint8"""
        raw, sums = self.paths(corruption, severity)
        try:
            expected = json.loads(sums.read_text())
            if raw.stat().st_size != self.cell_bytes:
                return None
        except (OSError, ValueError):
            return None
        pixels = self._map(raw)
        actual = [zlib.crc32(np.ascontiguousarray(image).data) for image in pixels]
        return pixels if actual == expected else None

    def load_complete(self, corruption: str, severities: Sequence[int]) -> dict[int, np.ndarray]:
        """Return the images of the complete cells by severity; the main process verifies them for all.

        Raises: UserError when another process does not see the files.
        """
        main = self.runtime.is_main
        found = {s: pixels for s in severities if main and (pixels := self.load(corruption, s)) is not None}
        complete = self.runtime.gather(list(found))[0]
        with self.explain_missing():
            return found if main else {s: self._map(self.paths(corruption, s)[0]) for s in complete}

    def _map(self, raw: Path) -> np.ndarray:
        """Return the images of a file, memory-mapped. Shape: -> (n, 3, H, W) uint8"""
        return np.memmap(raw, np.uint8, "r", shape=(self.images, *self.shape))

    @contextmanager
    def explain_missing(self) -> Iterator[None]:
        """Raise UserError for a file that another process has made and this one does not see."""
        try:
            yield
        except FileNotFoundError:
            raise UserError(
                f"process {self.runtime.rank} does not see the files of the others in {self.folder.parent}; give a "
                "folder on a disk that all nodes see, or leave out --cache"
            ) from None


class CellWriter:
    """Writer of the cells of one corruption, batch by batch; they are in the cache once `finish` has run.

    All processes write to the same files, each its own images.
    """

    def __init__(self, cache: CorruptionCache, corruption: str, severities: Sequence[int]) -> None:
        self.cache, self.runtime = cache, cache.runtime
        self.targets = [cache.paths(corruption, severity) for severity in severities]
        owner = self.runtime.gather(os.getpid())[0]
        self.parts = [raw.with_name(f".{raw.name}.{owner}") for raw, _ in self.targets]
        self.files: list[BinaryIO] = [part.open("wb") for part in self.parts] if self.runtime.is_main else []
        self.runtime.gather(None)  # the files exist from here on
        if not self.runtime.is_main:
            with cache.explain_missing():
                self.files = [part.open("r+b") for part in self.parts]
        self.sums: list[dict[int, int]] = [{} for _ in self.parts]

    def add(self, images: Tensor, first: int) -> None:
        """Write a batch of images, which begins with the image of index `first`.

        Shape: (B, severities, 3, H, W) uint8
        """
        for file in self.files:
            file.seek(first * self.cache.image_bytes)
        for index, severities in enumerate(images.cpu().numpy(), first):
            for file, sums, image in zip(self.files, self.sums, severities, strict=True):
                block = np.ascontiguousarray(image)
                sums[index] = zlib.crc32(block.data)
                file.write(block.data)

    def finish(self) -> None:
        """Move the pixels of all processes into the cache, then their checksums, which mark a cell as complete."""
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        shares = self.runtime.gather(self.sums)
        for cell, part, (raw, listed) in zip(count(), self.parts, self.targets) if self.runtime.is_main else ():
            sums = {index: value for share in shares for index, value in share[cell].items()}
            listed.unlink(missing_ok=True)
            os.replace(part, raw)
            draft = part.with_suffix(".sums")
            draft.write_text(json.dumps([sums[index] for index in sorted(sums)]))
            os.replace(draft, listed)

    def discard(self) -> None:
        """Delete the unfinished files."""
        for file, part in zip(self.files, self.parts, strict=True):
            file.close()
            part.unlink(missing_ok=True)


class CachedImages(Dataset[tuple[Tensor, int]]):
    """The images of several cached cells, by image. Shape: [i] -> (severities, 3, H, W) uint8, label"""

    def __init__(self, cells: Sequence[np.ndarray], labels: np.ndarray) -> None:
        self.cells, self.labels = cells, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(np.stack([cell[index] for cell in self.cells])), int(self.labels[index])
