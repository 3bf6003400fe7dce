"""ImageNet's labels: wnids, the classes of ImageNet-A and ImageNet-R, and ReaL's labels, from a file in the package."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

LABEL_FILE = Path(__file__).with_name("imagenet_labels.npz")
"""Written by benchmarks/imagenet_labels.py from the published files."""


@dataclass(frozen=True)
class ImageNetLabels:
    """The 1000 wnids in label order, the classes of each smaller suite, and ReaL's labels of the 50,000 val images.

    Shape: subsets, each (200,) int64, ascending; real (50000, 9) int64, padded with -1
    Source: timm (wnids); Hendrycks et al., natural-adv-examples and imagenet-r (subsets); Beyer et al. (2020),
    reassessed-imagenet (real)
    """

    wnids: tuple[str, ...]
    subsets: dict[str, np.ndarray]
    real: np.ndarray

    @cached_property
    def label_of(self) -> dict[str, int]:
        """The label of each wnid."""
        return {wnid: label for label, wnid in enumerate(self.wnids)}


@lru_cache(maxsize=1)
def imagenet_labels() -> ImageNetLabels:
    """Return the labels; their file is read once."""
    with np.load(LABEL_FILE, allow_pickle=False) as file:
        wnids = tuple(file["wnids"].astype(str).tolist())
        subsets = {name: file[name.replace("-", "_")].astype(np.int64) for name in ("imagenet-a", "imagenet-r")}
        return ImageNetLabels(wnids, subsets, _pad_rows(file["real"], file["real_counts"]))


def _pad_rows(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Split values into rows of these lengths, padded with -1. Shape: (sum of counts,), (n,) -> (n, longest)"""
    table = np.full((len(counts), int(counts.max(initial=0))), -1, np.int64)
    table[np.arange(table.shape[1]) < counts[:, None]] = values
    return table
