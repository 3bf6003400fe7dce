"""What the training loop costs beside a bare PyTorch loop, and what it survives.

    python benchmarks/training.py overhead [--rounds 40]
    python benchmarks/training.py crashes [--kills 20] [--out runs/crashes]

`overhead`: time of a step with the same model, images, transform and optimiser, in turn in one process. `crashes`: a
real run is killed (SIGKILL) at random moments so many times, then left alone; its weights, averages, optimiser state
and logs are compared, bit by bit, with those of a run that nothing disturbed.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import timm
import torch
from torch import nn
from torch.utils.data import DataLoader

import isomorph as iso
from interleave import interleaved, show, write
from isomorph.lab.data.loaders import train_transform
from isomorph.lab.training.build import data_config
from isomorph.lab.training.optim import scaled_groups
from isomorph.lab.training.recipe.recipe import validate
from isomorph.lab.training.run.guards import StopRequest
from isomorph.lab.training.run.log import Journal, read_log
from isomorph.lab.training.run.loop import StepMonitor, train_step
from isomorph.lab.training.run.snapshot import newest_snapshot, read_snapshot
from isomorph.lab.training.run.state import Run

OPTIM = dict(name="sgd", lr=0.01, weight_decay=1e-4)
NOTHING = dict(
    name="vit_tiny_patch16_224",
    kwargs=dict(img_size=32, patch_size=32, embed_dim=8, depth=1, num_heads=1),
)
MODELS = {
    "cifar_resnet20, 32 px, batch 128": (dict(name="cifar_resnet20"), 32, 128, 0),
    "cifar_resnet20, 2 workers": (dict(name="cifar_resnet20"), 32, 128, 2),
    "vit_tiny, 96 px, batch 32": (
        dict(name="vit_tiny_patch16_224", kwargs=dict(img_size=96)),
        96,
        32,
        0,
    ),
    "almost no model (a ViT of one narrow block), batch 32": (NOTHING, 32, 32, 0),
}
CRASHED = dict(
    model=dict(name="cifar_resnet20", recast=dict(where="layer3.2.conv2", locality=5, gate=6)),
    data=dict(source="digits", fraction=0.5, size=[16, 16], batch_size=32),
    augment=dict(crop_padding=2, hflip=0.5, erasing=0.3, mixup=0.8),
    optim=dict(lr=1e-3, gate_lr=0.1, warmup_epochs=0.5),
    epochs=12,
    ema=0.99,
    drop_path=0.0,
    log_every=1,
    checkpoint_minutes=0.01,
)


def recipe_of(model, size, batch, workers, **more):
    data = dict(source="cifar10", size=[size, size], batch_size=batch, workers=workers)
    values = dict(
        model=model,
        data=data,
        augment=dict(hflip=0.5),
        optim=OPTIM,
        epochs=1000,
        out="runs/overhead",
    )
    return validate(values | more)


def loop(recipe):
    """One step of a run, with all that follows it, as often as it is called."""
    run = Run(recipe)
    monitor = StepMonitor(run, Journal(recipe, run.runtime, show=False), StopRequest())
    run.loss_module.train()

    def step():
        waited, images = train_step(run)
        run.progress.step += 1
        monitor.after_step(waited, images)

    return run, step


def bare(recipe, run):
    """One step as one writes it by hand: the same images, transform, model and optimiser, and nothing else."""
    model = timm.create_model(recipe.model.name, num_classes=10, **recipe.model.kwargs).train()
    optimizer = torch.optim.SGD(
        scaled_groups(model, recipe.optim), lr=0.01, momentum=0.9, nesterov=True
    )
    source, criterion = run.train.subset(range(len(run.train))), nn.CrossEntropyLoss()
    source.transform = train_transform(data_config(recipe, model), hflip=0.5)
    loader = DataLoader(
        source,
        recipe.data.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=recipe.data.workers,
    )
    batches = iter(loader)

    def step():
        images, labels = next(batches)
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()

    return step


def overhead(options):
    rows = []
    for title, (model, size, batch, workers) in MODELS.items():
        shutil.rmtree("runs/overhead", ignore_errors=True)
        contenders = {}
        for name, more in (
            ("loop", {}),
            ("loop, EMA", dict(ema=0.999)),
            ("loop, a line a step", dict(log_every=1)),
        ):
            run, contenders[name] = loop(recipe_of(model, size, batch, workers, **more))
            if name == "loop":
                contenders["bare"] = bare(run.recipe, run)
        times = interleaved(contenders, torch.device("cpu"), options.rounds)
        row = {"model": title, "bare ms a step": f"{times['bare']:.1f}"}
        for name in ("loop", "loop, EMA", "loop, a line a step"):
            row[name] = (
                f"{times[name] / times['bare']:.3f}x ({times[name] - times['bare']:+.1f} ms)"
            )
        rows.append(row)
    show(f"a step beside a bare PyTorch loop, medians of {options.rounds} interleaved steps", rows)
    print(f"\nwrote {write('training_overhead', {'table': rows})}")
    shutil.rmtree("runs/overhead", ignore_errors=True)


def start(out, options):
    code = "import json, sys; import isomorph as iso; from isomorph.lab.training.recipe.recipe import validate\n"
    code += "iso.train(validate(json.loads(sys.argv[1])), show=False)"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, json.dumps({**CRASHED, "out": str(out)})]
    )


def lines_of(folder):
    """Start-up is over when the log grows or is cut back."""
    path = folder / "steps.jsonl"
    return path.read_text().count("\n") if path.is_file() else 0


def crashes(options):
    shutil.rmtree(options.out, ignore_errors=True)
    whole, killed, draw = options.out / "whole", options.out / "killed", random.Random(options.seed)
    start(whole, options).wait()
    moments = []
    while len(moments) < options.kills:
        process, began = start(killed, options), time.time()
        if draw.random() < 0.9:  # else at any moment of its start
            seen = lines_of(killed)
            while process.poll() is None and lines_of(killed) == seen:
                time.sleep(0.01)
        time.sleep(draw.uniform(0.0, options.longest))
        process.kill()
        process.wait()
        found = newest_snapshot(killed) if killed.is_dir() else None
        step = found.values["progress"]["step"] if found else 0
        partial = [path.name for path in killed.glob(".*")] if killed.is_dir() else []
        moments.append(
            {"kill": len(moments) + 1, "after s": f"{time.time() - began:.2f}", "saved step": step}
        )
        moments[-1] |= {"half written": ", ".join(partial) or "-"}
        if (killed / "model.safetensors").is_file():
            break
    start(killed, options).wait()
    a, b = (read_snapshot(newest_snapshot(folder).path) for folder in (whole, killed))
    same = a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    ours, theirs = (
        iso.load(folder / "model.safetensors").state_dict() for folder in (whole, killed)
    )
    weights = all(torch.equal(ours[name], theirs[name]) for name in ours)
    logs = [
        [(r["step"], r["loss"]) for r in read_log(folder / "steps.jsonl")]
        for folder in (whole, killed)
    ]
    show(f"{len(moments)} kills of a run of {logs[0][-1][0]} steps", moments)
    last = {
        "kills": len(moments),
        "final weights equal": weights,
        "snapshot (weights, EMA, optimiser) equal": same,
        "tensors compared": len(a),
        "lines of steps.jsonl": f"{len(logs[1])} of {len(logs[0])}",
        "steps equal": [s for s, _ in logs[0]] == [s for s, _ in logs[1]],
    }
    show("after the last start", [{k: str(v) for k, v in last.items()}])
    print(f"\nwrote {write('training_crashes', {'kills': moments, 'result': [last]})}")
    assert weights
    assert same


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["overhead", "crashes"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--longest",
        type=float,
        default=3.0,
        help="longest life of a process after its first step, in seconds",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/crashes"))
    options = parser.parse_args()
    {"overhead": overhead, "crashes": crashes}[options.what](options)


if __name__ == "__main__":
    main()
