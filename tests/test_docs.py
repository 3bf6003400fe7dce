"""The docs name files and symbols that exist, their links lead somewhere, and generated pages are up to date."""

import json
import os
import re
import sys
import tomllib
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

import pytest

import isomorph

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "isomorph"
BUILT = ROOT / "docs" / "changelog.md"  # a copy of CHANGELOG.md, made with the site
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted(page for page in (ROOT / "docs").rglob("*.md") if page != BUILT)

FOLDERS = "|".join(
    ["tests", "benchmarks", *sorted(path.parent.name for path in SOURCES.glob("*/__init__.py"))]
)
NAMED_FILE = re.compile(rf"`(?:src/isomorph/)?((?:{FOLDERS})/[a-z0-9_/]+\.py)(?::([\w.]+))?`")
"""A file below the repository or src/isomorph, and a symbol in it: `layers/gated/gpsa.py:GPSA.forward`."""


def anchors(page):
    """Anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`(?!\])", "", page.read_text())
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)]*)\)", text):
        if not link.startswith(("http:", "https:")):
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name} links to {link}"
            assert not anchor or anchor in anchors(target), f"{page.name} links to {link}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_symbols_exist(page):
    text = page.read_text()
    if "\n| old |" in text:  # the first column lists names that are gone
        text = re.sub(r"(?m)^\|[^|]*\|", "|", text)
    text = re.sub(r"(?m)^.*`.* at commit [0-9a-f]{7}\b.*$", "", text)  # files of an older commit
    for name, symbol in NAMED_FILE.findall(text):
        files = [file for file in (ROOT / name, SOURCES / name) if file.is_file()]
        assert files, f"{page.name} names {name}"
        words = set(re.findall(r"\w+", files[0].read_text()))
        assert {*filter(None, symbol.split("."))} <= words, f"{page.name} names {symbol} in {name}"
    for name in re.findall(
        r"\b(?:iso|isomorph)\.(?!(?:py|rules|tasks|md)\b)([A-Za-z_][\w.]*\w)", text
    ):
        resolve_name(f"isomorph.{name}")


def test_every_recipe_and_model_that_the_docs_name_exists():
    from isomorph.lab.recipes import RECIPES
    from isomorph.models import names

    text = "\n".join(page.read_text() for page in PAGES)
    for recipe in re.findall(r"isomorph (?:train|recipes show) ([a-z]\w+)(?!\.)\b", text):
        assert recipe in RECIPES or recipe == "mine", recipe
    for model in re.findall(r"isomorph (?:recast|evaluate) (t?_?cifar_\w+)", text):
        assert model in names(), model


def test_every_result_file_that_the_docs_name_exists_and_none_is_orphaned():
    text = "\n".join(page.read_text() for page in PAGES)
    for name in set(re.findall(r"python (benchmarks/\w+\.py)", text)):
        assert (ROOT / name).is_file(), name
    named = {name.split("/")[-1] for name in re.findall(r"results/[\w/]+\.json", text)}
    stored = {path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert named - stored == set(), "named in the docs, but not in benchmarks/results"
    assert stored - named == set(), "in benchmarks/results, but named on no page"


def navigation(entries):
    """The pages of the site's navigation."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else navigation(value)


def test_every_page_is_in_the_navigation_once():
    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(navigation(site["nav"])) == sorted(pages | generate.BUILT.keys())


def test_every_picture_is_shown_and_light():
    text = "\n".join(page.read_text() for page in PAGES)
    pictures = list((ROOT / "docs" / "pictures").iterdir())
    for picture in (*pictures, *(ROOT / "docs" / "methods").glob("*.svg")):
        assert f"{picture.name})" in text, f"no page shows {picture.name}"
    for picture in pictures:
        assert picture.stat().st_size < 150 * 1024, f"{picture.name} is larger than 150 KB"


sys.path.insert(0, str(ROOT / "docs_build"))
import check_site  # noqa: E402
import generate  # noqa: E402


@pytest.mark.parametrize("path", [path for path in generate.PAGES if path != "reference/models.md"])
def test_generated_pages_are_up_to_date(path):
    written = (ROOT / "docs" / path).read_text()
    assert written == generate.PAGES[path](), f"run python docs_build/generate.py {path}"


@pytest.mark.parametrize("path", [path for path in generate.PAGES if "/api/" in path])
def test_no_page_of_the_api_is_empty(path):
    """Each public name of a namespace has its entry, wherever its `__all__` is put together."""
    text = (ROOT / "docs" / path).read_text()
    shown = re.findall(r"(?m)^::: ([\w.]+)$", text)
    namespace = isomorph if path.endswith("/isomorph.md") else getattr(isomorph, Path(path).stem)
    entries = []
    for name in namespace.__all__:
        if not isinstance(getattr(namespace, name), ModuleType) and not name.isupper():
            entries.append(f"{namespace.__name__}.{name}")
    assert shown
    assert sorted(shown) == sorted(entries)


def test_a_page_of_the_site_without_content_is_found(tmp_path):
    page = "<html><body><nav>{words}</nav><article><h1>API</h1><p>Names.</p>{body}</article></body></html>"
    words = "word " * 50
    (tmp_path / "full.html").write_text(
        page.format(words="", body=f"<h2>recast</h2><p>{words}</p>")
    )
    (tmp_path / "empty.html").write_text(page.format(words=words, body=""))
    assert check_site.problems(tmp_path) == ["empty.html has 2 words only: it is empty"]


def test_no_address_or_path_of_a_machine():
    """No package index and no absolute path of the machine it was written on."""
    words = (
        "pypi.org/" + "simple",
        "file:" + "///",
        "/ro" + "ot/",
        "extra-index" + "-url",
        "find-" + "links",
    )
    suffixes = {".py", ".md", ".toml", ".txt", ".json", ".yml", ".j2", ".html", ""}
    for folder, inner, files in os.walk(ROOT):
        inner[:] = set(inner) - {".venv", ".git", "runs", "site"}
        for path in (Path(folder, file) for file in files):
            if path.is_file() and path.suffix in suffixes:
                text = path.read_text(errors="ignore")
                assert not any(word in text for word in words), path


def test_the_readme_fits_on_one_page():
    """100 lines, its figures from the result file that their command writes."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    stored = json.loads((ROOT / "benchmarks/results/before_after.json").read_text())
    for milliseconds in stored["milliseconds"].values():
        assert f"{milliseconds:.1f}" in text
