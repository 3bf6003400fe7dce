"""Diffusion with and without pyramids: the published U-Net, and narrow ones on a tenth of CIFAR-10.

    python benchmarks/diffusion.py network
    python benchmarks/diffusion.py curves norms samples --runs runs [--epoch 1] [--images 1000] [--ddim-steps 20]
    python benchmarks/diffusion.py curves --figure docs/guides/diffusion_loss.svg --page docs/guides/diffusion.md

The runs are those of `isomorph train ddpm_cifar10_small --keep_every 1` and `... ddpm_cifar10_small_tdrl`. Needs
ISOMORPH_DATA with cifar10 and, for `samples`, the CIFAR-10 weights of cifar_resnet56. Results are added to
results/diffusion.json.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import timm
import torch
from torch import nn

import isomorph as iso
from interleave import RESULTS, interleaved, show, update
from isomorph.data.formats.registry import open_source
from isomorph.data.loaders import eval_loader
from isomorph.distributed import ALONE
from isomorph.evaluation.cost import count_parameters
from isomorph.models.ddpm_unet import ATTENTION_PROJECTIONS
from isomorph.report import Line, Panel
from isomorph.report.figures import panels_figure
from isomorph.tasks.diffusion import sample
from isomorph.tasks.diffusion.compare_images import compare_folder, open_real_images
from isomorph.tasks.diffusion.denoiser import noise_schedule
from isomorph.tasks.diffusion.image_distance import cached_features, default_cache, image_distances
from isomorph.tasks.diffusion.image_features import open_extractor
from isomorph.tasks.diffusion.objective import denoising_errors, errors_by_time, mean_error
from isomorph.tasks.diffusion.write_images import write_folder, write_grid

RUNS = {"plain": "ddpm_cifar10_small", "pyramids": "ddpm_cifar10_small_tdrl"}
TIMES = (0, 50, 250, 500, 750, 999)


def network(side=16):
    """The published U-Net: size, function before and after the recast and the fusion, at several time steps."""
    torch.manual_seed(0)
    plain = timm.create_model("ddpm_unet").eval()
    for layer in (m for m in plain.modules() if isinstance(m, nn.Conv2d | nn.Linear)):
        nn.init.xavier_uniform_(layer.weight)  # without gains of 1e-5, which hide attention
    wide = iso.recast(plain, iso.LinearToPyramid("P-W2S"), where=ATTENTION_PROJECTIONS)
    thin = iso.fuse(wide)
    times = (0, 500, 999)
    inputs = [{"x": torch.randn(1, 3, side, side), "t": torch.tensor([t])} for t in times]
    rows = []
    for name, before, after in (("recast", plain, wide), ("fuse", wide, thin)):
        for t, row in zip(times, iso.verify(before, after, inputs).inputs, strict=True):
            deviation = dict(float32=f"{row.fp32:.2g}", float64=f"{row.fp64:.2g}", largest=f"{row.scale:.3g}")
            rows.append({"change": name, "parameters": count_parameters(after), "time step": t, **deviation})
    return {"published network": rows}


def narrow_step(rounds):
    """Processor time of a training step of the narrow U-Net, with and without pyramids."""
    torch.manual_seed(0)
    recipe = iso.load_recipe(RUNS["plain"])
    plain = timm.create_model("ddpm_unet", **recipe.model.kwargs)
    wide = iso.recast(plain, iso.LinearToPyramid("P-W2S"), where=ATTENTION_PROJECTIONS)
    x, t = torch.randn(32, 3, 32, 32), torch.randint(1000, (32,))
    models = {"plain": plain.train(), "pyramids": wide.train()}
    times = interleaved(
        {name: lambda model=model: model(x, t).square().sum().backward() for name, model in models.items()},
        x.device,
        rounds,
    )
    return {
        "narrow step": [
            {
                "network": name,
                "parameters": count_parameters(models[name]),
                "ms": round(times[name], 1),
                "ratio": round(times[name] / times["plain"], 3),
            }
            for name in models
        ]
    }


def read_log(folder, name):
    """The rows of a log file of a run; none before its first epoch has ended."""
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def curves(args):
    """Training loss by step (means of ten), test error by epoch; the figure."""
    lines, tests = {}, []
    for arm, name in RUNS.items():
        folder = args.runs / name
        steps = read_log(folder, "steps.jsonl")
        per_value = 32 * 3 * 32 * 32 / 1000  # the loss is a sum over the batch, divided by 1000
        lines[arm] = ([row["step"] for row in steps], [row["loss"] / per_value for row in steps])
        tests += [
            {
                "network": arm,
                "epoch": row["epoch"],
                "training": round(row["loss"] / per_value, 5),
                "test": round(row["denoising"], 5),
                "seconds": round(row["seconds"]),
            }
            for row in read_log(folder, "log.jsonl")
        ]
    if args.figure:
        panel = Panel("error of the predicted noise", "step", "MSE", {arm: Line(*line) for arm, line in lines.items()})
        args.figure.write_text(panels_figure([panel], columns=1))
    points = [
        {"network": arm, "step": step, "training": round(loss, 5)}
        for arm, line in lines.items()
        for step, loss in zip(*line, strict=True)
    ]
    return {"epochs": tests, "steps": points}


def checkpoint(args, arm):
    """The model after an epoch: its averaged weights."""
    return iso.load(args.runs / RUNS[arm] / f"epoch-{args.epoch}.safetensors")


def norm_inputs(images, schedule, times, seed):
    """The same images with noise at every one of these times: one batch for each time."""
    generator = torch.Generator().manual_seed(seed)
    for t in times:
        steps = torch.full((len(images),), t)
        yield {"x": schedule.add_noise(images, torch.randn(images.shape, generator=generator), steps), "t": steps}


def norms(args):
    """BatchNorm's statistics at single time steps against the running ones; and what recalibration changes."""
    model = checkpoint(args, "pyramids").eval()
    schedule, config = noise_schedule(model), dict(model.pretrained_cfg)
    images = next(iter(eval_loader(open_source("cifar10", "train").subset(range(256)), config, 256)))[0]
    running = statistics_of(model)
    rows = []
    for t in TIMES:
        found = statistics_of(iso.recalibrate(model, norm_inputs(images, schedule, [t], t)))
        rows.append({"time step": t, **compare_statistics(running, found)})
    spread = list(range(0, 1000, 50))
    moved = iso.recalibrate(model, norm_inputs(images, schedule, spread, 1))
    rows.append({"time step": "all", **compare_statistics(running, statistics_of(moved))})
    test = open_source("cifar10", "test").subset(range(0, 10_000, 20))
    errors = []
    for name, net in (("running statistics", model), ("recalibrated", moved)):
        sums = denoising_errors(iso.fuse(net), eval_loader(test, config, 100), schedule, ALONE)
        row = {"statistics": name, "all": round(mean_error(sums)["denoising"], 5)}
        errors.append(row | {each["time steps"]: round(each["denoising"], 5) for each in errors_by_time(sums, 1000)})
    return {"statistics by time": rows, "recalibrated": errors}


def statistics_of(model):
    """Mean and variance of every BatchNorm, by name."""
    kinds = nn.BatchNorm1d | nn.BatchNorm2d
    return {
        n: (m.running_mean.double(), m.running_var.double()) for n, m in model.named_modules() if isinstance(m, kinds)
    }


def compare_statistics(running, found):
    """Median and largest over norms: the shift of the mean in standard deviations (root mean square over channels), and
    the geometric mean of the ratio of variances."""
    shifts, ratios = [], []
    for name, (mean, variance) in running.items():
        shifts.append(((found[name][0] - mean).square() / (variance + 1e-5)).mean().sqrt().item())
        ratios.append(((found[name][1] + 1e-5) / (variance + 1e-5)).log().mean().exp().item())
    numbers = {"shift": np.median(shifts), "largest shift": max(shifts), "variance": np.median(ratios)}
    numbers |= {"smallest variance": min(ratios), "largest variance": max(ratios)}
    return {name: round(float(value), 3) for name, value in numbers.items()}


def samples(args):
    """Distance of samples from training images in the features of cifar_resnet56, and grids to look at."""
    extractor, rows = open_extractor("cifar_resnet56", None, torch.device("cpu")), []
    real = open_real_images("cifar10", "train", max_images=args.images)
    for arm in RUNS:
        folder = args.runs / f"samples_{arm}_{args.epoch}"
        if not folder.is_dir():
            made = sample(checkpoint(args, arm), args.images, "ddim", args.ddim_steps, batch_size=50)
            write_grid(made[:64], args.runs / f"{folder.name}.png")
            write_folder(made, folder)
        found = compare_folder(folder, real, extractor)
        rows.append({"network": arm, "epoch": args.epoch, "sampler": f"ddim, {args.ddim_steps} steps", **found})
    other = open_source("cifar10", "test").subset(range(args.images))
    pair = (
        cached_features(extractor, each, (32, 32), 100, default_cache(), lambda done, total: None)
        for each in (other, real)
    )
    rows.append({"network": "test images", "epoch": "", "sampler": "", **image_distances(*pair, "cifar_resnet56")})
    return {"samples": [{k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()} for row in rows]}


TITLES = {
    "published network": "The published U-Net with random weights, 16 x 16 images: largest differences of the outputs",
    "narrow step": "A training step of the narrow U-Net, 32 images, processor time",
    "epochs": "Error of the predicted noise (MSE per pixel) after each epoch; seconds of a shared machine",
    "statistics by time": "Statistics of the pyramids' BatchNorms at single time steps, against the running ones: "
    "shift of the mean (in standard deviations, root mean square over channels; median and largest over norms) and "
    "ratio of the variance",
    "recalibrated": "Error of the predicted noise on 500 test images, fused, all and by time steps",
    "samples": "Distance of samples from training images in the features of cifar_resnet56 (no FID)",
}
"""Captions of the tables, for the page."""


def write_page(page):
    """Puts the tables that have been measured between the marks of the page."""
    found = json.loads((RESULTS / "diffusion.json").read_text())
    parts = []
    for title, caption in TITLES.items():
        if rows := found.get(title):
            heads = [name for name in rows[0] if name not in ("features", "kernel_distance_std")]
            lines = [
                "| " + " | ".join(map(str, row)) + " |"
                for row in (heads, *([r.get(h, "") for h in heads] for r in rows))
            ]
            parts.append("\n".join([f"{caption}:\n", lines[0], "|" + "---|" * len(heads), *lines[1:]]))
    if (page.parent / "diffusion_loss.svg").is_file():
        parts.append("![Training error of the predicted noise by step](diffusion_loss.svg)")
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + BEGIN + "\n\n" + "\n\n".join(parts) + "\n\n" + END + rest.partition(END)[2])


BEGIN, END = "<!-- tables: benchmarks/diffusion.py -->", "<!-- end of the tables -->"


PARTS = {
    "network": lambda args: network(),
    "step": lambda args: narrow_step(args.rounds),
    "curves": curves,
    "norms": norms,
    "samples": samples,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=list(PARTS))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--ddim-steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--page", type=Path, help="write all tables measured so far into docs/guides/diffusion.md")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for part in args.parts:
        tables = PARTS[part](args)
        for title, rows in tables.items():
            if title != "steps":
                show(title, rows)
        print(update("diffusion", tables))
    if args.page:
        write_page(args.page)


if __name__ == "__main__":
    main()
