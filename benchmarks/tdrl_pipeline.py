"""The two stages of TDRL in small: plain and pyramid students learn a teacher's features, then the labels.

    python benchmarks/tdrl_pipeline.py [--out runs/tdrl_pipeline] [--epochs 8] [--seeds 0] [--equal-time 2.65]

Needs ISOMORPH_DATA with cifar10 and weights. The teacher is the public CIFAR ResNet-20, whose last map, averaged to
4 x 4 positions and normalised, is what the 16 tokens of a student shall tell (generic distillation, smooth L1 loss
with beta 2, no labels). Fine-tuning follows, with a new head, on the labels of the same 20,000 images. Both stages are
equally long; with --equal-time, the plain student also gets as many epochs more as a step with pyramids takes longer
than a plain one (2.65 times on a CPU). Rates of both stages are chosen with the first seed on 5,000 validation images,
cut from the training images. Every finished stage is a line of OUT/runs.jsonl and a file of weights, so the script may
be stopped at any time. A new folder begins with the stages in results/tdrl_pipeline.json; weights that are not there
are trained again when a stage needs them. Ends with a table in that file.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import isomorph as iso  # registers the public weights
from interleave import continued_rows, show, spread, write, write_rows
from parallel_arms import PAD, Arm, Images, Stack, train_stacks
from tdrl_networks import build, fused
from tdrl_study import Row

TEACHER, STRIDE, WIDTH, GRID = "cifar_resnet20", 4, 64, 4
"""The teacher, the pixels between two positions of its last map, its channels, and the student's tokens a side."""
FORMS = {"plain xavier": "plain, Xavier weights", "P-W2S": "P-W2S"}
RATES = {
    "distillation": {"plain xavier": (2e-3, 4e-3, 8e-3, 1.6e-2), "P-W2S": (5e-4, 1e-3, 2e-3, 4e-3)},
    "fine-tuning": {"plain xavier": (1e-3, 2e-3, 4e-3), "P-W2S": (2.5e-4, 5e-4, 1e-3)},
}
SMOOTH_L1 = partial(F.smooth_l1_loss, beta=2.0)


class TeacherFeatures(Images):
    """The images of CIFAR-10, whose answers are the teacher's features of what each token sees.

    The teacher sees the padded image. Crops start where its map has a position, so that a crop of the image is a crop
    of the map. `cache` (2, images, 9, 9, C), of images and flipped images, holds the mean of 2 x 2 positions at every
    start.
    """

    crop_step = STRIDE

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        super().__init__(device, limit)
        teacher = timm.create_model(TEACHER, pretrained=True).to(device).eval().requires_grad_(False)
        config = timm.data.resolve_data_config(model=teacher)
        self.teacher = teacher
        self.teacher_mean, self.teacher_std = (
            255 * torch.tensor(config[name], device=device).view(3, 1, 1) for name in ("mean", "std")
        )
        width = 32 + 2 * PAD
        padded = self.padded.view(-1, 3, width, width)
        self.cache = torch.stack([self.features(padded), self.features(padded.flip(-1))])
        self.held_out = self.features(F.pad(self.splits["val"][0], (PAD,) * 4))

    @torch.no_grad()
    def features(self, padded: Tensor) -> Tensor:
        """Return the teacher's normalised features of padded uint8 images. Shape: (N, 3, 40, 40) -> (N, 9, 9, C)"""
        found = []
        for part in padded.split(250):
            features = self.teacher.forward_features((part.float() - self.teacher_mean) / self.teacher_std)
            means = F.avg_pool2d(features, 2, stride=1).permute(0, 2, 3, 1)
            found.append(F.layer_norm(means, (WIDTH,)).half())
        return torch.cat(found)

    def answers(self, order: Tensor, offset: Tensor, flip: Tensor) -> Tensor:
        """Return the features of every token. Shape: (S, B) three times -> (S, B, 16, C)"""
        width, starts = 32 + 2 * PAD, 2 * PAD // STRIDE
        row, column = offset // width // STRIDE, offset % width // STRIDE
        column = torch.where(flip.bool(), starts - column, column)  # of the flipped image
        tokens = 2 * torch.arange(GRID, device=offset.device)
        high, wide = (at[..., None] + tokens for at in (row, column))  # (S, B, 4)
        which, image = flip[..., None, None], order[..., None, None]
        return self.cache[which, image, high[..., :, None], wide[..., None, :]].flatten(2, 3).float()


class Aligned(nn.Module):
    """A student whose tokens are mapped to the teacher's features. Shape: (B, 3, 32, 32) -> (B, 16, C)"""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student, self.align = student, nn.Linear(student.num_features, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.align(self.student.forward_features(x))


class Pipeline:
    """The finished stages, in a folder, and how to run another."""

    def __init__(self, out: Path, limit: int | None) -> None:
        self.out, self.limit, self.file = out, limit, out / "runs.jsonl"
        self.rows = [{"images": None} | row for row in continued_rows(self.file, "tdrl_pipeline")]
        self.images: dict[type[Images], Images] = {}

    def data(self, kind: type[Images]) -> Images:
        """The images, with the teacher's features or with labels; made when first needed."""
        if kind not in self.images:
            self.images[kind] = kind(torch.device("cpu"), self.limit)
        return self.images[kind]

    def stage(self, arm: Arm, start: Row | None = None) -> Row:
        """Run a stage, or find it finished: fine-tuning from a start, or distillation."""
        name = "fine-tuning" if start else "distillation"
        key = {"stage": name, "form": arm.form, "epochs": arm.epochs, "lr": arm.lr, "seed": arm.seed}
        key |= {"images": self.limit} | ({"start": start["weights"]} if start else {})
        if found := [row for row in self.rows if key.items() <= row.items()]:
            return found[0]
        print(f"{name}: {arm.form}, {arm.epochs} epochs, rate {arm.lr:g}, seed {arm.seed}", flush=True)
        row = key | (self.distil(arm) if start is None else self.fine_tune(arm, self.weights(start)))
        self.rows.append(row)
        write_rows(self.file, [row])
        return row

    def distil(self, arm: Arm) -> Row:
        """Teach the teacher's features to an untrained student."""
        images = self.data(TeacherFeatures)
        torch.manual_seed(arm.seed)
        stack, about = train(arm, Aligned(build(arm.network, arm.form, arm.seed)), images, SMOOTH_L1)
        model = stack.trained()[0]
        weights = f"{arm.form}_{arm.epochs}_{arm.lr:g}_{arm.seed}.safetensors".replace(" ", "_")
        save_file(model.student.state_dict(), self.out / weights)
        return about | {"weights": weights, "val_loss": alignment(model, images)}

    def weights(self, start: Row) -> Path:
        """Return the file of a distilled student, which is trained again if the file is not there."""
        path = self.out / start["weights"]
        if not path.is_file():
            print(f"distillation again, for its weights: {path.name}", flush=True)
            self.distil(Arm("vit", *(start[name] for name in ("form", "epochs", "lr", "seed"))))
        return path

    def fine_tune(self, arm: Arm, weights: Path) -> Row:
        """Teach labels to a distilled student."""
        images, model = self.data(Images), build(arm.network, arm.form, arm.seed)
        model.load_state_dict(load_file(weights))
        stack, about = train(arm, model, images, F.cross_entropy)
        model = stack.trained()[0]
        pixels = images.normalise(images.splits["test"][0][:64])
        report = iso.surgery.compare_outputs(model, fused(model), pixels, atol=1e-4)
        scores = {split: round(stack.evaluate(images, split)[0][0], 2) for split in ("val", "test")}
        return about | scores | {"fused_fp32": report.fp32}


def train(arm: Arm, model: nn.Module, images: Images, loss: Any) -> tuple[Stack, Row]:
    """Return a stack of the trained network, and its losses by epoch with the seconds."""
    steps, started, losses = images.count // arm.batch, time.time(), []
    stack = Stack([arm], [model], images, (0, arm.epochs * steps), loss)

    def after_epoch(number: int) -> None:
        losses.append(round(stack.losses.item() / steps, 4))
        stack.losses.zero_()
        print(f"  epoch {number}: loss {losses[-1]}", flush=True)

    train_stacks([stack], arm.epochs, after_epoch)
    return stack, {"losses": losses, "seconds": round(time.time() - started)}


@torch.no_grad()
def alignment(model: nn.Module, images: TeacherFeatures) -> float:
    """Return the loss of distillation on the validation images."""
    answers = images.held_out[:, 1:8:2, 1:8:2].flatten(1, 2).float()  # the crop in the middle
    output = torch.cat([model(images.normalise(part)) for part in images.splits["val"][0].split(500)])
    return round(SMOOTH_L1(output, answers).item(), 5)


def chosen(pipeline: Pipeline, form: str, epochs: int, seed: int) -> tuple[float, float]:
    """Return the rates of both stages with which a seed does best on the validation images."""
    arms = {stage: [Arm("vit", form, epochs, rate, seed) for rate in rates[form]] for stage, rates in RATES.items()}
    starts = [pipeline.stage(arm) for arm in arms["distillation"]]
    best = min(starts, key=lambda row: row["val_loss"])
    tuned = [pipeline.stage(arm, best) for arm in arms["fine-tuning"]]
    return best["lr"], max(tuned, key=lambda row: row["val"])["lr"]


def both_stages(pipeline: Pipeline, form: str, epochs: int, rates: tuple[float, float], seed: int) -> Row:
    """Return the row of fine-tuning after distillation, each at its rate."""
    first, second = (Arm("vit", form, epochs, rate, seed) for rate in rates)
    return pipeline.stage(second, pipeline.stage(first))


def summarise(found: dict[str, list[Row]], distilled: Sequence[Row]) -> list[Row]:
    """Return a row for each student: mean over seeds, half the range in brackets."""
    losses = {row["weights"]: row["val_loss"] for row in distilled}
    rates_of = {row["weights"]: row["lr"] for row in distilled}
    table = []
    for title, rows in found.items():
        row: Row = {"student": title, "epochs of each stage": rows[0]["epochs"], "seeds": len(rows)}
        row["rates"] = f"{rates_of[rows[0]['start']]:g}, {rows[0]['lr']:g}"
        row["loss of distillation"] = f"{sum(losses[each['start']] for each in rows) / len(rows):.4f}"
        row |= {name: spread([each[name] for each in rows]) for name in ("val", "test")}
        table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/tdrl_pipeline"))
    parser.add_argument("--epochs", type=int, default=8, help="of each stage")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--equal-time", type=float, metavar="RATIO", help="time of a step with pyramids, in plain steps"
    )
    parser.add_argument("--images", type=int, help="of each split; by default 20,000 to train on and all others")
    given = parser.parse_args()
    pipeline, found = Pipeline(given.out, given.images), dict[str, list[Row]]()
    rates = {form: chosen(pipeline, form, given.epochs, given.seeds[0]) for form in FORMS}
    for seed in given.seeds:
        for form, title in FORMS.items():
            found.setdefault(title, []).append(both_stages(pipeline, form, given.epochs, rates[form], seed))
        if given.equal_time:
            longer = round(given.epochs * given.equal_time)
            row = both_stages(pipeline, "plain xavier", longer, rates["plain xavier"], seed)
            found.setdefault("plain, Xavier weights, equal time", []).append(row)
    table = summarise(found, [row for row in pipeline.rows if row["stage"] == "distillation"])
    show("Distillation, then labels", table)
    print(f"\nwrote {write('tdrl_pipeline', {'table': table, 'runs': pipeline.rows})}")


if __name__ == "__main__":
    main()
