"""Check the built site: no page loads anything from another address, and no link or picture is broken.

python docs_build/check_site.py [site]
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}
"""Attributes whose address a browser fetches by itself."""


class Addresses(HTMLParser):
    """Collects the addresses of a page, and the names that links may point to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.names |= {name for key in ("id", "name") if (name := given.get(key))}
        if (address := given.get(LOADS.get(tag, ""))) and given.get("rel") != "canonical":
            self.loaded.append(address)
        if tag == "a" and (address := given.get("href")):
            self.linked.append(address)


def problems(site: Path) -> list[str]:
    """Return a line for each address that is loaded from elsewhere, and each link that leads nowhere."""
    pages = {page: Addresses(page.read_text()) for page in sorted(site.rglob("*.html")) if page.name != "404.html"}
    found = []
    for page, addresses in pages.items():
        name = page.relative_to(site)
        found += [f"{name} loads {url}" for url in addresses.loaded if urlsplit(url).netloc]
        for url in (*addresses.loaded, *addresses.linked):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                found.append(f"{name} links to {url}, which is not there")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].names:
                found.append(f"{name} links to {url}, which has no such place")
    return found


if __name__ == "__main__":
    lines = problems(Path(sys.argv[1] if len(sys.argv) > 1 else "site").resolve())
    print("\n".join(lines) or "every link of the site leads somewhere, and nothing is loaded from elsewhere")
    sys.exit(bool(lines))
