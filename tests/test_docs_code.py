"""Every code block of the README and the docs runs as printed, in order, in an empty folder for each page."""

import os
import re
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from cyclopts import ValidationError

from command_line import isomorph

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(
    r"(<!-- not run: ([^>]+) -->\n)?^```(python|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL
)
"""A block, after the reason if it is not to be run."""


def blocks_of(page):
    """The blocks to run: language and text."""
    return [
        (language, text)
        for _, reason, language, text in FENCE.findall(page.read_text())
        if not reason
    ]


EVERY_PAGE = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
OTHER_TESTS = {"your-own-model.md": "test_own_model_guide.py"}
"""Pages that start from files, and the test that writes these and runs the page."""
PAGES = [page for page in EVERY_PAGE if blocks_of(page) and page.name not in OTHER_TESTS]

NEED_WEIGHTS = ("README.md", "docs/start/sixty-seconds.md", "docs/start/twenty-minutes.md")
"""Pages that use the public weights of cifar_resnet20."""


def run_shell(text, folder):
    """Run the isomorph commands of a block; any other command needs a reason not to be run."""
    for line in re.findall(
        r"^[^#\n].*", text.replace("\\\n", " "), re.MULTILINE
    ):  # a backslash continues a line
        words = [os.path.expanduser(word) for word in shlex.split(line, comments=True)]
        program, *arguments = words
        assert program == "isomorph", f"{program}: mark the block with <!-- not run: REASON -->"
        target = None
        if ">" in arguments:
            arguments, target = arguments[: arguments.index(">")], arguments[-1]
        run = isomorph(*arguments, folder=folder)
        assert run.returncode == 0, f"{shlex.join(words)}\n{run.stderr}"
        if target:
            (folder / target).write_text(run.stdout)


def page_with_what_it_needs(page):
    name = str(page.relative_to(ROOT))
    marks = [pytest.mark.data] if name in NEED_WEIGHTS else []
    return pytest.param(page, id=name, marks=marks)


RESULT = re.compile(
    r"print\(.*\)  # (True|False|\d+(?:\.\d+)?(?: \{\})?|Identity True|Linear\(.*\))(?::.*)?"
)
"""A line that prints, and says in its comment exactly what."""


def run_python(text, page, names):
    """Run a block; what it prints is what its comments say."""
    printed = {}

    def note(*values, **options):
        printed[sys._getframe(1).f_lineno] = " ".join(map(str, values))
        print(*values, **options)

    names["print"] = note
    exec(compile(text, str(page), "exec"), names)
    for number, line in enumerate(text.splitlines(), 1):
        said = RESULT.fullmatch(line)
        if said:
            assert printed[number] == said[1], line


def test_a_wrong_result_in_a_comment_is_noticed():
    run_python("x = 1\nprint(x + 1)  # 2", "page", {})
    run_python("print(2 > 1)  # True: it is", "page", {})
    with pytest.raises(AssertionError, match="3"):
        run_python("x = 1\nprint(x + 1)  # 3", "page", {})


@pytest.mark.slow
@pytest.mark.parametrize("page", list(map(page_with_what_it_needs, PAGES)))
def test_blocks_run_as_printed(page, tmp_path, monkeypatch, request):
    if request.node.get_closest_marker("data"):
        request.getfixturevalue("public_weights")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}  # README's blocks follow on one another; a guide's stand alone
    for language, text in blocks_of(page):
        if language == "python":
            run_python(text, page, names if page.name == "README.md" else dict(names))
        else:
            run_shell(text, tmp_path)


def test_the_report_in_readme_is_what_its_first_block_prints(capsys):
    text = (ROOT / "README.md").read_text()
    exec(blocks_of(ROOT / "README.md")[0][1], {})
    printed = capsys.readouterr().out
    pasted = re.search(r"(?ms)^```text\n(.*?)^```", text)[1]
    without_rounding = lambda report: re.sub(r"\d\.\d+e-\d+", "", report)  # noqa: E731
    assert without_rounding(printed).startswith(without_rounding(pasted))


def command_lines(page):
    """Every line of a page that calls isomorph, in a shell block or indented, also in blocks that are not run."""
    text = page.read_text().replace("\\\n", " ")
    blocks = [block for _, _, language, block in FENCE.findall(text) if language == "bash"]
    lines = re.findall(r"^isomorph .*", "\n".join(blocks), re.MULTILINE) + re.findall(
        r"^    (isomorph .*)", text, re.MULTILINE
    )
    return [shlex.split(line, comments=True) for line in lines]


@contextmanager
def reader_has_the_files():
    try:
        yield
    except ValidationError as error:
        if not re.search("there is no|does not exist", str(error)):
            raise


@pytest.mark.parametrize(
    "page",
    [page for page in EVERY_PAGE if command_lines(page)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_command_line_parses(page):
    from isomorph.cli.run import app

    for _, *arguments in command_lines(page):
        arguments = arguments[: arguments.index(">")] if ">" in arguments else arguments
        with reader_has_the_files():
            app.parse_args(arguments, print_error=False, exit_on_error=False)


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_fence_has_a_language_that_is_run(page):
    for language in re.findall(r"^```(\w*)$", page.read_text(), re.MULTILINE)[::2]:
        assert language in ("python", "bash", "yaml", "text", "console", "bibtex"), (
            f"{page.name}: a block of {language!r}"
        )
