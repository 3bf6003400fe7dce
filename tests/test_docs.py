"""The Python of the docs runs as printed, and the docs name files and symbols that exist."""

import re
from operator import attrgetter
from pathlib import Path

import pytest

import isomorph as iso

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "isomorph"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


FOLDERS = "|".join(["tests", "benchmarks", *sorted(path.parent.name for path in SOURCES.glob("*/__init__.py"))])
NAMED_FILE = re.compile(rf"`(?:src/isomorph/)?((?:{FOLDERS})/[a-z0-9_/]+\.py)(?::([\w.]+))?`")
"""A file below the repository or src/isomorph, and a symbol in it: `layers/gpsa.py:GPSA.forward`."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "docs/analysis.md"])
def test_python_runs_as_printed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})


def anchors(page):
    """Anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if not link.startswith("http"):
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name} links to {link}"
            assert not anchor or anchor in anchors(target), f"{page.name} links to {link}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_symbols_exist(page):
    text = page.read_text()
    if "\n| old |" in text:  # the first column lists names that are gone
        text = re.sub(r"(?m)^\|[^|]*\|", "|", text)
    for name, symbol in NAMED_FILE.findall(text):
        files = [file for file in (ROOT / name, SOURCES / name) if file.is_file()]
        assert files, f"{page.name} names {name}"
        words = set(re.findall(r"\w+", files[0].read_text()))
        assert {*filter(None, symbol.split("."))} <= words, f"{page.name} names {symbol} in {name}"
    for name in re.findall(r"\b(?:iso|isomorph)\.(?!(?:py|rules)\b)([A-Za-z_][\w.]*\w)", text):
        attrgetter(name)(iso)


def test_every_recipe_and_model_that_the_docs_name_exists():
    from isomorph.models import names
    from isomorph.recipes import RECIPES

    text = "\n".join(page.read_text() for page in PAGES)
    for recipe in re.findall(r"isomorph (?:train|recipes show) ([a-z]\w+)(?!\.)\b", text):
        assert recipe in RECIPES or recipe == "mine", recipe
    for model in re.findall(r"isomorph (?:recast|evaluate) (t?_?cifar_\w+)", text):
        assert model in names(), model


def test_every_result_file_that_the_docs_name_exists_and_none_is_orphaned():
    text = "\n".join(page.read_text() for page in PAGES)
    named = {name.split("/")[-1] for name in re.findall(r"results/[\w/]+\.json", text)}
    stored = {path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert named - stored == set(), "named in the docs, but not in benchmarks/results"
    assert stored - named == set(), "in benchmarks/results, but named on no page"


def test_every_benchmark_that_the_docs_name_exists():
    text = "\n".join(page.read_text() for page in PAGES)
    for name in set(re.findall(r"python (benchmarks/\w+\.py)", text)):
        assert (ROOT / name).is_file(), name


def test_every_page_is_reachable():
    """No page that neither the index nor the navigation leads to."""
    index, navigation = (ROOT / "docs/index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name == "index.md" or f"({name})" in index, f"{name} is not in docs/index.md"
        assert name in navigation, f"{name} is not in mkdocs.yml"


def test_no_address_or_path_of_a_machine():
    """No package index and no absolute path of the machine it was written on."""
    words = ("pypi.org/" + "simple", "file:" + "///", "/ro" + "ot/", "extra-index" + "-url", "find-" + "links")
    suffixes = {".py", ".md", ".toml", ".txt", ".json", ".yml", ".j2", ""}
    for path in ROOT.rglob("*"):
        if path.is_file() and path.suffix in suffixes and not {".venv", ".git", "runs", "site"} & set(path.parts):
            text = path.read_text(errors="ignore")
            assert not any(word in text for word in words), path
