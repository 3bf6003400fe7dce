"""The findings of pages are computed from the data, and charts in which nothing changes become a line of text."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import isomorph as iso
from isomorph.analysis import GatingHistory
from isomorph.report import Bars, Dots, Line, Matrix, PageImage, PageModel, Panel, Section, analyze_sections, findings
from isomorph.report.analyze_page import lead_text
from isomorph.report.attention_viewer import capture_layer_maps, largest_differences
from isomorph.report.figures import PALETTE
from isomorph.report.html import render_page
from isomorph.report.robustness_page import shared_means
from isomorph.report.run_files import AccuracyPoint
from test_report import CONFIG, small_vit

CSS = Path(iso.report.__file__).parent / "assets/page.css"


NAN = math.nan
RATE = {"a": Line([1, 2], [0.1, 0.1])}
CONSTANT = [
    (Dots("Gates", "g", {"a": {"x": [0.0, 0.0], "y": [0.0]}}), "Gates: 0 in every head of every layer."),
    (
        Dots("Gates", "g", {"a": {"x": [0.73123]}, "b": {"x": [1.0, 0.9996]}}, 1.0, 1e-3),
        "Gates: 0.731 for a, 1 for b, in every head of every layer.",
    ),
    (
        Dots("Entropy", "nats", {"a": {"x": [7e-6], "y": [6e-6]}}, None, 1e-3),
        "Entropy: 0 in every head of every layer.",
    ),
    (Dots("Entropy", "nats", {"a": {"x": [7e-6], "y": [6e-6]}}), ""),
    (Dots("Gates", "g", {"a": {"x": [0.2, 0.4]}, "b": {"x": [1.0]}}, 1.0, 1e-3), ""),
    (Dots("Spans", "s", {"a": {"x": [NAN, NAN]}}), ""),
    (Panel("Rate", "step", "lr", RATE), "Rate: 0.1 at every step."),
    (Panel("Rate", "step", "lr", RATE | {"b": Line([1], [0.2])}), "Rate: 0.1 for a, 0.2 for b, at every step."),
    (Panel("Spans", "epoch", "", {"a": Line([1, 2], [1.0, 1.0], [0.5, 1.0], [1.0, 1.0])}), ""),
    (Panel("Loss", "step", "", {str(i): Line([1, 2], [i, i]) for i in range(9)}), ""),
    (Matrix("Gain", "r", "c", ["a"], ["b", "c"], [[0.0, NAN]]), "Gain: 0 in every cell."),
    (Bars("Top-1", "%", {"a": {"fog": 1.0}}), ""),
]


def test_charts_in_which_nothing_changes_are_a_sentence():
    for chart, expected in CONSTANT:
        assert chart.constant_text() == expected
    flat, steep = (Panel(name, "x", "y", {"a": Line([1, 2], [1, y])}) for name, y in (("Flat", 1), ("Steep", 2)))
    page = render_page("t", "", [Section("s", charts=[flat, steep, flat])])
    assert page.count("Flat: 1 at every x.") == 2
    assert re.findall(r'data-chart="(\d+)"', page) == ["0"]


A = torch.tensor([[1.0, 4.0], [3.0, -8.0]])
B = A + torch.tensor([[0.0, 0.0], [-12.0, 0.0]])
CKA = Matrix("m", "a", "b", ["x", "y"], ["x", "y"], [[1.0, 0.25], [0.5, 0.75]])
COSTS = [{"model": "a", "parameters": 2, "macs": 4_000_000}, {"model": "b", "parameters": 3, "macs": 5_000_000}]
SPEEDS = [{"model": name, "batch": 32, "images_per_second": 100.0, "ratio": r} for name, r in (("a", 1), ("b", 0.5))]
CELLS = {("fog", 1): 50.0, ("snow", 1): 40.0, ("snow", 2): 0.0, ("clean", 0): 90.0}
OTHER_CELLS = {("fog", 1): 55.0, ("snow", 1): 37.0, ("saturate", 1): 99.0}
POINTS = [AccuracyPoint("a", "d", 80.0, 4_000_000, 1), AccuracyPoint("b", "d", 70.0, 1_000_000, 1)]
EQUAL, APART = {"x": [[0.0, 5e-7]]}, {"y": [[0.0, 0.25], [0.5, 0.0]]}


def history(*gates):
    values = {"x": torch.tensor(gates)[:, None], "y": torch.full((len(gates), 1), 0.5)}
    return {"a": GatingHistory(torch.arange(len(gates)).float(), values, {}, {})}


FINDINGS = [
    (findings.outputs_finding, ["a", "b"], [A, A]),
    (findings.outputs_finding, ["a", "b"], [A, B]),
    (findings.outputs_finding, ["a", "b"], [A, A / 0]),
    (findings.outputs_finding, ["a", "b"], [A, None]),
    (findings.outputs_finding, ["a"], [A]),
    (findings.outputs_finding, ["a", "b"], [A, torch.ones(2, 3)]),
    (findings.maps_finding, ["a", "b"], {}),
    (findings.maps_finding, ["a", "b"], EQUAL),
    (findings.maps_finding, ["a", "b"], {"x": [[3e-6, 0.0]]}),
    (findings.maps_finding, ["a", "b"], EQUAL | APART),
    (findings.predictions_finding, "net", ["a.png"], ["cat (90%)"]),
    (findings.predictions_finding, "net", ["a.png"], ()),
    (findings.distance_finding, {"net": {"x": [1.0, 2.0], "y": [NAN, 4.0], "z": [NAN]}, "cnn": {}}),
    (findings.distance_finding, {"net": {"x": [1.0], "y": [1.001]}}),
    (findings.gates_finding, Dots("g", "", {"a": {"x": [0.25, 0.75]}, "b": {"x": [1.0, 0.999]}})),
    (findings.similarity_finding, CKA),
    (findings.similarity_finding, replace(CKA, columns=["u", "v"])),
    (findings.similarity_finding, replace(CKA, column_label="a")),
    (findings.similarity_finding, Matrix("m", "a", "a", ["x"], ["x"], [[1.0]])),
    (findings.robustness_finding, shared_means({"a": CELLS, "b": OTHER_CELLS})),
    (findings.robustness_finding, shared_means({"b": OTHER_CELLS})),
    (findings.robustness_finding, {"a": {}}),
    (findings.cost_finding, COSTS[:1]),
    (findings.cost_finding, COSTS),
    (findings.cost_finding, [COSTS[0], COSTS[1] | {"parameters": 2}]),
    (findings.speed_finding, SPEEDS),
    (findings.speed_finding, SPEEDS[:1]),
    (findings.evolution_finding, {"a": {"x": 1.0, "y": 1.5}, "b": {"x": 1.25}}),
    (findings.runs_finding, {"a": 30.0, "b": 32.5}),
    (findings.runs_finding, {"a": 30.0, "b": 30.0}),
    (findings.runs_finding, {"a": 30.0, "b": None}),
    (findings.runs_finding, {"a": None}),
    (findings.gates_moved, history(0.9, 0.3)),
    (findings.gates_moved, history(0.5, 0.5)),
    (findings.gates_moved, history(0.9)),
    (findings.accuracy_cost_finding, [*POINTS, AccuracyPoint("c", "e", 99.0, 1, 1)]),
    (findings.accuracy_cost_finding, POINTS[:1]),
    (findings.accuracy_cost_finding, []),
]
SENTENCES = """\
b and a compute the same outputs on 2 images: difference 0.
On 2 images, the outputs of b and a are at most 12 apart (largest output 8); the predicted class is the same on 1 of 2.
The outputs of b or a are not finite on 2 images.




The attention maps of both models are equal within 1e-6 in all 2 heads.
The attention maps of both models are equal within 1e-5 in all 2 heads.
The attention maps of b and a differ in 2 of 4 heads, most in y, head 1: by 0.5.
net predicts cat (90%) for a.png.

The attention of net reaches furthest in y, 4.00 grid steps on average, and least in x, 1.50.
The attention of net reaches 1.00 grid steps on average in every layer.
The 2 gates of a are 0.25 to 0.75, 0.50 on average. The 2 gates of b are all 1.00.
Of the layers with the same name, those of a and b are least similar at y: CKA 0.750.
The most similar layers are x and u: CKA 1.000.
The most similar layers are y and x: CKA 0.500.

On corrupted images b reaches 46.00 % top-1, 1.00 points above a: +5.00 under fog, -3.00 under snow.
b reaches 46.00 % top-1 on corrupted images; its lowest is 37.00 %, under snow.

a has 2 parameters and 4.0 M MACs per image.
b compared with a: parameters +50 %, MACs +25 %.
b compared with a: parameters equal, MACs +25 %.
b runs at 0.50 times the speed of a.
a: 100.0 images per second in batches of 32.
At the last layer, F_k is 1.5 for a, 1.25 for b.
b reaches the best top-1, 32.50 %, 2.50 points above a.
2 of 2 runs reach the best top-1, 30.00 %.
a reaches a top-1 of 30.00 %. 1 run without a top-1.
No run has measured its top-1.
The gates of a move most in x: from 0.90 to 0.30 on average.
The gates of a stay within 0.005 in every layer: 0.50 on average.
The gates of a are 0.70 on average.
On d, a is the most accurate, 80.00 % top-1; b is the cheapest: 10.00 points less at 1/4.0 of the MACs.
On d, a is both the most accurate, 80.00 % top-1, and the cheapest.

"""
"""The sentence of each of FINDINGS; an empty line where there is nothing to say."""


def test_findings_have_the_numbers_of_the_data():
    assert [finding(*arguments) for finding, *arguments in FINDINGS] == SENTENCES.splitlines()
    every = {value for name, value in vars(findings).items() if name.endswith(("_finding", "_moved"))}
    assert {finding for finding, *_ in FINDINGS} == every
    means = shared_means({"a": CELLS, "b": OTHER_CELLS})  # over the cells that both have
    assert means == {"a": {"snow": 40, "fog": 50}, "b": {"snow": 37, "fog": 55}}


def test_differences_are_those_of_the_exact_maps():
    model, x = small_vit(), torch.randn(2, 3, 32, 48)
    gated = iso.recast(model, iso.AttentionToGPSA(grid_size=None), "blocks.0.attn").eval()
    first, second = (capture_layer_maps(m, x, keep_exact=True)[0]["blocks.0.attn"] for m in (model, gated))
    known = largest_differences(first, second)
    maps = [iso.attention_maps(m, x)["blocks.0.attn"] for m in (model, gated)]
    assert np.allclose(known, (maps[0] - maps[1]).abs().amax((2, 3)), atol=1e-8)
    assert np.max(known) < 1e-6 < first.rounding
    for other in (None, replace(second, exact=second.exact / 0), replace(second, exact=None)):
        assert largest_differences(first, other) is None


def test_a_page_begins_with_its_finding():
    model, images = small_vit(), [PageImage("x", torch.rand(3, 32, 48))]
    gated = iso.recast(model, iso.AttentionToGPSA(grid_size=None), "blocks.*.attn").eval()
    config = CONFIG | {"input_size": (3, 32, 48)}
    sections = analyze_sections([PageModel("a", model, config), PageModel("b", gated, config)], images)
    assert re.search(r"outputs of b and a are at most \S+e-0\d apart|same outputs", sections[0].finding)
    assert re.search("equal within 1e-[56] in all 9 heads", sections[0].finding)
    assert all(maps.exact is None for m in sections[0].viewer.models for maps in m.maps.values())
    page = render_page("t", sections[0].finding, sections)
    assert page.count(sections[0].finding) == 1
    assert "Gates: 0 in every head of every layer." in page
    titles = {"Attention": "A.", "Cost": "B.", "Robustness": "C."}
    assert lead_text([Section(title, finding=finding) for title, finding in titles.items()]) == "A. C."


# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as seen without red, green or blue cones.
COLOUR_BLIND = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    "usual": np.eye(3).tolist(),
}


def linear_rgb(colour):
    values = np.array(list(bytes.fromhex(colour.lstrip("#")))) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    t = xyz / (0.9505, 1, 1.089)
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a, b):
    """Contrast of two colours by WCAG 2."""
    low, high = sorted(float(np.dot((0.2126, 0.7152, 0.0722), linear_rgb(colour))) for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


class TestColours:
    light, dark = (dict(re.findall(r"--(\w+): (#\w+);", part)) for part in CSS.read_text().split("@media", 2)[:2])

    @pytest.mark.parametrize("sight", COLOUR_BLIND)
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_series_stay_apart_for_the_colour_blind(self, scheme, sight):
        colours = [getattr(self, scheme)[f"s{i}"] for i in range(6)]
        seen = [lab(np.clip(COLOUR_BLIND[sight] @ linear_rgb(colour), 0, 1)) for colour in colours]
        gaps = {(i, j): np.linalg.norm(seen[i] - seen[j]) for i in range(6) for j in range(i)}
        assert min(gaps.values()) > 15, min(gaps, key=gaps.get)

    def test_saved_figures_have_the_light_page_s_colours(self):
        assert tuple(self.light[f"s{i}"] for i in range(6)) == PALETTE

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_contrast(self, scheme):
        colours = {
            key: value if len(value) == 7 else "#" + "".join(2 * c for c in value[1:])
            for key, value in getattr(self, scheme).items()
            if key != "shade"
        }
        for ground in ("page", "card"):
            assert contrast(colours["ink"], colours[ground]) > 7
            assert contrast(colours["quiet"], colours[ground]) > 4.5
            assert all(contrast(colours[f"s{i}"], colours[ground]) > 2.8 for i in range(6))
