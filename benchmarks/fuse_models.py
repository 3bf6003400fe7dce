"""What fuse merges in a model of every timm module, torchvision's detection and video builders and 16 of transformers.

    nice -n 10 python benchmarks/fuse_models.py [--only timm torchvision transformers] [--rows runs/fused.jsonl]
    python benchmarks/fuse_models.py --passes

The smallest model of each module, with random weights and statistics, in float64, at the smallest size that it takes.
fuse compares both models at several sizes by all their entry points; then their outputs are compared again on another
batch. Where norms stay that only other entry points read, it is counted once more with only_forward=True. One thread.
Resumes; writes benchmarks/results/fused_models.json. With --passes it measures how long fuse takes, in float64
forward passes of one image, both by turns, and writes benchmarks/results/fuse_passes.json.
"""

import argparse
import copy
import json
import re
import signal
import statistics
import sys
import time
import warnings
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import timm
import torch
import torchvision
import transformers
from torch.nn.modules.batchnorm import _BatchNorm

import isomorph as iso
from interleave import RESULTS, forward, interleaved_rounds, show, write
from isomorph.lab.evaluation.coverage import family_of, timm_models
from isomorph.surgery import fuse_with_report

SIZES = (64, 96, 160)
"""Image sizes that are tried before a model's own."""
LARGEST = 90e6
"""Models with more parameters are not run."""
SECONDS = 600
"""Longest time for one model."""
TIMED = ("resnet18", "resnet50", "efficientnet_b0", "fastvit_t8", "mobileone_s0")
"""Models of which --passes measures how long fuse takes."""
TRANSFORMERS = {
    "ResNet": dict(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]),
    "RegNet": dict(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8),
    "MobileNetV1": dict(depth_multiplier=0.25),
    "MobileNetV2": dict(depth_multiplier=0.35),
    "EfficientNet": dict(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280),
    "ConvNext": dict(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    "ConvNextV2": dict(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    "Levit": {},
    "MobileViT": {},
    "MobileViTV2": dict(width_multiplier=0.5),
    "Cvt": {},
    "PoolFormer": dict(hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1]),
    "Bit": dict(hidden_sizes=[128, 256], depths=[1, 1], embedding_size=32, num_groups=8),
    "SwiftFormer": dict(depths=[1, 1, 2, 1]),
    "ViT": dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96),
    "Dinov2": dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4),
}
"""Classes for image classification of transformers, and their configuration."""


def smallest_of_timm():
    """The name of the smallest model of every module of timm, the smallest first, and its number of parameters."""
    known = json.loads((RESULTS / "coverage.json").read_text())["verified"]
    names = defaultdict(list)
    for name in timm_models():
        if family_of(name) not in known:
            names[family_of(name)].append(name)
    found = {row["model"]: count_parameters(row["model"]) for row in known.values()}
    for members in names.values():
        sizes = {name: count_parameters(name) for name in members}
        smallest = min(sizes, key=sizes.get)
        found[smallest] = sizes[smallest]
    return dict(sorted(found.items(), key=lambda item: item[1]))


def count_parameters(name):
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        return sum(parameter.numel() for parameter in timm.create_model(name).parameters())


@torch.no_grad()
def drawn(model):
    """The model in float64 and eval mode, with other weights and statistics."""
    model.eval().double().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        spread = 0.1 * (parameter.std(correction=0) + 0.2 * (parameter.ndim < 2))
        parameter += spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    for norm in model.modules():
        if getattr(norm, "running_mean", None) is not None:
            norm.running_mean += 0.2 * torch.randn(
                norm.running_mean.shape, generator=generator, dtype=torch.float64
            )
            norm.running_var *= 0.7 + 0.6 * torch.rand(
                norm.running_var.shape, generator=generator, dtype=torch.float64
            )
    return model


def images(size, batch=1, seed=0, frames=()):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, *frames, size, size, generator=generator, dtype=torch.float64)


def timm_model(name):
    """A model of timm and a function of a batch size and a seed that gives its inputs."""
    own = timm.get_pretrained_cfg(name).input_size[-1]
    for size in (*SIZES, own):
        for options in ({}, {"img_size": size}):
            try:
                torch.manual_seed(0)
                model = timm.create_model(name, **options).eval()
                model(images(size).float())
                return drawn(model), partial(images, size)
            except Exception as error:  # of any module of timm
                problem = error
    raise problem


def detector(name):
    torch.manual_seed(0)
    small = {} if name.startswith("ssd") else dict(min_size=96, max_size=128)
    model = torchvision.models.get_model(name, weights=None, weights_backbone=None, **small)

    def inputs(batch=1, seed=0):
        return {"images": [image.abs() for image in images(96, batch, seed)]}

    return drawn(model), inputs


def video(name):
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None)
    frames = 16 if name == "s3d" else 8
    return drawn(model), partial(images, 224 if name == "s3d" else 64, frames=(frames,))


def transformer(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**TRANSFORMERS[name])
    model = getattr(transformers, f"{name}ForImageClassification")(config)
    size = getattr(config, "image_size", 64)
    size = size if isinstance(size, int) and name in ("Levit", "ViT", "Dinov2", "MobileViT") else 64

    def inputs(batch=1, seed=0):
        return {"pixel_values": images(size, batch, seed)}

    return drawn(model), inputs


def jobs(only):
    """The name of every model, and what makes it."""
    found = {}
    if "timm" in only:
        for name, parameters in smallest_of_timm().items():
            found[f"timm {name}"] = partial(timm_model, name) if parameters <= LARGEST else None
    if "torchvision" in only:
        for name in torchvision.models.list_models(module=torchvision.models.video):
            found[f"torchvision {name}"] = None if name.startswith("mvit") else partial(video, name)
        for name in torchvision.models.list_models(module=torchvision.models.detection):
            found[f"torchvision {name}"] = partial(detector, name)
    if "transformers" in only:
        for name in TRANSFORMERS:
            found[f"transformers {name}"] = partial(transformer, name)
    return found


def deviation(one, other, inputs):
    """The largest difference of two models in float64, relative to the largest value of each output.

    `verify` compares a detector by the scores and boxes that it sorts: tied boxes may swap.
    """
    report = iso.verify(one, other, inputs, atol=1e-9)
    return max(row.fp64 / row.scale if row.scale else row.fp64 for row in report.inputs)


def count_norms(model):
    return sum(isinstance(module, _BatchNorm) for module in model.modules())


def measured(name, make):
    """A row: norms before and after, the reasons, how far outputs differ, parameters and seconds; or the error."""
    start, row = time.perf_counter(), {"model": name}
    if make is None:
        return row | {
            "error": f"left out: more than {LARGEST:,.0f} parameters, or 16 frames of 224 pixels"
        }
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings(action="ignore"):
            model, inputs = make()
            new, report = fuse_with_report(model, inputs(2))
            reasons = Counter(
                re.sub(r"[\w.]*\d[\w.]*", "N", reason) for reason in report.left.values()
            )
            row |= {
                "norms": [count_norms(model), count_norms(new)],
                "merged": len(report.merged),
                "left": len(report.left),
                "reasons": dict(reasons.most_common()),
                "difference": report.difference,
                "again": deviation(model, new, inputs(1, seed=1)),
                "parameters": report.parameters,
                "entry_points": report.entry_points,
                "inputs": report.inputs,
            }
            if report.left:
                thin, report = fuse_with_report(model, inputs(2), only_forward=True)
                row["only_forward"] = {
                    "norms": count_norms(thin),
                    "left": len(report.left),
                    "again": deviation(model, thin, inputs(1, seed=1)),
                }
    except Exception as error:  # of any library
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        signal.alarm(0)
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def passes(name, rounds=3):
    """A row: seconds of fuse and of one float64 pass of one image of the model's own size, and their ratio."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    image = images(timm.get_pretrained_cfg(name).input_size[-1]).float()
    exact = copy.deepcopy(model).double()
    contenders = {"fuse": lambda: iso.fuse(model, image), "pass": forward(exact, image.double())}
    times = interleaved_rounds(contenders, torch.device("cpu"), rounds, warm_up=1)
    fuse, one = (statistics.median(times[each]) / 1e3 for each in ("fuse", "pass"))
    return {"model": name, "fuse, s": fuse, "pass, s": one, "passes": fuse / one}


def stop(*_):
    raise TimeoutError(f"longer than {SECONDS} s")


def summary(rows):
    """Counts by library: models, errors, norms before and after, models without a norm left, the largest difference."""
    found = {}
    for library in ("timm", "torchvision", "transformers"):
        own = [row for name, row in rows.items() if name.startswith(library)]
        done = [row for row in own if "error" not in row]
        with_norms = [row for row in done if row["norms"][0]]
        found[library] = {
            "models": len(own),
            "errors": len(own) - len(done),
            "norms": [sum(row["norms"][i] for row in done) for i in (0, 1)],
            "norms, only_forward": sum(
                row.get("only_forward", {}).get("norms", row["norms"][1]) for row in done
            ),
            "models with norms": len(with_norms),
            "of them without a norm left": sum(row["norms"][1] == 0 for row in with_norms),
            "largest difference": max(
                (max(row["difference"], row["again"]) for row in done), default=None
            ),
        }
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=["timm", "torchvision", "transformers"])
    parser.add_argument("--rows", type=Path, default=Path("runs/fused.jsonl"))
    parser.add_argument("--passes", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.passes:
        rows = [passes(name) for name in TIMED]
        show("fuse", rows)
        write("fuse_passes", {"fuse": rows})
        return
    signal.signal(signal.SIGALRM, stop)
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    lines = given.rows.read_text().splitlines() if given.rows.exists() else []
    rows = {row["model"]: row for row in map(json.loads, lines)}
    for name, make in jobs(given.only).items():
        if name not in rows:
            rows[name] = measured(name, make)
            print(rows[name], flush=True)
            with given.rows.open("a") as file:
                file.write(json.dumps(rows[name]) + "\n")
    versions = {
        library.__name__: library.__version__
        for library in (torch, timm, torchvision, transformers, iso)
    }
    result = {"versions": versions, "summary": summary(rows), "models": list(rows.values())}
    (RESULTS / "fused_models.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    sys.exit(main())
