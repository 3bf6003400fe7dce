"""What the training loop costs beside a bare PyTorch loop, and what it survives.

    python benchmarks/training.py overhead [--rounds 9] [--steps 8]
    python benchmarks/training.py crashes [--kills 20] [--out runs/crashes]

`overhead`: seconds a step of the same model, images, transform and optimiser, interleaved in one process. `crashes`:
a real run is killed (SIGKILL) at random moments so many times, then left alone; its weights, averages, optimiser state
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
from isomorph.data import train_transform
from isomorph.training.build import data_config
from isomorph.training.journal import rows_of
from isomorph.training.loop import train_epoch
from isomorph.training.optim import parameter_groups
from isomorph.training.recipe import check
from isomorph.training.run import open_run
from isomorph.training.snapshot import newest, read_snapshot

OPTIM = dict(name="sgd", lr=0.01, weight_decay=1e-4)
MODELS = {
    "cifar_resnet20, 32 px, batch 128": (dict(name="cifar_resnet20"), 32, 128, 0),
    "cifar_resnet20, 2 workers": (dict(name="cifar_resnet20"), 32, 128, 2),
    "vit_tiny, 96 px, batch 32": (dict(name="vit_tiny_patch16_224", kwargs=dict(img_size=96)), 96, 32, 0),
}
CRASHED = dict(
    model=dict(name="cifar_resnet20", recast=dict(where="layer3.2.conv2", locality=5, gate=6)),
    data=dict(source="digits", fraction=0.5, size=[16, 16], batch_size=32),
    augment=dict(crop_padding=2, hflip=0.5, erasing=0.3, mixup=0.8),
    optim=dict(lr=1e-3, warmup_epochs=0.5),
    epochs=12,
    ema=0.99,
    drop_path=0.0,
    log_every=1,
    checkpoint_minutes=0.01,
)


def recipe_of(model, size, batch, workers, steps, **more):
    fraction = min(1.0, (steps * batch + batch / 2) / 50_000)
    return check(
        dict(
            model=model,
            data=dict(source="cifar10", fraction=fraction, size=[size, size], batch_size=batch, workers=workers),
            augment=dict(hflip=0.5),
            optim=OPTIM,
            epochs=10_000,
            out="runs/overhead",
        )
        | more
    )


def ours(recipe):
    """An epoch of a run, as often as it is called."""
    run = open_run(recipe)

    def epoch():
        train_epoch(run)
        run.progress.closed += 1
        run.total.zero_()

    return run, epoch


def bare(recipe, run):
    """An epoch as one writes it by hand: the same images, transform, model and optimiser, and nothing else."""
    model = timm.create_model(recipe.model.name, num_classes=10, **recipe.model.kwargs).train()
    optimizer = torch.optim.SGD(parameter_groups(model, recipe.optim), lr=0.01, momentum=0.9, nesterov=True)
    source, criterion = run.train.subset(range(len(run.train))), nn.CrossEntropyLoss()
    source.transform = train_transform(data_config(recipe, model), hflip=0.5)
    workers = dict(num_workers=recipe.data.workers, persistent_workers=recipe.data.workers > 0)
    loader = DataLoader(source, recipe.data.batch_size, shuffle=True, drop_last=True, **workers)

    def epoch():
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
        return loss.item()

    return epoch


def overhead(options):
    shutil.rmtree("runs/overhead", ignore_errors=True)
    rows = []
    for title, (model, size, batch, workers) in MODELS.items():
        contenders = {}
        for name, more in (("loop", {}), ("loop, EMA", dict(ema=0.999)), ("loop, a line a step", dict(log_every=1))):
            run, contenders[name] = ours(recipe_of(model, size, batch, workers, options.steps, **more))
            if name == "loop":
                contenders["bare"] = bare(run.recipe, run)
        steps = run.order.steps
        times = interleaved(contenders, torch.device("cpu"), options.rounds)
        row = {"model": title, "bare ms a step": f"{times['bare'] / steps:.1f}"}
        rows.append(row | {name: f"{times[name] / times['bare']:.3f}x" for name in contenders if name != "bare"})
    show(f"a step beside a bare PyTorch loop, median of {options.rounds} interleaved rounds of {steps} steps", rows)
    print(f"\nwrote {write('training_overhead', {'table': rows})}")
    shutil.rmtree("runs/overhead", ignore_errors=True)


def start(out, options):
    code = "import json, sys; import isomorph as iso; from isomorph.training.recipe import check\n"
    code += "iso.train(check(json.loads(sys.argv[1])), show=False)"
    return subprocess.Popen([sys.executable, "-c", code, json.dumps({**CRASHED, "out": str(out)})])


def crashes(options):
    shutil.rmtree(options.out, ignore_errors=True)
    whole, killed, draw = options.out / "whole", options.out / "killed", random.Random(options.seed)
    start(whole, options).wait()
    moments = []
    while len(moments) < options.kills:
        process, began = start(killed, options), time.time()
        time.sleep(draw.uniform(3.0, options.longest))
        process.kill()
        process.wait()
        found = newest(killed) if killed.is_dir() else None
        step = found.values["progress"]["step"] if found else 0
        partial = [path.name for path in killed.glob(".*")] if killed.is_dir() else []
        moments.append({"kill": len(moments) + 1, "after s": f"{time.time() - began:.2f}", "saved step": step})
        moments[-1] |= {"half written": ", ".join(partial) or "-"}
        if (killed / "model.safetensors").is_file():
            break
    start(killed, options).wait()
    a, b = (read_snapshot(newest(folder).path) for folder in (whole, killed))
    same = a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    ours, theirs = (iso.load(folder / "model.safetensors").state_dict() for folder in (whole, killed))
    weights = all(torch.equal(ours[name], theirs[name]) for name in ours)
    logs = [[(r["step"], r["loss"]) for r in rows_of(folder / "steps.jsonl")] for folder in (whole, killed)]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "crashes"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--longest", type=float, default=9.0, help="longest life of a process, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/crashes"))
    options = parser.parse_args()
    {"overhead": overhead, "crashes": crashes}[options.what](options)


if __name__ == "__main__":
    main()
