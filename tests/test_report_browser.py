"""The report's pages in a real browser: what is drawn is what the model computes, by pointer, key and touch."""

import csv
import io
import json
import re

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import isomorph as iso
from browser import open_tab
from isomorph import report
from isomorph.analysis import attention_windows
from isomorph.lab.report.page_images import normalise_images
from isomorph.lab.report.page_models import name_classes
from test_report import CONFIG as FRAMING
from test_report import small_vit

TIMES = "\N{MULTIPLICATION SIGN}"
NAMES = ("<img src=x onerror=alert(1)>", "gated & tuned")
CONFIG = {**FRAMING, "input_size": (3, 32, 48), "std": (0.25,) * 3}
GRID = (4, 6)


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
    vit = small_vit(reg_tokens=1)
    for block in vit.blocks:
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.4)  # attention that is far from uniform
    models = [
        vit,
        iso.recast(vit, iso.AttentionToGPSA(init="paper", grid_size=None), "blocks.[01].attn"),
    ]
    images = [
        report.PageImage(f"image {i}", torch.rand(3, *CONFIG["input_size"][1:])) for i in range(2)
    ]
    path = write(tmp_path_factory.mktemp("page"), dict(zip(NAMES, models, strict=True)), images)
    batch = normalise_images(images, CONFIG)
    classes = [name_classes(model, model(batch)) for model in models]
    return path, [iso.attention_maps(model, batch) for model in models], classes


def write(folder, models, images, config=CONFIG):
    sections = report.analyze_sections(
        [report.PageModel(name, model, config) for name, model in models.items()], images
    )
    report.write_page(
        folder / "page.html", " and ".join(models), sections[0].finding, sections, "A footer."
    )
    return folder / "page.html"


def show(tab, folder, *sections):
    report.write_page(
        folder / "page.html", "Charts", "A finding.", sections, "Made by:\nisomorph compare a b"
    )
    tab.open(folder / "page.html")


def tile(layer, model, head):
    return f"[data-tile='{layer}-{model}-{head}']"


def texts(tab, selector):
    return tab.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
    )


def readout(tab, pattern=""):
    said = tab.run("document.querySelector('.readout').textContent")
    return float(re.search(pattern + r" ?([\d.e-]+)", said)[1]) if pattern else said


def at(position, grid=GRID):
    """The middle of a patch, as shares of height and width."""
    return (position[0] + 0.5) / grid[0], (position[1] + 0.5) / grid[1]


def token(position):
    return 2 + position[0] * GRID[1] + position[1]  # after a class token and a register


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
    tab.click(f"fieldset:has([name='{name}-0']) label:nth-child({i + 1})")


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
        assert (
            tab.run("fetch('http://127.0.0.1:9/').then(() => 'went', () => 'refused')") == "refused"
        )
        tab.events.clear()  # the console says that both are refused

    def test_numbers_under_the_pointer_are_the_models(self, tab, page):
        """Of the image, layer and query that the mouse has chosen: a patch, or a token before the patches."""
        path, maps, classes = page
        tab.open(path)
        assert texts(tab, "fieldset:has([name='Query-0']) label") == [
            "Patch",
            "Class token",
            "Register 1",
        ]
        cases = (
            (1, 2, (3, 5), 0, 2, (0, 2)),
            (0, 0, 0, 1, 0, (3, 1)),
            (1, 1, (0, 1), 1, 1, (2, 4)),
            (0, 1, 1, 0, 1, (0, 0)),
        )
        for image, layer, query, model, head, key in cases:
            choose(tab, "Image", image)
            tab.click("[aria-label=Layer]", 0.5, 0.02 + 0.48 * layer)
            if query in (0, 1):
                choose(tab, "Query", 1 + query)
                start = f"From {('class token', 'register 1')[query]}. "
            else:
                tab.click(".pick", *at(query))
                start = f"From row {query[0] + 1}, column {query[1] + 1} of 4 {TIMES} 6 (pinned). "
            tab.hover(tile(layer, model, head) + " canvas", *at(key))
            start += f"Head {head + 1} attends to row {key[0] + 1}, column {key[1] + 1} with "
            assert readout(tab).startswith(start)
            rows = [
                of[f"blocks.{layer}.attn"][image, head, query if query in (0, 1) else token(query)]
                for of in maps
            ]
            for row, name in zip(rows, NAMES, strict=True):
                shown = float(re.search(rf"([\d.e-]+) \({re.escape(name)}\)", readout(tab))[1])
                assert abs(shown - row[token(key)]) <= level(row)
            assert readout(tab, ";") == pytest.approx(
                rows[model][:2].sum().item(), abs=2 * level(rows[model])
            )
            told = [f"{name} predicts {of[image]}" for name, of in zip(NAMES, classes, strict=True)]
            assert texts(tab, ".predictions p") == told
            tab.click(".pick", *at((1, 1)))  # unpins the patch, or pins one instead of the token
            assert tab.run("document.querySelector('[name=Query-0]').checked")
            tab.press("Escape")

    def test_maps_have_their_colours_and_differences_their_signs(self, tab, page, tmp_path):
        tab.open(page[0])
        tab.click(tile(1, 1, 0))
        over = pixels(tab, ".pick")
        choose(tab, "Draw", 1)
        assert (over != pixels(tab, ".pick")).any()
        table = np.array(tab.run("COLOURS.sequential"))
        assert table[[0, 85, 255]].tolist() == [[0, 0, 4], [114, 31, 129], [252, 253, 191]]  # magma
        for shared, query in enumerate(((0, 0), (2, 1))):
            choose(tab, "Colour scale", shared)
            assert texts(tab, ".scale span") == [
                "0",
                ("largest in the map", "largest shown")[shared],
            ]
            tab.hover(".pick", *at(query))
            rows = np.stack(
                [of["blocks.1.attn"][0, :, token(query), 2:].unflatten(1, GRID) for of in page[1]]
            )
            change = rows[1] - rows[0]
            drawn = [pixels(tab, tile(1, model, 0) + " canvas") for model in range(3)]
            selected = pixels(tab, ".pick")  # the map of the selected head, over the image
            for position in np.ndindex(*GRID):
                if position == query:
                    continue  # the frame is drawn there
                for row, image in zip(rows[[0, 1, 1], 0], (*drawn[:2], selected), strict=True):
                    y, x = (
                        int(share * size)
                        for share, size in zip(at(position), image.shape, strict=False)
                    )
                    wanted = int(255 * row[position] / (rows if shared else row).max())
                    near = table[max(0, wanted - 1) : wanted + 3]
                    distances = abs(near - image[y, x]).max(1)
                    assert (distances <= 1).any()
                y, x = (
                    int(share * size)
                    for share, size in zip(at(position), drawn[2].shape, strict=False)
                )
                if abs(change[0][position]) > 0.1 * abs(change[0]).max():
                    # red is more
                    assert (drawn[2][y, x, 0] > drawn[2][y, x, 2]) == (change[0][position] > 0)

        choose(tab, "Colours", 1)
        assert texts(tab, ".scale span")[0] == "up to largest / 255"
        image = pixels(tab, tile(1, 0, 0) + " canvas")
        for position in np.ndindex(*GRID):
            if position == query:
                continue
            y, x = (
                int(share * size) for share, size in zip(at(position), image.shape, strict=False)
            )
            share = max(1e-9, (rows[0, 0][position] / rows.max()).item())
            wanted = int(255 * max(0, 1 + np.log(share) / np.log(255)))
            if share > 0.1:  # where a level of the stored map is less than a step of the colours
                near = table[max(0, wanted - 2) : wanted + 4]
                distances = abs(near - image[y, x]).max(1)
                assert (distances <= 1).any()
        choose(tab, "Colours", 0)

        tab.click(".pick", *at(query))  # pins
        name, text = tab.save("the attention maps as CSV", tmp_path / "csv")
        assert name == "img-src-x-onerror-alert-1-and-gated-tuned-attention.csv"
        saved = list(csv.DictReader(text.decode().splitlines()))
        assert {row["query"] for row in saved} == {f"row 3, column 2 of 4 {TIMES} 6"}
        assert {row["layer"] for row in saved} == {"blocks.1.attn"}
        last = [saved[-1][name] for name in ("model", "head", "row", "column")]
        assert last == [f"{NAMES[1]} minus {NAMES[0]}", "3", "4", "6"]
        values = np.array([float(row["attention"]) for row in saved]).reshape(3, *rows.shape[1:])
        assert abs(values - [*rows, change]).max() <= 2 * level(rows)
        svg = tab.save("the attention maps as SVG", tmp_path / "svg")[1].decode()
        assert svg.count("<image ") == 1 + 9
        assert "head 3" in svg
        image = Image.open(io.BytesIO(tab.save("the attention maps as PNG", tmp_path / "png")[1]))
        sides = [
            float(re.search(rf'<svg [^>]*{side}="([\d.]+)"', svg)[1])
            for side in ("width", "height")
        ]
        assert image.size == pytest.approx([3 * side for side in sides], abs=3)
        assert np.asarray(image).std() > 10
        tab.click(tile(1, 2, 0))
        assert texts(tab, ".scale span")[0] == "negative"
        # RdBu
        assert pixels(tab, ".scale canvas")[0, [0, 255]].tolist() == [[5, 48, 97], [103, 0, 31]]

    def test_mouse_keys_and_touch(self, tab, page):
        tab.open(page[0])

        def place():
            row, column, pinned = re.match(
                rf"From row (\d), column (\d) of 4 {TIMES} 6( .pinned.)?", readout(tab)
            ).groups()
            return int(row), int(column), bool(pinned)

        pressed = (
            f"document.querySelector(\"{tile(1, 1, 2)}\").getAttribute('aria-pressed') === 'true'"
        )
        # the second click unpins
        for query, pinned in (((2, 4), (3, 5, True)), ((1, 3), (1, 1, False))):
            tab.click(".pick", *at(query))
            tab.hover(".pick", *at((0, 0)))
            assert place() == pinned
        before = pixels(tab, ".pick")
        for selected in (True, False):
            tab.click(tile(1, 1, 2))
            assert tab.run(pressed) == selected == ("Head 3 of blocks.1.attn" in readout(tab))
            assert (pixels(tab, ".pick") != before).any() == selected
            for place_of_mouse, says_a_value in ((tile(1, 0, 1), True), ("h1", False)):
                tab.hover(place_of_mouse)
                assert (" attends to " in readout(tab)) == says_a_value

        tab.run(f'document.querySelector("{tile(1, 1, 2)}").focus()')
        tab.press("Enter")
        assert tab.run(pressed)
        tab.run("document.querySelector('.pick').focus()")
        before = pixels(tab, tile(1, 0, 0) + " canvas")
        seen = []
        for key in ("ArrowRight", "ArrowUp", "ArrowDown", "ArrowUp", "ArrowLeft"):
            tab.press(key)
            seen.append(place())
        # the border holds
        assert seen == [(1, 2, True), (1, 2, True), (2, 2, True), (1, 2, True), (1, 1, True)]
        assert (pixels(tab, tile(1, 0, 0) + " canvas") == before).all()
        tab.press("Escape")
        assert not tab.run(pressed)
        assert place() == (1, 1, False)
        seen = []
        for key in "[[]]]":
            tab.press(key)
            seen.append(
                texts(tab, ".layer output")[0][7]
                + tab.run("document.querySelector('[type=range]').value")
            )
        assert seen == ["00", "00", "11", "22", "22"]

        tab.touch(".pick", at((0, 1)))
        assert place() == (1, 2, True)
        tab.touch(".pick", at((1, 3)))  # a finger pins each time
        assert place() == (2, 4, True)
        tab.touch(".pick", at((1, 3)), at((1, 4)), at((1, 5)))
        assert place() == (2, 6, True)

    def test_no_screen_overflows_and_schemes_differ(self, tab, page, tmp_path):
        for width, dark in ((1280, False), (768, True), (390, False)):
            tab.screen(width, 900, dark)
            tab.open(page[0])
            top, bottom = tab.run(
                "(b => [b.top, b.bottom])(document.querySelector('.lead').getBoundingClientRect())"
            )
            assert 0 < top < bottom < 450
            for i in (1, 0):
                choose(tab, "Show", i)
                assert len(texts(tab, ".tile")) == (27 if i else 9)
                assert tab.run("[document.documentElement.scrollWidth, innerWidth]") == [
                    width,
                    width,
                ]
            shot = np.asarray(Image.open(tab.picture(tmp_path / "page.png")))
            assert (shot[2, 2, :3].mean() < 60) == dark
            assert shot[..., :3].reshape(-1, 3).std(0).max() > 10  # something is drawn

    def test_windows_lie_where_they_are_in_the_image(self, tab, tmp_path):
        """A shifted layer of a Swin, on a grid that its windows do not fill."""
        arguments = dict(
            img_size=(40, 48),
            window_size=4,
            embed_dim=8,
            depths=(2,),
            num_heads=(2,),
            num_classes=2,
        )
        model = timm.create_model("swin_tiny_patch4_window7_224", **arguments).eval()
        config = CONFIG | {"input_size": (3, 40, 48)}
        image = report.PageImage("x", torch.rand(3, 40, 48))
        tab.open(write(tmp_path, {"Swin": model}, [image], config))
        name = "layers.0.blocks.1.attn"
        query = 8 * 12 + 5
        batch = normalise_images([image], config)
        windows = attention_windows(model, batch)[name]
        maps = windows.on_grid(iso.attention_maps(model, batch)[name])[0, 1, query]
        keys = windows.keys_of(query)
        tab.click(".pick", *at((8, 5), (10, 12)))
        for key in (keys[keys >= 0][0].item(), query, 0):
            tab.hover(tile(1, 0, 1) + " canvas", *at(divmod(key, 12), (10, 12)))
            assert abs(readout(tab, "with") - maps[keys == key].sum()) <= level(maps)
        assert readout(tab, ";") == pytest.approx(maps[keys < 0].sum().item(), abs=0.02)


class TestCharts:
    LOSS = {"a, b": report.Line([1, 2], [3, 2], [2.5, 1.5], [3.5, 2.5]), "c": report.Line([1], [1])}
    COST = {"d": {"small": (1, 80), "large": (4.2, 81.5)}, "e": {"other": (1.05, 80.1)}}
    CHARTS = (
        report.Panel("Loss", "step", "loss", LOSS),
        report.Bars("Top-1", "%", {"a": {"fog": 41.5, "snow": 12.0}, "b": {"fog": 40.0}}),
        report.Dots("Gates", "sigma", {"a": {"l.0.x": [0.25, 0.5], "l.1.x": [0.75]}}, 1.0),
        report.Paths(
            "Centres",
            {"l.0": [[(0.0, 1.0), (0.5, 1.25)], [(1.0, 0.0), (2.0, -1.0)]], "l.1": [[(1.0, 1.0)]]},
        ),
        report.Matrix("CKA", "r", "c", ["r1", "r2"], ["c1", "c2"], [[1.0, 0.25], [0.5, 0.125]]),
        report.Scatter("Cost", "GMACs", "%", COST),
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
        show(
            tab,
            tmp_path,
            report.Section("Results", table=table),
            report.Section("C", charts=self.CHARTS),
        )
        assert texts(tab, ".reading") == [self.HINT, *[""] * 5]
        assert texts(tab, ".charts h3") == list(self.READINGS)
        assert all(name in texts(tab, ".chart > svg")[-1] for name in ("small", "large", "other"))
        for number, (keys, expected) in enumerate(self.READINGS.values()):
            tab.run(
                f"document.querySelectorAll('.chart > svg')[{number}].focus({{preventScroll: true}})"
            )
            for key in keys:
                tab.press(key)
            assert texts(tab, ".reading")[number] == expected
        tab.hover(".charts .card .chart > svg", 0.5, 0.98)
        assert texts(tab, ".reading")[0] == "step 2: a, b 2 · c \N{EN DASH}"
        for setting, told in (
            ("denied", "Selected: press Ctrl+C or \N{PLACE OF INTEREST SIGN}C"),
            ("granted", "Copied"),
        ):
            tab.run("getSelection().removeAllRanges()")
            tab.send(
                "Browser.setPermission", permission={"name": "clipboard-write"}, setting=setting
            )
            tab.click("#command + .save button")
            tab.wait(f"document.querySelector('#command + .save button').textContent === '{told}'")
            assert tab.run("getSelection().toString()") == (
                "isomorph compare a b" if setting == "denied" else ""
            )
        tab.send("Browser.setPermission", permission={"name": "clipboard-read"}, setting="granted")
        assert tab.run("navigator.clipboard.readText()") == "isomorph compare a b"

        for title, text in self.FILES.items():
            name, data = tab.save(f"{title} as CSV", tmp_path / f"{title}-csv")
            assert name == f"charts-{title.lower()}.csv"
            assert data.decode() == text
            svg = tab.save(f"{title} as SVG", tmp_path / f"{title}-svg")[1].decode()
            assert svg.startswith("<svg")
            assert title in svg
            assert "var(" not in svg
        assert tab.save("Loss as PNG", tmp_path / "png")[1].startswith(b"\x89PNG")
        page = json.loads(tab.save("all numbers as JSON", tmp_path / "json")[1])
        assert [section["title"] for section in page["sections"]] == ["Results", "C"]
        assert page["sections"][0]["table"] == table
        assert [chart["title"] for chart in page["charts"]] == list(self.READINGS)
