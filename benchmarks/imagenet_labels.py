"""Packs the published label files of the ImageNet suites into the one that isomorph ships.

    python benchmarks/imagenet_labels.py $ISOMORPH_DATA/imagenet_labels

The folder holds imagenet1k_wnids.txt (the 1000 wnids in label order, as in timm, Apache-2.0), real.json
(google-research/reassessed-imagenet, Apache-2.0), imagenet_a_classes.csv (hendrycks/natural-adv-examples, MIT) and
imagenet_r_classes.csv (hendrycks/imagenet-r, MIT), these two with columns imagenet_label and wnid.
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np

from isomorph.lab.data.imagenet_labels import LABEL_FILE


def kept(path: Path, wnids: list[str]) -> np.ndarray:
    """The labels of a suite's classes, by their wnids. Shape: (200,) uint16"""
    rows = list(csv.DictReader(path.read_text().splitlines()))
    labels = sorted(wnids.index(row["wnid"]) for row in rows)
    assert labels == sorted(int(row["imagenet_label"]) for row in rows), (
        f"{path}: labels and wnids disagree"
    )
    return np.asarray(labels, np.uint16)


def pack(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of the file: wnids as S9, the classes kept, ReaL's labels one image after another and their counts."""
    wnids = (folder / "imagenet1k_wnids.txt").read_text().split()
    real = json.loads((folder / "real.json").read_text())
    assert len(wnids) == 1000
    assert len(real) == 50_000
    return {
        "wnids": np.asarray(wnids, "S9"),
        "imagenet_a": kept(folder / "imagenet_a_classes.csv", wnids),
        "imagenet_r": kept(folder / "imagenet_r_classes.csv", wnids),
        "real": np.concatenate([np.asarray(labels, np.uint16) for labels in real]),
        "real_counts": np.asarray([len(labels) for labels in real], np.uint8),
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    np.savez_compressed(LABEL_FILE, allow_pickle=False, **pack(Path(sys.argv[1])))
    print(f"wrote {LABEL_FILE} ({LABEL_FILE.stat().st_size:,} bytes)")
