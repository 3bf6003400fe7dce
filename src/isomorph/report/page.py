"""One self-contained HTML page: no network, no scripts, no files beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined


@dataclass(frozen=True)
class Section:
    """A heading with any of: a paragraph, a table (first row is the head), a figure (SVG text), a listing."""

    title: str
    text: str = ""
    table: Sequence[Sequence[str]] = ()
    figure: str = ""
    listing: str = ""


def write_page(path: Path, title: str, lead: str, sections: Sequence[Section], footer: str = "") -> None:
    """Renders the page and writes it."""
    environment = Environment(loader=PackageLoader("isomorph.report", "."), autoescape=True, undefined=StrictUndefined)
    page = environment.get_template("page.html.j2").render(title=title, lead=lead, sections=sections, footer=footer)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
