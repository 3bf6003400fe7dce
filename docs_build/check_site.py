"""Check the built site: nothing is loaded from elsewhere, no link or picture is broken, no page is empty.

python docs_build/check_site.py [site]
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "object": "data",
}
"""Attributes whose address a browser fetches by itself."""

FEWEST_WORDS = 40
"""Words in the article of the shortest page that is not empty: more than a title and what introduces a list."""


class Addresses(HTMLParser):
    """Collects the addresses of a page, the names that links may point to, and the words of its article."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.names: set[str] = set()
        self.words = 0
        self._in_article = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.names |= {name for key in ("id", "name") if (name := given.get(key))}
        if (address := given.get(LOADS.get(tag, ""))) and given.get("rel") != "canonical":
            self.loaded.append(address)
        if tag == "a" and (address := given.get("href")):
            self.linked.append(address)
        if tag == "article":
            self._in_article = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self._in_article = False

    def handle_data(self, data: str) -> None:
        if self._in_article:
            self.words += len(data.split())


def problems(site: Path) -> list[str]:
    """Return a line for each address loaded from elsewhere, each link that leads nowhere and each empty page."""
    pages = {
        page: Addresses(page.read_text())
        for page in sorted(site.rglob("*.html"))
        if page.name != "404.html"
    }
    found = []
    for page, addresses in pages.items():
        name = page.relative_to(site)
        if addresses.words < FEWEST_WORDS:
            found.append(f"{name} has {addresses.words} words only: it is empty")
        found += [f"{name} loads {url}" for url in addresses.loaded if urlsplit(url).netloc]
        for url in (*addresses.loaded, *addresses.linked):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                found.append(f"{name} links to {url}, which is not there")
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].names
            ):
                found.append(f"{name} links to {url}, which has no such place")
    return found


if __name__ == "__main__":
    lines = problems(Path(sys.argv[1] if len(sys.argv) > 1 else "site").resolve())
    print(
        "\n".join(lines)
        or "every link of the site leads somewhere, no page is empty, and nothing is loaded from elsewhere"
    )
    sys.exit(bool(lines))
