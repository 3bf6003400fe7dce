"""Attention that opens: what makes the gates of a T-CNN open in fine-tuning, on 5,000 validation images of CIFAR-10.

    nice -n 19 python benchmarks/tcnn_opens.py [--arms tcnn principal] [--epochs 4] [--images 10000] [--seeds 0 1 2]
        [--noise 0.1] [--canvas 48] [--network cifar_resnet56] [--test]

Needs ISOMORPH_DATA with cifar10 and weights. The validation images are cut from the training images, and are no part of
the test images. With --noise, all images but those of the test have noise of this standard deviation, of pixels in 0 to
1; that of training images is drawn again in every step. With --canvas, images of 32 x 32 pixels are pasted on a canvas
of zeros of this height and width: in training at one random position for each batch, otherwise at a fixed random
position for each image. With --test, finished networks are measured on the test images too, clean (all) and under the
15 corruptions of ImageNet-C (2,000 images, two severities), before and after pruning. Arms run one at a time; each
finished one is a line of the output file and a file of weights next to it, and is skipped by a later call. An
interrupted arm resumes after its last finished epoch. A new file begins with the runs in
benchmarks/results/tcnn_opens.json. Ends with tables of all finished arms in that file.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import isomorph as iso
from interleave import continued_rows, show, spread, write, write_rows
from isomorph.data.corruptions.corrupt import CORRUPTION_CATEGORIES, CorruptedSource
from isomorph.data.sources import Source, spaced_images
from isomorph.layers import GPSA2d, SimilarGPSA2d, WindowGPSA2d
from isomorph.layers.eval_mode import eval_mode
from tcnn_training import FineTuning, Row, Split, paste, top1

SIZE = 32
"""Height and width of CIFAR-10's images."""
VALIDATION = 5_000
"""Images of the validation split."""
CORRUPTED_IMAGES, SEVERITIES, TOLERANCE = 2_000, (1, 3), 0.05
"""What the test is: images under each corruption, its severities, and what pruning may leave out of a head."""


@dataclass(frozen=True)
class Arm:
    """One way to start and to train; the rest is held equal."""

    about: str
    rule: dict[str, Any] | None = None
    where: str | list[str] = "layer3.*.conv?"
    temperature: float | None = None  # queries and keys are principal directions of the layer's input
    apart: bool = False  # content reads values of its own, which start at zero
    sharpness: float | None = None  # of similarity, relative to the variance of what a layer reads
    rates: dict[str, str] = field(default_factory=dict)


SOFT = dict(locality=5.0, gate=6.0)
WINDOW = dict(content="window", window=5)
OPEN_SIMILAR = dict(content="similar", gate=0.0)
SIMILAR: dict[str, Any] = dict(sharpness=32.0, rates=dict(position_lr="100x"))  # sharpness counts among the positions
ARMS = {
    "cnn": Arm("the CNN"),
    "paper": Arm("T-CNN as in the paper: last stage, paper's start", dict(init="paper"), rates=dict(position_lr="1x")),
    "soft stem": Arm("positions only, in the stem", dict(locality=3.0, content="none"), "conv1"),
    "similar": Arm("similar positions, in the stem", OPEN_SIMILAR, "conv1", **SIMILAR),
    "similar 5": Arm("similar positions in 5 x 5, in the stem", OPEN_SIMILAR | dict(window=5), "conv1", **SIMILAR),
    "similar early": Arm(
        "similar positions, in the stem and the first stage", OPEN_SIMILAR, ["conv1", "layer1.*.conv?"], **SIMILAR
    ),
    "tcnn": Arm("T-CNN, global, closed gates", SOFT),
    "positions": Arm("positions only", dict(locality=5.0, content="none")),
    "positions everywhere": Arm("positions only, in all stages", dict(locality=5.0, content="none"), "layer?.*.conv?"),
    "window": Arm("windows, closed gates", SOFT | WINDOW),
    "principal": Arm("windows, principal directions, closed gates", SOFT | WINDOW, temperature=1.0),
    "half open": Arm("windows, principal directions, gate 1", dict(locality=5.0, gate=1.0) | WINDOW, temperature=1.0),
    "apart": Arm("windows, principal directions, values apart", SOFT | WINDOW, temperature=1.0, apart=True),
    "early": Arm("as apart, in the first stage", SOFT | WINDOW, "layer1.*.conv?", 1.0, True),
    "slow gates": Arm(
        "as apart, gates at the rate of the weights", SOFT | WINDOW, "layer3.*.conv?", 1.0, True, dict(gate_lr="1x")
    ),
}


class ApartGPSA2d(WindowGPSA2d):
    """Gated attention whose content has filters of its own: opening adds before it takes.

    y = sum_h P_h V weight_h + (1 - sigma(gate_h)) C_h V added_h
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.added = nn.Parameter(torch.zeros_like(self.weight))

    def distinct_filters(self, share: Tensor | None = None) -> Tensor:
        return self.added.flatten(2) if share is None else self.added.flatten(2) * share

    def forward(self, x: Tensor) -> Tensor:
        values = self.map_values(x).unflatten(-1, x.shape[-2:])
        return self.with_bias(self.position_taps(values) + self.content_taps(x, values, torch.sigmoid(-self.gate)))


def apart(layer: WindowGPSA2d) -> ApartGPSA2d:
    """The same layer with filters of its own for content, half open: the filters are zero."""
    size = (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding)
    new = ApartGPSA2d(*size, bias=layer.bias is not None, window=layer.window)
    new.load_state_dict(layer.state_dict(), strict=False)
    new.set_gating(gate=0.0)
    return new


@torch.no_grad()
def principal_content(model: nn.Module, images: Tensor, temperature: float) -> None:
    """Let all heads attend to similar patches: queries and keys are the first principal directions of the input.

    They are scaled so that the scores of unrelated positions have this standard deviation.
    """
    inputs: dict[nn.Module, Tensor] = {}
    layers = [layer for layer in model.modules() if isinstance(layer, GPSA2d)]
    hooks = [layer.register_forward_pre_hook(lambda m, x: inputs.__setitem__(m, x[0])) for layer in layers]
    with eval_mode(model):
        model(images)
    for hook in hooks:
        hook.remove()
    for layer in layers:
        tokens = inputs[layer].transpose(0, 1).flatten(1)  # (C, positions)
        values, directions = torch.linalg.eigh(torch.cov(tokens))  # ascending
        for head in range(layer.num_heads):
            for rank, row in enumerate(range(head, layer.query.out_features, layer.num_heads)):
                unit = directions[:, -1 - rank] / values[-1 - rank].clamp(min=1e-6).sqrt()
                layer.query.weight[row] = layer.key.weight[row] = unit * temperature**0.5


def build(arm: Arm, network: str, images: Tensor, seed: int) -> nn.Module:
    """The network of an arm, from the public weights."""
    model = timm.create_model(network, pretrained=True)
    torch.manual_seed(seed)
    if arm.rule is None:
        return model
    model = iso.recast(model, iso.ConvToGPSA(**arm.rule), arm.where)
    if arm.sharpness:
        model = iso.fit_sharpness(model, images, arm.sharpness)
    for name, layer in list(model.named_modules()):
        if arm.apart and isinstance(layer, WindowGPSA2d):
            model.set_submodule(name, apart(layer))
    if arm.temperature:
        principal_content(model, images, arm.temperature)
    return model


def preprocessing() -> dict[str, Any]:
    """Return size, mean and standard deviation of the network's images."""
    return timm.data.resolve_data_config(model=timm.create_model("cifar_resnet20"))


def in_memory(source: Source) -> Split:
    """Normalised images of a source, and their labels."""
    batches = list(iso.data.eval_loader(source, preprocessing(), 500))
    images, labels = (torch.cat(each) for each in zip(*batches, strict=True))
    return images, labels


def images_of(count: int, canvas: int = SIZE) -> dict[str, Split]:
    """Training and validation images of CIFAR-10's training split; validation images are pasted on a canvas."""
    source = iso.data.open_source("cifar10", "train")
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0)).tolist()
    parts = {"val": source.subset(order[:VALIDATION]), "train": spaced_images(source.subset(order[VALIDATION:]), count)}
    found = {name: in_memory(part) for name, part in parts.items()}
    return found | {"val": on_canvas(found["val"], canvas)}


def on_canvas(split: Split, canvas: int) -> Split:
    return paste(split[0], canvas), split[1]


def test_images(canvas: int) -> dict[str, dict[str, Split]]:
    """All test images, clean, and the first ones under each corruption and severity, by category, on a canvas."""
    source = iso.data.open_source("cifar10", "test")
    found = {"clean": {"": on_canvas(in_memory(source), canvas)}}
    part = source.subset(range(CORRUPTED_IMAGES))
    for category, names in CORRUPTION_CATEGORIES.items():
        corrupted = {f"{name} {level}": CorruptedSource(part, name, level) for name in names for level in SEVERITIES}
        found[category] = {name: on_canvas(in_memory(each), canvas) for name, each in corrupted.items()}
    return found


def measure(model: nn.Module, images: dict[str, dict[str, Split]]) -> dict[str, float]:
    """Test accuracy, clean, by category of corruption, and the mean over all corruptions."""
    found = {category: [top1(model, split) for split in splits.values()] for category, splits in images.items()}
    corrupted = [score for category, scores in found.items() for score in scores if category != "clean"]
    row = {category: sum(scores) / len(scores) for category, scores in found.items()}
    return row | {"corrupted": sum(corrupted) / len(corrupted)}


def pruned(model: nn.Module) -> nn.Module | None:
    """The network without what its closed heads do not use, or None if there is nothing to prune."""
    gated = any(isinstance(layer, GPSA2d | SimilarGPSA2d) for layer in model.modules())
    closed = gated and iso.surgery.prunable_heads(model, TOLERANCE)
    return iso.prune(model, TOLERANCE) if closed else None


def pixel_noise(noise: float) -> Tensor:
    """Return a standard deviation, of pixels in 0 to 1, as one of the network's inputs. Shape: -> (3, 1, 1)"""
    return noise / torch.tensor(preprocessing()["std"]).view(3, 1, 1)


def with_noise(images: dict[str, Split], noise: float) -> dict[str, Split]:
    """Return the images with noise on those of the validation split, always the same."""
    x, y = images["val"]
    drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return images | {"val": (x + pixel_noise(noise) * drawn, y)}


KEYS = ("network", "canvas", "noise", "arm", "images", "epochs")
"""What runs of one row have in common; they differ by seed."""
TITLES = {"noise": "noise in training"}


def groups_of(runs: list[Row]) -> list[list[Row]]:
    """Finished runs by arm and length; of several with one seed, the last one."""
    groups: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in runs:
        groups.setdefault(tuple(row[key] for key in KEYS), {})[row["seed"]] = row
    return [list(group.values()) for group in groups.values()]


def rows_of(runs: list[Row]) -> list[Row]:
    """A row for every finished arm and length, on validation images: mean over seeds, half the range in brackets."""
    rows = []
    for found in groups_of(runs):
        last = [row["curve"][-1] for row in found]
        row = {TITLES.get(key, key): found[0][key] for key in KEYS} | {
            "what": ARMS[found[0]["arm"]].about,
            "seeds": len(found),
        }
        row["before"] = spread([each["curve"][0]["top1"] for each in found])
        for title, key in (("validation top-1", "top1"), ("gate", "gate"), ("open heads", "open"), ("span", "span")):
            row[title] = spread([each[key] for each in last]) if key in last[0] else ""
        row["seconds"] = spread([each["seconds"] for each in found])
        rows.append(row)
    return rows


def test_rows(runs: list[Row]) -> list[Row]:
    """A row for every arm and length that was measured on test images: mean over seeds, half the range in brackets."""
    rows = []
    for found in groups_of([row for row in runs if "test" in row]):
        for title in ("test", "pruned"):
            if title in found[0]:
                row = {TITLES.get(key, key): found[0][key] for key in KEYS} | {"form": title, "seeds": len(found)}
                names = found[0][title]
                rows.append(row | {name: spread([each[title][name] for each in found]) for name in names})
    return rows


def read_runs(out: Path) -> list[Row]:
    """The runs so far; those of the stored results, if there is no file yet."""
    return [
        {"canvas": SIZE, "noise": 0.0, "network": "cifar_resnet20"} | row for row in continued_rows(out, "tcnn_opens")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--network", default="cifar_resnet20", choices=("cifar_resnet20", "cifar_resnet56"))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--canvas", type=int, default=SIZE)
    parser.add_argument("--test", action="store_true", help="measure on test images too, clean and corrupted")
    parser.add_argument("--out", type=Path, default=Path("runs/tcnn_opens.jsonl"))
    given = parser.parse_args()
    runs, images, tests = read_runs(given.out), None, None
    for seed in given.seeds:
        for name in given.arms:
            key = {"network": given.network, "arm": name, "seed": seed}
            key |= {"epochs": given.epochs, "images": given.images, "noise": given.noise, "canvas": given.canvas}
            if any(key.items() <= row.items() and (not given.test or "test" in row) for row in runs):
                continue
            images = images or with_noise(images_of(given.images, given.canvas), given.noise)
            print(", ".join(map(str, key.values())), flush=True)
            model = build(ARMS[name], given.network, paste(images["train"][0][:256], given.canvas), seed)
            training = FineTuning(model, ARMS[name].rates, seed, given.epochs, images)
            file = given.out.with_name(" ".join(map(str, key.values())))
            snapshot = Path(f"{file}.snapshot")
            row = key | training.run(pixel_noise(given.noise), snapshot)
            save_file(model.state_dict(), f"{file}.safetensors")
            if given.test:
                tests = tests or test_images(given.canvas)
                row["test"] = measure(model, tests)
                if (smaller := pruned(model)) is not None:
                    row["pruned"] = measure(smaller, tests)
                print(f"  test: {row['test']}", flush=True)
            runs.append(row)
            write_rows(given.out, [row])
            snapshot.unlink(missing_ok=True)
    rows, tested = rows_of(runs), test_rows(runs)
    show("Attention that opens", rows)
    if tested:
        show("On test images", tested)
    print(f"\nwrote {write('tcnn_opens', {'table': rows, 'test': tested, 'runs': runs})}")


if __name__ == "__main__":
    main()
