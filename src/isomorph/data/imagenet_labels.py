"""What ImageNet's labels mean: wnids, the classes that suites keep, and ReaL's labels, from a small file of our own."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

LABEL_FILE = Path(__file__).with_name("imagenet_labels.npz")
"""Made from the published files by benchmarks/imagenet_labels.py."""


@dataclass(frozen=True)
class ImageNetLabels:
    """The 1000 wnids in label order; labels of the classes that a suite keeps; ReaL's labels of the 50,000 val images.

    Shape: kept, each (200,) int64, ascending; real (50000, 9) int64, filled up with -1

    Source: timm (wnids); Hendrycks et al., natural-adv-examples and imagenet-r (kept); Beyer et al. (2020),
    reassessed-imagenet (real)
    """

    wnids: tuple[str, ...]
    kept: dict[str, np.ndarray]
    real: np.ndarray

    @cached_property
    def number(self) -> dict[str, int]:
        """The label of every wnid."""
        return {wnid: label for label, wnid in enumerate(self.wnids)}


@lru_cache(maxsize=1)
def imagenet_labels() -> ImageNetLabels:
    """The label file, read once."""
    with np.load(LABEL_FILE, allow_pickle=False) as file:
        wnids = tuple(file["wnids"].astype(str).tolist())
        kept = {name: file[name.replace("-", "_")].astype(np.int64) for name in ("imagenet-a", "imagenet-r")}
        return ImageNetLabels(wnids, kept, _pad_rows(file["real"], file["real_counts"]))


def _pad_rows(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Lists of these lengths, one after another, as rows of a table. Shape: (sum of counts,), (n,) -> (n, longest)"""
    table = np.full((len(counts), int(counts.max(initial=0))), -1, np.int64)
    table[np.arange(table.shape[1]) < counts[:, None]] = values
    return table
