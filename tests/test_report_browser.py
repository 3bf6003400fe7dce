"""The report's pages in a real browser: what is drawn is what the model computes, by pointer, key and touch."""

import base64
import json
import re

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import isomorph as iso
from browser import open_tab
from isomorph.analysis import attention_windows
from isomorph.report import (
    Bars,
    Dots,
    Line,
    Matrix,
    PageImage,
    PageModel,
    Panel,
    Paths,
    Scatter,
    Section,
    analyze_sections,
    write_page,
)
from isomorph.report.page_images import normalise_images
from test_report import CONFIG as FRAMING
from test_report import small_vit

TIMES, NAMES = "\N{MULTIPLICATION SIGN}", ("<img src=x onerror=alert(1)>", "gated & tuned")
CONFIG, GRID = {**FRAMING, "input_size": (3, 32, 48), "std": (0.25,) * 3}, (4, 6)


@pytest.fixture(scope="module")
def browser():
    with open_tab() as tab:
        yield tab


@pytest.fixture
def tab(browser):
    """A wide light screen; no complaint at the end of the test."""
    browser.screen(1280, 900)
    browser.events.clear()
    yield browser
    assert browser.complaints() == []


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a small ViT and its recast on two wide images, and the maps that it is to show."""
    torch.manual_seed(0)
    vit = small_vit()
    for block in vit.blocks:
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.4)  # attention that is far from uniform
    models = [vit, iso.recast(vit, iso.AttentionToGPSA(init="paper", grid_size=None), "blocks.[01].attn")]
    images = [PageImage(f"image {i}", torch.rand(3, *CONFIG["input_size"][1:])) for i in range(2)]
    path = write(tmp_path_factory.mktemp("page"), dict(zip(NAMES, models, strict=True)), images)
    batch = normalise_images(images, CONFIG)
    return path, [iso.attention_maps(model, batch) for model in models]


def write(folder, models, images, config=CONFIG):
    sections = analyze_sections([PageModel(name, model, config) for name, model in models.items()], images)
    write_page(folder / "page.html", " and ".join(models), sections[0].finding, sections, "A footer.")
    return folder / "page.html"


def show(tab, folder, *sections):
    write_page(folder / "page.html", "Charts", "A finding.", sections, "Made by:\nisomorph compare a b")
    tab.open(folder / "page.html")


def tile(layer, model, head):
    return f"[data-tile='{layer}-{model}-{head}']"


def texts(tab, selector):
    return tab.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")


def readout(tab, pattern=""):
    said = tab.run("document.querySelector('.readout').textContent")
    return float(re.search(pattern + r" ?([\d.e-]+)", said)[1]) if pattern else said


def at(position, grid=GRID):
    """The middle of a patch, as shares of height and width."""
    return (position[0] + 0.5) / grid[0], (position[1] + 0.5) / grid[1]


def token(position):
    return 1 + position[0] * GRID[1] + position[1]


def level(row):
    """Half a level of a row: what rounding may change; and four digits of the read-out."""
    return row.max().item() * (1 / 510 + 1e-3)


def pixels(tab, selector):
    """The colours of a canvas. Shape: -> (H, W, 3)"""
    found = tab.run(
        "(c => { const copy = new OffscreenCanvas(c.width, c.height).getContext('2d', {willReadFrequently: true});"
        "copy.drawImage(c, 0, 0); return [c.height, c.width, ...copy.getImageData(0, 0, c.width, c.height).data]; })"
        f"(document.querySelector({json.dumps(selector)}))"
    )
    return np.array(found[2:]).reshape(found[0], found[1], 4)[..., :3].astype(int)


def choose(tab, name, i):
    tab.run(f"document.querySelectorAll('[name=\"{name}-0\"]')[{i}].click()")
    tab.settle()


class TestAttention:
    def test_texts_stay_texts_and_the_page_asks_for_nothing(self, tab, page):
        tab.open(page[0])
        assert texts(tab, "h1") == [" and ".join(NAMES)]
        assert len(texts(tab, ".tile")) == 9  # three heads, twice, and the difference
        assert len(texts(tab, ".chart > svg")) >= 3
        assert texts(tab, "[src=x]") == []
        script = "Object.assign(document.createElement('script'), {textContent: 'window.bad = 1'})"
        tab.run(f"document.body.append({script})")
        assert tab.run("window.bad") is None
        assert tab.run("fetch('http://127.0.0.1:9/').then(() => 'went', () => 'refused')") == "refused"
        tab.events.clear()  # the console says that both are refused

    def test_numbers_under_the_pointer_are_the_models(self, tab, page):
        tab.open(page[0])
        draw = np.random.default_rng(0)
        for _ in range(4):
            query, key = (tuple(int(draw.integers(n)) for n in GRID) for _ in range(2))
            head, model = int(draw.integers(3)), int(draw.integers(2))
            tab.click(".pick", *at(query))
            tab.hover(tile(1, model, head) + " canvas", *at(key))
            assert f"From row {query[0] + 1}, column {query[1] + 1}" in readout(tab)
            assert f"Head {head + 1} attends to row {key[0] + 1}, column {key[1] + 1} with" in readout(tab)
            for maps, name in zip(page[1], NAMES, strict=True):
                row = maps["blocks.1.attn"][0, head, token(query)]
                shown = float(re.search(rf"([\d.e-]+) \({re.escape(name)}\)", readout(tab))[1])
                assert abs(shown - row[token(key)]) <= level(row)
            tab.press("Escape")
            tab.click(".pick", *at(query))  # unpin the patch

    def test_maps_have_their_colours_and_differences_their_signs(self, tab, page):
        tab.open(page[0])
        choose(tab, "Draw", 1)
        table = np.array(tab.run("COLOURS.sequential"))
        assert table[[0, 85, 255]].tolist() == [[0, 0, 4], [114, 31, 129], [252, 253, 191]]  # magma
        for query in ((0, 0), (2, 1)):
            tab.hover(".pick", *at(query))
            rows = [maps["blocks.1.attn"][0, 0, token(query), 1:].unflatten(0, GRID).numpy() for maps in page[1]]
            change = rows[1] - rows[0]
            drawn = [pixels(tab, tile(1, model, 0) + " canvas") for model in range(3)]
            for position in np.ndindex(*GRID):
                if position == query:
                    continue  # the frame is drawn there
                y, x = (int(share * size) for share, size in zip(at(position), drawn[0].shape, strict=False))
                for row, image in zip(rows, drawn, strict=False):
                    wanted = int(255 * row[position] / row.max())
                    assert (abs(table[max(0, wanted - 1) : wanted + 3] - image[y, x]).max(1) <= 1).any()
                if abs(change[position]) > 0.1 * abs(change).max():
                    assert (drawn[2][y, x, 0] > drawn[2][y, x, 2]) == (change[position] > 0)  # red is more

        rows, svg = tab.run("viewerRows(viewers[0])"), tab.run("viewerSvg(viewers[0])")  # what the buttons save
        assert rows[0] == ["model", "layer", "head", "query", "row", "column", "attention"]
        assert len(rows) == 1 + 3 * 3 * 24
        assert svg.count("<image ") == 1 + 9
        assert "head 3" in svg

    def test_keys_and_touch(self, tab, page):
        tab.open(page[0])
        tab.run(f'document.querySelector("{tile(1, 1, 2)}").focus()')
        tab.press("Enter")
        assert tab.run(f"document.querySelector(\"{tile(1, 1, 2)}\").getAttribute('aria-pressed')") == "true"
        assert "Head 3 of blocks.1.attn" in readout(tab)
        tab.run("document.querySelector('.pick').focus()")
        before, seen = pixels(tab, tile(1, 0, 0) + " canvas"), []
        for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowUp"):
            tab.press(key)
            seen.append(tuple(map(int, re.match(r"From row (\d), column (\d)", readout(tab)).groups())))
        assert seen == [(3, 5), (4, 5), (4, 5), (4, 4), (3, 4)]  # the border holds
        assert (pixels(tab, tile(1, 0, 0) + " canvas") == before).all()

    def test_no_screen_overflows_and_schemes_differ(self, tab, page, tmp_path):
        for width, dark in ((1280, False), (768, True), (390, False)):
            tab.screen(width, 900, dark)
            tab.open(page[0])
            top, bottom = tab.run("(b => [b.top, b.bottom])(document.querySelector('.lead').getBoundingClientRect())")
            assert 0 < top < bottom < 450
            for i in (1, 0):
                choose(tab, "Show", i)
                assert len(texts(tab, ".tile")) == (27 if i else 9)
                assert tab.run("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
            shot = np.asarray(Image.open(tab.picture(tmp_path / "page.png")))
            assert (shot[2, 2, :3].mean() < 60) == dark
            assert shot[..., :3].reshape(-1, 3).std(0).max() > 10  # something is drawn

    def test_windows_lie_where_they_are_in_the_image(self, tab, tmp_path):
        """A shifted layer of a Swin, on a grid that its windows do not fill."""
        arguments = dict(img_size=(40, 48), window_size=4, embed_dim=8, depths=(2,), num_heads=(2,), num_classes=2)
        model = timm.create_model("swin_tiny_patch4_window7_224", **arguments).eval()
        config, image = CONFIG | {"input_size": (3, 40, 48)}, PageImage("x", torch.rand(3, 40, 48))
        tab.open(write(tmp_path, {"Swin": model}, [image], config))
        name, query, batch = "layers.0.blocks.1.attn", 8 * 12 + 5, normalise_images([image], config)
        windows = attention_windows(model, batch)[name]
        maps, keys = windows.on_grid(iso.attention_maps(model, batch)[name])[0, 1, query], windows.keys_of(query)
        tab.click(".pick", *at((8, 5), (10, 12)))
        for key in (keys[keys >= 0][0].item(), query, 0):
            tab.hover(tile(1, 0, 1) + " canvas", *at(divmod(key, 12), (10, 12)))
            assert abs(readout(tab, "with") - maps[keys == key].sum()) <= level(maps)
        assert readout(tab, ";") == pytest.approx(maps[keys < 0].sum().item(), abs=0.02)


class TestCharts:
    CHARTS = (
        Panel("Loss", "step", "loss", {"a, b": Line([1, 2], [3, 2], [2.5, 1.5], [3.5, 2.5]), "c": Line([1], [1])}),
        Bars("Top-1", "%", {"a": {"fog": 41.5, "snow": 12.0}, "b": {"fog": 40.0}}),
        Dots("Gates", "sigma", {"a": {"l.0.x": [0.25, 0.5], "l.1.x": [0.75]}}, 1.0),
        Paths("Centres", {"l.0": [[(0.0, 1.0), (0.5, 1.25)], [(1.0, 0.0), (2.0, -1.0)]], "l.1": [[(1.0, 1.0)]]}),
        Matrix("CKA", "r", "c", ["r1", "r2"], ["c1", "c2"], [[1.0, 0.25], [0.5, 0.125]]),
        Scatter("Cost", "GMACs", "%", {"d": {"small": (1, 80), "large": (4.2, 81.5)}, "e": {"other": (1.05, 80.1)}}),
    )
    READINGS = {
        "Loss": (["ArrowRight"], "step 1: a, b 3 · c 1"),
        "Top-1": (["ArrowDown"], "fog: a 41.5 · b 40 (%)"),
        "Gates": (["ArrowRight"], "l.0.x: a 0.25, 0.5"),
        "Centres": (["ArrowRight", "ArrowRight"], "l.0, head 2: first 1, 0 · last 2, -1"),
        "CKA": (["ArrowRight", "ArrowDown", "ArrowRight"], f"r2 {TIMES} c2: 0.125"),
        "Cost": (["ArrowRight", "ArrowRight"], "large, d: GMACs 4.2 · % 81.5"),
    }
    FILES = {
        "Loss": 'series,line,step,loss,low,high\n"a, b",1,1,3,2.5,3.5\n"a, b",1,2,2,1.5,2.5\nc,1,1,1\n',
        "Top-1": "series,group,%\na,fog,41.5\na,snow,12\nb,fog,40\nb,snow,\n",
        "CKA": "r,c,value\nr1,c1,1\nr1,c2,0.25\nr2,c1,0.5\nr2,c2,0.125\n",
    }
    HINT = "Point at the chart or use the arrow keys to read values."

    def test_their_numbers_are_read_out_and_saved(self, tab, tmp_path):
        tab.screen(1280, 900, dark=True)
        table = [["", "best top-1 (%)", "NLL"], ["run", "93.11", "0.2"]]
        show(tab, tmp_path, Section("Results", table=table), Section("C", charts=self.CHARTS))
        assert texts(tab, ".reading") == [self.HINT, *[""] * 5]
        assert texts(tab, ".charts h3") == list(self.READINGS)
        assert all(name in texts(tab, ".chart > svg")[-1] for name in ("small", "large", "other"))
        for number, (keys, expected) in enumerate(self.READINGS.values()):
            tab.run(f"document.querySelectorAll('.chart > svg')[{number}].focus({{preventScroll: true}})")
            for key in keys:
                tab.press(key)
            assert texts(tab, ".reading")[number] == expected
        tab.hover(".charts .card .chart > svg", 0.5, 0.98)
        assert texts(tab, ".reading")[0] == "step 2: a, b 2 · c \N{EN DASH}"
        tab.run(
            "window.files = []; saveBlob = async (name, blob) => {"
            "const bytes = new Uint8Array(await blob.arrayBuffer());"
            "window.files.push([name, btoa(bytes.reduce((s, b) => s + String.fromCharCode(b), ''))]); }"
        )

        def saved(label):
            tab.run(f"window.files.length = 0; document.querySelector('[aria-label=\"Save {label}\"]').click()")
            tab.wait("window.files.length")
            name, data = tab.run("window.files[0]")
            return name, base64.b64decode(data)

        tab.run("navigator.clipboard.writeText = async text => { window.copied = text; }")
        tab.click("#command + .save button")
        tab.wait("window.copied === 'isomorph compare a b'")

        for title, text in self.FILES.items():
            name, data = saved(f"{title} as CSV")
            assert (name, data.decode()) == (f"charts-{title.lower()}.csv", text)
            svg = saved(f"{title} as SVG")[1].decode()
            assert svg.startswith("<svg")
            assert title in svg
            assert "var(" not in svg
        assert saved("Loss as PNG")[1].startswith(b"\x89PNG")
        page = json.loads(saved("all numbers as JSON")[1])
        assert [section["title"] for section in page["sections"]] == ["Results", "C"]
        assert page["sections"][0]["table"] == table
        assert [chart["title"] for chart in page["charts"]] == list(self.READINGS)
