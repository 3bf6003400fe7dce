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
NOT_FUNCTIONS = {"if", "for", "while", "switch", "catch"}
FUNCTION = re.compile(
    r"(?:\bfunction\s+(?P<function>\w+)\s*\(|"  # function name(
    r"^\s*(?:async |get |static )*(?P<method>\w+)\s*\(|"  # name( at the start of a line, in a class
    r"\bconst (?P<constant>\w+) = (?=[^;]*?=>\s*\{))",  # const name = (...) => {
    re.MULTILINE,
)


def by_name(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.name)


def blank_texts(code: str) -> str:
    """Return JavaScript with the characters of strings and comments as spaces, line by line as long as before.

    Code inside of `${...}` of a template literal stays. Regular expression literals are not recognised.
    """
    out = list(code)
    literals: list[int] = []  # depth of braces at which each open `${` began
    depth, state, i = 0, "code", 0
    while i < len(code):
        pair, char = code[i : i + 2], code[i]
        if state == "code":
            start = {"//": "line", "/*": "block"}.get(pair) or {'"': '"', "'": "'", "`": "`"}.get(char)
            if start:
                state = start
                continue_at = i + len(pair if start in ("line", "block") else char)
                out[i:continue_at] = " " * (continue_at - i)
                i = continue_at
                continue
            depth += {"{": 1, "}": -1}.get(char, 0)
            if literals and char == "}" and depth == literals[-1]:
                literals.pop()
                state, out[i] = "`", " "
        elif state == "`" and pair == "${":
            literals.append(depth)
            depth, state = depth + 1, "code"
            out[i : i + 2] = "  "
            i += 2
            continue
        else:
            size = 2 if char == "\\" or (state == "block" and pair == "*/") else 1
            ended = {"line": char == "\n", "block": pair == "*/"}.get(state, char == state)
            out[i : i + size] = ["\n" if c == "\n" else " " for c in code[i : i + size]]
            state = "code" if ended else state
            i += size
            continue
        i += 1
    assert state == "code", f"{state} is not closed"
    assert depth == 0, "braces are not balanced"
    return "".join(out)


def matching(code: str, start: int) -> int:
    """Return the index of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(code)):
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(code[i], 0)
        if depth == 0:
            return i
    raise AssertionError("brackets are not balanced")


def functions(code: str) -> list[tuple[str, int, int]]:
    """Return name, first and last line (from 0) of every named function, method and multi-line arrow function."""
    code, found = blank_texts(code), []
    for match in FUNCTION.finditer(code):
        name = match["function"] or match["method"] or match["constant"]
        if name in NOT_FUNCTIONS:
            continue
        if match["constant"]:
            opening = code.index("{", code.index("=>", match.end()))
        else:
            after = matching(code, match.end() - 1) + 1
            opening = after + len(code[after:]) - len(code[after:].lstrip())
            if code[opening : opening + 1] != "{":  # a call
                continue
        first = code.count("\n", 0, match.end())
        found.append((name, first, code.count("\n", 0, matching(code, opening))))
    return found


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
def test_indentation_follows_braces(path):
    """A line within n braces is indented by n levels, or one more where it continues the line before."""
    text, depth = path.read_text(encoding="utf-8"), 0
    for number, (line, code) in enumerate(zip(text.splitlines(), blank_texts(text).splitlines(), strict=True), 1):
        if code.strip():
            level = (len(line) - len(line.lstrip())) // 2
            within = depth - (line.lstrip()[0] == "}")
            assert level - within in (0, 1), f"{path.name}:{number} is {level} levels deep within {within} braces"
        depth += code.count("{") - code.count("}")


@by_name(JAVASCRIPT)
def test_functions_are_short_and_have_a_comment(path):
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[0].startswith("// ") or lines[1].startswith("// "), f"{path.name} does not say what is in it"
    for name, first, last in functions(text):
        assert last - first + 1 <= MAX_FUNCTION, f"{path.name}: {name} has {last - first + 1} lines"
        if not lines[first].startswith(("    ", "  const")):  # functions of a file and methods, not inner functions
            assert re.match(r" *(/\*\*.*\*/| ?\*/)$", lines[first - 1]), f"{path.name}: {name} has no comment"


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


class TestChecker:
    def test_strings_comments_and_templates_hide_their_braces(self):
        code = 'a = "{"; // {\n/* { */ b = `{ ${f({c: "}"})} {`;\n'
        assert blank_texts(code).split() == ["a", "=", ";", "b", "=", "f({c:", "})", ";"]

    @pytest.mark.parametrize("code", ["f({)", "`${a", '"a'])
    def test_what_is_not_closed_is_an_error(self, code):
        with pytest.raises(AssertionError):
            blank_texts(code)

    def test_functions_are_found_with_their_lines(self):
        code = (
            "function a({b}, [c]) {\n  if (b) {\n    f(`}`);\n  }\n}\n"
            "class D {\n  get e() {\n    g();\n  }\n}\n"
            "const h = x => {\n  return x;\n};\nconst i = x => x;\n"
        )
        assert functions(code) == [("a", 0, 4), ("e", 6, 8), ("h", 10, 12)]
