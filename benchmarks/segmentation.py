"""UPerNet on CamVid: eight images learnt by heart, then a narrow ViT with and without pyramids, and fused.

    python benchmarks/segmentation.py [--root shared/data/camvid] [--out runs/segmentation] [--steps 300]
        [--only eight plain pyramid robustness cost memory loading sizes] [--sizes 512]

Eight training images at 160 x 120 are trained and tested on. The other runs train on the images of the training split,
and test on those of the val split at their own size. Runs resume, so the script may be stopped at any time. Results,
with the IoU of every class, are in benchmarks/results/segmentation.json. `--only cost` measures training and inference
with the whole ViT-Tiny on images of each size, `--only memory` counts what a training step keeps, without computing it,
`--only loading` measures the reading and augmentation of an image, and `--only robustness` the runs under corruptions.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import timm
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN as MEAN
from timm.data import IMAGENET_DEFAULT_STD as STD
from torch.utils.data import DataLoader

import isomorph as iso
from interleave import RESULTS, forward, interleaved, kept_mib, show, update
from isomorph.distributed import ALONE
from isomorph.tasks.segmentation.augment import TrainTransform
from isomorph.tasks.segmentation.data import open_splits
from isomorph.tasks.segmentation.fields import SegmentationPart
from isomorph.training import EvaluationOptions
from isomorph.training.task import task_of

NARROW = dict(depth=3, embed_dim=64, num_heads=4, patch_size=8)
FULL = dict(init_values=1.0, relative_bias=True)
PLAIN = dict(layout="plain")
WHOLE = dict(crop=[120, 160], resize=None, ratio=[1.0, 1.0], hflip=0.0, photometric=False, category_share=1.0)
AUGMENTED = dict(crop=[96, 128], resize=[160, 120], ratio=[0.8, 1.5])
COPIES = 8
"""Copies of each of the eight images, which make an epoch of eight steps."""


def recipe(name, root, out, steps, backbone, task, lr, **network):
    """The recipe of a run: AdamW, ten steps of warm-up, then a linear decay."""
    kwargs = dict(backbone="tdrl_vit_ti", channels=32, backbone_kwargs=NARROW | backbone) | network
    optim = dict(lr=lr, schedule="poly", schedule_from="start", warmup_iterations=10, clip_grad=1.0)
    return iso.Recipe(
        name=name,
        model=dict(name="upernet", kwargs=kwargs),
        task=dict(name="segmentation") | task,
        data=dict(source="camvid", batch_size=8, root=root),
        optim=optim,
        iterations=steps,
        evaluate_every=25,
        log_every=8,
        checkpoint_minutes=60,
        out=out / name,
    )


def eight_images(root, folder):
    """Write eight images of the training split, reduced, for training (several copies) and for testing."""
    for name in sorted(path.name for path in (root / "train").glob("*.png"))[3::8][:8]:
        for kind, method in {"": Image.Resampling.LANCZOS, "annot": Image.Resampling.NEAREST}.items():
            with Image.open(root / f"train{kind}" / name) as image:
                small = image.resize((160, 120), method)
            for split, copies in (("train", COPIES), ("val", 1)):
                for copy in range(copies):
                    path = folder / f"{split}{kind}" / f"{copy}-{name}"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    small.save(path)
    return folder


def measured(name, model, root, run=None):
    """The metrics of a model on the test images, of all classes together and of each."""
    first, *classes = task_of(model).evaluate(model, EvaluationOptions(root=root), ALONE)
    row = dict(network=name, parameters=sum(p.numel() for p in model.parameters()), **first)
    row["iou"] = {each["class"]: each["iou"] for each in classes}
    if run:
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        row["seconds"] = round(sum(line["seconds"] for line in lines))
    return row


def robustness(root, out, corruptions, severities):
    """Mean IoU of the plain and the fused network under corruptions, by default all 19; resumes from files in `out`."""
    iso.save(iso.fuse(iso.load(out / "pyramid" / "model.safetensors").eval()), out / "fused.safetensors")
    chosen = [part for name in corruptions or () for part in ("--corruption", name)] or ["--extra"]
    chosen += [part for level in severities for part in ("--severity", str(level))]
    rows = []
    for name, model in {"plain": out / "plain", "fused": out / "fused.safetensors"}.items():
        command = [sys.executable, "-m", "isomorph", "robustness", str(model), "--data", "camvid", "--root", str(root)]
        command += [*chosen, "--out", str(out / f"{name}.jsonl"), "--json"]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        row = dict(network=name, clean=found["clean"]["miou"], corrupted=found["mean_miou"], relative=found["relative"])
        means = {f"severity {level}": value for level, value in found["by_severity"].items()}
        rows.append(row | means | found["by_category"] | found["by_corruption"] | dict(images=found["images"]))
    update("segmentation", {"robustness": rows})
    show("Mean IoU under corruptions (%)", [{"": n} | {r["network"]: r[n] for r in rows} for n in list(rows[0])[1:]])


def sizes():
    """Parameters of UPerNet with a ViT-Tiny for ADE20K, in training and fused, with and without the auxiliary head."""
    rows = []
    for heads in (3, 12):
        for name, layout in {"pyramid": {}, "fused": PLAIN}.items():
            arguments = FULL | layout | dict(num_heads=heads)
            with torch.device("meta"):
                network = timm.create_model("upernet", backbone="tdrl_vit_ti", backbone_kwargs=arguments)
            every, extra = (sum(p.numel() for p in part.parameters()) for part in (network, network.auxiliary_head))
            rows.append(dict(heads=heads, network=name, parameters=every, without_auxiliary_head=every - extra))
    update("segmentation", {"sizes": rows})
    show("Parameters", rows)


def cost(sizes, **options):
    """Cost of an image: seconds of a training step and of inference, and MiB kept for the backward pass."""
    rows = [row for size in sizes for row in cost_at(size, **options)]
    update("segmentation", {"cost": merged("cost", rows, ("size", "network"))})
    show("Cost of an image", rows)


def cost_at(size, images, rounds, warm_up, checkpointing):
    """Rows of `cost` at one size."""
    device, x = torch.device("cpu"), torch.randn(images, 3, size, size)
    networks = {
        name: timm.create_model("upernet", img_size=size, num_classes=150, backbone_kwargs=FULL | layout)
        for name, layout in {"plain": PLAIN, "pyramid": {}}.items()
    }
    for network in networks.values():
        network.backbone.set_grad_checkpointing(checkpointing)
    steps = interleaved({n: training_step(network, x) for n, network in networks.items()}, device, rounds, warm_up)
    kept = {n: kept_mib(network, losses(network, x)) / images for n, network in networks.items()}
    networks["fused"] = iso.fuse(networks["pyramid"].eval())
    passes = interleaved(
        {n: forward(network.eval(), x[:1]) for n, network in networks.items()}, device, rounds, warm_up
    )
    shared = dict(size=size, images=images, checkpointing=checkpointing)
    return [
        {**shared, "network": n, "step (s)": steps[n] / images / 1e3 if n in steps else "-"}
        | {"kept (MiB)": round(kept[n]) if n in kept else "-", "inference (s)": passes[n] / 1e3}
        for n in networks
    ]


def memory(sizes, images):
    """MiB kept for the backward pass by a training step, for each image; counted on the meta device."""
    rows = []
    for size in sizes:
        for name, layout in {"plain, or fused": PLAIN, "pyramid": {}}.items():
            with torch.device("meta"):
                x = torch.empty(images, 3, size, size)
                network = timm.create_model("upernet", img_size=size, num_classes=150, backbone_kwargs=FULL | layout)
                row = dict(size=size, network=name)
                for checkpointing in (False, True):
                    network.backbone.set_grad_checkpointing(checkpointing)
                    kept = kept_mib(network, losses(network, x)) / images
                    row["kept, checkpointed (MiB)" if checkpointing else "kept (MiB)"] = round(kept)
            rows.append(row)
    update("segmentation", {"memory": rows})
    show("Memory of an image", rows)


def merged(table, rows, keys):
    """The rows of a table of the result file, those of the same keys replaced by these."""
    path = RESULTS / "segmentation.json"
    earlier = json.loads(path.read_text()).get(table, []) if path.exists() else []
    new = {tuple(row[key] for key in keys) for row in rows}
    return [*(row for row in earlier if tuple(row.get(key) for key in keys) not in new), *rows]


def loading(root, sizes, workers=2, count=32):
    """Milliseconds of a processor to read and augment an image, and images a second of a loader with workers."""
    rows = []
    for size in sizes:
        part = SegmentationPart(crop=(size, size), resize=(4 * size, size))
        pairs = open_splits("camvid", root, None)[0]
        pairs.transform = TrainTransform(part, MEAN, STD)
        alone = interleaved({"image": lambda pairs=pairs: pairs[0]}, torch.device("cpu"), rounds=9)["image"]
        loader = DataLoader(pairs.subset([i % len(pairs) for i in range(count + 2)]), 2, num_workers=workers)
        batches = iter(loader)
        next(batches)  # the workers have started
        start = time.perf_counter()
        seen = sum(len(images) for images, _ in batches)
        rate = seen / (time.perf_counter() - start)
        rows.append({"size": size, "image (ms)": alone, "workers": workers, "images/s": rate})
    update("segmentation", {"loading": rows})
    show("Loading", rows)


def losses(network, x):
    """The losses of both heads. BatchNorm cannot train on the mean of a single image: then it is in eval mode."""

    def run():
        network.train().head.pooled[0].train(len(x) > 1)
        coarse = network(x, coarse=True)
        return coarse.logits.logsumexp(1).mean() + coarse.auxiliary.logsumexp(1).mean()

    return run


def training_step(network, x):
    """One forward and backward pass of the losses of both heads."""
    run = losses(network, x)
    return lambda: run().backward()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("../shared/data/camvid"))
    parser.add_argument("--out", type=Path, default=Path("runs/segmentation"))
    parser.add_argument("--steps", type=int, default=300, help="of the runs on all images")
    parser.add_argument(
        "--only",
        nargs="+",
        default=["eight", "plain", "pyramid"],
        choices=["eight", "plain", "pyramid", "robustness", "cost", "memory", "loading", "sizes"],
    )
    parser.add_argument("--corruptions", nargs="+", help="of --only robustness; by default all 19")
    parser.add_argument("--severities", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="of --only robustness")
    parser.add_argument("--sizes", type=int, nargs="+", default=[512], help="of --only cost, memory and loading")
    parser.add_argument("--images", type=int, default=2, help="in a training step of --only cost and memory")
    parser.add_argument("--rounds", type=int, default=3, help="of --only cost")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that are not counted, of --only cost")
    parser.add_argument("--checkpointing", action="store_true", help="of the backbone's blocks, in --only cost")
    given = parser.parse_args()
    if "sizes" in given.only:
        sizes()
    if "cost" in given.only:
        options = dict(images=given.images, rounds=given.rounds, warm_up=given.warm_up)
        cost(given.sizes, checkpointing=given.checkpointing, **options)
    if "robustness" in given.only:
        robustness(given.root, given.out, given.corruptions, given.severities)
    if "memory" in given.only:
        memory(given.sizes, given.images)
    if "loading" in given.only:
        loading(given.root, given.sizes)
    rows = []
    for name in (each for each in given.only if each not in ("robustness", "cost", "memory", "loading", "sizes")):
        root = eight_images(given.root, given.out / "images") if name == "eight" else given.root
        options = {
            "eight": dict(steps=800, backbone=PLAIN, task=WHOLE, lr=4e-3, auxiliary=False, drop_rate=0.0),
            "plain": dict(steps=given.steps, backbone=PLAIN, task=AUGMENTED, lr=3e-3, auxiliary_channels=16),
            "pyramid": dict(steps=given.steps, backbone={}, task=AUGMENTED, lr=3e-3, auxiliary_channels=16),
        }[name]
        chosen = recipe(name, root, given.out, **options)
        iso.train(chosen)
        model = iso.load(chosen.folder / "model.safetensors")
        rows.append(dict(steps=chosen.iterations, **measured(name, model, root, chosen.folder)))
        if name == "pyramid":
            rows.append(dict(steps=chosen.iterations, **measured("fused", iso.fuse(model), root)))
        update("segmentation", {row["network"]: [row] for row in rows})
    if not rows:
        return
    show("Metrics", [{key: value for key, value in row.items() if key != "iou"} for row in rows])
    show("IoU of each class (%)", [{"class": n} | {r["network"]: r["iou"][n] for r in rows} for n in rows[0]["iou"]])


if __name__ == "__main__":
    main()
