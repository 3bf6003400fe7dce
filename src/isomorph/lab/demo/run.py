"""Train, recast, verify, inspect, and train a ViT in two forms: the steps of the demo and their results."""

import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from torch import Tensor, nn

from isomorph.analysis import attention_maps
from isomorph.checkpoints.model import save
from isomorph.lab.data.loaders import ImageConfig, eval_loader
from isomorph.lab.data.sources import Source
from isomorph.lab.recipes import load_recipe
from isomorph.lab.training.build import data_config, open_sources
from isomorph.lab.training.run.log import read_log
from isomorph.lab.training.run.loop import train
from isomorph.surgery import ConvToGPSA, VerifyReport, recast, verify
from isomorph.terminal_tables import Metrics, Table

LAYERS = "layer3.*.conv?"  # the convolutions that the demo recasts: all six of the CNN's last stage

# recipe: name on the page
VITS = {
    "digits_vit": "ViT",
    "digits_convit": "ViT, convolutional at initialisation",
}

VERIFIED = 100  # test images to compare outputs on, in float32 and float64; predictions are compared on all

SHOWN = 4


@dataclass
class Trained:
    """A model that the demo trained: its name, top-1 in percent after every epoch, and last metrics."""

    name: str
    model: nn.Module = field(repr=False)
    top1: list[float]
    metrics: Metrics


@dataclass
class Demo:
    """The results of the demo."""

    cnn: Trained
    tcnn: nn.Module = field(repr=False)
    report: VerifyReport
    agreeing: int  # test images for which the CNN and its T-CNN predict the same class
    images: Tensor = field(repr=False)  # normalised test images (N, 3, H, W)
    config: ImageConfig = field(repr=False)
    weight: float  # largest attention of a query, as a mean over layers, heads, queries and images of the T-CNN
    vits: list[Trained] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def equality(self) -> str:
        """The result of the comparison of CNN and T-CNN in one sentence."""
        verdict = "computes" if self.report.passed else "does NOT compute"
        return (
            f"The T-CNN {verdict} the CNN's function: outputs differ by at most {self.report.fp64:.1g} in float64 and "
            f"{self.report.fp32:.1g} in float32; {self.agreeing} of {len(self.images)} test images get the same class."
        )

    @property
    def start(self) -> str:
        """The result of the last step in one sentence, whichever way it went."""
        plain, conv = (vit.top1[-1] for vit in self.vits)
        epochs = len(self.vits[0].top1)
        return (
            f"After {epochs} epochs a ViT whose attention starts as convolutions has {conv:.1f}% top-1, the same ViT "
            f"with the usual initialisation {plain:.1f}%."
        )

    def table(self) -> Table:
        """Return the header and the rows of the ViTs' results."""
        head = [f"{len(self.images)} test images", "first epoch", "last epoch (top-1, %)", "NLL"]
        table = [head]
        for vit in self.vits:
            first = f"{vit.top1[0]:.1f}"
            last = f"{vit.top1[-1]:.1f}"
            table.append([vit.name, first, last, f"{vit.metrics['nll']:.3f}"])
        return table


def run_demo(folder: Path, show: bool = True, overrides: Sequence[str] = ()) -> Demo:
    """Run the demo, with `overrides` of every recipe; save its models and some digits in a folder, to try next."""
    start = time.perf_counter()
    threads = torch.get_num_threads()
    # threads that wait for each other come to a standstill next to other busy processes
    torch.set_num_threads(1)
    try:
        with TemporaryDirectory(prefix="isomorph-demo-") as runs:
            demo = _run_steps(folder, Path(runs), show, list(overrides))
    finally:
        torch.set_num_threads(threads)
    demo.seconds = time.perf_counter() - start
    return demo


def _run_steps(folder: Path, runs: Path, show: bool, overrides: list[str]) -> Demo:
    say = partial(Console(quiet=not show, highlight=False).print, soft_wrap=True)
    folder.mkdir(parents=True, exist_ok=True)

    def run(recipe: str, name: str, *changes: str) -> Trained:
        out = runs / recipe
        result = train(load_recipe(recipe, [f"out={out}", *changes, *overrides]), show)
        copy = f"{recipe.removeprefix('digits_')}.safetensors"
        shutil.copyfile(out / "model.safetensors", folder / copy)
        top1 = [row["top1"] for row in read_log(out / "log.jsonl") if row["epoch"]]
        return Trained(name, result.model, top1, result.metrics)

    say("[bold]1/4[/] train a small CNN on scikit-learn's images of digits")
    cnn = run("digits_cnn", "CNN", "epochs=3")
    say(
        "\n[bold]2/4[/] recast the six convolutions of its last stage as self-attention, and compare on test images"
    )
    tcnn = recast(cnn.model, ConvToGPSA(), where=LAYERS)
    save(tcnn.eval(), folder / "tcnn.safetensors")
    test = open_sources(load_recipe("digits_cnn", overrides))[1]
    config = data_config(load_recipe("digits_cnn"), cnn.model)
    assert isinstance(test, Source)
    images = torch.cat([batch for batch, _ in eval_loader(test, config)])
    report = verify(cnn.model, tcnn, [images[:VERIFIED], images[:16, :, :19, :23]])
    with torch.no_grad():
        same = cnn.model(images).argmax(1) == tcnn(images).argmax(1)
        agreeing = int(same.sum())
    maps_of_layers = attention_maps(tcnn, images[:SHOWN]).values()
    largest = [maps.amax(-1).mean() for maps in maps_of_layers]
    weight = torch.stack(largest).mean().item()
    demo = Demo(cnn, tcnn, report, agreeing, images, config, weight)
    say(f"    {demo.equality}")
    say("\n[bold]3/4[/] inspect what its heads attend to")
    say(
        f"    on average, its 9 heads each give {weight:.1%} of their attention to one position of the old 3 x 3 kernel"
    )
    for i in range(SHOWN):
        enlarged = test.image(i).resize((96, 96), Image.Resampling.NEAREST)
        enlarged.save(folder / f"digit-{i + 1}.png")
    say(
        "\n[bold]4/4[/] the other way round: train a ViT, and the same ViT whose attention starts as convolutions"
    )
    demo.vits += [run(recipe, name) for recipe, name in VITS.items()]
    return demo


def next_commands(folder: Path) -> list[tuple[str, str]]:
    """Return three commands for the models in the demo's folder, each with what it does."""
    called = Path(sys.argv[0])
    program = [called] if called.name == "isomorph" else [sys.executable, "-m", "isomorph"]
    cnn = folder / "cnn.safetensors"
    tcnn = folder / "tcnn.safetensors"
    vit = folder / "convit.safetensors"

    def line(*arguments: Any) -> str:
        return shlex.join(map(str, [*program, *arguments]))

    return [
        ("check the equality yourself", line("verify", cnn, tcnn, "--data", "digits")),
        (
            "a page about one model and one image",
            line("analyze", vit, "--image", folder / "digit-1.png"),
        ),
        (
            "recast the CNN and train it further",
            line("train", "digits_annealed", "--model.weights", cnn),
        ),
    ]
