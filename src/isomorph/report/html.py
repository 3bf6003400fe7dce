"""One self-contained HTML page: no network, no server, no files beside it."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from isomorph.errors import UserError
from isomorph.report.attention_viewer import Viewer
from isomorph.report.charts import Chart, chart_json, chart_table

COLOURS = {"heat": "magma", "split": "RdBu_r", "depth": "viridis"}
"""Colour maps of the page: attention, values around 0, shares and depth."""


class Details(NamedTuple):
    """Lines that are there when they are asked for."""

    summary: str
    lines: Sequence[str]


class ImageCard(NamedTuple):
    """A picture (a data: address), its name, and lines under it."""

    uri: str
    name: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Section:
    """A heading with any of: a paragraph, attention maps, pictures, a table (its head first), charts, a listing."""

    title: str
    text: str = ""
    table: Sequence[Sequence[str]] = ()
    listing: str = ""
    charts: Sequence[Chart] = ()
    viewer: Viewer | None = None
    shots: Sequence[ImageCard] = ()
    fold: Details | None = None


@cache
def read_asset(name: str) -> str:
    """A file of the page that lies beside this one."""
    return files("isomorph.report").joinpath("assets", name).read_text(encoding="utf-8")


def colour_table(name: str) -> str:
    """256 colours as one string of hexadecimal digits."""
    from matplotlib import colormaps  # here: commands that write no page need not wait for it

    return (colormaps[name](np.linspace(0, 1, 256))[:, :3] * 255).round().astype(np.uint8).tobytes().hex()


def render_page(title: str, lead: str, sections: Sequence[Section], footer: str = "") -> str:
    """The page as text.

    All that is given is escaped; the only script that the browser runs is the page's own, by its hash, and it can reach
    no network (Content-Security-Policy).
    """
    charts: list[dict[str, Any]] = []
    viewers: list[dict[str, Any]] = []
    blobs: list[tuple[str, str]] = []
    shown = []
    for section in sections:
        drawn = [
            {"number": len(charts) + i, "title": c.title, "numbers": chart_table(c)}
            for i, c in enumerate(section.charts)
        ]
        charts += [chart_json(chart) for chart in section.charts]
        viewer = None
        if section.viewer:
            viewer = {"number": len(viewers)}
            blobs += [(f"maps-{len(viewers)}-{name}", text) for name, text in section.viewer.blobs.items()]
            viewers.append(section.viewer.data)
        shown.append({**vars(section), "charts": drawn, "viewer": viewer})
    script = "".join(read_asset(name) for name in ("charts.js", "maps.js", "canvas.js", "viewer.js", "start.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    colours = {use: colour_table(name) for use, name in COLOURS.items()}
    environment = Environment(loader=PackageLoader("isomorph.report", "."), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("assets/page.html.j2").render(
        title=title,
        lead=lead,
        sections=shown,
        footer=footer,
        data={"charts": charts, "viewers": viewers, "colours": colours},
        blobs=blobs,
        style=Markup(read_asset("page.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def write_page(path: Path, title: str, lead: str, sections: Sequence[Section], footer: str = "") -> int:
    """Renders the page and writes it; returns its size in bytes. Raises: UserError when it cannot be written."""
    page = render_page(title, lead, sections, footer).encode("utf-8", "replace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(page)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; give --out another place") from None
    return len(page)
