"""The report's pages in a real browser: what is drawn is what the model computes, by pointer, key and touch."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import isomorph as iso
from browser import find_chromium, open_tab
from isomorph.analysis import attention_windows
from isomorph.report import (
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
    read_run_logs,
    write_page,
)
from isomorph.report.attention_viewer import ViewerModel, build_viewer, capture_layer_maps
from isomorph.report.charts import Paths, Scatter
from isomorph.report.html import Details, colour_table
from isomorph.report.page_images import normalise_images
from isomorph.report.page_models import class_logits, name_classes
from test_report import small_vit, write_run

TIMES = "\N{MULTIPLICATION SIGN}"
NAMES = ("<img src=x onerror=alert(1)>", "gated & tuned")
CONFIG = {"input_size": (3, 32, 48), "mean": (0.5,) * 3, "std": (0.25,) * 3}
CONFIG |= {"crop_pct": 1.0, "crop_mode": "center", "interpolation": "bicubic"}
GRID = (4, 6)


@pytest.fixture(scope="module")
def tab():
    with open_tab() as tab:
        yield tab


@pytest.fixture(autouse=True)
def fresh(request):
    """A wide light screen, no complaint so far; and none at the end of the test."""
    if "tab" not in request.fixturenames:
        yield
        return
    tab = request.getfixturevalue("tab")
    tab.screen(1280, 900)
    tab.events.clear()
    yield
    assert tab.complaints() == []


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a small ViT and its recast on two wide pictures, and the maps that it is to show."""
    torch.manual_seed(0)
    vit = small_vit()
    for block in vit.blocks:
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.4)  # attention that is far from uniform
    models = [vit, iso.recast(vit, iso.AttentionToGPSA(init="paper", grid_size=None), "blocks.[01].attn")]
    pictures = [PageImage(f"picture {i}", torch.rand(3, *CONFIG["input_size"][1:])) for i in range(2)]
    sections = analyze_sections([PageModel(n, m, CONFIG) for n, m in zip(NAMES, models, strict=True)], pictures)
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(path, " and ".join(NAMES), "A lead.", sections, "A footer.")
    batch = normalise_images(pictures, CONFIG)
    return path, [iso.attention_maps(model, batch) for model in models]


def tile(layer, model, head):
    return f"[data-tile='{layer}-{model}-{head}']"


def readout(tab):
    return tab.run("document.querySelector('.readout').textContent")


def at(place, grid=GRID):
    """The middle of a patch, as shares of height and width."""
    return (place[0] + 0.5) / grid[0], (place[1] + 0.5) / grid[1]


def token(place):
    return 1 + place[0] * GRID[1] + place[1]


def level(maps, query):
    """Half a level of the row: what rounding may change; and four digits of the read-out."""
    return maps[..., query, :].max().item() / 510 + 5e-4 * maps.max().item()


def pixels(tab, selector):
    """The colours of a canvas. Shape: -> (H, W, 3)"""
    found = tab.run(
        "(c => { const copy = new OffscreenCanvas(c.width, c.height).getContext('2d', {willReadFrequently: true});"
        "copy.drawImage(c, 0, 0); return [c.height, c.width, ...copy.getImageData(0, 0, c.width, c.height).data]; })"
        f"(document.querySelector({json.dumps(selector)}))"
    )
    return np.array(found[2:]).reshape(found[0], found[1], 4)[..., :3]


def choose(tab, name, i):
    tab.run(f"document.querySelectorAll('[name=\"{name}-0\"]')[{i}].click()")
    tab.settle()


class TestAttention:
    def test_it_loads_without_complaint_and_asks_for_nothing(self, tab, page):
        tab.open(page[0])
        assert tab.run("document.querySelector('h1').textContent") == " and ".join(NAMES)
        assert tab.run("document.querySelectorAll('[src=x]').length") == 0
        assert tab.run("document.querySelectorAll('.tile').length") == 9  # three heads, twice, and the difference
        assert tab.run("document.querySelectorAll('.chart > svg').length") >= 3
        assert readout(tab).startswith(f"From row 3, column 4 of 4 {TIMES} 6")

    def test_the_policy_forbids_other_scripts_and_the_network(self, tab, page):
        tab.open(page[0])
        tab.run(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.bad = 1'}))"
        )
        assert tab.run("window.bad") is None
        assert tab.run("fetch('http://127.0.0.1:9/').then(() => 'went', () => 'refused')") == "refused"
        tab.events.clear()  # both refusals are said in the console, as they should be

    def test_numbers_under_the_pointer_are_the_models(self, tab, page):
        tab.open(page[0])
        draw = np.random.default_rng(0)
        for _ in range(6):
            query, key = (tuple(int(draw.integers(n)) for n in GRID) for _ in range(2))
            head, model = int(draw.integers(3)), int(draw.integers(2))
            tab.click(".pick", *at(query))
            tab.hover(tile(1, model, head) + " canvas", *at(key))
            said = readout(tab)
            assert f"From row {query[0] + 1}, column {query[1] + 1}" in said
            assert f"Head {head + 1} attends to row {key[0] + 1}, column {key[1] + 1} with" in said
            for maps, name in zip(page[1], NAMES, strict=True):
                expected = maps["blocks.1.attn"][0, head]
                shown = float(re.search(rf"([\d.e-]+) \({re.escape(name)}\)", said)[1])
                assert abs(shown - expected[token(query), token(key)]) <= level(expected, token(query))
            tab.press("Escape")
            tab.click(".pick", *at(query))  # and let go of the patch

    def test_hovering_draws_the_map_of_that_patch(self, tab, page):
        tab.open(page[0])
        choose(tab, "Draw", 1)
        table = np.array(list(bytes.fromhex(colour_table("magma")))).reshape(256, 3)
        seen = []
        for query in ((0, 0), (3, 5), (1, 2)):
            tab.hover(".pick", *at(query))
            for model in range(2):
                drawn = pixels(tab, tile(1, model, 0) + " canvas")
                row = page[1][model]["blocks.1.attn"][0, 0, token(query)]
                places = row[1:].unflatten(0, GRID).numpy()
                for r, c in np.ndindex(*GRID):
                    if (r, c) == query:
                        continue  # the box is drawn there
                    y, x = (int(share * size) for share, size in zip(at((r, c)), drawn.shape, strict=False))
                    wanted = 255 * places[r, c] / places.max()
                    around = table[max(0, int(wanted) - 1) : int(wanted) + 3]
                    assert (abs(around - drawn[y, x]).max(1) <= 1).any(), (query, model, r, c)
                seen.append(drawn)
        assert len({image.tobytes() for image in seen}) == len(seen)

    def test_the_difference_is_the_second_minus_the_first(self, tab, page):
        tab.open(page[0])
        choose(tab, "Draw", 1)
        tab.hover(".pick", *at((2, 1)))
        drawn = pixels(tab, tile(1, 2, 1) + " canvas").astype(int)
        first, second = (maps["blocks.1.attn"][0, 1, token((2, 1)), 1:].unflatten(0, GRID) for maps in page[1])
        change = (second - first).numpy()
        for r, c in np.ndindex(*GRID):
            y, x = (int(share * size) for share, size in zip(at((r, c)), drawn.shape, strict=False))
            if (r, c) != (2, 1) and abs(change[r, c]) > 0.1 * abs(change).max():
                assert (drawn[y, x, 0] > drawn[y, x, 2]) == (change[r, c] > 0)  # red is more, blue is less

    def test_keys_move_the_patch_and_change_the_layer(self, tab, page):
        tab.open(page[0])
        tab.run("document.querySelector('.pick').focus()")
        before = pixels(tab, tile(1, 0, 0) + " canvas")
        places = []
        for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowUp"):
            tab.press(key)
            places.append(tuple(map(int, re.match(r"From row (\d), column (\d)", readout(tab)).groups())))
        assert places == [(3, 5), (4, 5), (4, 5), (4, 4), (3, 4)]  # the edge holds
        assert (pixels(tab, tile(1, 0, 0) + " canvas") == before).all()
        tab.press("]")
        assert "blocks.2.attn" in tab.run("document.querySelector('.layer output').textContent")
        assert tab.run(f'!!document.querySelector("{tile(2, 0, 0)}")')

    def test_tab_reaches_every_control_and_focus_shows(self, tab, page):
        tab.open(page[0])
        reached = []
        for _ in range(40):
            tab.press("Tab")
            focus = "document.activeElement"
            reached.append(tab.run(f"{focus}.className || {focus}.type || {focus}.tagName"))
            outlined = f"[{focus}, {focus}.parentElement].some(e => getComputedStyle(e).outlineStyle !== 'none')"
            assert reached[-1] == "BODY" or tab.run(outlined), reached[-1]  # from the last one to the first
        assert {"pick", "range", "radio", "tile", "svg"} <= {str(name).lower() if name else "svg" for name in reached}
        tab.run(f'document.querySelector("{tile(1, 1, 2)}").focus()')
        tab.press("Enter")
        assert tab.run(f"document.querySelector(\"{tile(1, 1, 2)}\").getAttribute('aria-pressed')") == "true"
        assert "Head 3 of blocks.1.attn" in readout(tab)

    def test_the_class_token_looks_too_and_images_change(self, tab, page):
        tab.open(page[0])
        choose(tab, "Query", 1)
        choose(tab, "Image", 1)
        tab.hover(tile(1, 0, 2) + " canvas", *at((1, 4)))
        said = readout(tab)
        assert "From the class token" in said
        row = page[1][0]["blocks.1.attn"][1, 2]
        shown = float(re.search(r"with ([\d.e-]+)", said)[1])
        assert abs(shown - row[0, token((1, 4))]) <= level(row, 0)
        kept = float(re.search(r"; ([\d.e-]+) goes to class", said)[1])
        assert abs(kept - row[0, 0]) <= level(row, 0) + 5e-3 * row[0, 0]

    def test_all_layers_at_once(self, tab, page):
        tab.open(page[0])
        choose(tab, "Show", 1)
        assert tab.run("document.querySelectorAll('.tile').length") == 27
        tab.click(tile(2, 1, 0))
        assert "blocks.2.attn" in tab.run("document.querySelector('.layer output').textContent")

    def test_every_picture_and_word_has_a_name_for_those_who_do_not_see(self, tab, page):
        tab.open(page[0])
        nameless = (
            "[...document.querySelectorAll('button, [tabindex], input')].filter(e => !(e.getAttribute('aria-label') "
        )
        nameless += "|| e.closest('label') || e.textContent.trim())).map(e => e.outerHTML.slice(0, 80))"
        assert tab.run(nameless) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (768, 1024), (390, 844)])
def test_no_screen_overflows_and_schemes_differ(tab, page, tmp_path, dark, width, height):
    tab.screen(width, height, dark, touch=width < 800)
    tab.open(page[0])
    for i in (0, 1):
        choose(tab, "Show", i)
        assert tab.run("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
    choose(tab, "Show", 0)
    shot = np.asarray(Image.open(tab.picture(tmp_path / f"analyze-{'dark' if dark else 'light'}-{width}.png")))
    assert shot.shape[1] == width
    assert (shot[2, 2, :3].mean() < 60) == dark
    assert shot[..., :3].reshape(-1, 3).std(0).max() > 10  # something is drawn


def test_touch_moves_the_patch(tab, page):
    tab.screen(390, 844, touch=True)
    tab.open(page[0])
    before = pixels(tab, tile(1, 0, 0) + " canvas")
    tab.tap(".pick", *at((0, 5)))
    assert readout(tab).startswith(f"From row 1, column 6 of 4 {TIMES} 6")
    assert (pixels(tab, tile(1, 0, 0) + " canvas") != before).any()


def test_strides_padding_and_stages_of_a_t_cnn(tab, tmp_path):
    """Queries on a coarser grid than keys, keys that are padding, layers with other grids; beside its CNN."""
    import timm

    cnn = timm.create_model("cifar_resnet20").eval()
    tcnn = iso.recast(cnn, iso.ConvToGPSA("paper"), "layer3.0.conv?")
    config = CONFIG | {"input_size": (3, 40, 32)}
    pictures = [PageImage("x", torch.rand(3, 40, 32))]
    sections = analyze_sections([PageModel("T-CNN", tcnn, config), PageModel("CNN", cnn, config)], pictures)
    write_page(tmp_path / "page.html", "T-CNN", "", sections)
    tab.open(tmp_path / "page.html")
    assert "CNN has no attention map in this layer" in tab.run("document.body.textContent")
    tab.run("document.querySelector('[type=range]').value = 0")
    tab.run("document.querySelector('[type=range]').dispatchEvent(new Event('input'))")
    tab.settle()
    maps = iso.attention_maps(tcnn, normalise_images(pictures, config))["layer3.0.conv1"]
    assert maps.shape == (1, 9, 10 * 8, (20 + 2) * (16 + 2))
    row = maps[0, 4, 3 * 8 + 6]
    places = row.unflatten(0, (22, 18))[1:-1, 1:-1]
    tab.click(".pick", *at((3, 6), (10, 8)))
    tab.hover(tile(0, 0, 4) + " canvas", *at((7, 12), (20, 16)))
    said = readout(tab)
    assert f"From row 4, column 7 of 10 {TIMES} 8" in said
    assert "attends to row 8, column 13" in said
    shown = float(re.search(r"with ([\d.e-]+)", said)[1])
    assert abs(shown - places[7, 12]) <= row.max() / 510 + 1e-3 * row.max()
    padding = float(re.search(r"; ([\d.e-]+) goes to the padding", said)[1])
    assert abs(padding - (1 - places.sum())) < 0.02


def test_without_maps_the_page_shows_pictures_and_answers(tab, tmp_path):
    import timm

    cnn = timm.create_model("cifar_resnet20").eval()
    pictures = [PageImage(name, torch.rand(3, 40, 32)) for name in ("x.png", "y.png")]
    sections = analyze_sections([PageModel("CNN", cnn, CONFIG | {"input_size": (3, 40, 32)})], pictures)
    write_page(tmp_path / "page.html", "CNN", "", sections)
    tab.open(tmp_path / "page.html")
    tab.picture(tmp_path / "cnn-light.png")
    assert tab.run("[...document.images].every(image => image.naturalHeight === 40 && image.naturalWidth === 32)")
    said = tab.run("[...document.querySelectorAll('figcaption')].map(e => e.textContent)")
    answers = name_classes(cnn, class_logits(cnn, normalise_images(pictures, CONFIG)))
    assert said == [f"{p.name}{answer}" for p, answer in zip(pictures, answers, strict=True)]


def test_windows_lie_where_they_are_in_the_image(tab, tmp_path):
    """A shifted layer of a Swin, on a grid that its windows do not fill."""
    import timm

    arguments = dict(img_size=(40, 48), window_size=4, embed_dim=8, depths=(2,), num_heads=(2,), num_classes=2)
    model = timm.create_model("swin_tiny_patch4_window7_224", **arguments).eval()
    config = CONFIG | {"input_size": (3, 40, 48)}
    picture = PageImage("x", torch.rand(3, 40, 48))
    write_page(tmp_path / "page.html", "Swin", "", analyze_sections([PageModel("Swin", model, config)], [picture]))
    tab.open(tmp_path / "page.html")
    name = "layers.0.blocks.1.attn"
    batch, place = normalise_images([picture], config), 8 * 12 + 5
    windows = attention_windows(model, batch)[name]
    maps, keys = windows.on_grid(iso.attention_maps(model, batch)[name])[0, 1, place], windows.keys_of(place)
    tab.click(".pick", *at((8, 5), (10, 12)))
    for key in (keys[keys >= 0][0].item(), place, 0):
        tab.hover(tile(1, 0, 1) + " canvas", *at(divmod(key, 12), (10, 12)))
        shown = float(re.search(r"with ([\d.e-]+)", readout(tab))[1])
        assert abs(shown - maps[keys == key].sum()) <= maps.max() / 510 + 1e-3 * maps.max()
    padding = float(re.search(r"; ([\d.e-]+) goes to the padding", readout(tab))[1])
    assert padding == pytest.approx(maps[keys < 0].sum().item(), abs=0.02)


def test_layers_that_are_not_drawn_are_folded_away(tab, tmp_path):
    section = Section("Attention", "None.", details=Details("2 layers", ["a, b: windows.", "c: unknown."]))
    write_page(tmp_path / "page.html", "Swin", "", [section])
    tab.open(tmp_path / "page.html")
    assert not tab.run("document.querySelector('details').open")
    assert tab.run("[...document.querySelectorAll('details li')].map(e => e.textContent)") == section.details.lines


def test_thinned_maps_show_a_query_that_is_kept(tab, tmp_path):
    model, pictures = small_vit(), [PageImage("x", torch.rand(3, 32, 48))]
    batch = normalise_images(pictures, CONFIG)
    viewer = build_viewer([ViewerModel("ViT", capture_layer_maps(model, batch)[0])], pictures, max_map_characters=4000)
    assert viewer.data["step"] != (1, 1)
    write_page(tmp_path / "page.html", "ViT", "", [Section("Attention", viewer.note, viewer=viewer)])
    tab.open(tmp_path / "page.html")
    tab.click(".pick", 0.05, 0.05)
    tab.hover(tile(1, 0, 0) + " canvas", *at((2, 2)))
    said = readout(tab)
    query = tuple(int(n) - 1 for n in re.match(r"From row (\d), column (\d)", said).groups())
    row = iso.attention_maps(model, batch)["blocks.1.attn"][0, 0]
    assert token(query) in next(iter(capture_layer_maps(model, batch)[0].values())).stored_queries(viewer.data["step"])
    assert abs(float(re.search(r"with ([\d.e-]+)", said)[1]) - row[token(query), token((2, 2))]) <= level(
        row, token(query)
    )


def test_charts_read_out_their_numbers(tab, tmp_path):
    logs = read_run_logs([write_run(tmp_path / "a"), write_run(tmp_path / "b", 0.2)])
    charts = [
        Bars("Robustness", "%", {"a": {"fog": 41.5, "snow": 12.0}, "b": {"fog": 40.0}}),
        Dots("Gates", "sigma", {"a": {"l.0.x": [0.25, 0.5], "l.1.x": [0.75]}}, 1.0),
        Paths("Centres", {"l.0": [[(0.0, 1.0), (0.5, 1.25)], [(1.0, 0.0), (2.0, -1.0)]], "l.1": [[(1.0, 1.0)]]}),
        Matrix("CKA", "a", "b", ["r1", "r2"], ["c1", "c2"], [[1.0, 0.25], [0.5, 0.125]]),
        Scatter(
            "Cost", "GMACs", "%", {"d": {"small": (1.0, 80.0), "large": (4.2, 81.5)}, "e": {"other": (1.05, 80.1)}}
        ),
    ]
    write_page(tmp_path / "page.html", "Runs", "", [*compare_sections(logs), Section("More", charts=charts)])
    tab.open(tmp_path / "page.html")
    tab.picture(tmp_path / "compare-light.png")
    titles = tab.run("[...document.querySelectorAll('.charts h3')].map(e => e.textContent)")

    def reading(title, *keys):
        number = titles.index(title)
        tab.run(f"document.querySelectorAll('.chart > svg')[{number}].focus({{preventScroll: true}})")
        for key in keys:
            tab.press(key)
        return tab.run(f"document.querySelectorAll('.reading')[{number}].textContent")

    assert reading("Top-1", "ArrowRight", "ArrowRight") == "epoch 2: a 20 · b 20"
    assert reading("Robustness", "ArrowDown") == "fog: a 41.5 · b 40 (%)"
    assert reading("Gates", "ArrowRight") == "l.0.x: a 0.25, 0.5"
    assert reading("Centres", "ArrowRight", "ArrowRight") == "l.0, head 2: first 1, 0 · last 2, -1"
    assert reading("CKA", "ArrowRight", "ArrowDown", "ArrowRight") == f"r2 {TIMES} c2: 0.125"
    assert reading("Cost", "ArrowRight", "ArrowRight") == "large, d: GMACs 4.2 · % 81.5"
    written = tab.run("[...document.querySelectorAll('.chart > svg')].at(-1).textContent")
    assert all(name in written for name in ("small", "large", "other"))
    tab.hover(f".card:nth-child({titles.index('Top-1') + 1}) .chart > svg", 0.5, 0.98)
    top = f"document.querySelectorAll('.reading')[{titles.index('Top-1')}].textContent"
    assert tab.run(top).startswith("epoch 3: a 30")
    tab.screen(390, 844, touch=True)
    tab.open(tmp_path / "page.html")
    assert tab.run("[document.documentElement.scrollWidth, innerWidth]") == [390, 390]


def test_without_a_browser_it_is_said_and_fails_on_ci(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="make browser"):
        find_chromium()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI must have it"):
        find_chromium()


def texts(tab, number, style=""):
    """What a chart writes, in its order: all, or what has a certain size of letters."""
    found = f"document.querySelectorAll('.chart > svg')[{number}].querySelectorAll('text{style}')"
    return tab.run(f"[...{found}].map(e => e.textContent)")


def test_numbers_of_a_chart_have_the_same_decimals(tab, tmp_path):
    charts = [
        Bars("Top-1", "%", {"a": {"fog": 35.0, "snow": 5.218}, "b": {"fog": 35.2}}),
        Bars("Counts", "", {"a": {"x": 1234.0, "y": 7.0}}),
        Matrix("Gained", "a", "b", ["r"], ["c", "d", "e"], [[-12.34, 0.5, np.nan]], -20.0, 20.0),
        Matrix("CKA", "a", "b", ["r"], ["c", "d"], [[1.0, 0.25]]),
        Panel("Small", "step", "loss", {"a": Line([0, 1, 2], [0.0005, 0.0015, 0.001])}),
        Panel("Tiny", "step", "loss", {"a": Line([0.0, 0.5, 1.0], [0.0, 4e-5, 2e-5])}),
    ]
    write_page(tmp_path / "page.html", "Numbers", "", [Section("Charts", charts=charts)])
    tab.open(tmp_path / "page.html")
    assert texts(tab, 0, '[style*="9.5px"]') == ["35.0", "35.2", "5.2"]
    assert texts(tab, 1, '[style*="9.5px"]') == ["1234", "7"]
    assert texts(tab, 2, '[style*="10px"]') == ["-12.3", "0.5", ""]
    assert texts(tab, 3, '[style*="10px"]') == ["1.00", "0.25"]
    small = texts(tab, 4)
    assert small[: small.index("loss")] == ["0.0005", "0.0010", "0.0015"]
    assert small[small.index("loss") + 1 :] == ["0", "1", "2", "step"]
    tiny = texts(tab, 5)
    assert tiny[: tiny.index("loss")] == ["0", "2e-5", "4e-5"]
    assert tiny[tiny.index("loss") + 1 :] == ["0.0", "0.5", "1.0", "step"]


def test_the_hint_is_below_the_first_chart_only(tab, tmp_path):
    charts = [Bars(name, "%", {"a": {"fog": 1.0}}) for name in "xyz"]
    sections = [Section("One", charts=charts[:1]), Section("Two", charts=charts[1:])]
    write_page(tmp_path / "page.html", "Hints", "", sections)
    tab.open(tmp_path / "page.html")
    said = tab.run("[...document.querySelectorAll('.reading')].map(e => e.textContent)")
    assert said == ["Point at the chart or use the arrow keys to read values.", "", ""]
    labels = tab.run("[...document.querySelectorAll('.chart > svg')].map(e => e.getAttribute('aria-label'))")
    assert labels == [f"{name}. {said[0]}" for name in "xyz"]


def test_all_layers_leave_a_model_without_maps_out(tab, tmp_path):
    pictures = [PageImage("x", torch.rand(3, 32, 48))]
    found, _ = capture_layer_maps(small_vit(), normalise_images(pictures, CONFIG))
    viewer = build_viewer([ViewerModel("CNN", {}), ViewerModel("ViT", found)], pictures)
    write_page(tmp_path / "page.html", "Both", "", [Section("Attention", viewer=viewer)])
    tab.open(tmp_path / "page.html")
    headings = "[...document.querySelectorAll('.heads h3')].map(e => e.textContent)"
    assert tab.run(headings) == ["CNN", "ViT"]
    choose(tab, "Show", 1)
    tab.settle()
    assert tab.run(headings) == ["ViT"]
    assert "CNN has no attention maps to draw." in tab.run("document.querySelector('.heads').textContent")
    width = "document.querySelector('{}').getBoundingClientRect().width"
    assert tab.run(width.format(".heads .row")) == tab.run(width.format(".heads"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_wide_tables_show_that_they_go_on(tab, tmp_path, dark):
    chart = Bars("Wide", "%", {f"a longer name {i}": {"fog": 1.0, "snow": 2.0} for i in range(4)})
    write_page(tmp_path / "page.html", "Wide", "", [Section("Table", charts=[chart])])

    def edges(scrolled):
        """How far the colours at the left and the right edge of the table are from its middle's, above its text."""
        tab.run(f"document.querySelector('.wide').scrollLeft = {scrolled}")
        tab.settle()
        left, top, width = tab.run(
            "(b => [b.left, b.top + scrollY, b.width])(document.querySelector('.wide').getBoundingClientRect())"
        )
        seen = np.asarray(Image.open(tab.picture(tmp_path / "shot.png")))[..., :3].astype(int)
        line = seen[int(top) + 3, [int(left) + 4, int(left + width / 2), int(left + width) - 5]]
        return [abs(line[i] - line[1]).max() > 8 for i in (0, 2)]

    tab.screen(390, 844, dark)
    tab.open(tmp_path / "page.html")
    tab.run("document.querySelector('details').open = true")
    assert [edges(at) for at in (0, 60, 10_000)] == [[False, True], [True, True], [True, False]]
    tab.screen(1280, 900, dark)
    tab.open(tmp_path / "page.html")
    tab.run("document.querySelector('details').open = true")
    assert edges(0) == [False, False]
