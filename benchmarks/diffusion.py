"""Diffusion with and without pyramids: the published U-Net, and narrow ones on a tenth of CIFAR-10.

    python benchmarks/diffusion.py network step exports
    python benchmarks/diffusion.py curves norms samples --runs runs [--epoch 1] [--images 1000] [--ddim-steps 10]
    python benchmarks/diffusion.py curves --figure docs/guides/diffusion_loss.svg --page docs/guides/diffusion.md

The runs are those of `isomorph train ddpm_cifar10_small --keep_every 1` and `... ddpm_cifar10_small_tdrl`, and, if it
is there, `... ddpm_cifar10_small` with `--out runs/ddpm_cifar10_small_longer` and as many more epochs as fit into the
time of the pyramids. Needs ISOMORPH_DATA with cifar10 and, for `samples`, the CIFAR-10 weights of cifar_resnet56.
Results are added to results/diffusion.json. With --figure, `norms` draws diffusion_norms.svg next to it.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import timm
import torch
from torch import nn

import isomorph as iso
from interleave import RESULTS, fill_page, interleaved, show, update
from isomorph.data.formats.registry import open_source
from isomorph.data.loaders import eval_loader
from isomorph.distributed import ALONE
from isomorph.evaluation.cost import count_parameters
from isomorph.models.task_networks.ddpm_unet import ATTENTION_PROJECTIONS
from isomorph.report import Line, Panel
from isomorph.report.figures import panels_figure
from isomorph.tasks.diffusion import sample
from isomorph.tasks.diffusion.compare_images import compare_folder, open_real_images
from isomorph.tasks.diffusion.denoiser import noise_schedule
from isomorph.tasks.diffusion.image_distance import cached_features, default_cache, image_distances
from isomorph.tasks.diffusion.image_features import open_extractor
from isomorph.tasks.diffusion.objective import denoising_errors, errors_by_time, mean_error
from isomorph.tasks.diffusion.write_images import write_folder, write_grid
from run_logs import read_log, speed

RUNS = {"plain": "ddpm_cifar10_small", "pyramids": "ddpm_cifar10_small_tdrl"}
TIMES = (0, 50, 250, 500, 750, 950)


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


def exports():
    """The narrow U-Net with pyramids, fused and exported: the largest differences over several sizes of images."""
    torch.manual_seed(0)
    plain = timm.create_model("ddpm_unet", **iso.load_recipe(RUNS["plain"]).model.kwargs)
    wide = iso.recast(plain.eval(), iso.LinearToPyramid("P-W2S"), where=ATTENTION_PROJECTIONS)
    for parameter in wide.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter)
    rows = []
    for format in ("onnx", "pt2"):
        with tempfile.TemporaryDirectory() as folder:
            found = iso.export(wide, Path(folder) / f"net.{format}", dynamic="batch,size").deviation
        row = {"file": format, "images": ", ".join(each.shape for each in found.inputs)}
        largest = max(each.scale for each in found.inputs)
        rows.append(row | dict(float32=f"{found.fp32:.2g}", float64=f"{found.fp64:.2g}", largest=f"{largest:.3g}"))
    return {"exports": rows}


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


def arms(args):
    """The folder of each run and the epoch of its checkpoint: the given one, and the last of the longer run."""
    found = {arm: (args.runs / name, args.epoch) for arm, name in RUNS.items()}
    longer = args.runs / f"{RUNS['plain']}_longer"
    if rows := read_log(longer, "log"):
        found["plain, equal time"] = (longer, rows[-1]["epoch"])
    return found


def curves(args):
    """Training loss by step (means of ten), test error by epoch, and both networks in equal time; the figure."""
    lines, tests = {}, []
    per_value = 32 * 3 * 32 * 32 / 1000  # the loss is a sum over the batch, divided by 1000
    for arm, (folder, _) in arms(args).items():
        steps = read_log(folder, "steps")
        lines[arm] = ([row["step"] for row in steps], [row["loss"] / per_value for row in steps])
        pace = 32 * steps[-1]["step"] / read_log(folder, "log")[-1]["epoch"] / speed(folder)
        tests += [
            {
                "network": arm,
                "epoch": row["epoch"],
                "training": round(row["loss"] / per_value, 5),
                "test": round(row["denoising"], 5),
                "seconds": round(row["epoch"] * pace),
            }
            for row in read_log(folder, "log")
        ]
    if args.figure:
        panel = Panel("error of the predicted noise", "step", "MSE", {arm: Line(*line) for arm, line in lines.items()})
        args.figure.write_text(panels_figure([panel], columns=1))
    points = [
        {"network": arm, "step": step, "training": round(loss, 5)}
        for arm, line in lines.items()
        for step, loss in zip(*line, strict=True)
    ]
    return {"epochs": tests, "equal time": equal_time(args), "steps": points}


def equal_time(args):
    """The training error over the last 100 steps that fit into the time of the plain network's run."""
    rows, seconds = [], None
    for arm, name in RUNS.items():
        log, pace = read_log(args.runs / name, "steps"), 32 / speed(args.runs / name)
        seconds = seconds or log[-1]["step"] * pace
        last = [row for row in log if row["step"] * pace <= 1.001 * seconds][-10:]
        error = sum(row["loss"] for row in last) / len(last) / (32 * 3 * 32 * 32 / 1000)
        rows.append({"network": arm, "steps": last[-1]["step"], "seconds": round(seconds), "training": round(error, 5)})
    return rows


def checkpoint(folder, epoch):
    """The model after an epoch: its averaged weights."""
    return iso.load(folder / f"epoch-{epoch}.safetensors").eval()


def recalibrated(model, images=2048):
    """The model with statistics of training images at uniform time steps, all in the same batches, as in training."""
    schedule, config = noise_schedule(model), dict(model.pretrained_cfg)
    generator, source = torch.Generator().manual_seed(1), open_source("cifar10", "train")
    loader = eval_loader(source.subset(range(images)), config, 256)
    return iso.recalibrate(model, (noisy(x, schedule, random_times(x, generator), generator) for x, *_ in loader))


def random_times(images, generator):
    return torch.randint(1000, (len(images),), generator=generator)


def noisy(images, schedule, times, generator):
    """Images with noise at these time steps, as inputs of the network."""
    return {"x": schedule.add_noise(images, torch.randn(images.shape, generator=generator), times), "t": times}


def norms(args):
    """BatchNorm's statistics at single time steps against the running ones; and what recalibration changes."""
    model = checkpoint(args.runs / RUNS["pyramids"], args.epoch)
    schedule, config = noise_schedule(model), dict(model.pretrained_cfg)
    images = next(iter(eval_loader(open_source("cifar10", "train").subset(range(250)), config, 250)))[0]
    running, moved, rows = statistics_of(model), recalibrated(model), []
    for t in range(0, 1000, 50):
        single = noisy(images, schedule, torch.full((len(images),), t), torch.Generator().manual_seed(t))
        rows.append({"time step": t, **compare_statistics(running, statistics_of(iso.recalibrate(model, [single])))})
    rows.append({"time step": "all", **compare_statistics(running, statistics_of(moved))})
    if args.figure:
        args.figure.with_name("diffusion_norms.svg").write_text(norms_figure(rows[:-1]))
    test = open_source("cifar10", "test").subset(range(500))
    errors = []
    for name, net in (("running statistics", model), ("recalibrated", moved)):
        sums = denoising_errors(iso.fuse(net), eval_loader(test, config, 100), schedule, ALONE)
        row = {"statistics": name, "all": round(mean_error(sums)["denoising"], 5)}
        errors.append(row | {each["time steps"]: round(each["denoising"], 5) for each in errors_by_time(sums, 1000)})
    return {"statistics by time": rows, "recalibrated": errors}


def norms_figure(rows):
    """Shifts of the means and ratios of the variances along the time step."""
    times = [row["time step"] for row in rows]
    shifts = {"median": "shift", "largest": "largest shift"}
    ratios = {"median": "variance", "smallest": "smallest variance", "largest": "largest variance"}
    panels = [
        Panel(title, "time step", label, {name: Line(times, [row[key] for row in rows]) for name, key in keys.items()})
        for title, label, keys in (
            ("shift of the mean", "standard deviations", shifts),
            ("variance", "ratio to the running one", ratios),
        )
    ]
    return panels_figure(panels, columns=2)


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
    networks = {arm: (*run, lambda model: model) for arm, run in arms(args).items()}
    networks["pyramids, recalibrated"] = (args.runs / RUNS["pyramids"], args.epoch, recalibrated)
    for arm, (run, epoch, change) in networks.items():
        folder = args.runs / f"samples_{arm.replace(', ', '_').replace(' ', '_')}_{epoch}"
        if not folder.is_dir():
            made = sample(change(checkpoint(run, epoch)), args.images, "ddim", args.ddim_steps, batch_size=50)
            write_grid(made[:64], args.runs / f"{folder.name}.png")
            write_folder(made, folder)
        found = compare_folder(folder, real, extractor)
        rows.append({"network": arm, "epoch": epoch, "sampler": f"ddim, {args.ddim_steps} steps", **found})
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
    "exports": "The narrow U-Net with pyramids and random weights, exported with open batch and size: largest "
    "differences of the outputs",
    "epochs": "Error of the predicted noise (MSE per pixel) after each epoch; seconds of training at the usual speed",
    "equal time": "Training error over the last 100 steps in equal time, that of the plain network",
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
    if rows := found.get("statistics by time"):
        found["statistics by time"] = [row for row in rows if row["time step"] in (*TIMES, "all")]
    tables = {
        caption: [{k: v for k, v in row.items() if k not in ("features", "kernel_distance_std")} for row in rows]
        for title, caption in TITLES.items()
        if (rows := found.get(title))
    }
    figures = {name: text for name, text in FIGURES.items() if (page.parent / name).is_file()}
    fill_page(page, MARKS, tables, "\n\n".join(f"![{text}]({name})" for name, text in figures.items()))


MARKS = ("<!-- tables: benchmarks/diffusion.py -->", "<!-- end of the tables -->")
FIGURES = {
    "diffusion_loss.svg": "Training error of the predicted noise by step",
    "diffusion_norms.svg": "Statistics of BatchNorm at single time steps against the running ones",
}


PARTS = {
    "network": lambda args: network(),
    "step": lambda args: narrow_step(args.rounds),
    "exports": lambda args: exports(),
    "curves": curves,
    "norms": norms,
    "samples": samples,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--ddim-steps", type=int, default=10)
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
