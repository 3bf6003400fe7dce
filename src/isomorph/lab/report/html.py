"""Self-contained HTML pages: one file, which loads nothing."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from isomorph.checkpoints.files import write_atomically
from isomorph.lab.report.attention_viewer import Viewer
from isomorph.lab.report.charts import Chart
from isomorph.terminal_tables import Rows

# The files of the page's script, in the order in which they use each other.
SCRIPTS = (
    "elements.js",
    "scales.js",
    "charts.js",
    "saving.js",
    "chart_view.js",
    "attention_maps.js",
    "differences.js",
    "canvas.js",
    "head_tile.js",
    "readout.js",
    "viewer.js",
    "start.js",
)
# Charts side by side on a wide screen.
MAX_CHART_COLUMNS = 3


class Details(NamedTuple):
    """Lines that unfold under a summary, as HTML's <details>."""

    summary: str
    lines: Sequence[str]


class ImageCard(NamedTuple):
    """An image (a data: URI) with its name and lines of text under it."""

    uri: str
    name: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Section:
    """A section of a page: a title with any of the other fields.

    `finding` is its result in a sentence with a number, `guide` says how to read it and explains its terms. `table` are
    rows of cells, the first one the head; `listing` is preformatted text; `charts` are drawn side by side, those with
    constant values as a line of text.

    >>> gates = iso.report.Dots("Gates", "sigma(gate)", {"T-CNN": {"layer3.0.conv1": [0.5, 0.7]}})
    >>> iso.report.Section("Gates", "Of every head.", charts=[gates]).title
    'Gates'
    """

    title: str
    text: str = ""
    table: Sequence[Sequence[str]] = ()
    listing: str = ""
    charts: Sequence[Chart] = ()
    viewer: Viewer | None = None
    images: Sequence[ImageCard] = ()
    details: Details | None = None
    finding: str = ""
    guide: str = ""


@cache
def _read_asset(name: str) -> str:
    return files("isomorph.lab.report").joinpath("assets", name).read_text(encoding="utf-8")


def render_page(title: str, lead: str, sections: Sequence[Section], footer: str = "") -> str:
    """Return the page as HTML, all texts escaped.

    Its Content-Security-Policy lets the browser run only the page's script, known by its hash, and request nothing.
    """
    charts: Rows = []
    viewers: Rows = []
    blobs: list[tuple[str, str]] = []
    contents = []
    for section in sections:
        constants = []
        drawn = []
        for chart in section.charts:
            text = chart.constant_text()
            if text:
                constants.append(text)
                continue
            drawing = chart.drawing()
            drawn.append({**drawing, "number": len(charts)})
            charts.append(drawing)
        parts = {
            "charts": drawn,
            "columns": 2 if len(drawn) == 4 else min(len(drawn), MAX_CHART_COLUMNS),
            "constants": constants,
        }
        if section.viewer:
            number = len(viewers)
            parts["viewer"] = {"number": number}
            viewers.append(section.viewer.data)
            for name, text in section.viewer.blobs.items():
                blobs.append((f"maps-{number}-{name}", text))
        contents.append({**vars(section), **parts})
    script = "".join(_read_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=PackageLoader("isomorph.lab.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=title,
        lead=lead,
        sections=contents,
        footer=footer,
        data={"charts": charts, "viewers": viewers},
        blobs=blobs,
        style=Markup(_read_asset("page.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def write_page(
    path: str | Path, title: str, lead: str, sections: Sequence[Section], footer: str = ""
) -> int:
    """Write sections as one HTML page, completely or not at all, and return its size in bytes.

    The lead, under the title, is the finding of the page in a sentence; what follows the first line of the footer is
    shown as code, with a button that copies it.

    >>> gates = iso.report.Section("Gates", "Of every head.")
    >>> size = iso.report.write_page("page.html", "My T-CNN", "All gates are 0.73.", [gates])
    >>> import os
    >>> os.path.getsize("page.html") == size
    True

    Raises: UserError when the page cannot be written.
    """
    page = render_page(title, lead, sections, footer).encode("utf-8", "replace")
    write_atomically(Path(path), lambda file: file.write_bytes(page))
    return len(page)
