"""What the report's pages are made of: rounded maps, logs, results, figures, and the commands that write them."""

import base64
import json
import math
import re
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from matplotlib.colors import to_hex
from PIL import Image

import isomorph as iso
from isomorph.analysis import GatingHistory
from isomorph.analysis.cka import hsic
from isomorph.analysis.evolution import random_draw_indices
from isomorph.analysis.token_grid import TokenGrid
from isomorph.checkpoints.model import record_data
from isomorph.cli import main
from isomorph.cli.analyze import ImageOptions, gating_histories, open_test_loaders
from isomorph.data.formats.registry import open_source
from isomorph.data.loaders import eval_loader, eval_transform
from isomorph.data.sources import Source
from isomorph.evaluation.cost import count_macs
from isomorph.evaluation.input_sizes import evaluation_config
from isomorph.evaluation.model_data import sample_images
from isomorph.evaluation.robustness.cells import _IDENTITY_KEYS, CellFile, read_results, weights_hash
from isomorph.evaluation.robustness.scores import robustness_summary
from isomorph.report import (
    AnalyzeOptions,
    Bars,
    Dots,
    Line,
    Matrix,
    PageImage,
    PageModel,
    Panel,
    Section,
    analyze_sections,
    compare_sections,
    open_images,
    read_run_logs,
    save_figures,
    write_page,
)
from isomorph.report.analyze_page import pairwise_cka
from isomorph.report.attention_viewer import (
    LayerMaps,
    ViewerModel,
    build_viewer,
    capture_layer_maps,
    drop_padded_keys,
    pack_layer_maps,
    round_rows,
)
from isomorph.report.charts import Paths
from isomorph.report.compare_page import MAX_CURVE_POINTS, centre_paths, curve, flatten_recipe, head_range_line
from isomorph.report.figures import PALETTE, QueryMaps, centre_query_maps, draw_chart, maps_figure, pyplot
from isomorph.report.html import render_page
from isomorph.report.page_models import class_logits, format_percent, framing_text, name_classes, unique_names
from isomorph.report.robustness_page import robustness_charts, robustness_table
from refusals import refused


def small_vit(**changes):
    arguments = dict(img_size=(32, 48), patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=5) | changes
    return timm.create_model("vit_tiny_patch16_224", **arguments).eval()


def small_cr_swin():
    arguments = dict(img_size=64, window_size=4, embed_dim=8, depths=(1, 1), num_heads=(1, 2), num_classes=2)
    return timm.create_model("swinv2_cr_tiny_224", **arguments).eval()


class InWindows(torch.nn.Module):
    """Attention in four windows of successive tokens, of which nothing says where they lie."""

    def __init__(self, attn):
        super().__init__()
        self.attn = attn

    def forward(self, x, **_):
        B, N, C = x.shape
        return self.attn(x.reshape(B * 4, N // 4, C)).reshape(B, N, C)


def windowed_vit():
    model = small_vit(class_token=False, global_pool="avg", depth=2)
    for block in model.blocks:
        block.attn = InWindows(block.attn)
    return model


def unpacked(text, heads, queries, keys):
    """The obvious way back from the packed text, row by row."""
    data = zlib.decompress(base64.b64decode(text))
    split = heads * queries * 2 * 4
    ranges = np.frombuffer(data[:split], "<f4").reshape(heads, queries, 2)
    levels = np.frombuffer(data[split:], np.uint8).reshape(heads, queries, keys)
    low, high = ranges[..., :1], ranges[..., 1:]
    return low + levels * (high - low) / 255


class TestMaps:
    def test_the_page_holds_the_maps_to_half_a_level(self):
        model, x = small_vit(), torch.randn(2, 3, 32, 48)
        found, problems = capture_layer_maps(model, x)
        assert problems == {}
        for name, maps in iso.attention_maps(model, x).items():
            for image in range(2):
                back = unpacked(found[name].pack(image), 3, 25, 25)
                assert abs(back - maps[image].numpy()).max() <= found[name].rounding * 1.001
            assert found[name].rounding <= maps.max().item() / 510 * 1.001
            assert found[name].where.queries == (4, 6)

    def test_negative_attention_keeps_its_sign(self):
        maps = torch.tensor([[-1.0, 0.0, 3.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.5]])
        levels, ranges = round_rows(maps)
        assert ranges.tolist() == [[-1.0, 3.0], [0.0, 0.0], [0.0, 0.5]]
        back = ranges[:, :1] + levels * (ranges[:, 1:] - ranges[:, :1]) / 255
        assert torch.allclose(back, maps, atol=4 / 510)

    def test_padding_is_cut_off_the_keys(self):
        where = TokenGrid((2, 3), (4, 5), padding=(1, 1), prefix=1)
        keys = torch.arange(1 + 4 * 5.0).expand(1, 1, 7, -1)
        assert drop_padded_keys(keys, where)[0, 0, 0].tolist() == [0, 7, 8, 9, 12, 13, 14]

    @pytest.mark.parametrize("step", [(1, 1), (2, 1), (2, 2), (3, 2), (9, 9)])
    def test_thinning_keeps_the_middle_of_blocks(self, step):
        maps = LayerMaps("a", TokenGrid((5, 6), (5, 6), prefix=1), np.zeros((1, 1, 31, 31)), np.zeros((1, 1, 31, 2)))
        rows = sorted({min(step[0] // 2, 4) + i * step[0] for i in range(5)} & set(range(5)))
        columns = sorted({min(step[1] // 2, 5) + i * step[1] for i in range(6)} & set(range(6)))
        assert maps.stored_queries(step) == [0, *(1 + r * 6 + c for r in rows for c in columns)]

    def test_a_budget_thins_queries_and_says_so(self):
        found, _ = capture_layer_maps(small_vit(), torch.randn(1, 3, 32, 48))
        layers, pictures = list(found.values()), [PageImage("a", torch.rand(3, 32, 48))]
        step, packed = pack_layer_maps(layers, 1, max_characters=4000)
        assert step[0] > 1
        assert sum(map(len, packed.values())) <= 4000
        assert "only" not in build_viewer([ViewerModel("m", found)], pictures).note
        assert "To keep the page small" in build_viewer([ViewerModel("m", found)], pictures, 4000).note

    def test_two_small_vits_stay_under_8_megabytes_at_worst(self, tmp_path):
        """Maps of noise compress least: 12 layers of 6 heads on 14 x 14 patches and a class token, twice."""
        draw = np.random.default_rng(0)
        levels = draw.integers(0, 256, (1, 6, 197, 197), dtype=np.uint8)
        ranges = draw.random((1, 6, 197, 2), dtype=np.float32)
        where = TokenGrid((14, 14), (14, 14), prefix=1)
        maps = {f"blocks.{i}.attn": LayerMaps(f"blocks.{i}.attn", where, levels, ranges) for i in range(12)}
        viewer = build_viewer(
            [ViewerModel("a", maps), ViewerModel("b", maps)], [PageImage("x", torch.rand(3, 224, 224))]
        )
        assert write_page(tmp_path / "page.html", "t", "l", [Section("s", viewer=viewer)]) < 8_000_000

    def test_maps_from_a_point_are_rows_of_the_map(self):
        model, x = small_vit(), torch.randn(1, 3, 32, 48)
        found, _ = capture_layer_maps(model, x, "blocks.1.*")
        assert list(found) == ["blocks.1.attn"]
        row = iso.attention_maps(model, x)["blocks.1.attn"][0, :, 1 + 2 * 6 + 4, 1:].unflatten(-1, (4, 6))
        seen = found["blocks.1.attn"].maps_from(0, 2.5 / 4, 4.5 / 6)
        assert abs(seen - row.numpy()).max() <= found["blocks.1.attn"].rounding * 1.001

    def test_unknown_windows_are_said_not_drawn(self):
        found, problems = capture_layer_maps(windowed_vit(), torch.randn(1, 3, 32, 48), "blocks.1.*")
        assert not found
        assert problems == {"blocks.1.attn.attn": "it attends in 4 windows per image of unknown position"}


MODELS = {
    "vit": lambda: small_vit(),
    "registers": lambda: small_vit(reg_tokens=2),
    "no class token": lambda: small_vit(class_token=False, global_pool="avg"),
    "gated": lambda: iso.recast(small_vit(), iso.AttentionToGPSA(init="paper"), "blocks.[01].attn"),
    "refined": lambda: iso.recast(small_vit(), iso.AttentionToRefined(init="paper"), "blocks.*.attn"),
    "unreduced": lambda: iso.recast(small_vit(), iso.AttentionToRefined(init="paper", reduce=False), "blocks.*.attn"),
    "t-cnn": lambda: iso.recast(timm.create_model("cifar_resnet20"), iso.ConvToGPSA("paper"), "layer3.0.conv?"),
    "cnn": lambda: timm.create_model("cifar_resnet20"),
    "convit": lambda: timm.create_model(
        "convit_ti", img_size=(32, 48), patch_size=8, depth=3, local_up_to_layer=2, embed_dim=32, num_heads=4
    ),
    "coatnet": lambda: timm.create_model(
        "coatnet_0", layout="C-T-T-T", depths=(2, 1, 1, 1, 1), widths=(8, 8, 16, 16, 16), head_dim=8, img_size=(32, 48)
    ),
}


CONFIG = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0, "crop_mode": "center", "interpolation": "bicubic"}


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_has_its_page(name, tmp_path):
    model = MODELS[name]().eval()
    pictures = [PageImage("a", torch.rand(3, 32, 48)), PageImage("b", torch.rand(3, 32, 48))]
    sections = analyze_sections([PageModel(name, model, CONFIG | {"input_size": (3, 32, 48)})], pictures)
    titles = [section.title for section in sections]
    assert ("no attention to draw" in sections[0].text) == (name == "cnn")
    assert sections[0].finding.startswith(f"{name} predicts ")
    assert ("Gates and spans" in titles) == (name in ("gated", "t-cnn", "convit"))
    once = ["Cost per pass"] if name == "refined" else []  # its kernels are composed once a pass, whatever the batch
    assert titles[titles.index("Cost") :] == ["Cost", *once, f"Model history: {name}"]
    if name != "cnn":
        maps = iso.attention_maps(model, torch.randn(1, 3, 32, 48))
        assert [layer["name"] for layer in sections[0].viewer.data["layers"]] == list(maps)
        assert {c.title.split(":")[0] for s in sections for c in s.charts} >= {"Nonlocality", "Attention entropy"}
    assert write_page(tmp_path / "page.html", name, "", sections) > 10_000


@pytest.mark.parametrize("layers", [None, "blocks.1.*"])
def test_layers_that_are_not_drawn_have_their_numbers(layers):
    model, picture = windowed_vit(), PageImage("a", torch.rand(3, 32, 48))
    subject = PageModel("vit", model, CONFIG | {"input_size": (3, 32, 48)})
    sections = analyze_sections([subject], [picture], layers)
    assert sections[0].viewer is None
    assert sections[0].text.endswith("None of its attention layers can be drawn.")
    summary, lines = sections[0].details
    assert summary == ("1 attention layer is not drawn" if layers else "2 attention layers are not drawn")
    assert lines[-1].endswith("blocks.1.attn.attn: it attends in 4 windows per image of unknown position.")
    assert [card.name for card in sections[0].images] == ["a"]
    batch = (picture.pixels[None] - 0.5) / 0.5
    where = layers or "*"
    logits = {name: found.max_logit for name, found in iso.analysis.logit_stats(model, batch, where).items()}
    expected = [iso.analysis.attention_entropy(model, batch, where), logits]  # distances need positions
    charts = next(section.charts for section in sections if section.title == "Attention distance and entropy")
    assert len(charts) == 2
    for chart, found in zip(charts, expected, strict=True):
        names = [f"blocks.{i}.attn.attn" for i in ((1,) if layers else (0, 1))]
        assert list(found) == chart.layers == names
        for name in names:
            assert chart.series["vit"][name] == pytest.approx(found[name].flatten().tolist(), rel=1e-4)


def predicted(model, x):
    return name_classes(model, class_logits(model, x))


class TestWords:
    @pytest.mark.parametrize("mode", ["center", "squash", "border"])
    def test_how_a_picture_is_framed(self, mode):
        """The sizes that are said are those that timm's transform takes."""
        config = CONFIG | {"input_size": (3, 64, 64), "crop_mode": mode, "crop_pct": 0.8}
        said = framing_text(config)
        start = {"center": "resized to cover", "squash": "stretched to", "border": "resized to fit"}[mode]
        assert f"{start} 80 x 80 px" in said
        assert "then cropped to its central 64 x 64 px" in said
        resize, crop = eval_transform(config).transforms[:2]
        assert set(np.atleast_1d(resize.size)) == {80}
        assert tuple(crop.size) == (64, 64)

    def test_nothing_is_cut_where_all_is_shown(self):
        said = framing_text(CONFIG | {"input_size": (3, 64, 64), "crop_mode": "squash", "crop_pct": 1.0})
        assert said == "Each image is stretched to 64 x 64 px (bicubic)."

    def test_classes_have_names(self):
        class Fixed(torch.nn.Module):
            def __init__(self, logits, **config):
                super().__init__()
                self.logits, self.pretrained_cfg = logits, config

            def forward(self, x):
                return self.logits.expand(len(x), -1)

        logits = torch.tensor([0.9, 0.0987, 0.001, 0.0003]).log()[None]
        named = Fixed(logits, label_names=("cat", "dog", "cow", "ape"))
        x = torch.randn(2, 3, 4, 4)
        assert predicted(named, x) == ["cat (90%), dog (10%), cow (0.1%)"] * 2
        assert format_percent(0.00049) == "<0.1%"
        assert predicted(Fixed(logits, label_names=("cat", "dog")), x)[0].startswith("class 0 (90%)")
        wnids = Fixed(logits, label_names=("n01440764", "n01443537", "mine", "4"))
        assert predicted(wnids, x)[0] == "tench (90%), goldfish (10%), mine (0.1%)"
        thousand = torch.zeros(1, 1000)
        thousand[0, 1] = 20
        assert predicted(Fixed(thousand), x)[0].startswith("goldfish (100%)")
        assert class_logits(Fixed(torch.zeros(1, 1)), x) is None

    def test_a_run_keeps_the_names_of_its_classes(self, tmp_path):
        model = timm.create_model("cifar_resnet20")
        assert model.pretrained_cfg["label_names"][3] == "cat"
        record_data(model, {"label_names": [f"kind {i}" for i in range(10)]})
        iso.save(model, tmp_path / "a.safetensors")
        found = predicted(iso.load(tmp_path / "a.safetensors"), torch.randn(1, 3, 32, 32))
        assert found[0].startswith("kind ")
        record_data(model, {"source": "digits"})  # a checkpoint without names
        assert predicted(model, torch.randn(1, 3, 32, 32))[0].startswith("class ")


class TestPage:
    def test_what_is_given_cannot_become_code(self):
        nasty = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
        panel = Panel(nasty, nasty, nasty, {nasty: Line([1.0], [2.0])})
        section = Section(nasty, nasty, [[nasty], [nasty]], listing=nasty, charts=[panel])
        page = render_page(nasty, nasty, [section, section, section], nasty)
        assert "<img" not in page
        assert page.count("<script") == page.count("</script>") == 2
        assert "alert(1)" in page

    def test_it_loads_nothing(self):
        page = render_page("t", "l", [Section("s", charts=[Bars("b", "u", {"a": {"x": 1.0}})])])
        assert "default-src 'none'" in page
        assert not re.search(r"(src|href)=\"?(https?:)?//", page)
        assert set(re.findall(r"https?://[^\"' ]+", page)) <= {"http://www.w3.org/2000/svg"}

    def test_numbers_that_are_none_become_nothing(self):
        chart = Panel("t", "x", "y", {"a": Line([0.0, 1.0], [math.nan, 2.0])})
        assert chart.drawing()["series"][0]["lines"] == [[[0.0, None], [1.0, 2.0]]]
        assert chart.table() == [["x", "a"], ["0", "-"], ["1", "2"]]
        assert Dots("t", "y", {"a": {"l": [1.0, 2.0]}, "b": {"m": [3.0]}}).table()[1:] == [
            ["l", "1, 2", "-"],
            ["m", "-", "3"],
        ]

    def test_a_range_of_rounding_is_widened_in_proportion(self):
        for values, expected in (([8.7, 8.7000001], [7.83, 9.57]), ([0, 0], [-0.5, 0.5]), ([1, 3], [1, 3])):
            drawing = Panel("t", "x", "y", {"a": Line([0, 1], values)}).drawing()
            assert drawing["y"]["range"] == pytest.approx(expected, rel=1e-6)
        assert Panel("t", "x", "y", {"a": Line([0], [math.nan])}).drawing()["y"]["range"] == [0, 1]


class TestLayerSimilarity:
    def test_matrices_are_the_unbiased_cka_of_means_over_places(self):
        a, b, x = small_vit(), small_vit(embed_dim=12, depth=2), torch.randn(19, 3, 32, 48)
        loaders = {name: [(part, None) for part in (x * scale).split(8)] for name, scale in (("a", 1), ("b", 3))}
        found = pairwise_cka({"a": a, "b": b}, loaders)
        assert list(found) == [("a", "b"), ("a", "a"), ("b", "b")]

        def gram(model, images):
            tokens = model.forward_intermediates(images, norm=False, return_prefix_tokens=True, output_fmt="NLC")[1]
            means = [torch.cat([prefix, places], 1).mean(1).double() for places, prefix in tokens]
            return torch.stack([(m @ m.T).fill_diagonal_(0) for m in means])

        with torch.no_grad():
            grams = [(gram(a, part), gram(b, 3 * part)) for part in x[:16].split(8)]  # the last 3 are too few
        cross, own_a, own_b = (sum(hsic(pair[i], pair[j]) for pair in grams) for i, j in ((0, 1), (0, 0), (1, 1)))
        expected = cross / (own_a.diagonal()[:, None] * own_b.diagonal()).sqrt()
        torch.testing.assert_close(found["a", "b"].matrix, expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found["b", "b"].matrix.diagonal(), torch.ones(2).double())

    def test_features_with_channels_last_are_means_over_places_too(self):
        model, x = small_cr_swin(), torch.randn(6, 3, 64, 64)
        found = pairwise_cka({"a": model}, {"a": [(x, None)]})["a", "a"].matrix
        with torch.no_grad():
            first, last = (f.mean((2, 3)) for f in model.forward_intermediates(x, norm=False, output_fmt="NCHW")[1])
        both = [torch.stack([(f.double() @ f.double().T).fill_diagonal_(0)]) for f in (first, last)]
        cross, one, other = (hsic(both[i], both[j]).item() for i, j in ((0, 1), (0, 0), (1, 1)))
        assert found[0, 1].item() == pytest.approx(cross / math.sqrt(one * other), abs=1e-3)

    def test_a_model_is_like_itself(self):
        model = timm.create_model("cifar_resnet20").eval()
        config = CONFIG | {"input_size": (3, 32, 32)}
        loader = [(torch.randn(16, 3, 32, 32), None)]
        subjects = [PageModel(name, model, config) for name in ("a", "b")]
        sections = analyze_sections(
            subjects, [PageImage("x", torch.rand(3, 32, 32))], options=AnalyzeOptions({"a": loader, "b": loader})
        )
        between = next(section for section in sections if section.title == "Layer similarity (CKA)").charts[0]
        assert isinstance(between, Matrix)
        assert torch.tensor(between.values).diagonal().allclose(torch.ones(len(between.rows)), atol=1e-5)


def write_cells(path, gain=0.0, corruptions=("fog", "snow", "saturate"), model="net", **sight):
    """A file as `isomorph robustness --out` writes it, by what writes it."""
    journal = CellFile(path, {"model": model, "weights": model, **dict.fromkeys(_IDENTITY_KEYS, 0), **sight})
    cells = {("clean", 0): 90.0} | {(name, s): 50.0 - s - len(name) for name in corruptions for s in (1, 2)}
    for (name, severity), top1 in cells.items():
        journal.append({"corruption": name, "severity": severity, "top1": top1 + gain, "images": 10})
    journal.close()
    return path


class TestRobustness:
    def test_a_page_says_what_the_suite_says(self, tmp_path):
        rng = np.random.default_rng(0)
        source = Source(
            [Image.fromarray(x) for x in rng.integers(0, 256, (10, 32, 32, 3), np.uint8)], range(10), "0123456789"
        )
        model = timm.create_model("cifar_resnet20", pretrained=False)
        asked = dict(corruptions=["snow", "fog", "saturate"], severities=(1, 5), out=tmp_path / "a.jsonl", name="net")
        found = iso.robustness(model, source, **asked)
        (tmp_path / "a.json").write_text(json.dumps(found))
        for name in ("a.jsonl", "a.json"):
            results, measured, problems = read_results([tmp_path / name], {"net": weights_hash(model)})
            assert "10 images, seed 0" in measured
            assert not problems
            ours, levels, cells, extra, extra_levels, extra_cells = robustness_charts(results)
            suite = {name: top1 for name, top1 in found["by_corruption"].items() if name != "saturate"}
            assert ours.series == {"net": pytest.approx(suite)}
            assert list(levels.series["net"].values()) == pytest.approx(list(found["by_severity"].values()))
            assert (cells.rows, extra_cells.rows) == (["snow", "fog"], ["saturate"])
            assert extra.series == {"net": {"saturate": pytest.approx(found["by_category"]["extra"])}}
            assert len(extra_levels.series["net"]) == 2
            means = [f"{value:.2f}" for value in (found["mean_top1"], found["by_category"]["extra"])]
            clean = f"{found['clean']['top1']:.2f}"
            assert robustness_table(results)[1] == ["net", clean, "4", means[0], "2", means[1]]

    def test_uneven_cells_are_averaged_as_the_suite_does(self):
        tops = {("fog", 1): 40.0, ("fog", 2): 20.0, ("snow", 1): 60.0, ("saturate", 1): 99.0, ("clean", 0): 95.0}
        told = robustness_summary({key: {"top1": top1} for key, top1 in tops.items() if key[1]}, None, imagenet=False)
        assert told["mean_top1"] == 45
        assert robustness_table({"net": tops})[1] == ["net", "95.00", "3", "45.00", "1", "99.00"]
        only = robustness_charts({"net": {("saturate", 1): 99.0}})
        assert [chart.title.split(":")[0] for chart in only] == ["Extra corruptions"] * 3

    def test_a_line_cut_short_is_said(self, tmp_path):
        path = write_cells(tmp_path / "a.jsonl")
        whole = read_results([path], {"net": "net"})
        with path.open("a") as file:
            file.write('{"corruption": "frost", "sev')
        results, _, problems = read_results([path], {"net": "net"})
        assert results == whole.cells
        assert not whole.problems
        assert problems == ["a.jsonl: its last line is incomplete and was ignored."]

    def test_two_models_side_by_side(self, tmp_path):
        paths = [write_cells(tmp_path / "a.jsonl"), write_cells(tmp_path / "b.jsonl", 3, model="other")]
        results, _, problems = read_results(paths[::-1], {"cnn": "net", "t-cnn": "other"})  # by their weights
        _, _, change, _, _, extra = robustness_charts(results)
        assert list(results) == ["cnn", "t-cnn"]
        assert not problems
        assert (change.rows, change.values) == (["snow", "fog"], [[3, 3], [3, 3]])
        assert (change.low, change.high) == (-3, 3)
        assert change.title == "Points gained (red) or lost (blue): t-cnn minus cnn"
        assert (extra.rows, extra.values) == (["saturate"], [[3, 3]])
        assert [row[1] for row in robustness_table(results)[1:]] == ["90.00", "93.00"]

    def test_wrong_results_are_named(self, tmp_path):
        for text in (None, "", "nonsense\n", '{"corruption": "x"}\n', "[]", "{}"):
            if text is not None:
                (tmp_path / "c.jsonl").write_text(text)
            refused("result file of isomorph robustness", read_results, [tmp_path / "c.jsonl"], {"net": "net"})
        paths = [write_cells(tmp_path / "a.jsonl"), write_cells(tmp_path / "b.jsonl", seed=1)]
        empty = [write_cells(tmp_path / "e.jsonl", corruptions=())]
        for given, models, said in (
            (paths, {"cnn": "net", "t-cnn": "net"}, r"b\.jsonl was measured with seed 1, net with 0"),
            (empty, {"net": "net"}, "no finished cell"),
            (paths[:1], {"cnn": "cnn"}, r"a\.jsonl holds the results of net, with other weights than cnn; give"),
        ):
            refused(said, read_results, given, models)


def write_run(folder, lr=0.1, epochs=3, end=""):
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(
        json.dumps({"name": "r", "model": {"name": "net"}, "epochs": 4, "optim": {"lr": lr}})
    )
    rows = [{"epoch": e, "loss": 1 / e, "top1": 10.0 * e, "lr": lr, "seconds": 2.0} for e in range(1, epochs + 1)]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    steps = [{"epoch": 1, "step": s, "loss": 1 / s, "lr": lr} for s in range(1, 30)]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    return folder


class TestRuns:
    def test_runs_side_by_side(self, tmp_path):
        logs = read_run_logs(
            [write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=0.2, epochs=2, end='{"epoch": 3, "lo')]
        )
        last, curves, recipes = compare_sections(logs)
        assert last.details.lines == ["b: 1 of 3 lines of log.jsonl cannot be read."]
        assert [row[:6] for row in last.table[1:]] == [
            ["a", "r", "net", "3 of 4", "30.00", "30.00"],
            ["b", "r", "net", "2 of 4", "20.00", "20.00"],
        ]
        top1 = next(chart for chart in curves.charts if chart.title == "Top-1")
        assert list(top1.lines["b"].y) == [10, 20]
        assert recipes.table == [["field", "a", "b"], ["optim.lr", "0.1", "0.2"]]

    def test_what_is_missing_is_said_in_a_line(self, tmp_path):
        run = write_run(tmp_path / "a")
        (run / "log.jsonl").unlink()
        (run / "recipe.json").write_text("{")
        assert compare_sections(read_run_logs([run]))[0].details.lines == [
            "a: no log.jsonl.",
            "a: recipe.json cannot be read.",
        ]

    def test_a_curve_needs_two_points(self, tmp_path):
        logs = read_run_logs([write_run(tmp_path / "a", epochs=1)])
        assert "Top-1" not in [chart.title for section in compare_sections(logs) for chart in section.charts]

    def test_runs_of_one_name_go_by_their_paths(self, tmp_path):
        runs = [write_run(tmp_path / "x/run"), write_run(tmp_path / "y/run")]
        assert [log.name for log in read_run_logs(runs)] == list(map(str, runs))
        refused("given twice", lambda: read_run_logs([runs[0], runs[0]]))

    def test_long_curves_are_thinned_to_means(self):
        rows = [{"step": i, "loss": float(i % 2)} for i in range(10 * MAX_CURVE_POINTS)]
        line = curve([*rows, {"step": 3, "loss": math.nan}, {"step": None, "loss": 1}], "step", "loss")
        assert len(line.x) == MAX_CURVE_POINTS
        assert set(line.y) == {0.5}

    def test_recipes_are_flattened(self):
        assert flatten_recipe({"a": {"b": [1, 2], "c": {}}, "d": None}) == {"a.b": "[1, 2]", "a.c": "{}", "d": "null"}


def test_figures_are_pdf_and_svg_in_the_colours_of_the_page(tmp_path):
    """On the page the gates of the second model have the second colour."""
    found, _ = capture_layer_maps(small_vit(), torch.randn(1, 3, 32, 48))
    charts = [
        Panel("Loss: by step", "step", "loss", {"a": Line([0, 1], [1, 2], [0, 1], [2, 3]), "b": Line([0], [1])}),
        Dots("Gates", "sigma", {"net": {"x": [0.1, 0.2], "y": [0.3]}}, 1.0),
        Bars("Robust", "%", {"a": {"fog": 1.0}, "b": {"fog": 2.0, "snow": 3.0}}),
        Matrix("CKA", "a", "b", ["r"], ["c", "d"], [[0.5, math.nan]]),
    ]
    models = [ViewerModel("cnn", {}), ViewerModel("net", found)]
    viewer = build_viewer(models, [PageImage("x.png", torch.rand(3, 32, 48))])
    paths = save_figures(tmp_path, [Section("s", charts=charts, viewer=viewer)])
    names = ["loss-by-step", "gates", "robust", "cka", "attention-net-x-png"]
    assert [path.name for path in paths] == [f"{name}.{kind}" for name in names for kind in ("pdf", "svg")]
    for path in paths:
        assert path.read_bytes().startswith(b"%PDF" if path.suffix == ".pdf" else b"<?xml")
    gates = (tmp_path / "gates.svg").read_text()
    assert PALETTE[1] in gates
    assert PALETTE[0] not in gates
    twins = [Panel(f"Gates: {name}", "epoch", "gate", {"a": Line([0], [1])}) for name in ("a_1", "a-1", "a 1")]
    paths = save_figures(tmp_path / "twins", [Section("s", charts=twins)])
    assert [path.stem for path in paths[::2]] == ["gates-a-1", "gates-a-1-2", "gates-a-1-3"]


class TestPictures:
    def test_size_and_channels_are_the_models(self, tmp_path):
        Image.new("RGB", (60, 40), (255, 0, 0)).save(tmp_path / "a.png")
        model = timm.create_model("cifar_resnet20", in_chans=1)
        config = evaluation_config(model, (24, 32))
        (picture,) = open_images([tmp_path / "a.png"], config)
        assert config["input_size"] == (1, 24, 32)
        assert picture.pixels.shape == (1, 24, 32)
        assert picture.data_uri().startswith("data:image/png;base64,")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)).save("a.png")
    Path("b.png").write_bytes(b"no image")
    cnn = timm.create_model("cifar_resnet20").eval()
    iso.save(cnn, "cnn.safetensors")
    tcnn = iso.recast(cnn, iso.ConvToGPSA("paper"), "layer3.2.conv?")
    iso.save(tcnn, "tcnn.safetensors")
    Path("recipe.json").write_text('{"name": "mine", "epochs": 7}')
    write_cells(Path("r.jsonl"), weights=weights_hash(cnn))
    write_cells(Path("t.jsonl"), 3, weights=weights_hash(tcnn))
    return tmp_path


def test_models_are_told_apart():
    assert unique_names(["vit_tiny", "runs/a/model.safetensors"]) == ["vit_tiny", "a"]
    assert unique_names(["x/cnn.safetensors", "x/tcnn.safetensors"]) == ["cnn", "tcnn"]
    assert unique_names(["x/cnn.safetensors", "y/cnn.safetensors"]) == ["x/cnn.safetensors", "y/cnn.safetensors"]
    assert unique_names(["vit_tiny", "vit_tiny"]) == ["vit_tiny (1)", "vit_tiny (2)"]


def test_models_are_compared_on_the_same_pictures(monkeypatch):
    pictures = np.random.default_rng(0).integers(0, 255, (40, 30, 50, 3), dtype=np.uint8)
    source = Source([Image.fromarray(p) for p in pictures], list(range(40)), map(str, range(40)))
    monkeypatch.setattr("isomorph.evaluation.model_data.open_source", lambda *_: source)
    alike = {"input_size": (3, 24, 32), "crop_mode": "center"}
    a = alike | dict(mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.875, interpolation="bicubic")
    b = alike | dict(mean=(0.1, 0.2, 0.3), std=(0.4,) * 3, crop_pct=1.0, interpolation="bilinear")
    subjects = [PageModel("a", small_vit(), a), PageModel("b", small_vit(), b)]
    loaders = open_test_loaders(subjects, ImageOptions(data="given", max_images=36))[0]
    seen = {name: [torch.cat(part) for part in zip(*loader, strict=True)] for name, loader in loaders.items()}
    plain = {
        s.name: seen[s.name][0] * s.config["std"][0] + torch.tensor(s.config["mean"]).view(3, 1, 1) for s in subjects
    }
    assert plain["a"].shape == (36, 3, 24, 32)
    torch.testing.assert_close(plain["b"], plain["a"], atol=1e-5, rtol=0)
    assert seen["a"][1].tolist() == seen["b"][1].tolist() != sorted(seen["a"][1].tolist())
    again = torch.cat(
        [labels for _, labels in open_test_loaders(subjects, ImageOptions(data="given", max_images=36))[0]["a"]]
    )
    assert again.tolist() == seen["a"][1].tolist()


def done(command):
    """Runs a command that must succeed, and may replace the page of another one."""
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--overwrite"])
    assert stop.value.code == 0


WRONG_COMMANDS = {
    "analyze cnn.safetensors --image b.png": "cannot read b.png",
    "analyze cnn.safetensors --image c.png": "there is no file c.png",
    "analyze none.safetensors --image a.png": "no checkpoint none.safetensors",
    "analyze cnn.safetensors --image a.png --robustness x.jsonl": "cannot read results x.jsonl",
    "analyze cnn.safetensors --image a.png --robustness t.jsonl": "with other weights than cnn; give",
    "analyze tcnn.safetensors --image a.png --layers nothing.*": "matches no attention layer",
    "analyze cnn.safetensors --image a.png --data nothing": "data source 'nothing' is unknown",
    "analyze cnn.safetensors --image a.png --max-images 3": "--max-images must be at least 4",
    "analyze cnn.safetensors --image a.png --size 0 4": "--size 0 must be at least 1",
    "analyze cnn.safetensors --image a.png --out a.png/x.html": "cannot write",
    "analyze cnn.safetensors --image a.png --evolution": "give --data or --root too",
    "analyze grey.safetensors --image a.png --against cnn.safetensors": "the models differ in image channels (",
    "analyze cnn.safetensors --image a.png --against grey.safetensors": "the models differ in image channels (",
    "compare": "nothing to compare; give folders of runs, or --evaluated",
    "compare c --along looks": "looks",
    "compare c --max-images 0 --along entropy": "--max-images 0 must be at least 1",
    "compare c --data digits": "--data and --root choose the images of --along",
    "compare c --along entropy": "recipe.json does not name its data source; give --data",
    "compare c --along entropy --data digits": "c: no entropy along training: the model has no attention layer",
    "compare --evaluated z.json": "z.json does not exist; write it with isomorph evaluate",
    "compare --evaluated t.jsonl": "t.jsonl is not a result of isomorph evaluate --json",
    "compare --evaluated recipe.json": "recipe.json is not a result of isomorph evaluate --json",
    "compare --evaluated e.json": "e.json has no macs and no parameters; evaluate m without --no-cost",
    "compare --evaluated f.json": "m is the only model; give another one",
    "compare nowhere": "nowhere is not the folder of a run",
    "compare hollow": "it has no readable log.jsonl, steps.jsonl or recipe.json",
}


class TestCommands:
    @pytest.mark.slow
    def test_analyze(self, folder, capsys):
        done(
            "analyze tcnn.safetensors --against cnn.safetensors --image a.png --data digits --max-images 8 "
            "--size 32 40 --robustness t.jsonl r.jsonl --out page.html --json"
        )
        said = json.loads(capsys.readouterr().out)
        page = (folder / "page.html").read_text()
        assert said["bytes"] == len(page.encode()) < 1_000_000
        for text in (
            "tcnn and cnn",
            "ConvToGPSA(init=&#39;paper&#39;",
            "&#34;epochs&#34;: 7",
            "Layer similarity (CKA)",
            "fog",
        ):
            assert text in page, text

    def test_compare_draws_gates_along_training(self, folder, capsys):
        for name in ("gated", "plain", "none"):
            write_run(folder / name)
        for epoch, gate in ((1, 4.0), (3, -1.0)):
            iso.save(timm.create_model("t_cifar_resnet20", gate=gate), folder / f"gated/epoch-{epoch}.safetensors")
        iso.save(timm.create_model("cifar_resnet20"), folder / "plain/epoch-1.safetensors")
        (folder / "gated/epoch-2.safetensors").write_bytes(b"cut short")
        folders = [folder / "gated", folder / "plain", folder / "none"]
        logs = read_run_logs(folders)
        found = gating_histories(folders, logs)
        assert list(found) == ["gated"]
        sections = {section.title: section for section in compare_sections(logs, found)}
        assert any("epoch-2.safetensors" in line for line in sections["Final results"].details.lines)
        gates, spans, ways = sections["Gates, spans and centres along training"].charts
        assert list(gates.lines) == list(spans.lines) == list(ways.series) == list(found["gated"].gates)
        centres = iso.load(folder / "gated/epoch-3.safetensors").layer3[0].conv1.centre
        assert [path[1] for path in ways.series["layer3.0.conv1"]] == [pytest.approx(c) for c in centres.tolist()]
        line = gates.lines["layer3.0.conv1"]
        assert line.x == [1, 3]
        assert line.y == pytest.approx([1 / (1 + math.exp(-4)), 1 / (1 + math.exp(1))])
        assert line.low == pytest.approx(line.y) == line.high
        done("compare gated plain none --out page.html")
        assert "Gates along training: gated" in (folder / "page.html").read_text()
        assert "Gates along training: plain" not in (folder / "page.html").read_text()

    def test_compare_follows_attention_along_training(self, folder, capsys):
        """ConViT Fig. 5: of every model that was kept, on the run's own test images; --json has every head."""
        shape = dict(img_size=16, patch_size=4, embed_dim=12, depth=2, num_heads=4, num_classes=10, pretrained=False)
        own = {"source": "digits", "root": None}
        for name, layers in (("convit", 1), ("vit", 0)):
            write_run(folder / name)
            (folder / name / "recipe.json").write_text(json.dumps({"name": name, "data": own}))
            for epoch, alpha in ((1, 2.0), (4, 0.1)):
                model = timm.create_model("convit_ti", local_up_to_layer=layers, locality_strength=alpha, **shape)
                record_data(model, CONFIG | {"input_size": (3, 16, 16), "source": "digits"})
                iso.save(model, folder / name / f"epoch-{epoch}.safetensors")
        iso.save(timm.create_model("cifar_resnet20"), write_run(folder / "cnn") / "epoch-1.safetensors")
        done("compare convit vit cnn --along nonlocality entropy --max-images 40 --out page.html --json")
        found = json.loads(capsys.readouterr().out)["along"]
        assert [(key, list(runs)) for key, runs in found.items()] == [
            ("nonlocality", ["convit", "vit"]),
            ("entropy", ["convit", "vit"]),
        ]
        course = found["nonlocality"]["convit"]
        assert course["epochs"] == [1, 4]
        assert list(course["layers"]) == ["blocks.0.attn", "blocks.1.attn"]
        model = iso.load(folder / "convit/epoch-4.safetensors")
        source = sample_images(open_source("digits", "test"), 40)
        expected = iso.nonlocality(model, eval_loader(source, evaluation_config(model), 40))
        for layer, rows in course["layers"].items():
            assert rows[1] == pytest.approx(expected[layer].tolist(), rel=1e-4)
        page = (folder / "page.html").read_text()
        assert "Nonlocality along training: convit" in page
        assert "Attention entropy along training: vit" in page
        assert "no nonlocality and no entropy along training" in page  # the CNN, whose recipe has no data
        done("compare vit --along nonlocality --data digits --max-images 8 --out page.html")
        said = capsys.readouterr().out
        assert "vit: nonlocality (grid steps)" in said
        assert "epoch 4" in said
        assert re.search(r"blocks\.1\.attn +\d\.\d+ +\d\.\d+", said)

    def test_compare_draws_accuracy_against_cost(self, folder, capsys):
        """CoAtNet Fig. 2 and 3: the models of runs, and those that have been evaluated, by MACs and parameters."""
        for name, model in (("a", "cifar_resnet20"), ("b", "cifar_resnet32"), ("gone", None)):
            write_run(folder / name)
            if model:
                iso.save(timm.create_model(model), folder / name / "model.safetensors")
        row = {"model": "coatnet_0", "data": "cifar10", "top1": 81.6, "macs": 4.2e9, "parameters": 25e6}
        Path("x.json").write_text(json.dumps(row))
        Path("y.json").write_text(json.dumps(row | {"top1": 80.0, "weights": "random"}))
        done("compare a b gone --evaluated x.json y.json --out page.html --json")
        points = {point["name"]: point for point in json.loads(capsys.readouterr().out)["points"]}
        assert list(points) == ["a", "b", "coatnet_0", "coatnet_0 (random weights)"]
        assert points["a"]["parameters"] == 269_722
        assert points["b"]["macs"] == count_macs(timm.create_model("cifar_resnet32"), (3, 32, 32))
        assert points["a"]["top1"] == 30.0
        page = (folder / "page.html").read_text()
        assert "Accuracy and cost" in page
        assert "its cost was not counted" in page
        done("compare a --out page.html")
        assert "Accuracy and cost" not in (folder / "page.html").read_text()
        done("compare --evaluated x.json y.json --out page.html")
        assert "Accuracy and cost" in (folder / "page.html").read_text()

    def test_analyze_tells_how_features_evolve(self, folder, capsys):
        """F_k of both models on ten draws of 32 test images, the same for both; a table, and JSON."""
        net = timm.create_model("vit_tiny_patch16_224", depth=3, embed_dim=12, num_heads=2, img_size=32, num_classes=10)
        record_data(net, CONFIG | {"input_size": (3, 32, 32), "source": "digits"})
        iso.save(net, "vit.safetensors")
        done(
            "analyze vit.safetensors --against vit.safetensors --image a.png --data digits --max-images 8 --evolution "
            "--json"
        )
        found = json.loads(capsys.readouterr().out)["evolution"]
        first, second = found.values()
        assert first == second
        assert list(first) == ["blocks.0", "blocks.1", "blocks.2"]
        assert first["blocks.0"] == pytest.approx(1)
        source, model = open_source("digits", "test"), iso.load("vit.safetensors")
        draws = random_draw_indices(len(source))
        assert draws.shape == (320,)
        assert all(len(set(draw)) == 32 for draw in draws.view(10, 32).tolist())
        loader = eval_loader(source.subset(draws.tolist()), evaluation_config(model), 32)
        assert first["blocks.1"] == pytest.approx(iso.analysis.feature_evolution(model, loader)["blocks.1"])
        done("analyze vit.safetensors --image a.png --data digits --evolution --out page.html")
        assert re.search(r"blocks\.2 +\d", capsys.readouterr().out)
        assert "Feature evolution" in (folder / "page.html").read_text()
        refused("31 images are too few", random_draw_indices, 31)

    def test_layers_are_drawn_from_the_epoch_they_are_there(self):
        nan = math.nan
        assert centre_paths(torch.tensor([[[nan, nan]], [[1.0, 2.0]], [[3.0, 4.0]]])) == [[(1, 2), (3, 4)]]
        line = head_range_line(torch.tensor([0.0, 2.0, 4.0]), torch.tensor([[nan, nan], [1.0, 3.0], [0.0, 1.0]]))
        assert line == ([2, 4], [2, 0.5], [1, 0], [3, 1])

    def test_a_head_that_loses_its_centre_is_said_and_hides_no_other(self, folder):
        """Its span is no number, its way ends where it was last; the page and its figures hold."""
        write_run(folder / "run")
        model = timm.create_model("convit_ti", img_size=32, patch_size=8, depth=2, local_up_to_layer=1, num_classes=2)
        attn, heads = model.blocks[0].attn, model.blocks[0].attn.num_heads
        before = iso.analysis.centres(model)["blocks.0.attn"].tolist()
        for epoch in (1, 2):
            iso.save(model, folder / f"run/epoch-{epoch}.safetensors")
            with torch.no_grad():
                attn.position[0, 2] = 0.001
        assert iso.analysis.attention_spans(model)["blocks.0.attn"].isnan().tolist() == [True] + [False] * (heads - 1)
        logs = read_run_logs([folder / "run"])
        found = gating_histories([folder / "run"], logs)
        section = compare_sections(logs, found)[-1]
        late = GatingHistory(
            found["run"].epochs[1:], *({n: v[1:] for n, v in part.items()} for part in found["run"][1:])
        )
        assert [chart.title for chart in compare_sections(logs, {"run": late})[-1].charts] == [
            "Centres at the end: run"
        ]
        assert section.text.endswith(
            "run: heads without a centre at the end (locality not positive), and so without a span: 1."
        )
        _, spans, ways = section.charts
        assert [len(path) for path in ways.series["blocks.0.attn"]] == [1] + [2] * (heads - 1)
        assert [path[0] for path in ways.series["blocks.0.attn"]] == [pytest.approx(c) for c in before]
        assert min(spans.lines["blocks.0.attn"].low) > 0
        gone = Paths("t", {"l": [[], [(0.0, 1.0)]]})
        assert gone.table()[1:] == [["l, head 1", "-", "-"], ["l, head 2", "0, 1", "0, 1"]]
        assert gone.reach == 1
        save_figures(folder / "figures", [section, Section("x", charts=[gone])])
        subject = PageModel("net", model, CONFIG | {"input_size": (3, 32, 32)})
        texts = {s.title: s.text for s in analyze_sections([subject], [PageImage("a", torch.rand(3, 32, 32))])}
        assert texts["Gates and spans"].endswith(
            "Heads of net without a centre (locality not positive), and so without a span: 1."
        )

    def test_what_a_run_is_now_may_be_damaged(self, folder, monkeypatch):
        """Its newest snapshot says epoch 3, and nothing is there to rebuild it from: what was kept is still drawn."""
        write_run(folder / "run")
        iso.save(timm.create_model("t_cifar_resnet20"), folder / "run/epoch-1.safetensors")
        newest = SimpleNamespace(values={"progress": {"closed": 3}})
        monkeypatch.setattr("isomorph.training.history.newest_snapshot", lambda _: newest)
        logs = read_run_logs([folder / "run"])
        assert gating_histories([folder / "run"], logs)["run"].epochs.tolist() == [1]
        assert "nor the folder of a run with a snapshot" in logs[0].problems[-1]

    def test_bad_input_is_one_line(self, folder, capsys):
        iso.save(timm.create_model("cifar_resnet20"), write_run(folder / "c") / "epoch-1.safetensors")
        iso.save(timm.create_model("cifar_resnet20", in_chans=1), "grey.safetensors")
        Path("e.json").write_text('{"model": "m", "top1": 1.0}')
        Path("f.json").write_text('{"model": "m", "top1": 1.0, "macs": 1, "parameters": 1}')
        (folder / "hollow").mkdir()
        for command, expected in WRONG_COMMANDS.items():
            with pytest.raises(SystemExit) as stop:
                main(command.split())
            assert stop.value.code == 2
            said = capsys.readouterr().err.strip()
            assert expected in said
            assert len(said.splitlines()) == 1


class TestFigures:
    def test_the_query_patch_is_framed(self):
        """The frame lies on the patch whose row of the map is drawn: each query of this layer attends to itself."""
        for grid in ((4, 6), (5, 7), (5, 6)):
            number = grid[0] * grid[1]
            levels = np.eye(number, dtype=np.uint8)[None, None] * 255
            layer = LayerMaps("a", TokenGrid(grid, grid), levels, np.tile(np.float32([0, 1]), (1, 1, number, 1)))
            seen, (row, column, height, width) = layer.maps_from(0, 0.5, 0.5)[0], framed_in(layer, (40, 84))
            assert (height, width) == pytest.approx((40 / grid[0], 84 / grid[1]))
            assert np.argwhere(seen).tolist() == [[round(row / height), round(column / width)]]
            assert row <= 20 <= row + height
            assert column <= 42 <= column + width

    def test_of_a_stride_it_is_the_patch_of_the_queries(self):
        """T-CNN: 20 x 16 keys, 10 x 8 queries, and the row that is drawn is that of query (5, 4)."""
        tcnn = iso.recast(timm.create_model("cifar_resnet20"), iso.ConvToGPSA("paper"), "layer3.0.conv?").eval()
        x = torch.randn(1, 3, 40, 32)
        layer = capture_layer_maps(tcnn, x, "layer3.0.conv1")[0]["layer3.0.conv1"]
        assert (layer.where.queries, layer.keys) == ((10, 8), (20, 16))
        row = iso.attention_maps(tcnn, x)["layer3.0.conv1"][0, :, 5 * 8 + 4].unflatten(-1, (22, 18))[:, 1:-1, 1:-1]
        assert abs(layer.maps_from(0, 0.5, 0.5) - row.numpy()).max() <= layer.rounding * 1.001
        assert framed_in(layer, (40, 32)) == pytest.approx((20, 16, 4, 4))

    def test_maps_name_the_model_and_the_heads(self):
        maps = QueryMaps(np.ones((2, 4, 4)), (2, 2), (4, 4))
        figure = maps_figure(np.zeros((8, 8, 3)), {"deep": maps._replace(maps=np.ones((3, 4, 4))), "x": maps}, "net")
        titles = [[cell.get_title() for cell in figure.axes[i : i + 4]] for i in (0, 4)]
        assert titles == [["", "head 1", "head 2", "head 3"], [""] * 4]
        assert figure.axes[0].get_title(loc="left") == "net"

    @pytest.mark.parametrize("models", [("cnn", "net"), ("net", "cnn"), ("other",), ()])
    def test_a_model_has_one_colour_in_every_figure(self, models):
        both = {"net": {"x": [0.5]}, "cnn": {"x": [0.25]}}
        first, second = (PALETTE[models.index(name) if "net" in models else i] for i, name in enumerate(both))
        bars, lines = {name: {"x": 1.0} for name in both}, {name: Line([0, 1], [1, 2]) for name in both}
        for chart in (Dots("t", "y", both), Bars("t", "y", bars), Panel("t", "x", "y", lines)):
            figure = draw_chart(chart, models)
            handles, names = figure.axes[0].get_legend_handles_labels()
            found = [to_hex(h[0].get_facecolor() if len(getattr(h, "patches", "")) else h.get_color()) for h in handles]
            assert dict(zip(names, found, strict=True)) == {"net": first, "cnn": second}
            pyplot().close(figure)

    def test_dots_on_the_top_of_the_axis_are_whole(self):
        figure = draw_chart(Dots("Gates", "g", {"net": {"x": [1.0, 1.0], "y": [1.0]}}, 1.0))
        axes = figure.axes[0]
        assert axes.get_ylim()[1] == 1
        assert not any(drawn.get_clip_on() for drawn in (*axes.lines, *axes.collections))
        pyplot().close(figure)

    def test_cells_of_small_matrices_have_their_numbers(self):
        def drawn(columns, values):
            figure = draw_chart(Matrix("t", "r", "c", ["a"], columns, [values], -20.0, 20.0))
            axes = figure.axes[0]
            pyplot().close(figure)
            return [text.get_text() for text in axes.texts], {t.get_rotation() for t in axes.get_xticklabels()}

        assert drawn(["1", "2", "3"], [-12.34, 0.5, math.nan]) == (["-12.3", "0.5"], {0})
        assert drawn(["1", "2"], [100.5, 7.0])[0] == ["100", "7"]
        assert drawn(["1", "2"], [0.00123, 0.0])[0] == ["0.00123", "0.00000"]
        assert drawn(["blocks.0", "1"], [1.0, 100.0]) == (["1.0", "100.0"], {90})
        assert drawn([str(i) for i in range(13)], [1.0] * 13) == ([], {0})


def framed_in(layer, size):
    """Where the frame lies on a picture: top, left, height and width, in pixels."""
    rows = {layer.name: centre_query_maps(layer, 0)}
    figure = maps_figure(np.zeros((*size, 3)), rows)
    axes = figure.axes[0]
    (frame,) = axes.patches
    assert axes.images[0].get_extent() == [0, size[1], size[0], 0]
    pyplot().close(figure)
    return frame.get_y(), frame.get_x(), frame.get_height(), frame.get_width()


def test_gains_of_both_parts_are_on_one_scale():
    first = {("fog", 1): 50.0, ("saturate", 1): 50.0, ("clean", 0): 10.0}
    second = {("fog", 1): 52.0, ("saturate", 1): 41.0, ("clean", 0): 90.0}
    *_, change, _, _, extra = robustness_charts({"a": first, "b": second})
    assert (change.values, extra.values) == ([[2]], [[-9]])
    assert (change.low, change.high) == (extra.low, extra.high) == (-9, 9)
    third = {("saturate", 1): 44.0}  # it has no cell of the suite
    charts = robustness_charts({"a": first, "b": second, "c": third})
    assert [(c.low, c.high) for c in charts if isinstance(c, Matrix)] == [(-2, 2), *[(0, 100)] * 3]
