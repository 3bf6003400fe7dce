"""Style of the page's scripts, styles and templates: short lines and functions, comments, indentation."""

import re
from pathlib import Path

import pytest

import isomorph
from isomorph.report.html import SCRIPTS

ASSETS = Path(isomorph.__file__).parent / "report" / "assets"
FILES = sorted(ASSETS.iterdir())
JAVASCRIPT = [path for path in FILES if path.suffix == ".js"]
STYLES = [path for path in FILES if path.suffix == ".css"]
MAX_LINE = 100
MAX_FUNCTION = 45
MAX_FILE = 400
UNWANTED = re.compile(  # words that readers of a page do not know, or that mean something else; what to write instead
    r"\b(just born|at birth|birth|born|lets? go|let go of|what the model says|what was (kept|found|said)|dials?|"
    r"pictures?|places?|looks?|beside|refuses?|mends?|as ever|of ours|so many|anew|heeds?|likeness|likenesses|"
    r"is no [a-z]+|knows no|by hand|goes on|takes up|the house)\b",
    re.IGNORECASE,
)  # initialisation; unpin; prediction; saved, result, message; gating parameters; image; position; attends to; next to;
# reject; fix; unchanged; isomorph's; N; again; obey; similarity; is not a, has no; in your own code; resumes; package
FUNCTION = re.compile(  # of a file or a class, to the line with the same indentation that closes it
    r"^(?P<indent>|  )(?!if |for |while |class )(?:(?:async )?function |const |get |async )?(?P<name>\w+)"
    r"(?: = [^;\n{]*=>| ?\([^;]*?\)) ?\{\n(?=(?P<body>.*?)^(?P=indent)\})",
    re.MULTILINE | re.DOTALL,
)


def by_name(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.name)


@by_name(FILES)
def test_lines_are_short_and_clean(path):
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    lines = text.splitlines()
    assert len(lines) <= MAX_FILE or path.suffix == ".css"
    for number, line in enumerate(lines, 1):
        assert len(line) <= MAX_LINE, f"{path.name}:{number} has {len(line)} characters"
        assert line == line.rstrip(), f"{path.name}:{number} ends with spaces"
        assert "\t" not in line, f"{path.name}:{number} has a tab"


@by_name([*FILES, *sorted(ASSETS.parent.glob("*.py"))])
def test_words_are_plain(path):
    """Templates, scripts and the texts of pages have none of the words that puzzled their readers."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        found = UNWANTED.search(line)
        assert not found, f"{path.name}:{number} has {found[0]!r}"


@by_name(FILES)
def test_indentation_is_by_two_spaces(path):
    """A line is at most one level deeper than the one before."""
    before = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        indent = len(line) - len(line.lstrip())
        if not line or line.lstrip().startswith("*"):  # continued block comments: " * ..."
            continue
        assert indent % 2 == 0, f"{path.name}:{number} is indented by {indent}"
        assert indent - before <= 2, f"{path.name}:{number} is indented by {indent} after {before}"
        before = indent


@by_name(JAVASCRIPT)
def test_functions_are_short_and_have_a_comment(path):
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[0].startswith("// ") or lines[1].startswith("// "), f"{path.name} does not say what is in it"
    found = list(FUNCTION.finditer(text))
    assert len(found) > 1 or path.name == "start.js"
    for match in found:
        before = text[: match.start()].splitlines()[-1]
        assert match["body"].count("\n") < MAX_FUNCTION, f"{path.name}: {match['name']} is long"
        inner = match[0].startswith("  const")  # a function within another one needs no comment
        assert inner or re.match(r" *(/\*\*.*\*/| ?\*/)$", before), f"{path.name}: {match['name']} has no comment"


@by_name(STYLES)
def test_a_line_of_a_style_holds_one_declaration(path):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        assert line.count(";") <= 1, f"{path.name}:{number} has several declarations"
        assert line.endswith(("{", "}", ";", ",", "*/", ":")) or not line or line[:2] in ("/*", " *"), (
            f"{path.name}:{number} has several parts"
        )


def test_a_selector_has_one_block():
    text = re.sub(r"/\*.*?\*/", "", (ASSETS / "page.css").read_text(encoding="utf-8"), flags=re.DOTALL)
    top = re.sub(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", text)
    selectors = [selector.strip() for selector in re.findall(r"([^{}]+)\{", top)]
    assert len(set(selectors)) == len(selectors)


def test_every_script_is_part_of_the_page():
    assert set(SCRIPTS) == {path.name for path in JAVASCRIPT}
