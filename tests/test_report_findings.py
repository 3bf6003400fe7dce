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
from isomorph.report import Bars, Dots, Line, Matrix, PageImage, PageModel, Panel, Section, analyze_sections
from isomorph.report.analyze_page import lead_text
from isomorph.report.attention_viewer import capture_layer_maps, largest_differences
from isomorph.report.figures import PALETTE
from isomorph.report.findings import (
    accuracy_cost_finding,
    cost_finding,
    distance_finding,
    evolution_finding,
    gates_finding,
    gates_moved,
    maps_finding,
    outputs_finding,
    predictions_finding,
    robustness_finding,
    runs_finding,
    similarity_finding,
    speed_finding,
)
from isomorph.report.html import render_page
from isomorph.report.robustness_page import shared_means
from isomorph.report.run_files import AccuracyPoint
from test_report import CONFIG, small_vit

CSS = Path(iso.report.__file__).parent / "assets/page.css"


class TestConstantCharts:
    @pytest.mark.parametrize(
        ("chart", "expected"),
        [
            (Dots("Gates", "g", {"a": {"x": [0.0, 0.0], "y": [0.0]}}), "Gates: 0 in every head of every layer."),
            (
                Dots("Gates", "g", {"a": {"x": [0.73123]}, "b": {"x": [1.0, 0.9996]}}, 1.0, 1e-3),
                "Gates: 0.731 for a, 1 for b, in every head of every layer.",
            ),
            (
                Dots("Entropy", "nats", {"a": {"x": [7e-6], "y": [6e-6]}}, None, 1e-3),
                "Entropy: 0 in every head of every",
            ),
            (Dots("Entropy", "nats", {"a": {"x": [7e-6], "y": [6e-6]}}), ""),
            (Dots("Gates", "g", {"a": {"x": [0.2, 0.4]}, "b": {"x": [1.0]}}, 1.0, 1e-3), ""),
            (Dots("Spans", "s", {"a": {"x": [math.nan, math.nan]}}), ""),
            (Panel("Rate", "step", "lr", {"a": Line([1, 2], [0.1, 0.1])}), "Rate: 0.1 at every step."),
            (
                Panel("Rate", "step", "lr", {"a": Line([1, 2], [0.1, 0.1]), "b": Line([1], [0.2])}),
                "Rate: 0.1 for a, 0.2 for b, at every step.",
            ),
            (Panel("Spans", "epoch", "", {"a": Line([1, 2], [1.0, 1.0], [0.5, 1.0], [1.0, 1.0])}), ""),
            (Panel("Loss", "step", "", {str(i): Line([1, 2], [i, i]) for i in range(9)}), ""),
            (Matrix("Gain", "r", "c", ["a"], ["b", "c"], [[0.0, math.nan]]), "Gain: 0 in every cell."),
            (Bars("Top-1", "%", {"a": {"fog": 1.0}}), ""),
        ],
    )
    def test_they_are_a_sentence(self, chart, expected):
        assert chart.constant_text().startswith(expected)
        assert bool(chart.constant_text()) == bool(expected)

    def test_the_page_writes_them_and_numbers_only_what_it_draws(self):
        flat, steep = (Panel(name, "x", "y", {"a": Line([1, 2], [1, y])}) for name, y in (("Flat", 1), ("Steep", 2)))
        page = render_page("t", "", [Section("s", charts=[flat, steep, flat])])
        assert page.count("Flat: 1 at every x.") == 2
        assert re.findall(r'data-chart="(\d+)"', page) == ["0"]


class TestFindings:
    def test_outputs_of_two_models(self):
        a = torch.tensor([[1.0, 4.0], [3.0, -8.0]])
        b = a + torch.tensor([[0.0, 0.0], [-12.0, 0.0]])
        assert outputs_finding(["a", "b"], [a, a]) == "b and a compute the same outputs on 2 images: difference 0."
        said = outputs_finding(["a", "b"], [a, b])
        assert said.startswith("On 2 images, the outputs of b and a are at most 12 apart (largest output 8);")
        assert said.endswith("the predicted class is the same on 1 of 2.")
        assert outputs_finding(["a", "b"], [a, None]) == outputs_finding(["a"], [a]) == ""
        assert outputs_finding(["a", "b"], [a, torch.ones(2, 3)]) == ""
        assert outputs_finding(["a", "b"], [a, a / 0]) == "The outputs of b or a are not finite on 2 images."

    def test_maps_of_two_models(self):
        equal, other = {"x": [[0.0, 5e-7]]}, {"y": [[0.0, 0.25], [0.5, 0.0]]}
        assert maps_finding(["a", "b"], {}) == ""
        assert (
            maps_finding(["a", "b"], equal) == "The attention maps of both models are equal within 1e-6 in all 2 heads."
        )
        assert "are equal within 1e-5 in all 2 heads" in maps_finding(["a", "b"], {"x": [[3e-6, 0.0]]})
        said = "The attention maps of b and a differ in 2 of 4 heads, most in y, head 1: by 0.5."
        assert maps_finding(["a", "b"], equal | other) == said

    def test_differences_are_those_of_the_exact_maps(self):
        model, x = small_vit(), torch.randn(2, 3, 32, 48)
        gated = iso.recast(model, iso.AttentionToGPSA(grid_size=None), "blocks.0.attn").eval()
        first, second = (capture_layer_maps(m, x, keep_exact=True)[0]["blocks.0.attn"] for m in (model, gated))
        known = largest_differences(first, second)
        maps = [iso.attention_maps(m, x)["blocks.0.attn"] for m in (model, gated)]
        assert np.allclose(known, (maps[0] - maps[1]).abs().amax((2, 3)), atol=1e-8)
        assert np.max(known) < 1e-6 < first.rounding
        assert largest_differences(first, None) is None
        assert largest_differences(first, replace(second, exact=second.exact / 0)) is None
        assert largest_differences(first, replace(second, exact=None)) is None

    def test_a_page_of_two_equal_models_begins_with_it(self):
        model, pictures = small_vit(), [PageImage("x", torch.rand(3, 32, 48))]
        gated = iso.recast(model, iso.AttentionToGPSA(grid_size=None), "blocks.*.attn").eval()
        config = CONFIG | {"input_size": (3, 32, 48)}
        sections = analyze_sections([PageModel("a", model, config), PageModel("b", gated, config)], pictures)
        assert re.search(r"outputs of b and a are at most \S+e-0\d apart|same outputs", sections[0].finding)
        assert re.search("equal within 1e-[56] in all 9 heads", sections[0].finding)
        assert all(maps.exact is None for m in sections[0].viewer.models for maps in m.maps.values())
        page = render_page("t", sections[0].finding, sections)
        assert page.count(sections[0].finding) == 1
        assert "Gates: 0 in every head of every layer." in page

    def test_one_model(self):
        assert predictions_finding("net", ["a.png", "b.png"], ["cat (90%)", ""]) == "net predicts cat (90%) for a.png."
        assert predictions_finding("net", ["a.png"], [""]) == ""
        reach = distance_finding({"net": {"x": [1.0, 2.0], "y": [math.nan, 4.0], "z": [math.nan]}, "cnn": {}})
        assert reach == "The attention of net reaches furthest in y, 4.00 grid steps on average, and least in x, 1.50."
        flat = distance_finding({"net": {"x": [1.0], "y": [1.001]}})
        assert flat == "The attention of net reaches 1.00 grid steps on average in every layer."
        gates = gates_finding(Dots("g", "", {"a": {"x": [0.25, 0.75]}, "b": {"x": [1.0, 0.999]}}))
        assert gates == "The 2 gates of a are 0.25 to 0.75, 0.50 on average. The 2 gates of b are all 1.00."

    def test_similarity(self):
        values = [[1.0, 0.25], [0.5, 0.75]]
        cka = Matrix("m", "a", "b", ["x", "y"], ["x", "y"], values)
        assert similarity_finding(cka).endswith("those of a and b are least similar at y: CKA 0.750.")
        assert similarity_finding(replace(cka, columns=["u", "v"])) == "The most similar layers are x and u: CKA 1.000."
        assert similarity_finding(replace(cka, column_label="a")) == "The most similar layers are y and x: CKA 0.500."
        assert similarity_finding(Matrix("m", "a", "a", ["x"], ["x"], [[1.0]])) == ""

    def test_robustness_is_over_cells_that_both_have(self):
        a = {("fog", 1): 50.0, ("snow", 1): 40.0, ("snow", 2): 0.0, ("clean", 0): 90.0}
        b = {("fog", 1): 55.0, ("snow", 1): 37.0, ("saturate", 1): 99.0}
        assert shared_means({"a": a, "b": b}) == {"a": {"snow": 40, "fog": 50}, "b": {"snow": 37, "fog": 55}}
        said = robustness_finding(shared_means({"a": a, "b": b}))
        assert (
            said
            == "On corrupted images b reaches 46.00 % top-1, 1.00 points above a: +5.00 under fog, -3.00 under snow."
        )
        assert "1.00 points below b" in robustness_finding(shared_means({"b": b, "a": a}))
        assert "equal to a" in robustness_finding(shared_means({"a": a, "b": dict(a)}))
        alone = robustness_finding(shared_means({"b": b}))
        assert alone == "b reaches 46.00 % top-1 on corrupted images; its lowest is 37.00 %, under snow."
        assert robustness_finding({"a": {}}) == ""

    def test_cost(self):
        rows = [{"model": "a", "parameters": 2, "macs": 4_000_000}, {"model": "b", "parameters": 3, "macs": 5_000_000}]
        assert cost_finding(rows[:1]) == "a has 2 parameters and 4.0 M MACs per image."
        assert cost_finding(rows) == "b compared with a: parameters +50 %, MACs +25 %."
        assert "parameters equal, MACs +25 %" in cost_finding([rows[0], rows[1] | {"parameters": 2}])

    def test_speed_and_evolution(self):
        rows = [
            {"model": name, "batch": 32, "images_per_second": 100.0, "ratio": r} for name, r in (("a", 1), ("b", 0.5))
        ]
        assert speed_finding(rows) == "b runs at 0.50 times the speed of a."
        assert speed_finding(rows[:1]) == "a: 100.0 images per second in batches of 32."
        found = evolution_finding({"a": {"x": 1.0, "y": 1.5}, "b": {"x": 1.25}})
        assert found == "At the last layer, F_k is 1.5 for a, 1.25 for b."

    def test_the_page_begins_with_robustness_too(self):
        sections = [
            Section("Attention", finding="A."),
            Section("Cost", finding="B."),
            Section("Robustness", finding="C."),
        ]
        assert lead_text(sections) == "A. C."
        assert "B." in (page := render_page("t", "A. C.", sections))
        assert page.count("A.") == page.count("A. C.")

    def test_runs(self):
        assert runs_finding({"a": 30.0, "b": 32.5}) == "b reaches the best top-1, 32.50 %, 2.50 points above a."
        assert runs_finding({"a": 30.0, "b": 30.0}) == "2 of 2 runs reach the best top-1, 30.00 %."
        assert runs_finding({"a": 30.0}) == "a reaches a top-1 of 30.00 %."
        assert runs_finding({"a": 30.0, "b": None}) == "a reaches a top-1 of 30.00 %. 1 run without a top-1."
        assert runs_finding({"a": None}) == "No run has measured its top-1."

    def test_gates_along_runs(self):
        def history(*gates):
            epochs = torch.arange(len(gates)).float()
            values = {"x": torch.tensor(gates)[:, None], "y": torch.full((len(gates), 1), 0.5)}
            return GatingHistory(epochs, values, {}, {})

        assert gates_moved({"a": history(0.9, 0.3)}) == "The gates of a move most in x: from 0.90 to 0.30 on average."
        assert (
            gates_moved({"a": history(0.5, 0.5)}) == "The gates of a stay within 0.005 in every layer: 0.50 on average."
        )
        assert gates_moved({"a": history(0.9)}) == "The gates of a are 0.70 on average."
        assert gates_moved({}) == ""

    def test_accuracy_and_cost(self):
        points = [AccuracyPoint("a", "d", 80.0, 4_000_000, 1), AccuracyPoint("b", "d", 70.0, 1_000_000, 1)]
        said = "On d, a is the most accurate, 80.00 % top-1; b is the cheapest: 10.00 points less at 1/4.0 of the MACs."
        assert accuracy_cost_finding([*points, AccuracyPoint("c", "e", 99.0, 1, 1)]) == said
        assert "both the most accurate" in accuracy_cost_finding(points[:1])
        assert accuracy_cost_finding([]) == ""


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
