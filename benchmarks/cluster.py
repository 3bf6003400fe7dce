"""What 64 GPUs need of the data path and of checkpoints: parts measured here, the rest calculated from them.

    python benchmarks/cluster.py [--gpus 64] [--per-node 8] [--rate 1500] [--network 10] [--disk 2] [--interval 10]

Needs ISOMORPH_DATA with imagenet_samples. `--rate` (images a second of one GPU), `--network` (Gbit/s of a node to the
storage) and `--disk` (GB/s that a node writes) are assumptions, not measurements: give your own.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import timm
import torch

from interleave import show, write
from isomorph.checkpoints.snapshot import (
    checksum,
    newest_snapshot,
    read_snapshot,
    write_snapshot,
)
from isomorph.data.formats.registry import open_source
from isomorph.data.loaders import train_loader, train_transform
from isomorph.data.sampler import BatchOrder, BatchParts, TrainSampler
from isomorph.distributed import Runtime
from isomorph.evaluation.cost import count_parameters

IMAGENET = 1_281_167
CONFIG = dict(input_size=(3, 224, 224), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic")
DEIT = dict(scale=(0.08, 1.0), hflip=0.5, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25, re_mode="pixel")
MODELS = ("deit_small_patch16_224", "t_resnetrs50", "convit_b", "coatnet_3", "coatnet_5")


def timed(work):
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def the_split(gpus, batch, steps):
    """Every process computes the epoch's order by itself and takes its share: what that costs, and that it is exact."""
    order = BatchOrder(IMAGENET, batch, seed=0)
    seconds, (images, _) = timed(lambda: order.epoch(3))
    seen = torch.zeros(IMAGENET, dtype=torch.int)
    for rank in range(gpus):
        loads = iter(TrainSampler(order, 4, 3 * order.steps, BatchParts(range(rank, rank + 1), gpus)))
        for _ in range(steps):
            seen[[image for image, _ in next(loads)]] += 1
    return {
        "processes": gpus,
        "order of an epoch (s)": f"{seconds:.2f}",
        "its memory (MB)": f"{2 * images.element_size() * len(images) / 1e6:.0f}",
        f"images of {steps} steps": f"{int(seen.sum()):,}",
        "seen twice": int((seen > 1).sum()),
        "left out": steps * batch - int((seen > 0).sum()),
    }


def decoding(root_batch):
    """Images a second that one core reads, decodes and augments as DeiT does, and bytes of one."""
    source = open_source("webdataset", "test", Path(root_batch))
    size = sum(len(source.images[i]) for i in range(100)) / 100
    order = BatchOrder(len(source), 50)
    loader = iter(train_loader(source, train_transform(CONFIG, **DEIT), TrainSampler(order, 2)))
    next(loader)
    seconds, _ = timed(lambda: [next(loader) for _ in range(6)])
    return 300 / seconds, size


def checkpointing(parameters=50_000_000):
    """MB/s of writing (flush and checksums in), of reading back (checked), and of the checksum alone, on this disk."""
    tensors = {f"model.{i}": torch.randn(parameters // 10) for i in range(10)}
    megabytes = 4 * parameters / 1e6
    with tempfile.TemporaryDirectory(dir=".") as folder:
        runtime = Runtime(torch.device("cpu"), False)
        writing, _ = timed(lambda: write_snapshot(Path(folder), 1, tensors, {}, runtime))
        reading, _ = timed(lambda: read_snapshot(newest_snapshot(Path(folder)).path))
        files = list(Path(folder).glob("*/*.safetensors"))
        hashing, _ = timed(lambda: [checksum(file) for file in files])
    return megabytes / writing, megabytes / reading, megabytes / hashing


def needs(name, options, hashing):
    """A row of the table: one model at so many GPUs."""
    with torch.device("meta"):
        parameters = count_parameters(timm.create_model(name))
    state = 16 * parameters  # weights, averages, two moments of Adam, float32
    alone = state / 1e9 / options.disk + state / 1e6 / hashing  # one process writes and reads its file again
    shared = state / 1e9 / (options.gpus / options.per_node) / options.disk + state / 1e6 / options.gpus / hashing
    return {
        "model": name,
        "parameters": f"{parameters / 1e6:.0f}M",
        "snapshot": f"{state / 1e9:.2f} GB",
        "ddp: one writes (s)": f"{alone:.1f}",
        "fsdp: all write (s)": f"{shared:.2f}",
        f"ddp, every {options.interval:g} min": f"{alone / (60 * options.interval):.2%}",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1500.0)
    parser.add_argument("--network", type=float, default=10.0)
    parser.add_argument("--disk", type=float, default=2.0)
    parser.add_argument("--interval", type=float, default=10.0)
    parser.add_argument("--samples", type=Path, default=None)
    options = parser.parse_args()
    samples = options.samples or Path(os.environ.get("ISOMORPH_DATA", "data")) / "imagenet_samples"
    split = [the_split(gpus, 4096, 3) for gpus in (1, 8, options.gpus)]
    show("the split of ImageNet-1k at batch 4096", split)
    per_core, size = decoding(samples)
    writing, reading, hashing = checkpointing()
    measured = [
        {"measured here": "images a second and core, decoded and augmented (DeiT)", "value": f"{per_core:.0f}"},
        {"measured here": "bytes of an image", "value": f"{size:,.0f}"},
        {"measured here": "snapshot written, flushed, checksums (MB/s)", "value": f"{writing:.0f}"},
        {"measured here": "snapshot checked and read (MB/s)", "value": f"{reading:.0f}"},
        {"measured here": "checksum alone (MB/s)", "value": f"{hashing:.0f}"},
    ]
    show("one core, one disk", measured)
    node = options.rate * options.per_node
    data = [
        {"need": "images a second, all", "value": f"{options.rate * options.gpus:,.0f}"},
        {"need": "cores a node to decode and augment", "value": f"{node / per_core:.0f}"},
        {"need": "Gbit/s a node from the storage", "value": f"{8e-9 * node * size:.1f} of {options.network:g}"},
        {"need": "epoch of ImageNet-1k (s)", "value": f"{IMAGENET / options.rate / options.gpus:.0f}"},
    ]
    show(f"{options.gpus} GPUs of {options.rate:g} images a second (assumed), {options.per_node} a node", data)
    models = [needs(name, options, hashing) for name in MODELS]
    show(f"snapshots at {options.disk:g} GB/s a node (assumed)", models)
    print(f"\nwrote {write('cluster', dict(split=split, measured=measured, data=data, snapshots=models))}")


if __name__ == "__main__":
    main()
