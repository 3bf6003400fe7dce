"""Corrupted pictures on disk: raw pixels, checked by sums, whole or not there."""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from isomorph.errors import UserError

_RESERVED_BYTES = 2**30
"""Bytes of the disk that a cache leaves free."""


class CorruptionCache:
    """Cells of corrupted pictures in a folder of their kind (source, size, seed, ...): CORRUPTION-SEVERITY.{raw,json}.

    The list of sums is written last and by renaming, so that a cell with one is whole; what is damaged later is found
    by its sums and made anew.

    Raises: UserError when the folder cannot be written or the disk is too small.
    """

    def __init__(self, top: Path, kind: Mapping[str, Any], images: int, size: tuple[int, int]) -> None:
        self.kind = json.dumps(kind, sort_keys=True)
        self.folder = top.expanduser() / hashlib.sha256(self.kind.encode()).hexdigest()[:16]
        self.images, self.shape = images, (3, *size)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "kind.json").write_text(self.kind)
        except OSError as error:
            raise UserError(f"cannot write the cache {top}: {error.strerror}; give another folder") from None

    @property
    def cell_bytes(self) -> int:
        return self.images * int(np.prod(self.shape))

    def refuse_full_disk(self, cells: int) -> None:
        """Raises: UserError when so many more cells do not fit."""
        free, needed = shutil.disk_usage(self.folder).free - _RESERVED_BYTES, cells * self.cell_bytes
        if needed > free:
            sizes = f"{needed / 2**30:.1f} GiB, {max(0, free) / 2**30:.1f} GiB are"
            raise UserError(f"the cache needs {sizes} free in {self.folder.parent}; give another folder or no --cache")

    def paths(self, corruption: str, severity: int) -> tuple[Path, Path]:
        stem = f"{corruption}-{severity}"
        return self.folder / f"{stem}.raw", self.folder / f"{stem}.json"

    def stored(self, corruption: str, severity: int) -> np.ndarray | None:
        """The pictures of a cell; None when it is not there, not whole or damaged. Shape: -> (n, 3, H, W) uint8"""
        raw, sums = self.paths(corruption, severity)
        try:
            expected = json.loads(sums.read_text())
            if raw.stat().st_size != self.cell_bytes:
                return None
        except (OSError, ValueError):
            return None
        pixels = np.memmap(raw, np.uint8, "r", shape=(self.images, *self.shape))
        found = [zlib.crc32(np.ascontiguousarray(picture).data) for picture in pixels]
        return pixels if found == expected else None


class CellWriter:
    """Writes the cells of one pass over a corruption, picture by picture; nothing counts before `finish`."""

    def __init__(self, cache: CorruptionCache, corruption: str, severities: Sequence[int]) -> None:
        self.places = [cache.paths(corruption, severity) for severity in severities]
        self.parts = [raw.with_name(f".{raw.name}.{os.getpid()}") for raw, _ in self.places]
        self.files: list[BinaryIO] = [part.open("wb") for part in self.parts]
        self.sums: list[list[int]] = [[] for _ in self.parts]

    def add(self, pictures: Tensor) -> None:
        """Shape: (B, severities, 3, H, W) uint8"""
        for picture in pictures.cpu().numpy():
            for file, sums, cell in zip(self.files, self.sums, picture, strict=True):
                block = np.ascontiguousarray(cell)
                sums.append(zlib.crc32(block.data))
                file.write(block.data)

    def finish(self) -> None:
        """Puts the pixels in place, then their sums: a cell with sums is whole."""
        for file, part, sums, (raw, listed) in zip(self.files, self.parts, self.sums, self.places, strict=True):
            file.flush()
            os.fsync(file.fileno())
            file.close()
            listed.unlink(missing_ok=True)
            os.replace(part, raw)
            draft = part.with_suffix(".sums")
            draft.write_text(json.dumps(sums))
            os.replace(draft, listed)

    def drop(self) -> None:
        """Forgets what was not finished."""
        for file, part in zip(self.files, self.parts, strict=True):
            file.close()
            part.unlink(missing_ok=True)


class CachedImages(Dataset[tuple[Tensor, int]]):
    """Cells of a cache side by side. Shape: [i] -> (severities, 3, H, W) uint8, label"""

    def __init__(self, cells: Sequence[np.ndarray], labels: np.ndarray) -> None:
        self.cells, self.labels = cells, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(np.stack([cell[index] for cell in self.cells])), int(self.labels[index])
