"""The study of docs/methods/tdrl.md: small ViTs trained long on CIFAR-10, plain and with pyramids.

    python benchmarks/tdrl_study.py --out runs/tdrl_study.jsonl [--only 'vit 30 P-W2S seed 0'] [--seconds 600]

Needs ISOMORPH_DATA with cifar10. Every finished run is one line of the output file, and runs found there are skipped,
so the study can be stopped and continued, on a GPU or a CPU. On a CPU an unfinished run continues after its last epoch,
unless pyramids are fused on the way. A new file begins with the runs that are stored in
results/tdrl_study.json. Settings are chosen on 5,000 validation images, cut from the training images; test accuracy is
reported for the chosen settings only.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import isomorph as iso
from interleave import continued_rows, processor, write_rows
from parallel_arms import DEFAULTS, Arm, Images, Stack, train_stacks
from tdrl_networks import PATCH, build, fused

MOST_TOGETHER = 16
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
Row = dict[str, Any]


class Stopped(Exception):
    """A job would end after the time is up."""


def group(arms: Iterable[Arm], *names: str) -> list[list[Arm]]:
    """Return the arms in groups that agree in some fields, in order."""
    groups: dict[tuple[object, ...], list[Arm]] = {}
    for arm in arms:
        groups.setdefault(tuple(getattr(arm, name) for name in names), []).append(arm)
    return list(groups.values())


class Job:
    """Arms of equal length, in stacks of one form that train side by side."""

    def __init__(self, arms: Sequence[Arm], images: Images, deadline: float, snapshot: Path) -> None:
        self.arms, self.images, self.deadline, self.started = list(arms), images, deadline, time.time()
        most = MOST_TOGETHER if arms[0].network in PATCH else 1  # vmap turns convolutions into grouped ones
        forms = group(arms, "form", "optimizer")
        self.groups = [form[i : i + most] for form in forms for i in range(0, len(form), most)]
        models = {(arm.form, arm.seed): build(arm.network, arm.form, arm.seed) for arm in arms}
        self.models = {arm: models[arm.form, arm.seed] for arm in arms}
        self.curves: dict[Arm, list[list[float]]] = {arm: [] for arm in arms}
        self.epochs, self.snapshot = arms[0].epochs, snapshot
        self.continues = images.device.type == "cpu" and arms[0].fuse_at == 1
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = arms[0].tf32

    def run(self) -> list[Row]:
        """Train, fuse on the way if the arms ask for it, and return the results."""
        middle = round(self.epochs * self.arms[0].fuse_at)
        stacks = self.train(0, middle)
        if middle < self.epochs:
            self.models = {arm: fused(model) for arm, model in trained(stacks).items()}
            stacks = self.train(middle, self.epochs)
        return self.results(stacks)

    def train(self, start: int, stop: int) -> list[Stack]:
        """Train from one epoch to another."""
        steps = self.images.count // self.arms[0].batch
        span, begun = (start * steps, self.epochs * steps), 0.0
        stacks = [Stack(arms, [self.models[a] for a in arms], self.images, span) for arms in self.groups]
        for stack in stacks:
            stack.batches.shuffle()
            if self.images.device.type == "cuda":
                stack.capture()
        done = self.restore(stacks) if self.continues else 0
        begun = time.time()

        def after_epoch(number: int) -> None:
            expected = begun + (time.time() - begun) / (number - done) * (stop - start - done)
            every = max(1, self.epochs // 10)
            for stack in stacks:
                if (start + number) % every == 0 or start + number == stop:
                    self.note(stack, start + number, steps)
                stack.losses.zero_()
            if self.continues:
                self.save(stacks, number)
            if number < stop - start and (time.time() if self.continues else expected) > self.deadline:
                raise Stopped(f"after {start + number} of {self.epochs} epochs, as the time is up")

        train_stacks(stacks, stop - start, after_epoch, done)
        print(f"  {(time.time() - begun) / max(1, stop - start - done) / steps * 1e3:.1f} ms a step", flush=True)
        return stacks

    def save(self, stacks: Sequence[Stack], epoch: int) -> None:
        """Save what `restore` needs to continue after this epoch."""
        about = dict(arms=repr(self.arms), epoch=epoch, seconds=time.time() - self.started)
        states = dict(curves=list(self.curves.values()), stacks=[stack.state() for stack in stacks])
        torch.save(about | states, part := self.snapshot.with_suffix(".part"))
        part.replace(self.snapshot)

    def restore(self, stacks: Sequence[Stack]) -> int:
        """Continue from the saved state of these arms, if there is one; return the number of epochs behind it."""
        saved = torch.load(self.snapshot, weights_only=True) if self.snapshot.is_file() else {}
        if saved.get("arms") != repr(self.arms):
            return 0
        for stack, state in zip(stacks, saved["stacks"], strict=True):
            stack.restore(state)
        self.curves = dict(zip(self.arms, saved["curves"], strict=True))
        self.started -= saved["seconds"]
        print(f"  continues after epoch {saved['epoch']}", flush=True)
        return saved["epoch"]

    def note(self, stack: Stack, epoch: int, steps: int) -> None:
        """Add a point to the curve of every arm: epoch, top-1 on the validation images, training loss."""
        for arm, top1, loss in zip(stack.arms, stack.evaluate(self.images, "val")[0], stack.losses, strict=True):
            self.curves[arm].append([epoch, round(top1, 2), round(float(loss) / steps, 4)])
            print(f"  {arm.form} at {arm.lr:g}, seed {arm.seed}, after {epoch} epochs: {top1:.2f}", flush=True)

    def results(self, stacks: Sequence[Stack]) -> list[Row]:
        """Evaluate the trained networks, fuse them, and compare both forms on 64 test images."""
        scores: dict[Arm, Row] = {arm: {} for arm in self.arms}
        for stack in stacks:
            for split in ("val", "test"):
                for arm, top1, nll in zip(stack.arms, *stack.evaluate(self.images, split), strict=True):
                    scores[arm] |= {split: round(top1, 2), f"{split}_nll": round(nll, 4)}
        pixels = self.images.normalise(self.images.splits["test"][0][:64]).cpu()
        deviations = fused_deviations(list(trained(stacks).values()), pixels)
        about = dict(seconds=round(time.time() - self.started, 1), together=len(self.arms), device=processor())
        arms = [arm for stack in stacks for arm in stack.arms]
        return [
            asdict(arm) | scores[arm] | dict(curve=self.curves[arm], **about, fused_fp32=fp32, fused_fp64=fp64)
            for arm, (fp32, fp64) in zip(arms, deviations, strict=True)
        ]


def trained(stacks: Iterable[Stack]) -> dict[Arm, nn.Module]:
    """Return the trained networks, on the CPU in eval mode."""
    return {arm: model for stack in stacks for arm, model in zip(stack.arms, stack.trained(), strict=True)}


def fused_deviations(models: Sequence[nn.Module], pixels: Tensor) -> list[tuple[float, float]]:
    """Return the largest difference of each network and its fused form, in float32 and float64, on all cores."""
    TO_COMPARE[:] = [(model, pixels) for model in models]  # processes inherit them when they fork
    with get_context("fork").Pool(os.cpu_count()) as pool:
        return pool.map_async(fused_deviation, range(len(models)), chunksize=1).get(timeout=600)


TO_COMPARE: list[tuple[nn.Module, Tensor]] = []


def fused_deviation(index: int) -> tuple[float, float]:
    model, pixels = TO_COMPARE[index]
    report = iso.surgery.compare_outputs(model, fused(model), pixels, atol=1e-4)
    return report.fp32, report.fp64


def arm_of(row: Row) -> Arm:
    """Return the arm of a result."""
    return Arm(**{name: row[name] for name in Arm.__dataclass_fields__})


def read_results(rows: Iterable[Row]) -> list[Row]:
    """Return results with the fields of arms that they lack, because they are older, at their defaults."""
    return [{field.name: row.get(field.name, field.default) for field in fields(Arm)} | row for row in rows]


def best_rate(rows: Iterable[Row], default: float, **fields: object) -> float:
    """Return the rate with the highest mean validation accuracy among the runs with these fields."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if all(row[name] == value for name, value in fields.items()):
            found.setdefault(row["lr"], []).append(row["val"])
    return max(found, key=lambda rate: statistics.mean(found[rate])) if found else default


def around(rate: float, before: int, after: int) -> tuple[float, ...]:
    """Return the rates of the grid from `before` steps below a rate to `after` steps above it."""
    at = RATES.index(rate)
    return RATES[max(0, at - before) : at + after + 1]


def plan(rows: Sequence[Row]) -> list[list[Arm]]:
    """Return all runs in stages; later ones depend on the rates that won in earlier ones."""
    both, seeds = ("plain", "P-W2S"), range(3)

    def best(form: str, epochs: int) -> float:
        return best_rate(rows, 2e-3 if form == "plain" else 5e-4, network="vit", form=form, epochs=epochs, **DEFAULTS)

    def runs(form: str, epochs: int, rates: Sequence[float], seeds: Iterable[int] = seeds, **fields: Any) -> list[Arm]:
        return [Arm("vit", form, epochs, rate, seed, **fields) for seed in seeds for rate in rates]

    def near(form: str, epochs: int, before: int = 1, after: int = 0) -> tuple[float, ...]:
        return around(best(form, epochs), before, after)

    stages = [[arm for form in both for arm in runs(form, 10, RATES[1:6])]]
    stages += [[arm for form in both for arm in runs(form, 30, near(form, 10, 2, 1))]]
    stages += [runs("plain xavier", 10, near("plain", 10, 1, 1)[::-1])]
    stages += [runs("plain", epochs, near("plain", 30)) for epochs in (20, 60)]  # as long in time as pyramids
    stages += [runs("plain xavier", 10, [8e-3], [0])]
    stages += [runs("plain xavier", epochs, [4e-3]) for epochs in (20, 14, 30, 60)]
    stages += [runs("P-W2S", 100, [5e-4], [0])]
    stages += [
        runs("plain xavier small-proj", epochs, [2e-3], [0]) for epochs in (100, 70, 236)
    ]  # 70 and 236: as long in time as 30 and 100 with pyramids
    stages += [runs("plain xavier small-proj drop-path", epochs, [2e-3], [0, 1]) for epochs in (100, 236)]
    stages += [runs("P-W2S drop-path", 100, [5e-4], [0, 1])]
    stages += [runs("plain xavier small-proj", 100, [2e-3], [0], weight_decay=0.3)]
    stages += [[arm for form in both for arm in runs(form, 100, near(form, 30))]]
    stages += [[arm for form in both for arm in runs(form, 100, near(form, 30, 2, 1), [0])]]
    changes = (dict(branch_lr=0.1), dict(branch_lr=0.3), dict(pyramid_lr=1 / 3), dict(branch_decay=0.0))
    changes += (dict(branches_until=0.5), dict(branches_until=0.75))
    variants = [arm for change in changes for arm in runs("P-W2S", 10, [5e-4], [0], **change)]
    variants += [arm for form in ("same-function", "none") for arm in runs(f"P-W2S {form}", 10, [5e-4], [0])]
    for form, change in (("plain xavier", 1.0), ("plain xavier small-proj", 1.0), ("P-W2S", 0.25)):
        sgd, lamb = dict(optimizer="sgd", weight_decay=5e-4), dict(optimizer="lamb")
        variants += runs(form, 10, [rate * change for rate in (0.1, 0.3, 1.0)], [0], **sgd)
        variants += runs(form, 10, [rate * change for rate in (4e-3, 8e-3, 1.6e-2)], [0], **lamb)
    stages += [variants]
    stages += [runs("P-W2S", 30, near("P-W2S", 30), range(2), fuse_at=0.5)]
    stages += [[arm for form in both for arm in runs(form, 30, near(form, 30, 0, 2), range(2), batch=1024)]]
    large: Row = dict(batch=1024)  # a step with pyramids takes 1.7 plain ones, with 1/4 about 1.5
    stages += [runs("plain xavier small-proj", 50, (4e-3, 8e-3, 2e-3), [0], **large)]
    stages += [runs("P-W2S 1/4", 30, (1e-3, 2e-3), [0], **large)]
    stages += [runs("P-W2S", 10, [best("P-W2S", 10)], tf32=False)]
    stages += [[arm for form in ("P-W2S", "P-W2S 1/4", "P-W2S 1/16") for arm in runs(form, 6, [5e-4], range(2))]]
    forms = ["naive-W1 xavier", "P-W1S xavier", "P-W2S xavier"]
    forms += [f"P-W2S xavier {part}" for part in ("qkv-fc1", "qkv", "mlp", "none", "fc1", "v")]
    stages += [runs(form, 10, [4e-3], [0], pyramid_lr=1 / 8) for form in forms]
    stages += [runs("plain xavier small-proj", 10, RATES[2:6], [0]), runs("plain jax", 10, RATES[3:6], [0])]
    stages += [runs("plain jax small-proj", 10, RATES[3:5], [0])]
    stages += [runs("plain xavier small-proj", epochs, RATES[3:5], [0]) for epochs in (20, 30)]
    stages += [runs("P-W2S jax", 10, RATES[1:3], [0]), runs("P-W2S jax small-proj", 10, [5e-4], [0])]
    longer = (("P-W2S 1/4", 10, 5e-4), ("plain xavier", 14, 4e-3), ("plain xavier", 18, 4e-3))
    longer += (("plain xavier", 14, 2e-3), ("plain xavier", 14, 8e-3), ("plain jax", 18, 4e-3), ("plain jax", 18, 2e-3))
    longer += tuple((f"plain {start} small-proj", 16, rate) for start in ("xavier", "jax") for rate in (4e-3, 2e-3))
    longer += (("P-W2S 1/4 jax", 10, 5e-4), ("P-W2S 1/4 jax small-proj", 10, 5e-4))
    for form, epochs, rate in longer:  # on a CPU, ten epochs with pyramids take as long as 14 to 18 without
        stages += [[Arm("vit patch 4", form, epochs, rate, seed) for seed in seeds]]
    half = [Arm("vit patch 4", "P-W2S 1/4", 10, 5e-4, 0, fuse_at=0.5, fused_lr=factor) for factor in (8.0, 2.0, 4.0)]
    stages += [half]  # fused, it can take the plain network's rate
    kinds = ("plain", "repvgg", "P-W2S 1/4")
    for network in ("cifar_resnet20", "mobileone_s0"):
        convs: Row = {**DEFAULTS, "network": network}
        stages += [[Arm(form=form, epochs=4, lr=rate, seed=0, **convs) for form in kinds for rate in RATES[2:6]]]
        stages += [[Arm(form=form, epochs=4, lr=rate, seed=0, **convs) for form in kinds[:2] for rate in RATES[6:]]]
        rates = {form: best_rate(rows, 2e-3, form=form, epochs=4, **convs) for form in kinds}
        stages += [[Arm(form=form, epochs=4, lr=rates[form], seed=seed, **convs) for form in kinds for seed in seeds]]
    stages += [[Arm(form="P-W2S", epochs=4, lr=rate, seed=0, **convs) for rate in RATES[3:6]]]
    stages += [[Arm(form="plain", epochs=10, lr=3.2e-2, seed=0, **convs)]]  # as long in time as with branches
    for sampled in ("early", "depthwise", "pointwise"):  # all tokens in the other blocks
        stages += [[Arm(form=f"P-W2S 1/4 {sampled}", epochs=4, lr=4e-3, seed=0, **convs)]]
    return [list(dict.fromkeys(stage)) for stage in stages]


def next_job(rows: Sequence[Row], only: str, skipped: set[Arm]) -> list[Arm]:
    """Return the arms to train next: those of the first stage of the plan that are not done."""
    done = {arm_of(row) for row in rows} | skipped
    for stage in plan(rows):
        if left := [a for a in stage if a not in done and only in f"{a.network} {a.epochs} {a.form} seed {a.seed}"]:
            return left if torch.cuda.is_available() else left[:1]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/tdrl_study.jsonl"))
    parser.add_argument("--only", default="", help="train only runs with this in their 'NETWORK EPOCHS FORM seed SEED'")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="stop then; on a GPU, start no job that would last longer"
    )
    parser.add_argument("--images", type=int, help="of each split; by default 20,000 to train on and all others")
    options = parser.parse_args()
    deadline, skipped = time.time() + options.seconds, set[Arm]()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.set_num_threads(1)  # OpenMP's threads do not survive the forks below
    images = Images(torch.device("cuda" if on_gpu else "cpu"), options.images)
    snapshot = options.out.with_suffix(".snapshot")
    while arms := next_job(read_results(continued_rows(options.out, "tdrl_study")), options.only, skipped):
        start, forms = time.time(), ", ".join(f"{len(g)} x {g[0].form}" for g in group(arms, "form"))
        title = f"{arms[0].network} {arms[0].epochs} epochs, batch {arms[0].batch}, fuse at {arms[0].fuse_at}: {forms}"
        print(title, flush=True)
        try:
            rows = Job(arms, images, deadline, snapshot).run()
        except Stopped as error:
            print(f"  stopped {error}", flush=True)
            if not on_gpu:
                break
            skipped |= set(arms)
            continue
        write_rows(options.out, rows)
        snapshot.unlink(missing_ok=True)
        for form in group(arms, "form"):
            best = max((row for row in rows if row["form"] == form[0].form), key=lambda row: row["val"])
            print(f"  {best['form']}: best val {best['val']} at {best['lr']:g}", flush=True)
        print(f"  {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
