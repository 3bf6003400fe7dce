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
    rule = iso.AttentionToGPSA(init="paper", grid_size=None)
    models = [vit, iso.recast(vit, rule, "blocks.[01].attn")]
    images = []
    for name in ("image 0", "image 1"):
        images.append(report.PageImage(name, torch.rand(CONFIG["input_size"])))
    named = dict(zip(NAMES, models, strict=True))
    path = write(tmp_path_factory.mktemp("page"), named, images)

    batch = normalise_images(images, CONFIG)
    maps = [iso.attention_maps(model, batch) for model in models]
    classes = [name_classes(model, model(batch)) for model in models]
    return path, maps, classes


def write(folder, models, images, config=CONFIG):
    subjects = [report.PageModel(name, model, config) for name, model in models.items()]
    sections = report.analyze_sections(subjects, images)
    path = folder / "page.html"
    report.write_page(path, " and ".join(models), sections[0].finding, sections, "A footer.")
    return path


def show(tab, folder, *sections):
    path = folder / "page.html"
    footer = "Made by:\nisomorph compare a b"
    report.write_page(path, "Charts", "A finding.", sections, footer)
    tab.open(path)


def tile(layer, model, head):
    return f"[data-tile='{layer}-{model}-{head}']"


def canvas(layer, model, head):
    return tile(layer, model, head) + " canvas"


def texts(tab, selector):
    return tab.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
    )


def readout(tab):
    return tab.run("document.querySelector('.readout').textContent")


def number_after(pattern, text):
    return float(re.search(pattern + r" ?([\d.e-]+)", text)[1])


def at(position, grid=GRID):
    """The middle of a patch, as shares of height and width."""
    row, column = position
    height, width = grid
    return (row + 0.5) / height, (column + 0.5) / width


def colour_at(image, position):
    """The colour in the middle of a patch of a drawn map."""
    y, x = at(position)
    height, width, _ = image.shape
    return image[int(y * height), int(x * width)]


def assert_near(colour, table, first, last):
    """A colour is, but for 1 a channel, one of a range of a table."""
    candidates = table[max(0, first) : last + 1]
    distances = abs(candidates - colour).max(1)
    assert (distances <= 1).any()


def token(position):
    row, column = position
    return 2 + row * GRID[1] + column  # after a class token and a register


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
    height, width, *values = found
    image = np.array(values).reshape(height, width, 4)
    return image[..., :3].astype(int)


def choose(tab, name, i):
    tab.click(f"fieldset:has([name='{name}-0']) label:nth-child({i + 1})")


class TestAttention:
    def test_texts_stay_texts_and_the_page_asks_for_nothing(self, tab, page):
        path, _, _ = page
        tab.open(path)
        assert texts(tab, "h1") == [" and ".join(NAMES)]
        assert len(texts(tab, ".tile")) == 9  # three heads, twice, and the difference
        assert len(texts(tab, ".chart > svg")) >= 3
        assert texts(tab, "[src=x]") == []
        script = "Object.assign(document.createElement('script'), {textContent: 'window.bad = 1'})"
        tab.run(f"document.body.append({script})")
        assert tab.run("window.bad") is None
        outcome = tab.run("fetch('http://127.0.0.1:9/').then(() => 'went', () => 'refused')")
        assert outcome == "refused"
        tab.events.clear()  # the console says that both are refused

    def test_numbers_under_the_pointer_are_the_models(self, tab, page):
        """Of the image, layer and query that the mouse has chosen: a patch, or a token before the patches."""
        path, maps, classes = page
        tab.open(path)
        labels = texts(tab, "fieldset:has([name='Query-0']) label")
        assert labels == ["Patch", "Class token", "Register 1"]
        cases = (
            (1, 2, (3, 5), 0, 2, (0, 2)),
            (0, 0, "class token", 1, 0, (3, 1)),
            (1, 1, (0, 1), 1, 1, (2, 4)),
            (0, 1, "register 1", 0, 1, (0, 0)),
        )
        prefix_tokens = ["class token", "register 1"]
        for image, layer, query, model, head, key in cases:
            choose(tab, "Image", image)
            tab.click("[aria-label=Layer]", 0.5, 0.02 + 0.48 * layer)
            if query in prefix_tokens:
                index = prefix_tokens.index(query)
                choose(tab, "Query", 1 + index)
                place = query
            else:
                index = token(query)
                tab.click(".pick", *at(query))
                place = f"row {query[0] + 1}, column {query[1] + 1} of 4 {TIMES} 6 (pinned)"
            tab.hover(canvas(layer, model, head), *at(key))
            said = readout(tab)
            attends = f"Head {head + 1} attends to row {key[0] + 1}, column {key[1] + 1} with "
            assert said.startswith(f"From {place}. {attends}")

            rows = [maps_of[f"blocks.{layer}.attn"][image, head, index] for maps_of in maps]
            for row, name in zip(rows, NAMES, strict=True):
                shown = re.search(rf"([\d.e-]+) \({re.escape(name)}\)", said)
                assert abs(float(shown[1]) - row[token(key)]) <= level(row)
            row = rows[model]
            to_prefix = row[:2].sum().item()
            assert number_after(";", said) == pytest.approx(to_prefix, abs=2 * level(row))

            predictions = texts(tab, ".predictions p")
            for name, names, prediction in zip(NAMES, classes, predictions, strict=True):
                assert prediction == f"{name} predicts {names[image]}"
            tab.click(".pick", *at((1, 1)))  # unpins the patch, or pins one instead of the token
            assert tab.run("document.querySelector('[name=Query-0]').checked")
            tab.press("Escape")

    def test_maps_have_their_colours_and_differences_their_signs(self, tab, page, tmp_path):
        path, maps, _ = page
        tab.open(path)
        tab.click(tile(1, 1, 0))
        over = pixels(tab, ".pick")
        choose(tab, "Draw", 1)
        assert (over != pixels(tab, ".pick")).any()
        table = np.array(tab.run("COLOURS.sequential"))
        assert table[[0, 85, 255]].tolist() == [[0, 0, 4], [114, 31, 129], [252, 253, 191]]  # magma

        def rows_of(query):
            """What a query attends to, by model and head. Shape: -> (2, nh, H, W)"""
            rows = []
            for maps_of in maps:
                row = maps_of["blocks.1.attn"][0, :, token(query), 2:]
                rows.append(row.unflatten(1, GRID))
            return np.stack(rows)

        scales = (((0, 0), "largest in the map"), ((2, 1), "largest shown"))
        for shared, (query, end) in enumerate(scales):
            choose(tab, "Colour scale", shared)
            assert texts(tab, ".scale span") == ["0", end]
            tab.hover(".pick", *at(query))
            rows = rows_of(query)
            plain, gated = rows[:, 0]
            change = gated - plain
            plain_drawn, gated_drawn, change_drawn = (
                pixels(tab, canvas(1, model, 0)) for model in range(3)
            )
            selected = pixels(tab, ".pick")  # the map of the selected head, over the image
            for position in np.ndindex(*GRID):
                if position == query:
                    continue  # the frame is drawn there
                for row, image in ((plain, plain_drawn), (gated, gated_drawn), (gated, selected)):
                    largest = rows.max() if shared else row.max()
                    wanted = int(255 * row[position] / largest)
                    assert_near(colour_at(image, position), table, wanted - 1, wanted + 2)
                if abs(change[position]) > 0.1 * abs(change).max():
                    red, _, blue = colour_at(change_drawn, position)
                    assert (red > blue) == (change[position] > 0)  # red is more

        choose(tab, "Colours", 1)
        assert texts(tab, ".scale span")[0] == "up to largest / 255"
        image = pixels(tab, canvas(1, 0, 0))
        for position in np.ndindex(*GRID):
            if position == query:
                continue
            share = plain[position] / rows.max()
            if share > 0.1:  # where a level of the stored map is less than a step of the colours
                wanted = int(255 * (1 + np.log(share) / np.log(255)))
                assert_near(colour_at(image, position), table, wanted - 2, wanted + 3)
        choose(tab, "Colours", 0)

        tab.click(".pick", *at(query))  # pins
        name, text = tab.save("the attention maps as CSV", tmp_path / "csv")
        assert name == "img-src-x-onerror-alert-1-and-gated-tuned-attention.csv"
        saved = list(csv.DictReader(text.decode().splitlines()))
        assert {row["query"] for row in saved} == {f"row 3, column 2 of 4 {TIMES} 6"}
        assert {row["layer"] for row in saved} == {"blocks.1.attn"}
        last = [saved[-1][name] for name in ("model", "head", "row", "column")]
        assert last == [f"{NAMES[1]} minus {NAMES[0]}", "3", "4", "6"]
        values = np.array([float(row["attention"]) for row in saved])
        expected = np.stack([*rows, rows[1] - rows[0]])
        assert abs(values.reshape(expected.shape) - expected).max() <= 2 * level(rows)

        _, svg = tab.save("the attention maps as SVG", tmp_path / "svg")
        svg = svg.decode()
        assert svg.count("<image ") == 1 + 9
        assert "head 3" in svg
        _, png = tab.save("the attention maps as PNG", tmp_path / "png")
        image = Image.open(io.BytesIO(png))
        for drawn, side in zip(image.size, ("width", "height"), strict=True):
            wanted = number_after(rf'<svg [^>]*{side}="', svg)
            assert drawn == pytest.approx(3 * wanted, abs=3)
        assert np.asarray(image).std() > 10

        tab.click(tile(1, 2, 0))
        assert texts(tab, ".scale span")[0] == "negative"
        # RdBu
        assert pixels(tab, ".scale canvas")[0, [0, 255]].tolist() == [[5, 48, 97], [103, 0, 31]]

    def test_mouse_keys_and_touch(self, tab, page):
        path, _, _ = page
        tab.open(path)

        def place():
            pattern = rf"From row (\d), column (\d) of 4 {TIMES} 6( .pinned.)?"
            row, column, pinned = re.match(pattern, readout(tab)).groups()
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
            assert tab.run(pressed) == selected
            assert ("Head 3 of blocks.1.attn" in readout(tab)) == selected
            assert (pixels(tab, ".pick") != before).any() == selected
            tab.hover(tile(1, 0, 1))
            assert " attends to " in readout(tab)
            tab.hover("h1")
            assert " attends to " not in readout(tab)

        tab.run(f'document.querySelector("{tile(1, 1, 2)}").focus()')
        tab.press("Enter")
        assert tab.run(pressed)
        tab.run("document.querySelector('.pick').focus()")
        before = pixels(tab, canvas(1, 0, 0))
        seen = []
        for key in ("ArrowRight", "ArrowUp", "ArrowDown", "ArrowUp", "ArrowLeft"):
            tab.press(key)
            seen.append(place())
        # the border holds
        assert seen == [(1, 2, True), (1, 2, True), (2, 2, True), (1, 2, True), (1, 1, True)]
        assert (pixels(tab, canvas(1, 0, 0)) == before).all()
        tab.press("Escape")
        assert not tab.run(pressed)
        assert place() == (1, 1, False)

        for key, layer in (("[", "0"), ("[", "0"), ("]", "1"), ("]", "2"), ("]", "2")):
            tab.press(key)
            name = texts(tab, ".layer output")[0]
            assert name[7] == layer
            assert tab.run("document.querySelector('[type=range]').value") == layer

        tab.touch(".pick", at((0, 1)))
        assert place() == (1, 2, True)
        tab.touch(".pick", at((1, 3)))  # a finger pins each time
        assert place() == (2, 4, True)
        tab.touch(".pick", at((1, 3)), at((1, 4)), at((1, 5)))
        assert place() == (2, 6, True)

    def test_no_screen_overflows_and_schemes_differ(self, tab, page, tmp_path):
        path, _, _ = page
        for width, dark in ((1280, False), (768, True), (390, False)):
            tab.screen(width, 900, dark)
            tab.open(path)
            top, bottom = tab.run(
                "(b => [b.top, b.bottom])(document.querySelector('.lead').getBoundingClientRect())"
            )
            assert 0 < top < bottom < 450
            for choice, tiles in ((1, 27), (0, 9)):
                choose(tab, "Show", choice)
                assert len(texts(tab, ".tile")) == tiles
                widths = tab.run("[document.documentElement.scrollWidth, innerWidth]")
                assert widths == [width, width]
            picture = Image.open(tab.picture(tmp_path / "page.png"))
            colours = np.asarray(picture)[..., :3]
            corner = colours[2, 2]
            assert (corner.mean() < 60) == dark
            assert colours.reshape(-1, 3).std(0).max() > 10  # something is drawn

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
        grid = (10, 12)
        query = 8 * 12 + 5
        batch = normalise_images([image], config)
        windows = attention_windows(model, batch)[name]
        maps = windows.on_grid(iso.attention_maps(model, batch)[name])
        row = maps[0, 1, query]
        keys = windows.keys_of(query)
        first_key = keys[keys >= 0][0].item()
        tab.click(".pick", *at((8, 5), grid))
        for key in (first_key, query, 0):
            tab.hover(canvas(1, 0, 1), *at(divmod(key, 12), grid))
            shown = number_after("with", readout(tab))
            assert abs(shown - row[keys == key].sum()) <= level(row)
        outside = row[keys < 0].sum().item()
        assert number_after(";", readout(tab)) == pytest.approx(outside, abs=0.02)


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
        results = report.Section("Results", table=table)
        charts = report.Section("C", charts=self.CHARTS)
        show(tab, tmp_path, results, charts)
        assert texts(tab, ".reading") == [self.HINT, *[""] * 5]
        assert texts(tab, ".charts h3") == list(self.READINGS)
        scatter = texts(tab, ".chart > svg")[-1]
        for name in ("small", "large", "other"):
            assert name in scatter
        for number, (keys, expected) in enumerate(self.READINGS.values()):
            tab.run(
                f"document.querySelectorAll('.chart > svg')[{number}].focus({{preventScroll: true}})"
            )
            for key in keys:
                tab.press(key)
            assert texts(tab, ".reading")[number] == expected
        tab.hover(".charts .card .chart > svg", 0.5, 0.98)
        assert texts(tab, ".reading")[0] == "step 2: a, b 2 · c \N{EN DASH}"
        command = "isomorph compare a b"
        for setting, told, selected in (
            ("denied", "Selected: press Ctrl+C or \N{PLACE OF INTEREST SIGN}C", command),
            ("granted", "Copied", ""),
        ):
            tab.run("getSelection().removeAllRanges()")
            tab.send(
                "Browser.setPermission", permission={"name": "clipboard-write"}, setting=setting
            )
            tab.click("#command + .save button")
            tab.wait(f"document.querySelector('#command + .save button').textContent === '{told}'")
            assert tab.run("getSelection().toString()") == selected
        tab.send("Browser.setPermission", permission={"name": "clipboard-read"}, setting="granted")
        assert tab.run("navigator.clipboard.readText()") == command

        for title, text in self.FILES.items():
            name, data = tab.save(f"{title} as CSV", tmp_path / f"{title}-csv")
            assert name == f"charts-{title.lower()}.csv"
            assert data.decode() == text
            _, data = tab.save(f"{title} as SVG", tmp_path / f"{title}-svg")
            svg = data.decode()
            assert svg.startswith("<svg")
            assert title in svg
            assert "var(" not in svg
        _, data = tab.save("Loss as PNG", tmp_path / "png")
        assert data.startswith(b"\x89PNG")
        _, data = tab.save("all numbers as JSON", tmp_path / "json")
        page = json.loads(data)
        assert [section["title"] for section in page["sections"]] == ["Results", "C"]
        assert page["sections"][0]["table"] == table
        assert [chart["title"] for chart in page["charts"]] == list(self.READINGS)
