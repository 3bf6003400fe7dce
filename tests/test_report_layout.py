"""Pages in a browser: axes, equal maps, narrow screens, and what can be saved."""

import base64
import json
import re

import pytest
import torch

import isomorph as iso
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
from isomorph.report.charts import Paths, Scatter
from test_report import small_vit, write_run
from test_report_browser import CONFIG, choose, fresh, pixels, tab  # noqa: F401 (fixtures)

CHARTS = [
    Panel("Loss", "step", "loss", {"a, b": Line([1, 2], [3.0, 2.0], [2.5, 1.5], [3.5, 2.5]), "c": Line([1], [1.0])}),
    Dots("Gates", "sigma", {"a": {"x": [0.25, 0.5], "y": [0.75]}}, 1.0),
    Bars("Top-1", "%", {"a": {"fog": 41.5, "snow": 12.0}, "b": {"fog": 40.0}}),
    Matrix("CKA", "r", "c", ["r1"], ["c1", "c2"], [[1.0, 0.25]]),
    Paths("Centres", {"l": [[(0.0, 1.0), (0.5, 1.25)]]}),
    Scatter("Cost", "GMACs", "%", {"d": {"small": (1.0, 80.0), "large": (4.2, 81.5)}}),
]


@pytest.fixture(scope="module")
def equal_page(tmp_path_factory):
    """The page of a small ViT and of its exact recast, on two images."""
    torch.manual_seed(0)
    vit = small_vit()
    for block in vit.blocks:
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.2)
    gated = iso.recast(vit, iso.AttentionToGPSA(grid_size=None), "blocks.*.attn").eval()
    images = [PageImage(name, torch.rand(3, 32, 48)) for name in "ab"]
    sections = analyze_sections([PageModel("ViT", vit, CONFIG), PageModel("gated", gated, CONFIG)], images)
    path = tmp_path_factory.mktemp("equal") / "page.html"
    write_page(path, "ViT and gated", sections[0].finding, sections)
    return path


@pytest.fixture
def charts_page(tab, tmp_path):  # noqa: F811
    table = [["", "best top-1 (%)", "NLL"], ["run", "93.11", "0.2"], ["other", "92.00", "0.3"]]
    write_page(
        tmp_path / "page.html", "Charts", "A finding.", [Section("Results", table=table), Section("C", charts=CHARTS)]
    )
    tab.open(tmp_path / "page.html")
    return tab


class TestAxes:
    RANGES = [
        (0, 8.7),
        (8.4, 8.7),
        (0, 17),
        (0, 5.1),
        (0, 1),
        (-3, 0.2),
        (2.8317, 2.8332),
        (0, 8e-6),
        (-1.1, 1.1),
        (9.9, 20.1),
    ]

    def test_the_data_fill_the_axis_and_three_ticks_lie_inside(self, charts_page):
        for low, high in self.RANGES:
            for count in (2, 4, 8):
                ticks = charts_page.run(f"axisTicks({low}, {high}, {count})")
                assert ticks[0] <= low + 1e-12 <= high <= ticks[-1] + 1e-12
                assert (high - low) / (ticks[-1] - ticks[0]) >= 0.7, (low, high, ticks)
                assert sum(low - 1e-12 <= tick <= high + 1e-12 for tick in ticks) >= 3, (low, high, ticks)
                assert len(ticks) <= 24

    def test_ticks_are_multiples_of_a_round_step(self, charts_page):
        assert charts_page.run("axisTicks(0, 8.7, 4)") == [0, 2, 4, 6, 8, 10]
        assert charts_page.run("axisTicks(0, 1, 4)") == [0, 0.5, 1]
        assert charts_page.run("axisTicks(8.4, 8.7, 4)") == [8.4, 8.5, 8.6, 8.7]

    def test_a_range_of_rounding_is_widened_in_proportion(self, charts_page):
        for values, expected in (([8.7, 8.7000001], [7.83, 9.57]), ([0, 0], [-0.5, 0.5]), ([1, 3], [1, 3])):
            drawing = Panel("t", "x", "y", {"a": Line([0, 1], values)}).drawing()
            assert drawing["y"]["range"] == pytest.approx(expected, rel=1e-6)
        assert Panel("t", "x", "y", {"a": Line([0], [float("nan")])}).drawing()["y"]["range"] == [0, 1]

    @pytest.mark.parametrize(
        ("name", "lines"),
        [
            ("gaussian_noise", ["gaussian_", "noise"]),
            ("fog", ["fog"]),
            ("gain, % of baseline", ["gain, % of", "baseline"]),
        ],
    )
    def test_long_names_are_wrapped_and_never_cut(self, charts_page, name, lines):
        assert charts_page.run(f"wrapName({json.dumps(name)}, 10)") == lines


class TestEqualMaps:
    def test_they_are_a_line_of_text(self, tab, equal_page):  # noqa: F811
        tab.open(equal_page)
        rows = "[...document.querySelectorAll('.row')].map(row => row.querySelectorAll('.tile').length)"
        assert tab.run(rows) == [3, 3, 0]
        assert re.search(
            r"Equal within 1e-[56] in all 3 heads\.", tab.run("document.querySelector('.heads').textContent")
        )
        choose(tab, "Show", 1)
        assert tab.run(rows) == [9, 9, 0]
        assert re.search(
            r"Equal within 1e-[56] in all 9 heads\.", tab.run("document.querySelector('.heads').textContent")
        )

    def test_an_equal_head_is_grey_where_another_differs(self, tab, tmp_path):  # noqa: F811
        torch.manual_seed(0)
        vit = small_vit(depth=1)
        other = small_vit(depth=1)
        other.load_state_dict(vit.state_dict())
        with torch.no_grad():
            other.blocks[0].attn.qkv.weight[:8] *= 40  # the queries of head 1
        images = [PageImage("x", torch.rand(3, 32, 48))]
        sections = analyze_sections([PageModel("a", vit, CONFIG), PageModel("b", other, CONFIG)], images)
        assert "differ in 1 of 3 heads, most in blocks.0.attn, head 1" in sections[0].finding
        write_page(tmp_path / "page.html", "t", "", sections)
        tab.open(tmp_path / "page.html")
        choose(tab, "Draw", 1)
        captions = tab.run("[...document.querySelectorAll('[data-tile^=\"0-2-\"] i')].map(e => e.textContent)")
        assert captions[0].startswith("\N{PLUS-MINUS SIGN} ")
        assert captions[1:] == ["equal", "equal"]
        corners = [pixels(tab, f"[data-tile='0-2-{head}'] canvas")[2, 2] for head in range(3)]
        assert [corner.tolist() == [140] * 3 for corner in corners] == [False, True, True]
        assert "no visible difference" in tab.run("document.querySelector('.key').textContent")

    def test_the_bound_is_the_tightest_that_holds(self, charts_page):
        found = charts_page.run(
            "[[0, 5e-7], [2e-6, 0], [2e-5]].map(values => equalBound(values, [1e-6, 1e-5]) ?? null)"
        )
        assert found == [1e-6, 1e-5, None]
        assert charts_page.run("allDifferences([{differences: [[1, 2], [3, 4]]}, {differences: null}])") is None

    def test_differences_below_the_rounding_are_grey(self, charts_page):
        row = "({values: new Float32Array([%s]), geometry: {keys: [1, 3], prefix: 0}, rounding: %g})"
        found = charts_page.run(
            f"(row => [row.floor, differenceText(row, 0.01), differenceText({{...row, floor: Infinity}}, 1e-7)])"
            f"(subtractRows({row % ('0.5, 0.25, 0', 0.02)}, {row % ('0.5, 0.26, 0', 0.02)}))"
        )
        assert found == [pytest.approx(0.04), "\N{LESS-THAN OR EQUAL TO} 0.010", "equal"]

    def test_headings_of_all_layers_are_on_one_line(self, tab, equal_page):  # noqa: F811
        tab.open(equal_page)
        choose(tab, "Show", 1)
        tops = "[...document.querySelectorAll('.row .body')].map(e => e.getBoundingClientRect().top)"
        names = "document.querySelectorAll('.row h3')[2].lastChild.textContent = 'a long name '.repeat(9)"
        tab.run(names)
        assert len(set(tab.run(tops))) == 1

    def test_predictions_are_a_line_for_each_model(self, tab, equal_page):  # noqa: F811
        tab.open(equal_page)
        lines = tab.run("[...document.querySelectorAll('.predictions p')].map(e => e.textContent)")
        assert [line.split(" class ")[0] for line in lines] == ["ViT predicts", "gated predicts"]


class TestNarrowScreens:
    def visible(self, tab, selector):  # noqa: F811
        """Texts of elements, and whether each lies within the width of the screen."""
        boxes = f"[...document.querySelectorAll('{selector}')].map(e => [e.textContent, e.getBoundingClientRect()])"
        return tab.run(f"{boxes}.map(([text, b]) => [text, b.width > 0 && b.left >= 0 && b.right <= innerWidth])")

    def test_every_number_of_a_table_shows_with_its_column(self, tab, tmp_path):  # noqa: F811
        logs = read_run_logs([write_run(tmp_path / name, lr) for name, lr in (("run-a", 0.1), ("run-b", 0.2))])
        sections = compare_sections(logs)
        write_page(tmp_path / "page.html", "Runs", sections[0].finding, sections)
        tab.screen(390, 844, touch=True)
        tab.open(tmp_path / "page.html")
        cells = self.visible(tab, "#s0 tbody td")
        assert [text for text, _ in cells] == [cell for row in sections[0].table[1:] for cell in row[1:]]
        assert all(inside for _, inside in cells)
        first = "[...document.querySelectorAll('#s0 tbody tr:first-child td')]"
        labels = tab.run(f"{first}.map(e => getComputedStyle(e, '::before').content)")
        assert [json.loads(label) for label in labels] == list(sections[0].table[0][1:])

    def test_the_finding_is_on_the_first_screen(self, tab, equal_page):  # noqa: F811
        for width, height in ((1280, 900), (390, 844)):
            tab.screen(width, height, touch=width < 800)
            tab.open(equal_page)
            box = tab.run("(b => [b.top, b.bottom])(document.querySelector('.lead').getBoundingClientRect())")
            assert 0 < box[0] < box[1] < height / 2
            assert "apart" in tab.run("document.querySelector('.lead').textContent")

    def test_tables_have_headers_of_rows_and_columns(self, charts_page):
        assert charts_page.run("document.querySelectorAll('th[scope=row]').length") > 2
        assert (
            charts_page.run("[...document.querySelectorAll('th')].filter(e => !e.scope || !e.textContent).length") == 0
        )
        assert charts_page.run("document.querySelector('.stack').getBoundingClientRect().width") < 400


class TestSaving:
    @pytest.fixture
    def saved(self, charts_page):
        """Click a button: the name and the bytes of the file that it saves."""
        charts_page.run(
            "window.files = []; saveBlob = async (name, blob) => {"
            "const bytes = new Uint8Array(await blob.arrayBuffer());"
            "window.files.push([name, btoa(bytes.reduce((s, b) => s + String.fromCharCode(b), ''))]); }"
        )

        def click(label):
            charts_page.run(f"window.files.length = 0; document.querySelector('[aria-label=\"{label}\"]').click()")
            charts_page.wait("window.files.length")
            name, data = charts_page.run("window.files[0]")
            return name, base64.b64decode(data)

        return click

    def test_numbers_of_every_chart(self, saved):
        wanted = {
            "Loss": 'series,line,step,loss,low,high\n"a, b",1,1,3,2.5,3.5\n"a, b",1,2,2,1.5,2.5\nc,1,1,1\n',
            "Gates": "series,layer,sigma\na,x,0.25\na,x,0.5\na,y,0.75\n",
            "Top-1": "series,group,%\na,fog,41.5\na,snow,12\nb,fog,40\nb,snow,\n",
            "CKA": "r,c,value\nr1,c1,1\nr1,c2,0.25\n",
            "Centres": 'series,line,"column, grid steps",row,low,high\nl,1,1,0\nl,1,1.25,0.5\n',
            "Cost": "series,name,GMACs,%\nd,small,1,80\nd,large,4.2,81.5\n",
        }
        for title, text in wanted.items():
            name, data = saved(f"Save {title} as CSV")
            assert (name, data.decode()) == (f"charts-{title.lower()}.csv", text)

    def test_figures_of_every_chart(self, saved, charts_page):
        charts_page.screen(1280, 900, dark=True)
        for chart in CHARTS:
            name, data = saved(f"Save {chart.title} as SVG")
            svg = data.decode()
            assert name.endswith(".svg")
            assert svg.startswith("<svg")
            assert chart.title in svg
            assert "var(" not in svg
        name, data = saved("Save Loss as PNG")
        assert name == "charts-loss.png"
        assert data.startswith(b"\x89PNG")

    def test_the_whole_page(self, saved):
        name, data = saved("Save all numbers as JSON")
        found = json.loads(data)
        assert name == "charts-numbers.json"
        assert found["finding"] == "A finding."
        assert [section["title"] for section in found["sections"]] == ["Results", "C"]
        assert found["sections"][0]["table"][1] == ["run", "93.11", "0.2"]
        assert [chart["title"] for chart in found["charts"]] == [chart.title for chart in CHARTS]

    def test_attention_maps(self, tab, equal_page):  # noqa: F811
        tab.open(equal_page)
        rows = tab.run("viewerRows(viewers[0])")
        assert rows[0] == ["model", "layer", "head", "query", "row", "column", "attention"]
        assert len(rows) == 1 + 2 * 3 * 24
        assert sum(row[-1] for row in rows[1:25]) <= 1
        svg = tab.run("viewerSvg(viewers[0])")
        assert svg.count("<image ") == 1 + 6
        assert "head 3" in svg
