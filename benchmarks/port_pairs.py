"""Carry random weights between two implementations of a network, for every pair of tests/same_networks.py.

In float64, both ways. `equal`: the outputs are equal. `named`: they are not, and a copy of the target that computes
with the source's settings, such as eps, is; the report names these. `different`: the report says where they part.
Narrow networks on small images spend their time in Python; networks of usual size say what a port takes. Times are
those of the process, in one thread, also as a multiple of one call of the source in float64 on one image.

    python benchmarks/port_pairs.py                     # all pairs
    python benchmarks/port_pairs.py ViT Swin            # those with one of these words in the name
"""

import argparse
import copy
import gc
import json
import statistics
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import timm
import torch
import torchvision

import isomorph as iso
from interleave import RESULTS, processor

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from same_networks import PAIRS, give_random_weights

OUT = RESULTS / "port_pairs.json"
# Two networks of usual size, of which the time counts.
FULL_SIZE = {
    "ResNet-50 at 224, timm and torchvision": (
        lambda: timm.create_model("resnet50"),
        torchvision.models.resnet50,
        224,
    ),
    "ViT-S/16 at 224, timm and torchvision": (
        lambda: timm.create_model("vit_small_patch16_224"),
        lambda: torchvision.models.VisionTransformer(224, 16, 12, 6, 384, 1536),
        224,
    ),
}
PAIRS = PAIRS | FULL_SIZE


def images(side):
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def time_forward(model, batch):
    """Return the seconds of a call in float64 on one image, the shortest of five."""
    exact = copy.deepcopy(model).double()
    image = batch[:1].double()
    times = []
    for _ in range(5):
        start = time.process_time()
        exact(image)
        times.append(time.process_time() - start)
    return min(times)


def carry(make_source, make_target, side):
    """Return a row of the table: the verdict, the difference, settings, and the time in forward passes."""
    torch.manual_seed(0)
    source = give_random_weights(make_source())
    target = make_target().eval()
    batch = images(side)
    gc.collect()
    start = time.process_time()
    report = iso.port_weights(source, target, batch, partial=True)
    seconds = time.process_time() - start
    verdict = "different"
    if report.equal:
        verdict = "equal"
    elif report.explained:
        verdict = "named"
    return {
        "verdict": verdict,
        "difference": report.difference,
        "tensors": len(report.tensors),
        "settings": [str(setting) for setting in report.settings],
        "said": report.verdict,
        "seconds": round(seconds, 2),
        "forward_passes": round(seconds / time_forward(source, batch), 1),
    }


def write(rows):
    """Write the table; pairs that are not run again keep their rows."""
    names = [f"{name}, {way}" for name in PAIRS for way in ("there", "back")]
    rows = {name: rows[name] for name in names if name in rows}
    counted = {name: row for name, row in rows.items() if name.rpartition(", ")[0] not in FULL_SIZE}
    full = [row["forward_passes"] for name, row in rows.items() if name not in counted]
    table = {
        "command": "python benchmarks/port_pairs.py",
        "machine": processor(),
        "counts": Counter(row["verdict"] for row in counted.values()),
        "median_forward_passes": {
            "narrow": statistics.median(row["forward_passes"] for row in counted.values()),
            "full size": statistics.median(full) if full else None,
        },
        "rows": rows,
    }
    OUT.write_text(json.dumps(table, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    torch.set_num_threads(1)
    rows = json.loads(OUT.read_text())["rows"] if OUT.exists() else {}
    first, second, side = next(iter(PAIRS.values()))
    carry(first, second, side)  # the first calls of torch's functions take longer
    for name, (first, second, side) in PAIRS.items():
        if words and not any(word in name for word in words):
            continue
        for way, pair in {"there": (first, second), "back": (second, first)}.items():
            with warnings.catch_warnings(action="ignore"):
                row = carry(*pair, side)
            rows[f"{name}, {way}"] = row
            print(
                f"{name}, {way}: {row['verdict']} {row['difference']:.1e} {row['seconds']} s",
                flush=True,
            )
        write(rows)
    print(dict(Counter(row["verdict"] for row in rows.values())))


if __name__ == "__main__":
    main()
