"""What the report's pages are made of: rounded maps, logs, results, findings, and the commands that write them."""

import base64
import json
import math
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from scipy.stats import binomtest

import isomorph as iso
from isomorph import report
from isomorph.analysis.cost import count_macs
from isomorph.analysis.evolution import random_draw_indices
from isomorph.checkpoints.foreign import NO_OPTIONS
from isomorph.checkpoints.model import record_data
from isomorph.cli import main
from isomorph.cli.analyze import ImageOptions, gating_histories, open_test_loaders
from isomorph.lab.data.formats.registry import open_source
from isomorph.lab.data.loaders import eval_loader
from isomorph.lab.data.sources import Source
from isomorph.lab.evaluation.model_data import sample_images
from isomorph.lab.evaluation.robustness.scores import robustness_summary
from isomorph.lab.report.attention_viewer import (
    ViewerModel,
    build_viewer,
    capture_layer_maps,
    largest_differences,
    pack_layer_maps,
    round_rows,
)
from isomorph.lab.report.compare_page import MAX_CURVE_POINTS, curve, flatten_recipe, runs_finding
from isomorph.lab.report.html import render_page
from isomorph.lab.report.page_images import normalise_images
from isomorph.lab.report.robustness_page import robustness_charts, robustness_table
from isomorph.lab.report.run_files import AccuracyPoint, read_points
from isomorph.models.input_sizes import evaluation_config
from isomorph.terminal_tables import interval_text, metric_table
from refusals import refused

NAN = math.nan


SMALL_VIT = dict(img_size=(32, 48), patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=5)


def small_vit(**changes):
    arguments = SMALL_VIT | changes
    return timm.create_model("vit_tiny_patch16_224", **arguments).eval()


def an_image(name="x"):
    return report.PageImage(name, torch.rand(3, 32, 48))


def unpacked(text, heads, queries):
    """The obvious way back from the packed text, row by row."""
    data = zlib.decompress(base64.b64decode(text))
    split = heads * queries * 2 * 4
    ranges = np.frombuffer(data[:split], "<f4").reshape(heads, queries, 1, 2)
    levels = np.frombuffer(data[split:], np.uint8).reshape(heads, queries, -1)
    low = ranges[..., 0]
    high = ranges[..., 1]
    return low + levels * (high - low) / 255


class TestMaps:
    def test_the_page_holds_the_maps_to_half_a_level(self):
        model = small_vit()
        x = torch.randn(2, 3, 32, 48)
        found, problems = capture_layer_maps(model, x)
        assert problems == {}
        for name, maps in iso.attention_maps(model, x).items():
            layer = found[name]
            for image in range(2):
                back = unpacked(layer.pack(image), heads=3, queries=25)
                error = abs(back - maps[image].numpy()).max()
                assert error <= layer.rounding * 1.001
            half_a_level = maps.max().item() / 510
            assert layer.rounding <= half_a_level * 1.001
            assert layer.where.queries == (4, 6)
        selected, _ = capture_layer_maps(model, x, "blocks.1.*")
        assert list(selected) == ["blocks.1.attn"]

    def test_windows_that_are_shifted_have_no_difference(self):
        swin = timm.create_model(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            window_size=4,
            embed_dim=12,
            num_heads=(2, 2, 2, 2),
        )
        found, _ = capture_layer_maps(swin.eval(), torch.randn(1, 3, 32, 32), keep_exact=True)
        still, shifted = found["layers.0.blocks.0.attn"], found["layers.0.blocks.1.attn"]
        assert largest_differences(still, still) == [[0.0, 0.0]]
        assert largest_differences(still, shifted) is None

    def test_negative_attention_keeps_its_sign(self):
        maps = torch.tensor([[-1.0, 0.0, 3.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.5]])
        levels, ranges = round_rows(maps)
        assert ranges.tolist() == [[-1.0, 3.0], [0.0, 0.0], [0.0, 0.5]]
        low = ranges[:, :1]
        high = ranges[:, 1:]
        back = low + levels * (high - low) / 255
        assert torch.allclose(back, maps, atol=4 / 510)

    def test_a_budget_thins_queries_and_says_so(self):
        found, _ = capture_layer_maps(small_vit(), torch.randn(1, 3, 32, 48))
        models = [ViewerModel("m", found)]
        images = [an_image()]
        step, packed = pack_layer_maps(list(found.values()), 1, max_characters=4000)
        assert step[0] > 1
        assert sum(map(len, packed.values())) <= 4000
        whole = build_viewer(models, images)
        assert "To keep" not in whole.note
        thinned = build_viewer(models, images, 4000)
        assert "To keep the page small" in thinned.note


def cnn():
    return timm.create_model("cifar_resnet20")


def gated_vit():
    return iso.recast(small_vit(), iso.AttentionToGPSA(init="paper"), "blocks.[01].attn")


def refined_vit():
    plain = small_vit(class_token=False, global_pool="avg")
    return iso.recast(plain, iso.AttentionToRefined(init="paper"), "blocks.*.attn")


def t_cnn():
    return iso.recast(cnn(), iso.ConvToGPSA("paper"), "layer3.0.conv?")


def coatnet():
    return timm.create_model(
        "coatnet_0",
        layout="C-T-T-T",
        depths=(2, 1, 1, 1, 1),
        widths=(8, 8, 16, 16, 16),
        head_dim=8,
        img_size=(32, 48),
    )


MODELS = {
    "gated": gated_vit,
    "refined": refined_vit,
    "t-cnn": t_cnn,
    "cnn": cnn,
    "coatnet": coatnet,
}
CONFIG = {
    "mean": (0.5,) * 3,
    "std": (0.5,) * 3,
    "crop_pct": 1.0,
    "crop_mode": "center",
    "interpolation": "bicubic",
}
SMALL = CONFIG | {"input_size": (3, 32, 48)}


def titles_of_charts(sections):
    titles = []
    for section in sections:
        titles += [chart.title for chart in section.charts]
    return titles


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_has_its_page(name, tmp_path):
    model = MODELS[name]().eval()
    subjects = [report.PageModel(name, model, SMALL)]
    sections = report.analyze_sections(subjects, [an_image("a"), an_image("b")])
    first = sections[0]
    assert ("no attention to draw" in first.text) == (name == "cnn")
    assert first.finding.startswith(f"{name} predicts ")

    titles = [section.title for section in sections]
    assert ("Gates and spans" in titles) == (name in ("gated", "t-cnn"))
    # its kernels are composed once a pass, whatever the batch
    once = ["Cost per pass"] if name == "refined" else []
    assert titles[titles.index("Cost") :] == ["Cost", *once, f"Model history: {name}"]

    if name != "cnn":
        maps = iso.attention_maps(model, torch.randn(1, 3, 32, 48))
        drawn = [layer["name"] for layer in first.viewer.data["layers"]]
        assert drawn == list(maps)
        kinds_of_charts = {title.partition(":")[0] for title in titles_of_charts(sections)}
        assert {"Nonlocality", "Attention entropy"} <= kinds_of_charts
    assert report.write_page(tmp_path / "page.html", name, "", sections) > 10_000


@pytest.mark.parametrize("layout", ["P-W3S", "R-D1W3"])
@pytest.mark.parametrize("where", ["blocks.*.mlp.fc1", "blocks.*.attn.qkv"])
def test_branches_of_pyramids_and_the_largest_attention_have_charts(where, layout):
    """Every two branches of a pyramid but the skip (TDRL Fig. 2c), and what grows before a collapse (Fig. 3a, b)."""
    torch.manual_seed(0)
    wide = iso.recast(small_vit(), iso.LinearToPyramid(layout, init="paper"), where).eval()
    images = [an_image()]
    sections = report.analyze_sections([report.PageModel("wide", wide, SMALL)], images)
    charts = {}
    for section in sections:
        for chart in section.charts:
            if chart.title:
                charts[chart.title] = chart.series["wide"]
    batch = normalise_images(images, SMALL)
    for name, matrix in iso.analysis.branch_similarity(wide, batch).items():
        matrices = matrix if matrix.ndim == 3 else matrix[None]
        pairs = []
        for each in matrices:
            for i, j in ((0, 1), (0, 2), (1, 2)):
                pairs.append(each[i, j].item())
        assert charts["Similarity of pyramid branches"][name] == pytest.approx(pairs)
    for name, stats in iso.analysis.logit_stats(wide, batch).items():
        assert charts["Largest attention"][name] == pytest.approx(stats.max_attention.tolist())
    fused = report.PageModel("fused", iso.fuse(wide), SMALL)
    sections = report.analyze_sections([fused], images)
    assert "Pyramid branches" not in [section.title for section in sections]


def test_a_page_of_two_models_begins_with_its_finding():
    model = small_vit()
    gated = iso.recast(model, iso.AttentionToGPSA(grid_size=None), "blocks.*.attn").eval()
    subjects = [report.PageModel("a", model, SMALL), report.PageModel("b", gated, SMALL)]
    loader = [(torch.randn(16, 3, 32, 48), None)]
    options = report.AnalyzeOptions(cka_batches={"a": loader, "b": loader})
    sections = report.analyze_sections(subjects, [an_image()], options)
    finding = sections[0].finding
    assert re.search(r"outputs of b and a are at most \S+e-0\d apart|same outputs", finding)
    assert re.search("equal within 1e-[56] in all 9 heads", finding)

    by_title = {section.title: section for section in sections}
    (between,) = by_title["Layer similarity (CKA)"].charts
    of_same_layers = torch.tensor(between.values).diagonal()
    assert of_same_layers.allclose(torch.ones(3), atol=1e-4)

    page = render_page("t", finding, sections)
    assert page.count(finding) == 1
    assert "Gates: 0 in every head of every layer." in page


def test_a_page_says_what_a_model_does_not_give():
    without_classes = small_vit(reg_tokens=2, num_classes=0)
    broken = small_vit(reg_tokens=2)
    broken.head.weight.data[0, 0] = NAN
    for model, said in (
        (without_classes, "a gives no classes."),
        (broken, "a are not finite"),
    ):
        subjects = [report.PageModel("a", model, SMALL)]
        first, *others = report.analyze_sections(subjects, [an_image()])
        assert said in first.finding
        data = first.viewer.data
        assert data["registers"] == 2
        assert data["images"][0]["predictions"] == [""]
        assert "Attention to class token and registers" in titles_of_charts(others)


class TestPage:
    def test_what_is_given_cannot_become_code_and_nothing_is_loaded(self):
        nasty = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
        panel = report.Panel(nasty, nasty, nasty, {nasty: report.Line([1.0, 2.0], [2.0, 3.0])})
        section = report.Section(nasty, nasty, [[nasty], [nasty]], listing=nasty, charts=[panel])
        page = render_page(nasty, nasty, [section, section, section], nasty)
        assert "<img" not in page
        assert page.count("<script") == page.count("</script>") == 2
        assert "default-src 'none'" in page
        assert not re.search(r"(src|href)=\"?(https?:)?//", page)
        addresses = set(re.findall(r"https?://[^\"' ]+", page))
        assert addresses <= {"http://www.w3.org/2000/svg"}

    def test_numbers_that_are_none_become_nothing(self):
        chart = report.Panel("t", "x", "y", {"a": report.Line([0.0, 1.0], [NAN, 2.0])})
        (series,) = chart.drawing()["series"]
        assert series["lines"] == [[[0.0, None], [1.0, 2.0]]]
        assert chart.table() == [["x", "a"], ["0", "-"], ["1", "2"]]
        dots = report.Dots("t", "y", {"a": {"l": [1.0, 2.0]}, "b": {"m": [3.0]}})
        assert dots.table()[1:] == [["l", "1, 2", "-"], ["m", "-", "3"]]


CELLS = {
    ("snow", 1): 40.0,
    ("snow", 2): 20.0,
    ("fog", 1): 50.0,
    ("saturate", 1): 1.0,
    ("clean", 0): 90.0,
}
OTHER_CELLS = {
    ("snow", 1): 37.0,
    ("snow", 2): 17.0,
    ("fog", 1): 55.0,
    ("saturate", 1): 9.0,
    ("clean", 0): 80.0,
}


def test_the_robustness_page_has_the_suites_means():
    """Uneven cells are averaged as in the summary; the extra corruption is drawn, and in no mean."""
    scores = {}
    for key, top1 in CELLS.items():
        if key != ("clean", 0):
            scores[key] = {"top1": top1}
    summary = robustness_summary(scores, None, imagenet=False)
    _, row = robustness_table({"net": CELLS})
    assert row == ["net", "90.00", "3", f"{summary['mean_top1']:.2f}"]

    bars, levels, cells = robustness_charts({"net": CELLS})
    assert bars.series == {"net": summary["by_corruption"]}
    drawn = levels.series["net"]
    assert list(drawn.values()) == list(summary["by_severity"].values())
    assert cells.rows == ["snow", "fog", "saturate"]
    assert cells.low == 0
    assert cells.high == 100
    *_, change = robustness_charts({"a": CELLS, "b": OTHER_CELLS})
    assert change.title == "Points gained (red) or lost (blue): b minus a"
    assert change.low == -8
    assert change.high == 8
    assert change.values[0] == [-3, -3]

    _, row = robustness_table({"net": {("saturate", 1): 9.0}})
    assert row == ["net", "-", "1", "9.00"]


@pytest.mark.parametrize(("correct", "images"), [(0, 7), (9, 20), (450, 450), (8123, 10_000)])
def test_intervals_are_wilsons(correct, images):
    low, high = binomtest(correct, images).proportion_ci(method="wilson")
    expected = f"{100 * low:.1f} to {100 * high:.1f}"
    top1 = 100 * correct / images
    assert interval_text(top1, images) == expected
    rows = metric_table("net", {"top1": top1, "images": images})
    assert rows[2] == ["95% interval of top-1 (%)", expected]


def json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_run(folder, lr=0.1, epochs=3, end=""):
    folder.mkdir(parents=True)
    recipe = {"name": "r", "model": {"name": "net"}, "epochs": 4, "optim": {"lr": lr}}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    rows = []
    for epoch in range(1, epochs + 1):
        scores = {"loss": 1 / epoch, "top1": 10.0 * epoch, "images": 100}
        rows.append({"epoch": epoch, **scores, "seconds": 2.0})
    (folder / "log.jsonl").write_text(json_lines(rows) + end)
    steps = [{"epoch": 1, "step": step, "loss": 1 / step, "lr": lr} for step in range(1, 30)]
    (folder / "steps.jsonl").write_text(json_lines(steps))
    return folder


def test_constant_text_names_what_has_the_value():
    gammas = report.Dots("Gammas", "weight", {"a": {"x": [0.0, 0.0]}}, each="channel")
    assert gammas.constant_text() == "Gammas: 0 in every channel of every layer."
    assert gammas.parts()["each"] == "channel"
    spans = report.Dots("Spans", "steps", {"a": {"x": [2.0, NAN]}})
    assert spans.constant_text() == "Spans: 2 in every head that has a value."


class TestRuns:
    def test_runs_side_by_side(self, tmp_path):
        whole = write_run(tmp_path / "a")
        broken = write_run(tmp_path / "b", lr=0.2, epochs=2, end='{"epoch": 3, "lo')
        logs = report.read_run_logs([whole, broken])
        last, curves, recipes = report.compare_sections(logs)
        reached = (
            "a reaches the best top-1, 30.00 % (95% interval 21.9 to 39.6), 10.00 points above b"
        )
        doubt = " (less than chance may do with 100 images)"
        assert last.finding == f"{reached}{doubt}, each in its best epoch on the test images."
        assert last.details.lines == ["b: 1 of 3 lines of log.jsonl cannot be read."]
        _, row_of_a, row_of_b = last.table
        assert row_of_a[:6] == ["a", "r", "net", "3 of 4", "30.00 (21.9 to 39.6)", "30.00"]
        assert row_of_b[:6] == ["b", "r", "net", "2 of 4", "20.00 (13.3 to 28.9)", "20.00"]
        charts = {chart.title: chart for chart in curves.charts}
        line_of_b = charts["Top-1"].lines["b"]
        assert list(line_of_b.y) == [10, 20]
        assert recipes.table == [["field", "a", "b"], ["optim.lr", "0.1", "0.2"]]

    def test_runs_on_other_test_sets_have_no_winner(self, tmp_path):
        folders = []
        for name, source in (("a", "digits"), ("b", "cifar10")):
            folder = write_run(tmp_path / name)
            path = folder / "recipe.json"
            recipe = json.loads(path.read_text())
            path.write_text(json.dumps(recipe | {"data": {"source": source}}))
            folders.append(folder)
        first, *_ = report.compare_sections(report.read_run_logs(folders))
        expected = (
            "The runs have different test sets (digits, cifar10): their top-1 cannot be compared."
        )
        assert first.finding == expected

    @pytest.mark.parametrize(
        ("data", "images", "names"),
        [
            (({"root": "pets"}, {"root": "x/flowers"}), (9, 9), "pets, flowers"),
            (({"root": "a/pets"}, {"root": "b/pets"}), (9, 9), None),
            (({"root": "pets"}, {"root": "pets"}), (9, 5), "pets (9 images), pets (5 images)"),
            (({"root": "pets"}, {"root": "pets"}), (9, None), None),
            (({"root": "pets"}, {"root": "pets", "classes": 3}), (9, 9), "pets, pets (3 classes)"),
        ],
    )
    def test_a_test_set_is_a_folder_its_classes_and_images(self, data, images, names, tmp_path):
        folders = []
        for name, own_data, count in zip("ab", data, images, strict=True):
            folder = write_run(tmp_path / name)
            recipe = {"data": {"source": "imagefolder"} | own_data}
            (folder / "recipe.json").write_text(json.dumps(recipe))
            row = {"epoch": 1, "top1": 50.0} | ({"images": count} if count else {})
            (folder / "log.jsonl").write_text(json_lines([row]))
            folders.append(folder)
        first, *_ = report.compare_sections(report.read_run_logs(folders))
        expected = f"The runs have different test sets ({names}): their top-1 cannot be compared."
        assert (first.finding == expected) == (names is not None)

    def test_a_run_without_top1_hides_no_interval(self, tmp_path):
        folders = [write_run(tmp_path / name) for name in "abc"]
        (folders[2] / "log.jsonl").write_text("")
        first, *_ = report.compare_sections(report.read_run_logs(folders))
        assert "95% interval" in first.finding
        assert "1 run without a top-1" in first.finding

    def test_a_lead_of_one_image_is_chance_at_100_percent_too(self):
        assert "less than chance" in runs_finding({"a": 100.0, "b": 99.78}, 450)
        assert "less than chance" not in runs_finding({"a": 100.0, "b": 90.0}, 450)

    def test_damaged_and_foreign_files_stop_nothing(self, tmp_path):
        folders = [write_run(tmp_path / name) for name in "abc"]
        with open(folders[0] / "log.jsonl", "a") as file:
            file.write("[" * 100_000 + "\n" + '{"epoch": null, "top1": 99.0}\n')
        (folders[1] / "recipe.json").write_text('{"model": "resnet18", "data": "x"}')
        (folders[2] / "recipe.json").unlink()
        logs = report.read_run_logs(folders)
        first, *others = report.compare_sections(logs)
        assert first.table[1][3] == "3 of 4"
        assert first.table[2][2] == "resnet18"
        assert "a: 2 of 5 lines of log.jsonl cannot be read." in first.details.lines
        fields = [row[0] for row in others[-1].table[1:]]
        assert others[-1].table[0] == ["field", "a", "b"]
        assert "model" in fields

    def test_values_before_training_are_not_results(self, tmp_path):
        folder = write_run(tmp_path / "a")
        (folder / "log.jsonl").write_text(json_lines([{"epoch": 0, "top1": 10.0, "nll": 2.0}]))
        first, *_ = report.compare_sections(report.read_run_logs([folder]))
        head, row = first.table
        assert row[head.index("best top-1 (%, 95% interval)")] == "-"
        assert row[head.index("NLL (nats)")] == "-"

    def test_one_evaluated_model_is_on_the_page(self, tmp_path):
        point = AccuracyPoint("x", "pets", 50.0, 10**9, 10**6)
        logs = report.read_run_logs([write_run(tmp_path / "a")])
        sections = {each.title: each for each in report.compare_sections(logs, points=[point])}
        section = sections["Accuracy and cost"]
        assert section.table[1][0] == "x"
        assert not section.charts

    def test_points_of_different_numbers_of_images_are_of_two_test_sets(self):
        point = AccuracyPoint("x", "pets", 50.0, 10**9, 10**6, 200)
        other = point._replace(name="y", images=3_000)
        (section,) = report.compare_sections([], points=[point, other])
        assert [row[1] for row in section.table[1:]] == ["pets (200 images)", "pets (3,000 images)"]
        assert len(section.charts[0].series) == 2

    def test_results_of_one_name_have_their_paths(self, tmp_path):
        paths = []
        for folder in "ab":
            path = tmp_path / folder / "x.json"
            path.parent.mkdir()
            result = {"model": "net", "top1": 50.0, "macs": 1, "parameters": 1, "data": "/d/pets"}
            path.write_text(json.dumps(result))
            paths.append(path)
        points = read_points(paths)
        assert [point.name for point in points] == [f"net ({path})" for path in paths]
        assert {point.data for point in points} == {"pets"}

    def test_curves_are_thinned_to_means_and_reduced_over_layers(self):
        rows = [{"step": i, "loss": float(i % 2)} for i in range(10 * MAX_CURVE_POINTS)]
        not_drawn = [{"step": 3, "loss": NAN}, {"step": None, "loss": 1}]
        line = curve(rows + not_drawn, "step", "loss")
        assert len(line.x) == MAX_CURVE_POINTS
        assert set(line.y) == {0.5}

        monitored = {
            "step": 1,
            "max_logit": {"x": 1.0, "y": 4.0},
            "entropy": {"x": 1.0, "y": 4.0, "z": None},
        }
        assert curve([monitored], "step", "max_logit").y == [4.0]
        assert curve([monitored], "step", "entropy").y == [2.5]
        flat = flatten_recipe({"a": {"b": [1], "c": {}}, "d": None})
        assert flat == {"a.b": "[1]", "d": "null"}


def random_pixels(*shape):
    return np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)


def test_models_are_compared_on_the_same_pictures(monkeypatch):
    pictures = [Image.fromarray(pixels) for pixels in random_pixels(40, 30, 50, 3)]
    numbers = list(range(40))
    source = Source(pictures, numbers, map(str, numbers))
    monkeypatch.setattr("isomorph.lab.evaluation.model_data.open_source", lambda *_: source)
    alike = {"input_size": (3, 24, 32), "crop_mode": "center"}
    a = alike | dict(mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.875, interpolation="bicubic")
    b = alike | dict(mean=(0.1, 0.2, 0.3), std=(0.4,) * 3, crop_pct=1.0, interpolation="bilinear")
    subjects = [report.PageModel("a", small_vit(), a), report.PageModel("b", small_vit(), b)]
    loaders, *_ = open_test_loaders(subjects, ImageOptions(data="given", max_images=36))

    plain = {}
    labels = {}
    for subject in subjects:
        name, config = subject.name, subject.config
        batches, targets = zip(*loaders[name], strict=True)
        mean = torch.tensor(config["mean"]).view(3, 1, 1)
        plain[name] = torch.cat(batches) * config["std"][0] + mean
        labels[name] = torch.cat(targets).tolist()
    assert plain["a"].shape == (36, 3, 24, 32)
    torch.testing.assert_close(plain["b"], plain["a"], atol=1e-5, rtol=0)
    assert labels["a"] == labels["b"]
    assert labels["a"] != sorted(labels["a"])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(random_pixels(40, 60, 3)).save("a.png")
    return tmp_path


def done(command):
    """Runs a command that must succeed, and may replace the page of another one."""
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--overwrite"])
    assert stop.value.code == 0


class TestCommands:
    def test_compare_draws_gates_along_training(self, folder):
        """A head that loses its centre hides no other: its span is no number, its way ends where it was last."""
        for name in ("gated", "plain"):
            write_run(folder / name)
        gated = timm.create_model(
            "convit_ti", img_size=32, patch_size=8, depth=2, local_up_to_layer=1, num_classes=2
        )
        layer = gated.blocks[0].attn
        for epoch, gate in ((1, 4.0), (3, -1.0)):
            with torch.no_grad():
                layer.gate.fill_(gate)
            iso.save(gated, folder / f"gated/epoch-{epoch}.safetensors")
            with torch.no_grad():
                layer.position[0, 2] = 0.001
        iso.save(cnn(), folder / "plain/epoch-1.safetensors")
        (folder / "gated/epoch-2.safetensors").write_bytes(b"cut short")
        folders = [folder / "gated", folder / "plain"]
        logs = report.read_run_logs(folders)
        found = gating_histories(logs, NO_OPTIONS)
        assert list(found) == ["gated"]

        sections = {section.title: section for section in report.compare_sections(logs, found)}
        problems = sections["Final results"].details.lines
        assert any("epoch-2.safetensors" in line for line in problems)
        section = sections["Gates, spans and centres along training"]
        assert "gated: heads without a centre at the end" in section.text

        gates, spans, ways = section.charts
        names = list(found["gated"].gates)
        assert list(gates.lines) == names
        assert list(spans.lines) == names
        assert list(ways.series) == names
        line = gates.lines["blocks.0.attn"]
        assert line.x == [1, 3]
        before, after = torch.tensor([4.0, -1.0]).sigmoid().tolist()
        assert line.y == pytest.approx([before, after])
        assert line.low == pytest.approx(line.y) == line.high
        lengths = [len(path) for path in ways.series["blocks.0.attn"]]
        assert lengths == [1] + [2] * (layer.num_heads - 1)

        done("compare gated plain --out page.html")
        page = (folder / "page.html").read_text()
        assert "Gates along training: gated" in page

    def test_compare_follows_attention_along_training(self, folder, capsys):
        """ConViT Fig. 5: of every model that was kept, on the run's own test images; --json has every head."""
        shape = dict(
            img_size=16,
            patch_size=4,
            embed_dim=12,
            depth=2,
            num_heads=4,
            num_classes=10,
            pretrained=False,
        )
        write_run(folder / "convit")
        recipe = {"name": "convit", "data": {"source": "digits", "root": None}}
        (folder / "convit/recipe.json").write_text(json.dumps(recipe))
        for epoch, alpha in ((1, 2.0), (4, 0.1)):
            model = timm.create_model(
                "convit_ti", local_up_to_layer=1, locality_strength=alpha, **shape
            )
            record_data(model, CONFIG | {"input_size": (3, 16, 16), "source": "digits"})
            iso.save(model, folder / f"convit/epoch-{epoch}.safetensors")
        write_run(folder / "cnn")
        iso.save(cnn(), folder / "cnn/epoch-1.safetensors")
        done(
            "compare convit cnn --along nonlocality entropy --max-images 40 --out page.html --json"
        )
        found = json.loads(capsys.readouterr().out)["along"]
        assert set(found) == {"nonlocality", "entropy"}
        for courses in found.values():
            assert list(courses) == ["convit"]
        course = found["nonlocality"]["convit"]
        assert course["epochs"] == [1, 4]

        source = sample_images(open_source("digits", "test"), 40)
        model = iso.load(folder / "convit/epoch-4.safetensors")
        loader = eval_loader(source, evaluation_config(model), 40)
        expected = iso.nonlocality(model, loader)
        for layer, rows in course["layers"].items():
            assert rows[1] == pytest.approx(expected[layer].tolist(), rel=1e-4)
        page = (folder / "page.html").read_text()
        assert "Nonlocality along training: convit" in page
        # the CNN, whose recipe has no data
        assert "no nonlocality and no entropy along training" in page

    def test_compare_draws_accuracy_against_cost(self, folder, capsys):
        """CoAtNet Fig. 2 and 3: the models of runs, and those that have been evaluated, by MACs and parameters."""
        for name in ("a", "gone"):
            write_run(folder / name)
        iso.save(cnn(), folder / "a/model.safetensors")
        row = {
            "model": "coatnet_0",
            "data": "cifar10",
            "top1": 81.6,
            "macs": 4.2e9,
            "parameters": 25e6,
        }
        Path("x.json").write_text(json.dumps(row))
        Path("y.json").write_text(json.dumps(row | {"top1": 80.0, "weights": "random"}))
        done("compare a gone --evaluated x.json y.json --out page.html --json")
        printed = json.loads(capsys.readouterr().out)
        points = {point["name"]: point for point in printed["points"]}
        assert list(points) == ["a", "coatnet_0", "coatnet_0 (random weights)"]
        point = points["a"]
        assert point["parameters"] == 269_722
        assert point["macs"] == count_macs(cnn(), (3, 32, 32))
        assert point["top1"] == 30.0
        page = (folder / "page.html").read_text()
        assert "Accuracy and cost" in page
        assert "its cost was not counted" in page

    def test_analyze_tells_how_features_evolve(self, folder, capsys):
        """F_k of both models on ten draws of 32 test images, the same for both; a table, and JSON."""
        net = timm.create_model(
            "vit_tiny_patch16_224", depth=3, embed_dim=12, num_heads=2, img_size=32, num_classes=10
        )
        record_data(net, CONFIG | {"input_size": (3, 32, 32), "source": "digits"})
        iso.save(net, "vit.safetensors")
        done(
            "analyze vit.safetensors --against vit.safetensors --image a.png --data digits --evolution --json"
        )
        first, second = json.loads(capsys.readouterr().out)["evolution"].values()
        assert first == second
        assert list(first) == ["blocks.0", "blocks.1", "blocks.2"]
        source = open_source("digits", "test")
        model = iso.load("vit.safetensors")
        draws = random_draw_indices(len(source))
        for draw in draws.view(10, 32).tolist():
            assert len(set(draw)) == 32
        drawn = source.subset(draws.tolist())
        loader = eval_loader(drawn, evaluation_config(model), 32)
        expected = iso.analysis.feature_evolution(model, loader)
        assert first["blocks.1"] == pytest.approx(expected["blocks.1"])
        refused("31 images are too few", random_draw_indices, 31)
