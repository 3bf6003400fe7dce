"""What robustness costs.

    python benchmarks/robustness.py [--images 1000] [--slice 50] [--model resnet18] [--workers 2] [--rounds 3]

Times, picture by picture and interleaved, each corruption in imagecorruptions' form and in isomorph's, decoding and
framing, and the model; then the whole job of 95 cells as it was (every cell by itself: decode, corrupt with
imagecorruptions, model) and as it is, on a slice of the images, scaled up to all. Needs ISOMORPH_DATA with
imagenet_samples.
"""

import argparse
import os
import statistics
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import timm
import torch
from timm.data import resolve_data_config

from interleave import show, write
from isomorph.lab.data.corruptions.corrupt import (
    EXTRA_CORRUPTIONS,
    IMAGENET_C_CORRUPTIONS,
    IMAGENET_C_CROP,
    SEVERITIES,
    CorruptedImages,
    corrupt,
    corruption_seed,
    image_transform,
)
from isomorph.lab.data.formats.registry import open_source
from isomorph.lab.data.loaders import batch_ranges, ordered_loader

ALL = (*IMAGENET_C_CORRUPTIONS, *EXTRA_CORRUPTIONS)


def package(pixels, name, severity, seed):
    """The corruption as imagecorruptions draws it."""
    from imagecorruptions import corrupt as theirs

    seeded = {"seed": seed} if name in ("glass_blur", "impulse_noise") else {}
    np.random.seed(seed)
    return theirs(pixels, severity, name, **seeded)


class Before(CorruptedImages):
    """Pictures made as before: each cell decodes its images itself and takes imagecorruptions' forms."""

    def __getitem__(self, index):
        pixels = np.asarray(self.crop(self.source.image(index)))
        seeds = (
            corruption_seed(self.corruption, severity, int(self.source.ids[index]))
            for severity in self.severities
        )
        seen = [
            package(pixels, self.corruption, s, seed)
            for s, seed in zip(self.severities, seeds, strict=True)
        ]
        return torch.from_numpy(np.stack(seen)).permute(0, 3, 1, 2), int(self.source.labels[index])


def milliseconds(act):
    start = time.perf_counter()
    act()
    return 1e3 * (time.perf_counter() - start)


def by_corruption(pictures, rounds):
    """Median milliseconds of a picture under each corruption, mean over severities; both forms in turn."""
    rows = []
    for name in ALL:
        times = {package: [], corrupt: []}
        for form in times:  # warm: tables, textures, compiled loops
            form(pictures[0], name, 1, 0)
        for turn in range(rounds):
            for i, pixels in enumerate(pictures):
                for form, kept in times.items():
                    draws = [
                        partial(form, pixels, name, severity, turn * 99 + i)
                        for severity in SEVERITIES
                    ]
                    kept.append(statistics.mean(map(milliseconds, draws)))
        old, new = (statistics.median(kept) for kept in times.values())
        rows.append(
            {"corruption": name, "imagecorruptions ms": old, "isomorph ms": new, "ratio": old / new}
        )
    total = [sum(row[key] for row in rows) for key in ("imagecorruptions ms", "isomorph ms")]
    rows.append(
        {
            "corruption": "sum",
            **dict(zip(list(rows[0])[1:], (*total, total[0] / total[1]), strict=True)),
        }
    )
    return rows


def seconds_of(dataset, model, options):
    """Seconds to show a model a dataset; without a model, to make the pictures."""
    start = time.perf_counter()
    with torch.inference_mode():
        batches = batch_ranges(len(dataset), max(1, options.batch // len(dataset.severities)))
        for pictures, _ in ordered_loader(dataset, batches, options.workers):
            if model is not None:
                model(pictures.flatten(0, 1).float() / 255)
    return time.perf_counter() - start


def scaled(form, source, frame, name, severities, model, options):
    """Seconds for all images from those for one and for the slice: starting a pass is paid once, images each."""
    one = seconds_of(form(source.subset([0]), frame, name, severities), model, options)
    part = seconds_of(form(source, frame, name, severities), model, options)
    return one + (part - one) * (options.images - 1) / (len(source) - 1)


def whole_job(source, config, model, options):
    """Seconds of all 95 cells, before and after in turn, corruption by corruption, with the model and without."""
    frame = image_transform(config)
    ways = {
        "before": (Before, [(severity,) for severity in SEVERITIES]),
        "after": (CorruptedImages, [SEVERITIES]),
    }
    totals = {way: [0.0, 0.0] for way in ways}
    for name in ALL:
        for way, (form, groups) in ways.items():
            for place, net in enumerate((model, None)):
                spent = (scaled(form, source, frame, name, group, net, options) for group in groups)
                totals[way][place] += sum(spent)
    ready = torch.zeros(options.batch, 3, *config["input_size"][1:], dtype=torch.uint8)
    with torch.inference_mode():
        times = [
            milliseconds(lambda: model(ready.float() / 255)) for _ in range(2 + options.rounds)
        ][2:]
    net = (
        statistics.median(times) / 1e3 / options.batch * options.images * len(ALL) * len(SEVERITIES)
    )
    heads = ("whole job, s", "pictures alone, s", "model alone, s")
    rows = [
        {"95 cells": way, **dict(zip(heads, (*found, net), strict=True))}
        for way, found in totals.items()
    ]
    return [*rows, {"95 cells": "ratio", **{head: rows[0][head] / rows[1][head] for head in heads}}]


def speed(options):
    import cv2

    cv2.setNumThreads(1)
    root = Path(os.environ.get("ISOMORPH_DATA", "data")) / "imagenet_samples"
    source = open_source("webdataset", "test", root)
    model = timm.create_model(options.model, pretrained=False).eval()
    config = {
        **resolve_data_config({}, model=model),
        **IMAGENET_C_CROP,
        "input_size": (3, 224, 224),
    }
    frame = image_transform(config)
    chosen = source.subset(
        np.linspace(0, len(source) - 1, min(options.slice, len(source))).astype(int)
    )
    decoding = [milliseconds(lambda i=i: frame(chosen.image(i))) for i in range(len(chosen))]
    pictures = [np.asarray(frame(chosen.image(i))) for i in range(min(8, len(chosen)))]
    rows = by_corruption(pictures, options.rounds)
    show("a picture of 224 px, ms, one thread", rows)
    made = [
        {
            "decode and frame ms": statistics.median(decoding),
            "an image before": 95,
            "after": len(ALL),
        }
    ]
    show("decodings of each image", made)
    job = whole_job(chosen, config, model, options)
    show(f"95 cells on {options.images} images (scaled from {len(chosen)}), {options.model}", job)
    about = [{key: str(value) for key, value in vars(options).items()}]
    tables = {"options": about, "by corruption": rows, "decoding": made, "whole job": job}
    print(f"\nwrote {write('robustness_speed', tables)}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1000, help="what the times are scaled to")
    parser.add_argument("--slice", type=int, default=50, help="images that are really run")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)
    speed(options)


if __name__ == "__main__":
    main()
