"""The demo on digits: train a CNN, recast it, verify, fine-tune with and without attention, write a report."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from isomorph.analysis import attention_spans, gates
from isomorph.data.corruptions.corrupt import NoisySource
from isomorph.data.formats.registry import open_source
from isomorph.data.loaders import eval_loader
from isomorph.data.sources import Source
from isomorph.evaluation.accuracy import evaluate
from isomorph.evaluation.cost import count_macs, count_parameters
from isomorph.recipes import load_recipe
from isomorph.report.attention_viewer import PageImage, ViewerModel, build_viewer
from isomorph.report.charts import Dots, Line, Panel
from isomorph.report.html import Section, write_page
from isomorph.report.layer_maps import capture_layer_maps
from isomorph.surgery import ConvToGPSA, VerifyReport, recast, verify
from isomorph.training.build import data_config
from isomorph.training.recipe.recipe import Recipe
from isomorph.training.run.loop import train

NOISE_STDS = (0.2, 0.35)
"""Standard deviations of the noisy test sets."""

RUNS = {
    "digits_finetune": "CNN alone, fine-tuned",
    "digits_exact": "T-CNN from near exact (5, 6), fine-tuned",
    "digits_paper": "T-CNN from the paper's (1, 1), fine-tuned",
    "digits_annealed": "T-CNN annealed (20, 15) to (3, 1), fine-tuned",
}


START_ROWS = {"digits_finetune": 0, "digits_annealed": 1, "digits_exact": 2, "digits_paper": 3}
"""Row of the table with the model that each run starts from."""


@dataclass
class Demo:
    """The results of the demo."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    report: VerifyReport | None = None
    page: Path | None = None
    seconds: float = 0.0

    def table(self) -> list[list[str]]:
        """Return the header and the rows of the table."""
        noisy = [f"noise {std:g}" for std in NOISE_STDS]
        body = [
            [row["name"], *(f"{row[key]:.2f}" for key in ("clean", *noisy)), f"{row['nll']:.3f}"] for row in self.rows
        ]
        return [["digits, 450 test images", "clean top-1", *noisy, "clean NLL"], *body]


def _measure(name: str, model: nn.Module, test: Source, config: dict[str, Any]) -> dict[str, Any]:
    """Measure the clean and the noisy accuracy of a model."""
    clean = evaluate(model, eval_loader(test, config))
    noisy = {
        f"noise {std:g}": evaluate(model, eval_loader(NoisySource(test, std), config))["top1"] for std in NOISE_STDS
    }
    return {"name": name, "clean": clean["top1"], "nll": clean["nll"], **noisy}


def run_demo(page: Path, show: bool = True, overrides: Sequence[str] = ()) -> Demo:
    """Run the demo in a temporary folder and write the page.

    `overrides` are applied to every recipe, for example `epochs=1`.
    """
    start, console, demo = time.perf_counter(), Console(quiet=not show), Demo(page=page)
    with TemporaryDirectory(prefix="isomorph-demo-") as folder:
        runs = Path(folder)
        console.print("[bold]1/4[/] train a small CNN on the digits")
        cnn_recipe = load_recipe("digits_cnn", [f"out={runs / 'digits_cnn'}", *overrides])
        cnn = train(cnn_recipe, show).model
        test, config = open_source("digits", "test"), data_config(cnn_recipe, cnn)
        console.print("[bold]2/4[/] recast the convolutions of its last stage as attention, and verify on real digits")
        recasts = _recast_all(demo, cnn, test, config)
        console.print("[bold]3/4[/] fine-tune with and without attention, with the same budget")
        curves: dict[str, list[float]] = {}
        tuned: dict[str, nn.Module] = {}
        for name, title in RUNS.items():
            recipe = load_recipe(
                name, [f"out={runs / name}", f"model.weights={runs / 'digits_cnn/model.safetensors'}", *overrides]
            )
            tuned[name] = train(recipe, show).model
            demo.rows.append(_measure(title, tuned[name], test, config))
            curves[title] = [demo.rows[START_ROWS[name]]["clean"], *_top1_by_epoch(recipe)]
        console.print("[bold]4/4[/] write the report")
        cost = _cost_table(cnn, tuned["digits_paper"], config)
    demo.seconds = time.perf_counter() - start
    write_page(page, *_page_parts(demo, recasts, tuned, test, config, curves, cost))
    return demo


def _recast_all(demo: Demo, cnn: nn.Module, test: Source, config: dict[str, Any]) -> dict[str, nn.Module]:
    """Recast the CNN in three ways, measure each before fine-tuning, and verify the exact one on real images."""
    rules = {"exact": ConvToGPSA(), "near": ConvToGPSA(locality=5.0, gate=6.0), "paper": ConvToGPSA("paper")}
    recasts = {init: recast(cnn, rule, where="layer3.*.conv?") for init, rule in rules.items()}
    images = next(iter(eval_loader(test, config)))[0]
    demo.report = verify(cnn, recasts["exact"], [images, images[:16, :, :19, :23]])
    titles = {
        "CNN": cnn,
        "T-CNN exact, initialised": recasts["exact"],
        "T-CNN near exact (5, 6), initialised": recasts["near"],
        "T-CNN paper (1, 1), initialised": recasts["paper"],
    }
    demo.rows += [_measure(title, model, test, config) for title, model in titles.items()]
    return recasts


def _top1_by_epoch(recipe: Recipe) -> list[float]:
    """Return the top-1 after every epoch, from the run's log."""
    lines = (recipe.folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["top1"] for line in lines]


def _cost_table(cnn: nn.Module, tcnn: nn.Module, config: dict[str, Any]) -> list[list[str]]:
    """Return a table of the parameters and MACs of both models."""
    rows = [
        [name, f"{count_parameters(model):,}", f"{count_macs(model, config['input_size']) / 1e6:.1f} M"]
        for name, model in (("CNN", cnn), ("T-CNN", tcnn))
    ]
    return [["", "parameters", "MACs per image"], *rows]


def _as_lists(values: dict[str, Tensor]) -> dict[str, list[float]]:
    """Return the values of heads by layer as lists of numbers."""
    return {layer: heads.tolist() for layer, heads in values.items()}


def _attention_section(models: dict[str, nn.Module], test: Source, config: dict[str, Any]) -> Section:
    """Return a section with the models' attention maps on the first digits, for the patch under the pointer."""
    batch = torch.stack([eval_loader(test, config).dataset[i][0] for i in range(4)])
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    images = [PageImage(f"digit {i + 1}", image * std + mean) for i, image in enumerate(batch)]
    viewer_models = [
        ViewerModel(name, capture_layer_maps(model, batch)[0], _as_lists(gates(model)))
        for name, model in models.items()
    ]
    viewer = build_viewer(viewer_models, images)
    text = "Point at a patch of the digit to see what every head attends to from there."
    return Section("Attention maps", f"{text} {viewer.note if viewer else ''}", viewer=viewer)


def _page_parts(
    demo: Demo,
    recasts: dict[str, nn.Module],
    tuned: dict[str, nn.Module],
    test: Source,
    config: dict[str, Any],
    curves: dict[str, list[float]],
    cost: list[list[str]],
) -> tuple[str, str, list[Section], str]:
    """Return the title, lead, sections and footer of the page."""
    stages = {
        "exact, initialised": recasts["exact"],
        "paper, initialised": recasts["paper"],
        "paper, fine-tuned": tuned["digits_paper"],
    }
    head_gates, head_spans = (
        {name: _as_lists(measure(model)) for name, model in stages.items()} for measure in (gates, attention_spans)
    )
    lines = {name: Line(range(len(values)), values) for name, values in curves.items()}
    sections = [
        Section("Accuracy, clean and under noise", "One seed, small test set: one image is 0.22 points.", demo.table()),
        _attention_section(stages, test, config),
        Section("Learning curves", charts=[Panel("Clean top-1", "epoch of fine-tuning (0: before)", "%", lines)]),
        Section(
            "Is the recast the same function?",
            "The exact recast against the CNN on real digits: two input sizes, two precisions, layer by layer.",
            listing=str(demo.report),
        ),
        Section(
            "Gates: position or content",
            "Sigma of the gate of every head: 1 attends by position only, 0 by content only.",
            charts=[Dots("Gates", "sigma(gate)", head_gates, 1.0)],
        ),
        Section(
            "Spans: how far a head attends",
            "1 / locality of every head; a convolution has span 0.",
            charts=[Dots("Spans", "1 / locality", head_spans)],
        ),
        Section("Cost", "1 MAC = 2 FLOPs; attention included.", cost),
    ]
    lead = (
        "A small CNN was trained on scikit-learn's digits; the six convolutions of its last stage were recast as gated "
        "positional self-attention with the same function, verified, and fine-tuned with the same budget as the CNN."
    )
    footer = f"isomorph demo, {demo.seconds:.0f} s on {torch.get_num_threads()} threads, torch {torch.__version__}."
    return "A CNN becomes a T-CNN", lead, sections, footer
